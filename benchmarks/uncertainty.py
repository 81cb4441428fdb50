"""Where should an interval's width come from? Four ways, each made to hold by split-conformal calibration, on held-out families.

    python benchmarks/uncertainty.py TABLE... --cache .perfguard-cache

All four read the sums of a step and correct physics (replay and roofline) in logarithms. Boosted trees of the median carry the
first two: "plain" gives all runs of a group one width, "members" widens it by how far trees of other seeds are apart (what
GuardNet does). "quantiles" are boosted trees of the 5% and the 95% quantile (conformalized quantile regression, Romano et al.
2019). "gaussian" is a network with a head for the mean and one for the standard deviation. The score of each is calibrated by
group on the other folds; the column "alone" is the coverage before that.
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from perfguard_models.learner import column, sums_table
from perfguard_training.dataset import Run, dataset_of, folds
from perfguard_training.leaderboard import label_of
from perfguard_training.learner import labels_of

Array = npt.NDArray[np.float64]
_START = {"memory": "log_reserved", "time": "log_roofline"}
_MEMBERS = 4
_TREES = 150
_EPOCHS = 60
_FLOOR = 0.02
_COVERAGE = 0.9
_Z = statistics.NormalDist().inv_cdf(0.95)


class Interval(NamedTuple):
    """Where the logarithm of measured over physics should lie, and the unit in which both ends move when it is calibrated.

    Shapes: (n,)
    """

    low: Array
    high: Array
    unit: Array


def boosted(x: Array, y: Array, quantile: float, seed: int = 0) -> Any:
    """Boosted trees of one quantile."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(
        loss="quantile", quantile=quantile, max_iter=_TREES, max_leaf_nodes=16, max_features=0.3, min_samples_leaf=15,
        random_state=seed,
    )  # fmt: skip
    return model.fit(x, y)


def by_members(x: Array, y: Array, new: Array) -> dict[str, Interval]:
    """One width for all, and one from the spread of trees of several seeds, around the same mean."""
    said = np.stack([boosted(x, y, 0.5, seed).predict(new) for seed in range(_MEMBERS)])
    middle, spread = said.mean(0), np.hypot(said.std(0), _FLOOR)
    return {
        "plain": Interval(middle, middle, np.ones(len(new))),
        "members": Interval(middle - _Z * spread, middle + _Z * spread, spread),
    }


def by_quantiles(x: Array, y: Array, new: Array) -> dict[str, Interval]:
    """Between trees of two quantiles."""
    low, high = (boosted(x, y, quantile).predict(new) for quantile in (0.05, 0.95))
    return {"quantiles": Interval(np.minimum(low, high), np.maximum(low, high), np.ones(len(new)))}


def by_gaussian(x: Array, y: Array, new: Array) -> dict[str, Interval]:
    """A network's mean and standard deviation, by maximum likelihood."""
    torch.manual_seed(0)
    mean, scale = x.mean(0), np.maximum(x.std(0), 1e-3)
    inputs, wanted = (torch.from_numpy(a).float() for a in (np.clip((x - mean) / scale, -6, 6), y[:, None]))
    network = nn.Sequential(nn.Linear(x.shape[1], 64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _EPOCHS)
    for _ in range(_EPOCHS):
        for chosen in torch.randperm(len(inputs)).split(256):
            middle, log_sigma = network(inputs[chosen]).chunk(2, dim=1)
            loss = nn.functional.gaussian_nll_loss(middle, wanted[chosen], (2 * log_sigma.clamp(-5, 2)).exp())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    network.eval()
    with torch.inference_mode():
        middle, log_sigma = network(torch.from_numpy(np.clip((new - mean) / scale, -6, 6)).float()).double().numpy().T
    sigma = np.exp(np.clip(log_sigma, -5, 2))
    return {"gaussian": Interval(middle - _Z * sigma, middle + _Z * sigma, sigma)}


WAYS: tuple[Callable[[Array, Array, Array], dict[str, Interval]], ...] = (by_members, by_quantiles, by_gaussian)


def conformal(scores: Array) -> float:
    """How many units the ends must move so that 90% of the scores hold."""
    rank = min(len(scores) - 1, math.ceil((len(scores) + 1) * _COVERAGE) - 1)
    return float(np.sort(scores)[rank])


class Judged(NamedTuple):
    """One interval of one run that was held out."""

    fold: int
    score: float
    """Units that the nearer end is from the measurement: positive outside, negative inside."""
    low: float
    high: float
    unit: float


def judged(runs: list[Run], target: str) -> dict[tuple[str, str], list[Judged]]:
    """By way and group, all runs with the label, each predicted without its family."""
    found: defaultdict[tuple[str, str], list[Judged]] = defaultdict(list)
    x = sums_table(runs).astype(np.float64)
    y = labels_of(runs, target) - column(runs, _START[target])
    for number, fold in enumerate(folds(runs, "family")):
        learn = [index for index in fold.learn if not math.isnan(y[index])]
        judge = [index for index in fold.judge if not math.isnan(y[index])]
        if not learn or not judge:
            continue
        for way in WAYS:
            for name, (low, high, unit) in way(x[learn], y[learn], x[judge]).items():
                scores = np.maximum(low - y[judge], y[judge] - high) / unit
                for at, index in enumerate(judge):
                    one = Judged(number, float(scores[at]), float(low[at]), float(high[at]), float(unit[at]))
                    found[name, label_of(runs[index])].append(one)
    return found


def line(some: list[Judged]) -> tuple[str, str, str]:
    """Coverage before and after calibration on the other folds, and the median width after it."""
    inside, widths = [], []
    for fold in {one.fold for one in some}:
        moved = conformal(np.array([one.score for one in some if one.fold != fold]))
        for one in some:
            if one.fold == fold:
                inside.append(one.score <= moved)
                widths.append(math.exp(one.high + moved * one.unit) - math.exp(one.low - moved * one.unit))
    alone = statistics.fmean(one.score <= 0 for one in some)
    return f"{alone:.0%}" if alone else "-", f"{statistics.fmean(inside):.1%}", f"{statistics.median(widths):.0%}"


def main() -> None:
    """Print a table for each quantity."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    runs = dataset_of(arguments.tables, "sums", cache=arguments.cache, jobs=arguments.jobs).runs
    for target in _START:
        found = judged(runs, target)
        table = Table(title=f"{target}: 90% intervals, families held out, {datetime.date.today()}")
        for heading in ("runs", "way", "rows", "alone", "coverage", "median width"):
            table.add_column(heading, justify="left" if heading in ("runs", "way") else "right")
        for (way, group), some in sorted(found.items(), key=lambda item: item[0][::-1]):
            table.add_row(group, way, f"{len(some):,}", *line(some))
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
