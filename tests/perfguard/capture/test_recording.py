"""By which parts of a recording a trial is judged, from lists of operators and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from perfguard.capture.recording import Events, Recording, Span, cut_step, dtype_of_most_arithmetic, num_later_steps, step_of
from perfguard.graph.op import Life, Op, Phase, StorageKind


def op(phase: Phase = Phase.FORWARD, *, module: str = "", flops: int = 0, dtype: str = "float32") -> Op:
    other: dict[str, Any] = {"kind": "matmul", "bytes_read": 0, "bytes_written": 0, "inputs": (), "outputs": ()}
    return Op(name="mm", phase=phase, flops=flops, module=module, shape=(), dtype=dtype, attributes={}, **other)


STEP = (op(module="0"), op(Phase.BACKWARD), op(Phase.OPTIMIZER))
"""A step of three operators."""


def recording(ops: Sequence[Op], steps: list[int], *, lives: Sequence[Life] = (), **other: Any) -> Recording:
    forwards = [(at, False) for at, each in enumerate(ops) if each.module == "0"]
    forwards += [(at, True) for at, each in enumerate(ops) if each.module == "evaluated"]
    return Recording([*ops], [*lives], {}, Events(steps=steps, forwards=sorted(forwards)), **other)


def life(num_bytes: int, birth: int, death: int) -> Life:
    return Life(num_bytes, None, birth, death, "", Phase.FORWARD)


def test_a_step_is_what_is_between_two_ends_and_knows_where_the_next_one_ends() -> None:
    assert step_of([3, 6, 9], 0) == Span(3, 6, 9)
    assert step_of([3, 6, 9], 1) == Span(6, 9, None)


@pytest.mark.parametrize(
    ("deaths", "expected"),
    [
        ([(3, 3)], [0]),  # `torch.cat([x.cuda(), y])` frees x at once
        ([(3, 4)], [1]),
        ([(3, 6)], [2]),  # a name holds it to the next step
        ([(3, 3), (4, 5)], [2]),  # the next micro-batch takes the place of the last
        ([(3, 4), (4, 5)], [2, 2]),  # which is fetched ahead
    ],
)
def test_a_batch_is_there_until_nothing_holds_it(deaths: list[tuple[int, int]], expected: list[int]) -> None:
    lives = [Life(8, StorageKind.INPUT, birth, death, "inputs", Phase.FORWARD) for birth, death in deaths]
    storages = cut_step(3 * STEP, lives, {}, 3, 6, 9)[1]
    assert [storage.death for storage in storages] == expected


def test_a_single_step_begins_with_its_forward_pass() -> None:
    assert recording((op(), *STEP), [4]).step(0) == Span(1, 4, None)


def test_the_second_step_is_judged_unless_it_has_an_evaluation_or_the_next_is_another() -> None:
    assert recording(4 * STEP, [3, 6, 9, 12]).usual_step(0) == 0
    evaluates = (*STEP, *STEP[:1], op(module="evaluated"), *STEP[1:], *STEP, *STEP)
    assert recording(evaluates, [3, 7, 10, 13]).usual_step(0) == 1
    assert recording((*STEP, *STEP, op(), *STEP, *STEP), [3, 6, 10, 13]).usual_step(0) == 0


def test_the_evaluation_is_between_the_last_step_of_the_first_epoch_and_the_second_epoch() -> None:
    ops = (*STEP, *STEP, op(module="evaluated"), op(module="evaluated"), *STEP)
    assert recording(ops, [3, 6, 11], first_ended_at=8).evaluation == Span(6, 8)
    assert recording(2 * STEP, [3, 6]).evaluation is None


def test_later_steps_are_those_that_end_after_the_first_epoch() -> None:
    assert num_later_steps([3, 6, 9, 12], 6) == 2
    assert num_later_steps([3, 6], None) == 0


@pytest.mark.parametrize(
    ("at", "found"),
    [
        (1, ("the first step", "train", Span(0, 3))),
        (7, ("a later step", "train", Span(6, 9))),
        (9, ("work between two steps, such as a checkpoint", "infer", Span(9, 10))),
    ],
)
def test_where_more_is_alive_than_in_what_is_judged_has_a_name(at: int, found: tuple[str, str, Span]) -> None:
    ops = (*STEP, *STEP, *STEP, op())
    lives = [life(100, 4, 4), life(200, at, at)]
    assert recording(ops, [3, 6, 9], lives=lives).largest_beside([Span(3, 6)]) == found


def test_an_evaluation_beside_ends_where_training_goes_on() -> None:
    ops = (*STEP, *STEP, op(module="evaluated"), *STEP)
    found = recording(ops, [3, 6, 10], lives=[life(100, 4, 4), life(200, 6, 6)]).largest_beside([Span(3, 6)])
    assert found == ("an evaluation", "infer", Span(6, 7))


def test_nothing_is_beside_where_hardly_more_is_alive_or_before_the_first_forward_pass() -> None:
    lives = [life(1000, 4, 4), life(1005, 7, 7)]
    assert recording(3 * STEP, [3, 6, 9], lives=lives).largest_beside([Span(3, 6)]) is None
    before = [life(100, 5, 5), life(10**6, 0, 0)]
    assert recording((op(), *STEP, *STEP), [4, 7], lives=before).largest_beside([Span(4, 7)]) is None


def test_steps_after_the_first_five_count_only_where_garbage_was_collected() -> None:
    lives = [life(100, 4, 4), life(200, 22, 22)]
    seen = recording(8 * STEP, [*range(3, 25, 3)], lives=lives)
    assert seen.largest_beside([Span(3, 6)]) is None
    seen.events.clean.append(21)
    assert seen.largest_beside([Span(3, 6)]) == ("a later step", "train", Span(21, 24))


def test_the_dtype_is_that_of_most_arithmetic() -> None:
    assert dtype_of_most_arithmetic([op(flops=5), op(flops=9, dtype="bfloat16"), op(flops=3)]) == "bfloat16"
    assert dtype_of_most_arithmetic([]) == ""
