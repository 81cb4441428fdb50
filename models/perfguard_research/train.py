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

from perfguard.exceptions import TableError
from perfguard.predictor import TARGETS
from perfguard_models.calibration import NEW_GPU, Calibration
from perfguard_models.learner import CPU_PREFIX, Predicted
from perfguard_models.step_time import StepTime
from perfguard_research.dataset import Dataset, Run
from perfguard_research.intervals import calibrated, judged
from perfguard_research.leaderboard import as_lists, entries, fit_scores, predictions_of
from perfguard_research.learners import OnEpoch, Trainable, labels_of, write_trained

_FEWEST_RUNS = 20
_LEAST_VARIED = 0.5
"""Standard deviation of the predicted logarithms over that of the measured ones, for the training rows."""
_ON_NEW_GPUS = 4.0
"""How much wider intervals are on a GPU without training rows, where no GPU was held out."""


def train_and_write(
    learner: Trainable,
    settings: dict[str, Any],
    dataset: Dataset,
    out: Path,
    *,
    splits: Sequence[str],
    command: str,
    cache: Path,
    jobs: int,
    on_epoch: OnEpoch,
) -> str:
    """Train and write OUT/NAME.safetensors and OUT/NAME.json. For CPUs alone it is OUT/cpu-NAME, but not for step-time.

    Args:
        learner: with these ``settings``, and not yet fitted.
        settings: those that are not its defaults.
        dataset: seen as the learner reads it.
        out: a folder.
        splits: those that it is evaluated on.
        command: repeats the training, as the card says.
        cache: a folder for finished folds.
        jobs: number of processes.
        on_epoch: called now and then while all rows are learnt.

    Returns:
        A sentence for a person.

    Raises:
        TableError: if there are too few rows, or runs on a CPU and on GPUs, or the learner does not fit its own rows.
    """
    name = learner.name
    runs = dataset.runs
    own = [run for run in runs if run.table in learner.tables]
    if len(own) < _FEWEST_RUNS:
        known = f"{name} learns from tables of these kinds: {', '.join(learner.tables)}."
        raise TableError(f"{len(own)} rows are too few to learn from. {known} {dataset.rejections()}")
    gpus = {run.gpu for run in own}
    is_for_cpus = "cpu" in gpus and name != StepTime.name  # which serves both kinds of devices
    if is_for_cpus and len(gpus) > 1:
        raise TableError(
            f"These tables have runs on a CPU and on GPUs. The weights of {name} are for one of them: train them one after the "
            "other."
        )
    path = out / f"{CPU_PREFIX if is_for_cpus else ''}{name}"
    found = predictions_of(name, settings, runs, splits, cache=cache, jobs=jobs)
    learner.fit(own, on_epoch=on_epoch)
    predicted = learner.predict(own)
    _check_fit(name, own, predicted)
    held_out = [judged(runs, split, predictions) for (split, _), predictions in found.items()]
    used = _used(own, predicted)
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
    write_trained(path, learner, card, calibration)
    size = path.with_suffix(".safetensors").stat().st_size
    return f"{path}.safetensors ({size / 1e6:.1f} MB) from {len(used)} rows. {dataset.rejections()}"


def _check_fit(name: str, runs: Sequence[Run], predicted: Predicted) -> None:
    """Refuse a fit whose predictions for its training rows do not vary as what was measured does.

    A network that has learnt nothing predicts the same for all. Its error on held-out rows looks like that of a bad predictor.

    Raises:
        TableError: if they vary by less than `_LEAST_VARIED` of it, for memory or time.
    """
    for target in TARGETS:
        measured = labels_of(runs, target)
        known = np.isfinite(measured) & np.isfinite(predicted[target])
        if known.sum() < _FEWEST_RUNS:
            continue
        share = predicted[target][known].std() / max(measured[known].std(), 1e-9)
        if share < _LEAST_VARIED:
            raise TableError(
                f"{name} is near a constant: for its own {known.sum()} training rows, its log {target} varies by "
                f"{share:.0%} of what the measured one does. Train it longer or at a lower rate, for instance "
                "--set epochs=30 --set learning_rate=0.0005."
            )


def _used(runs: Sequence[Run], predicted: Predicted) -> list[Run]:
    """The runs that a learner learnt from: those with a label of what it predicts. Of memory, whether a run fits is enough."""
    known = {target: np.isfinite(values) for target, values in predicted.items()}
    return [run for at, run in enumerate(runs) if any(known[what][at] for what in ("memory", *run.labels))]
