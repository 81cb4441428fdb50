"""What comes back from Tune's trials: measurements, failures, trials that are too slow; beside Tune's own schedulers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import cloudpickle, tune
from ray.exceptions import OutOfMemoryError
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from torch import nn

import perfguard_ray
from perfguard import Estimate, Guard, MeasurementStore, Workload
from perfguard.exceptions import (
    CaptureError,
    ConfigurationError,
    LogError,
    LogWarning,
    MeasurementWarning,
    UnguardedTrialError,
    UnguardedTrialWarning,
)
from perfguard.guard_time import GuardClock
from perfguard.record import TrialRecord
from perfguard.rejections import Search
from perfguard.session import HowEnded, TrialSession
from perfguard.verdict import Decision, Verdict
from perfguard_ray import PerfGuardCallback, PerfGuardVariantGenerator
from perfguard_ray.callback import measurement_in, metrics_of, status_of_failure
from perfguard_ray.ledger import Entry, Ledger
from tests.doubles import BARE_A100, ReplayPredictor

MIB = 2**20


def rough_predictor() -> ReplayPredictor:
    """For trials that really run: a reading far from a sure prediction would not be believed, and not be learnt."""
    return ReplayPredictor(memory=Estimate(1.1 * MIB, 2.0), step_time=Estimate(0.001, 1.0))


def build(config: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, config.get("width", 8)), inputs=(32, 64), loss=torch.mean, steps=config.get("steps", 12))


def train_steps(config: Mapping[str, Any], num_steps: int, *, seconds: float = 0.0) -> float:
    model = nn.Linear(64, config.get("width", 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        loss = model(torch.ones(32, 64)).mean()
        loss.backward()
        optimizer.step()
        time.sleep(seconds)
    return float(loss.detach())


def train(config: dict[str, Any]) -> dict[str, float] | None:
    if config.get("what") == "silent":
        return None
    with perfguard_ray.measure():
        ballast = torch.ones(64 * MIB // 4)
        loss = train_steps(config, 6)
        tune.report({"loss": loss})
        if config.get("what") == "oom":
            ballast = torch.cat([ballast, ballast])
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if config.get("what") == "failed":
            raise ValueError("labels are wrong")
        loss = train_steps(config, 6)
        del ballast
    return {"loss": loss}


def run(folder: Path, trainable: Any, space: Mapping[str, Any], *, num_samples: int = 1, **options: Any) -> Any:
    """Runs ``trainable`` guarded; returns Tune's results, the rows of the log and the predictor."""
    predictor = rough_predictor()
    guard_options = {name: options.pop(name) for name in ("time_budget", "hard_time_limit", "gpu") if name in options}
    search = PerfGuardVariantGenerator(
        build=build, predictor=predictor, log=str(folder / "log.db"), **{"gpu": "cpu", **guard_options}
    )
    tuner = tune.Tuner(
        trainable,
        param_space=dict(space),
        tune_config=tune.TuneConfig(search_alg=search, num_samples=num_samples, metric="loss", mode="min", **options),
        run_config=tune.RunConfig(
            storage_path=str(folder), name="run", verbose=0, callbacks=[PerfGuardCallback(search)], log_to_file=False
        ),
    )
    return tuner.fit(), MeasurementStore(str(folder / "log.db")).records("run"), predictor


def by(rows: list[TrialRecord], name: str) -> dict[Any, TrialRecord]:
    return {row.params[name]: row for row in rows}


# --- without a cluster


