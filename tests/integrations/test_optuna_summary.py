"""The account of a study, its tables and its lines, from trials made by hand."""

from __future__ import annotations

import datetime
import io
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState, create_trial
from rich.console import Console
from torch import nn

from perfguard import Workload
from perfguard_optuna import (
    PerfGuardPruner,
    PerfGuardSampler,
    TrialPrinter,
    TrialRecord,
    create_study,
    record_of,
    skipped_table,
    summarize,
)
from tests.doubles import BARE_A100, ReplayPredictor

MIB = 2**20
UNPREDICTED = {"perfguard:verdict": "launch", "perfguard:reason": "not judged: BuildError: ..."}


def attributes(
    verdict: str, predicted: tuple[float, float], measured: tuple[float, float] | None = None, status: str = "ok"
) -> dict[str, Any]:
    """What the pruner writes, for ``(memory, time)`` in MiB and seconds, under a budget of 100 MiB, of 200, and 10 s."""
    result: dict[str, Any] = {
        "perfguard:schema": 1, "perfguard:verdict": verdict, "perfguard:reason": "because",
        "perfguard:memory:capacity_bytes": 200 * MIB,
    }  # fmt: skip
    for quantity, scale, limit, index in (("memory", MIB, 100, 0), ("time", 1, 10, 1)):
        value = predicted[index] * scale
        result |= {
            f"perfguard:{quantity}:predicted": value,
            f"perfguard:{quantity}:low": value / 2,
            f"perfguard:{quantity}:high": value * 2,
            f"perfguard:{quantity}:limit": limit * scale,
        }
        if measured is not None:
            result |= {f"perfguard:{quantity}:measured": measured[index] * scale, "perfguard:status": status}
    return result


def finished(user_attrs: Mapping[str, Any], *, state: TrialState = TrialState.COMPLETE, value: float | None = 0.5) -> FrozenTrial:
    return create_trial(state=state, value=value if state == TrialState.COMPLETE else None, user_attrs=dict(user_attrs))


def study_of(*trials: FrozenTrial) -> optuna.Study:
    study = optuna.create_study()
    study.add_trials(trials)
    return study


@pytest.fixture
def study() -> optuna.Study:
    return study_of(
        finished(attributes("launch", (60, 4), (50, 5))),  # errors 0.2 and 0.2
        finished(attributes("launch", (80, 8), (80, 10))),  # errors 0 and 0.2; at the limit, not over it
        finished(attributes("launch", (90, 2), (120, 2))),  # errors 0.25 and 0; over the memory budget
        finished(attributes("launch", (50, 3), (40, 1), status="oom"), state=TrialState.PRUNED),
        finished(attributes("prune", (400, 30)), state=TrialState.PRUNED),
        finished(attributes("prune", (50, 12.5)), state=TrialState.PRUNED),
        finished(UNPREDICTED | {"perfguard:status": "ok", "perfguard:time:measured": 7.0}),
        finished({}),
    )


def test_a_summary_by_hand(study: optuna.Study) -> None:
    mean_error = (0.2 + 0.1 + 0.125) / 3
    summary = asdict(summarize(study))
    assert summary.pop("pruned_for") == {"memory": 1, "time": 1}
    assert summary == pytest.approx(
        {
            "num_launched": 6,
            "num_repaired": 0,
            "num_pruned": 2,
            "num_unguarded": 2,
            "why_unguarded": "BuildError: ...",
            "num_measured": 4,
            "why_not_measured": "",
            "num_violations": 2,
            "launched_s": 5 + 10 + 2 + 1 + 7,
            "num_crashes_avoided": 1,
            "saved_s": 12.5,
            "first_error": mean_error,
            "last_error": mean_error,
        }
    )


def test_summary_separates_first_and_last_errors() -> None:
    rough = [finished(attributes("launch", (150, 1.5), (100, 1))) for _ in range(5)]
    fair = [finished(attributes("launch", (110, 1.1), (100, 1))) for _ in range(10)]
    summary = summarize(study_of(*rough, *fair))
    assert summary.first_error == pytest.approx(0.5)
    assert summary.last_error == pytest.approx(0.1)


def test_unguarded_study_has_nothing_to_compare() -> None:
    summary = summarize(study_of(finished({}), finished({}, state=TrialState.FAIL)))
    assert (summary.num_launched, summary.num_unguarded, summary.first_error, summary.last_error) == (2, 2, None, None)


def test_time_saved_excludes_trials_that_would_crash() -> None:
    """A sceptic does not believe "16.4 h saved" by four trials that need more than the card has: each dies in its first step."""
    over_the_card = [finished(attributes("prune", (4000, 14760)), state=TrialState.PRUNED) for _ in range(4)]
    summary = summarize(study_of(*over_the_card))
    assert (summary.num_crashes_avoided, summary.saved_s) == (4, None)
    assert line_of(str(summary), "time of the other pruned trials") == "-"
    assert "h" not in printed(skipped_table(study_of(*over_the_card))).splitlines()[-2]


