"""Ledger: what was decided on each trial of a Tune run, and what it cost. The searcher writes it, the callback closes it."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ray import cloudpickle
from ray.tune.experiment import Trial
from ray.tune.utils import flatten_dict

from perfguard.exceptions import ConfigurationError, MeasurementWarning, UnguardedTrialError, UnguardedTrialWarning, warn_user
from perfguard.guard import Guard
from perfguard.measure import Measurement, Status
from perfguard.pace import Pace
from perfguard.repair import AS_PROPOSED, Repair
from perfguard.verdict import Decision, Verdict
from perfguard.workload import Build, Workload
from perfguard_ray._elsewhere import build_here_or_on_a_worker

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.guard import GuardSettings

_PLACEHOLDERS = {"__fn_ph", "__ref_ph", "__id_ph"}
"""Tune's placeholders for objects until the trial is made (Ray 2.3 to 2.60, tune/impl/placeholder.py)."""

_MEASURED = tuple(field.name for field in fields(Measurement))
_MAX_SHOWN = 120
REPAIR_KEY = "perfguard_repair"


def repair_of(config: Mapping[str, Any]) -> Repair:
    """Changes that make the trial of ``config`` fit. Without ``on_violation="repair"`` there are none.

    Example:
        >>> repair_of({"batch_size": 64, "perfguard_repair": {"micro_batch_size": 16, "accumulation": 4}}).accumulation
        4
    """
    return Repair(**config.get(REPAIR_KEY, {}))


@dataclass(slots=True)
class Entry:
    """One trial."""

    decision: Decision
    config: Mapping[str, Any]
    """Configuration of the trial: that of the decision, with its repair if it has one."""
    started_at: float | None = None
    """Start by the wall clock, so that it outlives the process; None: waiting."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The latest measurement that the trial reported since its latest start."""
    earlier_time_s: float = 0.0
    """Measured in starts before the latest, where the trial goes on from what they reached."""
    earlier_steps: int = 0
    stopped: bool = False
    """Whether it was stopped because its measured pace broke the time budget."""

    @property
    def rejected(self) -> bool:
        """Whether the configuration does not fit."""
        return self.decision.verdict.action == "prune"

    @property
    def elapsed_s(self) -> float:
        """Measured so far, over all starts."""
        return self.earlier_time_s + float(self.report.get("total_time_s", 0.0))

    @property
    def num_steps(self) -> int:
        """Measured so far, over all starts."""
        return self.earlier_steps + int(self.report.get("num_steps", 0))

    @property
    def pace(self) -> Pace | None:
        """Pace since the latest start; None while too few steps are done."""
        mean_s, error_s = self.report.get("pace_mean_s"), self.report.get("pace_error_s")
        return None if mean_s is None or error_s is None else Pace(mean_s, error_s)

    def restart(self, *, from_checkpoint: bool = True) -> None:
        """The trial starts, for the first time or again; without a checkpoint it begins anew, and so does its measurement."""
        self.earlier_time_s, self.earlier_steps = (self.elapsed_s, self.num_steps) if from_checkpoint else (0.0, 0)
        self.report = {}
        self.started_at = (self.started_at if from_checkpoint else None) or time.time()


@dataclass(slots=True)
class Rejection:
    """A configuration that was rejected."""

    decision: Decision
    """The latest on it."""
    num_ended: int
    """Trials that had ended by then."""
    num_judged: int = 1

    def is_final(self, num_ended: int) -> bool:
        """Whether judging it again would come to the same: no trial has ended since to learn from, or it was done before."""
        return self.num_judged > 1 or self.num_ended == num_ended


