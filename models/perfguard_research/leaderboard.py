"""All predictors on the same rows, each evaluated on rows that it was not fitted to.

Splits are by family, by source, by GPU and at random. In each fold every predictor learns from the same runs and is evaluated on
the same others. Predictions are kept, so an interrupted leaderboard continues where it stopped. The table has the errors of
memory and time, and the share of failed runs that would have been caught. It also has the accuracy on which of two neighbouring
batches fails.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.progress import track

from perfguard.risk_budget import SMALL_CHANCE
from perfguard_models.features import FeatureSet
from perfguard_models.learner import share_of
from perfguard_research.dataset import Fold, Run, dataset_of, folds
from perfguard_research.intervals import FoldPredictions, SplitPredictions, judged
from perfguard_research.learners import identity_of, learner_class
from perfguard_research.memory_forest import bracketed

_QUANTITIES = {"memory": "memory", "time": "time", "gpu_util": "GPU utilisation", "sm_active": "SM activity"}
_Z = statistics.NormalDist().inv_cdf(0.95)
_AT_RISK = statistics.NormalDist().inv_cdf(1 - SMALL_CHANCE)
_ERRORS = [
    "split", "group", "quantity", "predictor", "rows", "mean", "median", "p90", "spread", "coverage", "width",
]  # fmt: skip
_FITS = [
    "split", "group", "predictor", "failed", "caught", "fitting", "pruned", "caught_at_risk", "pruned_at_risk", "pairs",
    "balanced",
]  # fmt: skip
_FEWEST_JUDGED = 20
"""Runs of a fold; a fit for fewer (five transformers on one card, say) is not worth its minutes."""


def predictions(
    tables: Sequence[Path],
    predictors: dict[str, dict[str, Any]],
    splits: Sequence[str],
    *,
    cache: Path,
    jobs: int = 2,
    most_operators: int = 60_000,
    most_runs: int | None = None,
) -> tuple[list[Run], SplitPredictions]:
    """The runs of ``tables``, and for each split and predictor the folds with the predictions for the test runs.

    ``predictors`` has the settings by name. ``cache`` is a folder for graphs and predictions. See :func:`dataset_of`.
    """
    by_views: defaultdict[tuple[FeatureSet, ...], list[str]] = defaultdict(list)
    for name in predictors:
        by_views[learner_class(name).views].append(name)
    runs = list[Run]()
    found = dict[tuple[str, str], FoldPredictions]()
    for views, names in by_views.items():
        seen = dataset_of(tables, views, cache=cache, jobs=jobs, most_operators=most_operators, most_runs=most_runs).runs
        runs = runs or seen
        for name in names:
            found |= predictions_of(name, predictors[name], seen, splits, cache=cache, jobs=jobs)
    return runs, {(split, name): found[split, name] for split in splits for name in predictors if (split, name) in found}


def predictions_of(
    name: str, settings: dict[str, Any], runs: Sequence[Run], splits: Sequence[str], *, cache: Path, jobs: int
) -> SplitPredictions:
    """The folds of each split with one predictor's predictions. They are kept in ``cache`` by all that they depend on."""
    kind = learner_class(name)
    identity = identity_of(name, settings, runs)
    placed: list[tuple[str, Fold, Path]] = []
    for split in splits:
        for fold in folds(runs, split):
            learn, judge = ([at for at in indices if runs[at].table in kind.tables] for indices in (fold.learn, fold.judge))
            own = Fold(fold.name, learn, judge)
            if learn and len(judge) >= _FEWEST_JUDGED:
                digest = hashlib.sha256(repr((identity, own)).encode()).hexdigest()[:16]
                placed.append((split, own, cache / "predictions" / f"{name}-{split}-{digest}.pt"))
    missing = [(fold, place) for _, fold, place in placed if not place.is_file()]
    if missing:
        (cache / "predictions").mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(jobs, initializer=_prepare, initargs=(runs,)) as pool:
            done = pool.map(functools.partial(_fit_and_predict, name, settings), missing)
            for _ in track(done, total=len(missing), description=name, disable=not sys.stderr.isatty()):
                pass
    found: defaultdict[tuple[str, str], FoldPredictions] = defaultdict(list)
    for split, fold, place in placed:
        stored = torch.load(place, weights_only=True)
        found[split, name].append((fold, {target: value.numpy() for target, value in stored.items()}))
    return dict(found)


