"""Ledger: what was decided on each trial of a Tune run, and what it cost. The searcher writes it, the callback closes it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from perfguard.exceptions import ConfigurationError, MeasurementWarning, UnguardedTrialWarning
from perfguard.guard import Decision, Guard
from perfguard.measure import Measurement, Status
from perfguard.pace import Pace
from perfguard.repair import AS_PROPOSED, Repair
from perfguard.workload import Build, Workload
from perfguard_ray._elsewhere import build_here_or_on_a_worker

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.guard import GuardSettings

_PLACEHOLDERS = {"__fn_ph", "__ref_ph", "__id_ph"}
"""What Tune puts in the place of objects, until the trial is made (Ray 2.3 to 2.60, tune/impl/placeholder.py)."""

_MEASURED = tuple(field.name for field in fields(Measurement))
REPAIR_KEY = "perfguard_repair"


def repair_of(config: Mapping[str, Any]) -> Repair:
    """What the training function has to change so that its trial fits; without ``on_violation="repair"``, nothing.

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
    """What the trial runs with: what the decision was made on, and its repair, if it has one."""
    started_at: float | None = None
    """By the wall clock, so that it outlives the process; None: waiting."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The latest measurement that the trial reported since its latest start."""
    earlier_time_s: float = 0.0
    """Measured in starts before the latest: a trial that was paused or has failed begins anew."""
    earlier_steps: int = 0
    stopped: bool = False
    """Its measured pace had broken the time budget."""

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
        """Of the latest start; None while too few steps are done."""
        mean_s, error_s = self.report.get("pace_mean_s"), self.report.get("pace_error_s")
        return None if mean_s is None or error_s is None else Pace(mean_s, error_s)

    def restart(self) -> None:
        """The trial starts, for the first time or again."""
        self.earlier_time_s, self.earlier_steps = self.elapsed_s, self.num_steps
        self.report = {}
        self.started_at = self.started_at or time.time()


class Ledger:
    """Decides on the configurations of one Tune run and keeps the decisions on its live trials.

    Whatever fails in here is warned about once; the trial runs unguarded.

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
        self.entries: dict[str, Entry] = {}
        self.changes: dict[str, Entry] = {}
        """What trials are to run with from their next start on: a scheduler has changed them, and the guard has agreed."""
        self.num_judged = 0
        self.num_rejected = 0
        self._warned: set[str] = set()

    def judge(self, config: Mapping[str, Any]) -> Entry | None:
        """Decide on ``config`` and log the verdict. None: the guard failed, so nothing is known."""

        def make_workload() -> Workload:
            refuse_placeholders(config)
            return build_here_or_on_a_worker(self.build, config, self.guard.device)

        try:
            decision = self.guard.decide(make_workload, study=self.study, trial=self.num_judged, params=config)
        except Exception as error:
            self.warn_once("judge", UnguardedTrialWarning, f"PerfGuard failed, trials launch unguarded: {_words(error)}")
            return None
        self.num_judged += 1
        self.num_rejected += decision.verdict.action == "prune"
        repair = decision.verdict.repair
        return Entry(decision, {**config, **({} if repair == AS_PROPOSED else {REPAIR_KEY: asdict(repair)})})

    def start(self, trial_id: str, config: Mapping[str, Any]) -> None:
        """The trial's actor is up. A trial that nobody judged is judged now, for the log alone: it runs whatever the verdict."""
        entry = self.entries.get(trial_id)
        change = self.changes.pop(trial_id, None)
        if change is not None and _equal(change.config, config):
            self.finish(trial_id, "ok")
            entry = self.entries[trial_id] = change
        elif entry is not None and not _equal(entry.config, config):  # changed by a scheduler that does not ask the guard
            self.finish(trial_id, "ok")
            entry = None
        if entry is None:
            entry = self.judge(config)
            if entry is None:
                return
            self.entries[trial_id] = entry
        entry.restart()

    def finish(self, trial_id: str, status: Status, *, note: str = "") -> None:
        """The trial is over: log what it cost and learn from it. The first call counts."""
        entry = self.entries.pop(trial_id, None)
        if entry is None or entry.started_at is None:
            return
        try:
            self.guard.learn(entry.decision, self.measurement_of(entry, status, note))
        except Exception as error:
            self.warn_once("learn", UnguardedTrialWarning, f"PerfGuard could not log a measurement: {_words(error)}")

    def measurement_of(self, entry: Entry, status: Status, note: str) -> Measurement:
        """What the trial has cost, by its latest report, on the device that its worker used."""
        report = entry.report
        notes = [note] if note else []
        if not report and status in ("ok", "timeout"):
            notes.append("the trial reported no measurement")
            self.warn_once(
                "silent",
                MeasurementWarning,
                "A trial ended without reporting what it cost, so nothing can be learnt from it. Put "
                "`with perfguard_ray.measure():` around the body of the training function, or decorate the Trainable class "
                "with @perfguard_ray.measured.",
            )
        told = {name: report[name] for name in _MEASURED if name in report}
        return Measurement(
            **{
                "device_id": self.guard.device.id,
                "device_name": self.guard.device.name,
                "peak_memory_bytes": None,
                "step_time_s": None,
                "method": "none",
                "framework": "",
                **told,
                "status": status,
                "total_time_s": entry.elapsed_s or time.time() - (entry.started_at or time.time()),
                "num_steps": entry.num_steps,
                "note": "; ".join([*notes, *filter(None, [report.get("note")])]),
            }
        )

    def warn_once(self, topic: str, category: type[Warning], message: str) -> None:
        """Warn, unless it was warned about ``topic`` before."""
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, category, stacklevel=3)

    def get_state(self) -> dict[str, Any]:
        """What must survive the driver."""
        counts = {"num_judged": self.num_judged, "num_rejected": self.num_rejected}
        return {"study": self.study, "entries": dict(self.entries), "changes": dict(self.changes), **counts}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`get_state`."""
        self.study = state["study"]
        self.entries = dict(state["entries"])
        self.changes = dict(state["changes"])
        self.num_judged, self.num_rejected = state["num_judged"], state["num_rejected"]


def refuse_placeholders(config: Mapping[str, Any]) -> None:
    """Tune keeps objects from searchers: what arrives instead cannot be built from."""
    for name, value in config.items():
        if isinstance(value, tuple) and value and value[0] in _PLACEHOLDERS:
            raise ConfigurationError(
                f"config[{name!r}] is an object, which Ray Tune does not show to searchers. Use a number or a text in "
                f"param_space, for instance the object's name, and look the object up in build and in the training function."
            )


def make_ledger(build: Build, guard: Guard | None, gpu: str | Device, study: str | None, settings: GuardSettings) -> Ledger:
    """The ledger that a searcher's arguments ask for."""
    if guard is not None and (settings or gpu != "auto"):
        raise ConfigurationError("Give either guard= or the arguments of a guard (gpu, memory_budget and so on), not both.")
    study = study or f"tune-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}"
    return Ledger(guard or Guard(gpu, **settings), build, study)


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configurations are the same; what cannot be compared, such as arrays, is taken to be."""
    try:
        return bool(one == other)
    except ValueError:
        return True


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
