"""Every shape rule makes what PyTorch's own meta kernel makes, or declines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from perfguard.graph.shape_rules import SHAPE_RULES, UNLIKE_META_KERNEL, WITHOUT_META_KERNEL, outputs_of

aten = torch.ops.aten
LAYOUTS = ("contiguous", "channels_last", "transposed", "expanded")
ALL = [True, True, True]
"""All gradients are asked for."""
# Operators by their arguments: how many tensors, or lists of tensors, and whether a number follows.
ELEMENTWISE = {
    aten.gelu.default: (1, False), aten.silu.default: (1, False), aten.relu.default: (1, False), aten.sqrt.default: (1, False),
    aten.gelu_backward.default: (2, False), aten.silu_backward.default: (2, False), aten.sigmoid_backward.default: (2, False),
    aten.hardswish_backward.default: (2, False), aten.hardsigmoid_backward.default: (2, False),
    aten.threshold_backward.default: (2, True), aten.add.Tensor: (2, False), aten.mul.Tensor: (2, False),
    aten.div.Tensor: (2, False), aten.zeros_like.default: (1, False),
    aten.add_.Tensor: (2, False), aten.mul_.Tensor: (2, False), aten.addcmul_.default: (3, False),
    aten.addcdiv_.default: (3, False), aten.lerp_.Scalar: (2, True),
}  # fmt: skip
LISTS = {
    aten._foreach_add_.List: (2, False), aten._foreach_add_.Scalar: (1, True), aten._foreach_mul_.Scalar: (1, True),
    aten._foreach_div_.List: (2, False), aten._foreach_addcmul_.Scalar: (3, False), aten._foreach_addcdiv_.Scalar: (3, False),
    aten._foreach_lerp_.Scalar: (2, True), aten._foreach_sqrt.default: (1, False), aten._foreach_add.List: (2, False),
}  # fmt: skip
Case = tuple[Any, tuple[Any, ...], dict[str, Any]]


def meta(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> torch.Tensor:
    if layout == "expanded" and shape:
        return torch.empty(1, device="meta", dtype=dtype).expand(shape)
    tensor = torch.empty(shape, device="meta", dtype=dtype)
    if layout == "channels_last" and len(shape) == 4:
        return tensor.to(memory_format=torch.channels_last)
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if layout == "transposed" and shape else tensor


def elementwise_cases(x: torch.Tensor, other: torch.Tensor) -> Iterator[Case]:
    """Each operator on ``x`` and ``other``, which may not fit."""
    for func, (count, with_number) in ELEMENTWISE.items():
        yield func, (x, *[other] * (count - 1), *[0.5] * with_number), {}
    for func, (count, with_number) in LISTS.items():
        yield func, ([x, x], *[[x, other]] * (count - 1), *[0.5] * with_number), {}
    yield aten._foreach_div_.ScalarList, ([x, x], [0.5, 0.5]), {}
    yield aten._foreach_addcdiv_.ScalarList, ([x, x], [x, other], [x, x], [0.5, 0.5]), {}
    for number in (2.0, torch.tensor(2.0, dtype=torch.float64), meta((1,), x.dtype), meta((), torch.float64)):
        yield from ((func, (x, number), {}) for func in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor))
    for options in ({"dtype": torch.float64}, {"memory_format": torch.contiguous_format}, {"pin_memory": False}):
        yield aten.zeros_like.default, (x,), options


def layer_cases(x: torch.Tensor, statistics: torch.dtype, dims: list[int], keepdim: bool) -> Iterator[Case]:
    """Norms, products and sums of ``x``, of four dimensions."""
    channels, last = meta(x.shape[1:2], statistics), x.shape[-1:]
    saved, weight = meta(x.shape[1:2], torch.float32), meta(last, x.dtype)
    for train in (True, False):
        yield aten.native_batch_norm.default, (x, channels, channels, channels, channels, train, 0.1, 1e-5), {}
    batch_norm = (x, x, channels, channels, channels, saved, saved, True, 1e-5, ALL)
    yield aten.native_batch_norm_backward.default, batch_norm, {}
    yield aten.native_layer_norm.default, (x, last, weight, weight, 1e-5), {}
    rows = meta((*x.shape[:-1], 1), torch.float32)
    yield aten.native_layer_norm_backward.default, (x, x, last, rows, rows, weight, weight, ALL), {}
    matrix, right = x[0, 0], x[0, 0].t()
    yield aten.mm.default, (matrix, right), {}
    yield aten.addmm.default, (meta(right.shape[1:], x.dtype), matrix, right), {}
    yield aten.sum.dim_IntList, (x, dims, keepdim), {}


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]  # of one, it is moot
        return tuple(value.shape), strides, value.dtype
    return None if value is None else tuple(map(described, value))


def is_taken(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the rule took the case; if it did, it must have been right."""
    out = SHAPE_RULES[func](*args, **kwargs)
    if out is NotImplemented:
        return False
    expected = func(*args, **kwargs)
    assert described(out) == described(expected), func
    assert (out is args[0]) == (expected is args[0])
    return True


sizes = st.integers(1, 5)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])
layouts = st.sampled_from(LAYOUTS)


