"""Ledger: the sessions of a Tune run's trials, and what they have reported. The search writes it, the callback closes it.

The rules are those of :class:`perfguard.session.TrialSession`. Here they meet Tune's trials, which wait, start several times, and
report from processes of their own.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from ray.tune.experiment import Trial
from ray.tune.utils import flatten_dict

from perfguard.capture import DryRuns
from perfguard.exceptions import ConfigurationError, MeasurementWarning, UnguardedTrialError, UnguardedTrialWarning
from perfguard.guard import Guard
from perfguard.measure import Measurement
from perfguard.pace import Pace
from perfguard.rejections import Search
from perfguard.repair import AS_PROPOSED, Repair
from perfguard.session import HowEnded, TrialSession, check_repairs
from perfguard.verdict import Verdict
from perfguard.workload import AnyBuild, AnyWorkload
from perfguard_ray.worker import forget, receive, send

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.guard import GuardSettings
    from perfguard.record import TrialRecord

_Found = TypeVar("_Found", bound=AnyWorkload)
_OK = HowEnded("ok")
_OVER_STARTS: Mapping[str, Callable[[list[Any]], Any]] = {
    "peak_memory_bytes": max,
    "allocated_peak_bytes": max,
    "reserved_peak_bytes": max,
    "energy_j": sum,
    "num_steps": sum,
    "total_time_s": sum,
}
"""How a trial's measurements of several starts make one. Of all others, the latest counts."""
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
    """One trial: its session, and what it has reported."""

    session: TrialSession
    config: Mapping[str, Any]
    """Configuration of the trial: that of the decision, with its repair if it has one."""
    begun_at: float | None = None
    """Latest start by the wall clock, so that it outlives the process. None: waiting."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The latest measurement that the trial reported since its latest start."""
    earlier: Mapping[str, Any] = field(default_factory=dict)
    """What it had reported before, where it goes on from a checkpoint."""
    resumes: bool = False
    """Whether its latest start goes on from a checkpoint. Then it may have nothing left to do, and to report."""
    spent_s: float = 0.0
    """Measured in all starts before the latest, also where the trial begins anew."""
    how_ends: HowEnded = _OK
    """How the trial ends, if it ends now."""
    is_elsewhere: bool = False
    """Whether it has used another device than the guarded one."""

    @staticmethod
    def of(session: TrialSession, config: Mapping[str, Any]) -> Entry:
        """Return the entry of a trial of ``config`` that was judged. It has its repair, if it has one."""
        repair = session.verdict.repair
        return Entry(session, {**config, **({} if repair == AS_PROPOSED else {REPAIR_KEY: asdict(repair)})})

    @property
    def verdict(self) -> Verdict:
        """The verdict on the configuration."""
        return self.session.verdict

    @property
    def rejected(self) -> bool:
        """Whether the configuration does not fit."""
        return self.session.is_rejected

    @property
    def has_no_result(self) -> bool:
        """Whether PerfGuard has ended the trial before its end, so that its latest result is none for the search."""
        return (self.rejected and self.begun_at is None) or self.how_ends.status in ("timeout", "oom")

    @property
    def reported(self) -> Mapping[str, Any]:
        """What is known of its cost, over all starts. Empty: it has reported nothing.

        A trial may start once more and come to its end without another report: a scheduler has paused it at its last one.
        """
        known = {**self.earlier, **self.report}
        for name, combine in _OVER_STARTS.items():
            values = [start[name] for start in (self.earlier, self.report) if start.get(name) is not None]
            if values:
                known[name] = combine(values)
        return known

    @property
    def elapsed_s(self) -> float:
        """Measured so far, over all starts."""
        return float(self.reported.get("total_time_s", 0.0))

    @property
    def num_steps(self) -> int:
        """Measured so far, over all starts."""
        return int(self.reported.get("num_steps", 0))

    @property
    def pace(self) -> Pace | None:
        """Pace since the latest start; None while too few steps are done."""
        mean_s = self.report.get("pace_mean_s")
        error_s = self.report.get("pace_error_s")
        return None if mean_s is None or error_s is None else Pace(mean_s, error_s)

    @property
    def running_s(self) -> float:
        """Seconds since the latest start, whatever was reported. 0: it waits."""
        return 0.0 if self.begun_at is None else max(0.0, time.time() - self.begun_at)  # that clock may be set back

    @property
    def over_time(self) -> str | None:
        """Why the running trial has to end now, whatever it has reported: ``hard_time_limit``. None: it may go on."""
        return self.session.over_time(self.spent_s + self.running_s)

    def restart(self, *, from_checkpoint: bool = True) -> None:
        """The trial starts, for the first time or again; without a checkpoint it begins anew, and so does its measurement."""
        self.spent_s += self.reported_s
        self.earlier = self.reported if from_checkpoint else {}
        self.report = {}
        self.resumes = from_checkpoint
        self.begun_at = time.time()

    @property
    def reported_s(self) -> float:
        """Measured since the latest start."""
        return float(self.report.get("total_time_s", 0.0))


