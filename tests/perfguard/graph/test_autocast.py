"""Autocast on meta against the real thing: PyTorch's own CUDA autocast kernels, run on fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from perfguard.graph.kernels import DevicePaths, Target, device_semantics

Tensor = torch.Tensor


def indices(x: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device=x.device)


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "x ** 2": lambda x: x**2,
    "2 ** x": lambda x: 2**x,
    "norm": lambda x: x.norm(),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "scatter_add": lambda x: x.scatter_add(0, indices(x, 8, 16), x),
    "@": lambda x: x.float() @ x.float().T,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x.float(), x.float()),
    "conv2d": lambda x: F.conv2d(x.float().reshape(1, 2, 8, 8), torch.zeros(2, 2, 3, 3, device=x.device)),
    "prelu": lambda x: F.prelu(x.float(), torch.ones(1, device=x.device)),
    "attention": lambda x: attend(x.float().reshape(1, 2, 8, 8)),
    "sum": lambda x: x.sum(-1),
    "prod": lambda x: x.prod(),
    "softmax": lambda x: x.softmax(-1),
    "softmax in half": lambda x: x.softmax(-1, dtype=x.dtype),
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, (16,)),
    "rms_norm": lambda x: F.rms_norm(x, (16,)),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, indices(x, 8)),
    "cross_entropy, weights": lambda x: F.cross_entropy(x, indices(x, 8), weight=x.select(0, 0)),
    "cross_entropy, probabilities": lambda x: F.cross_entropy(x, x.softmax(-1)),
    "nearest": lambda x: F.interpolate(x.unsqueeze(0), scale_factor=2),
    "add": lambda x: x + x.float(),
    "cat": lambda x: torch.cat([x, x.float()]),
}  # fmt: skip


@contextmanager
def real_autocast(dtype: torch.dtype) -> Iterator[None]:
    """What `torch.autocast("cuda")` sets; it refuses to be entered without a GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_outputs_have_the_dtype_that_cuda_gives_them(name: str, dtype: torch.dtype) -> None:
    with FakeTensorMode(), real_autocast(dtype):
        real = CASES[name](torch.empty(8, 16, device="cuda", dtype=dtype)).dtype
    paths = DevicePaths(Target())
    with torch.device("meta"), device_semantics("cuda"), paths.autocast(dtype), paths:
        traced = CASES[name](torch.empty(8, 16, dtype=dtype)).dtype
    assert traced is real
