"""What one operator costs, against numbers worked by hand and against torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from perfguard.devices import resolve_device
from perfguard.graph import OpGraph, Phase, roofline_s, trace
from perfguard.workload import Workload
from tests.perfguard.graph.parts import Apply, Scale, total

MATRIX_KINDS = ("conv", "conv_backward", "matmul", "attention")


class Rows(nn.Module):
    """A function of a table and indices."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.table = function, nn.Parameter(torch.zeros(1000, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.function(self.table, ids)


def traced(model: nn.Module, shape: tuple[int, ...]) -> OpGraph:
    return trace(Workload(model, shape, loss=total))


def matrix_flops(graph: OpGraph, phase: Phase) -> int:
    return sum(op.flops for op in graph.ops if op.kind in MATRIX_KINDS and op.phase is phase)


@pytest.mark.parametrize(
    ("layer", "shape", "forward"),
    [
        (lambda: nn.Linear(8, 16), (32, 8), 2 * 32 * 8 * 16),
        (lambda: nn.Conv1d(3, 8, 5), (2, 3, 12), 2 * 2 * 8 * (8 * 3 * 5)),
        (lambda: nn.Conv2d(3, 8, 3, padding=1), (2, 3, 10, 10), 2 * 2 * 100 * (8 * 3 * 9)),
        (lambda: nn.Conv2d(3, 8, 3, stride=2), (2, 3, 11, 11), 2 * 2 * 25 * (8 * 3 * 9)),
        (lambda: nn.Conv2d(8, 16, 3, padding=1, groups=4), (2, 8, 10, 10), 2 * 2 * 100 * (16 * 2 * 9)),
        (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 10, 10), 2 * 2 * 100 * (8 * 1 * 9)),
        (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 5, 5), 2 * 2 * 25 * (4 * 6 * 4)),
        (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 5), 2 * 2 * 25 * (4 * 3 * 9)),
        (lambda: Apply(lambda x: torch.bmm(x, x.transpose(1, 2))), (3, 5, 7), 2 * 3 * 5 * 7 * 5),
    ],
    ids=["linear", "conv1d", "conv2d", "strided", "grouped", "depthwise", "transposed", "transposed grouped", "bmm"],
)
def test_flops_by_hand_and_twice_as_many_backward(layer: Callable[[], nn.Module], shape: tuple[int, ...], forward: int) -> None:
    graph = traced(nn.Sequential(Scale(), layer()), shape)
    assert matrix_flops(graph, Phase.FORWARD) == forward
    assert matrix_flops(graph, Phase.BACKWARD) == 2 * forward


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_attention_flops_are_two_and_five_products(target: Literal["cuda", "cpu"]) -> None:
    """Two products forward, five backward."""
    batch, heads, length, width = 2, 3, 16, 8
    model = nn.Sequential(Scale(), Apply(lambda x: F.scaled_dot_product_attention(x, x, x)))
    workload = Workload(model, (batch, heads, length, width), loss=total)
    graph = trace(workload, target=target)
    product = 2 * batch * heads * length * length * width
    assert matrix_flops(graph, Phase.FORWARD) == 2 * product
    assert matrix_flops(graph, Phase.BACKWARD) == 5 * product  # the fused kernel computes the scores again


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([1, 3, 5]), min_size=1, max_size=4),
    st.lists(st.integers(1, 32), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_ungrouped_net_flops_equal_torchs_counter(kernels: list[int], widths: list[int], batch: int) -> None:
    with torch.device("meta"):
        convolutions = [nn.Conv2d(6, 6, kernel, stride=1 + index % 2, padding=2) for index, kernel in enumerate(kernels)]
        linears = [nn.Linear(6 if index == 0 else widths[index - 1], width) for index, width in enumerate(widths)]
        model = nn.Sequential(*convolutions, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *linears)
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(batch, 6, 16, 16)).sum().backward()
    graph = traced(model, (batch, 6, 16, 16))
    assert matrix_flops(graph, Phase.FORWARD) + matrix_flops(graph, Phase.BACKWARD) == counter.get_total_flops()


def test_matmul_bytes_are_those_of_its_operands() -> None:
    graph = traced(nn.Linear(8, 16, bias=False), (32, 8))
    product = graph.ops[0]
    assert (product.bytes_read, product.bytes_written) == (4 * (32 * 8 + 8 * 16), 4 * 32 * 16)


@pytest.mark.parametrize(
    ("layer", "rows"),
    [
        (lambda: nn.Embedding(1000, 8), 3 * 5),
        (lambda: nn.EmbeddingBag(1000, 8), 3 * 5),  # what it writes is less: one row for each bag
        (lambda: Rows(lambda table, ids: table[ids]), 3 * 5),
        (lambda: Rows(lambda table, ids: torch.index_select(table, 0, ids[0])), 5),
    ],
)
def test_gathers_read_the_rows_that_they_take(layer: Callable[[], nn.Module], rows: int) -> None:
    graph = trace(Workload(layer(), torch.zeros(3, 5, dtype=torch.int64), mode="infer"))
    (gather,) = (op for op in graph.ops if op.kind == "embedding" or op.name.startswith("index"))
    indices = 8 * 3 * 5 if rows == 15 else 8 * 5
    assert rows * 8 * 4 <= gather.bytes_read - indices <= rows * 8 * 4 + 8 * 3  # a bag also reads its offsets


def test_inplace_operator_reads_and_writes_argument() -> None:
    graph = traced(nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True)), (32, 8))
    relu = graph.ops[1]
    assert (relu.name, relu.bytes_read, relu.bytes_written) == ("relu_", 4 * 32 * 16, 4 * 32 * 16)
    assert relu.outputs == (graph.ops[0].outputs[0],)


def test_views_are_counted_with_the_operator_that_follows() -> None:
    model = Apply(lambda x: (x.view(8, 4).T + 1).unsqueeze(0).relu())
    graph = trace(Workload(model, (4, 8), mode="infer"))
    assert [(op.name, op.attributes) for op in graph.ops] == [("add", {"views": 2}), ("relu", {"views": 1})]


def test_roofline_is_slowest_of_its_bounds() -> None:
    """Arithmetic, traffic, and at least one launch."""
    device = replace(
        resolve_device("a100"),
        peak_flops={"fp32": 1e12, "fp16": 8e12, "bf16": 4e12},
        bandwidth_bytes_per_s=1e11,
        launch_overhead_s=1e-6,
    )
    graph = traced(nn.Linear(8, 16), (32, 8))
    product = graph.ops[0]
    cases = [
        (product._replace(flops=10**9, bytes_read=0, bytes_written=0), 1e-3),
        (product._replace(flops=10**9, bytes_read=0, bytes_written=0, dtype="float16"), 1e-3 / 8),
        (product._replace(flops=10**9, bytes_read=0, bytes_written=0, dtype="bfloat16"), 1e-3 / 4),
        (product._replace(flops=10**9, bytes_read=0, bytes_written=0, dtype="float16", kind="activation"), 1e-3),
        (product._replace(flops=10**9, bytes_read=3 * 10**8, bytes_written=10**8), 4e-3),
        (product._replace(flops=1, bytes_read=1, bytes_written=1), 1e-6),
    ]
    found = roofline_s(replace(graph, ops=tuple(op for op, _ in cases)), device)
    np.testing.assert_allclose(found, [seconds for _, seconds in cases])
    assert roofline_s(replace(graph, ops=()), device).shape == (0,)
