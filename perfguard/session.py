"""TrialSession: one trial under a guard, from its verdict to what is learnt from it. Every tuner's plugin has one for each trial.

A plugin hands on the events of its tuner, and translates the answers into the tuner's own:

    event                                          method                          answer
    the tuner proposes a configuration             :meth:`TrialSession.judge`      the decision. None: the trial runs, and waits
    it shows its first forward pass                :meth:`TrialSession.judge_late` the decision for which it has waited
    it makes a step, or reports one                :meth:`TrialSession.too_slow`   why it has to end now. None: it goes on
    some seconds have passed                       :meth:`TrialSession.over_time`  the same, for a trial that may hang
    it has ended out of memory                     :meth:`TrialSession.try_again`  whether it runs once more, repaired
    it has ended                                   :meth:`TrialSession.end`        what it cost, beside its limits

So a setting means the same in every tuner. ``on_violation`` decides on a proposal, and on a trial that is too slow. ``on_oom``
decides on a trial that has run out of memory, and ``hard_time_limit`` on one that hangs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from perfguard.exceptions import CaptureError, ConfigurationError, UnguardedTrialWarning
from perfguard.guard import Guard, key_of_params
from perfguard.measure import CutShort, Measurement, Status
from perfguard.physics import least_exceeding
from perfguard.record import measured_by
from perfguard.rejections import Rejection, Search
from perfguard.time_limit import reason_of
from perfguard.verdict import Decision, Verdict
from perfguard.workload import AnyBuild, AnyWorkload, CapturedTrial, CapturingBuild

if TYPE_CHECKING:
    from perfguard.capture import DryRuns
    from perfguard.capture.real import Difference
    from perfguard.device_room import Reservation
    from perfguard.pace import Running
    from perfguard.quantities import Quantity

_log = logging.getLogger(__name__)
_LEFT_OUT = ("guard", "search", "dry_runs", "reservation")
"""What is not pickled of a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a trial cost, as its tuner is to know it."""

    measurement: Measurement
    not_measured: str = ""
    """Why what ran says nothing of the guarded device. Empty: it does."""
    measured: Mapping[Quantity, float] = field(default_factory=dict)
    """What was read on the guarded device: bytes, seconds, joules, dollars."""
    margins: Mapping[Quantity, float] | None = None
    """Distance from feasibility for each limit, as in :attr:`Verdict.margins`. None: those of the verdict still hold."""


class HowEnded(NamedTuple):
    """How a trial ended, for its measurement."""

    status: Status
    note: str = ""
    cut_short: CutShort = ""


@dataclass(kw_only=True)
class TrialSession:
    """One trial under a guard.

    It is pickled without its guard, its search and the dry runs. :meth:`go_on` gives them back.
    """

    guard: Guard
    search: Search
    """That of the study."""
    study: str = ""
    """Name of the study."""
    number: int | None = None
    """Number of the trial in its study. None: unknown."""
    trial_id: str | None = None
    """The tuner's own name of the trial. None: it has only a number."""
    dry_runs: DryRuns | None = None
    """What shows the steps of the trials. None: they are described."""
    applies_repair: bool = True
    """Whether the trial is known to apply a repair."""
    decision: Decision | None = None
    """The latest decision. None: there is none yet."""
    rejected_before: Rejection | None = None
    """What was known of the configuration when it was judged."""
    problem: CaptureError | None = None
    """Why the trial waits for its verdict until its first forward pass. None: it does not."""
    captured: CapturedTrial | None = None
    """What a real step of the trial is to be held against. None: that was done for an equal trial, or there is no dry run."""
    stopped: str = ""
    """Why its pace ends the trial. Empty: it does not."""
    num_tries: int = 1
    reservation: Reservation | None = None
    """Its room on the device, while it runs. None: it has reserved none."""

    @property
    def verdict(self) -> Verdict:
        """The verdict of the latest decision."""
        if self.decision is not None:
            return self.decision.verdict
        return Verdict(action="launch", unjudged=f"{self.problem or 'it was not judged'}")

    @property
    def is_rejected(self) -> bool:
        """Whether the trial does not fit."""
        return self.verdict.action == "prune"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _LEFT_OUT}

    def go_on(self, guard: Guard, search: Search, dry_runs: DryRuns | None) -> None:
        """Go on in another process, or with another copy of the study."""
        self.guard = guard
        self.search = search
        self.dry_runs = dry_runs

    # --- Before the launch ------------------------------------------------------------------------------------------------------

    def judge(
        self,
        found: AnyWorkload | Exception,
        params: Mapping[str, Any],
        *,
        key: Hashable,
        proposed: Mapping[str, Any] | None = None,
        may_wait: bool = False,
        logs_repeats: bool = True,
    ) -> Decision | None:
        """Decide on the trial, and count it in the search. A rejection that still holds is repeated.

        Args:
            found: what the trial would run, or why that is not known: see :meth:`Guard.describe`.
            params: its hyperparameters, for the log.
            key: that of :meth:`Guard.key_of`.
            proposed: by which the tuner proposes it again. None: all ``params``.
            may_wait: whether a trial that could not be dry-run may be launched without a verdict. Then the result is None, and
                :attr:`problem` says why. :meth:`judge_late` decides on it.
            logs_repeats: whether a rejection that is repeated gets a row of its own in the log.

        Raises:
            UnguardedTrialError: if it cannot be judged, and the guard is strict.
        """
        known = self.search.recall(key)
        if known is not None:
            self.rejected_before = known
            decision = Decision("", known.verdict, study=self.study)
            if logs_repeats:
                decision = self._record(known.verdict, params)
            return self._keep(decision)
        if may_wait and self.dry_runs is not None and isinstance(found, CaptureError) and self.dry_runs.judges_late(found):
            self.problem = found
            return None
        decision = self._decide_for(key, found, params, proposed)
        if isinstance(found, CapturedTrial) and not self.is_rejected and self.guard.wants_real_step(found):
            self.captured = found
        return decision

    def judge_late(self, seen: CapturedTrial | Exception, params: Mapping[str, Any], *, set_up_s: float) -> Decision:
        """Decide on a trial that runs already, by what it has shown at its first forward pass, or why it has shown nothing.

        If it does not fit, it ends there and is not measured: what it has cost is not what it would have cost.

        Args:
            seen: what it runs.
            params: its hyperparameters. By them a rejection is remembered, since nothing else is known before it starts again.
            set_up_s: the time of its set-up in seconds.

        Raises:
            UnguardedTrialError: if it cannot be judged, and the guard is strict.
        """
        self.problem = None
        if self.dry_runs is not None:
            self.dry_runs.note_first_forward(seen, set_up_s)
        return self._decide_for(key_of_params(params), seen, params)

    def _decide_for(
        self,
        key: Hashable,
        found: AnyWorkload | Exception,
        params: Mapping[str, Any],
        proposed: Mapping[str, Any] | None = None,
    ) -> Decision:
        decision = self._keep(self.decide(found, params, grounds=self.search.grounds(key)))
        again = params if proposed is None else proposed
        self.rejected_before = self.search.remember(key, decision.verdict, params=again, decision_id=decision.id)
        return decision

    def decide(
        self,
        found: AnyWorkload | Exception,
        params: Mapping[str, Any],
        *,
        grounds: str = "",
        ran_out: Decision | None = None,
    ) -> Decision:
        """Decide on the trial alone: it is neither counted in the search, nor is a rejection remembered.

        The arguments are those of :meth:`Guard.decide`.
        """
        self.decision = self.guard.decide(
            found,
            study=self.study,
            trial=self.number,
            params=params,
            trial_id=self.trial_id,
            grounds=grounds,
            ran_out=ran_out,
        )
        return self.decision

    def _record(self, verdict: Verdict, params: Mapping[str, Any]) -> Decision:
        return self.guard.record(verdict, study=self.study, trial=self.number, params=params, trial_id=self.trial_id)

    def _keep(self, decision: Decision) -> Decision:
        self.decision = decision
        self.search.count(decision.verdict)
        return decision

    def take_room(self) -> None:
        """Wait until the trial fits on the device beside those that run (``share_device``). A failure is a warning.

        What has no prediction reserves all of the device.
        """
        room = self.guard.room
        if room is None or self.reservation is not None:
            return
        memory = None if self.decision is None else self.verdict.predicted.get("memory")
        needed = room.capacity_bytes if memory is None else memory.interval()[1]
        try:
            self.reservation = room.reserve(int(needed), on_wait=_log.warning)
        except OSError as error:
            self.guard.warn_once(
                UnguardedTrialWarning,
                f"PerfGuard could not reserve memory on {room.name} (shown once), so trials do not wait for each other: {error}",
                about="share_device",
            )

    def leave_room(self) -> None:
        """Give the room on the device back."""
        if self.reservation is not None:
            self.reservation.release()
            self.reservation = None

    # --- While it runs ----------------------------------------------------------------------------------------------------------

    def too_slow(self, run: Running) -> str | None:
        """Return why the trial must end, because ``run`` will break a budget of time. None: it may hold it.

        A guard that only warns of violations ends no trial.
        """
        if self.decision is None or self.guard.on_violation == "warn":
            return None
        has_neighbours = self.reservation is not None and self.reservation.look_for_neighbours()
        reason = self.guard.breaks_time_budget(self.decision, run, has_neighbours=has_neighbours)
        self.stopped = reason or self.stopped
        return reason

    def over_time(self, elapsed_s: float) -> str | None:
        """Return why the trial must end after ``elapsed_s`` seconds, all its tries together. None: it may go on.

        The limit is ``hard_time_limit``.
        """
        limit_s = self.guard.hard_time_limit_s
        return None if limit_s is None or elapsed_s <= limit_s else reason_of(limit_s)

    def margins_over(self, quantity: Quantity, excess: float = 0.0) -> Mapping[Quantity, float]:
        """Return the margins of a trial that broke a limit: those of its verdict, but this one at least 1% over.

        ``excess`` is log(needed / limit). 0: it is unknown.
        """
        most = self.guard.budget.most
        if quantity == "time" and "time" not in most and "cost" in most:
            quantity = "cost"  # which limits the time
        return {**self.verdict.margins, quantity: max(excess, 0.01)}

    # --- After its end ----------------------------------------------------------------------------------------------------------

    def try_again(self, found: AnyWorkload | Exception, params: Mapping[str, Any]) -> bool:
        """Decide how the trial, which has ended out of memory, runs once more. False: it does not.

        The rule is that of ``on_oom`` in every tuner: with "repair", a trial runs once more, if a repair makes it smaller. It
        never runs again as it was, nor a third time. The arguments are those of :meth:`judge`.
        """
        if self.guard.on_oom == "prune" or self.num_tries > 1 or self.decision is None:
            return False
        if not self.applies_repair:
            self.guard.warn_once(
                UnguardedTrialWarning,
                "A trial ran out of memory before its objective called `repair_of(trial)`, so it is pruned and does not run once "
                "more (shown once). Call it before anything is allocated, and apply what it returns.",
                about="on_oom",
            )
            return False
        first = self.decision
        decision = self.decide(found, params, ran_out=first)
        if decision.verdict.action != "repair":
            self.decision = first
            return False
        self._keep(decision)
        self.num_tries += 1
        return True

    def end_unjudged(self, params: Mapping[str, Any]) -> Decision:
        """Log that the trial has ended before it showed a first forward pass. Why it has waited is its verdict."""
        verdict = self.verdict
        self.problem = None
        return self._keep(self._record(verdict, params))

    def how_ended(self, how: HowEnded) -> HowEnded:
        """Return ``how`` the trial ended, as the guard knows it: what its pace has ended was not the tuner's to stop."""
        return how._replace(note=self.stopped, cut_short="too slow") if self.stopped and how.cut_short else how

    def end(self, measurement: Measurement, *, is_whole: bool | None = None, difference: Difference | None = None) -> Ending:
        """Log what the trial cost, and learn from it.

        Args:
            measurement: of the trial.
            is_whole: whether the trial came to its end. None: as the measurement says.
            difference: how its real step differs from the captured one. None: it does not, or that is not known.
        """
        if is_whole is None:
            is_whole = not measurement.cut_short
        if not is_whole and measurement.num_steps == 0:  # its memory does not show what its steps need
            measurement = replace(measurement, peak_memory_bytes=None)
        if self.dry_runs is not None:
            self.dry_runs.afford(measurement.total_time_s)
        self.captured = None  # the tuner's plugin may keep a session that has ended
        ending = self._ending(measurement, is_whole=is_whole)
        if self.verdict.action == "repair" and not self.applies_repair:
            self.guard.warn_once(
                UnguardedTrialWarning,
                "PerfGuard repaired a trial, but its objective did not call `repair_of(trial)`, so it ran as proposed, and "
                "PerfGuard learns nothing from it.",
                about="repair",
            )
        elif self.decision is not None:
            self.search.num_ended += 1
            self.guard.learn(self.decision, measurement, difference=difference)
        return ending

    def _ending(self, measurement: Measurement, *, is_whole: bool) -> Ending:
        not_measured = self.guard.why_not_measured(measurement)
        measured = {} if not_measured else measured_by(measurement, self.verdict.predicted)
        margins: Mapping[Quantity, float] | None = None
        if measurement.status == "timeout" or (self.stopped and not is_whole):  # an objective may go on to its end
            margins = self.margins_over("time")
        elif not_measured:
            pass
        elif measurement.status == "ok":
            margins = self._margins_as_measured(measured, is_whole=is_whole)
        elif measurement.status == "oom":
            margins = self._margins_out_of_memory(measurement.peak_memory_bytes)
        return Ending(measurement=measurement, not_measured=not_measured, measured=measured, margins=margins)

    def _margins_as_measured(self, measured: Mapping[Quantity, float], *, is_whole: bool) -> Mapping[Quantity, float]:
        """Return log(measured / limit) for each limit, and the margin of the verdict where nothing was read.

        A trial that has its result is not infeasible for what equal readings of its memory scatter by. Where its memory was not
        read, it fitted the device all the same: else a sampler avoids the best of what was launched in doubt.
        """
        margins = dict(self.verdict.margins)
        device = self.guard.device
        for limit in self.verdict.limits:
            value = measured.get(limit.quantity, 0.0)
            if value > 0 and (is_whole or limit.quantity not in ("time", "cost")):
                margins[limit.quantity] = math.log(value / limit.limit)
            if limit.quantity != "memory" or not is_whole:
                continue
            if limit.limit < value <= least_exceeding(limit.limit, device.kind):
                margins["memory"] = 0.0
            if value == 0 and limit.limit >= device.memory_bytes:
                margins["memory"] = min(margins["memory"], 0.0)
        return margins

    def _margins_out_of_memory(self, needed_bytes: int | None) -> Mapping[Quantity, float]:
        limit = next((limit.limit for limit in self.verdict.limits if limit.quantity == "memory"), None)
        return self.margins_over("memory", math.log(needed_bytes / limit) if needed_bytes and limit else 0.0)


def check_repairs(guard: Guard, build: AnyBuild | None) -> None:
    """Check that a trial which runs out of memory can be repaired, if it is to be.

    Args:
        guard: whose ``on_oom`` says so.
        build: what describes the trials. None: dry runs show them.

    Raises:
        ConfigurationError: if there is no description.
    """
    if guard.on_oom == "repair" and (build is None or isinstance(build, CapturingBuild)):
        raise ConfigurationError("on_oom='repair' needs build=...: a dry run shows what a trial runs, but not how to change it.")