_runs: Sequence[Run] = ()
"""The runs of a process that fits."""


def _prepare(runs: Sequence[Run]) -> None:
    global _runs
    _runs = runs
    torch.set_num_threads(1)


def _fit_and_predict(name: str, settings: dict[str, Any], work: tuple[Fold, Path]) -> None:
    fold, place = work
    learner = learner_class(name)(**settings)
    learner.fit([_runs[index] for index in fold.learn])
    predicted = learner.predict([_runs[index] for index in fold.judge])
    torch.save({target: torch.from_numpy(np.asarray(values)) for target, values in predicted.items()}, place.with_suffix(".part"))
    place.with_suffix(".part").replace(place)


def label_of(run: Run) -> str:
    """Group of runs that are evaluated together."""
    if run.table == "operator":
        return f"operators of {run.source} {run.gpu}"
    if run.table == "run":
        return run.source
    if run.table == "transformer":
        return f"transformers {run.mode}"
    if run.table == "perceptron":
        return f"perceptrons {run.gpu}"
    return f"{run.gpu} {run.mode} {run.setting.variant}"


def entries(runs: Sequence[Run], found: SplitPredictions, group_of: Callable[[Run], str] = label_of) -> pd.DataFrame:
    """The errors of every predictor by split, group and quantity.

    Returns:
        "split", "group", "quantity", "predictor", and the number of "rows".
        "mean", "median", "p90": of |predicted / measured - 1|; of utilisation, of differences.
        "spread": standard deviation of the folds' means.
        "coverage": share of the measurements within the 90% intervals of a calibration on the other folds; NaN: there is none.
        "width": median width of these intervals over the predicted median.
    """
    scores = list[dict[str, Any]]()
    for (split, predictor), predictions in found.items():
        lines = judged(runs, split, predictions)
        lines = lines[np.isfinite(lines["predicted"]) & lines["measured"].notna()]
        half = _Z * lines["log_sigma"]
        lines = lines.assign(
            group=[group_of(runs[at]) for at in lines["run"]],
            error=list(map(error_of, lines["target"], lines["predicted"], lines["measured"])),
            inside=((lines["predicted"] - lines["measured"]).abs() <= half).astype(float).where(half.notna()),
            width=np.exp(half) - np.exp(-half),
        )
        for (group, target), own in lines.groupby(["group", "target"], sort=False):
            error = own["error"]
            spread = own.groupby("fold")["error"].mean().std(ddof=0)
            numbers = len(own), error.mean(), error.median(), error.quantile(0.9), spread
            values = split, group, _QUANTITIES[target], predictor, *numbers, own["inside"].mean(), own["width"].median()
            scores.append(dict(zip(_ERRORS, values, strict=True)))
    return pd.DataFrame(scores, columns=_ERRORS)


def error_of(target: str, predicted: float, measured: float) -> float:
    """Relative for memory and time; the difference of the shares for utilisation."""
    if target in ("memory", "time"):
        return float(abs(np.exp(predicted - measured) - 1))
    return abs(share_of(predicted) - share_of(measured))


