"""The guard judges a workload against a budget before it is launched, and learns from what the launched ones cost.

The way of a trial through this file: :meth:`Guard.describe` builds the workload, :meth:`Guard.decide` traces it,
:meth:`Guard.judge` predicts its graph and compares it with the budget, :meth:`Guard.record` logs the verdict. After the run,
:meth:`Guard.learn` logs the measurement and conditions the predictor on the log.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import cloudpickle  # type: ignore[import-untyped]

from perfguard.budget import Budget, BudgetSettings
from perfguard.device_room import DeviceRoom
from perfguard.exceptions import (
    BudgetWarning,
    ConfigurationError,
    DriftWarning,
    LogError,
    LogWarning,
    MeasurementWarning,
    TooLargeError,
    UnguardedTrialError,
    UnguardedTrialWarning,
    UntrainedDeviceWarning,
    log_once,
    warn_user,
)
from perfguard.guard_time import GuardClock, on_guard_time
from perfguard.last_used import LastUsed
from perfguard.learning import Assessment, Learner, start_tuning
from perfguard.own_runs import judged_by
from perfguard.physics import HOPELESS, LeastMemory, within_bounds
from perfguard.predictor import DEFAULT_PREDICTOR, Prediction, Predictor, Refinable, load_predictor
from perfguard.pytorch import gc_paused
from perfguard.quantities import format_dollars, format_seconds, parse_seconds
from perfguard.repair import Remedy, check_remedies, checkpointing, find_repair, largest_batch
from perfguard.risk_budget import DEFAULT_RISK, EVEN_CHANCE, MOST_DOUBTFUL, SMALL_CHANCE, PredictedTimes, check_risk, shows
from perfguard.steps import Steps, steps_of_finished
from perfguard.summary import summarize
from perfguard.verdict import ALIKE, Action, Decision, Verdict
from perfguard.workload import AnyBuild, AnyWorkload, CapturedTrial, CapturingBuild, Workload, build_workload, did_you_mean

if TYPE_CHECKING:
    import subprocess

    from torch import nn
    from typing_extensions import Unpack

    from perfguard.budget import Limit
    from perfguard.capture.real import Difference
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.log import MeasurementStore
    from perfguard.measure import Measurement
    from perfguard.pace import Running

    class GuardSettings(BudgetSettings, total=False):
        """The keyword arguments of :class:`Guard`."""

        epochs: int | str | None
        risk: float
        on_violation: OnViolation
        on_oom: OnOom
        hard_time_limit: int | float | str | None
        remedies: Sequence[Remedy]
        predictor: str | Predictor
        log: str | MeasurementStore | Literal[False] | None
        refine: bool | None
        strict: bool
        dry_run_network: bool
        share_device: bool


_Workload = TypeVar("_Workload", bound=AnyWorkload)
OnViolation = Literal["prune", "repair", "warn"]
OnOom = Literal["prune", "repair"]


class Guard:
    """Decides before the launch, from calibrated predictions, and learns from measurements.

    ``risk`` is the share of a study's device time that may be lost in launched trials that exceed a limit. A trial that more
    likely fits than not is launched. One that more likely exceeds a limit is launched while what it would lose is within the
    share; see :class:`perfguard.risk_budget.RiskBudget`. What physics rules out is never launched.

    A failure of the guard itself never stops a trial: it is launched, and one :class:`UnguardedTrialWarning` has the reason. A
    guard that is ``strict`` raises an :class:`UnguardedTrialError` instead.

    Example:
        >>> guard = Guard("a100", memory_budget="38GiB")                    # doctest: +SKIP
        >>> guard.check(workload).action                                    # doctest: +SKIP
        'prune'

    Args:
        gpu: the device to guard. A catalog name such as "a100", "auto" (the GPU that NVML shows, else the CPU), "cpu", or a
            Device.
        memory_budget: the most memory. A text such as "38GiB", a fraction of the device in (0, 1], or bytes. None: all of the
            device. A number of bytes below 1 MiB is refused. On a GPU, a budget is also refused if the driver's context alone
            exceeds it.
        host_memory_budget: the most memory of the host, for the trial's process and the workers of its loaders. A text such as
            "64GiB", a fraction of this machine's memory in (0, 1], or bytes. It needs a dry run of the objective.
        time_budget: seconds of the whole trial, or a text such as "2h". It needs the steps of a trial. They are those of the
            Workload or of the dry run, else those that follow from ``epochs``. Else they are estimated from the study's finished
            trials, with a wider interval.
        epoch_time_budget: seconds of an epoch. Needs ``Workload(steps_per_epoch=...)``.
        step_time_budget: the most time of one step. Seconds, or a text such as "250ms".
        latency_budget: seconds of one batch of inference.
        energy_budget: joules of one batch of inference, or a text such as "250mJ". It needs a predictor that knows energy.
        cost_budget: dollars of the whole trial, or a text such as "$2". Needs what ``time_budget`` needs, and ``price_per_hour``.
        price_per_hour: dollars of an hour on the device, for ``cost_budget``.
        epochs: epochs of a trial, or the name of the hyperparameter that holds them. They count where the steps of an epoch are
            known, and those of the trial are not. None: unknown.
        risk: the share of a study's device time that may be lost in launched trials that exceed a limit, in [0, 1). With 0, only
            what fits with a chance of 95% is launched, so good trials near the limit are lost.
        on_violation: the action on a trial that would break a limit. With "prune", it is not launched. With "repair", it is
            launched with a remedy that lets it fit, and pruned if there is none. With "warn", it is launched, and a
            :class:`BudgetWarning` gives the reason. With "prune" and "repair", a trial that runs is ended as soon as its pace
            shows that it will break a budget of time.
        on_oom: the action on a trial of a tuner that runs out of memory all the same. With "prune", it ends. With "repair", it
            runs once more, with a remedy that makes it smaller. That needs a ``build`` that describes the trials.
        hard_time_limit: seconds after which a trial of a tuner is ended, all its tries together, or a text such as "2h". None: no
            limit.
        remedies: what "repair" may change. The remedy "accumulation" uses smaller batches and accumulates gradients. The remedy
            "precision" changes fp32 to autocast in half precision. The remedy "checkpointing" uses the model's own switch.
        predictor: the predictor. Either its name or the object itself.
        log: the measurement log. A path, a database URL or an open store. None: the user's own log. False: kept in memory.
        refine: fine-tune the weights from time to time in a separate process, as `perfguard learn` does. None: only on a GPU, and
            only if the log is not in memory. On a CPU, fine-tuning would disturb the measurements.
        strict: launch no trial without a verdict, or without a check of one of the budgets. Such a trial raises
            :class:`perfguard.exceptions.UnguardedTrialError`.
        dry_run_network: leave the network open in dry runs, for data that are read from far. What the objective sends is then
            sent, too.
        share_device: run several trials on the device side by side. A trial of a tuner starts when its predicted memory fits
            beside what the running trials of this host have reserved, and waits until then. So all of them need the same
            ``memory_budget``, which they share.

    Raises:
        ConfigurationError: for an argument that cannot be right, or a budget that the device cannot have.
        LogError: for a log that cannot be used.
    """

    def __init__(
        self,
        gpu: str | Device = "auto",
        *,
        epochs: int | str | None = None,
        risk: float = DEFAULT_RISK,
        on_violation: OnViolation = "prune",
        on_oom: OnOom = "prune",
        hard_time_limit: int | float | str | None = None,
        remedies: Sequence[Remedy] = ("accumulation",),
        predictor: str | Predictor = DEFAULT_PREDICTOR,
        log: str | MeasurementStore | Literal[False] | None = None,
        refine: bool | None = None,
        strict: bool = False,
        dry_run_network: bool = False,
        share_device: bool = False,
        **budgets: Unpack[BudgetSettings],
    ) -> None:
        from perfguard.devices import resolve_device
        from perfguard.graph import TraceCache
        from perfguard.log import MeasurementStore

        began_s = time.monotonic()
        self.clock = GuardClock()
        if on_violation not in get_args(OnViolation):
            raise ConfigurationError(f"on_violation must be one of {', '.join(get_args(OnViolation))}, but got {on_violation!r}.")
        if on_oom not in get_args(OnOom):
            raise ConfigurationError(f"on_oom must be one of {', '.join(get_args(OnOom))}, but got {on_oom!r}.")
        if not (epochs is None or isinstance(epochs, str) or (type(epochs) is int and epochs >= 1)):
            raise ConfigurationError(f"epochs must be at least 1, or the name of a hyperparameter, but got {epochs!r}.")
        self.epochs = epochs
        self.on_violation = on_violation
        self.on_oom = on_oom
        self.hard_time_limit_s = None if hard_time_limit is None else parse_seconds(hard_time_limit, what="hard_time_limit")
        self.remedies = check_remedies(remedies)
        self.risk = check_risk(risk)
        self.strict = bool(strict)
        self.dry_run_network = bool(dry_run_network)
        self.device = resolve_device(gpu)
        for name in budgets:
            if name not in BudgetSettings.__annotations__:
                known = [*inspect.signature(Guard).parameters.keys() - {"budgets"}, *BudgetSettings.__annotations__]
                raise ConfigurationError(f"There is no setting {name!r}{did_you_mean(name, known, cutoff=0.6)}.")
        self.budget = Budget.parse(**budgets)
        self.budget.check_device(self.device)
        self.room = self._room() if share_device else None
        """What the trials of this host have reserved on the device. None: they do not share it."""
        self.predictor: Predictor = load_predictor(predictor) if isinstance(predictor, str) else predictor
        if log in ("", True) or not isinstance(log, MeasurementStore | str | os.PathLike | bool | None):
            raise ConfigurationError(f"log must be a path or URL, a MeasurementStore, None (your own) or False, but got {log!r}.")
        self.log = log if isinstance(log, MeasurementStore) else MeasurementStore(":memory:" if log is False else log)
        self._traces = TraceCache()
        self._real_steps: LastUsed[str, _RealStep] = LastUsed(1024, most_weight=100_000, weigh=_num_operators)
        """What captured steps really are, by their hash. A launched trial shows it."""
        self._lock = threading.RLock()
        self._warned: set[tuple[type[Warning], str]] = set()
        self._learner = Learner(self.predictor, self.log)
        self._assessment = Assessment()
        self._study = ""
        """The study that the predictor was conditioned for, see :func:`perfguard.learning.assess`."""
        is_wanted = self.device.kind == "cuda" if refine is None else refine
        can_refine = isinstance(predictor, str) and isinstance(self.predictor, Refinable) and self.log.url is not None
        self._tuned = str(predictor) if is_wanted and can_refine else ""
        """Name of the predictor whose weights are fine-tuned. Empty: they are not."""
        self._num_runs = 0
        self._costly: set[str] = set()
        """Studies that the guard costs more than it saves."""
        self._tuning: subprocess.Popen[bytes] | None = None
        self._learn_from_log("")
        self._announce_log()
        self.clock.add(time.monotonic() - began_s)

    def _room(self) -> DeviceRoom:
        # Processes that may use different GPUs of one model have a room each.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        name = self.device.name if self.device.kind == "cpu" else f"{self.device.name} {visible}"
        capacity = self.budget.most.get("memory") or self.device.memory_bytes
        return DeviceRoom(name=name, capacity_bytes=int(capacity))

    def _announce_log(self) -> None:
        """Announce the log that the verdicts depend on, and its number of runs. Once per log in each process."""
        if self.log.url is None:
            return
        from perfguard.devices.detect import is_here

        number = self.num_learnt
        runs = "1 run" if number == 1 else f"{number} runs"
        found = f"brings {runs} of {self.device.name}, from which predictions learn"
        if not number:
            command = f"perfguard calibrate --gpu {'cpu' if self.device.kind == 'cpu' else 'auto'}"
            offer = f"; `{command}` measures some in a minute" if is_here(self.device) else ""
            found = f"has no run of {self.device.name} yet{offer}"
        log_once(self.log.url, f"The measurement log {self.log.location} {found}. With log=False a study starts without a log.")

    @property
    def num_learnt(self) -> int:
        """Number of measured runs of the device from which the predictor has learnt."""
        return len(self._assessment.observations)

    @property
    def accepted(self) -> float:
        """The chance of exceeding a limit up to which a trial is launched whatever is left to lose."""
        return EVEN_CHANCE if self.risk else SMALL_CHANCE

    # --- Verdicts ---------------------------------------------------------------------------------------------------------------

    def trace(self, workload: AnyWorkload) -> OpGraph:
        """The operators of one step of ``workload`` as this guard's device would run them.

        Raises:
            WorkloadError: if the workload cannot be traced.
        """
        if isinstance(workload, CapturedTrial):
            real = self._real_steps.get(workload.graph.content_hash)
            return workload.graph if real is None or real.graph is None else real.graph
        return self._traces.trace(workload, target=self.device)

    @on_guard_time
    def key_of(self, found: AnyWorkload | Exception, params: Mapping[str, Any]) -> Hashable:
        """Return all that the verdict on ``found`` depends on, as a key for :class:`perfguard.rejections.Search`.

        Two configurations with the same workload, such as two learning rates, have the same key. What cannot be built or traced,
        for instance because a tensor is too large, has its ``params`` as the key instead.
        """
        try:
            if isinstance(found, Exception):
                raise found
            traced = self.trace(found).content_hash
        except Exception:  # the verdict says why
            return key_of_params(params)
        if isinstance(found, CapturedTrial):
            traced += "".join(phase.content_hash for phase in found.phases.values())
            if found.host_memory is not None and "host_memory" in self.budget.most:  # it differs a little from dry run to dry run
                traced += f"{10 * math.log(found.host_memory.needed_bytes):.0f}"
        return traced, found.mode, found.steps, found.steps_per_epoch

    @on_guard_time
    def describe(self, build: AnyBuild, params: Mapping[str, Any]) -> AnyWorkload | Exception:
        """Return what a trial with ``params`` would run, or the error of ``build``. :meth:`decide` takes either."""
        try:
            found = build(params) if isinstance(build, CapturingBuild) else build_workload(build, params)
            return self.with_steps(found, params)
        except Exception as error:
            return error

    def with_steps(self, workload: _Workload, params: Mapping[str, Any]) -> _Workload:
        """Return ``workload`` with the steps that ``epochs`` makes of those of an epoch, unless the user has stated its steps."""
        epochs = params.get(self.epochs) if isinstance(self.epochs, str) else self.epochs
        is_stated = workload.steps is not None and not isinstance(workload, CapturedTrial)
        if epochs is None or is_stated or workload.steps_per_epoch is None:
            return workload
        return replace(workload, steps=max(1, round(epochs * workload.steps_per_epoch)))

    def predict(self, graph: OpGraph, *, steps: int | None = None, steps_log_sigma: float = 0.0) -> Prediction:
        """The prediction for ``graph``, as unsure as the log shows it to be, and never below what a reading can be.

        Args:
            graph: one step.
            steps: steps of the whole trial. None: unknown.
            steps_log_sigma: standard deviation of their logarithm. 0: they are known.
        """
        with self._lock:
            prediction = self.predictor.predict(graph, self.device, steps=steps)
            prediction = within_bounds(prediction, graph, self.device, widening=self._assessment.widening)
        if prediction.total_time is None:
            return prediction
        words = "finished trials differ in their steps"
        total_time = prediction.total_time.scaled(1.0, log_sigma=steps_log_sigma, name="number of steps", why=words)
        return replace(prediction, total_time=total_time)

    def judge(
        self,
        graph: OpGraph | LeastMemory,
        limits: Callable[[Prediction], Iterable[Limit]],
        *,
        threshold: float,
        steps: int | None = None,
        steps_log_sigma: float = 0.0,
        phases: Mapping[str, OpGraph] = MappingProxyType({}),
    ) -> Verdict:
        """Return "launch" if each limit holds with the chance 1 - ``threshold``, else "prune". Nothing is logged.

        A step whose least memory is far over the budget is pruned by this bound alone. The bound also overrules a prediction that
        would launch what cannot fit.

        Args:
            graph: one step, or the least memory of a step that is too large to trace.
            limits: the limits beside a prediction, see :meth:`perfguard.Budget.limits`.
            threshold: the accepted chance of breaking a limit, in (0, 1).
            steps: steps of the whole trial. None: unknown.
            steps_log_sigma: standard deviation of their logarithm. 0: they are known.
            phases: other phases of the trial, whose memory counts if it is larger.
        """
        capacity_bytes = self.budget.capacity_bytes(self.device)
        least = graph if isinstance(graph, LeastMemory) else LeastMemory.of(graph, self.device)
        prediction: Prediction | None = None
        if not isinstance(graph, LeastMemory) and least.num_bytes <= HOPELESS * capacity_bytes:
            prediction = self.predict(graph, steps=steps, steps_log_sigma=steps_log_sigma)
            largest = ""
            for name, phase in phases.items():
                other = self.predict(phase)
                if other.peak_memory.median > prediction.peak_memory.median:
                    prediction = prediction.with_memory_of(other, phase=name)
                    largest = name
            verdict = replace(
                Verdict.of(prediction, limits(prediction), accepted=threshold),
                phase=largest,
                is_ruled_out=least.num_bytes > capacity_bytes,
            )
            if verdict.action == "prune" or least.num_bytes <= capacity_bytes:
                return verdict
        prediction = least.prediction(self.device, steps=steps, instead_of=prediction)
        return Verdict.of(prediction, limits(prediction), accepted=threshold, bound=str(least))

    def check(self, model: Workload | nn.Module, inputs: Any = None, **fields: Any) -> Verdict:
        """The verdict on a workload, or on a model with an example batch. Nothing is launched or logged.

        Example:
            >>> guard.check(model, (64, 3, 224, 224), optimizer=torch.optim.AdamW).action       # doctest: +SKIP
            'launch'

        Args:
            model: a Workload, or the model of one.
            inputs: the example batch of a model: tensors, specifications or a shape, as in ``Workload(model, inputs=...)``. A
                Workload takes none.
            fields: the other fields of :class:`perfguard.Workload`, with a model.

        Raises:
            WorkloadError: if the workload cannot be traced.
            ConfigurationError: if one of the budgets cannot be checked for it, and the guard is strict.
        """
        workload = as_workload(model, inputs, **fields)
        verdict = self._judge(workload)
        self._warn_unchecked(self._unchecked(workload, verdict))
        return self._settle(verdict, workload)[0]

    @on_guard_time
    def preview(self, workload: AnyWorkload, *, study: str = "") -> Verdict:
        """The verdict of :meth:`check` in a study, without warnings of budgets that cannot be checked.

        Args:
            workload: what the trial would run.
            study: name of the study that would run it. Its own far readings are believed, and its risk is spent.

        Raises:
            WorkloadError: if the workload cannot be traced.
        """
        with self._lock:
            if study != self._study:
                self._learn_from_log(study)
            return self._settle(self._judge(workload), workload)[0]

    def max_batch_size(self, model: Workload | nn.Module, inputs: Any = None, *, at_most: int = 2**20, **fields: Any) -> int:
        """The largest batch that holds all limits with a chance of 95%, while the next one does not. 0: not even one does.

        Args:
            model: as for :meth:`check`. The batch is the first dimension that all inputs and targets share.
            inputs: as for :meth:`check`.
            at_most: where to stop looking.
            fields: as for :meth:`check`.

        Raises:
            WorkloadError: if the workload cannot be traced, or its batch dimension is unclear.
        """
        return largest_batch(self._fits, as_workload(model, inputs, **fields), at_most=at_most)

    def _fits(self, workload: Workload, *, most_bytes: float = math.inf) -> bool:
        verdict = self._judge(workload, threshold=SMALL_CHANCE)
        return verdict.action == "launch" and verdict.predicted["memory"].median <= most_bytes

    def _judge(self, workload: AnyWorkload, graph: OpGraph | None = None, *, threshold: float | None = None) -> Verdict:
        """The verdict on ``workload`` as it is proposed, by its earlier runs and its prediction.

        A ``threshold`` of None is :attr:`accepted`. With another one, earlier runs do not count.
        """
        steps = self._steps_of(workload)
        captured = workload if isinstance(workload, CapturedTrial) else None
        with gc_paused():  # a trace makes many small objects, and collecting them between takes longer than the trace
            subject = graph or self._trace_or_bound(workload)
            verdict = self.judge(
                subject,
                self._limits_of(workload),
                threshold=self.accepted if threshold is None else threshold,
                steps=None if steps is None else steps.number,
                steps_log_sigma=0.0 if steps is None else steps.log_sigma,
                phases={} if captured is None else captured.phases,
            )
        source = "described" if captured is None else captured.source
        verdict = replace(verdict, source=source, remark=_remark_on(verdict, workload, steps))
        if threshold is None and verdict.action == "prune" and not isinstance(subject, LeastMemory):
            runs = self._assessment.runs_of.get(subject.content_hash, ())
            verdict = judged_by(verdict, runs, steps=None if steps is None else steps.number)
        self._warn_untrained(verdict)
        return self._with_epoch_time(verdict, workload)

    def _steps_of(self, workload: AnyWorkload) -> Steps | None:
        """The steps of the whole trial, if need be from the study's finished trials. None: they are unknown, or do not matter."""
        if workload.steps:
            return Steps(workload.steps)
        if self.budget.longest_trial_s is None:
            return None
        return steps_of_finished(self._assessment.observations, study=self._study, steps_per_epoch=workload.steps_per_epoch)

    def _trace_or_bound(self, workload: AnyWorkload) -> OpGraph | LeastMemory:
        """The operators of one step, or the least memory of one that is too large to trace."""
        try:
            return self.trace(workload)
        except TooLargeError as error:
            return LeastMemory.behind(error, self.device)

    def _with_epoch_time(self, verdict: Verdict, workload: AnyWorkload) -> Verdict:
        """``verdict`` with the time of an epoch, if a budget limits the time. Later trials know from it what an epoch was."""
        per_epoch = workload.steps_per_epoch
        if self.budget.longest_trial_s is None or not per_epoch:
            return verdict
        epoch_time = verdict.predicted["step_time"].scaled(per_epoch)
        return replace(verdict, predicted={**verdict.predicted, "epoch_time": epoch_time})

    def _warn_untrained(self, verdict: Verdict) -> None:
        if verdict.prediction is not None and not verdict.prediction.trained_on_device:
            self.warn_once(
                UntrainedDeviceWarning,
                f"{verdict.prediction.predictor} was not trained on such steps on {self.device.name}. "
                "Read the interval and not the median until some trials have run.",
            )

    def _limits_of(self, workload: AnyWorkload | None) -> Callable[[Prediction], Iterable[Limit]]:
        """The limits of ``workload`` beside its prediction. A workload of None cannot be built."""
        return partial(
            self.budget.limits,
            device=self.device,
            infers=workload is not None and workload.mode == "infer",
            steps_per_epoch=None if workload is None else workload.steps_per_epoch,
            host_memory=workload.host_memory if isinstance(workload, CapturedTrial) else None,
        )

    def _at_risk(self, verdict: Verdict) -> Verdict:
        """Launch a doubtful trial if the study can afford its failure. The verdict says the trade either way."""
        doubtful = [limit for limit in verdict.limits if limit.p_violation > EVEN_CHANCE]
        if verdict.is_ruled_out or not self.risk or not doubtful or verdict.p_violation > MOST_DOUBTFUL:
            return verdict
        history = self.log.history(self._study)
        predicted = PredictedTimes.of(verdict)
        failure_s = max(history.failure_s(shows(limit.quantity, phase=verdict.phase), predicted) for limit in doubtful)
        trial_s = history.trial_s(predicted)
        budget = history.budget(self.risk, predicted)
        accepted = budget.accepted(failure_s=failure_s, trial_s=trial_s)
        action: Action = "launch" if verdict.p_violation <= accepted else "prune"
        grounds = budget.trade(failure_s=failure_s, trial_s=trial_s)
        return replace(verdict, action=action, accepted=accepted, grounds=grounds)

    def _settle(self, verdict: Verdict, workload: AnyWorkload, ran_out: Decision | None = None) -> tuple[Verdict, AnyWorkload]:
        """The verdict and the workload after ``on_violation`` is applied, or after a first try ``ran_out`` of memory.

        A trial that can be repaired is not launched at the risk of a failure.
        """
        fits = self._fits
        tried = ""
        if ran_out is not None:
            # The guard was wrong about the trial, and may not believe the reading. So a quarter less than what ran out must be
            # predicted. The mean error on a card never seen is as large (27.5%, training on the A100, docs/results/accuracy.md).
            before = ran_out.verdict.predicted.get("memory")
            capacity_bytes = self.budget.capacity_bytes(self.device)
            fits = partial(fits, most_bytes=0.75 * min(capacity_bytes, before.median if before else capacity_bytes))
            tried = f"its first try ({ran_out.verdict.repair}) ran out of memory"
        elif verdict.action == "launch":
            return verdict, workload
        elif self.on_violation == "prune":
            return self._at_risk(verdict), workload
        elif self.on_violation == "warn":
            return self._overrule(verdict), workload
        found = find_repair(fits, workload, self.remedies, self.device) if isinstance(workload, Workload) else None
        if found is None and ran_out is None and (at_risk := self._at_risk(verdict)).action == "launch":
            return at_risk, workload
        if found is None:
            why = f"no remedy of {', '.join(self.remedies)} helps"
            if isinstance(workload, CapturedTrial):
                why = "a captured trial cannot be repaired: that needs `build`"
            return replace(verdict, action="prune", remark="; ".join(filter(None, (verdict.remark, why)))), workload
        repair, repaired = found
        with checkpointing(repaired.model, on=repair.checkpointing):
            after = self._judge(repaired, threshold=SMALL_CHANCE)
        remark = "; ".join(filter(None, (after.remark, tried)))
        return replace(after, action="repair", repair=repair, as_proposed=verdict.worst, remark=remark), repaired

    def _overrule(self, verdict: Verdict) -> Verdict:
        warn_user(f"PerfGuard launches a trial that it would prune: {verdict.reason}", BudgetWarning)
        return replace(verdict, action="launch")

    def _unchecked(self, workload: AnyWorkload, verdict: Verdict) -> Mapping[str, str]:
        """The budgets that cannot be checked for ``workload``: the reason for each, by the budget's name.

        Raises:
            ConfigurationError: if there is one, and the guard is strict.
        """
        knows_energy = verdict.action == "prune" or verdict.prediction is None or verdict.prediction.energy is not None
        knows_time = "time" in verdict.predicted
        unchecked = self.budget.cannot_bind(workload, knows_time=knows_time, knows_energy=knows_energy)
        if self.strict and unchecked:
            raise ConfigurationError(" ".join(unchecked.values()))
        return unchecked

    def _warn_unchecked(self, unchecked: Mapping[str, str]) -> None:
        for budget, problem in unchecked.items():
            self.warn_once(UnguardedTrialWarning, f"{problem} Until then trials run without that check.", about=budget)

    # --- One trial --------------------------------------------------------------------------------------------------------------

    @on_guard_time
    def decide(
        self,
        workload: AnyWorkload | Exception,
        *,
        study: str = "",
        trial: int | None = None,
        params: Mapping[str, Any] | None = None,
        trial_id: str | None = None,
        grounds: str = "",
        ran_out: Decision | None = None,
    ) -> Decision:
        """Trace, judge and log one proposed trial.

        Failures of the workload or the log never raise. A strict guard raises for a trial that cannot be judged.

        Args:
            workload: what the trial would run, or why that is not known: see :meth:`describe`.
            study: name of the study, for the log.
            trial: number of the trial in the study. It is for the log alone.
            params: the trial's hyperparameters, for the log.
            trial_id: the tuner's own name of the trial, for the log. None: it has only a number.
            grounds: why the trial is launched whatever is predicted, unless physics rules it out. Empty: it is not.
            ran_out: the decision on the trial's first try, which ran out of memory all the same. The verdict is then "repair", or
                else "prune", which is not logged.

        Raises:
            UnguardedTrialError: if the trial cannot be judged, or not by all budgets, and the guard is strict.
        """
        graph: OpGraph | None = None
        steps: int | None = None
        unchecked: Mapping[str, str] = {}
        try:
            if isinstance(workload, TooLargeError):  # a tensor that it makes is larger than any memory
                least = LeastMemory.behind(workload, self.device)
                verdict = self.judge(least, self._limits_of(None), threshold=self.accepted)
                if self.on_violation == "warn":
                    verdict = self._overrule(verdict)
            elif isinstance(workload, Exception):
                raise workload
            else:
                workload = self.with_steps(workload, params or {})
                steps = workload.steps
                with suppress(TooLargeError):  # which is a verdict too; `_judge` gives it
                    graph = self.trace(workload)  # outside of the lock: other threads judge meanwhile
            with self._lock:
                if not isinstance(workload, Exception):
                    if study != self._study:  # another study's far readings are believed under other conditions
                        self._learn_from_log(study)
                    verdict = self._judge(workload, graph)
                    unchecked = self._unchecked(workload, verdict)
                    if isinstance(workload, CapturedTrial) and workload.source == ALIKE:
                        graph = None  # the measurement is one of another step, from which nothing is learnt
                    verdict, workload = self._settle(verdict, workload, ran_out)
                    if grounds and verdict.action == "prune" and not verdict.is_ruled_out:
                        verdict = replace(verdict, action="launch", grounds=grounds)
                if verdict.action == "launch" and verdict.accepted > EVEN_CHANCE:  # what it may lose, no other may
                    return self.record(verdict, graph, study=study, trial=trial, params=params, steps=steps, trial_id=trial_id)
            if isinstance(workload, Workload) and verdict.action == "repair":
                with checkpointing(workload.model, on=verdict.repair.checkpointing):
                    graph = self.trace(workload)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            if self.strict and ran_out is None:
                raise UnguardedTrialError(
                    f"PerfGuard could not judge a trial, so it is not launched (strict=True): {cause}"
                ) from error
            does = "launches it unguarded" if ran_out is None else "prunes it"
            self.warn_once(UnguardedTrialWarning, f"PerfGuard could not judge a trial and {does} (shown once): {cause}")
            verdict = Verdict(action="launch", unjudged=cause)
        self._warn_unchecked(unchecked)
        if ran_out is not None and verdict.action != "repair":
            return Decision("", replace(verdict, action="prune"), steps, study)
        return self.record(verdict, graph, study=study, trial=trial, params=params, steps=steps, trial_id=trial_id)

    @on_guard_time
    def record(
        self,
        verdict: Verdict,
        graph: OpGraph | None = None,
        *,
        study: str = "",
        trial: int | None = None,
        params: Mapping[str, Any] | None = None,
        steps: int | None = None,
        trial_id: str | None = None,
    ) -> Decision:
        """Write a verdict into the log, with the guard's time until now. The arguments are those of :meth:`decide`.

        A graph of None is unknown.
        """
        decision_id = ""
        verdict = replace(verdict, guard_s=self.clock.take(), dry_run_s=self.clock.take_dry_runs())
        with self._going_on(LogWarning, "log a verdict"):  # the log keeps what it cannot deliver; this is worse
            decision_id = self.log.record_decision(
                verdict, graph=graph, device=self.device, study=study, trial=trial, params=params or {}, trial_id=trial_id
            )
        return Decision(decision_id, verdict, steps, study)

    def breaks_time_budget(self, decision: Decision, run: Running, *, has_neighbours: bool = False) -> str | None:
        """Return why ``run`` will almost surely exceed its time or cost budget at the pace measured so far. None: it may hold it.

        The result is also None for a run on another device than the guarded one. The pace of a run that ``has_neighbours`` on
        its device does not count: it becomes faster when they end.
        """
        limit_s = self.budget.longest_trial_s
        if limit_s is None:
            return None
        is_over = run.elapsed_s > limit_s
        total = None
        if not is_over and not has_neighbours and decision.steps is not None and (pace := run.pace) is not None:
            total = pace.total_time(elapsed_s=run.elapsed_s, steps_left=max(0, decision.steps - run.num_steps))
        if not is_over and (total is None or total.p_exceeds(limit_s) < 1 - SMALL_CHANCE):
            return None
        if run.is_elsewhere:  # asks the device, which would be most of the cost of a step's check
            return None
        cost = self.budget.most.get("cost") if limit_s == self.budget.paid_time_s else None
        limit = format_seconds(limit_s) + ("" if cost is None else f" ({format_dollars(cost)})")
        if total is None:
            return f"it has taken {format_seconds(run.elapsed_s)} already, the budget is {limit}"
        low, high = map(format_seconds, total.interval())
        return f"at the measured pace it takes {format_seconds(total.median)} ({low} to {high}), the budget is {limit}"

    # --- Learning ---------------------------------------------------------------------------------------------------------------

    def wants_real_step(self, captured: CapturedTrial) -> bool:
        """Return whether a step of a launched trial is to be held against its dry run: no equal trial was launched not long ago.

        :class:`perfguard.capture.real.RealStep` does it. The next call for an equal trial returns False.
        """
        if captured.source == ALIKE or self._real_steps.get(captured.graph.content_hash) is not None:
            return False
        self._real_steps.put(captured.graph.content_hash, _RealStep())
        return True

    def _correct(self, decision: Decision, difference: Difference) -> Decision:
        """Put the step that really ran in the place of the captured one, in the log and for later trials that are equal."""
        self.warn_once(
            DriftWarning,
            f"A trial runs another step than its dry run (shown once): {difference.in_words}. PerfGuard learns from the real "
            "step, and judges equal trials by it. Look for code that depends on the device, on values or on the number of calls, "
            "or describe the step: build=...",
            about="real step",
        )
        with self._going_on(LogWarning, "log a real step"):
            captured = difference.captured
            graph = difference.graph
            self._real_steps.put(captured.graph.content_hash, _RealStep(graph))
            with self._lock:
                verdict = self._judge(captured, graph)
            verdict = replace(
                verdict,
                action=decision.verdict.action,
                remark=f"the real step differs: {difference.in_words}",
                guard_s=decision.verdict.guard_s,
            )
            self.log.correct(decision.id, verdict, graph)
            decision = replace(decision, verdict=verdict)
        return decision

    @on_guard_time
    def learn(self, decision: Decision, measurement: Measurement, *, difference: Difference | None = None) -> None:
        """Log what a launched trial cost, and condition the predictor on all runs that the log holds for this device.

        A reading that cannot be believed is not learnt, and the guard warns about it once. A change of driver, framework or card
        gives a :class:`DriftWarning`. A run on another device than the guarded one is logged under that device. Nothing is learnt
        from it, and one :class:`MeasurementWarning` says so.

        Args:
            decision: on the trial.
            measurement: of the trial.
            difference: what the trial really runs, if its dry run has shown another step, see :meth:`wants_real_step`. That is
                said once, and the real step is learnt.
        """
        elsewhere = self.why_not_measured(measurement)
        if elsewhere:
            self.warn_once(
                MeasurementWarning,
                f"{elsewhere[0].upper()}{elsewhere[1:]}. Verdicts are given for {self.device.name}, but such trials do not count "
                "as measured, and nothing is learnt from them. Pass gpu='auto' to guard the device of this machine.",
                about="elsewhere",
            )
        elif measurement.device_id != self.device.id:  # the same device, by the name that it has elsewhere
            measurement = replace(measurement, device_id=self.device.id)
        if difference is not None and not elsewhere:
            decision = self._correct(decision, difference)
        if decision.verdict.phase:  # the log has the graph of a training step, which needs less
            measurement = replace(measurement, peak_memory_bytes=None)
        if not decision.id:
            return
        with self._going_on(LogWarning, "log a measurement"):
            self.log.record_measurement(decision.id, measurement)
        if elsewhere:
            return
        before = self._assessment
        self._learn_from_log(decision.study)
        if before.observations:  # else what the log held before is no news
            self._warn_about_changes(before, self._assessment)
        self._num_runs += 1
        self._report_cost(decision.study)
        if self._tuned and self._num_runs % 25 == 0 and (self._tuning is None or self._tuning.poll() is not None):
            with self._going_on(LogWarning, "start its learner"):  # there may be no memory for another process
                self._tuning = start_tuning(str(self.log.url), self._tuned)

    def _report_cost(self, study: str, *, least_runs: int = 8) -> None:
        """Report once that the guard costs the study more than it saves. It is looked at after 8 runs, 16, 32 and so on."""
        if self._num_runs < least_runs or self._num_runs & (self._num_runs - 1):
            return
        with self._going_on(LogWarning, "read the guard's time"):
            summary = summarize(self.log.records(study))
            if summary.cost is None or not summary.cost.is_too_high:
                self._costly.discard(study)
                return
            self._costly.add(study)
            words = [f"The guard costs the study {study!r} more than it saves: {summary.cost}."]
            makes_dry_runs = any(source.startswith("captured") for source in summary.sources)
            words.append("Longer trials make up for its time.")
            if makes_dry_runs:
                words.append("So does `build=...`, which needs no dry run.")
            log_once(f"cost of {study}", " ".join(words))

    def stand_ins(self, study: str) -> Callable[[CapturedTrial], bool] | None:
        """Return what says whether a captured trial may stand in for one alike. None: each trial of ``study`` is dry-run.

        While the guard costs the study more than it saves, a trial may that leaves room under all limits. A strict guard judges
        each trial by its own step.
        """
        if study not in self._costly or self.strict:
            return None
        words = f"From now on, no trial of {study!r} is dry-run that is like one before, where all budgets have room."
        log_once(f"stand-ins of {study}", words)
        return partial(self._may_stand_in, study=study)

    def _may_stand_in(self, captured: CapturedTrial, *, study: str, room: float = 1.5) -> bool:
        """Return whether each limit would hold with a chance of 95% if the trial needed ``room`` times as much."""
        with self._going_on(LogWarning, "compare a trial with one before"), self._lock:
            if study != self._study:
                self._learn_from_log(study)
            verdict = self._judge(captured)
            return verdict.action == "launch" and all(limit.margin(SMALL_CHANCE) < -math.log(room) for limit in verdict.limits)
        return False

    def why_not_measured(self, measurement: Measurement) -> str:
        """Return why ``measurement`` is not one of the guarded device, as a sentence without a full stop. Empty: it is one."""
        if measurement.is_of(self.device):
            return ""
        from perfguard.devices.detect import is_here

        if not is_here(self.device):
            return f"this process has no {self.device.name}; the trial ran on {measurement.device_name}"
        return f"the trial did not use {self.device.name}; it ran on {measurement.device_name}"

    def _learn_from_log(self, study: str) -> None:
        with self._going_on(UnguardedTrialWarning, "learn from its log"), self._lock:
            try:
                found = self._learner.update(self.device, study=study)
            except LogError:  # the log is away, and has warned; what is known goes on
                return
            if found.observations or not self._assessment.observations:  # a log that is empty now teaches nothing
                self._assessment = found
                self._study = study

    def _warn_about_changes(self, before: Assessment, after: Assessment) -> None:
        """Warn of what the runs since ``before`` have shown."""
        if not (after.changes or after.misfits or after.doubts):
            return
        known = {run.decision_id for run in before.observations}
        for run, change in after.changes:
            if run.decision_id not in known:
                message = f"Runs on {self.device.name} have changed: {change}. PerfGuard learns the difference."
                warn_user(message, DriftWarning)
        for misfit in after.misfits:
            if misfit.observation.decision_id not in known:
                message = (
                    f"PerfGuard's predictor does not fit the runs on {self.device.name}: {misfit.reason}. Verdicts use its "
                    "shipped prediction again (shown once). Check that the trials run the step that is judged: another branch, "
                    "other lengths, or a `build` that describes another step."
                )
                self.warn_once(DriftWarning, message, about="misfit")
        silent = {misfit.reason for misfit in after.misfits}
        doubted = {doubt.observation.decision_id for doubt in (*before.doubts, *after.misfits)}
        for doubt in after.doubts:
            if self.device.kind == "cpu" and doubt.target == "memory":
                continue  # an honest run reads too little where it reuses what the process holds: nothing to mend
            if doubt.observation.decision_id not in doubted and doubt.reason not in silent:
                message = (
                    f"PerfGuard does not learn from an implausible reading (shown once): {doubt.reason}. Check that the "
                    "trials run the step that is judged. `perfguard log quarantine` lists such readings."
                )
                self.warn_once(MeasurementWarning, message)

    @contextmanager
    def _going_on(self, category: type[Warning], doing: str) -> Iterator[None]:
        """Let no failure of the block reach the study: one warning has the reason."""
        try:
            yield
        except Exception as error:
            self.warn_once(category, f"PerfGuard could not {doing} (shown once): {type(error).__name__}: {error}")

    def warn_once(self, category: type[Warning], message: str, *, about: str = "") -> None:
        """Warn, unless the guard has warned in this ``category`` ``about`` this before."""
        if (category, about) not in self._warned:
            self._warned.add((category, about))
            warn_user(message, category)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_traces", "_tuning", "clock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        from perfguard.graph import TraceCache

        self.__dict__.update(state)
        self.clock = GuardClock()
        self._lock = threading.RLock()
        self._traces = TraceCache()
        self._tuning = None


