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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from rich.progress import track

from perfguard.guard import DEFAULT_RISK
from perfguard_models.features import FeatureSet
from perfguard_models.learner import TARGETS, share_of
from perfguard_research.dataset import Fold, Run, dataset_of, folds
from perfguard_research.intervals import CALIBRATED, FoldPredictions, SplitPredictions, log_sigmas_of
from perfguard_research.learners import identity_of, learner_class
from perfguard_research.memory_forest import bracketed

T = TypeVar("T")
_QUANTITIES = {"memory": "memory", "time": "time", "gpu_util": "GPU utilisation", "sm_active": "SM activity"}
_Z = statistics.NormalDist().inv_cdf(0.95)
_AT_RISK = statistics.NormalDist().inv_cdf(1 - DEFAULT_RISK)
_FEWEST_JUDGED = 20
"""Runs of a fold; a fit for fewer (five transformers on one card, say) is not worth its minutes."""


class Entry(NamedTuple):
    """One line of the leaderboard. Errors are |predicted / measured - 1|; of utilisation, differences."""

    split: str
    group: str
    quantity: str
    predictor: str
    rows: int
    mean: float
    median: float
    p90: float
    spread: float
    """Standard deviation of the folds' means."""
    coverage: float
    """Share of the measurements within the 90% intervals of a calibration on the other folds; NaN: there is none."""
    width: float
    """Median width of these intervals over the predicted median."""


def predictions(
    tables: Sequence[Path],
    predictors: dict[str, dict[str, Any]],
    splits: Sequence[str],
    *,
    cache: Path,
    jobs: int = 2,
    most_operators: int = 60_000,
) -> tuple[list[Run], SplitPredictions]:
    """The runs, and for each split and predictor the folds with the predictions for the test runs.

    Args:
        tables: tables of runs. Any kind that can be learnt from.
        predictors: names and settings.
        splits: names of splits. Known are "family", "source", "gpu" and "random".
        cache: a folder for graphs, views and predictions.
        jobs: processes.
        most_operators: rows of an operator table that are taken.
    """
    by_views: defaultdict[tuple[FeatureSet, ...], list[str]] = defaultdict(list)
    for name in predictors:
        by_views[learner_class(name).views].append(name)
    runs, found = list[Run](), dict[tuple[str, str], FoldPredictions]()
    for views, names in by_views.items():
        seen = dataset_of(tables, views, cache=cache, jobs=jobs, most_operators=most_operators).runs
        runs = runs or seen
        for name in names:
            found |= predictions_of(name, predictors[name], seen, splits, cache=cache, jobs=jobs)
    return runs, {(split, name): found[split, name] for split in splits for name in predictors if (split, name) in found}


def predictions_of(
    name: str, settings: dict[str, Any], runs: Sequence[Run], splits: Sequence[str], *, cache: Path, jobs: int
) -> SplitPredictions:
    """The folds of each split with one predictor's predictions. They are kept in ``cache`` by all that they depend on."""
    kind, identity = learner_class(name), identity_of(name, settings, runs)
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
    return f"{run.gpu} {run.mode} {run.variant}".strip()


def entries(runs: Sequence[Run], found: SplitPredictions, group_of: Callable[[Run], str] = label_of) -> list[Entry]:
    """The errors of every predictor by split, group and quantity."""
    lines = []
    for (split, predictor), predictions in found.items():
        # Of each prediction: its fold, its error, whether its interval holds the measurement (NaN: no interval), and the width.
        groups: defaultdict[tuple[str, str], list[tuple[int, float, float, float]]] = defaultdict(list)
        sigmas = log_sigmas_of(runs, split, predictions)
        for at, (fold, predicted) in enumerate(predictions):
            for position, index in enumerate(fold.judge):
                run = runs[index]
                for target in TARGETS:
                    if target in run.labels and np.isfinite(value := float(predicted[target][position])):
                        label = run.labels[target]
                        half = _Z * float(sigmas[at][target][position]) if target in CALIBRATED else math.nan
                        inside = math.nan if math.isnan(half) else float(abs(label - value) <= half)
                        width = math.exp(half) - math.exp(-half)
                        groups[group_of(run), target].append((at, error_of(target, value, label), inside, width))
        lines += [_entry(split, predictor, name, target, some) for (name, target), some in groups.items()]
    return lines


def _entry(split: str, predictor: str, name: str, target: str, some: Sequence[tuple[int, float, float, float]]) -> Entry:
    folds, errors, inside, width = np.array(some).T
    has_intervals = not np.isnan(inside).all()
    return Entry(
        split=split,
        group=name,
        quantity=_QUANTITIES[target],
        predictor=predictor,
        rows=len(errors),
        mean=float(errors.mean()),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        spread=float(np.std([errors[folds == fold].mean() for fold in np.unique(folds)])),
        coverage=float(np.nanmean(inside)) if has_intervals else math.nan,
        width=float(np.nanmedian(width)) if has_intervals else math.nan,
    )


def error_of(target: str, predicted: float, measured: float) -> float:
    """Relative for memory and time; the difference of the shares for utilisation."""
    if target in ("memory", "time"):
        return float(abs(np.exp(predicted - measured) - 1))
    return abs(share_of(predicted) - share_of(measured))


