"""Do the intervals hold? Coverage of what was held out, by a calibration that has not seen it either.

    python benchmarks/reliability.py TABLE... --cache .perfguard-cache --plot docs/images/reliability.png

Uses the folds that `perfguard train` or `perfguard leaderboard` left in the cache, or makes them. For each fold by family the
calibration is fitted to the other folds, and the runs are counted that lie within their central intervals, from 10% to 98%.
Single operators are left out: they are many, and calibrated for themselves.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
from _record import parser_of, show

from perfguard_research.intervals import CALIBRATED, judged
from perfguard_research.leaderboard import label_of, predictions

_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)


def main() -> None:
    """Print the coverage of 90% intervals by group, and draw the diagram."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--predictor", default="memory-forest")
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--most-operators", type=int, default=60_000)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    runs, found = predictions(
        arguments.tables, {arguments.predictor: {}}, ["family"], cache=arguments.cache, jobs=arguments.jobs,
        most_operators=arguments.most_operators,
    )  # fmt: skip
    lines = judged(runs, "family", found["family", arguments.predictor])
    lines = lines[lines["target"].isin(CALIBRATED) & lines["measured"].notna()]
    scores: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for line in lines.itertuples():
        if not runs[line.run].is_single:
            z = abs(line.measured - line.predicted) / line.log_sigma
            scores[line.target, label_of(runs[line.run])].append((z, line.log_sigma))
    rows = []
    for (target, name), values in sorted(scores.items()):
        inside = np.mean([z <= 1.645 for z, _ in values])
        width = statistics.median(math.exp(1.645 * sigma) - math.exp(-1.645 * sigma) for _, sigma in values)
        rows.append([target, name, f"{len(values):,}", f"{inside:.1%}", f"{width:.1%}"])
    show("reliability", ["quantity", "runs", "rows", "inside the 90% interval", "median width"], rows, record=arguments.record)
    if arguments.plot is not None:
        draw(scores, arguments.plot)


def draw(scores: dict[tuple[str, str], list[tuple[float, float]]], path: Path) -> None:
    """Share of the runs within the central interval against the share that it promises."""
    from matplotlib.figure import Figure

    normal = statistics.NormalDist()
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", label="as promised")
    for target, colour in (("memory", "tab:blue"), ("time", "tab:orange")):
        z = np.array([value for (name, _), values in scores.items() if name == target for value, _ in values])
        if len(z):
            shares = [float(np.mean(z <= normal.inv_cdf(0.5 + level / 2))) for level in _LEVELS]
            axes.plot(_LEVELS, shares, marker="o", color=colour, label=f"{target}, {len(z):,} runs")
    axes.set(xlabel="share that the interval promises", ylabel="share of runs within it", xlim=(0, 1), ylim=(0, 1))
    axes.set_title("Families that were held out")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
