"""How near do the replays come to what the driver read on a real GPU? No predictor, no training: physics and one constant.

    python benchmarks/replay_accuracy.py TABLE.csv.gz --gpu a100-pcie-40gb

The table is in the workload format (docs/tables.md): measured runs of timm models. Each row is traced; the errors are means and
medians of |estimate / measured - 1|. The constant (context, cuDNN's workspaces) is one number for all rows, the median of what is
missing. Needs timm and torchvision.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from _record import parser_of, show
from rich.progress import track

from perfguard import trace
from perfguard.exceptions import PerfGuardError
from perfguard_research.dataset import usable_rows
from perfguard_research.tables import MeasuredRow

COLUMNS = ("family", "rows", "live", "live + constant", "reserved", "reserved + constant")
_FAMILIES = 8


class Compared(NamedTuple):
    """One row: what was read, and what the replays say, in bytes."""

    family: str
    measured: float
    live: float
    reserved: float


def compare(row: MeasuredRow) -> Compared | str:
    """Trace one row of the table; a text if it cannot be traced."""
    try:
        model = row.make_model()
        assert model is not None
        graph = trace(row.workload(model), target=row.device)
    except PerfGuardError as error:
        return f"{row.model}: {error}"
    assert row.peak_memory_bytes is not None
    return Compared(row.family, row.peak_memory_bytes, graph.peak_live_bytes, graph.reserved_bytes(row.device))


def errors(estimates: Iterable[float], rows: Sequence[Compared]) -> tuple[float, float]:
    """Mean and median of |estimate / measured - 1|."""
    relative = [abs(estimate / row.measured - 1) for estimate, row in zip(estimates, rows, strict=True)]
    return statistics.fmean(relative), statistics.median(relative)


def main() -> None:
    """Trace the rows and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--gpu", default="a100-pcie-40gb")
    parser.add_argument("--mode", choices=("train", "infer"), default="train")
    parser.add_argument("--rows", type=int, help="a random sample of this many rows (default: all)")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    everything = usable_rows(arguments.table)[0]
    table = [
        row
        for row in everything
        if (row.gpu, row.mode, row.status) == (arguments.gpu, arguments.mode, "ok") and row.peak_memory_bytes
    ]
    random.Random(0).shuffle(table)
    table = table[: arguments.rows]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        progress = track(pool.map(compare, table, chunksize=4), total=len(table), transient=True, disable=not sys.stderr.isatty())
        results = list(progress)
    rows = [result for result in results if isinstance(result, Compared)]
    for problem in sorted({result for result in results if isinstance(result, str)}):
        print(f"not traced: {problem}", file=sys.stderr)
    show("replay", COLUMNS, by_family(rows), record=arguments.record)


def by_family(rows: Sequence[Compared]) -> list[list[str]]:
    """Return the errors of the largest families and of all rows, mean / median, and last the constants."""
    constants = [statistics.median(row.measured - estimate(row) for row in rows) for estimate in (_live, _reserved)]
    families: dict[str, list[Compared]] = defaultdict(list)
    for row in rows:
        families[row.family].append(row)
    largest = sorted(families, key=lambda name: -len(families[name]))[:_FAMILIES]
    lines = []
    for name, group in [*((name, families[name]) for name in largest), ("all", list(rows))]:
        cells = []
        for estimate, constant in ((_live, 0.0), (_live, constants[0]), (_reserved, 0.0), (_reserved, constants[1])):
            mean, median = errors((estimate(row) + constant for row in group), group)
            cells.append(f"{mean:.1%} / {median:.1%}")
        lines.append([name, f"{len(group):,}", *cells])
    live, reserved = (f"{constant / 2**20:,.0f} MiB" for constant in constants)
    return [*lines, ["constant", "", "", live, "", reserved]]


def _live(row: Compared) -> float:
    return row.live


def _reserved(row: Compared) -> float:
    return row.reserved


if __name__ == "__main__":
    main()
