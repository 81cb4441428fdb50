"""All predictors on the same rows, each evaluated on rows that it was not fitted to.

Splits are by family, by source, by GPU and at random. In each fold every predictor learns from the same runs and is evaluated on
the same others. Predictions are kept, so an interrupted leaderboard continues where it stopped. The table has the errors of
memory and time, and the share of failed runs that would have been caught. It also has the accuracy on which of two neighbouring
batches fails.
"""

from __future__ import annotations

import functools
import hashlib
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
from perfguard_models.learner import share_of
from perfguard_research.dataset import Fold, Run, dataset_of, folds
from perfguard_research.intervals import FoldPredictions, SplitPredictions, judged
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
    most_runs: int | None = None,
) -> tuple[list[Run], SplitPredictions]:
    """The runs of ``tables``, and for each split and predictor the folds with the predictions for the test runs.

    ``predictors`` has the settings by name. ``cache`` is a folder for graphs and predictions. See :func:`dataset_of`.
    """
    by_views: defaultdict[tuple[FeatureSet, ...], list[str]] = defaultdict(list)
    for name in predictors:
        by_views[learner_class(name).views].append(name)
    runs, found = list[Run](), dict[tuple[str, str], FoldPredictions]()
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
    found_lines = []
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
            found_lines.append(
                Entry(
                    split=split,
                    group=group,
                    quantity=_QUANTITIES[target],
                    predictor=predictor,
                    rows=len(own),
                    mean=float(own["error"].mean()),
                    median=float(own["error"].median()),
                    p90=float(own["error"].quantile(0.9)),
                    spread=float(own.groupby("fold")["error"].mean().std(ddof=0)),
                    coverage=float(own["inside"].mean()),
                    width=float(own["width"].median()),
                )
            )
    return found_lines


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
        lines = judged(runs, split, predictions)
        is_workload = np.array([runs[at].table == "workload" for at in lines["run"]], dtype=bool)
        lines = lines[(lines["target"] == "memory") & np.isfinite(lines["predicted"]) & is_workload]
        own = [runs[at] for at in lines["run"]]
        around = [pairs[run.gpu, run.structure] for run in own]
        limit, risky = np.log([run.capacity_bytes for run in own]), lines["predicted"] + _AT_RISK * lines["log_sigma"]
        lines = lines.assign(
            name=[f"{run.gpu} {run.mode}" for run in own],
            fits=np.array([run.fits for run in own], dtype=bool),
            refused=lines["predicted"] > limit,
            at_risk=(risky > limit).astype(float).where(risky.notna()),
            is_paired=[None not in pair and at in pair for at, pair in zip(lines["run"], around, strict=True)],
        )
        for name, group in lines.groupby("name", sort=False):
            fitting, failed = group[group["fits"]], group[~group["fits"]]
            if len(failed):
                caught, pruned = (part[part["is_paired"]]["refused"].mean() for part in (failed, fitting))
                scores[split, str(name), predictor] = FitScore(
                    failed=len(failed),
                    caught=float(failed["refused"].mean()),
                    fitting=len(fitting),
                    pruned=float(fitting["refused"].mean()),
                    caught_at_risk=float(failed["at_risk"].mean(skipna=False)),
                    pruned_at_risk=float(fitting["at_risk"].mean(skipna=False)),
                    pairs=int(failed["is_paired"].sum()),
                    balanced=float(caught + 1 - pruned) / 2,
                )
    return scores


def as_markdown(lines: Sequence[Entry], scores: dict[tuple[str, str, str], FitScore], order: Sequence[str]) -> str:
    """Tables for a person: a row for each group, a column for each predictor."""
    text: list[str] = []
    for split, quantity in dict.fromkeys((line.split, line.quantity) for line in lines):
        cells = {(line.group, line.predictor): line for line in lines if (line.split, line.quantity) == (split, quantity)}
        text += [f"### {quantity}, split by {split}", "", *_table(cells, order, ("rows",), _errors), ""]
        known = {key: line for key, line in cells.items() if not math.isnan(line.coverage)}
        if known:
            text += [f"### 90% intervals of {quantity}, split by {split}", "", *_table(known, order, ("rows",), _interval), ""]
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


def as_lists(lines: Sequence[Entry], scores: dict[tuple[str, str, str], FitScore]) -> dict[str, list[dict[str, Any]]]:
    """Errors and scores for JSON."""
    fits = [
        {"split": split, "group": group, "predictor": name, **_rounded(score._asdict())}
        for (split, group, name), score in scores.items()
    ]
    return {"errors": [_rounded(line._asdict()) for line in lines], "fits": fits}


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Round to four decimals for JSON. NaN and infinity become null."""
    return {
        key: (None if math.isnan(value) else round(value, 4)) if isinstance(value, float) else value
        for key, value in values.items()
    }