def test_failures_avoided_counts_only_over_card_memory() -> None:
    """With memory_budget below the card's memory "failures avoided" counted trials that would not have failed."""
    study = study_of(
        finished(attributes("prune", (199, 30)), state=TrialState.PRUNED),
        finished(attributes("prune", (201, 30)), state=TrialState.PRUNED),
    )
    summary = summarize(study)
    assert (summary.num_crashes_avoided, summary.saved_s, summary.pruned_for) == (1, 30, {"time": 2})
    assert line_of(str(summary), "would have run out of memory at their start") == "1"


def test_older_trial_over_memory_budget_is_not_counted() -> None:
    """It does not say how much memory its card had, so nobody knows whether it would have run."""
    older = attributes("prune", (150, 30))
    del older["perfguard:memory:capacity_bytes"]
    summary = summarize(study_of(finished(older, state=TrialState.PRUNED)))
    assert (summary.num_crashes_avoided, summary.saved_s) == (0, None)


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("by_sampler", [False, True])
@pytest.mark.parametrize(("width", "crashes"), [(2**18, 0), (2**36, 1)])
def test_verdict_attributes_hold_device_memory(width: int, crashes: int, by_sampler: bool) -> None:
    def build(params: Mapping[str, Any]) -> Workload:
        return Workload(nn.Linear(8, params["width"]), inputs=(8, 8), loss=torch.mean, steps=100)

    pruner = PerfGuardPruner(BARE_A100, build=build, memory_budget="1MiB", predictor=ReplayPredictor(), log=False)
    inner = optuna.samplers.RandomSampler(seed=0)
    study = create_study(pruner=pruner, sampler=PerfGuardSampler(inner, pruner) if by_sampler else inner)
    study.enqueue_trial({"width": width})
    study.optimize(lambda trial: float(trial.suggest_int("width", 1, 2**36)), n_trials=1, count="proposed")
    record = record_of(study.trials[0])
    assert (record.verdict, record.capacity_bytes) == ("prune", BARE_A100.memory_bytes)
    summary = summarize(study)
    assert summary.num_crashes_avoided == crashes
    assert (summary.saved_s is None) == bool(crashes)


def test_summary_has_no_figure_without_measurements() -> None:
    """ "violations 0" and "prediction error 156646083.5%" are claims about a device that is not there."""
    absent = attributes("launch", (60, 4)) | {"perfguard:not_measured": "this process has no NVIDIA A100"}
    summary = summarize(study_of(finished(absent), finished(absent)))
    assert (summary.num_measured, summary.num_violations, summary.first_error, summary.last_error) == (0, None, None, None)
    assert line_of(str(summary), "budget violations") == "not measured: this process has no NVIDIA A100"
    assert line_of(str(summary), "prediction error, first") == "-"


def test_huge_prediction_error_is_said_in_words() -> None:
    """A mocked objective takes next to nothing; nine digits of a percentage tell nobody what that means."""
    mocked = attributes("launch", (60, 4), (60, 4e-6))
    assert line_of(str(summarize(study_of(finished(mocked)))), "first 5") == (
        "a factor of 500000: the predictor does not fit these runs"
    )


def test_a_printed_summary_is_its_table(study: optuna.Study, capsys: pytest.CaptureFixture[str]) -> None:
    """`print(summarize(study))` is what people type first; it was a raw dataclass with sixteen digits."""
    print(summarize(study))
    text = capsys.readouterr().out
    assert line_of(text, "trials launched") == "6"
    assert "StudySummary(" not in text


def line_of(text: str, label: str) -> str:
    (line,) = [line for line in text.splitlines() if label in line]
    return line.strip("│ ").split("│")[1].strip()


def test_trials_that_are_not_finished_do_not_count() -> None:
    study = study_of(finished({}))
    study.ask()
    assert summarize(study).num_launched == 1


def test_the_table_says_it_in_words(study: optuna.Study) -> None:
    text = printed(summarize(study).table())
    for label, value in (
        ("trials launched", "6"),
        ("trials pruned before launch", "2 (peak memory 1, trial time 1)"),
        ("launched without a verdict", "2 (BuildError: ...)"),
        ("budget violations among the launched", "2 (2 not measured)"),
        ("time of the launched trials", "25.0 s"),
        ("would have run out of memory at their start", "1"),
        ("time of the other pruned trials (predicted)", "12.5 s"),
        ("prediction error, first 5 trials", "14.2%"),
        ("prediction error, last 10 trials", "14.2%"),
    ):
        (line,) = [line for line in text.splitlines() if label in line]
        assert value in line


def test_repaired_trials_count_as_launched() -> None:
    summary = summarize(
        study_of(finished(attributes("repair", (60, 4), (50, 5))), finished(attributes("launch", (60, 4), (50, 5))))
    )
    assert (summary.num_launched, summary.num_repaired) == (2, 1)
    assert "2, 1 repaired" in printed(summary.table())


