"""What compilers fuse: read from Inductor itself, learnt, and used for compiled workloads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from perfguard import Workload, predict, trace
from perfguard.devices import resolve_device
from perfguard.exceptions import PredictorError
from perfguard.graph import TRACED_AS_EAGER, OpGraph
from perfguard.predictor import load_predictor
from perfguard_models import fusion, kernels
from perfguard_models.fused_graph import FUSED
from perfguard_models.fusion import as_compiled, read_fusion_model, shipped
from perfguard_models.fusion_labels import LabelledGraph, inductor_kernels, read_labels, to_json
from perfguard_models.fusion_labels_onnx import onnxruntime_case
from perfguard_models.train_fusion import fitted, score_of

WEIGHTS = Path(fusion.__file__).parent / "weights"


class Residual(nn.Module):
    """Convolution, batch norm, activation, and a sum with the input."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.relu(self.norm(self.conv(x))) + x
        return made


SHAPE = (2, 8, 16, 16)


def network(depth: int = 3) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Residual() for _ in range(depth))).eval()


def names_of(graph: OpGraph, found: tuple[tuple[int, ...], ...]) -> list[tuple[str, ...]]:
    return sorted(tuple(graph.ops[index].name for index in kernel) for kernel in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where Inductor is imported
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_inductor_says_that_it_fuses_batch_norm_activation_and_sum_but_not_the_convolution(target: str) -> None:
    graph = trace(Workload(network(1), SHAPE, mode="infer"), target=target)  # type: ignore[arg-type]
    found = inductor_kernels(network(1), SHAPE, graph, target)
    assert names_of(graph, found) == [("convolution",), ("native_batch_norm", "relu", "add")]
    labels = LabelledGraph("", "", "", graph, found).edge_labels()
    fused = {(graph.ops[a].name, graph.ops[b].name) for (a, b), label in zip(graph.edges.T, labels, strict=True) if label == 1}
    assert fused == {("native_batch_norm", "relu"), ("relu", "add")}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_record_agrees_with_the_kernels_that_inductor_then_generates() -> None:
    """The slow, obvious way: compile for real and count what it generated."""
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    model = nn.Sequential(*(Residual() for _ in range(2))).eval()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        torch.compile(model)(torch.randn(SHAPE))
    graph = trace(Workload(network(2), SHAPE, mode="infer"), target="cpu")
    found = inductor_kernels(network(2), SHAPE, graph)
    generated = [kernel for kernel in found if graph.ops[kernel[0]].name != "convolution"]
    # Beside them Inductor generates copies of each convolution's weight and of the input into oneDNN's layout.
    assert len(generated) <= metrics.generated_kernel_count <= len(generated) + 3


def test_onnx_runtime_says_that_it_folds_batch_norm_and_activation_into_the_convolution() -> None:
    pytest.importorskip("onnxruntime")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).eval()
    graph, found = onnxruntime_case(model, (1, 3, 16, 16))
    assert names_of(graph, found) == [("convolution", "native_batch_norm", "relu_"), ("max_pool2d_with_indices",)]


def labelled(depth: int, kernels_of_three: bool = True) -> LabelledGraph:
    """A chain of residual blocks in which everything but convolutions is fused, written by hand."""
    graph = trace(Workload(network(depth), SHAPE, mode="infer"), target="cpu")
    groups = [group for start in range(0, 4 * depth, 4) for group in ((start,), (start + 1, start + 2, start + 3))]
    return LabelledGraph("inductor-cpu", f"family {depth}", f"chain {depth}", graph, tuple(groups))


def test_the_network_learns_a_rule_and_carries_it_to_a_longer_network() -> None:
    model = fitted([labelled(depth) for depth in (1, 2, 3)] * 4, epochs=60)
    row = labelled(6)
    score = score_of(model.chances(row.graph, "inductor-cpu"), row.edge_labels())
    assert (score.precision, score.recall, score.accuracy) == (1.0, 1.0, 1.0)


def test_labels_survive_a_file_and_a_line_that_was_cut_short(tmp_path: Path) -> None:
    row = labelled(2)
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps(to_json(row)) + "\n" + json.dumps(to_json(row))[:200], encoding="utf-8")
    (read,) = read_labels(path)
    assert read.kernels == row.kernels
    assert read.graph.content_hash == row.graph.content_hash
    assert np.array_equal(read.edge_labels(), row.edge_labels())


