"""Rows of a language model that many people measured, as a table of runs.

    python -m perfguard_research.published cs336_more.csv.gz --out cs336.csv
    perfguard evaluate cs336.csv

The model is the plain decoder of Stanford's course CS336, whose sizes each row has. Rows whose card, precision, batch or mode is
not known are left out, and those that contradict others of their author. The authors' optimizer is AdamW in a Python loop, as
`tables` takes it for this model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

from perfguard_research.tables import MIB

_GPUS = {
    "rtx4090": "rtx4090", "rtx5090": "rtx5090", "a10": "a10", "l20": "l20", "a800-sxm-80gb": "a800-sxm-80gb",
    "a100": "a100-sxm-80gb", "a100-80gb": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "h100-sxm": "h100-sxm-80gb",
}  # fmt: skip
"""Which card a name stands for. An A100 or H100 without more is taken for the SXM module that clouds rent."""
_MODES = {"forward (grad on)": "infer", "forward_backward": "forward_backward", "train": "train"}
_PRECISIONS = ("fp32", "amp-bf16", "amp-fp16")
_SIZES = {"vocab": "vocab_size", "d_model": "d_model", "num_layers": "num_layers", "num_heads": "num_heads", "d_ff": "d_ff"}

_MOST_APART = 1.5
"""Times of one configuration by one author that are further apart than this factor are not of one configuration."""
_DOUBTED_AUTHOR = "damek/cs336-assignment2-systems"
"""Of this author, only eager float32 is kept. Its bfloat16 takes as long as its float32 (1.15 times faster in the middle of 20
configurations above 100 ms, another author's 2.5 times), and some compiled models are four times as fast as eager ones, others
just as fast."""


def runs_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that can be built again and believed, with the columns of a table of runs."""
    known = rows["gpu"].isin(_GPUS) & rows["mode"].isin(_MODES) & rows["precision"].isin(_PRECISIONS)
    known &= pd.to_numeric(rows["batch"], errors="coerce").notna() & pd.to_numeric(rows["seq_or_image"], errors="coerce").notna()
    known &= ~rows["note"].fillna("").str.contains("may be the phase alone")
    known &= (rows["source"] != _DOUBTED_AUTHOR) | ((rows["precision"] == "fp32") & ~rows["compiled"])
    rows = rows[known]
    alike = ["source", "gpu", "mode", "precision", "optimizer", "batch", "seq_or_image", "compiled", "config"]
    of_each = rows.groupby(alike, dropna=False)["step_ms"]
    rows = rows[~(of_each.transform("max") > _MOST_APART * of_each.transform("min"))]
    length = rows["seq_or_image"].astype(int)
    sizes = [
        {new: json.loads(config)[old] for old, new in _SIZES.items()} | {"context_length": tokens, "rope_theta": 10000}
        for config, tokens in zip(rows["config"], length, strict=True)
    ]
    return pd.DataFrame(
        {
            "source": rows["source"],
            "model": "cs336:BasicsTransformerLM",
            "config": [json.dumps(one) for one in sizes],
            "family": "cs336-lm",
            "mode": rows["mode"].map(_MODES),
            "gpu": rows["gpu"].map(_GPUS),
            "num_gpus": 1,
            "parallel": "none",
            "precision": rows["precision"],
            "compiled": rows["compiled"],
            "optimizer": ["adamw" if mode == "train" else "none" for mode in rows["mode"]],
            "batch_size": rows["batch"].astype(int),
            "input": [json.dumps({"seq_len": tokens}) for tokens in length],
            "step_time_ms": rows["step_ms"],
            "peak_memory_mib": rows["memory_bytes"] / MIB,
            "memory_kind": ["allocated" if kind == "allocated" else "unknown" for kind in rows["memory_kind"]],
            "status": rows["status"].str.partition(" ")[0],
        }
    )


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = pd.read_csv(arguments.table)
    runs = runs_of(rows)
    runs.to_csv(arguments.out, index=False)
    print(f"{len(runs)} of {len(rows)} rows")


if __name__ == "__main__":
    main()
