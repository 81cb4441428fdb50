"""All predictors on the same rows, each judged on what it has not seen.

For each split (by family, by GPU, at random) and each of its folds every predictor learns from the same runs and is judged on
the same others. Predictions are kept, so that an interrupted leaderboard goes on where it was. Beside the errors of memory and
time stand the share of failed runs that would have been caught, and how often it was said rightly which of two neighbouring
batches fails.
"""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track

from perfguard_models.dataset import TARGETS, Fold, Run, dataset_of, folds, share_of
from perfguard_models.ensemble import bracketed
from perfguard_models.learner import Predicted, identity_of, predict_with_spread
from perfguard_models.registry import learner_class, source_of

_QUANTITIES = {"memory": "memory", "time": "time", "gpu_util": "GPU utilisation", "sm_active": "SM activity"}


Found = dict[tuple[str, str], list[tuple[Fold, Predicted]]]
"""For each split and predictor the folds, with what was predicted of the judged runs; "spread TARGET" is the members' spread."""


class Job(NamedTuple):
    """One predictor on one fold."""

    predictor: str
    settings: tuple[tuple[str, Any], ...]
    split: str
    fold: Fold


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


def predictions(
    tables: Sequence[Path],
    predictors: dict[str, dict[str, Any]],
    splits: Sequence[str],
    *,
    cache: Path,
    jobs: int = 2,
    most_operators: int = 60_000,
) -> tuple[list[Run], Found]:
    """The runs (seen as sums), and for each split and predictor the folds with what was predicted of the judged runs.

    Args:
        tables: of any kind that can be learnt from.
        predictors: names and settings.
        splits: of "family", "gpu" and "random".
        cache: a folder for graphs, views and predictions.
        jobs: processes.
        most_operators: rows of an operator table that are taken.
    """
    runs = dataset_of(tables, "sums", cache=cache, jobs=jobs, most_operators=most_operators).runs
    work = [
        Job(name, tuple(sorted(settings.items())), split, own)
        for split in splits
        for fold in folds(runs, split)
        for name, settings in predictors.items()
        if (own := _of_tables(fold, runs, learner_class(name).tables)).learn and own.judge
    ]
    data = identity_of("", {}, runs)
    placed = [(job, _place(job, data, cache)) for job in work]
    by_views: defaultdict[tuple[str, ...], list[tuple[Job, Path]]] = defaultdict(list)
    for job, place in placed:
        if not place.is_file():
            by_views[learner_class(job.predictor).views].append((job, place))
    for views, some in by_views.items():
        dataset_of(tables, views, cache=cache, jobs=jobs, most_operators=most_operators)  # once, before the processes need it
        do = functools.partial(_do, tables=tuple(tables), cache=cache, most_operators=most_operators)
        with ProcessPoolExecutor(jobs, initializer=_prepare) as pool:
            done = pool.map(do, some)
            for _ in track(done, total=len(some), description=" + ".join(views), disable=not sys.stderr.isatty()):
                pass
    found: defaultdict[tuple[str, str], list[tuple[Fold, Predicted]]] = defaultdict(list)
    for job, place in placed:
        stored = torch.load(place, weights_only=True)
        found[job.split, job.predictor].append((job.fold, {name: value.numpy() for name, value in stored.items()}))
    return runs, dict(found)


def _prepare() -> None:
    torch.set_num_threads(1)


def _of_tables(fold: Fold, runs: Sequence[Run], tables: Sequence[str]) -> Fold:
    """The part of ``fold`` that a predictor of these kinds of table learns from and is judged on."""
    return Fold(
        fold.name,
        [index for index in fold.learn if runs[index].table in tables],
        [index for index in fold.judge if runs[index].table in tables],
    )


def _place(job: Job, data: str, cache: Path) -> Path:
    """Named by all that a prediction depends on: the runs, the fold, the settings and the learner's source code."""
    what = job.settings, data, job.fold, source_of(job.predictor)
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return cache / "predictions" / f"{job.predictor}-{job.split}-{digest}.pt"


_loaded: dict[tuple[str, ...], list[Run]] = {}


def _do(work: tuple[Job, Path], tables: tuple[Path, ...], cache: Path, most_operators: int) -> None:
    job, place = work
    kind = learner_class(job.predictor)
    if kind.views not in _loaded:
        _loaded.clear()
        _loaded[kind.views] = dataset_of(tables, kind.views, cache=cache, jobs=1, most_operators=most_operators).runs
    runs = _loaded[kind.views]
    place.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = place.with_suffix(".checkpoint")
    learner = kind(**dict(job.settings))
    learner.fit([runs[index] for index in job.fold.learn], checkpoint=checkpoint)
    predicted, spread = predict_with_spread(learner, [runs[index] for index in job.fold.judge])
    stored = {**predicted, **{f"spread {target}": values for target, values in spread.items()}}
    torch.save({name: torch.from_numpy(np.asarray(values)) for name, values in stored.items()}, place.with_suffix(".part"))
    place.with_suffix(".part").replace(place)
    for path in checkpoint.parent.glob(f"{checkpoint.name}*"):
        path.unlink()


def label_of(run: Run) -> str:
    """What runs are judged together."""
    if run.table == "operator":
        return f"operator {run.model}"
    if run.table == "transformer":
        return f"transformers {run.mode}"
    if run.table == "perceptron":
        return f"perceptrons {run.gpu}"
    return f"{run.gpu} {run.mode} {run.variant}".strip()


