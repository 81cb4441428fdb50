"""How far is the memory that is predicted from the memory that was measured, for the runs of one source in a table?

    python benchmarks/table_accuracy.py RUNS.csv.gz --source Stone-ResearchLife/xMem

The report of `perfguard evaluate`, with a line for each card. Weights that have seen the source are judged too kindly.
"""

from __future__ import annotations

import warnings

from _record import parser_of, show

from perfguard import load_predictor
from perfguard.tables import evaluate, read_table, report

COLUMNS = ("card", "runs, with those out of memory", "error, mean / median", "inside the 90% interval", "out of memory, caught",
           "fitting, pruned at even chance")  # fmt: skip


def main() -> None:
    """Predict the runs and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("table")
    parser.add_argument("--source", required=True)
    parser.add_argument("--predictor", default="guardnet")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    columns, rows = read_table(arguments.table)
    own = [row for row in rows if row["source"] == arguments.source]
    groups = report(evaluate(columns, own, arguments.table, load_predictor(arguments.predictor)))
    lines = []
    for group in groups:
        memory = group["memory"]
        shares = ("-" if share is None else f"{share:.1%}" for share in (group["oom_caught"], group["fitting_pruned"]))
        error = f"{memory['mean']:.1%} / {memory['median']:.1%}"
        lines.append([group["gpu"], f"{group['rows']:,}", error, f"{memory['coverage']:.0%}", *shares])
    show("memory-driver", COLUMNS, lines, record=arguments.record)


if __name__ == "__main__":
    main()
