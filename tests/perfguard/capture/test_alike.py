"""A captured trial stands in for one whose numbers are near, and for no other."""

from __future__ import annotations

import math
from typing import Any

import pytest

from perfguard.capture import Answer
from perfguard.capture.alike import Alike, ratio_of
from perfguard.verdict import ALIKE
from tests.perfguard.capture.test_remembered import FakeDryRuns, answering, captured


def answers(**values: Any) -> dict[str, Answer]:
    return {name: Answer(name, value, 0.3 if name == "rate" else None) for name, value in values.items()}


def alike_of(*trials: dict[str, Any], by_value: bool = False) -> Alike:
    alike = Alike()
    for values in trials:
        alike.note(answers(**values), captured(values["width"]), by_value=by_value)
    return alike


@pytest.mark.parametrize(
    ("one", "other", "ratio"),
    [
        (100, 120, 1.2),
        (0.2, 0.1, 2.0),
        ("adam", "adam", 1.0),
        ("adam", "sgd", math.inf),
        (0, 0, 1.0),
        (0, 1, math.inf),
        (-1, -1.5, math.inf),
        (True, 1, math.inf),
        (None, 3, math.inf),
    ],
)
def test_ratio_is_one_of_positive_numbers(one: Any, other: Any, ratio: float) -> None:
    assert ratio_of(one, other) == pytest.approx(ratio)


def test_nearest_trial_stands_in() -> None:
    alike = alike_of({"kind": "a", "width": 100, "rate": 0.1}, {"kind": "a", "width": 130, "rate": 0.1})
    found = alike.nearest({"kind": "a", "width": 115, "rate": 9.0})
    assert found is not None
    assert found.source == ALIKE
    assert found.steps == 130, "the rate changes nothing, and 130 is nearer by ratio"
    assert alike.nearest({"kind": "a", "width": 160, "rate": 0.1}) is None, "more than a fifth away"
    assert alike.nearest({"kind": "b", "width": 100, "rate": 0.1}) is None, "of another kind"
    assert alike.nearest({"width": 100}) is None, "nobody knows its kind"


def test_rate_that_changes_the_step_counts() -> None:
    alike = alike_of({"width": 100, "rate": 0.1}, by_value=True)
    assert alike.nearest({"width": 100, "rate": 0.11}) is not None
    assert alike.nearest({"width": 100, "rate": 0.2}) is None


def test_trial_whose_number_may_change_its_step_stands_in_for_none() -> None:
    alike = Alike()
    number = {"perfguard:number": Answer("perfguard:number", 10, 99, is_fact=True)}
    alike.note(number | answers(width=8), captured(8), by_value=True)
    assert alike.nearest({"perfguard:number": 11, "width": 8}) is None
    alike.note(number | answers(width=8), captured(8), by_value=False)
    assert alike.nearest({"width": 8}) is not None


def asked(alike: Alike, *names: str) -> None:
    """A dry run that asks for these parameters."""
    given: dict[str, Answer] = {}
    for name in names:
        alike.note_question(given, (name,))
        given |= answers(**{name: 8})
    alike.note(given, captured(8), by_value=False)


def test_questions_are_foreseen_if_no_value_has_decided_them() -> None:
    alike = Alike()
    given: dict[str, Answer] = {}
    assert not alike.foresee(answering(8), given), "nothing is known yet"
    asked(alike, "width", "rate")
    assert alike.foresee(answering(9), given)
    assert given["width"].value == 9
    asked(alike, "width", "depth")
    assert not alike.foresee(answering(9), {}), "one value asks for a rate, another one for a depth"
    assert alike.nearest({"width": 8, "rate": 8, "depth": 8}) is None


@pytest.mark.parametrize("order", [(("width",), ("width", "rate")), (("width", "rate"), ("width",))])
def test_trial_that_asks_for_more_is_not_foreseen(order: tuple[tuple[str, ...], ...]) -> None:
    alike = Alike()
    for names in order:
        asked(alike, *names)
    assert not alike.foresee(answering(9), {})


def test_dry_run_is_made_unless_a_trial_alike_may_stand_in() -> None:
    runs = FakeDryRuns()
    runs.capture(answering(100))
    runs.capture(answering(300))
    before = runs.num_run
    assert runs.capture(answering(301)).source == "captured"
    assert runs.num_run == before + 1, "the guard wants each trial dry-run"
    runs.may_stand_in = lambda captured: captured.steps == 100
    found = runs.capture(answering(101))
    assert (found.source, found.steps, runs.num_run) == (ALIKE, 100, before + 1)
    assert runs.capture(answering(101), {"width": 101, "rate": 0.1}).source == ALIKE, "its tuner asks once more"
    assert runs.capture(answering(303)).source == "captured", "its limits have no room"
    assert runs.num_run == before + 2
    runs.may_stand_in = None
    assert runs.capture(answering(101)).source == "captured", "nothing of it was remembered"
