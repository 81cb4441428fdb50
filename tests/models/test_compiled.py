"""What compilers fuse, used for compiled workloads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfguard import Workload, trace
from perfguard.devices import resolve_device
from perfguard.predictor import load_predictor
from perfguard_models.compiled import as_compiled
from perfguard_research.fusion.network import shipped
from tests.fusible import SHAPE, network


@pytest.mark.parametrize("method", ["rule", "network"])
def test_batch_norm_and_its_activation_are_one_kernel(method: str) -> None:
    graph = trace(Workload(network(), SHAPE, mode="infer", compiled=True), target="cpu")
    compiled = as_compiled(graph)
    assert compiled is not None
    kernels = compiled.kernels if method == "rule" else shipped().kernels(graph, "inductor-cpu")
    names = [[graph.ops[at].name for at in kernel] for kernel in kernels]
    assert sum(found[:2] == ["native_batch_norm", "relu"] for found in names) >= 2
    assert all(found == ["convolution"] for found in names if "convolution" in found)


@pytest.mark.parametrize("gpu", ["cpu", "a100"])
def test_compiled_inference_is_taken_for_faster(gpu: str) -> None:
    device, predictor = resolve_device(gpu), load_predictor()
    for shape in (SHAPE, (256, 8, 64, 64)):
        workload = Workload(network(), shape, mode="infer")
        eager, compiled = (
            predictor.predict(trace(seen, target=device), device) for seen in (workload, replace(workload, compiled=True))
        )
        assert 0 < compiled.step_time.median < eager.step_time.median
        assert compiled.peak_memory.median <= eager.peak_memory.median
        assert any("kernels for" in text for text in compiled.unmodelled)