def entry(*, steps: int | None = 1000, **report: Any) -> Entry:
    decision = Decision("id", Verdict(action="launch"), steps)
    session = TrialSession(guard=Guard("cpu", time_budget=60.0, log=False), search=Search(), decision=decision)
    return Entry(session, {}, begun_at=0.0, report=report)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (entry(num_steps=100, pace_mean_s=0.1, pace_error_s=0.001, total_time_s=10.0), True),  # 10 s + 900 steps of 0.1 s
        (entry(num_steps=100, pace_mean_s=0.1, pace_error_s=0.05, total_time_s=10.0), False),  # likely, but not sure
        (entry(num_steps=100, pace_mean_s=0.05, pace_error_s=0.001, total_time_s=5.0), False),  # 5 s + 900 steps of 0.05 s
        (entry(num_steps=9, total_time_s=50.0), False),  # too few steps to have a pace
        (entry(num_steps=100, pace_mean_s=0.1, pace_error_s=0.001, total_time_s=10.0, steps=None), False),  # how many are left?
        (entry(num_steps=1, total_time_s=61.0), True),  # the budget is gone
        (entry(), False),  # nothing was reported
    ],
)
def test_pace_needs_evidence_to_break_a_budget(given: Entry, expected: bool) -> None:
    assert (given.session.too_slow(given) is not None) is expected
    given.session.guard = Guard("cpu", log=False)
    assert given.session.too_slow(given) is None


def test_outside_ray_a_block_is_measured_all_the_same() -> None:
    with perfguard_ray.measure() as measured_run:
        train_steps({}, 3)
        assert metrics_of(measured_run)["perfguard/num_steps"] == 3
    assert measured_run.measurement is not None
    assert measured_run.measurement.status == "ok"
    assert measured_run.measurement.device_id == "cpu"


def test_an_error_takes_the_measurement_along() -> None:
    def fail() -> None:
        with perfguard_ray.measure():
            train_steps({}, 2)
            raise MemoryError("no more")

    with pytest.raises(MemoryError) as caught:
        fail()
    wrapped = RuntimeError("from a worker")
    wrapped.__cause__ = caught.value
    measurement = measurement_in(wrapped)
    assert measurement is not None
    assert (measurement.status, measurement.num_steps) == ("oom", 2)
    assert measurement_in(RuntimeError("of somebody else")) is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (OutOfMemoryError("whatever Ray says"), "oom"),
        (RuntimeError("Failure # 1\n1 worker(s) were killed due to the node running low on memory."), "oom"),
        (ValueError("labels are wrong"), "failed"),
        (None, "failed"),
    ],
)
def test_trial_that_ray_kills_for_memory_is_oom(error: Exception | None, expected: str) -> None:
    assert status_of_failure(error) == expected


def stub(trial_id: str, config: Mapping[str, Any], *, tag: str = "0", checkpoint: Any = None) -> Any:
    """A double: what the callback reads of a trial."""
    return SimpleNamespace(
        trial_id=trial_id,
        config=dict(config),
        experiment_tag=tag,
        latest_checkpoint_result=checkpoint,
        stopping_criterion={},
        status=Trial.RUNNING,
    )


def guarded(**options: Any) -> PerfGuardVariantGenerator:
    settings = {"gpu": "a100", "build": build, "predictor": rough_predictor(), "log": False}
    return PerfGuardVariantGenerator(**{**settings, **options})


def report_of(num_steps: int, seconds: float, **device: Any) -> dict[str, Any]:
    fields = {"device_id": "cpu", "device_name": "AMD EPYC", "peak_memory_bytes": 124 * 2**10, "step_time_s": 1e-4}
    fields |= {"total_time_s": seconds, "num_steps": num_steps, "method": "vmhwm", "framework": "torch"}
    return {f"perfguard/{name}": value for name, value in (fields | device).items()} | {"loss": 0.5}


@pytest.mark.parametrize(("num_steps", "status", "counts"), [(3, "ok", True), (0, "ok", False), (0, "oom", True)])
def test_a_process_without_the_steps_of_the_dry_run_has_measured_nothing(num_steps: int, status: Any, counts: bool) -> None:
    """Workers of Ray Train have made them, or memory has ended before the first."""

    def captured(config: Mapping[str, Any]) -> Any: ...

    captured.captures = True  # type: ignore[attr-defined]
    ledger = Ledger(Guard("cpu", log=False), captured, "study")
    measurement = ledger.measurement(entry(num_steps=num_steps, peak_memory_bytes=2**30, device_id="rtx3090"), HowEnded(status))
    assert measurement.peak_memory_bytes == (2**30 if counts else None)
    assert measurement.device_id == "rtx3090"