class _RealStep(NamedTuple):
    """What a captured step really is."""

    graph: OpGraph | None = None
    """None: as captured, or it is not known yet."""


def _remark_on(verdict: Verdict, workload: AnyWorkload, steps: Steps | None) -> str:
    """What a person should know beside the numbers: where the steps come from, and what the host's memory holds."""
    remarks = ["" if steps is None else steps.remark]
    if verdict.worst is not None and verdict.worst.quantity == "host_memory":
        remarks.append(str(getattr(workload, "host_memory", "")))
    return "; ".join(filter(None, remarks))


def _num_operators(real: _RealStep) -> int:
    return 0 if real.graph is None else len(real.graph.ops)


def key_of_params(params: Mapping[str, Any]) -> str:
    """Return a short text that is equal for equal hyperparameters, in any order of their names."""
    try:
        # Pickled where JSON does not know it: an array, whose repr leaves things out, or an object.
        text = json.dumps(dict(params), sort_keys=True, default=lambda value: cloudpickle.dumps(value).hex())
        return sha256(text.encode()).hexdigest()
    except Exception:  # an object in it cannot be pickled, so it equals no other
        return uuid.uuid4().hex


def as_workload(model: Workload | nn.Module, inputs: Any = None, **fields: Any) -> Workload:
    """``model`` if it is a Workload, else the Workload of a model, an example batch and the other fields.

    Raises:
        ConfigurationError: if both are given, or neither.
    """
    if isinstance(model, Workload):
        if inputs is not None or fields:
            raise ConfigurationError("A Workload already has its batch and its fields. Give these only with a model.")
        return model
    if inputs is None:
        raise ConfigurationError(f"Give a Workload, or a model and an example batch, but got only {type(model).__name__}.")
    return Workload(model, inputs=inputs, **fields)


__all__ = ["DEFAULT_RISK", "Action", "Decision", "Guard", "OnViolation", "Verdict", "as_workload"]
