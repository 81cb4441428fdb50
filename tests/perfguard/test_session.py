"""The protocol of one trial, whatever the tuner: when it is judged, ended, tried again, and what is learnt from it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perfguard import Device
from perfguard.capture import DryRuns
from perfguard.device_room import DeviceRoom
from perfguard.exceptions import BudgetWarning, CaptureError, ConfigurationError, MeasurementWarning, UnguardedTrialWarning
from perfguard.guard import Guard
from perfguard.measure import CutShort, Measurement
from perfguard.pace import Pace
from perfguard.predictor import Estimate
from perfguard.rejections import Search
from perfguard.session import HowEnded, TrialSession, check_repairs
from perfguard.workload import Workload
from tests.doubles import BARE_A100, TOY_CPU, ReplayPredictor

MIB = 2**20
BATCH = 512


def workload(width: int = 8, **fields: Any) -> Workload:
    return Workload(nn.Linear(64, width, device="meta"), inputs=(BATCH, 64), loss=torch.mean, **fields)


def session_of(search: Search | None = None, *, device: Device = BARE_A100, **settings: Any) -> TrialSession:
    """The session of a trial under a guard with a budget of 1 MiB and ``settings``."""
    options: dict[str, Any] = {"memory_budget": "1MiB", "predictor": ReplayPredictor(), "log": False} | settings
    return TrialSession(guard=Guard(device, **options), search=search or Search(), study="study", number=0)


def judged(session: TrialSession, found: Workload | Exception, **params: Any) -> TrialSession:
    session.judge(found, params, key=session.guard.key_of(found, params))
    return session


def measurement(status: Any = "ok", **fields: Any) -> Measurement:
    known = {"peak_memory_bytes": MIB // 2, "step_time_s": 0.01, "total_time_s": 1.0, "num_steps": 10, "method": "double"}
    return Measurement(
        **{"status": status, "device_id": BARE_A100.id, "device_name": BARE_A100.name, "framework": "torch"} | known | fields
    )


@dataclass
class Running:
    """A trial that runs, in the middle of its steps."""

    elapsed_s: float = 10.0
    num_steps: int = 100
    mean_s: float = 0.1
    is_elsewhere: bool = False

    @property
    def pace(self) -> Pace:
        return Pace(self.mean_s, 0.001)


# --- Before the launch


def test_rejection_is_repeated_until_a_trial_has_ended() -> None:
    """The guard may have learnt from the trial that has ended, so what it rejected before is judged again."""
    search = Search()
    first = judged(session_of(search), workload(4096))
    again = judged(TrialSession(guard=first.guard, search=search, study="study"), workload(4096))
    assert (first.is_rejected, first.rejected_before, again.is_rejected) == (True, None, True)
    assert again.rejected_before is not None
    assert search.num_repeated == 1
    search.num_ended += 1
    judged(TrialSession(guard=first.guard, search=search, study="study"), workload(4096))
    assert (search.num_rejected, search.num_repeated) == (3, 1)
    assert first.decision is not None
    assert search.superseded == {first.decision.id}


@pytest.mark.parametrize("logs_repeats", [True, False])
def test_repeated_rejection_has_a_row_where_it_is_a_trial_of_its_own(logs_repeats: bool) -> None:
    session = session_of()
    for _ in range(2):
        key = session.guard.key_of(workload(4096), {})
        session.judge(workload(4096), {}, key=key, logs_repeats=logs_repeats)
    assert len(session.guard.log.records()) == 1 + logs_repeats


class ShowsNothing(DryRuns):
    """Dry runs that fail, of which the first trial is judged late."""

    captures = True

    def __init__(self) -> None:
        self.set_up_s: list[float] = []
        self.trials_s: list[float] = []

    def __call__(self, params: Mapping[str, Any]) -> Any:
        raise CaptureError("the set-up needs values")

    def judges_late(self, problem: Exception) -> bool:
        return not self.set_up_s

    def note_first_forward(self, found: Any, set_up_s: float) -> None:
        self.set_up_s.append(set_up_s)

    def afford(self, trial_s: float, *, share: float = 0.05) -> None:
        self.trials_s.append(trial_s)


@pytest.mark.parametrize(("width", "action"), [(8, "launch"), (4096, "prune")])
def test_trial_without_a_dry_run_waits_for_its_verdict_and_counts_once(width: int, action: str) -> None:
    problem = CaptureError("the set-up needs values")
    session = session_of()
    session.dry_runs = ShowsNothing()
    assert session.judge(problem, {}, key="key", may_wait=True) is None
    assert session.problem is problem
    assert (session.search.num_launched, session.search.num_rejected) == (0, 0), "its verdict is not known"
    session.judge_late(workload(width), {"width": width}, set_up_s=7.0)  # type: ignore[arg-type]
    assert session.problem is None
    assert session.verdict.action == action
    assert session.search.num_launched + session.search.num_rejected == 1
    assert session.dry_runs.set_up_s == [7.0]


def test_trial_that_was_rejected_late_does_not_start_again_before_another_has_ended() -> None:
    """Its set-up has been paid for once. In Optuna, each proposal of it paid again."""
    problem, params = CaptureError("the set-up needs values"), {"width": 4096}
    session = session_of()
    session.dry_runs = ShowsNothing()
    session.problem = problem
    session.judge_late(workload(4096), params, set_up_s=7.0)  # type: ignore[arg-type]
    again = replace(session, decision=None, dry_runs=ShowsNothing())
    assert again.judge(problem, params, key=again.guard.key_of(problem, params), may_wait=True) is not None
    assert again.is_rejected
    again.search.num_ended += 1
    assert again.judge(problem, params, key=again.guard.key_of(problem, params), may_wait=True) is None


def test_session_is_pickled_without_its_guard() -> None:
    """Ray saves its sessions with the run. The guard goes with the Tuner."""
    session = judged(session_of(), workload(4096))
    restored = pickle.loads(pickle.dumps(session))
    restored.go_on(session.guard, session.search, None)
    assert restored == session


def test_trial_that_may_not_wait_is_launched_with_the_cause() -> None:
    """Several ranks cannot: a verdict at the first forward pass of one leaves the others waiting."""
    session = session_of()
    session.dry_runs = ShowsNothing()
    with pytest.warns(UnguardedTrialWarning, match="needs values"):
        session.judge(CaptureError("the set-up needs values"), {}, key="key")
    assert "needs values" in session.verdict.unjudged


def test_trial_that_ends_before_its_verdict_is_logged_with_the_cause() -> None:
    session = session_of()
    session.problem = CaptureError("the set-up needs values")
    session.end_unjudged({"width": 8})
    session.end(measurement("failed"))
    (row,) = session.guard.log.records()
    assert (row.status, row.reason) == ("failed", "not judged: the set-up needs values")


# --- While it runs


@pytest.mark.parametrize(("on_violation", "ends"), [("prune", True), ("repair", True), ("warn", False)])
def test_pace_ends_a_trial_unless_the_guard_only_warns(on_violation: Any, ends: bool) -> None:
    """In Ray, a guard with on_violation="warn" stopped trials, and in Optuna it did not."""
    session = judged(session_of(time_budget="60s", on_violation=on_violation), workload(steps=1000))
    reason = session.too_slow(Running())
    assert (reason is not None) is ends
    assert session.margins_over("time")["time"] > 0


def test_pace_beside_neighbours_ends_no_trial(tmp_path: Path) -> None:
    """It becomes faster when they end. Alone, the same pace ends it."""
    room = DeviceRoom(name="toy", capacity_bytes=2**40, folder=tmp_path)
    session = judged(session_of(time_budget="60s"), workload(steps=1000))
    session.guard.room = room
    session.take_room()
    neighbour = room.reserve(1)
    assert session.too_slow(Running()) is None
    neighbour.release()
    session.leave_room()
    assert room.num_reserved() == 0
    assert session.too_slow(Running()) is not None


def test_room_that_cannot_be_reserved_is_a_warning(tmp_path: Path) -> None:
    session = judged(session_of(), workload())
    (tmp_path / "file").touch()
    session.guard.room = DeviceRoom(name="toy", capacity_bytes=2**40, folder=tmp_path / "file")
    with pytest.warns(UnguardedTrialWarning, match="could not reserve memory on toy"):
        session.take_room()
    assert session.reservation is None


@pytest.mark.parametrize(("cut_short", "is_too_slow"), [("by the tuner", True), ("", False)])
def test_trial_that_its_pace_ends_is_learnt_and_lost_time_counts(cut_short: CutShort, is_too_slow: bool) -> None:
    """Its steps are those of any other trial. Ray's were logged as timeouts, which nothing is learnt from."""
    session = judged(session_of(time_budget="60s"), workload(steps=1000))
    session.too_slow(Running())
    how = session.how_ended(HowEnded("ok", cut_short=cut_short))
    assert how.note.startswith("at the measured pace it takes 100 s") is is_too_slow
    assert (how.cut_short == "too slow") is is_too_slow
    ending = session.end(measurement(note=how.note, cut_short=how.cut_short))
    assert ending.margins is not None
    assert (ending.margins["time"] > 0) is is_too_slow, "one that went on to its end has held its budget"
    assert len(session.guard.predictor.learnt) == 1  # type: ignore[attr-defined]
    (ended,) = session.guard.log.history("study").ended
    assert ended.exceeded == ("by the pace" if is_too_slow else None)


