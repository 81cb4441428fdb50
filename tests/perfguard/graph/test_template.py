"""Polynomials through traces: used where they are exact, and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfguard.graph import TraceCache, trace
from perfguard.graph._template import Sample, Template, templates_through
from perfguard.workload import Workload


class Says(nn.Module):
    """A network that is a function of its input."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def asked(model: nn.Module, *shape: int) -> Workload:
    return Workload(model, shape, mode="infer")


def templates(model: nn.Module, shapes: Sequence[tuple[int, ...]]) -> list[Template]:
    return templates_through({shape: Sample(trace(asked(model, *shape))) for shape in shapes})


def rows(x: torch.Tensor) -> torch.Tensor:
    return x @ x.transpose(1, 2)  # batch · size²


def cubes(x: torch.Tensor) -> torch.Tensor:
    line = x[:, :, 0]
    return line[:, :, None, None] + line[:, None, :, None] + line[:, None, None, :]  # batch · size³


GRID = [(8, 16, 4), (24, 64, 4), (16, 32, 4), (12, 48, 4), (20, 16, 4), (8, 64, 4), (24, 32, 4), (16, 48, 4), (20, 64, 4)]


@pytest.mark.parametrize("function", [rows, torch.relu, lambda x: F.pad(x, (0, 0, 3, 4)).square().sum(1)])
def test_a_batch_and_a_size_come_from_few_traces(function: Any) -> None:
    model = Says(function)
    template = next(iter(templates(model, GRID[:6])))
    for shape in itertools.product((8, 12, 16, 20, 24), (16, 32, 48, 64), (4,)):
        if template.reaches(shape):
            graph = template.at(shape)
            assert graph is not None
            assert graph.to_bytes() == trace(asked(model, *shape)).to_bytes()
    assert template.reaches((16, 48, 4))


def test_template_computes_no_cubic_growth() -> None:
    assert not any(template.reaches((16, 48, 4)) for template in templates(Says(cubes), GRID))


def test_two_sizes_say_nothing_of_a_third() -> None:
    """Through two values anything is a line."""
    shapes = [(8, 16, 4), (16, 16, 4), (24, 16, 4), (8, 64, 4), (16, 64, 4), (24, 64, 4)]
    found = templates(Says(rows), shapes)
    assert not any(template.reaches((16, 32, 4)) for template in found)
    shapes += [(8, 40, 4)]  # a third is enough for the batch times a square, a fourth would be for all of them
    assert any(template.reaches((12, 64, 4)) for template in templates(Says(rows), [*shapes, (12, 16, 4)]))


def branching(x: torch.Tensor) -> torch.Tensor:
    return x.relu() if x.shape[1] < 40 else x.tanh()


def test_nothing_is_computed_across_a_branch() -> None:
    small = [(batch, size, 4) for batch in (8, 16) for size in (8, 16, 32)]
    found = templates(Says(branching), [*small, (8, 48, 4), (16, 64, 4)])
    assert any(template.reaches((16, 24, 4)) for template in found)
    assert not any(template.reaches((16, size, 4)) for template in found for size in (40, 56))


def test_nothing_is_computed_around_a_branch() -> None:
    def alternating(x: torch.Tensor) -> torch.Tensor:
        return x.relu() if x.shape[0] % 12 else x.tanh()

    assert templates(Says(alternating), [(8, 4), (16, 4), (32, 4)])
    assert not templates(Says(alternating), [(8, 4), (16, 4), (32, 4), (24, 4)])


def test_branch_below_all_sizes_does_not_matter() -> None:
    model = Says(lambda x: x.relu() if x.shape[0] == 1 else x.tanh())
    assert any(template.reaches((24, 4)) for template in templates(model, [(1, 4), (8, 4), (16, 4), (32, 4)]))


@pytest.mark.parametrize("period", [16, 24, 32])
def test_rounding_is_seen(period: int) -> None:
    cache, model = TraceCache(), Says(lambda x: F.pad(x, (0, 0, 0, -x.shape[1] % period)).relu())
    for shape in [*GRID, (12, 32, 4), (16, 40, 4), (16, 56, 4), (20, 36, 4), (20, 52, 4), (16, 24, 4), (12, 60, 4)]:
        assert cache.trace(asked(model, *shape)).content_hash == trace(asked(model, *shape)).content_hash


def test_height_and_width_apart_are_traced() -> None:
    cache, model = TraceCache(), nn.Conv2d(3, 4, 3)
    for height, width in itertools.product((16, 32, 48), (16, 32, 48)):
        for batch in (4, 8, 12):
            workload = asked(model, batch, 3, height, width)
            assert cache.trace(workload).content_hash == trace(workload).content_hash


def test_large_numbers_stay_exact() -> None:
    model = Says(rows)
    shapes = [(2**18 * batch, 2**16 * size, 4) for batch, size in ((1, 1), (3, 5), (2, 2), (4, 3), (2, 5), (4, 5))]
    template = next(iter(templates(model, shapes)))
    shape = (2**18 * 3, 2**16 * 3, 4)
    graph = template.at(shape)
    assert graph is not None
    assert graph.to_bytes() == trace(asked(model, *shape)).to_bytes()
