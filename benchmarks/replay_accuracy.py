"""How near do the replays come to what the driver read on a real GPU? No predictor, no training: physics and one constant.

    python benchmarks/replay_accuracy.py TABLE.csv.gz --gpu a100-pcie-40gb

The table is in the workload format (docs/tables.md): measured runs of timm models. Each row is traced; the errors are means and
medians of |estimate / measured - 1|. The constant (context, cuDNN's workspaces) is one number for all rows, the median of what is
missing. Needs timm and torchvision.
"""

from __future__ import annotations

import argparse
import datetime
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from perfguard import resolve_device, trace
from perfguard.exceptions import PerfGuardError
from perfguard.tables import WorkloadRow, model_on_meta, read_table, workload_row


class Compared(NamedTuple):
    """One row: what was read, and what the replays say, in bytes."""

    family: str
    measured: float
    live: float
    reserved: float


def compare(row: WorkloadRow) -> Compared | str:
    """Trace one row of the table; a text if it cannot be traced."""
    try:
        model = model_on_meta(row)
        assert model is not None
        graph = trace(row.workload(model), target=resolve_device(row.gpu))
    except PerfGuardError as error:
        return f"{row.model}: {error}"
    assert row.peak_memory_bytes is not None
    return Compared(row.family, row.peak_memory_bytes, graph.peak_live_bytes, graph.reserved_bytes)


def errors(estimates: Iterable[float], rows: Sequence[Compared]) -> tuple[float, float]:
    """Mean and median of |estimate / measured - 1|."""
    relative = [abs(estimate / row.measured - 1) for estimate, row in zip(estimates, rows, strict=True)]
    return statistics.fmean(relative), statistics.median(relative)


def main() -> None:
    """Trace the rows and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--gpu", default="a100-pcie-40gb")
    parser.add_argument("--mode", choices=("train", "infer"), default="train")
    parser.add_argument("--rows", type=int, help="a random sample of this many rows (default: all)")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    everything = map(workload_row, read_table(arguments.table)[1])
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
    show(rows, arguments.gpu)


def show(rows: Sequence[Compared], gpu: str) -> None:
    """Print errors by family and of all rows."""
    constants = [statistics.median(row.measured - estimate(row) for row in rows) for estimate in (_live, _reserved)]
    table = Table(title=f"{len(rows)} rows, {gpu}, {datetime.date.today()}")
    headings = ("family", "rows", "live", "live + constant", "reserved", "reserved + constant")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "family" else "right")
    by_family: dict[str, list[Compared]] = defaultdict(list)
    for row in rows:
        by_family[row.family].append(row)
    largest = sorted(by_family, key=lambda name: -len(by_family[name]))[:30]
    for name, group in [*((name, by_family[name]) for name in largest), ("all", list(rows))]:
        cells = []
        for estimate, constant in ((_live, 0.0), (_live, constants[0]), (_reserved, 0.0), (_reserved, constants[1])):
            mean, median = errors((estimate(row) + constant for row in group), group)
            cells.append(f"{mean:.1%} / {median:.1%}")
        table.add_row(name, str(len(group)), *cells)
    console = Console(width=130)
    console.print(table)
    mib = [constant / 2**20 for constant in constants]
    console.print(f"mean / median relative error; constants: live {mib[0]:.0f} MiB, reserved {mib[1]:.0f} MiB")


def _live(row: Compared) -> float:
    return row.live


def _reserved(row: Compared) -> float:
    return row.reserved


if __name__ == "__main__":
    main()
