"""The learners that can be fitted to measured runs, by name: their interface, and what every fit needs."""

from __future__ import annotations

import hashlib
import json
import pkgutil
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save

from perfguard.exceptions import PredictorError
from perfguard_models.calibration import Calibration
from perfguard_models.learner import FORMAT, Learner, State, columns_of
from perfguard_research.dataset import Run, code_of

WEIGHTS = Path(__file__).parent / "weights"
"""The folder of the shipped weights."""
OnEpoch = Callable[[int, int, float], None]
"""Called now and then while fitting, with what is done, of how much, and the loss."""


class Trainable(Learner, Protocol):
    """A learner that can be fitted."""

    tables: ClassVar[tuple[str, ...]]
    """Kinds of table that it is fitted to and evaluated on."""

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None) -> None:
        """Learn from ``runs``; ``on_epoch(done, of, loss)`` is called now and then."""

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """The tensors and the settings (JSON), of which `from_state` makes the learner again."""


def write_trained(out: Path, learner: Trainable, card: Mapping[str, Any], calibration: Calibration) -> None:
    """Write OUT.safetensors, and OUT.json: the card, with the hash that binds it to the tensors."""
    tensors, settings = learner.state()
    document = {
        "format": FORMAT,
        "predictor": learner.name,
        "settings": dict(settings),
        "columns": columns_of(learner),
        "calibration": {"floor": dict(calibration.floor), "scale": dict(calibration.scale)},
        **card,
    }
    write_pair(out, tensors, document)


def write_pair(out: Path, tensors: Mapping[str, torch.Tensor], card: Mapping[str, Any]) -> None:
    """Write both. The card says when and on what machine."""
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    made = f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}"
    text = json.dumps({"sha256": hashlib.sha256(data).hexdigest(), **card, "made": made}, indent=1) + "\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".safetensors").write_bytes(data)
    out.with_suffix(".json").write_text(text, encoding="utf-8")


def labels_of(runs: Sequence[Run], target: str) -> npt.NDArray[np.float64]:
    """The labels of one target, NaN where there is none. Shape: (len(runs),)."""
    return np.array([run.labels.get(target, np.nan) for run in runs], dtype=np.float64)


def identity_of(name: str, settings: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Cache key of a training: the learner, its settings, the runs, and all code that a learner may consist of."""
    digest = hashlib.sha256(repr((name, sorted(settings.items()))).encode())
    for run in runs:
        digest.update(repr((run.structure, run.gpu, run.batch_size, run.fits, sorted(run.labels.items()))).encode())
    digest.update(code_of("perfguard.graph", "perfguard_models", "perfguard_research"))
    return digest.hexdigest()


def seed_of(seed: int, epoch: int) -> int:
    """The seed of an epoch's order, of a training with ``seed``."""
    return seed * 1_000_003 + epoch


def batches(sizes: Sequence[int], order: Iterable[int], most: int) -> Iterator[list[int]]:
    """The indices of ``order``, cut where the sizes so far reach ``most``."""
    chosen: list[int] = []
    for index in order:
        chosen.append(index)
        if sum(sizes[at] for at in chosen) >= most:
            yield chosen
            chosen = []
    if chosen:
        yield chosen


_WHERE = {  # by name; they are imported late, because they import this module
    "memory-forest": "memory_forest:TrainableMemory",
    "step-time": "step_time:TrainableStepTime",
    "trees": "papers.baselines:Trees",
    "dnnperf": "papers.dnnperf:DNNPerf",
    "dnnabacus": "papers.dnnabacus:DNNAbacus",
    "perfseer": "papers.perfseer:PerfSeer",
    "dippm": "papers.dippm:DIPPM",
    "lilou": "papers.lilou:Lilou",
    "roofline": "papers.baselines:Roofline",
}
NAMES = tuple(_WHERE)


def learner_class(name: str) -> type[Trainable]:
    """The class of the learner ``name``.

    Raises:
        PredictorError: for a name that there is not.
    """
    if name not in _WHERE:
        raise PredictorError(f"No predictor that can be trained is called {name!r}. There are {', '.join(NAMES)}.")
    found: type[Trainable] = pkgutil.resolve_name(f"perfguard_research.{_WHERE[name]}")
    return found
