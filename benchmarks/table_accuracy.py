"""How far is the memory that is predicted from the memory that was measured, for the runs of some sources in a table?

    python benchmarks/table_accuracy.py RUNS.csv.gz --source Stone-ResearchLife/xMem [--source ...]

The report of `perfguard evaluate`, with a line for each source, mode and card. Weights that have seen a source are judged too
kindly.
"""

from __future__ import annotations

import statistics
import warnings

from _record import parser_of, show

from perfguard import load_predictor
from perfguard_research.csv_rows import read_table
from perfguard_research.evaluate import evaluate, report

COLUMNS = ("source, mode, card", "runs, with those out of memory", "error, mean / median", "90% interval: coverage / width",
           "out of memory, caught", "fitting, pruned at even chance")  # fmt: skip


def main() -> None:
    """Predict the runs and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("table")
    parser.add_argument("--source", required=True, action="append")
    parser.add_argument("--predictor", default="guardnet")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    columns, rows = read_table(arguments.table)
    chosen = [row for row in rows if row["source"] in arguments.source and row["peak_memory_mib"] + row["status"] != "ok"]
    results = evaluate(columns, chosen, arguments.table, load_predictor(arguments.predictor))
    judged = [result for result in results if result.prediction is not None]
    known = [(result.row, result.prediction.peak_memory) for result in judged if result.row and result.prediction]
    lines = []
    for group in report(judged):
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
    show("memory-driver", COLUMNS, lines, record=arguments.record)


if __name__ == "__main__":
    main()
