"""The account of a study, its lines and its picture, from trials made by hand."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial
from rich.console import Console

from perfguard_optuna import TrialPrinter, TrialRecord, record_of, summarize
from perfguard_optuna.visualization import plot_predictions

MIB = 2**20
UNPREDICTED = {"perfguard:verdict": "launch", "perfguard:reason": "not judged: BuildError: ..."}


def attributes(
    verdict: str, predicted: tuple[float, float], measured: tuple[float, float] | None = None, status: str = "ok"
) -> dict[str, Any]:
    """What the pruner writes, for ``(memory, time)`` in MiB and seconds, under a budget of 100 MiB and 10 s."""
    result: dict[str, Any] = {"perfguard:schema": 1, "perfguard:verdict": verdict, "perfguard:reason": "because"}
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
    assert asdict(summarize(study)) == pytest.approx(
        {
            "num_launched": 6,
            "num_pruned": 2,
            "num_unjudged": 2,
            "num_violations": 2,
            "launched_s": 5 + 10 + 2 + 1 + 7,
            "saved_s": 30 + 12.5,
            "first_error": mean_error,
            "last_error": mean_error,
        }
    )


def test_the_first_five_and_the_last_ten_errors_are_told_apart() -> None:
    rough = [finished(attributes("launch", (150, 1.5), (100, 1))) for _ in range(5)]
    fair = [finished(attributes("launch", (110, 1.1), (100, 1))) for _ in range(10)]
    summary = summarize(study_of(*rough, *fair))
    assert summary.first_error == pytest.approx(0.5)
    assert summary.last_error == pytest.approx(0.1)


def test_a_study_that_nobody_guarded_has_nothing_to_compare() -> None:
    summary = summarize(study_of(finished({}), finished({}, state=TrialState.FAIL)))
    assert (summary.num_launched, summary.num_unjudged, summary.first_error, summary.last_error) == (2, 2, None, None)


def test_trials_that_are_not_finished_do_not_count() -> None:
    study = study_of(finished({}))
    study.ask()
    assert summarize(study).num_launched == 1


def test_the_table_says_it_in_words(study: optuna.Study) -> None:
    text = printed(summarize(study).table())
    for label, value in (
        ("trials launched", "6"),
        ("trials pruned before launch", "2"),
        ("launched without a verdict", "2"),
        ("budget violations among the launched", "2"),
        ("time of the launched trials", "25.0 s"),
        ("compute time saved (predicted)", "42.5 s"),
        ("prediction error, first 5 trials", "14.2%"),
        ("prediction error, last 10 trials", "14.2%"),
    ):
        (line,) = [line for line in text.splitlines() if label in line]
        assert value in line


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
    )
    assert record_of(finished({})) == TrialRecord(-1, None, "", {}, {}, {}, {}, None)


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (0, "    0  launched    60.0 MiB → 50.0 MiB     4.00 s → 5.00 s    0.5"),
        (2, "    2  launched    90.0 MiB → 120 MiB      2.00 s → 2.00 s    0.5  over"),
        (3, "    3  launched    50.0 MiB → 40.0 MiB     3.00 s → 1.00 s      over"),
        (4, "    4  pruned       400 MiB → -            30.0 s → -"),
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


def test_the_printer_copes_with_two_objectives() -> None:
    study = optuna.create_study(directions=["minimize", "minimize"])
    study.add_trial(create_trial(values=[1.0, 2.0], user_attrs=attributes("launch", (60, 4), (50, 5))))
    console = Console(file=io.StringIO(), width=160)
    TrialPrinter(console)(study, study.trials[0])
    assert isinstance(console.file, io.StringIO)
    assert "launched" in console.file.getvalue()


def test_the_picture_has_an_axes_for_each_quantity(study: optuna.Study) -> None:
    pytest.importorskip("matplotlib")
    figure = plot_predictions(study)
    assert len(figure.axes) == 2
    assert [axes.get_xlabel() for axes in figure.axes] == ["measured peak memory (MiB)", "measured trial time (s)"]
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert set(labels) == {"launched (4)", "pruned before launch (2)", "budget"}
    figure.savefig(io.BytesIO())


@pytest.mark.parametrize("user_attrs", [{}, UNPREDICTED])
def test_the_picture_of_nothing_says_so(user_attrs: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    figure = plot_predictions(study_of(finished(user_attrs)))
    assert [axes.get_title() for axes in figure.axes] == ["nothing was predicted"] * 2
    figure.savefig(io.BytesIO())


def test_the_picture_of_a_study_without_trials_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    assert len(plot_predictions(optuna.create_study(), quantities=("memory", "time", "step_time")).axes) == 3
