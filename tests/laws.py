"""Runs that follow simple laws, for what is fitted to runs."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from perfguard import Workload
from perfguard.devices import resolve_device
from perfguard.graph import OpGraph, trace
from perfguard_models.calibration import Setting
from perfguard_models.features import features_of
from perfguard_models.features.launches import LAUNCHES
from perfguard_models.features.step import STEP_FEATURES, SUMS
from perfguard_research.dataset import Run
from perfguard_research.learners import Trainable, learner_class
from tests.rows import run_on

SMALL: dict[str, dict[str, Any]] = {
    "memory-forest": {"trees": 20, "forests": 2},
    "step-time": {"epochs": 20, "hidden": 16},
    "dnnabacus": {"trees": 4},
    "trees": {"trees": 30},
    **{name: {"epochs": 60, "hidden": 16, "learning_rate": 0.01} for name in ("dnnperf", "perfseer", "dippm", "lilou")},
}


def graph_of(width: int, depth: int, batch: int, mode: Literal["train", "infer"] = "infer") -> OpGraph:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    with torch.device("meta"):
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return trace(Workload(model, inputs=(batch, 3, 32, 32), loss=torch.sum, mode=mode))


@functools.cache
def some_graphs(mode: Literal["train", "infer"] = "infer") -> list[OpGraph]:
    return [graph_of(width, depth, batch, mode) for width in (8, 16, 32) for depth in (1, 3) for batch in (4, 8, 16, 32, 64)]


@functools.cache
def some_runs(name: str = "") -> list[Run]:
    """Runs whose memory and time are simple functions of the replay and the roofline.

    They have the features that the learner ``name`` reads, and those of its mode; "": GuardNet's.
    """
    mode: Literal["train", "infer"] = "train" if name in ("dnnperf", "dnnabacus") else "infer"
    views = {LAUNCHES, SUMS, *(learner_class(name).views if name else ())}
    found = []
    for gpu in ("a100", "t4"):
        device = resolve_device(gpu)
        for graph in some_graphs(mode):
            view = features_of(views, graph, device)
            memory = math.log(graph.reserved_bytes(device) + device.context_bytes + 1.2e9)
            time = float(view["sums"][STEP_FEATURES.index("log_roofline")]) + (0.9 if gpu == "t4" else 0.5)
            labels = {"memory": memory, "time": time, "gpu_util": 0.3, "sm_active": -0.4}
            setting = replace(Setting.of(graph, device), device_id=gpu)
            found.append(run_on(setting, table="workload", batch_size=graph.ops[0].shape[0], labels=labels, view=view))
    return found


def fitted(name: str, runs: list[Run], *, epochs: int | None = None, **options: Any) -> Trainable:
    """The learner ``name`` with small settings, fitted to ``runs``; ``options`` are those of `fit`."""
    learner = learner_class(name)(**SMALL.get(name, {}) | ({} if epochs is None else {"epochs": epochs}))
    learner.fit(runs, **options)
    return learner
