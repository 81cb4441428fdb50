"""Do the predictions hold on the GPU at hand? Measures 40 configurations in at most five minutes, and prints both sides.

    make gpu-check                                # the same as:
    python benchmarks/gpu_check.py [--gpu auto] [--configurations 40] [--minutes 5] [--space mlp,ops] [--keep rows.csv]

Runs may take 16 GiB at most (or what the card has, if that is less), so that a huge card is not filled for minutes. The exit
status is 1 if memory is off by more than 25% in the median, or half of the runs that did not fit were not foreseen.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perfguard import load_predictor
from perfguard.exceptions import PerfGuardError
from perfguard_research.collect.loop import CPU_MEMORY_BYTES, collect, collecting_device
from perfguard_research.collect.spaces import SPACES
from perfguard_research.csv_rows import read_table
from perfguard_research.evaluate import Evaluated, evaluate

_MEMORY_BYTES = 16 * 2**30
_MIB = 2**20
_WORST_MEDIAN = 0.25
_LEAST_CAUGHT = 0.5


def main() -> int:
    """Measure, predict, print; 1 if they do not agree, 2 if nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="auto", help='"auto" or "cpu"')
    parser.add_argument("--configurations", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--space", default=",".join(SPACES))
    parser.add_argument("--predictor", default="guardnet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="ROWS.csv", help="keep the rows there")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = arguments.keep or Path(folder) / "rows.csv"
        try:
            device = collecting_device(arguments.gpu)
            limit = CPU_MEMORY_BYTES if device.kind == "cpu" else min(_MEMORY_BYTES, device.memory_bytes)
            report = collect(
                path, device=device, spaces=arguments.space.split(","), minutes=arguments.minutes,
                max_rows=arguments.configurations, memory_limit=limit, seed=arguments.seed, on_note=console.print,
            )  # fmt: skip
        except PerfGuardError as error:
            console.print(str(error), markup=False)
            return 2
        columns, rows = read_table(path)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        results = evaluate(columns, rows, path, load_predictor(arguments.predictor))
    left_out = f"; left out: {dict(report.left_out)}" if report.left_out else ""
    console.print(f"{report.rows.total()} rows in {report.seconds:.0f} s{left_out}", markup=False)
    console.print(both_sides(rows, results))
    text, agrees = verdict(results)
    console.print(text, highlight=False)
    return 0 if agrees else 1


def both_sides(rows: Sequence[dict[str, str]], results: Sequence[Evaluated]) -> Table:
    """One line a run."""
    table = Table(title="measured → predicted")
    for heading in ("network", "batch", "step", "status", "memory MiB", "off by", "P(OOM)", "time ms", "off by", "remark"):
        table.add_column(heading, justify="left" if heading in ("network", "step", "status", "remark") else "right")
    for row, result in zip(rows, results, strict=True):
        step = " ".join(filter(None, [row["mode"], row["precision"], row["layout"].replace("nchw", "")]))
        if result.row is None or result.prediction is None or result.device is None:
            table.add_row(row["model"][:28], row["batch_size"], step, row["status"], *[""] * 5, result.error)
            continue
        memory, time, p_oom = result.prediction.peak_memory, result.prediction.step_time, result.prediction.p_oom
        table.add_row(
            row["model"][:28],
            row["batch_size"],
            step,
            row["status"],
            *_pair(result.row.peak_memory_bytes if row["status"] == "ok" else None, memory.median, 1 / _MIB),
            f"{p_oom(result.device.memory_bytes):.2f}",
            *_pair(result.row.step_time_s, time.median, 1e3),
            row["note"],
        )
    return table


def _pair(measured: float | None, predicted: float, unit: float) -> tuple[str, str]:
    if measured is None:
        return f"- → {predicted * unit:.4g}", ""
    return f"{measured * unit:.4g} → {predicted * unit:.4g}", f"{predicted / measured - 1:+.0%}"


def verdict(results: Sequence[Evaluated]) -> tuple[str, bool]:
    """The medians in a sentence, and whether they are good enough."""
    known = [(r.row, r.prediction, r.device) for r in results if r.row is not None and r.prediction is not None]
    ok: list[tuple[Any, Any]] = [(row, prediction) for row, prediction, _ in known if row.status == "ok"]
    memory = [abs(p.peak_memory.median / row.peak_memory_bytes - 1) for row, p in ok if row.peak_memory_bytes]
    time = [abs(p.step_time.median / row.step_time_s - 1) for row, p in ok if row.step_time_s]
    foreseen = [p.p_oom(d.memory_bytes) > 0.5 for row, p, d in known if row.status == "oom" and d is not None]
    parts = [f"memory is off by {statistics.median(memory):.1%}" if memory else "no memory was measured"]
    parts.append(f"time by {statistics.median(time):.1%}" if time else "no time was measured")
    text = f"In the median {', '.join(parts)}; {sum(foreseen)} of {len(foreseen)} runs that did not fit were foreseen."
    agrees = bool(memory) and statistics.median(memory) <= _WORST_MEDIAN
    return text, agrees and (not foreseen or sum(foreseen) >= _LEAST_CAUGHT * len(foreseen))


if __name__ == "__main__":
    sys.exit(main())