def fit_scores(runs: Sequence[Run], found: SplitPredictions) -> pd.DataFrame:
    """The accuracy of predictions of what fits.

    Returns:
        "split", "group" (GPU with mode), "predictor", and the number of "failed" and of "fitting" runs.
        "caught", "pruned": shares of the failed and of the fitting runs whose predicted median does not fit.
        "caught_at_risk", "pruned_at_risk": of those that are out of memory with more than the guard's default risk; NaN: without
        intervals.
        "pairs": where a network has a batch that fitted and a larger one that failed. "balanced": mean of both shares, counted
        right, there.
    """
    pairs = bracketed(runs)
    scores = list[dict[str, Any]]()
    for (split, predictor), predictions in found.items():
        lines = judged(runs, split, predictions)
        is_workload = np.array([runs[at].table == "workload" for at in lines["run"]], dtype=bool)
        lines = lines[(lines["target"] == "memory") & np.isfinite(lines["predicted"]) & is_workload]
        own = [runs[at] for at in lines["run"]]
        around = [pairs[run.gpu, run.structure] for run in own]
        limit = np.log([run.capacity_bytes for run in own])
        risky = lines["predicted"] + _AT_RISK * lines["log_sigma"]
        lines = lines.assign(
            name=[f"{run.gpu} {run.mode}" for run in own],
            fits=np.array([run.fits for run in own], dtype=bool),
            refused=lines["predicted"] > limit,
            at_risk=(risky > limit).astype(float).where(risky.notna()),
            is_paired=[None not in pair and at in pair for at, pair in zip(lines["run"], around, strict=True)],
        )
        for name, group in lines.groupby("name", sort=False):
            fitting = group[group["fits"]]
            failed = group[~group["fits"]]
            if len(failed):
                caught, pruned = (part[part["is_paired"]]["refused"].mean() for part in (failed, fitting))
                of_failed = len(failed), failed["refused"].mean(), len(fitting), fitting["refused"].mean()
                at_risk = (part["at_risk"].mean(skipna=False) for part in (failed, fitting))
                values = split, name, predictor, *of_failed, *at_risk, failed["is_paired"].sum(), (caught + 1 - pruned) / 2
                scores.append(dict(zip(_FITS, values, strict=True)))
    return pd.DataFrame(scores, columns=_FITS)


def as_markdown(errors: pd.DataFrame, fits: pd.DataFrame, order: Sequence[str]) -> str:
    """Tables for a person: a row for each group, a column for each predictor."""
    text: list[str] = []
    for (split, quantity), own in errors.groupby(["split", "quantity"], sort=False):
        mean, spread, median, coverage = (own[name].map(_percent) for name in ("mean", "spread", "median", "coverage"))
        text += [
            f"### {quantity}, split by {split}",
            "",
            *_table(own, mean + " ± " + spread + " / " + median, order, ["rows"]),
            "",
        ]
        known = own["coverage"].notna()
        intervals = coverage + " / " + own["width"].map("{:.0%}".format)
        if known.any():
            heading = f"### 90% intervals of {quantity}, split by {split}"
            text += [heading, "", *_table(own[known], intervals[known], order, ["rows"]), ""]
    for split, own in fits.groupby("split", sort=False):
        of = {name: own[name].map(_percent) for name in _FITS[3:]}
        at_risk = (of["caught_at_risk"] + " / " + of["pruned_at_risk"]).replace("- / -", "-")
        cells = of["caught"] + " / " + of["pruned"] + "; " + at_risk + "; " + of["balanced"]
        text += [f"### What fits, split by {split}", "", *_table(own, cells, order, ["failed", "fitting", "pairs"]), ""]
    return "\n".join(text)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _table(lines: pd.DataFrame, cells: pd.Series[str], order: Sequence[str], numbers: list[str]) -> list[str]:
    """Cells by group and predictor. Those that were evaluated on fewer rows than others of their group say so."""
    by_group = lines.groupby("group")
    rows = lines[numbers[0]]
    fewer = (" (" + rows.astype(str) + " rows)").where(rows < by_group[numbers[0]].transform("max"), "")
    table = lines.assign(cell=cells + fewer).pivot(index="group", columns="predictor", values="cell").fillna("-")
    table = by_group[numbers].max().join(table[[name for name in order if name in table]])
    head = f"| {' | '.join(['runs', *table.columns])} |", "| --- " * (1 + len(table.columns)) + "|"
    return [*head, *(f"| {' | '.join(map(str, line))} |" for line in table.itertuples())]


def as_lists(errors: pd.DataFrame, fits: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Errors and scores for JSON, rounded to four decimals. NaN and infinity become null."""
    return {name: json.loads(frame.round(4).to_json(orient="records")) for name, frame in (("errors", errors), ("fits", fits))}