@settings(max_examples=80)
@given(st.lists(sizes, max_size=4).map(tuple), dtypes, layouts, layouts, st.booleans())
def test_elementwise(shape: tuple[int, ...], dtype: torch.dtype, first: str, second: str, fits: bool) -> None:
    for case in elementwise_cases(meta(shape, dtype, first), meta(shape if fits else (*shape, 2), dtype, second)):
        is_taken(*case)


@settings(max_examples=80)
@given(st.tuples(sizes, sizes, st.integers(2, 5), sizes), dtypes, layouts, st.sets(st.integers(-4, 3), min_size=1), st.booleans())
def test_layers(shape: tuple[int, ...], dtype: torch.dtype, layout: str, dims: set[int], keepdim: bool) -> None:
    summed = sorted({dim % 4 for dim in dims})
    for statistics in (dtype, dtype if dtype is torch.float64 else torch.float32):
        for case in layer_cases(meta(shape, dtype, layout), statistics, summed, keepdim):
            is_taken(*case)


def test_every_rule_takes_its_plain_case() -> None:
    x = meta((2, 3, 4, 4), torch.float32)
    cases = (*elementwise_cases(x, x), *layer_cases(x, torch.float32, [1, -1], False))
    assert {func for func, args, kwargs in cases if is_taken(func, args, kwargs)} == set(SHAPE_RULES)
    counter = meta((), torch.int64)
    assert is_taken(aten.add_.Tensor, (counter, torch.tensor(1)), {})
    assert not is_taken(aten.add_.Tensor, (counter, torch.tensor(1.5)), {})  # which PyTorch refuses


@pytest.mark.parametrize("targets", [torch.ones(3, 4, dtype=torch.int64), torch.ones(8, dtype=torch.int64)])
def test_rules_without_a_meta_kernel_make_what_the_kernel_of_the_host_makes(targets: torch.Tensor) -> None:
    log_probs, lengths = torch.randn(10, 3, 5).log_softmax(2), ([10, 9, 8], [4, 3, 1])
    loss = aten._ctc_loss.default(log_probs, targets, *lengths)
    backward = (loss[0], log_probs, targets, *lengths, *loss, 0)
    for func, args in ((aten._ctc_loss.default, backward[1:5]), (aten._ctc_loss_backward.default, backward)):
        on_meta = [item.to("meta") if isinstance(item, torch.Tensor) else item for item in args]
        assert described(WITHOUT_META_KERNEL[func](*on_meta)) == described(func(*args))


@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((3, 1), (1, 4)), ((4,), (3, 4))], ids=str)
@pytest.mark.parametrize("reduction", [None, 0, 1, 2], ids=["default", "none", "mean", "sum"])
@pytest.mark.parametrize("func", sorted(UNLIKE_META_KERNEL, key=str), ids=str)
def test_a_loss_has_the_storage_that_the_kernel_of_the_host_leaves(func: Any, reduction: int | None, shapes: Any) -> None:
    # ATen computes the losses of all elements into the output, and resizes it to one number: its storage stays as large.
    if func not in (aten.mse_loss.default, aten.smooth_l1_loss.default) and shapes[0] != shapes[1]:
        return  # only these broadcast
    x, target = (torch.rand(shape) for shape in shapes)
    options = {} if reduction is None else {"reduction": reduction}
    real, seen = func(x, target, **options), outputs_of(func, (x.to("meta"), target.to("meta")), options)
    assert described(seen) == described(real)
    assert seen.untyped_storage().nbytes() == real.untyped_storage().nbytes()
    if reduction != 0:
        assert seen.untyped_storage().nbytes() == 4 * torch.broadcast_shapes(*shapes).numel()


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
def test_margin_losses_have_gradients_as_large_as_their_inputs(loss: Any) -> None:
    x = torch.zeros(6, 4, requires_grad=True)
    target = torch.zeros((6,) if loss is F.multi_margin_loss else (6, 4), dtype=torch.int64)
    node = loss(x, target).grad_fn
    real = node(torch.ones(()))
    func = getattr(aten, f"{loss.__name__}_backward").default
    assert described(WITHOUT_META_KERNEL[func](meta((), torch.float32), x.to("meta"), target.to("meta"))) == described(
        next(one for one in (real if isinstance(real, tuple) else (real,)) if one is not None)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_synchronized_batch_norm_keeps_its_statistics_in_float32(dtype: torch.dtype) -> None:
    x = torch.empty(4, 8, 5, 5, dtype=dtype, device="meta").contiguous(memory_format=torch.channels_last)
    weight = torch.empty(8, device="meta")
    statistics = WITHOUT_META_KERNEL[aten.batch_norm_stats.default](x, 1e-5)
    assert [(one.shape, one.dtype) for one in statistics] == 2 * [((8,), torch.float32)]
    output = WITHOUT_META_KERNEL[aten.batch_norm_elemt.default](x, weight, weight, *statistics, 1e-5)
    assert described(output) == described(x)
    reduced = WITHOUT_META_KERNEL[aten.batch_norm_backward_reduce.default](x, x, *statistics, weight, True, True, False)
    assert [one is None for one in reduced] == [False, False, False, True]
    gradient = WITHOUT_META_KERNEL[aten.batch_norm_backward_elemt.default](x, x, *statistics, weight, *reduced[:2], weight)
    assert described(gradient) == described(x)
