"""Published measurements as a table of runs, each source by its own reader.

    python -m perfguard_research.published cs336_more.csv.gz hfdocs.csv.gz lamikr.csv.gz pycls.csv.gz vae.csv.gz --out FILE.csv
    python -m perfguard_research.published aic_operators.csv.gz --out OPERATORS.csv
    perfguard evaluate FILE.csv

A row whose network, card, precision or mode cannot be rebuilt is left out, and so is one that contradicts others of its author or
repeats another source.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from perfguard.devices import resolve_device
from perfguard.exceptions import TableError
from perfguard.graph import work_s
from perfguard_research.csv_rows import Row
from perfguard_research.operators import operator_of
from perfguard_research.tables import MIB

_GPUS = {
    "rtx4090": "rtx4090", "rtx5090": "rtx5090", "a10": "a10", "l20": "l20", "a800-sxm-80gb": "a800-sxm-80gb",
    "a100": "a100-sxm-80gb", "a100-80gb": "a100-sxm-80gb", "a100-40gb": "a100-sxm-40gb", "h100": "h100-sxm-80gb",
    "h100-sxm": "h100-sxm-80gb", "titan_rtx": "titan-rtx", "v100-sxm-16gb": "v100-sxm-16gb", "rtx2060": "rtx2060",
    "rtx3080ti-mobile-16gb": "rtx3080ti-laptop", "rtx3070": "rtx3070", "rtx3080": "rtx3080", "rtx3090": "rtx3090",
    "rtx4070ti": "rtx4070ti", "gtx1080ti": "gtx1080ti", "rtx2080ti": "rtx2080ti", "rtx2070maxq": "rtx2070maxq",
    "rtx2080maxq": "rtx2080maxq", "rtx2080supermaxq": "rtx2080supermaxq", "rtx3080-laptop": "rtx3080-laptop",
    "rtxa4000": "rtxa4000", "rtxa5000": "rtxa5000", "rtxa5500": "rtxa5500", "rtxa6000": "rtxa6000",
    "quadrortx5000": "quadrortx5000", "quadrortx8000": "quadrortx8000", "a100-pcie-40gb": "a100-pcie-40gb",
    "a100-sxm-40gb": "a100-sxm-40gb", "a100-pcie-80gb": "a100-pcie-80gb", "a100-sxm-80gb": "a100-sxm-80gb",
}  # fmt: skip
"""Which card a name stands for. An A100 or H100 without more is taken for the SXM module that clouds rent."""


def of_cs336(rows: pd.DataFrame) -> pd.DataFrame:
    """The plain decoder of Stanford's course CS336, in many sizes, by many authors.

    Their optimizer is AdamW in a Python loop, as `tables` takes it for this model.
    """
    modes = {"forward (grad on)": "infer", "forward_backward": "forward_backward", "train": "train"}
    known = rows["mode"].isin(modes) & rows["precision"].isin(("fp32", "amp-bf16", "amp-fp16"))
    known &= pd.to_numeric(rows["batch"], errors="coerce").notna() & pd.to_numeric(rows["seq_or_image"], errors="coerce").notna()
    known &= ~rows["note"].fillna("").str.contains("may be the phase alone")
    # Of this author only eager float32 is kept. The bfloat16 takes as long as the float32 (1.15 times faster in the middle of 20
    # configurations above 100 ms, another author's 2.5 times), and some compiled models are four times as fast, others not.
    is_doubted = rows["source"] == "damek/cs336-assignment2-systems"
    known &= ~is_doubted | ((rows["precision"] == "fp32") & ~rows["compiled"])
    rows = rows[known]
    alike = ["source", "gpu", "mode", "precision", "optimizer", "batch", "seq_or_image", "compiled", "config"]
    of_each = rows.groupby(alike, dropna=False)["step_ms"]
    rows = rows[~(of_each.transform("max") > 1.5 * of_each.transform("min"))]  # times further apart are not of one configuration
    length = rows["seq_or_image"].astype(int)
    names = {"vocab": "vocab_size", "d_model": "d_model", "num_layers": "num_layers", "num_heads": "num_heads", "d_ff": "d_ff"}
    sizes = [
        {new: json.loads(config)[old] for old, new in names.items()} | {"context_length": tokens, "rope_theta": 10000}
        for config, tokens in zip(rows["config"], length, strict=True)
    ]
    return rows.assign(
        model="cs336:BasicsTransformerLM",
        config=[json.dumps(one) for one in sizes],
        family="cs336-lm",
        mode=rows["mode"].map(modes),
        optimizer=["adamw" if mode == "train" else "none" for mode in rows["mode"]],
        input=[json.dumps({"seq_len": tokens}) for tokens in length],
    )


TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert-base-v1": ("AlbertForMaskedLM", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "distilbert-base-uncased": ("DistilBertForMaskedLM", {}),
    "microsoft/biogpt": ("BioGptForCausalLM", {}),
    "gpt2-large": ("GPT2LMHeadModel", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "EleutherAI/pythia-410m-deduped": (
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
            "vocab_size": 50304,
        },
    ),
}  # fmt: skip
"""Class and sizes of each hub id, from its config.json; the rest are the class's defaults."""


