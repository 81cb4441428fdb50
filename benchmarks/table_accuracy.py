"""How far is what is predicted from what was measured, for the runs of some sources in a table?

    python benchmarks/table_accuracy.py RUNS.csv.gz --source Stone-ResearchLife/xMem [--source ...]
    python benchmarks/table_accuracy.py published.csv --of time --source facebookresearch/pycls [--source ...]

A line for each source, mode and card. Weights that have seen a source are judged too kindly.
"""

from __future__ import annotations

import math
import statistics
import sys
import warnings
from collections.abc import Sequence

from _record import parser_of, show

from perfguard import load_predictor
from perfguard_research.csv_rows import read_table
from perfguard_research.evaluate import Evaluated, evaluate, report

OF_MEMORY = ("source, mode, card", "runs, with those out of memory", "error, mean / median", "90% interval: coverage / width",
             "out of memory, caught", "fitting, pruned at even chance")  # fmt: skip
OF_TIME = ("source, mode, card", "runs", "error, mean / median", "predicted over measured, median", "90% interval: coverage")


def memory_lines(results: Sequence[Evaluated]) -> list[list[str]]:
    """Errors of memory, and what is caught and pruned."""
    known = [(result.row, result.prediction.peak_memory) for result in results if result.row and result.prediction]
    lines = []
    for group in report(results):
        memory = group["memory"]
        if memory is None:
            continue
        name = [group[part] for part in ("source", "mode", "gpu")]
        shares = ("-" if share is None else f"{share:.1%}" for share in (group["oom_caught"], group["fitting_pruned"]))
        error = f"{memory['mean']:.1%} / {memory['median']:.1%}"
        own = [estimate for row, estimate in known if [row.source, row.mode, row.gpu] == name]
        widths = [(high - low) / estimate.median for estimate in own for low, high in [estimate.interval()]]
        interval = f"{memory['coverage']:.0%} / {statistics.median(widths):.0%}"
        lines.append([" ".join(name), f"{group['rows']:,}", error, interval, *shares])
    return lines


def time_lines(results: Sequence[Evaluated]) -> list[list[str]]:
    """Errors of step times, and in which direction they are."""
    lines = []
    for group in report(results):
        time, name = group["time"], [group[part] for part in ("source", "mode", "gpu")]
        if time is None:
            continue
        ratios = [
            math.log(result.prediction.step_time.median / result.row.step_time_s)
            for result in results
            if result.prediction and result.row and result.row.step_time_s
            if [result.row.source, result.row.mode, result.row.gpu] == name
        ]
        error, middle = f"{time['mean']:.1%} / {time['median']:.1%}", math.exp(statistics.median(ratios))
        lines.append([" ".join(name), f"{time['rows']:,}", error, f"{middle:.2f}", f"{time['coverage']:.0%}"])
    return lines


def main() -> None:
    """Predict the runs and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("table")
    parser.add_argument("--source", required=True, action="append")
    parser.add_argument("--of", choices=("memory", "time"), default="memory")
    parser.add_argument("--predictor", default="guardnet")
    parser.add_argument("--name", help="of the table that is recorded")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    columns, rows = read_table(arguments.table)
    reading = {"memory": "peak_memory_mib", "time": "step_time_ms"}[arguments.of]
    chosen = [row for row in rows if row["source"] in arguments.source and row[reading] + row["status"] != "ok"]
    results = evaluate(columns, chosen, arguments.table, load_predictor(arguments.predictor))
    judged = [result for result in results if result.prediction is not None]
    if not judged:  # an empty table would replace the one that is recorded
        sys.exit(f"None of {len(chosen)} rows has a prediction. {next((result.error for result in results), '')}")
    if arguments.of == "memory":
        show(arguments.name or "memory-driver", OF_MEMORY, memory_lines(judged), record=arguments.record)
    else:
        show(arguments.name or "sources-never-learnt", OF_TIME, time_lines(judged), record=arguments.record)


if __name__ == "__main__":
    main()
