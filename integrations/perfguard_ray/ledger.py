"""Ledger: what was decided on each trial of a Tune run, and what it cost. The search writes it, the callback closes it."""

from __future__ import annotations

import copy
import functools
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ray.tune.experiment import Trial
from ray.tune.utils import flatten_dict

from perfguard.capture import DryRuns
from perfguard.exceptions import CaptureError, ConfigurationError, MeasurementWarning, UnguardedTrialError, UnguardedTrialWarning
from perfguard.guard import Guard, key_of_params
from perfguard.measure import CUT_SHORT, Measurement, Status
from perfguard.pace import Pace
from perfguard.rejections import Search
from perfguard.repair import AS_PROPOSED, Repair
from perfguard.verdict import Decision, Verdict
from perfguard.workload import AnyBuild, AnyWorkload, CapturedTrial
from perfguard_ray.worker import forget, receive, send

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.guard import GuardSettings
    from perfguard.record import TrialRecord

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
    end: tuple[Status, str] = ("ok", "")
    """Status and note, if the trial ends now."""
    is_elsewhere: bool = False
    """Whether it has used another device than the guarded one."""
    wanted: CapturedTrial | CaptureError | None = None
    """What the trial is to compare with a real step; or why it is to be judged at its first forward pass. None: nothing."""

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
        self.guard = guard
        self.build = build
        self.study = study
        self.search = Search()
        self.begun_at = time.time()
        self.entries: dict[str, Entry] = {}
        self.num_repeated = 0
        """Proposals that were rejected from memory."""
        self.superseded: set[str] = set()
        """Ids of the decisions in the log that a second look has taken the place of."""
        self.verbose = 0
        """``RunConfig(verbose=...)``; from 1 on each configuration that is rejected has a line on the console."""

    def judge(
        self,
        config: Mapping[str, Any],
        *,
        trial: int | None = None,
        trial_id: str | None = None,
        runs_anyway: bool = False,
        proposed: Mapping[str, Any] | None = None,
        seen: CapturedTrial | Exception | None = None,
    ) -> Entry:
        """Decide on ``config`` and log the verdict. A rejection that still holds is repeated without another row in the log.

        Args:
            config: the configuration of the trial.
            trial: Tune's number of the trial. It is for the log.
            trial_id: Tune's id of it.
            runs_anyway: the trial runs whatever the verdict. So it gets a row of its own, and nothing is remembered.
            proposed: what the search has proposed of ``config``. None: all of it.
            seen: what the trial has shown at its first forward pass. None: it has not started.
        """
        found = self.found(config, seen)
        decide = functools.partial(self.guard.decide, found, study=self.study, trial=trial, params=config, trial_id=trial_id)
        if runs_anyway:
            return _entry(decide(), config)
        # One that is proposed again is not known by what it has shown.
        search, key = self.search, key_of_params(config) if seen else self.guard.key_of(found, config)
        known = search.recall(key)
        if known is not None:
            self.num_repeated += 1
            search.count(known.verdict)
            return Entry(Decision("", known.verdict), config)
        if seen is None and isinstance(found, CaptureError) and isinstance(self.build, DryRuns) and self.build.judges_late(found):
            undecided = Verdict(action="launch", unjudged=f"{found}")
            search.count(undecided)
            return Entry(Decision("", undecided, study=self.study), config, wanted=found)
        decision = decide(grounds=search.grounds(key))
        if seen is None or decision.verdict.action == "prune":  # else it is counted already
            search.count(decision.verdict)
        before = search.remember(key, decision.verdict, params=proposed or config, decision_id=decision.id)
        if before is not None:
            self.superseded.add(before.decision_id)
        elif decision.verdict.action == "prune" and self.verbose >= 1:
            print(f"PerfGuard rejected {_shown(config)}: it {decision.verdict.reason}", flush=True)
        entry = _entry(decision, config)
        if seen is None and isinstance(found, CapturedTrial) and not entry.rejected and self.guard.watch(found) is not None:
            entry.wanted = found
        return entry

    def decide_late(self, trial_id: str, *, trial: int | None = None) -> bool:
        """Give the verdict on a trial that waits for it at its first forward pass. Return whether it is rejected now.

        Raises:
            UnguardedTrialError: if it cannot be judged, and the guard is strict.
        """
        entry = self.entries[trial_id]
        waiting = receive(trial_id, "seen") if isinstance(entry.wanted, CaptureError) else None
        if waiting is None:
            return False
        (seen, set_up_s), entry.wanted = waiting, None
        assert isinstance(self.build, DryRuns)
        self.build.note_first_forward(seen, set_up_s)
        try:
            entry.decision = self.judge(entry.config, trial=trial, trial_id=trial_id, seen=seen).decision
        finally:
            send(trial_id, "verdict", entry.decision.verdict.reason if entry.rejected else "")
        if entry.rejected:
            entry.started_at = None  # it is not measured
        return entry.rejected

    def found(self, config: Mapping[str, Any], seen: CapturedTrial | Exception | None = None) -> AnyWorkload | Exception:
        """Return what the trial of ``config`` would run, unless it was ``seen``; or why that is not known."""
        found = seen or self.guard.describe(self.build, config)
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
            if entry.started_at is None:  # Tune has filled in a value that the search could not see
                self.superseded.add(entry.decision.id)
            self.finish(trial_id, "ok", note=CUT_SHORT)
            entry = None
        if entry is None:
            entry = self.entries[trial_id] = self._judge_late(trial_id, config, trial)
        entry.restart(from_checkpoint=from_checkpoint)
        if entry.wanted is not None:
            send(trial_id, "wanted", (self.guard.device, entry.wanted))

    def _judge_late(self, trial_id: str, config: Mapping[str, Any], trial: int | None) -> Entry:
        if not self.search.num_launched and not self.search.num_rejected:
            self._unguarded(
                "search",
                "A trial runs that PerfGuard has not judged: the guarded search proposes none of this run's trials, so none "
                "is kept from running. Give the same search twice: TuneConfig(search_alg=search) and PerfGuardCallback(search).",
            )
        entry = self.judge(config, trial=trial, trial_id=trial_id, runs_anyway=True)
        if entry.rejected:
            self._unguarded(
                "late",
                f"A trial runs that PerfGuard would have rejected: it {entry.decision.verdict.reason}. The search has not seen "
                "its values: they come from a scheduler, from tune.sample_from, or are objects. Use tune.choice.",
            )
        return entry

    def try_again(self, trial_id: str, config: Mapping[str, Any], *, trial: int | None = None, note: str = "") -> Repair | None:
        """Log a trial that ran out of memory and that Tune starts again. Return how it runs now. None: as before."""
        entry = self.entries[trial_id]
        self.finish(trial_id, "oom", note=note)
        proposed = {name: value for name, value in config.items() if name != REPAIR_KEY}
        first = entry.decision
        decision = self.guard.decide(
            self.found(proposed), study=self.study, trial=trial, params=proposed, trial_id=trial_id, ran_out=first
        )
        is_repaired = decision.verdict.action == "repair"
        self.entries[trial_id] = _entry(decision, proposed) if is_repaired else Entry(first, entry.config)
        return decision.verdict.repair if is_repaired else None

    def finish(self, trial_id: str, status: Status | None = None, *, note: str = "") -> None:
        """The trial is over: log what it cost and learn from it. The first call counts. ``status`` of None: :attr:`Entry.end`."""
        entry = self.entries.pop(trial_id, None)
        if entry is None or entry.started_at is None:
            return
        if status is None:
            status, note = entry.end[0], entry.end[1] or note
        if isinstance(entry.wanted, CaptureError) and status != "interrupted":  # it ended before it could be judged
            verdict = entry.decision.verdict
            entry.decision = self.guard.record(verdict, study=self.study, params=entry.config, trial_id=trial_id)
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
            measurement = self.measurement(entry, status, note)
            if isinstance(self.build, DryRuns):
                self.build.afford(measurement.total_time_s)
            difference = None if entry.wanted is None else receive(trial_id, "difference")
            if entry.wanted is not None:
                forget(trial_id)
            self.guard.learn(entry.decision, measurement, difference=difference)
            self.search.num_ended += 1
        except Exception as error:
            self.warn_once(
                "learn", UnguardedTrialWarning, f"PerfGuard could not log a measurement: {type(error).__name__}: {error}"
            )

    def measurement(self, entry: Entry, status: Status, note: str = "") -> Measurement:
        """The cost of the trial until its latest report."""
        report = entry.report
        nothing = {"peak_memory_bytes": None, "step_time_s": None, "method": "none", "framework": ""}
        device = {"device_id": self.guard.device.id, "device_name": self.guard.device.name}
        reported = {one.name: report[one.name] for one in fields(Measurement) if one.name in report}
        # The dry run has seen steps. Where this process has made none, others have, unless memory ended before the first.
        if status != "oom" and getattr(self.build, "captures", False) and not entry.num_steps:
            reported = {name: value for name, value in reported.items() if name in device}
        known = {
            "status": status,
            "total_time_s": entry.elapsed_s or time.time() - (entry.started_at or time.time()),
            "num_steps": entry.num_steps,
            "note": "; ".join(filter(None, [note, report.get("note")])),
        }
        return Measurement(**{**nothing, **device, **reported, **known})

    def why_not_measured(self, entry: Entry) -> str:
        """The reason why a trial's report is not a measurement of the guarded device. Empty: it is, or there is no report."""
        measurement, device = self.measurement(entry, "ok"), self.guard.device
        if not entry.report or measurement.is_of(device):
            return ""
        return f"the worker used no {device.name}; the trial ran on {measurement.device_name}"

    def records(self) -> list[TrialRecord]:
        """The trials of the run in the log, oldest first. Of a configuration that was judged twice, the second verdict."""
        return [record for record in self._logged() if record.decision_id not in self.superseded]

    def superseded_guard_s(self) -> float:
        """Seconds of the guard for the verdicts that a second look has taken the place of."""
        return sum(record.guard_s for record in self._logged() if record.decision_id in self.superseded)

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


def _entry(decision: Decision, config: Mapping[str, Any]) -> Entry:
    repair = decision.verdict.repair
    return Entry(decision, {**config, **({} if repair == AS_PROPOSED else {REPAIR_KEY: asdict(repair)})})


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
