"""What ran twice alike is written down again without running."""

from __future__ import annotations

from typing import Any

import pytest

from perfguard.graph.op import Life, Op, Phase, StorageKind
from perfguard.graph.repetition import Place, Repetition, are_alike


def op(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], **other: Any) -> Op:
    values: dict[str, Any] = {"kind": "matmul", "phase": Phase.FORWARD, "flops": 1, "bytes_read": 4, "bytes_written": 4}
    values |= {"module": "", "shape": (2,), "dtype": "float32", "attributes": {}}
    return Op(name=name, inputs=inputs, outputs=outputs, **(values | other))


def life(num_bytes: int, birth: int, death: int | None) -> Life:
    return Life(num_bytes, None, birth, death, "", Phase.FORWARD)


def recording() -> tuple[list[Op], list[Life]]:
    """A weight, and two parts. Each reads what the one before has left, and keeps a number for good."""
    ops = [op("mm", (0, 1), (2,)), op("sum", (2,), (3, 4)), op("mm", (0, 3), (5,)), op("sum", (5,), (6, 7))]
    lives = [
        life(100, -1, None),  # the weight
        life(8, -1, 0),
        life(64, 0, 1),
        life(8, 1, 2),  # is read by the next part
        life(4, 1, None),  # is kept
        life(64, 2, 3),
        life(8, 3, None),  # will be
        life(4, 3, None),
    ]
    return ops, lives


START, MIDDLE, END = Place(0, 2), Place(2, 5), Place(4, 8)


def test_a_copy_reads_what_the_copy_before_has_left() -> None:
    ops, lives = recording()
    repetition = Repetition(ops, lives, START, MIDDLE, END)
    repetition.append()
    repetition.append()
    assert [each.inputs for each in ops[4:]] == [(0, 6), (8,), (0, 9), (11,)]
    assert [each.outputs for each in ops[4:]] == [(8,), (9, 10), (11,), (12, 13)]


def test_storages_of_a_copy_die_as_those_of_the_model_did_and_what_lasts_has_no_bytes() -> None:
    ops, lives = recording()
    repetition = Repetition(ops, lives, START, MIDDLE, END)
    deaths = repetition.append()
    assert deaths == {5: 3, 6: 4, 8: 5, 9: 6}
    assert [(each.num_bytes, each.birth) for each in lives[8:]] == [(64, 4), (8, 5), (0, 5)]


def test_what_is_there_at_the_end_takes_the_place_of_what_the_copy_has_left() -> None:
    ops, lives = recording()
    repetition = Repetition(ops, lives, START, MIDDLE, END)
    repetition.append()
    lives.append(life(8, 6, None))
    repetition.end({9: 11})
    assert lives[11].birth == 5
    assert ops[-1].outputs == (11, 10)
    assert lives[9].death is not None
    assert lives[9].death < lives[9].birth


@pytest.mark.parametrize(
    ("at", "changed"),
    [
        (2, {"name": "bmm"}), (2, {"shape": (3,)}), (2, {"phase": Phase.BACKWARD}), (2, {"inputs": (0, 0)}),
        (3, {"outputs": (6,)}), (3, {"inputs": (2,)}),
    ],
)  # fmt: skip
def test_parts_with_other_operators_or_other_storages_are_not_alike(at: int, changed: dict[str, Any]) -> None:
    ops, lives = recording()
    assert are_alike(ops, lives, START, MIDDLE, END)
    ops[at] = ops[at]._replace(**changed)
    assert not are_alike(ops, lives, START, MIDDLE, END)


def test_parts_whose_storages_have_other_bytes_are_not_alike() -> None:
    ops, lives = recording()
    lives[5] = lives[5]._replace(num_bytes=65)
    assert not are_alike(ops, lives, START, MIDDLE, END)


def test_parts_of_other_lengths_and_empty_parts_are_not_alike() -> None:
    ops, lives = recording()
    assert not are_alike(ops, lives, START, MIDDLE, Place(3, 8))
    assert not are_alike(ops, lives, START, START, START)


@pytest.mark.parametrize(("num_bytes", "may_be_read"), [(8, True), (12, False)])
def test_parts_may_read_batches_that_were_there_before(num_bytes: int, may_be_read: bool) -> None:
    lives = [life(8, -1, None), life(num_bytes, -1, None), life(4, 0, 0), life(4, 1, 1)]
    lives[:2] = [each._replace(kind=StorageKind.INPUT) for each in lives[:2]]
    ops = [op("neg", (0,), (2,)), op("neg", (1,), (3,))]
    assert are_alike(ops, lives, Place(0, 2), Place(1, 3), Place(2, 4)) is may_be_read