def test_unmeasured_launched_trial_takes_its_duration() -> None:
    """Where nothing was measured, a trial took as long as the study saw it run."""
    trial = finished(attributes("launch", (60, 4)))
    trial.datetime_start = datetime.datetime(2026, 11, 21, 12, 0, 0)
    trial.datetime_complete = datetime.datetime(2026, 11, 21, 12, 1, 30)
    assert summarize(study_of(trial)).launched_s == 90


def test_stopped_trial_has_no_prediction_error() -> None:
    """A trial that was stopped on its way did not take the time that was predicted for all of it."""
    assert summarize(study_of(finished(attributes("launch", (60, 9), (60, 2)), state=TrialState.PRUNED))).first_error is None


def test_pruning_limit_is_the_most_exceeded() -> None:
    study = study_of(finished(attributes("prune", (150, 30)), state=TrialState.PRUNED))  # 1.5 and 3 times
    assert summarize(study).pruned_for == {"time": 1}


def test_skipped_trials_table_has_need_limit_saving(study: optuna.Study) -> None:
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in printed(skipped_table(study)).splitlines() if "│" in line
    ]
    assert lines == [
        ["4", "peak memory", "400 MiB (200 MiB to 800 MiB)", "100 MiB", "-"],
        ["5", "trial time", "12.5 s (6.25 s to 25.0 s)", "10.0 s", "12.5 s"],
        ["all", "", "", "", "12.5 s"],
    ]


def test_skipped_trial_without_limit_shows_reason() -> None:
    attributes = {"perfguard:verdict": "prune", "perfguard:reason": "nothing [fits]"}
    text = printed(skipped_table(study_of(finished(attributes, state=TrialState.PRUNED))))
    assert [cell.strip() for cell in text.splitlines()[-4].split("│")[1:-1]] == ["0", "-", "nothing [fits]", "-", "-"]


def test_skipped_trials_table_is_cut_but_counted() -> None:
    pruned = [finished(attributes("prune", (40, 30)), state=TrialState.PRUNED) for _ in range(9)]
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed(skipped_table(study_of(*pruned), max_rows=2)).splitlines()
    ]
    assert [line[0] for line in lines if line] == ["…", "7", "8", "all"]
    assert lines[-2][-1] == "4.50 min"


def test_nothing_skipped_is_an_empty_table() -> None:
    assert "0 trials pruned before launch" in printed(skipped_table(optuna.create_study()))


def printed(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_record_is_what_was_written() -> None:
    assert record_of(finished(attributes("launch", (60, 4), (50, 5)))) == TrialRecord(
        number=-1,
        verdict="launch",
        reason="because",
        predicted={"memory": 60 * MIB, "time": 4},
        intervals={"memory": (30 * MIB, 120 * MIB), "time": (2, 8)},
        limits={"memory": 100 * MIB, "time": 10},
        measured={"memory": 50 * MIB, "time": 5},
        status="ok",
        capacity_bytes=200 * MIB,
    )
    assert record_of(finished({})) == TrialRecord(-1, None, "", {}, {}, {}, {}, None)


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (0, "    0  launched    60.0 MiB → 50.0 MiB     4.00 s → 5.00 s    0.5"),
        (2, "    2  launched    90.0 MiB → 120 MiB      2.00 s → 2.00 s    0.5  over"),
        (3, "    3  launched    50.0 MiB → 40.0 MiB     3.00 s → 1.00 s      over"),
        (4, "    4  pruned       400 MiB → -            30.0 s → -"),
        (6, "    6  unguarded          - → -                 - → 7.00 s    0.5"),
        (7, "    7  unguarded          - → -                 - → -         0.5"),
    ],
)
def test_a_line_for_each_trial(study: optuna.Study, number: int, line: str) -> None:
    console = Console(file=io.StringIO(), width=160)
    TrialPrinter(console)(study, study.trials[number])
    assert isinstance(console.file, io.StringIO)
    heading, shown = console.file.getvalue().splitlines()
    assert heading.split() == ["trial", "verdict", "memory", "(pred", "→", "meas)", "time", "(pred", "→", "meas)", "value"]
    assert shown.rstrip() == line
    assert len(shown) <= 80


def test_the_line_of_a_repaired_trial_says_so() -> None:
    study = study_of(finished(attributes("repair", (60, 4), (50, 5))))
    console = Console(file=io.StringIO(), width=160)
    TrialPrinter(console)(study, study.trials[0])
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[1].split()[:2] == ["0", "repaired"]


def test_the_printer_copes_with_two_objectives() -> None:
    study = optuna.create_study(directions=["minimize", "minimize"])
    study.add_trial(create_trial(values=[1.0, 2.0], user_attrs=attributes("launch", (60, 4), (50, 5))))
    console = Console(file=io.StringIO(), width=160)
    TrialPrinter(console)(study, study.trials[0])
    assert isinstance(console.file, io.StringIO)
    assert "launched" in console.file.getvalue()
