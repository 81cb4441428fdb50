"""Errors of step times on held-out runs, by what people do: the network, the mode, the arithmetic, and the batch or the card.

    python benchmarks/uses.py TABLE... --cache .perfguard-cache

The tables are those of the weights for time (`models/perfguard_models/cards/step-time.md`), in the order of their training.
With its cache it takes a minute, else an hour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from _record import parser_of, show

from perfguard_models.features.step import STEP_FEATURES
from perfguard_models.step_time import StepTime
from perfguard_research.dataset import Run, dataset_of, without_time
from perfguard_research.leaderboard import entries, predictions_of

_SPLITS = {"family": "family never seen", "source": "source never seen", "gpu": "card never seen"}
_CONVOLUTIONS, _PRODUCTS = ("time_conv", "time_conv_backward"), ("time_matmul", "time_attention")
_LARGEST_SMALL_BATCH = 16
_GRAPHICS_CARDS = ("gtx", "rtx", "titan", "quadro")


def use_of(run: Run) -> str:
    """What was run. Empty: a single operator, or on a CPU."""
    if run.is_single or run.gpu == "cpu":
        return ""
    convolutions, products = (sum(run.view["sums"][STEP_FEATURES.index(name)] for name in names)
                              for names in (_CONVOLUTIONS, _PRODUCTS))  # fmt: skip
    mode = "training" if run.mode == "train" else "inference"
    arithmetic = "float32 or TF32" if run.setting.precision == "fp32" else "half precision"
    if convolutions > products:
        size = f"batch of at most {_LARGEST_SMALL_BATCH}" if run.batch_size <= _LARGEST_SMALL_BATCH else "larger batch"
        return f"convolutional network, {mode}, {arithmetic}, {size}"
    cards = "GeForce and workstation cards" if run.gpu.startswith(_GRAPHICS_CARDS) else "data-centre cards"
    return f"transformer, {mode}, {arithmetic}, {cards}"


def in_words(entry: pd.Series[Any] | None) -> str:
    """Mean and median error, and the share inside the 90% interval."""
    return "-" if entry is None else f"{entry['mean']:.0%} / {entry['median']:.0%}; {entry['coverage']:.0%}"


def main() -> None:
    """Show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--most-operators", type=int, default=8_000)
    parser.add_argument("--most-runs", type=int)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    arguments = parser.parse_args()
    cache, name = arguments.cache, StepTime.name
    most = {"most_operators": arguments.most_operators, "most_runs": arguments.most_runs}
    runs = dataset_of(arguments.tables, StepTime.views, cache=cache, **most, unwanted=without_time).runs
    found = predictions_of(name, {}, runs, [*_SPLITS], cache=cache, jobs=2)
    known = {(entry["group"], entry["split"]): entry for _, entry in entries(runs, found, use_of).iterrows() if entry["group"]}
    lines = []
    for use in sorted({use for use, _ in known}):
        own = [known.get((use, split)) for split in _SPLITS]
        lines.append([use, f"{max(entry['rows'] for entry in own if entry is not None):,}", *map(in_words, own)])
    show("uses", ["what people do", "runs", *_SPLITS.values()], lines, record=arguments.record)


if __name__ == "__main__":
    main()
