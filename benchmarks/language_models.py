"""Step times of a language model of 2025 and 2026 that many people measured and no weights have seen, by card and mode.

    python -m perfguard_research.published cs336_more.csv.gz --out cs336.csv
    python benchmarks/language_models.py cs336.csv

Another author's runs of the same model on an A100 are among the training rows.
"""

from __future__ import annotations

import statistics
import warnings
from collections import defaultdict

from _record import parser_of, show

from perfguard import load_predictor
from perfguard.predictor import Estimate
from perfguard_research.csv_rows import read_table
from perfguard_research.evaluate import evaluate, score


def cells_of(pairs: list[tuple[float, Estimate]]) -> list[str]:
    """Number, mean and median error, and the share inside the 90% interval, of measured and predicted times."""
    found = score(pairs)
    assert found is not None
    return [str(len(pairs)), f"{found['mean']:.1%}", f"{found['median']:.1%}", f"{found['coverage']:.0%}"]


def main() -> None:
    """Predict the runs and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("table")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    columns, rows = read_table(arguments.table)
    found: defaultdict[tuple[str, str], list[tuple[float, Estimate]]] = defaultdict(list)
    by_source: defaultdict[str, list[float]] = defaultdict(list)
    for result in evaluate(columns, rows, arguments.table, load_predictor()):
        if result.row is not None and result.row.step_time_s and result.prediction is not None:
            pair = result.row.step_time_s, result.prediction.step_time
            found[result.row.gpu, result.row.mode].append(pair)
            by_source[result.row.source].append(abs(pair[1].median / pair[0] - 1))
    lines = [[*key, *cells_of(pairs)] for key, pairs in sorted(found.items())]
    lines.append(["all", "", *cells_of([pair for pairs in found.values() for pair in pairs])])
    alike = statistics.fmean(map(statistics.fmean, by_source.values()))
    lines.append([f"{len(by_source)} authors alike", "", "", f"{alike:.1%}", "", ""])
    show("language-models", ["card", "mode", "runs", "mean error", "median", "inside"], lines, record=arguments.record)


if __name__ == "__main__":
    main()
