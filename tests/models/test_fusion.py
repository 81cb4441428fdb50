"""What compilers fuse, used for compiled workloads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfguard import Workload, trace
from perfguard.devices import resolve_device
from perfguard.graph import TRACED_AS_EAGER
from perfguard.predictor import load_predictor
from perfguard_models import fusion
from perfguard_models.fused_graph import FUSED
from perfguard_models.fusion import as_compiled, read_fusion_model, shipped
from tests.fusible import SHAPE, network
from tests.weights import check_damaged_weights_are_refused

WEIGHTS = Path(fusion.__file__).parent / "weights"


def test_shipped_weights_fuse_batch_norm_on_cpu() -> None:
    graph = trace(Workload(network(), SHAPE, mode="infer"), target="cpu")
    kernels_found = [op.attributes.get(FUSED, ()) for op in shipped().fused(graph, "inductor-cpu")[0].ops]
    assert sum(found[:2] == ("native_batch_norm", "relu") for found in kernels_found) >= 2
    assert not any("convolution" in found for found in kernels_found)


def test_compiled_training_stays_eager_and_noted() -> None:
    """Of training no fusion was learnt, so the graph stays as it was traced."""
    device = resolve_device("cpu")
    graph = trace(Workload(network(), SHAPE, loss=lambda out: out.sum(), compiled=True), target=device)
    assert as_compiled(graph, device) is None
    assert TRACED_AS_EAGER in graph.unmodelled


@pytest.mark.parametrize("name", ["guardnet", "lilou"])
@pytest.mark.parametrize("gpu", ["cpu", "a100"])
def test_predictors_take_compiled_inference_for_faster(name: str, gpu: str) -> None:
    device, predictor = resolve_device(gpu), load_predictor(name)
    for shape in (SHAPE, (256, 8, 64, 64)):
        workload = Workload(network(), shape, mode="infer")
        eager, compiled = (
            predictor.predict(trace(seen, target=device), device) for seen in (workload, replace(workload, compiled=True))
        )
        assert 0 < compiled.step_time.median < eager.step_time.median
        assert compiled.peak_memory.median <= eager.peak_memory.median


def test_fusion_weights_refuse_damage_and_exchange(tmp_path: Path) -> None:
    check_damaged_weights_are_refused(WEIGHTS, "fusion", read_fusion_model, tmp_path)