class FitScore(NamedTuple):
    """The accuracy of predictions of what fits."""

    failed: int
    caught: float
    """Share of the failed runs whose predicted median does not fit."""
    fitting: int
    pruned: float
    """Share of the fitting runs whose predicted median does not fit."""
    caught_at_risk: float
    """Share of the failed runs that are out of memory with more than the guard's default risk; NaN: without intervals."""
    pruned_at_risk: float
    """Share of the fitting runs that are out of memory with more than the guard's default risk."""
    pairs: int
    balanced: float
    """Mean of both shares, counted right, where the same network has a batch that fitted and a larger one that failed."""


def fit_scores(runs: Sequence[Run], found: SplitPredictions) -> dict[tuple[str, str, str], FitScore]:
    """Scores by split, GPU with mode, and predictor."""
    pairs = bracketed(runs)
    scores = {}
    for (split, predictor), predictions in found.items():
        groups: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for (fold, predicted), sigma in zip(predictions, log_sigmas_of(runs, split, predictions), strict=True):
            for position, index in enumerate(fold.judge):
                run, value = runs[index], float(predicted["memory"][position])
                if run.table != "workload" or not math.isfinite(value):
                    continue
                limit, risky = math.log(run.capacity_bytes), value + _AT_RISK * float(sigma["memory"][position])
                fails = float(value > limit)
                flags = groups[f"{run.gpu} {run.mode}"]
                flags[_outcome(run)].append(fails)
                flags[f"{_outcome(run)} at risk"].append(math.nan if math.isnan(risky) else float(risky > limit))
                ok, failed = pairs[run.gpu, run.structure]
                if index in (ok, failed) and ok is not None and failed is not None:
                    flags[f"pair {_outcome(run)}"].append(fails)
        for name, flags in groups.items():
            if flags["failed"]:
                both = 1 - _mean(flags["pair fits"]), _mean(flags["pair failed"])
                scores[split, name, predictor] = FitScore(
                    failed=len(flags["failed"]),
                    caught=_mean(flags["failed"]),
                    fitting=len(flags["fits"]),
                    pruned=_mean(flags["fits"]),
                    caught_at_risk=_mean(flags["failed at risk"]),
                    pruned_at_risk=_mean(flags["fits at risk"]),
                    pairs=len(flags["pair failed"]),
                    balanced=sum(both) / 2,
                )
    return scores


def _outcome(run: Run) -> str:
    return "fits" if run.fits else "failed"


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def as_markdown(lines: Sequence[Entry], scores: dict[tuple[str, str, str], FitScore], order: Sequence[str]) -> str:
    """Tables for a person: a row for each group, a column for each predictor."""
    text: list[str] = []
    for split in dict.fromkeys(line.split for line in lines):
        own = [line for line in lines if line.split == split]
        for quantity in dict.fromkeys(line.quantity for line in own):
            cells = {(line.group, line.predictor): line for line in own if line.quantity == quantity}
            text += [f"### {quantity}, split by {split}", "", *_table(cells, order, ("rows",), _errors), ""]
            known = {key: line for key, line in cells.items() if not math.isnan(line.coverage)}
            if known:
                text += [
                    f"### 90% intervals of {quantity}, split by {split}",
                    "",
                    *_table(known, order, ("rows",), _interval),
                    "",
                ]
    for split in dict.fromkeys(key[0] for key in scores):
        fits = {key[1:]: score for key, score in scores.items() if key[0] == split}
        text += [f"### What fits, split by {split}", "", *_table(fits, order, ("failed", "fitting", "pairs"), _fits), ""]
    return "\n".join(text)


def _table(
    cells: Mapping[tuple[str, str], T], order: Sequence[str], numbers: Sequence[str], write: Callable[[T], str]
) -> list[str]:
    """Cells by group and predictor. Those that were evaluated on fewer rows than others of their group say so."""
    names = [name for name in order if any(predictor == name for _, predictor in cells)]
    columns = ["runs", *numbers, *names]
    text = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for group in sorted({group for group, _ in cells}):
        found = [cells.get((group, name)) for name in names]
        most = [max(getattr(cell, number) for cell in found if cell is not None) for number in numbers]
        written = [group, *map(str, most)]
        for cell in found:
            fewer = cell is not None and getattr(cell, numbers[0]) < most[0]
            written.append("-" if cell is None else write(cell) + (f" ({getattr(cell, numbers[0])} rows)" if fewer else ""))
        text.append(f"| {' | '.join(written)} |")
    return text


def _errors(line: Entry) -> str:
    return f"{line.mean:.1%} ± {line.spread:.1%} / {line.median:.1%}"


def _interval(line: Entry) -> str:
    return f"{line.coverage:.1%} / {line.width:.0%}"


def _fits(score: FitScore) -> str:
    at_risk = "-" if math.isnan(score.caught_at_risk) else f"{score.caught_at_risk:.1%} / {score.pruned_at_risk:.1%}"
    return f"{score.caught:.1%} / {score.pruned:.1%}; {at_risk}; {'-' if math.isnan(score.balanced) else f'{score.balanced:.1%}'}"


def as_json(lines: Sequence[Entry], scores: dict[tuple[str, str, str], FitScore]) -> str:
    """Errors and scores as JSON."""
    fits = [
        {"split": split, "group": group, "predictor": name, **rounded(score._asdict())}
        for (split, group, name), score in scores.items()
    ]
    return json.dumps({"errors": [rounded(line._asdict()) for line in lines], "fits": fits}, indent=1)


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Round to four decimals for JSON. NaN and infinity become null."""
    return {
        key: (None if math.isnan(value) else round(value, 4)) if isinstance(value, float) else value
        for key, value in values.items()
    }
