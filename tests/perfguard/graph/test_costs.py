"""What one operator costs, against numbers worked by hand and against torch's own counter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from perfguard.devices import resolve_device
from perfguard.exceptions import TraceError
from perfguard.graph import OpGraph, Phase, TraceCache, roofline_s, trace
from perfguard.graph.costs import attention_flops
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


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_causal_kernel_leaves_out_what_a_query_does_not_meet(target: Literal["cuda", "cpu"], dtype: torch.dtype) -> None:
    batch, heads, length, width = 2, 3, 16, 8
    model = nn.Sequential(Scale(), Apply(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))).to(dtype)
    graph = trace(Workload(model, (batch, heads, length, width), loss=total), target=target)
    product = 2 * batch * heads * (length * (length + 1) // 2) * width
    assert matrix_flops(graph, Phase.FORWARD) == 2 * product
    assert matrix_flops(graph, Phase.BACKWARD) == 5 * product


def test_the_last_of_many_queries_meet_all_of_few_keys() -> None:
    query, key = (1, 5, 8), (1, 3, 8)
    assert attention_flops(query, key, key, causal=True) == 2 * (1 + 2 + 3 + 3 + 3) * (8 + 8)


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


NAMES_OF_ATEN = (
    "mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "convolution_backward", "embedding", "embedding_dense_backward",
    "_embedding_bag", "index", "_unsafe_index", "index_select", "gather", "take", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward", "_softmax", "_softmax_backward_data", "_foreach_add", "_fused_adam",
    "fused_rnn", "fused_rnn_backward", "int8_linear_matmul", "triton_kernel", "opaque", "nonzero", "empty", "detach", "relu_",
    "native_batch_norm", "mse_loss", "sum", "clone",
)  # fmt: skip
FORMS: dict[str, tuple[str, Callable[..., Any], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "plain": ("(Tensor x) -> Tensor", torch.empty_like, lambda op, x: op(x)),
    "in place": ("(Tensor(a!) x) -> ()", lambda x: None, lambda op, x: (op(x), x)[1]),
    "out": (
        "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", lambda x, *, out: out, lambda op, x: op(x, out=torch.empty_like(x))
    ),
    "list": ("(Tensor[] x) -> Tensor[]", lambda x: [torch.empty_like(one) for one in x], lambda op, x: op([x, x])[0]),
    "by keyword": ("(*, Tensor x) -> Tensor", lambda *, x: torch.empty_like(x), lambda op, x: op(x=x)),
}  # fmt: skip
"""Schema of a custom operator, its kernel on meta, and how it is called."""


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """A library of custom operators, which is gone after the test, with its formulas."""
    made = torch.library.Library("perfguard_test_costs", "DEF")
    before = set(flop_registry)
    yield made
    for added in set(flop_registry) - before:
        del flop_registry[added]
    made._destroy()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES_OF_ATEN)
def test_custom_operator_with_a_name_of_aten_is_elementwise(library: torch.library.Library, name: str, form: str) -> None:
    # `mylib::mm(x)` has no second factor, and ended the trace with an IndexError. `mylib::empty` cost nothing.
    schema, on_meta, call = FORMS[form]
    library.define(f"{name}{schema}")
    library.impl(name, on_meta, "Meta")
    op = getattr(torch.ops.perfguard_test_costs, name)
    graph = trace(Workload(Apply(lambda x: call(op, x + 1)), (32, 64), mode="infer"))
    assert [(op.name, op.kind) for op in graph.ops][-1] == (f"perfguard_test_costs::{name}", "elementwise")
    assert graph.ops[-1].flops == (32 * 64 if form != "in place" else 0)  # it gives nothing back
    assert graph.ops[-1].bytes_written == 4 * 32 * 64 * (2 if form == "list" else 1)


def test_formula_of_a_custom_operator_is_counted_forward_and_backward(library: torch.library.Library) -> None:
    library.define("mm(Tensor x, Tensor weight) -> Tensor")
    library.impl("mm", lambda x, weight: x.new_empty(x.shape[0], weight.shape[1]), "Meta")
    library.define("mm_backward(Tensor grad, Tensor weight) -> Tensor")
    library.impl("mm_backward", lambda grad, weight: grad.new_empty(grad.shape[0], weight.shape[0]), "Meta")
    ops = torch.ops.perfguard_test_costs

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ops.mm_backward(grad, *ctx.saved_tensors), None

    torch.library.register_autograd("perfguard_test_costs::mm", backward, setup_context=keep, lib=library)

    @register_flop_formula([ops.mm, ops.mm_backward])
    def flops(left: torch.Size, right: torch.Size, *, out_shape: torch.Size) -> int:
        return 2 * left.numel() * out_shape[1]

    model = nn.Sequential(Scale(), Apply(lambda x: ops.mm(x, torch.empty(64, 16, device=x.device))))
    counted = {op.name: op for op in traced(model, (32, 64)).ops if "::" in op.name}
    for name in ("mm", "mm_backward"):
        op = counted[f"perfguard_test_costs::{name}"]
        assert (op.kind, op.flops) == ("matmul", 2 * 32 * 64 * 16)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (lambda x, **_: x[7], r"FLOPs of perfguard_test_costs::mm fails \(IndexError.*register_flop_formula"),
        (lambda x, **_: None, r"FLOPs of perfguard_test_costs::mm fails \(TypeError.*register_flop_formula"),
        (lambda x, **_: -1, r"FLOPs of perfguard_test_costs::mm must not give a negative number, but got -1"),
    ],
)
def test_formula_that_fails_is_named(library: torch.library.Library, formula: Callable[..., Any], message: str) -> None:
    # The step itself is right, so the advice must not be to run it on real tensors.
    library.define("mm(Tensor x) -> Tensor")
    library.impl("mm", torch.empty_like, "Meta")
    register_flop_formula(torch.ops.perfguard_test_costs.mm)(formula)
    with pytest.raises(TraceError, match=message):
        trace(Workload(Apply(torch.ops.perfguard_test_costs.mm), (32, 64), mode="infer"))


def test_formula_that_is_registered_later_is_counted_in_the_next_trace(library: torch.library.Library) -> None:
    # In a notebook, the formula is written when the first verdict has shown that it is missing.
    library.define("mm(Tensor x) -> Tensor")
    library.impl("mm", torch.empty_like, "Meta")
    packet, cache = torch.ops.perfguard_test_costs.mm, TraceCache()
    workload = Workload(Apply(packet), (32, 64), mode="infer")
    assert cache.trace(workload).ops[-1].flops == 32 * 64
    register_flop_formula(packet)(lambda x, *, out_shape: 7 * x.numel())
    assert cache.trace(workload).ops[-1].flops == 7 * 32 * 64


def test_module_that_holds_a_custom_operator_is_copied() -> None:
    # PyTorch cannot copy what `torch.library.custom_op` returns, nor a namespace such as `torch.ops.mylib`.
    @torch.library.custom_op("perfguard_test_held::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)
    namespace: Any = torch.ops.perfguard_test_held
    for held, call in ((twice, twice), (namespace.twice, namespace.twice), (namespace, namespace.twice)):
        model: Any = nn.Sequential(nn.Linear(8, 8), Apply(call))
        model.held = held
        graph = trace(Workload(model, (4, 8), mode="infer"))
        assert graph.ops[-1].name == "perfguard_test_held::twice"
