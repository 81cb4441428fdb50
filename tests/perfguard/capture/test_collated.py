"""A batch that is told has the shape, the type and the layout of the one that a collate function makes."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from perfguard.capture.blanks import zeros_on_host
from perfguard.capture.collated import Batches, CannotTellError, Limits, told

NUMBER = 50
SMALL = Limits(most_bytes=1000, most_s=0.0)


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


class Made:
    """Makes tensors without data, and counts them."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, like: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return zeros_on_host(like.new_empty(like.untyped_storage().nbytes() // like.element_size())).as_strided(
            like.shape, like.stride()
        )


def form(value: Any) -> Any:
    """What of a batch must not change."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.stride()
    if isinstance(value, (dict, UserDict)):
        return type(value), {key: form(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not all(isinstance(item, str) for item in value):
        return type(value), [form(item) for item in value]
    return value


@pytest.mark.parametrize(
    "sample",
    [
        lambda at: (torch.full((3, 9, 8), float(at)), at),
        lambda at: {"x": np.full((20, 4), at), "y": {"z": float(at), "name": f"{at}"}},
        lambda at: Pair(torch.full((8, 9, 3), float(at)).permute(2, 0, 1), at),  # a batch of these is channels-last
        lambda at: [torch.full((3, 9, 8), at, dtype=torch.uint8)],
        lambda at: torch.full((300,), at, dtype=torch.float64),
    ],
)
def test_large_tensors_of_a_default_batch_have_no_data_and_all_else_is_as_it_is(sample: Callable[[int], Any]) -> None:
    samples = [sample(at) for at in range(NUMBER)]
    make = Made()
    found, expected = Batches(make, SMALL).make(default_collate, samples), default_collate(samples)
    assert form(found) == form(expected)
    assert make.number == 1
    if isinstance(expected, list) and len(expected) == 2:
        assert torch.equal(found[1], expected[1])
        assert not found[0].any()


def test_a_default_batch_of_samples_that_differ_fails_as_it_did() -> None:
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        Batches(Made(), SMALL).make(default_collate, [torch.zeros(300 + at) for at in range(NUMBER)])


def padded(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([*samples], batch_first=True)


def as_dict(samples: Sequence[torch.Tensor]) -> Any:
    return UserDict(images=torch.stack([*samples]), ids=torch.arange(len(samples)), scale=2.0, mask=torch.ones(3, 3))


def as_pairs(samples: Sequence[torch.Tensor]) -> Any:
    x = torch.stack([*samples]).flatten(1)
    return x @ x.T


def in_halves(samples: Sequence[torch.Tensor]) -> Any:
    return torch.stack([*samples[::2]]), torch.stack([*samples[1::2]])


def channels_last(samples: Sequence[torch.Tensor]) -> Any:
    return torch.stack([*samples]).to(memory_format=torch.channels_last), torch.stack([*samples], 1)


def lists(samples: Sequence[torch.Tensor]) -> Any:
    return [*samples]


def at_least_ten(samples: Sequence[torch.Tensor]) -> Any:
    if len(samples) < 10:
        raise ValueError("too few")
    return torch.stack([*samples])


@pytest.mark.parametrize(
    ("collate", "lengths", "is_told"),
    [
        (as_dict, (8,), True),
        (in_halves, (8,), True),
        (channels_last, (8,), True),
        (as_pairs, (8,), False),
        (lists, (8,), False),
        (at_least_ten, (8,), False),
        (lambda samples: padded([sample.permute(2, 0, 1).flatten(1) for sample in samples]), (8, 8, 9), False),
        (lambda samples: torch.stack([sample[..., :4] for sample in samples]), (8, 8, 9), True),  # cropped
    ],
)
def test_a_batch_of_a_function_of_the_users_is_told_from_two_small_ones(
    collate: Any, lengths: tuple[int, ...], is_told: bool
) -> None:
    samples = [torch.full((3, 8, lengths[at % len(lengths)]), float(at)) for at in range(NUMBER)]
    calls: list[int] = []

    def counting(given: Sequence[torch.Tensor]) -> Any:
        calls.append(len(given))
        return collate(given)

    batches = Batches(Made(), SMALL)
    expected = form(collate(samples))
    assert form(batches.make(counting, samples)) == expected
    assert (NUMBER not in calls) is is_told
    calls.clear()
    assert form(batches.make(counting, samples)) == expected
    assert calls == ([] if is_told else [NUMBER])


def test_small_parts_of_a_batch_that_is_told_have_values_of_samples() -> None:
    samples = [torch.full((3, 8, 8), float(at % 3)) for at in range(NUMBER)]
    found = Batches(Made(), SMALL).make(lambda given: (torch.stack([*given]), torch.stack([*given])[:, 0, 0, 0].long()), samples)
    assert set(found[1].tolist()) <= {0, 1, 2}
    assert found[1].any()


@pytest.mark.parametrize(("sample", "calls"), [("a text", [4, NUMBER, NUMBER]), (np.int64(3), [NUMBER, NUMBER])])
def test_a_quick_collate_function_gets_all_samples_and_few_only_if_they_may_be_much_work(sample: Any, calls: list[int]) -> None:
    called: list[int] = []

    def collate(given: Sequence[Any]) -> torch.Tensor:
        called.append(len(given))
        return torch.arange(len(given))

    batches = Batches(Made(), Limits(most_s=1e9))
    for _ in range(2):
        assert batches.make(collate, [sample] * NUMBER).tolist() == [*range(NUMBER)]
    assert called == calls


def test_random_numbers_are_those_of_a_batch_that_is_made_at_once() -> None:
    def collate(given: Sequence[Any]) -> torch.Tensor:
        return torch.rand(len(given), int(torch.randint(1, 100, ())))

    torch.manual_seed(0)
    texts = ["a"] * NUMBER
    expected = collate(texts)
    torch.manual_seed(0)
    assert torch.equal(Batches(Made(), Limits(most_s=1e9)).make(collate, texts), expected)


def test_what_grows_in_another_way_cannot_be_told() -> None:
    for one, other in (
        (torch.zeros(4, 4), torch.zeros(8, 8)),
        (torch.zeros(4), torch.zeros(8, 1)),
        (torch.zeros(5), torch.zeros(9)),
        (torch.zeros(4), torch.zeros(8, dtype=torch.long)),
        ([1], [2]),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1]),
        (torch.zeros(0), torch.zeros(0)),
    ):
        with pytest.raises(CannotTellError):
            told([(4, one), (8, other)], NUMBER, lambda like, *_: like)