def test_hard_time_limit_counts_all_seconds() -> None:
    session = session_of(hard_time_limit="1h")
    assert session.over_time(3600.0) is None
    assert session.over_time(3601.0) == "ran for 1.00 h, hard_time_limit"
    assert session_of().over_time(1e9) is None


# --- After its end


def out_of_memory(session: TrialSession) -> TrialSession:
    session.end(measurement("oom"))
    return session


@pytest.mark.parametrize("on_violation", ["prune", "repair", "warn"])
def test_trial_out_of_memory_runs_once_more_with_a_repair_and_never_a_third_time(on_violation: Any) -> None:
    """In Ray, on_violation="repair" decided on it, and as often as Tune started it again."""
    session = judged(session_of(memory_budget="8MiB", on_oom="repair", on_violation=on_violation), workload(128))
    assert session.verdict.action == "launch"
    assert out_of_memory(session).try_again(workload(128), {})
    assert session.verdict.repair.micro_batch_size == BATCH // 2
    assert session.verdict.reason.endswith("its first try (as proposed) ran out of memory")
    assert not out_of_memory(session).try_again(workload(128), {})
    assert [row.in_words for row in session.guard.log.records()] == ["launched", "repaired"]


@pytest.mark.parametrize("on_violation", ["prune", "repair"])
def test_trial_out_of_memory_ends_by_default(on_violation: Any) -> None:
    session = judged(session_of(memory_budget="8MiB", on_violation=on_violation), workload(128))
    assert not out_of_memory(session).try_again(workload(128), {})