class Ledger:
    """Decides on the configurations of one Tune run and keeps the decisions on its live trials.

    The memory of rejections is asked first, so a workload that does not fit has one row in the log, or two. Where the
    guard fails, it warns once; the trial runs unguarded, and is counted.

    Args:
        guard: decides, and learns from what the trials cost.
        build: ``build(config) -> Workload``.
        study: the name of the run in the measurement log.
    """

    def __init__(self, guard: Guard, build: AnyBuild, study: str) -> None:
        if not callable(build):
            raise ConfigurationError(f"build must be a function of the trial's configuration, but got {build!r}.")
        check_repairs(guard, build)
        self.guard = guard
        self.build = build
        if isinstance(build, DryRuns):
            build.note_seconds = guard.clock.note_dry_run
        self.study = study
        self.search = Search()
        self.begun_at = time.time()
        self.entries: dict[str, Entry] = {}
        self.num_judged = 0
        """Proposals of the search."""
        self.verbose = 0
        """``RunConfig(verbose=...)``; from 1 on each configuration that is rejected has a line on the console."""

    @property
    def num_repeated(self) -> int:
        """Proposals that were rejected from memory."""
        return self.search.num_repeated

    def _session(self, trial: int | None, trial_id: str | None) -> TrialSession:
        return TrialSession(
            guard=self.guard,
            search=self.search,
            study=self.study,
            number=trial,
            trial_id=trial_id,
            dry_runs=self.build if isinstance(self.build, DryRuns) else None,
        )

    def judge(
        self,
        config: Mapping[str, Any],
        *,
        trial: int | None = None,
        trial_id: str | None = None,
        proposed: Mapping[str, Any] | None = None,
    ) -> Entry:
        """Decide on ``config`` and log the verdict. A rejection that still holds is repeated without another row in the log.

        Args:
            config: the configuration of the trial.
            trial: Tune's number of the trial. It is for the log.
            trial_id: Tune's id of it.
            proposed: what the search has proposed of ``config``. None: all of it.
        """
        self.num_judged += 1
        session = self._session(trial, trial_id)
        found = self.found(config)
        key = self.guard.key_of(found, config)
        session.judge(found, config, key=key, proposed=proposed, may_wait=True, logs_repeats=False)
        if self.verbose >= 1 and session.is_rejected and session.rejected_before is None:
            print(f"PerfGuard rejected {_shown(config)}: it {session.verdict.reason}", flush=True)
        return Entry.of(session, config)

    def decide_late(self, trial_id: str) -> bool:
        """Give the verdict on a trial that waits for it at its first forward pass. Return whether it is rejected now.

        Raises:
            UnguardedTrialError: if it cannot be judged, and the guard is strict.
        """
        entry = self.entries[trial_id]
        session = entry.session
        shown = receive(trial_id, "seen") if session.problem is not None else None
        if shown is None:
            return False
        seen, set_up_s = shown
        try:
            session.judge_late(self._with_steps(seen, entry.config), entry.config, set_up_s=set_up_s)
        finally:
            send(trial_id, "verdict", session.verdict.reason if session.is_rejected else "")
        if session.is_rejected:
            entry.begun_at = None  # it is not measured
        return session.is_rejected

    def found(self, config: Mapping[str, Any]) -> AnyWorkload | Exception:
        """Return what the trial of ``config`` would run, or why that is not known."""
        return self._with_steps(self.guard.describe(self.build, config), config)

    def _with_steps(self, found: _Found | Exception, config: Mapping[str, Any]) -> _Found | Exception:
        """Return ``found`` with its steps, which may follow from a hyperparameter in a group of the configuration."""
        if isinstance(found, Exception):
            return found
        try:
            return self.guard.with_steps(found, flatten_dict(dict(config)))
        except Exception as error:  # of epochs that are no number
            return error

    def start(self, trial_id: str, config: Mapping[str, Any], *, trial: int | None = None, from_checkpoint: bool = True) -> None:
        """Note that the trial's actor is up. A trial without a verdict is judged now, only for the log: it runs in any case."""
        entry = self.entries.get(trial_id)
        if entry is not None and not _equal(entry.config, config):
            if entry.begun_at is None and entry.session.decision is not None:
                self.search.superseded.add(entry.session.decision.id)  # Tune has filled in a value that the search could not see
            self.finish(trial_id, HowEnded("ok", cut_short="by the tuner"))
            entry = None
        if entry is None:
            entry = self.entries[trial_id] = self._judge_running(trial_id, config, trial)
        entry.restart(from_checkpoint=from_checkpoint)
        session = entry.session
        session.number = session.number if trial is None else trial
        wanted = session.problem or session.captured
        if wanted is not None:
            send(trial_id, "wanted", (self.guard.device, wanted))

    def _judge_running(self, trial_id: str, config: Mapping[str, Any], trial: int | None) -> Entry:
        if not self.num_judged:
            self._unguarded(
                "search",
                "A trial runs that PerfGuard has not judged: the guarded search proposes none of this run's trials, so none "
                "is kept from running. Give the same search twice: TuneConfig(search_alg=search) and PerfGuardCallback(search).",
            )
        session = self._session(trial, trial_id)
        session.decide(self.found(config), config)
        if session.is_rejected:
            self._unguarded(
                "late",
                f"A trial runs that PerfGuard would have rejected: it {session.verdict.reason}. The search has not seen "
                "its values: they come from a scheduler, from tune.sample_from, or are objects. Use tune.choice.",
            )
        return Entry.of(session, config)

    def try_again(self, trial_id: str, config: Mapping[str, Any], *, note: str = "") -> Repair | None:
        """Log a trial that ran out of memory and that Tune starts again. Return how it runs now. None: it must not run again."""
        entry = self.entries[trial_id]
        session = entry.session
        self.finish(trial_id, HowEnded("oom", note))
        proposed = {name: value for name, value in config.items() if name != REPAIR_KEY}
        may_run = self.guard.on_oom == "repair"  # else nobody asks what it would run, which may be a dry run
        if not (may_run and session.try_again(self.found(proposed), proposed)):
            self.entries[trial_id] = Entry(session, config, how_ends=HowEnded("oom", note))  # until Tune has ended it
            return None
        again = self.entries[trial_id] = Entry.of(session, proposed)
        again.spent_s = entry.spent_s + entry.reported_s
        return session.verdict.repair

    def finish(self, trial_id: str, how: HowEnded | None = None) -> None:
        """The trial is over: log what it cost and learn from it. The first call counts. None: as its entry says."""
        entry = self.entries.pop(trial_id, None)
        if entry is None or entry.begun_at is None:
            return
        session = entry.session
        how = session.how_ended(entry.how_ends if how is None else how)
        was_asked = session.problem is not None or session.captured is not None
        if session.problem is not None and how.status != "interrupted":
            session.end_unjudged(entry.config)
        if not entry.reported and how.status in ("ok", "timeout"):
            how = how._replace(note="; ".join(filter(None, [how.note, "the trial reported no measurement"])))
            if not entry.resumes:
                self._warn_of_silence()
        try:
            difference = receive(trial_id, "difference") if was_asked else None
            if was_asked:
                forget(trial_id)
            session.end(self.measurement(entry, how), difference=difference)
        except Exception as error:
            self.warn_once(
                "learn", UnguardedTrialWarning, f"PerfGuard could not log a measurement: {type(error).__name__}: {error}"
            )

    def _warn_of_silence(self) -> None:
        mend = (
            "Put `with perfguard_ray.measure():` around the body of the training function, or decorate the Trainable class with "
            "@perfguard_ray.measured."
        )
        if isinstance(self.build, DryRuns):  # it is measured already
            mend = "Call `tune.report` at least once."
        message = f"A trial ended without reporting what it cost, so nothing can be learnt from it. {mend}"
        self.warn_once("silent", MeasurementWarning, message)

    def measurement(self, entry: Entry, how: HowEnded = _OK) -> Measurement:
        """The cost of the trial until its latest report."""
        report = entry.reported
        nothing = {"peak_memory_bytes": None, "step_time_s": None, "method": "none", "framework": ""}
        device = {"device_id": self.guard.device.id, "device_name": self.guard.device.name}
        reported = {one.name: report[one.name] for one in fields(Measurement) if one.name in report}
        # The dry run has seen steps. Where this process has made none, others have, unless memory ended before the first.
        if how.status != "oom" and getattr(self.build, "captures", False) and not entry.num_steps:
            reported = {name: value for name, value in reported.items() if name in device}
        total_time_s = entry.elapsed_s
        if how.status == "timeout":  # it may have hung since its latest report
            total_time_s += entry.running_s - entry.reported_s
        known = {
            "status": how.status,
            "cut_short": how.cut_short,
            "total_time_s": total_time_s or entry.running_s,
            "num_steps": entry.num_steps,
            "note": "; ".join(filter(None, [how.note, report.get("note")])),
        }
        return Measurement(**{**nothing, **device, **reported, **known})

    def why_not_measured(self, entry: Entry) -> str:
        """The reason why a trial's report is not a measurement of the guarded device. Empty: it is, or there is no report."""
        measurement = self.measurement(entry)
        device = self.guard.device
        if not entry.reported or measurement.is_of(device):
            return ""
        return f"the worker used no {device.name}; the trial ran on {measurement.device_name}"

    def records(self) -> list[TrialRecord]:
        """The trials of the run in the log, oldest first. Of a configuration that was judged twice, the second verdict."""
        return [record for record in self._logged() if record.decision_id not in self.search.superseded]

    def superseded_guard_s(self) -> float:
        """Seconds of the guard for the verdicts that a second look has taken the place of."""
        return sum(record.guard_s for record in self._logged() if record.decision_id in self.search.superseded)

    def _logged(self) -> list[TrialRecord]:
        # An earlier experiment may have had the same name.
        records = self.guard.log.records(self.study)
        return [one for one in records if one.created_at is None or one.created_at.timestamp() >= self.begun_at]

    def _unguarded(self, topic: str, message: str) -> None:
        """Warn once that trials run without a verdict, or against it.

        Raises:
            UnguardedTrialError: if the guard is strict; it ends the run.
        """
        if self.guard.strict:
            raise UnguardedTrialError(message)
        self.warn_once(topic, UnguardedTrialWarning, message)

    def warn_once(self, topic: str, category: type[Warning], message: str) -> None:
        """Warn, unless it was warned about ``topic`` in this run before."""
        self.guard.warn_once(category, message, about=f"{self.study}: {topic}")

    def get_state(self) -> dict[str, Any]:
        """State that must survive a restart of the driver. The guard goes with the Tuner, as it was at the start of the run."""
        return {name: copy.copy(value) for name, value in vars(self).items() if name not in ("guard", "build", "verbose")}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`get_state`."""
        self.__dict__.update(state)
        for entry in self.entries.values():
            entry.session.go_on(self.guard, self.search, self.build if isinstance(self.build, DryRuns) else None)

    __setstate__ = set_state


class InThisProcess:
    """A ledger beside what Tune pickles. It is unpickled in the process of the driver, and None in all others."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._key = uuid.uuid4().hex
        _here[self._key] = self

    def __reduce__(self) -> Any:
        return _found_here, (self._key,)