def test_a_trial_that_its_pace_has_stopped_stays_so() -> None:
    """Tune stops it at its next result, whose pace may look better."""
    ledger = Ledger(Guard("cpu", time_budget="10s", log=False), build, "study")
    callback, trial = PerfGuardCallback(SimpleNamespace(ledger=ledger)), stub("t", {})
    trial.should_stop = lambda result: False
    known = ledger.entries["t"] = ledger.judge({"steps": 1000})
    for pace_s, num_steps, total_s in ((0.05, 40, 2.0), (0.006, 200, 2.9)):
        device = {"device_name": ledger.guard.device.name, "pace_mean_s": pace_s, "pace_error_s": 1e-4}
        callback.on_trial_result(0, [], trial, report_of(num_steps, total_s, **device))
        assert known.how_ends == HowEnded("ok", cut_short="by the tuner")
        assert known.session.stopped.startswith("at the measured pace it takes 50")


def test_a_dry_run_that_fails_is_made_once_for_a_proposal() -> None:
    class Fails:
        captures, calls = True, 0

        def __call__(self, params: Mapping[str, Any]) -> Any:
            self.calls += 1
            raise CaptureError("the dry run takes more than 60 s")

    fails = Fails()
    ledger = Ledger(Guard("a100", log=False), fails, "study")
    with pytest.warns(UnguardedTrialWarning):
        ledger.judge({"width": 8})
    assert fails.calls == 1


def test_epochs_that_are_no_number_end_no_run() -> None:
    def per_epoch(config: Mapping[str, Any]) -> Workload:
        return replace(build({}), steps=None, steps_per_epoch=4)

    ledger = Ledger(Guard("a100", epochs="model/epochs", log=False), per_epoch, "study")
    with pytest.warns(UnguardedTrialWarning, match="could not judge a trial"):
        assert not ledger.judge({"model": {"epochs": "ten"}}).rejected


def test_worker_without_guarded_gpu_measures_nothing() -> None:
    """The finding: "35.0 GiB predicted, 124 KiB measured, ok", for an A100 that no worker had."""
    search = guarded(time_budget="1s")
    callback, ledger = PerfGuardCallback(search), search.ledger
    trials = [stub(name, {"width": 8}, tag=str(number)) for number, name in enumerate("abc")]
    results = [report_of(12, 100.0) for _ in trials]

    def run_them() -> None:
        for trial, result in zip(trials, results, strict=True):
            ledger.entries[trial.trial_id] = ledger.judge(trial.config)
            callback.on_trial_start(0, [], trial)
            callback.on_trial_result(0, [], trial, result)
            callback.on_trial_complete(0, [], trial)

    with pytest.warns(MeasurementWarning, match=r"ran on AMD EPYC.*nothing is learnt") as caught:
        run_them()
    assert len(caught) == 1
    said = f"the worker used no {ledger.guard.device.name}; the trial ran on AMD EPYC"
    assert [result["perfguard/not_measured"] for result in results] == [said] * 3
    assert not [name for result in results for name in result if "measured_" in name or "peak" in name]
    assert all(trial.stopping_criterion == {} for trial in trials), "the budget is the A100's, the pace the processor's"
    rows = ledger.guard.log.records()
    assert all("AMD EPYC" in row.not_measured for row in rows)
    assert ledger.guard.log.observations(ledger.guard.device.id) == []
    assert ledger.guard.predictor.learnt == []  # type: ignore[attr-defined]
    summary = perfguard_ray.summarize(search)
    assert (summary.num_launched, summary.num_measured, summary.num_violations) == (3, 0, None)
    assert (summary.launched_s, summary.memory_errors, summary.time_errors) == (None, None, None)
    assert sum(summary.not_measured.values()) == 3
    assert "%" not in str(summary), "no figure where nothing was measured"