class Ledger:
    """Decides on the configurations of one Tune run and keeps the decisions on its live trials.

    A configuration that was rejected is remembered: proposed again, it is rejected without a new verdict, and without a
    second row in the log. Once a trial has ended since, it is judged once more, and then never again. Whatever fails in here is
    warned about once; the trial runs unguarded, and is counted.

    Args:
        guard: decides, and learns from what the trials cost.
        build: ``build(config) -> Workload``.
        study: the name of the run in the measurement log.
    """

    def __init__(self, guard: Guard, build: Build, study: str) -> None:
        if not callable(build):
            raise ConfigurationError(f"build must be a function of the trial's configuration, but got {build!r}.")
        self.guard = guard
        self.build = build
        self.study = study
        self.begun_at = time.time()
        self.entries: dict[str, Entry] = {}
        self.changes: dict[str, Entry] = {}
        """Configurations of trials from their next start on. A scheduler has changed them, and the guard has accepted the
        change."""
        self.num_judged = 0
        self.num_rejected = 0
        """Different configurations that were rejected; each has a row in the log, or two."""
        self.num_repeated = 0
        """Proposals that were rejected from memory."""
        self.num_unjudged = 0
        """Trials that were launched without a verdict."""
        self.num_ended = 0
        """Trials from which the guard may have learnt."""
        self.superseded: set[str] = set()
        """Ids of the rejections in the log that a second look has taken the place of."""
        self.verbose = 0
        """``RunConfig(verbose=...)``; from 1 on each configuration that is rejected has a line on the console."""
        self._rejected: dict[Hashable, Rejection] = {}
        self._warned: set[str] = set()

    def judge(
        self,
        config: Mapping[str, Any],
        *,
        trial: int | None = None,
        trial_id: str | None = None,
        once_a_workload: bool = False,
        runs_anyway: bool = False,
    ) -> Entry:
        """Decide on ``config`` and log the verdict. A rejection that still holds is repeated without another row in the log.

        Args:
            config: the configuration of the trial.
            trial: Tune's number of the trial. It is for the log.
            trial_id: Tune's id of it.
            once_a_workload: reject from memory any configuration with the same workload as a rejected one. It may have another
                learning rate, for instance.
            runs_anyway: the trial runs whatever the verdict. So it gets a row of its own, and nothing is rejected.
        """
        make_workload = functools.cache(functools.partial(self._workload, config))  # it is built once
        key = _key_of(config)
        known = self._rejected.get(key)
        if known is None and once_a_workload and self._rejected:
            known = self._rejected.get(self._workload_key(make_workload))
        if known is not None and not runs_anyway and known.is_final(self.num_ended):
            self.num_repeated += 1
            return Entry(Decision("", known.decision.verdict), config)
        try:
            decision = self.guard.decide(make_workload, study=self.study, trial=trial, params=config, trial_id=trial_id)
        except UnguardedTrialError:
            raise
        except Exception as error:
            self._unguarded("judge", f"PerfGuard failed, trials launch unguarded: {_message_of(error)}", error)
            decision = Decision("", Verdict("launch", f"not judged: {_message_of(error)}"))
        verdict = decision.verdict
        self.num_judged += 1
        if known is not None and not runs_anyway:
            self._forget(known)
        if verdict.action == "prune":
            if not runs_anyway:
                self.num_rejected += 1
                rejection = Rejection(decision, self.num_ended, 1 if known is None else known.num_judged + 1)
                keys = (key, self._workload_key(make_workload) if once_a_workload else None)
                self._rejected |= {key: rejection for key in keys if key is not None}
                if known is None:
                    self.say(f"PerfGuard rejected {_shown(config)}: it {verdict.reason}")
        elif verdict.prediction is None:
            self.num_unjudged += 1
        repair = verdict.repair
        return Entry(decision, {**config, **({} if repair == AS_PROPOSED else {REPAIR_KEY: asdict(repair)})})

    def _forget(self, rejection: Rejection) -> None:
        """Remove a rejection that another verdict has replaced."""
        self.num_rejected -= 1
        self.superseded.add(rejection.decision.id)
        self._rejected = {key: known for key, known in self._rejected.items() if known is not rejection}

    def _workload(self, config: Mapping[str, Any]) -> Workload:
        refuse_placeholders(config)
        return build_here_or_on_a_worker(self.build, config, self.guard.device)

    def _workload_key(self, make_workload: functools._lru_cache_wrapper[Workload]) -> Hashable:
        """Key of everything that a verdict on a workload depends on; None: the workload cannot be built or traced."""
        try:
            workload = make_workload()
            return self.guard.trace(workload).content_hash, workload.mode, workload.steps, workload.steps_per_epoch
        except Exception:
            return None

    def start(self, trial_id: str, config: Mapping[str, Any], *, trial: int | None = None, from_checkpoint: bool = True) -> None:
        """Note that the trial's actor is up. A trial without a verdict is judged now, only for the log: it runs in any case."""
        entry = self.entries.get(trial_id)
        change = self.changes.pop(trial_id, None)
        if change is not None and _equal(change.config, config):
            self.finish(trial_id, "ok")
            entry = self.entries[trial_id] = change
        elif entry is not None and not _equal(entry.config, config):  # changed by a scheduler that does not call the guard
            self.finish(trial_id, "ok")
            entry = None
        if entry is None:
            entry = self.entries[trial_id] = self._judge_late(trial_id, config, trial)
        entry.restart(from_checkpoint=from_checkpoint)

    def _judge_late(self, trial_id: str, config: Mapping[str, Any], trial: int | None) -> Entry:
        if not self.num_judged:
            self._unguarded(
                "search",
                "A trial runs that PerfGuard has not judged: the guarded search proposes none of this run's trials, so none "
                "is kept from running. Give the same search twice: TuneConfig(search_alg=search) and PerfGuardCallback(search).",
            )
        entry = self.judge(config, trial=trial, trial_id=trial_id, runs_anyway=True)
        if entry.rejected:
            self.num_unjudged += 1
            self._unguarded(
                "late",
                f"A trial runs that PerfGuard would have rejected: it {entry.decision.verdict.reason}. Its configuration "
                "comes from a scheduler or a search that does not call the guard. Use PerfGuardPopulationBasedTraining instead.",
            )
        return entry

    def finish(self, trial_id: str, status: Status, *, note: str = "") -> None:
        """The trial is over: log what it cost and learn from it. The first call counts."""
        entry = self.entries.pop(trial_id, None)
        if entry is None or entry.started_at is None:
            return
        if not entry.report and status in ("ok", "timeout"):
            note = "; ".join(filter(None, [note, "the trial reported no measurement"]))
            self.warn_once(
                "silent",
                MeasurementWarning,
                "A trial ended without reporting what it cost, so nothing can be learnt from it. Put "
                "`with perfguard_ray.measure():` around the body of the training function, or decorate the Trainable class "
                "with @perfguard_ray.measured.",
            )
        try:
            self.guard.learn(entry.decision, self.measurement(entry, status, note))
            self.num_ended += 1
        except Exception as error:
            self.warn_once("learn", UnguardedTrialWarning, f"PerfGuard could not log a measurement: {_message_of(error)}")

    def measurement(self, entry: Entry, status: Status, note: str = "") -> Measurement:
        """The cost of the trial until its latest report."""
        report = entry.report
        reported = {name: report[name] for name in _MEASURED if name in report}
        return Measurement(
            **{
                "device_id": self.guard.device.id,
                "device_name": self.guard.device.name,
                "peak_memory_bytes": None,
                "step_time_s": None,
                "method": "none",
                "framework": "",
                **reported,
                "status": status,
                "total_time_s": entry.elapsed_s or time.time() - (entry.started_at or time.time()),
                "num_steps": entry.num_steps,
                "note": "; ".join(filter(None, [note, report.get("note")])),
            }
        )

    def _unguarded(self, topic: str, message: str, cause: Exception | None = None) -> None:
        """Warn once that trials run without a verdict, or against it.

        Raises:
            UnguardedTrialError: if the guard is strict; it ends the run.
        """
        if self.guard.strict:
            raise UnguardedTrialError(message) from cause
        self.warn_once(topic, UnguardedTrialWarning, message)

    def why_not_measured(self, entry: Entry) -> str | None:
        """The reason why a trial's report is not a measurement of the guarded device; None: it is, or there is no report."""
        if not entry.report:
            return None
        measurement = self.measurement(entry, "ok")
        device = self.guard.device
        return (
            None if measurement.is_of(device) else f"the worker used no {device.name}; the trial ran on {measurement.device_name}"
        )

    def warn_once(self, topic: str, category: type[Warning], message: str) -> None:
        """Warn, unless it was warned about ``topic`` before."""
        if topic not in self._warned:
            self._warned.add(topic)
            warn_user(message, category)

    def say(self, line: str) -> None:
        """Print a line, unless the run is silent."""
        if self.verbose >= 1:
            print(line, flush=True)

    def get_state(self) -> dict[str, Any]:
        """State that must survive a restart of the driver."""
        names = ("study", "begun_at", "num_judged", "num_rejected", "num_repeated", "num_unjudged", "num_ended")
        return {
            "entries": dict(self.entries),
            "changes": dict(self.changes),
            "superseded": set(self.superseded),
            "_rejected": dict(self._rejected),
            **{name: getattr(self, name) for name in names},
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`get_state`."""
        self.__dict__.update(state)


def refuse_placeholders(config: Mapping[str, Any]) -> None:
    """Tune keeps objects from searchers: what arrives instead cannot be built from."""
    for name, value in config.items():
        if isinstance(value, tuple) and value and value[0] in _PLACEHOLDERS:
            raise ConfigurationError(
                f"config[{name!r}] is an object, which Ray Tune does not show to searchers. Use a number or a text in "
                f"param_space, for instance the object's name, and look the object up in build and in the training function."
            )


def make_ledger(build: Build, guard: Guard | None, gpu: str | Device, study: str | None, settings: GuardSettings) -> Ledger:
    """The ledger for a searcher's arguments."""
    if guard is not None and (settings or gpu != "auto"):
        raise ConfigurationError("Give either guard= or the arguments of a guard (gpu, memory_budget and so on), not both.")
    study = study or f"tune-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}"
    return Ledger(guard or Guard(gpu, **settings), build, study)


def ledger_of(search: Any, *, who: str) -> Ledger:
    """The ledger of a guarded search.

    Raises:
        ConfigurationError: if it has none; the message begins with ``who``.
    """
    given = search
    while search is not None:
        ledger = getattr(search, "ledger", None)
        if isinstance(ledger, Ledger):
            return ledger
        search = getattr(search, "searcher", None)
    raise ConfigurationError(f"{who} takes the PerfGuardSearcher or PerfGuardVariantGenerator of the run, but got {given!r}.")


def number_of(trial: Trial) -> int | None:
    """Tune's number of the trial, with which the name of its folder goes on after its id."""
    number = str(getattr(trial, "experiment_tag", "")).partition("_")[0]
    return int(number) if number.isdecimal() else None


def _key_of(config: Mapping[str, Any]) -> Hashable:
    """A key that is equal for equal configurations, in any order of their names; None: there is no key."""
    try:
        return hashlib.sha256(repr(_frozen(config)).encode()).hexdigest()
    except Exception:  # an object in it cannot be pickled
        return None


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((repr(name), _frozen(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_frozen, value)]
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    return cloudpickle.dumps(value)  # an array, whose repr leaves things out, or an object


def _shown(config: Mapping[str, Any]) -> str:
    """The configuration in a line."""
    flat = flatten_dict(dict(config)).items()
    text = ", ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in flat)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configurations are the same; what cannot be compared, such as arrays, is taken to be."""
    try:
        return bool(one == other)
    except ValueError:
        return True


def _message_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
