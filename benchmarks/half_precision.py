"""Allocated memory of Transformers' language models in half precision: traced, and as their authors read it.

    python benchmarks/half_precision.py hfdocs.csv.gz

The readings are those of Transformers' model pages: a forward and a backward pass in pure float16 with the sum of the logits as
loss, on two cards, with attention written out and fused. Their script keeps the outputs of the last step. Nothing was fitted to
them. Their Transformers is of 2024, and these classes have changed since. Inference is left out, as its class
is not known.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from _record import parser_of, show

from perfguard import TensorSpec, Workload, resolve_device, trace
from perfguard_research.published import TRANSFORMERS

GPUS = {"rtx2060": "rtx2060", "rtx3080ti-mobile-16gb": "rtx3080"}
"""The laptop's card has the same kernels as the desktop's."""


def sum_of_logits(output: Any) -> torch.Tensor:
    """The script's loss."""
    loss: torch.Tensor = output.logits.sum()
    return loss


def traced_bytes(row: Any) -> int:
    """The most bytes that are alive in the step of a row."""
    kind, sizes = TRANSFORMERS[row.model]
    of_model = getattr(transformers, kind)
    config = of_model.config_class(**sizes, attn_implementation=row.attention)
    with torch.device("meta"):
        model = of_model(config)
    workload = Workload(
        model.train(),
        {"input_ids": TensorSpec((int(row.batch), int(row.seq_or_image)), "int64")},
        loss=sum_of_logits,
        precision="fp16",
        batch_on="device",
    )
    return trace(workload, target=resolve_device(GPUS[row.gpu])).peak_live_bytes


def main() -> None:
    """Show the errors by model."""
    parser = parser_of(__doc__)
    parser.add_argument("table", type=Path)
    arguments = parser.parse_args()
    rows = pd.read_csv(arguments.table)
    rows = rows[rows["model"].isin(TRANSFORMERS) & rows["memory_bytes"].notna() & rows["gpu"].isin(GPUS)]
    rows = rows[rows["mode"] == "forward_backward"]
    errors: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows.itertuples():
        errors[row.model, row.attention].append(traced_bytes(row) / row.memory_bytes - 1)
    lines = [
        [
            *key,
            str(len(own)),
            f"{statistics.fmean(map(abs, own)):.1%}",
            f"{statistics.fmean(own):+.1%}",
            f"{min(own):+.1%} to {max(own):+.1%}",
        ]
        for key, own in sorted(errors.items())
    ]
    every = [error for own in errors.values() for error in own]
    lines.append(["all", "", str(len(every)), f"{statistics.fmean(map(abs, every)):.1%}", f"{statistics.fmean(every):+.1%}", ""])
    columns = ["model", "attention", "rows", "mean error", "bias", "from, to"]
    show("half-precision", columns, lines, record=arguments.record)


if __name__ == "__main__":
    main()