def test_guarded_device_measurement_stays_in_results() -> None:
    search = guarded()
    device = search.ledger.guard.device
    callback, trial = PerfGuardCallback(search), stub("a", {"width": 8})
    search.ledger.entries["a"] = search.ledger.judge(trial.config)
    result = report_of(12, 3.0, device_id=device.id, device_name=device.name)
    callback.on_trial_start(0, [], trial)
    callback.on_trial_result(0, [], trial, result)
    assert result["perfguard/peak_memory_bytes"] == 124 * 2**10
    assert "perfguard/not_measured" not in result
    # What Tune's loggers find beside it.
    predicted = search.ledger.entries["a"].verdict.prediction
    assert predicted is not None
    assert result["perfguard/memory_predicted_bytes"] == predicted.peak_memory.median
    assert result["perfguard/memory_measured_bytes"] == 124 * 2**10
    assert result["perfguard/verdict"] == "launched"
    assert result["perfguard/over_budget"] == 0


def test_running_trial_is_never_shown_as_pruned() -> None:
    """PB2, or a search without a guard, runs what the guard rejects: nothing is saved, and a broken budget shows."""
    search = guarded(memory_budget="1MiB", predictor=ReplayPredictor(), gpu=BARE_A100)
    device = search.ledger.guard.device
    callback, trial = PerfGuardCallback(search), stub("a", {"width": 4096})
    result = report_of(12, 3.0, device_id=device.id, device_name=device.name, peak_memory_bytes=2 * MIB)
    with pytest.warns(UnguardedTrialWarning):
        callback.on_trial_start(0, [], trial)
    callback.on_trial_result(0, [], trial, result)
    assert (result["perfguard/verdict"], result["perfguard/over_budget"]) == ("unguarded", 1)
    assert "the budget is 1.00 MiB" in result["perfguard/reason"]


@pytest.mark.parametrize("checkpoint", [None, "a checkpoint"])
def test_resumed_trial_adds_up_from_its_checkpoint(checkpoint: Any) -> None:
    """A trial that begins anew after an interruption was measured twice."""
    search = guarded(gpu="cpu")
    callback = PerfGuardCallback(search)
    search.ledger.entries["a"] = search.ledger.judge({"width": 8})
    callback.on_trial_start(0, [], stub("a", {"width": 8}))
    unmeasured = {"loss": 0.5}
    callback.on_trial_result(0, [], stub("a", {"width": 8}), unmeasured)
    assert "perfguard/time_measured_s" not in unmeasured
    callback.on_trial_result(0, [], stub("a", {"width": 8}), report_of(5, 2.0))
    callback.on_trial_start(0, [], stub("a", {"width": 8}, checkpoint=checkpoint))
    result = report_of(12, 4.0)
    callback.on_trial_result(0, [], stub("a", {"width": 8}), result)
    entry = search.ledger.entries["a"]
    assert (entry.num_steps, entry.elapsed_s) == ((17, 6.0) if checkpoint else (12, 4.0))
    assert result["perfguard/time_measured_s"] == entry.elapsed_s, "Tune's loggers get the time that the budget is compared with"


def test_last_start_without_a_report_keeps_what_was_measured_before() -> None:
    """PBT pauses a trial at its last epoch. It starts once more, and has nothing left to do or to report."""
    search = guarded(gpu="cpu")
    callback = PerfGuardCallback(search)
    search.ledger.entries["a"] = search.ledger.judge({"width": 8})
    for report in (report_of(5, 2.0, peak_memory_bytes=2 * MIB), report_of(7, 3.0, peak_memory_bytes=MIB), None):
        trial = stub("a", {"width": 8}, checkpoint="a checkpoint")
        callback.on_trial_start(0, [], trial)
        if report is not None:
            callback.on_trial_result(0, [], trial, report)
    callback.on_trial_complete(0, [], trial)
    (row,) = search.ledger.guard.log.records()
    assert row.measured == {"memory": 2 * MIB, "step_time": 1e-4, "time": 5.0}
    assert (row.status, row.note) == ("ok", "")


