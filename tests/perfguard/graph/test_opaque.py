"""perfguard.opaque: a way in for what cannot be traced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from perfguard import opaque
from perfguard.exceptions import TraceError
from perfguard.graph import Phase, trace
from perfguard.workload import Workload


class Selects(nn.Module):
    def __init__(self, example: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.select = opaque(lambda x: x[x.sum(1) > 0], example_outputs=example)

    def forward(self, x: torch.Tensor) -> Any:
        return self.select(self.linear(x))  # type: ignore[no-untyped-call]


def test_on_real_tensors_the_function_runs_as_it_is() -> None:
    rows = torch.cat([torch.ones(2, 8), -torch.ones(3, 8)])
    assert len(opaque(lambda x: x[x.sum(1) > 0], example_outputs=lambda x: x[:1])(rows)) == 2


def test_opaque_in_trace_has_outputs_and_gradients() -> None:
    graph = trace(Workload(Selects(lambda x: x.new_empty(100, 8)), (32, 8), loss=lambda output: output.sum()))
    one, two = [op for op in graph.ops if op.name == "opaque"]
    assert (one.phase, two.phase) == (Phase.FORWARD, Phase.BACKWARD)
    assert one.bytes_written == 4 * 100 * 8
    assert one.module == "" or one.module == "select"
    assert any(op.name == "mm" and op.phase is Phase.BACKWARD for op in graph.ops)
    assert any("opaque" in text for text in graph.unmodelled)


def test_example_outputs_must_be_tensors() -> None:
    with pytest.raises(TraceError, match=r"example_outputs of perfguard\.opaque must return a tensor"):
        trace(Workload(Selects(lambda x: 3), (32, 8), loss=lambda output: output.sum()))


@pytest.fixture
def extension() -> Iterator[Any]:
    """A custom operator with a kernel for the CPU and none for meta, as a CUDA extension would be."""
    library = torch.library.Library("perfguard_test_extension", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    yield torch.ops.perfguard_test_extension.twice
    library._destroy()


class Extended(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(8, 8), call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.linear(x))


def test_opaque_mends_extension_without_meta_kernel(extension: Any) -> None:
    """Without opaque, the error names the extension."""
    with pytest.raises(TraceError, match=r"test_opaque\.py:\d+.*no kernel for the meta device.*perfguard\.opaque"):
        trace(Workload(Extended(extension), (4, 8), loss=lambda output: output.sum()))
    mended = opaque(extension.default, example_outputs=torch.empty_like)
    assert trace(Workload(Extended(mended), (4, 8), loss=lambda output: output.sum())).ops