def of_hfdocs(rows: pd.DataFrame) -> pd.DataFrame:
    """Transformers' model pages: a training step of language models without optimizer. The loss is the sum of the logits.

    Inference is left out. That of language models has an unclear unit. Vision transformers are said to run in float32. They took
    as long for eight images as for one, at 2.4 times the A100's peak of float32: they ran in another precision.
    """
    rows = rows[rows["model"].isin(TRANSFORMERS) & (rows["mode"] == "forward_backward")]
    classes, sizes = zip(*rows["model"].map(TRANSFORMERS), strict=True)
    return rows.assign(
        model=[f"hf:{name}" for name in classes],
        config=[
            json.dumps(own | {"attn_implementation": attention}) for own, attention in zip(sizes, rows["attention"], strict=True)
        ],
        family=rows["model"].str.rpartition("/")[2].str.partition("-")[0],
        optimizer="none",
        input=[json.dumps({"seq_len": int(size), "labels": False}) for size in rows["seq_or_image"]],
        framework="torch" + rows["torch_version"].astype(str),
    )


def of_lamikr(rows: pd.DataFrame) -> pd.DataFrame:
    """torchvision's networks on a TITAN RTX, the images copied inside the clock. Its other NVIDIA cards repeat `runs.csv`."""
    rows = rows[rows["gpu"] == "titan_rtx"]
    return rows.assign(
        config="{}",
        family=rows["model"].str.extract(r":([a-z]+)", expand=False),
        batch=12,
        precision=rows["precision"].str.partition(" ")[0],  # the card has no TF32
        optimizer="none",
        cudnn_benchmark=True,
        input='{"image": 224}',
        includes="h2d",
        framework="torch1.4",  # as ryujaehun's, of which it is a fork
    )


def of_pycls(rows: pd.DataFrame) -> pd.DataFrame:
    """Networks of pycls in inference, on each of eight V100 at once. timm has all but one, under other names."""
    rows = rows[(rows["mode"] == "infer") & (rows["model"] != "ResNeXt-152")]
    return rows.assign(
        model=rows["model"].map(_timm_name),
        config="{}",
        family=rows["model"].str.partition("-")[0].str.lower(),
        cudnn_benchmark=True,
        input=[json.dumps({"image": size}) for size in rows["seq_or_image"]],
        framework="torch1.6",
    )


def _timm_name(name: str) -> str:
    """ "RegNetX-1.6GF" → "timm:regnetx_016", which counts in 100 MFLOP."""
    kind, _, size = name.lower().partition("-")
    if flops := re.fullmatch(r"([\d.]+)(mf|gf)", size):
        size = f"{round(float(flops[1]) * {'mf': 1, 'gf': 1000}[flops[2]] / 100):03d}"
    names = {"efficientnet": f"efficientnet_{size}", "resnet": f"resnet{size}", "resnext": f"resnext{size}_32x4d"}
    return f"timm:{names.get(kind, f'{kind}_{size}')}"


_VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
"""stable-diffusion-v1-5, vae/config.json."""