def test_repair_after_out_of_memory_needs_tune_to_start_trials_again() -> None:
    callback, trial = PerfGuardCallback(guarded(gpu="cpu", on_oom="repair")), stub("a", {"width": 8})
    trial.max_failures = 0
    with pytest.raises(ConfigurationError, match=r"on_oom='repair' needs Tune .*FailureConfig\(max_failures=1\)"):
        callback.on_trial_start(0, [], trial)


def test_trial_that_ran_out_of_memory_is_not_described_again_if_it_may_not_run_again() -> None:
    described: list[Mapping[str, Any]] = []

    def counted(config: Mapping[str, Any]) -> Workload:
        described.append(config)
        return build(config)

    ledger = guarded(build=counted).ledger
    ledger.entries["a"] = ledger.judge({"width": 8})
    ledger.start("a", {"width": 8}, from_checkpoint=False)
    assert ledger.try_again("a", {"width": 8}) is None
    assert len(described) == 1


def test_clock_that_is_set_back_gives_no_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("perfguard_ray.ledger.time.time", lambda: now[0])
    ledger = guarded().ledger
    known = ledger.entries["a"] = ledger.judge({"width": 8})
    ledger.start("a", {"width": 8}, from_checkpoint=False)
    now[0] -= 500
    assert ledger.measurement(known, HowEnded("failed")).total_time_s == 0.0