def entries(runs: Sequence[Run], found: Found) -> list[Entry]:
    """The errors of every predictor by split, group and quantity."""
    lines = []
    for (split, predictor), parts in found.items():
        errors: defaultdict[tuple[str, str], list[list[float]]] = defaultdict(functools.partial(_lists, len(parts)))
        for at, (fold, predicted) in enumerate(parts):
            for position, index in enumerate(fold.judge):
                run = runs[index]
                for target in TARGETS:
                    if target in run.labels and np.isfinite(value := predicted[target][position]):
                        errors[label_of(run), target][at].append(error_of(target, float(value), run.labels[target]))
        for (name, target), by_fold in errors.items():
            values = [value for part in by_fold for value in part]
            means = [statistics.fmean(part) for part in by_fold if part]
            lines.append(
                Entry(
                    split,
                    name,
                    _QUANTITIES[target],
                    predictor,
                    len(values),
                    statistics.fmean(values),
                    statistics.median(values),
                    float(np.quantile(values, 0.9)),
                    statistics.pstdev(means),
                )
            )
    return lines


def _lists(number: int) -> list[list[float]]:
    return [[] for _ in range(number)]


def error_of(target: str, predicted: float, measured: float) -> float:
    """Relative for memory and time; the difference of the shares for utilisation."""
    if target in ("memory", "time"):
        return float(abs(np.exp(predicted - measured) - 1))
    return abs(share_of(predicted) - share_of(measured))


class FitScore(NamedTuple):
    """How well it was said what fits."""

    failed: int
    caught: float
    """Share of the failed runs whose predicted median does not fit."""
    fitting: int
    pruned: float
    """Share of the fitting runs whose predicted median does not fit."""
    pairs: int
    balanced: float
    """Mean of both shares, counted right, where the same network has a batch that fitted and a larger one that failed."""


def fit_scores(runs: Sequence[Run], found: Found) -> dict[tuple[str, str, str], FitScore]:
    """By split, GPU with mode, and predictor."""
    pairs = bracketed(runs)
    scores = {}
    for (split, predictor), parts in found.items():
        says: dict[int, bool] = {}
        for fold, predicted in parts:
            for position, index in enumerate(fold.judge):
                if np.isfinite(predicted["memory"][position]):
                    says[index] = bool(predicted["memory"][position] > np.log(runs[index].capacity_bytes))
        groups: defaultdict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
        for index, fails in says.items():
            run = runs[index]
            name = f"{run.gpu} {run.mode}"
            ok, failed = pairs[run.gpu, run.structure]
            groups[name]["fits" if run.fits else "failed"].append(fails)
            if index in (ok, failed) and ok is not None and failed is not None:
                groups[name]["pair fits" if run.fits else "pair failed"].append(fails)
        for name, flags in groups.items():
            if flags["failed"]:
                both = [1 - np.mean(flags["pair fits"]), np.mean(flags["pair failed"])] if flags["pair failed"] else [np.nan]
                scores[split, name, predictor] = FitScore(
                    len(flags["failed"]),
                    float(np.mean(flags["failed"])),
                    len(flags["fits"]),
                    float(np.mean(flags["fits"])) if flags["fits"] else float("nan"),
                    len(flags["pair failed"]),
                    float(np.mean(both)),
                )
    return scores


def as_markdown(lines: Sequence[Entry], scores: dict[tuple[str, str, str], FitScore], order: Sequence[str]) -> str:
    """Tables for a person: a row for each group, a column for each predictor, mean / median in percent."""
    text = []
    for split in dict.fromkeys(line.split for line in lines):
        for quantity in dict.fromkeys(line.quantity for line in lines):
            some = {(line.group, line.predictor): line for line in lines if (line.split, line.quantity) == (split, quantity)}
            if not some:
                continue
            names = [name for name in order if any(predictor == name for _, predictor in some)]
            text += [
                f"### {quantity}, split by {split}",
                "",
                f"| runs | rows | {' | '.join(names)} |",
                "| --- " * (len(names) + 2) + "|",
            ]
            for group in sorted({group for group, _ in some}):
                cells = [some.get((group, name)) for name in names]
                rows = max(cell.rows for cell in cells if cell is not None)
                text.append(f"| {group} | {rows} | {' | '.join(_cell(cell) for cell in cells)} |")
            text.append("")
    for split in dict.fromkeys(key[0] for key in scores):
        names = [name for name in order if any(key[0] == split and key[2] == name for key in scores)]
        text += [
            f"### What fits, split by {split}",
            "",
            f"| runs | failed | pairs | {' | '.join(names)} |",
            "| --- " * (len(names) + 3) + "|",
        ]
        for group in sorted({key[1] for key in scores if key[0] == split}):
            fits = [scores.get((split, group, name)) for name in names]
            first = next(score for score in fits if score is not None)
            written = ["-" if f is None else f"{f.caught:.1%} / {f.pruned:.1%} / {f.balanced:.1%}" for f in fits]
            text.append(f"| {group} | {first.failed} | {first.pairs} | {' | '.join(written)} |")
        text.append("")
    return "\n".join(text)


def _cell(line: Entry | None) -> str:
    return "-" if line is None else f"{line.mean:.1%} ± {line.spread:.1%} / {line.median:.1%}"


def as_json(lines: Sequence[Entry], scores: dict[tuple[str, str, str], FitScore]) -> str:
    """The same as data."""
    fits = [
        {"split": split, "group": group, "predictor": name, **score._asdict()} for (split, group, name), score in scores.items()
    ]
    return json.dumps({"errors": [line._asdict() for line in lines], "fits": fits}, indent=1)
