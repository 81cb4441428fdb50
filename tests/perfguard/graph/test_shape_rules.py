"""Every shape rule makes what PyTorch's own meta kernel makes, or declines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perfguard.graph.shape_rules import SHAPE_RULES

aten = torch.ops.aten
sizes = st.integers(1, 5)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])
layouts = st.sampled_from(["contiguous", "channels_last", "transposed", "expanded"])


def meta(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> torch.Tensor:
    if layout == "expanded" and shape:
        return torch.empty(1, device="meta", dtype=dtype).expand(shape)
    tensor = torch.empty(shape, device="meta", dtype=dtype)
    if layout == "channels_last" and len(shape) == 4:
        return tensor.to(memory_format=torch.channels_last)
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if layout == "transposed" and shape else tensor


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]  # of one, it is moot
        return tuple(value.shape), strides, value.dtype
    return tuple(map(described, value))


def check(func: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the rule took the case; if it did, it must have been right."""
    out = SHAPE_RULES[func](*args, **kwargs)
    if out is NotImplemented:
        return False
    assert described(out) == described(func(*args, **kwargs))
    return True


UNARY = [aten.gelu.default, aten.silu.default, aten.relu.default, aten.sqrt.default]
BINARY = [
    aten.gelu_backward.default, aten.silu_backward.default, aten.sigmoid_backward.default, aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor,
]  # fmt: skip


@settings(max_examples=60)
@given(st.lists(sizes, min_size=1, max_size=4).map(tuple), dtypes, layouts, layouts)
def test_elementwise(shape: tuple[int, ...], dtype: torch.dtype, first: str, second: str) -> None:
    for func in UNARY:
        check(func, meta(shape, dtype, first))
    for func in BINARY:
        check(func, meta(shape, dtype, first), meta(shape, dtype, second))
    check(aten.threshold_backward.default, meta(shape, dtype, first), meta(shape, dtype, second), 0)
    check(aten.add.Tensor, meta(shape, dtype, first), meta((1,), dtype))
    check(aten.zeros_like.default, meta(shape, dtype, first), pin_memory=False, memory_format=torch.preserve_format)
    check(aten.zeros_like.default, meta(shape, dtype, first), dtype=torch.float64)
    check(aten.zeros_like.default, meta(shape, dtype, first), memory_format=torch.contiguous_format)
    check(aten.mul.Tensor, meta(shape, dtype, first), meta((), torch.float64))


# Operators of optimizers, with how many tensors, or lists of them, each takes, and whether a number follows.
IN_PLACE = {
    aten.add_.Tensor: (2, False), aten.mul_.Tensor: (2, False), aten.addcmul_.default: (3, False),
    aten.addcdiv_.default: (3, False), aten.lerp_.Scalar: (2, True),
}  # fmt: skip
LISTS = {
    aten._foreach_add_.List: (2, False), aten._foreach_add_.Scalar: (1, True), aten._foreach_mul_.Scalar: (1, True),
    aten._foreach_div_.List: (2, False), aten._foreach_addcmul_.Scalar: (3, False), aten._foreach_addcdiv_.Scalar: (3, False),
    aten._foreach_lerp_.Scalar: (2, True), aten._foreach_sqrt.default: (1, False), aten._foreach_add.List: (2, False),
}  # fmt: skip
WITH_NUMBERS = {aten._foreach_div_.ScalarList: 1, aten._foreach_addcdiv_.ScalarList: 3}


@settings(max_examples=60)
@given(st.lists(sizes, max_size=4).map(tuple), dtypes, layouts, layouts, st.booleans())
def test_in_place(shape: tuple[int, ...], dtype: torch.dtype, first: str, second: str, fits: bool) -> None:
    other_shape = shape if fits else (*shape, 2)
    for func, (count, with_number) in IN_PLACE.items():
        x = meta(shape, dtype)
        others = [meta(shape, dtype, second) for _ in range(count - 2)] + [meta(other_shape, dtype, first)]
        arguments = (x, *others, *([0.5] if with_number else []))
        out = SHAPE_RULES[func](*arguments)
        assert out is (x if fits else NotImplemented)
        if fits:
            assert func(*arguments) is x
    counter = torch.empty((), dtype=torch.int64, device="meta")
    assert SHAPE_RULES[aten.add_.Tensor](counter, torch.tensor(1)) is counter
    assert SHAPE_RULES[aten.add_.Tensor](counter, torch.tensor(1.5)) is NotImplemented  # which PyTorch refuses
    for func in (aten.div.Tensor, aten.mul.Tensor, aten.add.Tensor):
        check(func, meta(shape, dtype, first), torch.tensor(2.0, dtype=torch.float64))
        check(func, meta(shape, dtype, first), 2.0)