def test_the_shipped_weights_fuse_batch_norm_and_activation_on_the_cpu() -> None:
    graph = trace(Workload(network(), SHAPE, mode="infer"), target="cpu")
    kernels_found = [op.attributes.get(FUSED, ()) for op in shipped().fused(graph, "inductor-cpu")[0].ops]
    assert sum(found[:2] == ("native_batch_norm", "relu") for found in kernels_found) >= 2
    assert not any("convolution" in found for found in kernels_found)


def test_a_compiled_inference_takes_no_longer_and_says_how_it_was_predicted() -> None:
    workload = Workload(network(), SHAPE, mode="infer")
    eager, compiled = predict(workload, gpu="cpu"), predict(replace(workload, compiled=True), gpu="cpu")
    assert compiled.step_time.median < eager.step_time.median
    assert not any(text == TRACED_AS_EAGER for text in compiled.unmodelled)
    assert any("kernels for 12 operators" in text for text in compiled.unmodelled)


def test_of_training_nothing_was_learnt_so_the_graph_stays_and_the_note_too() -> None:
    device = resolve_device("cpu")
    graph = trace(Workload(network(), SHAPE, loss=lambda out: out.sum(), compiled=True), target=device)
    assert as_compiled(graph, device) is None
    assert TRACED_AS_EAGER in graph.unmodelled


def test_the_same_graph_is_merged_once() -> None:
    device = resolve_device("cpu")
    graph = trace(Workload(network(), SHAPE, mode="infer", compiled=True), target="cpu")
    assert as_compiled(graph, device) is as_compiled(graph, device)
    assert as_compiled(graph, resolve_device("a100")) is not as_compiled(graph, device)


@pytest.mark.parametrize("name", ["guardnet", "lilou"])
@pytest.mark.parametrize("gpu", ["cpu", "a100"])
def test_no_predictor_takes_a_compiled_inference_for_slower(name: str, gpu: str) -> None:
    device, predictor = resolve_device(gpu), load_predictor(name)
    for shape in (SHAPE, (256, 8, 64, 64)):
        workload = Workload(network(), shape, mode="infer")
        eager, compiled = (
            predictor.predict(trace(seen, target=device), device) for seen in (workload, replace(workload, compiled=True))
        )
        assert 0 < compiled.step_time.median < eager.step_time.median
        assert compiled.peak_memory.median <= eager.peak_memory.median


def test_a_graph_without_edges_is_left_alone() -> None:
    graph = trace(Workload(nn.Linear(4, 4), (2, 4), mode="infer", compiled=True), target="cpu")
    compiled = as_compiled(graph, resolve_device("cpu"))
    assert compiled is not None
    assert len(compiled.graph.ops) == len(graph.ops) == 1


@pytest.mark.parametrize(
    ("name", "read"), [("fusion", read_fusion_model), ("kernels", kernels.read_kernel_model)], ids=["fusion", "kernels"]
)
def test_weights_that_are_damaged_or_exchanged_are_refused(
    name: str, read: Callable[[Path, Path], object], tmp_path: Path
) -> None:
    for suffix in (".safetensors", ".json"):
        shutil.copy(WEIGHTS / f"{name}{suffix}", tmp_path / f"{name}{suffix}")
    tensors, card = tmp_path / f"{name}.safetensors", tmp_path / f"{name}.json"
    assert tensors.stat().st_size < 10**6
    read(tensors, card)
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(bytes(data))
    with pytest.raises(PredictorError, match="do not match the hash in their card"):
        read(tensors, card)
    document = json.loads(card.read_text(encoding="utf-8"))
    card.write_text(json.dumps(document | {"format": 99}), encoding="utf-8")
    with pytest.raises(PredictorError, match="another version of PerfGuard"):
        read(tensors, card)
    tensors.unlink()
    with pytest.raises(PredictorError, match="cannot be read"):
        read(tensors, card)


def test_kernels_are_named_without_template_and_architecture() -> None:
    name = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, X>(float*, int)"
    assert kernels.kernel_family(name) == "cunn_SoftMaxForward"
    assert kernels.kernel_family("volta_sgemm_128x64_nn") == kernels.kernel_family("ampere_sgemm_128x64_nn") == "sgemm_128x64_nn"
    relu = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, Y>(int, Y)"
    assert kernels.kernel_family(relu) == "vectorized_elementwise_kernel CUDAFunctor_add"


def test_a_matrix_product_is_said_to_run_as_a_matrix_product() -> None:
    device = resolve_device("v100")
    graph = trace(Workload(nn.Linear(1024, 1024), (512, 1024), mode="infer"), target=device)
    (likeliest, *_) = kernels.shipped().of_operator(graph, device)
    assert "gemm" in likeliest
