"""The optimizer's part from a pattern is the part that a trace has."""

from __future__ import annotations

import functools
from typing import Any, Literal

import pytest
import torch
from torch import nn

from perfguard.graph._optimizer_part import trace_part
from perfguard.graph._optimizer_pattern import find_pattern, has_pattern
from perfguard.graph._target import target_of
from perfguard.graph._trace import traced_step, tracing
from perfguard.workload import Layout, Precision, Workload

optim = torch.optim
ELEMENTWISE = [
    optim.SGD,
    functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    functools.partial(optim.SGD, momentum=0.9, fused=True),
    optim.Adam,
    functools.partial(optim.Adam, foreach=False, amsgrad=True),
    functools.partial(optim.Adam, fused=True),
    optim.AdamW,
    functools.partial(optim.AdamW, foreach=False),
    functools.partial(optim.AdamW, foreach=True),
    optim.RMSprop,
    functools.partial(optim.RMSprop, foreach=True, momentum=0.9, centered=True),
    optim.Adagrad,
    optim.NAdam,
    optim.RAdam,
    optim.Adadelta,
    optim.Adamax,
]


CASES: tuple[tuple[Precision, Layout, torch.dtype], ...] = (("fp32", "nchw", torch.float32), ("bf16", "nhwc", torch.bfloat16))


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5), nn.Linear(5, 1))
    next(model[1].parameters()).requires_grad_(False)
    return model


def workload(optimizer: Any, model: nn.Module, *, precision: Precision = "fp32", layout: Layout = "nchw") -> Workload:
    return Workload(model, (2, 3, 4, 4), loss=lambda out: out.sum(), optimizer=optimizer, precision=precision, layout=layout)


def name(optimizer: Any) -> str:
    kind = getattr(optimizer, "func", optimizer)
    return f"{kind.__name__} {' '.join(getattr(optimizer, 'keywords', {}))}"


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=name)
def test_the_pattern_of_two_parameters_holds_for_all(optimizer: Any, target: Literal["cuda", "cpu"]) -> None:
    kind = target_of(target)
    for precision, layout, dtype in CASES:
        asked = workload(optimizer, network(), precision=precision, layout=layout)
        step = traced_step(asked, kind, leaves_gap=True)
        assert step is not None
        assert step.gap is not None
        assert has_pattern(asked, step.gap.parameters)
        with tracing(kind):
            pattern = find_pattern(asked, kind, dtype)
            assert pattern is not None
            assert pattern.for_parameters(step.gap.parameters) == trace_part(asked, kind, step.gap.parameters)


@pytest.mark.parametrize("optimizer", [optim.ASGD, optim.Adafactor], ids=name)
def test_an_optimizer_that_does_not_treat_all_elements_alike_is_traced(optimizer: Any) -> None:
    asked = workload(optimizer, network())
    step = traced_step(asked, target_of("cuda"), leaves_gap=True)
    assert step is not None
    assert step.gap is not None
    assert not has_pattern(asked, step.gap.parameters)


def test_what_is_not_elementwise_does_not_pass_the_check() -> None:
    with tracing(target_of("cuda")):
        assert find_pattern(workload(optim.ASGD, network()), target_of("cuda"), torch.float32) is None


class Scaled(nn.Linear):
    """With a parameter that is a number."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Doubled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double()).float()


class Unreached(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("part", [Scaled(), Doubled(), Unreached(5, 5)], ids=lambda part: type(part).__name__)
def test_parameters_that_differ_in_more_than_their_shape_have_no_pattern(part: nn.Module) -> None:
    model = network()
    model.insert(5, part)
    asked = workload(optim.Adam, model)
    step = traced_step(asked, target_of("cuda"), leaves_gap=True)
    assert step is not None
    assert step.gap is not None
    assert not has_pattern(asked, step.gap.parameters)
