"""How far from its roofline each kind of operator runs, on each card, with two roofs and with three.

    python benchmarks/third_roof.py operators.csv.gz ops.csv.gz

TABLEs are tables of single operators (docs/tables.md): Vidur's, in half precision on the A100 and the H100, and NeuSight's, in
float32 on five cards. The third roof is what the multiprocessors issue (`perfguard.graph.roofline.issue_s`). Its rates are from
Vidur's half. Kernels above 60 us are compared, so that a launch is a small part of each.

A cell is the median share of the measured time that the roofs explain. The last columns leave each card out: an inefficiency of
the kind, from the other cards, carries the roofs over to this one. They are the mean error, with all cards alike.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from _record import parser_of, show

from perfguard.graph import TraceCache, work_s
from perfguard.graph.roofline import issue_s
from perfguard_research.dataset import usable_rows
from perfguard_research.operators import Operator

_KINDS = {
    "add": "addition", "relu": "ReLU", "tanh": "tanh", "gelu": "GELU", "silu_mul": "SiLU and product", "rope": "rotary embedding",
    "embedding": "embedding", "rms_norm": "RMS norm", "layer_norm": "layer norm", "ln": "layer norm", "softmax": "softmax",
}  # fmt: skip
_SHORTEST_S = 60e-6
_LAUNCH_S = {True: 30e-6, False: 3e-6}
"""Seconds of the clock that are no part of the kernel: of a launch by the host, or of the kernel's start."""
_FEWEST = 10


class _Kernel(NamedTuple):
    kind: str
    dtype: str
    gpu: str
    log_two: float
    """Log of the measured time over the slower of arithmetic and traffic."""
    log_three: float
    """The same over the third roof too, where it is the slowest."""


def kernels_of(table: Path, most: int) -> list[_Kernel]:
    """At most ``most`` kernels of a table, drawn at random."""
    rows = [
        row
        for row in usable_rows(table)[0]
        if isinstance(row.network, Operator) and row.network.name in _KINDS and (row.step_time_s or 0) > _SHORTEST_S
    ]
    found = []
    for row in random.Random(0).sample(rows, min(most, len(rows))):
        assert isinstance(row.network, Operator)
        assert row.step_time_s is not None
        graph = row.graph(None, TraceCache(), row.device)
        two_s = float(np.maximum(*work_s(graph, row.device))[0])
        three_s = max(two_s, float(issue_s(graph, row.device)[0]))
        kernel_s = row.step_time_s - _LAUNCH_S[row.network.launched]
        logs = np.log([kernel_s / two_s, kernel_s / three_s]).tolist()
        found.append(_Kernel(_KINDS[row.network.name], row.network.dtype, row.gpu, *logs))
    return found


def error_on_others(kernels: pd.DataFrame, column: str) -> float:
    """Mean relative error of one kind on a card by the inefficiency of the others, with all cards alike."""
    by_card = kernels.groupby("gpu")[column]
    medians = by_card.median()
    errors = [np.exp(medians.drop(gpu).mean() - own).sub(1).abs().mean() for gpu, own in by_card]
    return float(np.mean(errors))


def main() -> None:
    """Show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--most", type=int, default=6000, help="kernels of each table (default: 6000)")
    arguments = parser.parse_args()
    kernels = pd.DataFrame([kernel for table in arguments.tables for kernel in kernels_of(table, arguments.most)])
    numbers = kernels.groupby(["kind", "dtype", "gpu"])["kind"].transform("size")
    kernels = kernels[numbers >= _FEWEST]
    lines = []
    for kind, own in kernels.groupby("kind", sort=False):
        shares = np.exp(-own.groupby(["gpu", "dtype"], sort=True)[["log_two", "log_three"]].median())
        cells = [f"{gpu} {dtype} {two:.2f} → {three:.2f}" for (gpu, dtype), two, three in shares.itertuples()]
        errors = [f"{error_on_others(own, column):.1%}" for column in ("log_two", "log_three")]
        lines.append([str(kind), f"{len(own):,}", "; ".join(cells), *errors])
    columns = ["kind", "kernels", "share of the time explained: two roofs → three", "card left out: two roofs", "three roofs"]
    show("third-roof", columns, lines, record=arguments.record)


if __name__ == "__main__":
    main()