def test_trial_that_applies_no_repair_is_not_tried_again() -> None:
    session = judged(session_of(memory_budget="8MiB", on_oom="repair"), workload(128))
    session.applies_repair = False
    with pytest.warns(UnguardedTrialWarning, match=r"before its objective called `repair_of\(trial\)`"):
        assert not out_of_memory(session).try_again(workload(128), {})


def test_trial_that_no_remedy_makes_smaller_keeps_its_decision() -> None:
    session = judged(session_of(memory_budget="1GiB", on_oom="repair"), replace(workload(2**16), inputs=(2, 64)))
    decision = session.decision
    assert not out_of_memory(session).try_again(replace(workload(2**16), inputs=(2, 64)), {})
    assert session.decision is decision


def test_repair_without_a_description_is_refused() -> None:
    guard = session_of(on_oom="repair").guard
    for build in (None, ShowsNothing()):
        with pytest.raises(ConfigurationError, match=r"on_oom='repair' needs build=\.\.\."):
            check_repairs(guard, build)
    check_repairs(guard, lambda params: workload())
    check_repairs(session_of().guard, None)


@pytest.mark.parametrize(
    ("ended", "margin"),
    [
        (measurement(), math.log(0.5)),
        (measurement("oom", peak_memory_bytes=2 * MIB), math.log(2)),
        (measurement("oom", peak_memory_bytes=None), 0.01),
        (measurement("failed"), None),
    ],
)
def test_margins_of_a_trial_that_ran_are_what_was_measured(ended: Measurement, margin: float | None) -> None:
    session = judged(session_of(), workload())
    margins = session.end(ended).margins
    assert (None if margins is None else margins["memory"]) == (None if margin is None else pytest.approx(margin))