def test_hard_time_limit_counts_all_starts_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that begins anew has the time that is left, as the second try of an Optuna trial has."""
    now = [1000.0]
    monkeypatch.setattr("perfguard_ray.ledger.time.time", lambda: now[0])
    search = guarded(gpu="cpu", hard_time_limit="60s")
    callback = PerfGuardCallback(search)
    known = search.ledger.entries["a"] = search.ledger.judge({"width": 8})
    callback.on_trial_start(0, [], stub("a", {"width": 8}))
    callback.on_trial_result(0, [], stub("a", {"width": 8}), report_of(5, 40.0))
    now[0] += 5000.0  # it was paused
    callback.on_trial_start(0, [], stub("a", {"width": 8}))
    now[0] += 19.0
    assert known.over_time is None
    now[0] += 2.0
    assert known.over_time == "ran for 60.0 s, hard_time_limit"


@pytest.mark.parametrize(("report", "status"), [({}, "interrupted"), (report_of(5, 2.0), "ok")])
def test_stopped_experiment_keeps_measured_trials_ok(report: dict[str, Any], status: str) -> None:
    """A stopper of the whole experiment (a time limit, fail_fast) tells callbacks nothing; no advice to measure is due."""
    search = guarded(gpu="cpu")
    callback, trial = PerfGuardCallback(search), stub("a", {"width": 8})
    search.ledger.entries["a"] = search.ledger.judge({"width": 8})
    callback.on_trial_start(0, [], trial)
    if report:
        callback.on_trial_result(0, [], trial, dict(report))
    trial.status = Trial.TERMINATED
    callback.on_step_end(0, [trial])
    callback.on_experiment_end([trial])
    assert [row.status for row in search.ledger.guard.log.records()] == [status]


def test_summary_of_a_log_that_is_away_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # Reading the log raises an error while it is away, and the run has ended well all the same.
    search = guarded(gpu="cpu")
    callback = PerfGuardCallback(search)
    search.ledger.verbose = 1

    def away(*_: object, **__: object) -> list[TrialRecord]:
        raise LogError("The measurement log cannot be used now.")

    monkeypatch.setattr(search.ledger.guard.log, "records", away)
    with pytest.warns(LogWarning, match=r"summary cannot be shown.*cannot be used now.*summarize"):
        callback.on_experiment_end([])


def test_strict_guard_ends_the_run() -> None:
    def broken(config: Mapping[str, Any]) -> Workload:
        return build({"width": config["widht"]})

    with pytest.raises(UnguardedTrialError, match="widht"):
        guarded(build=broken, strict=True).ledger.judge({"width": 8})
    with pytest.raises(UnguardedTrialError, match=r"Give the same search twice: TuneConfig\(search_alg=search\)"):
        PerfGuardCallback(guarded(strict=True)).on_trial_start(0, [], stub("a", {"width": 8}))


def test_trials_without_verdict_are_counted_and_warned() -> None:
    def broken(config: Mapping[str, Any]) -> Workload:
        raise RuntimeError("no such data set")

    search = guarded(build=broken, gpu="cpu")
    with pytest.warns(UnguardedTrialWarning, match="no such data set") as caught:
        entries = [search.ledger.judge({"width": 8}, trial_id=name) for name in "abc"]
    assert len(caught) == 1
    assert not any(entry.rejected for entry in entries)
    assert perfguard_ray.summarize(search).num_unguarded == 3
    assert "launched without a verdict, or against it" in str(perfguard_ray.summarize(search))


def test_run_with_another_search_is_pointed_out() -> None:
    search = guarded(gpu="cpu")
    callback = PerfGuardCallback(search)
    with pytest.warns(UnguardedTrialWarning, match=r"has not judged.*TuneConfig\(search_alg=search\)"):
        callback.on_trial_start(0, [], stub("a", {"width": 8}, tag="0_width=8"))
    callback.on_trial_start(0, [], stub("b", {"width": 8}, tag="1_width=8"))  # said once: a second warning would be an error
    assert [(row.number, row.trial_id) for row in search.ledger.guard.log.records()] == [(0, "a"), (1, "b")]


def test_rejected_configurations_are_summarized(capsys: pytest.CaptureFixture[str]) -> None:
    search = guarded(memory_budget="1MiB", predictor=ReplayPredictor(), gpu=BARE_A100)
    ledger = search.ledger
    ledger.judge({"width": 4096})
    assert capsys.readouterr().out == "", "silent, unless Tune is not"
    ledger.verbose = 1
    for width in (5000, 5000, 2**30, 8):
        ledger.judge({"width": width, "lr": 0.123456}, trial=3, trial_id="a")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "PerfGuard rejected width=5000, lr=0.1235",
        "PerfGuard rejected width=1073741824, lr=0.1235",
    ]
    assert ", the budget is 1.00 MiB, exceeded with a chance of over 99.9%" in lines[0]
    summary = perfguard_ray.summarize(search)
    assert (summary.num_launched, summary.num_pruned, summary.num_repeated, summary.num_crashes_avoided) == (1, 3, 1, 1)
    assert summary.pruned_for == {"memory": 3}
    assert summary.saved_s == pytest.approx(2 * 12 * 0.01), "what runs out of memory at its start saves no hours"
    assert {(row.number, row.trial_id) for row in ledger.guard.log.records()} == {(None, None), (3, "a")}


def test_guard_time_of_replaced_verdicts_is_summarized() -> None:
    search = guarded(memory_budget="1MiB", predictor=ReplayPredictor(), gpu=BARE_A100)
    ledger, clock = search.ledger, GuardClock(lambda: 0.0)
    ledger.guard.clock = clock
    for _ in range(3):
        clock.add(2.0)
        ledger.judge({"width": 4096})
        ledger.search.num_ended += 1  # so that it is judged again
    summary = perfguard_ray.summarize(search)
    assert summary.num_pruned == 1
    assert summary.cost is not None
    assert summary.cost.guard_s == 6.0


def test_rejected_trial_that_runs_counts_as_launched(capsys: pytest.CaptureFixture[str]) -> None:
    search = guarded(memory_budget="1MiB", predictor=ReplayPredictor(), gpu=BARE_A100)
    ledger = search.ledger
    ledger.judge({"width": 4096})
    ledger.verbose = 1
    with pytest.warns(UnguardedTrialWarning, match="would have rejected"):
        ledger.start("a", {"width": 4096}, trial=0)
    ledger.start("b", {"width": 5000}, trial=1)  # of which no rejection is remembered; the warning is said once
    ledger.finish("a", HowEnded("failed"))
    ledger.finish("b", HowEnded("failed"))
    assert capsys.readouterr().out == "", "a trial that runs is not rejected"
    rows = ledger.guard.log.records()
    assert [(row.trial_id, row.in_words, row.status) for row in rows] == [
        (None, "pruned", None),
        ("a", "unguarded", "failed"),
        ("b", "unguarded", "failed"),
    ]
    summary = perfguard_ray.summarize(search)
    assert (summary.num_launched, summary.num_pruned, summary.num_repeated, summary.num_unguarded) == (2, 1, 0, 2)


def test_rejections_and_counts_outlive_the_driver() -> None:
    search, again = (guarded(memory_budget="1MiB", predictor=ReplayPredictor(), gpu=BARE_A100) for _ in range(2))
    search.ledger.judge({"width": 4096})
    again.set_state(cloudpickle.loads(cloudpickle.dumps(search.get_state())))
    assert again.ledger.judge({"width": 4096}).rejected
    assert again.ledger.num_repeated == 1
    assert again.ledger.guard.log.records() == []


# --- with Tune


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_costs_and_failures_of_trials_are_logged(tmp_path: Path) -> None:
    whats = ["ok", "silent", "oom", "failed", "silent"]
    with pytest.warns(MeasurementWarning, match=r"Put `with perfguard_ray.measure\(\):` around the body") as caught:
        results, rows, predictor = run(tmp_path, train, {"what": tune.grid_search(whats)}, reuse_actors=True)
    assert len(caught) == 1
    assert results.num_errors == 2
    logged = by(rows, "what")
    assert {what: row.status for what, row in logged.items()} == {"ok": "ok", "oom": "oom", "failed": "failed", "silent": "ok"}
    peaks = {what: row.measured.get("memory", 0) for what, row in logged.items()}
    assert 60 * MIB < peaks["ok"] < 110 * MIB
    assert peaks["oom"] > 180 * MIB, "the lower bound is what was reached after the last report"
    assert "memory" not in logged["silent"].measured
    assert "step_time" in logged["ok"].measured
    learnt = {row.measurement.status: row.measurement for row in predictor.learnt if row.measurement.peak_memory_bytes}
    assert {status: measurement.num_steps for status, measurement in learnt.items()} == {"ok": 12, "oom": 6}
    (best,) = (result for result in results if result.config["what"] == "ok")
    assert best.metrics["perfguard/num_steps"] == 12


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_pace_over_time_budget_stops_trial(tmp_path: Path) -> None:
    def slow(config: dict[str, Any]) -> None:
        with perfguard_ray.measure():
            for _ in range(20):
                tune.report({"loss": train_steps(config, 10, seconds=config["seconds"])})

    space = {"seconds": tune.grid_search([0.0, 0.1]), "steps": 200}
    _, rows, _ = run(tmp_path, slow, space, time_budget="14s", reuse_actors=True)
    logged = by(rows, "seconds")
    assert logged[0.0].status == "ok"
    assert logged[0.1].cut_short == "too slow"
    assert logged[0.1].note.startswith("at the measured pace it takes 20")
    assert 1 < logged[0.1].measured["time"] < 10  # all of it would have taken 20 s


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_trial_that_hangs_is_ended_at_its_hard_time_limit(tmp_path: Path) -> None:
    """It is pruned. Tune itself ends a trial only at its next report, and waits ten minutes for the end of its actor."""

    def hangs(config: dict[str, Any]) -> None:
        with perfguard_ray.measure():
            tune.report({"loss": train_steps(config, 6)})
            while config["hangs"]:
                time.sleep(1)

    results, rows, _ = run(tmp_path, hangs, {"hangs": tune.grid_search([True, False])}, hard_time_limit="8s")
    assert results.num_errors == 0
    logged = by(rows, "hangs")
    assert {hanging: row.status for hanging, row in logged.items()} == {True: "timeout", False: "ok"}
    assert logged[True].note.startswith("ran for 8.00 s, hard_time_limit")
    assert logged[True].breaks("time")
    assert 8 <= logged[True].measured["time"] < 50


@perfguard_ray.measured
class Epochs(tune.Trainable):
    """A class Trainable of three epochs."""

    def setup(self, config: dict[str, Any]) -> None:
        self.begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.begin(new_config)
        return True

    def begin(self, config: Mapping[str, Any]) -> None:
        self.model = nn.Linear(64, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.get("lr", 0.1))
        self.epoch = 0

    def step(self) -> dict[str, Any]:
        self.epoch += 1
        for _ in range(4):
            loss = self.model(torch.ones(32, 64)).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return {"loss": float(loss.detach()), "done": self.epoch == 3}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        torch.save((self.model.state_dict(), self.epoch), Path(checkpoint_dir) / "state.pt")

    def load_checkpoint(self, checkpoint_dir: str) -> None:  # type: ignore[override]
        state, self.epoch = torch.load(Path(checkpoint_dir) / "state.pt")
        self.model.load_state_dict(state)


def report_loss(config: dict[str, Any]) -> None:
    with perfguard_ray.measure():
        for _ in range(8):
            train_steps(config, 2)
            tune.report({"loss": config["width"]})


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_stopping_scheduler_works_beside_the_guard(tmp_path: Path) -> None:
    widths = [4, 8, 16, 32, 64, 128]  # the losses; the best comes first, so the others are stopped
    results, rows, _ = run(
        tmp_path,
        report_loss,
        {"width": tune.grid_search(widths)},
        scheduler=ASHAScheduler(max_t=8, grace_period=1, reduction_factor=2),
        reuse_actors=True,
    )
    assert results.num_errors == 0
    assert [row.status for row in rows] == ["ok"] * len(widths)
    assert min(len(result.metrics_dataframe) for result in results) < 8, "none was stopped"


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.filterwarnings("ignore:Consider boosting PBT performance")
def test_pbt_closes_the_decision_it_replaces(tmp_path: Path) -> None:
    """Population based training changes the configuration of a trial that runs; each has its own decision and measurement."""
    assert Epochs.__name__ == "Epochs"
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration", perturbation_interval=1, hyperparam_mutations={"lr": [0.1, 1e-4]}, quantile_fraction=0.5
    )
    space = {"lr": tune.grid_search([0.1, 1e-5])}
    results, rows, predictor = run(tmp_path, Epochs, space, scheduler=scheduler, reuse_actors=True)
    assert results.num_errors == 0
    assert len(rows) > 2, "no configuration was changed"
    assert all(row.status == "ok" and "time" in row.measured for row in rows)
    assert {observation.measurement.num_steps for observation in predictor.learnt} <= {4, 8, 12}


def test_restored_run_shares_one_ledger() -> None:
    """Search and callback of a restored run write to the same ledger."""
    search = guarded()
    again = cloudpickle.loads(cloudpickle.dumps((search, PerfGuardCallback(search))))
    assert again[0].ledger is again[1].ledger
    assert again[0].ledger is not search.ledger


def train_with_ray_train(config: dict[str, Any]) -> None:
    """Tune drives, Ray Train trains."""
    from ray.train import RunConfig, ScalingConfig, report
    from ray.train.torch import TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    def worker(settings: dict[str, Any]) -> None:
        with perfguard_ray.measure():
            report({"loss": train_steps(settings, 5)})
            report({"loss": train_steps(settings, 5)})

    TorchTrainer(
        worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=config["folder"], callbacks=[TuneReportCallback()]),  # type: ignore[list-item]
    ).fit()


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_ray_train_trial_is_measured_in_its_worker(tmp_path: Path) -> None:
    trainable = tune.with_resources(train_with_ray_train, {"CPU": 0.5})
    results, rows, predictor = run(tmp_path, trainable, {"width": tune.grid_search([8]), "folder": str(tmp_path / "train")})
    assert results.num_errors == 0
    assert [row.status for row in rows] == ["ok"]
    assert [observation.measurement.num_steps for observation in predictor.learnt] == [10]
