"""One predictor from tables to weights: evaluated on folds of held-out runs, then fitted to all rows.

The folds give the errors in the card and the calibration of the intervals; the weights that ship have seen all rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfguard.exceptions import ConfigurationError, TableError
from perfguard_models.calibration import NEW_GPU, Calibration
from perfguard_models.learner import CPU_PREFIX, Learner
from perfguard_models.step_time import StepTime
from perfguard_research.dataset import Run, dataset_of
from perfguard_research.intervals import calibrated, judged
from perfguard_research.leaderboard import as_lists, entries, fit_scores, predictions_of
from perfguard_research.learners import OnEpoch, learner_class, write_trained

_FEWEST_RUNS = 20
_ON_NEW_GPUS = 4.0
"""How much wider intervals are on a GPU without training rows, where no GPU was held out."""


def train_and_write(
    name: str,
    settings: dict[str, Any],
    tables: Sequence[Path],
    out: Path,
    *,
    splits: Sequence[str],
    command: str,
    cache: Path,
    jobs: int = 2,
    most_operators: int = 60_000,
    most_runs: int | None = None,
    on_epoch: OnEpoch = lambda done, of, loss: None,
) -> str:
    """Train ``name`` and write OUT/NAME.safetensors and OUT/NAME.json. For CPUs alone it is OUT/cpu-NAME, but not for step-time.

    ``splits`` are those that it is evaluated on. The card says that ``command`` repeats the training.

    Returns:
        A sentence for a person.

    Raises:
        TableError: if the tables leave too few rows, or have runs on a CPU and on GPUs.
        ConfigurationError: for settings that the predictor does not have.
    """
    kind = learner_class(name)
    serves_all = name == StepTime.name  # both kinds of devices, and times alone
    try:
        learner = kind(**settings)
    except TypeError as error:
        raise ConfigurationError(f"{name} does not take these settings: {error}") from error
    dataset = dataset_of(
        tables,
        kind.views,
        cache=cache,
        jobs=jobs,
        most_operators=most_operators,
        most_runs=most_runs,
        only_timed=serves_all,
    )
    own = [run for run in dataset.runs if run.table in kind.tables]
    if len(own) < _FEWEST_RUNS:
        known = f"{name} learns from tables of these kinds: {', '.join(kind.tables)}."
        raise TableError(f"{len(own)} rows are too few to learn from. {known} {dataset.rejections()}")
    gpus = {run.gpu for run in own}
    if "cpu" in gpus and len(gpus) > 1 and not serves_all:
        raise TableError(
            f"These tables have runs on a CPU and on GPUs. The weights of {name} are for one of them: train them one after the "
            "other."
        )
    stem = f"{CPU_PREFIX}{name}" if "cpu" in gpus and not serves_all else name
    runs = dataset.runs
    found = predictions_of(name, settings, runs, splits, cache=cache, jobs=jobs)
    learner.fit(own, on_epoch=on_epoch)
    held_out = [judged(runs, split, predictions) for (split, _), predictions in found.items()]
    used = _used(learner, own)
    card = {
        "version": 1,
        "trained_devices": sorted({run.gpu for run in used if not run.is_single}),
        "trained_cpus": sorted(dataset.cpus),
        "timed": sorted({run.setting.timed_as for run in used if "time" in run.labels and not run.is_single}),
        "rows": dict(sorted(Counter(f"{run.table} {run.source} {run.gpu} {run.mode}" for run in used).items())),
        "left_out": dataset.rejections(),
        "command": command,
        **as_lists(entries(runs, found), fit_scores(runs, found)),
    }
    calibration = calibrated(pd.concat(held_out, ignore_index=True)) if held_out else Calibration({}, {})
    if "gpu" not in splits:
        scale = {f"{what}/{NEW_GPU}": _ON_NEW_GPUS * value for what, value in calibration.scale.items() if "/" not in what}
        calibration = calibration._replace(scale={**scale, **calibration.scale})
    write_trained(out / stem, name, learner, card, calibration)
    size = (out / stem).with_suffix(".safetensors").stat().st_size
    return f"{out / stem}.safetensors ({size / 1e6:.1f} MB) from {len(used)} rows. {dataset.rejections()}"


def _used(learner: Learner, runs: Sequence[Run]) -> list[Run]:
    """The runs that ``learner`` learnt from: those with a label of what it predicts. Of memory, whether a run fits is enough."""
    known = {target: np.isfinite(values) for target, values in learner.predict(runs).items()}
    return [run for at, run in enumerate(runs) if any(known[what][at] for what in ("memory", *run.labels))]
