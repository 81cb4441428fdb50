"""LILOU's own networks: which operators fuse, and which kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from perfguard import Workload, trace
from perfguard.devices import resolve_device
from perfguard_research.fusion import kernels
from perfguard_research.fusion.network import read_fusion_model
from tests.weights import check_damaged_weights_are_refused

WEIGHTS = Path(kernels.__file__).parents[1] / "weights"


@pytest.mark.parametrize(("name", "read"), [("kernels", kernels.read_kernel_model), ("fusion", read_fusion_model)])
def test_weights_refuse_damage_and_exchange(name: str, read: Callable[..., object], tmp_path: Path) -> None:
    check_damaged_weights_are_refused(WEIGHTS, name, read, tmp_path)


def test_kernel_names_drop_template_and_architecture() -> None:
    name = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, X>(float*, int)"
    assert kernels.kernel_family(name) == "cunn_SoftMaxForward"
    assert kernels.kernel_family("volta_sgemm_128x64_nn") == kernels.kernel_family("ampere_sgemm_128x64_nn") == "sgemm_128x64_nn"
    relu = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, Y>(int, Y)"
    assert kernels.kernel_family(relu) == "vectorized_elementwise_kernel CUDAFunctor_add"


def test_matrix_product_runs_as_matrix_product() -> None:
    device = resolve_device("v100")
    graph = trace(Workload(nn.Linear(1024, 1024), (512, 1024), mode="infer"), target=device)
    (likeliest, *_) = kernels.shipped().of_operator(graph, device)
    assert "gemm" in likeliest