def of_vae(rows: pd.DataFrame) -> pd.DataFrame:
    """The autoencoder of Stable Diffusion 1.5 in float16, whole images. Of SDXL's the precision is not said."""
    rows = rows[rows["model"].str.endswith("SD1.5") & (rows["method"] == "plain")]
    side = rows["seq_or_image"].str.partition("x")[0].astype(int)
    half = rows["mode"].str.removeprefix("infer ")
    return rows.assign(
        model="diffusers:AutoencoderKL." + half,
        config=json.dumps(_VAE),
        family="vae",
        mode="infer",
        precision="fp16",
        input=[
            json.dumps({"latent": at // 8} if name == "decode" else {"image": at}) for at, name in zip(side, half, strict=True)
        ],
    )


def of_lambda_logs(rows: pd.DataFrame) -> pd.DataFrame:
    """ResNet-50 on synthetic images and BERT, as Lambda's machines of 2020 to 2022 trained them.

    Those of later machines are medians in `runs.csv`. The other workloads are NVIDIA's own code, of which only the names are
    known. A loader of real images may be slower than the card, so such rows are left out.
    """
    is_synthetic = rows["data"].isin(("synthetic", "syntetic"))
    is_known = (rows["workload"] == "bert_base_squad") | ((rows["workload"] == "resnet50") & is_synthetic)
    rows = rows[is_known & rows["table_value"].isna()]
    return rows.assign(
        family=["bert" if name.startswith("bert") else "resnet" for name in rows["workload"]],
        input=rows["seq_or_image"],
        framework="torch" + rows["torch_version"].astype(str),
    )


def operators_of_aic(rows: pd.DataFrame) -> pd.DataFrame:
    """aiconfigurator's products and attention in bfloat16, as a table of operators.

    Each was replayed with the same operands. What moves less than the cache holds was therefore read from the cache, which a step
    of training does not do: such rows are left out, unless their arithmetic takes longer than their traffic to the memory.
    """
    rows = rows[rows["sample"] == "latency"]
    words = rows.astype(object).where(rows.notna(), "").astype(str).to_dict("records")
    return rows[[_is_read_from_memory(row) for row in words]]


def _is_read_from_memory(row: Row) -> bool:
    """Whether an operator that is replayed has more to move than the cache holds, or is bound by its arithmetic."""
    try:
        operator = operator_of(row)
    except TableError:
        return False
    device = resolve_device(row["gpu"])
    graph = operator.graph("infer")
    arithmetic_s, traffic_s = work_s(graph, device)
    return graph.ops[0].bytes_read + graph.ops[0].bytes_written > device.l2_bytes or arithmetic_s[0] > traffic_s[0]


OPERATOR_READERS: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {"aic_operators": operators_of_aic}
READERS: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "cs336_more": of_cs336, "hfdocs": of_hfdocs, "lamikr": of_lamikr, "pycls": of_pycls, "vae": of_vae,
    "lambda_logs": of_lambda_logs,
}  # fmt: skip
"""By the stem of the table's file: those of single operators, and those of runs."""


def runs_of(rows: pd.DataFrame, reader: Callable[[pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
    """The rows on one known card that ``reader`` can build again and believes, with the columns of a table of runs."""
    rows = rows[rows["gpu"].isin(_GPUS) & (rows["gpus"].fillna(1) == 1)]
    rows = reader(rows)
    empty = pd.Series("", index=rows.index)
    return pd.DataFrame(
        {
            **{name: rows[name] for name in ("source", "model", "config", "family", "mode", "precision", "optimizer", "input")},
            **{name: rows.get(name, empty) for name in ("compiled", "cudnn_benchmark", "includes", "framework")},
            "note": "results/" + rows["machine"] if "machine" in rows else empty,
            "gpu": rows["gpu"].map(_GPUS),
            "num_gpus": 1,
            "parallel": "none",
            "batch_size": rows["batch"].astype(int),
            "step_time_ms": rows["step_ms"],
            "peak_memory_mib": rows["memory_bytes"] / MIB,
            "memory_kind": ["allocated" if kind == "allocated" else "unknown" for kind in rows["memory_kind"]],
            "status": rows["status"].str.partition(" ")[0],
        }
    )


def main() -> None:
    """Write the table."""
    names = (*READERS, *OPERATOR_READERS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", help=f"named as the sources: {', '.join(names)}")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    stems = {path: path.name.partition(".")[0] for path in arguments.tables}
    for path, name in stems.items():
        if name not in names:
            parser.error(f"no reader for {path}: known are {', '.join(names)}")
    if len({name in OPERATOR_READERS for name in stems.values()}) > 1:
        parser.error("a table has runs or single operators: write them one after the other")
    found = []
    for path, name in stems.items():
        rows = pd.read_csv(path, low_memory=False)
        found.append(OPERATOR_READERS[name](rows) if name in OPERATOR_READERS else runs_of(rows, READERS[name]))
        print(f"{name}: {len(found[-1])} of {len(rows)} rows")
    pd.concat(found).to_csv(arguments.out, index=False)


if __name__ == "__main__":
    main()
