"""What is remembered of dry runs has a bound, and whatever is forgotten is judged again, correctly."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from perfguard.capture import Answer, DryRuns, SelfEnded
from perfguard.capture.remembered import Remembered
from perfguard.devices import resolve_device
from perfguard.exceptions import CaptureError, TooLargeError
from perfguard.graph import OpGraph, trace
from perfguard.workload import CapturedTrial, Workload
from tests.perfguard.graph.parts import total


@cache
def step() -> OpGraph:
    return trace(Workload(nn.Linear(8, 8), inputs=(4, 8), loss=total, optimizer=torch.optim.SGD))


def captured(width: int) -> CapturedTrial:
    """A trial of another structure for each width."""
    first, *others = step().storages
    return CapturedTrial(replace(step(), storages=(first._replace(num_bytes=width), *others)), steps=width)


class FakeDryRuns(DryRuns):
    """Dry runs without a process. They ask for "kind", "width" and "rate", and a trial is known by its width."""

    def __init__(self, *, fails: Callable[[int], Exception | None] = lambda width: None) -> None:
        super().__init__(lambda ask: None, resolve_device("a100"))
        self.fails = fails
        self.num_run = 0

    def _run(self, answer: Callable[..., Answer], answers: dict[str, Answer], *, spares: bool) -> CapturedTrial | Exception:
        for name in ("width", "rate"):
            self._remembered.note_question(answers, (name,))
            answers[name] = answer(name)
            known = self._remembered.of(answers)
            if known is not None:
                return known
        self.num_run += 1
        width = answers["width"].value
        return self.fails(width) or captured(width)


def answering(width: int, rate: float = 0.1) -> Callable[[str], Answer]:
    values: dict[str, Any] = {"width": width, "rate": rate}
    return lambda name: Answer(name, values[name], 0.3 if name == "rate" else None)


def num_captured() -> int:
    gc.collect()
    return sum(isinstance(one, CapturedTrial) for one in gc.get_objects())


@pytest.mark.parametrize("known_before", [False, True])
def test_hundreds_of_structures_keep_a_bounded_number_of_trials(known_before: bool) -> None:
    # Each captured trial stayed for ever: 1.9 MiB for a perceptron of 500 operators, gigabytes for language models.
    runs, before = FakeDryRuns(), num_captured()

    def ask(width: int, rate: float = 0.1) -> CapturedTrial:
        return runs.capture(answering(width, rate), {"width": width, "rate": rate} if known_before else None)

    for width in range(1, 501):
        assert ask(width).steps == width
    assert num_captured() - before <= 128
    assert runs.num_run == 501, "and one more, with another rate"
    # The latest are remembered, for any rate.
    assert [ask(width, rate=0.2).steps for width in (500, 450, 400)] == [500, 450, 400]
    assert runs.num_run == 501
    # One of long ago is dry-run again, and correct.
    assert ask(1).steps == 1
    assert runs.num_run == 502
    assert ask(1, rate=0.7).steps == 1
    assert runs.num_run == 502
    assert num_captured() - before <= 128


def test_a_trial_that_is_proposed_again_and_again_is_never_forgotten() -> None:
    runs = FakeDryRuns()
    for width in range(1, 401):
        runs.capture(answering(width))
        runs.capture(answering(1))
    assert runs.num_run == 401


def test_large_graphs_are_fewer() -> None:
    # A bound on their number alone would be 128 graphs of a language model, which is gigabytes.
    remembered = Remembered(most_operators=10 * len(step().ops))
    for width in range(1, 101):
        answers = {"width": Answer("width", width)}
        remembered.note(answers, captured(width))
    known = [width for width in range(1, 101) if remembered.of({"width": Answer("width", width)}) is not None]
    assert known == list(range(91, 101))


def test_questions_have_a_bound_and_a_forgotten_one_is_asked_by_a_dry_run() -> None:
    remembered = Remembered(most_questions=10)
    for width in range(100):
        remembered.note_question({"width": Answer("width", width)}, ("rate",))
    remembered.note_question({}, ("width",))
    asked: list[str] = []

    def answer(width: int) -> Callable[[str], Answer]:
        def of(name: str) -> Answer:
            asked.append(name)
            return Answer(name, width)

        return of

    assert remembered.foresee(answer(99), {}) is None
    assert remembered.foresee(answer(5), {}) is None
    assert asked == ["width", "rate", "width"]


def test_giving_up_is_a_state_that_is_never_forgotten() -> None:
    # It was an entry under the empty key, which a bound could have removed.
    runs = FakeDryRuns(fails=lambda width: CaptureError(f"width {width}"))
    for width in range(1, 301):
        with pytest.raises(CaptureError, match=f"width {min(width, 3)}$"):
            runs.capture(answering(width))
    assert runs.num_run == 3


def test_a_failure_that_is_known_does_not_count_again() -> None:
    # One configuration that fails, proposed three times, says nothing of the others.
    runs = FakeDryRuns(fails=lambda width: CaptureError("a bug of this width") if width == 7 else None)
    for _ in range(5):
        with pytest.raises(CaptureError, match="a bug of this width"):
            runs.capture(answering(7))
        runs._remembered._questions.pop(())  # so a process has to ask
    assert runs.capture(answering(8)).steps == 8


@pytest.mark.parametrize("error", [SelfEnded("no such width"), TooLargeError("too large", 2**70)])
def test_a_trial_that_ends_itself_or_is_too_large_is_no_failure(error: Exception) -> None:
    runs = FakeDryRuns(fails=lambda width: error if width < 100 else None)
    for width in range(1, 100):
        with pytest.raises(type(error)):
            runs.capture(answering(width))
    assert runs.capture(answering(100)).steps == 100


def test_a_remembered_error_does_not_grow() -> None:
    # An error that is raised once more has the frames of all raises before in its traceback, with what they hold.
    runs = FakeDryRuns(fails=lambda width: TooLargeError("too large", 2**70))
    lengths = []
    for _ in range(20):
        with pytest.raises(TooLargeError, match="too large") as caught:
            runs.capture(answering(8))
        assert caught.value.num_bytes == 2**70
        lengths.append(len(traceback.extract_tb(caught.tb)))
    assert len(set(lengths)) == 1
    assert runs.num_run == 1


def test_conditional_spaces_without_number_stay_bounded() -> None:
    remembered = Remembered()
    for number in range(1000):
        answers = {f"units_{number}": Answer(f"units_{number}", 8)}
        remembered.note_space(answers, by_value=False)
        remembered.note(answers, captured(number + 1))
    assert len(remembered._spaces) == 128
    found = remembered.of_params({"units_999": 8})
    assert isinstance(found, CapturedTrial)
    assert found.steps == 1000


@pytest.mark.parametrize("decides", [False, True])
def test_number_of_a_trial_is_part_of_what_is_remembered_only_if_it_decides(decides: bool) -> None:
    """A trial has a number of its own, so one in a file name would cost each trial a dry run."""

    def asked(number: int) -> dict[str, Answer]:
        return {"number": Answer("number", number, number + 720_721, is_fact=True), "width": Answer("width", 8)}

    remembered, first = Remembered(), asked(0)
    remembered.note_space(first, by_value=decides)
    remembered.note(first, captured(8))
    assert remembered.of(first) is not None
    assert (remembered.of(asked(7)) is None) is decides
    assert (remembered.of({"width": Answer("width", 8)}) is None) is decides
    assert remembered.of({"width": Answer("width", 9)}) is None
