"""What each part of the step-time predictor earns: errors on held-out runs by rounds of messages, with and without trees.

    python benchmarks/network_parts.py TABLE... --cache .perfguard-cache --variants "no trees"

TABLEs are tables of runs and of transformers (docs/tables.md). Each variant learns from the same folds. A cell has the mean error
with all sources alike, and then of all runs. What the seeds of a variant differ by is chance.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _record import parser_of, show

from perfguard_research.dataset import Run, dataset_of
from perfguard_research.intervals import FoldPredictions
from perfguard_research.leaderboard import error_of, predictions_of
from perfguard_research.learners import learner_class

_NAME = "step-time"
_SPLITS = {"family": "family never seen", "source": "source never seen", "gpu": "card never seen"}
_ROUNDS = {"no messages": 0, "one round of messages": 1, "two rounds of messages": 2}
_SEEDS = 0, 1, 2
_VARIANTS: Mapping[str, dict[str, Any]] = {
    f"{name}, {of_trees}, seed {seed}": {"rounds": rounds, "seed": seed, **settings}
    for of_trees, settings in {"with trees": {}, "no trees": {"trees": 0}}.items()
    for name, rounds in _ROUNDS.items()
    for seed in _SEEDS
}


def in_words(runs: Sequence[Run], found: FoldPredictions) -> str:
    """Mean error with all sources alike, and of all runs. Steps on GPUs."""
    by_source: defaultdict[str, list[float]] = defaultdict(list)
    for fold, predicted in found:
        for position, index in enumerate(fold.judge):
            run = runs[index]
            if "time" in run.labels and not run.is_single and run.gpu != "cpu":
                by_source[run.source].append(error_of("time", float(predicted["time"][position]), run.labels["time"]))
    alike = statistics.fmean(map(statistics.fmean, by_source.values()))
    return f"{alike:.1%}; {statistics.fmean(error for errors in by_source.values() for error in errors):.1%}"


def main() -> None:
    """Show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--variants", default="", help="those whose name has this text (default: all)")
    arguments = parser.parse_args()
    runs = dataset_of(arguments.tables, learner_class(_NAME).views, cache=arguments.cache).runs
    lines = []
    for name, settings in _VARIANTS.items():
        if arguments.variants not in name:
            continue
        found = predictions_of(_NAME, settings, runs, [*_SPLITS], cache=arguments.cache, jobs=2)
        lines.append([name, *(in_words(runs, found[split, _NAME]) for split in _SPLITS)])
    show("network-parts", ["what predicts", *_SPLITS.values()], lines, record=arguments.record)


if __name__ == "__main__":
    main()
