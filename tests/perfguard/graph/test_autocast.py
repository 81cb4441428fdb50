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
    "1 / x": lambda x: 1 / x,
    "1 - x": lambda x: 1 - x,
    "x / x": lambda x: x / x,
    "square": lambda x: x.square(),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: x.norm(dim=-1),
    "torch.norm": lambda x: torch.norm(x, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "vector_norm": torch.linalg.vector_norm,
    "linalg.norm": torch.linalg.norm,
    "scatter_add": lambda x: x.scatter_add(0, indices(x, 8, 16), x),
    "atan2": lambda x: torch.atan2(x, x),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "tensordot": lambda x: torch.tensordot(x, x, ([1], [1])),
    "linear": lambda x: F.linear(x.float(), x.float()),
    "@": lambda x: x.float() @ x.float().T,
    "matmul": lambda x: x.float().matmul(x.float().T),
    "linalg.matmul": lambda x: torch.linalg.matmul(x.float(), x.float().T),
    "linalg.multi_dot": lambda x: torch.linalg.multi_dot([x.float(), x.float().T, x.float()]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x.float(), x.float()),
    "addmm": lambda x: torch.addmm(x.float().narrow(1, 0, 8), x.float(), x.float().T),
    "bmm": lambda x: torch.bmm(x.float().unsqueeze(0), x.float().T.unsqueeze(0)),
    "conv2d": lambda x: F.conv2d(x.float().reshape(1, 2, 8, 8), torch.zeros(2, 2, 3, 3, device=x.device)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x.float().reshape(1, 2, 8, 8), torch.zeros(2, 2, 3, 3, device=x.device)),
    "prelu": lambda x: F.prelu(x.float(), torch.ones(1, device=x.device)),
    "attention": lambda x: attend(x.float().reshape(1, 2, 8, 8)),
    "sum": lambda x: x.sum(-1),
    "sum in half": lambda x: x.sum(dtype=x.dtype),
    "mean": lambda x: x.mean(),
    "prod": lambda x: x.prod(),
    "cumsum": lambda x: x.cumsum(0),
    "var": lambda x: x.var(),
    "std": lambda x: x.std(),
    "softmax": lambda x: x.softmax(-1),
    "softmax in half": lambda x: x.softmax(-1, dtype=x.dtype),
    "F.softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "exp": lambda x: x.exp(),
    "rsqrt": lambda x: x.rsqrt(),
    "sqrt": lambda x: x.sqrt(),
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "layer_norm": lambda x: F.layer_norm(x, (16,)),
    "rms_norm": lambda x: F.rms_norm(x, (16,)),
    "group_norm": lambda x: F.group_norm(x, 4),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x),
    "cdist": lambda x: torch.cdist(x, x),
    "dist": lambda x: x.dist(x),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
    "kl_div": lambda x: F.kl_div(x, x),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, indices(x, 8)),
    "cross_entropy, weights": lambda x: F.cross_entropy(x, indices(x, 8), weight=x.select(0, 0)),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(x, indices(x, 8), label_smoothing=0.1),
    "cross_entropy, probabilities": lambda x: F.cross_entropy(x, x.softmax(-1)),
    "nearest": lambda x: F.interpolate(x.unsqueeze(0), scale_factor=2),
    "bilinear": lambda x: F.interpolate(x.reshape(1, 2, 8, 8), scale_factor=2, mode="bilinear"),
    "nearest-exact": lambda x: F.interpolate(x.unsqueeze(0), scale_factor=2, mode="nearest-exact"),
    "add": lambda x: x + x.float(),
    "cat": lambda x: torch.cat([x, x.float()]),
    "dropout": lambda x: F.dropout(x, 0.5),
    "max_pool": lambda x: F.max_pool1d(x, 2),
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