@settings(max_examples=60)
@given(st.lists(st.lists(sizes, max_size=4).map(tuple), min_size=1, max_size=3), dtypes, layouts, st.booleans())
def test_lists(shapes: list[tuple[int, ...]], dtype: torch.dtype, layout: str, fits: bool) -> None:
    def lists(count: int) -> list[list[torch.Tensor]]:
        made = [[meta(shape, dtype) for shape in shapes]]
        made += [[meta(shape, dtype, layout) for shape in shapes] for _ in range(count - 2)]
        return made + [[meta(shape if fits else (*shape, 2), dtype, layout) for shape in shapes] for _ in range(count > 1)]

    for func, (count, with_number) in LISTS.items():
        arguments = (*lists(count), *([0.5] if with_number else []))
        out = SHAPE_RULES[func](*arguments)
        if count > 1 and not fits:
            assert out is NotImplemented
        elif out is None:
            assert func(*arguments) is None
        elif out is not NotImplemented:
            assert described(out) == described(func(*arguments))
    for func, count in WITH_NUMBERS.items():
        out = SHAPE_RULES[func](*lists(count), [0.5] * len(shapes))
        assert out is (NotImplemented if count > 1 and not fits else None)


@settings(max_examples=60)
@given(sizes, sizes, sizes, dtypes, layouts, st.booleans())
def test_batch_norm(batch: int, channels: int, side: int, dtype: torch.dtype, layout: str, mixed: bool) -> None:
    assume(batch * side > 1)  # one value has no variance
    x = meta((batch, channels, side, side), dtype, layout)
    vector = meta((channels,), torch.float32 if mixed and dtype is not torch.float64 else dtype)
    out = aten.native_batch_norm.default(x, vector, vector, vector, vector, True, 0.1, 1e-5)
    check(aten.native_batch_norm.default, x, vector, vector, vector, vector, True, 0.1, 1e-5)
    check(aten.native_batch_norm_backward.default, x, x, vector, vector, vector, out[1], out[2], True, 1e-5, [True, True, True])


@settings(max_examples=60)
@given(st.lists(sizes, min_size=2, max_size=4).map(tuple), st.integers(1, 2), dtypes, layouts)
def test_layer_norm(shape: tuple[int, ...], last: int, dtype: torch.dtype, layout: str) -> None:
    x, normalized = meta(shape, dtype, layout), shape[-last:]
    weight = meta(normalized, dtype)
    out = aten.native_layer_norm.default(x, normalized, weight, weight, 1e-5)
    check(aten.native_layer_norm.default, x, normalized, weight, weight, 1e-5)
    mask = [True, True, True]
    check(aten.native_layer_norm_backward.default, x, x, normalized, out[1], out[2], weight, weight, mask)


@settings(max_examples=60)
@given(sizes, sizes, sizes, dtypes, st.booleans(), st.booleans())
def test_products(n: int, k: int, m: int, dtype: torch.dtype, first: bool, second: bool) -> None:
    a = meta((k, n), dtype).t() if first else meta((n, k), dtype)
    b = meta((m, k), dtype).t() if second else meta((k, m), dtype)
    assert check(aten.mm.default, a, b)
    assert check(aten.addmm.default, meta((m,), dtype), a, b)


@settings(max_examples=60)
@given(st.lists(sizes, min_size=1, max_size=4).map(tuple), st.sets(st.integers(-4, 3), min_size=1), st.booleans(), dtypes)
def test_sums(shape: tuple[int, ...], dims: set[int], keepdim: bool, dtype: torch.dtype) -> None:
    inside = {dim % len(shape) for dim in dims if -len(shape) <= dim < len(shape)}
    if inside:
        assert check(aten.sum.dim_IntList, meta(shape, dtype), sorted(inside), keepdim)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_plain_cases_are_taken(layout: str) -> None:
    x, vector = meta((2, 3, 4, 4), torch.float32, layout), meta((3,), torch.float32)
    assert check(aten.native_batch_norm.default, x, vector, vector, vector, vector, True, 0.1, 1e-5)
    mask = [True, True, True]
    assert check(aten.native_batch_norm_backward.default, x, x, vector, vector, vector, vector, vector, True, 1e-5, mask)
    assert check(aten.add.Tensor, x, x)
    assert check(aten.threshold_backward.default, x, x, 0)
    rows = meta((2, 5, 8), torch.float16)
    weight = meta((8,), torch.float16)
    assert check(aten.native_layer_norm.default, rows, (8,), weight, weight, 1e-5)
    assert check(aten.gelu_backward.default, rows, rows)


def test_every_rule_is_tried_here() -> None:
    tried = {*UNARY, *BINARY, aten.threshold_backward.default, aten.native_batch_norm.default, aten.mm.default}
    tried |= {aten.native_batch_norm_backward.default, aten.native_layer_norm.default, aten.addmm.default}
    tried |= {aten.zeros_like.default, aten.native_layer_norm_backward.default, aten.sum.dim_IntList}
    assert tried | IN_PLACE.keys() | LISTS.keys() | WITH_NUMBERS.keys() == set(SHAPE_RULES)