_here: WeakValueDictionary[str, InThisProcess] = WeakValueDictionary()


def _found_here(key: str) -> InThisProcess | None:
    return _here.get(key)


def make_ledger(build: AnyBuild, guard: Guard | None, gpu: str | Device, study: str | None, settings: GuardSettings) -> Ledger:
    """The ledger for a search's arguments."""
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
        search = getattr(search, "searcher", None) or getattr(search, "perfguard", None)
    raise ConfigurationError(
        f"{who} takes the PerfGuardSearcher or PerfGuardVariantGenerator of the run, or its guarded training function, "
        f"but got {given!r}."
    )


def number_of(trial: Trial) -> int | None:
    """Tune's number of the trial, with which the name of its folder goes on after its id."""
    number = str(getattr(trial, "experiment_tag", "")).partition("_")[0]
    return int(number) if number.isdecimal() else None


def _shown(config: Mapping[str, Any], *, at_most: int = 120) -> str:
    """The configuration in a line of ``at_most`` characters."""
    flat = flatten_dict(dict(config)).items()
    text = ", ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in flat)
    return text if len(text) <= at_most else f"{text[:at_most]}..."


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configurations are the same; what cannot be compared, such as arrays, is taken to be."""
    try:
        return bool(one == other)
    except ValueError:
        return True
