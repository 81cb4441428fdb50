"""The guard: a workload and a budget in, a verdict out, and what was measured back into the predictor."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from perfguard.budget import Budget, Limit
from perfguard.exceptions import ConfigurationError, UnguardedTrialWarning, UntrainedDeviceWarning
from perfguard.predictor import DEFAULT_PREDICTOR, Prediction, Predictor, load_predictor

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.measure import Measurement
    from perfguard.store import MeasurementStore
    from perfguard.workload import Workload

Action = Literal["launch", "prune", "repair"]
DEFAULT_RISK = 0.05
_TRIALS_IN_ADVANCE = 10
_EVEN_CHANCE = 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with a trial, and why."""

    action: Action
    reason: str
    """A sentence that a person can act on."""
    prediction: Prediction | None = None
    """None: the guard could not predict, so the trial is launched unguarded."""
    limits: tuple[Limit, ...] = ()
    margins: Mapping[str, float] = field(default_factory=dict)
    """For each limit how far the trial is from feasible, as a logarithm; positive: it does not hold with the required chance."""

    @property
    def p_violation(self) -> float:
        """The largest chance, over the limits, that the trial breaks one; 0 where nothing was predicted."""
        return max((limit.p_violation for limit in self.limits), default=0.0)


class Guard:
    """Decides before the launch, from calibrated predictions; learns from what was measured.

    ``risk`` is the share of the launched trials that may break a limit. The guard keeps an account of the chances that it has
    accepted: a clearly feasible trial leaves most of its share to a doubtful one, so that good trials near the limit are not
    lost, and a trial that breaks a limit with more than an even chance is not launched; see :attr:`threshold`. A failure of
    the guard itself never stops a trial: it is launched, and one :class:`UnguardedTrialWarning` says why.

    Example:
        >>> guard = Guard("a100", memory_budget="38GiB")                    # doctest: +SKIP
        >>> guard.check(workload).reason                                    # doctest: +SKIP
        'needs 46.1 GiB (44.9 to 47.4), the budget is 38.0 GiB'

    Args:
        gpu: a catalog name such as "a100", "auto" (the GPU that NVML shows, else the CPU), "cpu", or a Device.
        memory_budget: bytes, a text such as "38GiB", or a fraction of the device in (0, 1]. None: all of the device.
        time_budget: seconds of the whole trial, or a text such as "2h".
        step_time_budget: seconds of one step, or a text such as "250ms".
        risk: the share of the launched trials that may break a limit, in (0, 1).
        predictor: its name, or the object itself.
        log: the measurement log: a path, a database URL or an open store. None: the user's own log. False: kept in memory.
    """

    def __init__(
        self,
        gpu: str | Device = "auto",
        *,
        memory_budget: int | float | str | None = None,
        time_budget: int | float | str | None = None,
        step_time_budget: int | float | str | None = None,
        risk: float = DEFAULT_RISK,
        predictor: str | Predictor = DEFAULT_PREDICTOR,
        log: str | MeasurementStore | Literal[False] | None = None,
    ) -> None:
        from perfguard.devices import resolve_device
        from perfguard.graph import TraceCache

        if isinstance(risk, bool) or not isinstance(risk, (int, float)) or not 0 < risk < 1:
            raise ConfigurationError(f"risk must lie in (0, 1), for instance 0.05, but got {risk!r}.")
        self.budget = Budget.parse(memory_budget, time_budget, step_time_budget)
        self.device = resolve_device(gpu)
        self.risk = float(risk)
        if self.budget.memory_bytes is not None and self.budget.memory_bytes > self.device.memory_bytes:
            raise ConfigurationError(
                f"memory_budget={memory_budget!r} is more than {self.device.name} has "
                f"({self.device.memory_bytes / 2**30:.1f} GiB). Give less, or a fraction such as 0.95."
            )
        self.predictor: Predictor = load_predictor(predictor) if isinstance(predictor, str) else predictor
        self.log = _open_log(log)
        self._num_launched = 0
        self._expected_violations = 0.0
        self._lock = threading.RLock()
        self._traces = TraceCache()
        self._warned: set[type[Warning]] = set()
        self._learn_from_log()

    @property
    def threshold(self) -> float:
        """The chance of breaking a limit up to which the next trial is launched.

        What the launched trials (ten in advance) may break in all, ``risk`` each, less the chances accepted so far; never
        below ``risk``, never above one half.
        """
        left = self.risk * (self._num_launched + _TRIALS_IN_ADVANCE) - self._expected_violations
        return max(self.risk, min(_EVEN_CHANCE, left))

    @property
    def limited_quantities(self) -> tuple[str, ...]:
        """The quantities that the budget limits, as they are named in a Verdict."""
        limited = {"memory": True, "time": self.budget.trial_time_s, "step_time": self.budget.step_time_s}
        return tuple(quantity for quantity, limit in limited.items() if limit is not None)

    def trace(self, workload: Workload) -> OpGraph:
        """The operators of one step of ``workload`` as this guard's device would run them.

        Raises:
            WorkloadError: if the workload cannot be traced.
        """
        return self._traces.trace(workload, target=self.device)

    def check(self, workload: Workload) -> Verdict:
        """The verdict on ``workload``; nothing is launched and nothing is logged.

        Raises:
            WorkloadError: if the workload cannot be traced.
        """
        return self._judge(self.trace(workload), workload.steps)

    def _judge(self, graph: OpGraph, steps: int | None) -> Verdict:
        with self._lock:
            prediction = self.predictor.predict(graph, self.device, steps=steps)
        if not prediction.trained_on_device:
            self._warn_once(
                UntrainedDeviceWarning,
                f"{prediction.predictor} was not trained on {self.device.name}; its intervals are wider until it has.",
            )
        limits = tuple(self.budget.limits(prediction, self.device))
        margins = {limit.quantity: limit.margin(self.threshold) for limit in limits}
        worst = max(limits, key=lambda limit: margins[limit.quantity])
        action: Action = "prune" if margins[worst.quantity] > 0 else "launch"
        return Verdict(action, _sentence(worst), prediction, limits, margins)

    def decide(
        self,
        make_workload: Callable[[], Workload],
        *,
        study: str = "",
        trial: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Decision:
        """Build, trace, judge and log one proposed trial. Never raises for what the workload or the log does.

        Args:
            make_workload: a function without arguments that returns the Workload.
            study: name of the study, for the log.
            trial: number of the trial in the study, for the log.
            params: the trial's hyperparameters, for the log.
        """
        graph: OpGraph | None = None
        try:
            workload = make_workload()
            graph = self.trace(workload)
            with self._lock:
                verdict = self._judge(graph, workload.steps)
                if verdict.action == "launch":
                    self._num_launched += 1
                    self._expected_violations += verdict.p_violation
        except Exception as error:
            self._warn_once(
                UnguardedTrialWarning,
                f"PerfGuard could not judge a trial and launches it unguarded (said once): {type(error).__name__}: {error}",
            )
            verdict = Verdict("launch", f"not judged: {type(error).__name__}: {error}")
        decision_id = self.log.record_decision(
            study=study,
            trial=trial,
            graph=graph,
            device=self.device,
            action=verdict.action,
            reason=verdict.reason,
            prediction=verdict.prediction,
            params=params or {},
        )
        return Decision(decision_id, verdict)

    def learn(self, decision: Decision, measurement: Measurement) -> None:
        """Write down what a launched trial cost and fine-tune the predictor on all that the log holds for this device."""
        self.log.record_measurement(decision.id, measurement)
        self._learn_from_log()

    def _learn_from_log(self) -> None:
        try:
            observations = self.log.observations(self.device.id)
            with self._lock:
                self.predictor.fine_tune(observations)
        except Exception as error:
            self._warn_once(UnguardedTrialWarning, f"PerfGuard could not learn from its log: {type(error).__name__}: {error}")

    def _warn_once(self, category: type[Warning], message: str) -> None:
        if category not in self._warned:
            self._warned.add(category)
            warnings.warn(message, category, stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_traces")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        from perfguard.graph import TraceCache

        self.__dict__.update(state)
        self._lock = threading.RLock()
        self._traces = TraceCache()


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict that was written to the measurement log."""

    id: str
    """Its key in the log."""
    verdict: Verdict


def _open_log(log: str | MeasurementStore | Literal[False] | None) -> MeasurementStore:
    from perfguard.store import MeasurementStore

    if log is False:
        return MeasurementStore(":memory:")

    if isinstance(log, MeasurementStore):
        return log
    return MeasurementStore.default() if log is None else MeasurementStore(log)


def _sentence(limit: Limit) -> str:
    low, high = map(limit.format, limit.estimate.interval())
    verb, noun = {"memory": ("needs", ""), "time": ("takes", ""), "step_time": ("takes", " a step")}[limit.quantity]
    return f"{verb} {limit.format(limit.estimate.median)}{noun} ({low} to {high}), the budget is {limit.format(limit.limit)}"


__all__ = ["DEFAULT_RISK", "Action", "Decision", "Guard", "Verdict"]