@pytest.mark.parametrize(
    ("device", "share", "margin"),
    [(TOY_CPU, 1.05, 0.0), (TOY_CPU, 1.2, math.log(1.2)), (TOY_CPU, 0.5, math.log(0.5)), (BARE_A100, 1.05, math.log(1.05))],
)
def test_a_result_is_feasible_whatever_equal_readings_scatter_by(device: Device, share: float, margin: float) -> None:
    session = judged(session_of(device=device), workload())
    (limit,) = (limit.limit for limit in session.verdict.limits if limit.quantity == "memory")
    read = measurement(device_id=device.id, device_name=device.name, peak_memory_bytes=round(share * limit))
    margins = session.end(read).margins
    assert margins is not None
    assert margins["memory"] == pytest.approx(margin, abs=1e-6)


@pytest.mark.parametrize(("share", "is_feasible"), [(1.0, True), (0.5, False)])
def test_doubtful_trial_whose_memory_was_not_read_is_feasible_if_the_device_is_the_limit(share: float, is_feasible: bool) -> None:
    """It fitted the device. A smaller budget may be broken all the same, so there the prediction stands."""
    predictor = ReplayPredictor(memory=Estimate(1.02 * share * BARE_A100.memory_bytes, 0.05))
    session = judged(session_of(memory_budget=share, predictor=predictor, risk=0.3), workload())
    assert session.verdict.action == "launch"
    assert session.verdict.margins["memory"] == pytest.approx(math.log(1.02))
    margins = session.end(measurement(peak_memory_bytes=None)).margins
    assert margins is not None
    assert (margins["memory"] <= 0) == is_feasible


def test_trial_on_another_device_keeps_the_margins_of_its_verdict() -> None:
    session = judged(session_of(), workload())
    with pytest.warns(MeasurementWarning, match="ran on AMD EPYC"):
        ending = session.end(measurement(device_id="cpu", device_name="AMD EPYC"))
    assert (ending.margins, ending.measured) == (None, {})
    assert "ran on AMD EPYC" in ending.not_measured


def test_time_of_a_trial_that_was_cut_short_says_nothing_of_its_limit() -> None:
    session = judged(session_of(time_budget="60s"), workload(steps=100))
    predicted = session.verdict.margins["time"]
    for cut_short, margin in (("by the tuner", predicted), ("", math.log(1 / 60))):
        margins = session.end(measurement(cut_short=cut_short)).margins
        assert margins is not None
        assert margins["time"] == pytest.approx(margin)


def test_memory_of_a_trial_that_was_cut_before_its_first_step_is_none() -> None:
    session = judged(session_of(), workload())
    assert session.end(measurement(cut_short="by the tuner", num_steps=0)).measurement.peak_memory_bytes is None
    assert session.end(measurement(cut_short="by the tuner", num_steps=1)).measurement.peak_memory_bytes is not None


def test_repair_that_was_not_applied_is_not_learnt() -> None:
    session = judged(session_of(memory_budget="600KiB", on_violation="repair"), workload(128))
    session.applies_repair = False
    with pytest.warns(UnguardedTrialWarning, match=r"did not call `repair_of\(trial\)`"):
        session.end(measurement())
    assert (session.search.num_ended, session.guard.predictor.learnt) == (0, [])  # type: ignore[attr-defined]


def test_time_of_a_trial_is_what_a_dry_run_may_take_a_share_of() -> None:
    """Only Ray's trials told it, so the dry runs of an Optuna study of hours had a minute."""
    session = judged(session_of(), workload())
    session.dry_runs = ShowsNothing()
    session.end(measurement(total_time_s=7200.0))
    assert session.dry_runs.trials_s == [7200.0]


def test_doubtful_trial_that_only_warns_is_launched() -> None:
    with pytest.warns(BudgetWarning):
        session = judged(session_of(on_violation="warn"), workload(4096))
    assert not session.is_rejected


def test_settings_that_no_tuner_can_follow_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="on_oom must be one of prune, repair, but got 'retry'"):
        session_of(on_oom="retry")
    with pytest.raises(ConfigurationError, match="hard_time_limit must look like"):
        session_of(hard_time_limit="soon")
