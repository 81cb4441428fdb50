"""The guard of users on a table of measured runs: GuardNet's online learning, the account of risk, physics, and the log.

Only the shipped weights are replaced: :class:`HeldOut` answers what was predicted of a point when its family was held out. The
graph of a point stands for the traced one. It has one storage, as large as the live bytes, by which physics rules a point out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from _table_spaces import Point, Space

from perfguard import Estimate, Guard, Prediction, Workload
from perfguard.devices import Device
from perfguard.graph import OpGraph, Storage, StorageKind
from perfguard.measure import Measurement
from perfguard_models.graph_network import PathTimes
from perfguard_models.guardnet import GuardNet
from perfguard_models.learner import Step
from perfguard_models.raw_prediction import PRIOR, RawEstimate, RawPrediction, Weights, embedding_of, physics_of
from perfguard_optuna import OptunaGuard

_NO_TIMES = np.zeros(0)


class HeldOut(Weights):
    """Weights that answer for the points of a space; the storage of a graph is named after its point."""

    version = "held out"

    def __init__(self, space: Space) -> None:
        self._points = {point.name: point for point in space.points.values()}

    def trained_on(self, device: Device) -> bool:
        """The weights know the GPU by other families."""
        return True

    def predict(self, graph: OpGraph, device: Device) -> RawPrediction:
        """What was predicted of the point that ``graph`` stands for. No machine is known that would be slower or faster."""
        point = self._points[graph.storages[0].module]
        memory, time = (Estimate(median, PRIOR.total * sigma) for median, sigma in (point.memory, point.time))
        physics = physics_of(point.sums, float(np.log(memory.median)))
        return RawPrediction(
            of={"memory": RawEstimate(memory, physics, True), "time": RawEstimate(time, np.zeros(2), True)},
            path=PathTimes(np.ones(()), np.zeros(()), _NO_TIMES, _NO_TIMES),
            embedding=embedding_of(point.sums),
            shares={},
            step=Step(is_single=False, view={"sums": point.sums}),
        )


class Oracle:
    """A predictor that knows the measured values."""

    name = "oracle"

    def __init__(self, space: Space) -> None:
        self._points = {point.name: point for point in space.points.values()}

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        """What was measured of the point that ``graph`` stands for."""
        point = self._points[graph.storages[0].module]
        step_time = Estimate(point.step_s, 1e-4)
        total_time = None if steps is None else step_time.scaled(steps)
        memory = Estimate(point.memory_bytes, 1e-4)
        return Prediction(memory, step_time, total_time, self.name, device.id, trained_on_device=True)

    def fine_tune(self, observations: Any) -> None:
        """There is nothing to learn."""


class TableGuard(Guard):
    """A guard whose workloads are points of a table: nothing is traced."""

    def trace(self, workload: Any) -> OpGraph:
        """The graph that stands for the point that ``build`` found."""
        point = workload.model
        live_bytes = 1 if isinstance(self.predictor, Oracle) else round(point.live_bytes)  # an oracle needs no bound
        storages = (Storage(live_bytes, StorageKind.ACTIVATION, -1, 0, point.name),)
        return OpGraph((), storages, "train", "fp32", "nchw")


def guard_of(space: Space, *, knows: bool) -> OptunaGuard:
    """A guard of ``space`` with an empty log in memory. One that ``knows`` is an oracle."""
    guard = OptunaGuard(space.gpu, build=partial(_build, space=space), log=False)
    predictor = Oracle(space) if knows else GuardNet(dict.fromkeys(("cpu", "cuda"), HeldOut(space)))
    budgets: dict[str, Any] = {"memory_budget": space.limit_bytes}
    if space.time_budget_s is not None:
        budgets["time_budget"] = space.time_budget_s
    guard.guard = TableGuard(space.gpu, predictor=predictor, log=guard.log, **budgets)
    return guard


def _build(params: Mapping[str, Any], space: Space) -> Workload:
    """A workload whose model is the point itself."""
    point = space.at(params)
    return Workload(point, inputs=(1,), steps=point.num_steps)  # type: ignore[arg-type]


def measurement_of(space: Space, point: Point, *, lasts_s: float) -> Measurement:
    """What a guard reads of a trial of ``point``. Of one that ran out of memory, nobody knows how much more it needs.

    Where the table has no memory of a run that fitted, nothing is read of it. A step is timed where the time is limited.
    """
    fails_by = space.fails_by(point)
    if fails_by == "memory":
        memory: int | None = space.limit_bytes
    else:
        memory = round(point.memory_bytes) if point.is_read else None
    num_steps = 0 if fails_by == "memory" else max(1, round(point.num_steps * lasts_s / point.trial_s))
    return Measurement(
        status="oom" if fails_by == "memory" else "ok",
        device_id=space.gpu,
        device_name=space.gpu,
        peak_memory_bytes=memory,
        step_time_s=None if fails_by == "memory" or space.time_budget_s is None else point.step_s,
        total_time_s=lasts_s,
        num_steps=num_steps,
        method="table",
        framework="",
        cut_short="too slow" if fails_by == "time" else "",
    )
