"""What compilers fuse: read from Inductor itself, and learnt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from perfguard import Workload, trace
from perfguard.graph import OpGraph
from perfguard_research.fusion.labels import LabelledGraph, inductor_kernels, read_labels, to_json
from perfguard_research.fusion.network import kernels_of
from perfguard_research.fusion.train import fitted, score_of
from tests.fusible import SHAPE, Residual, network


def names_of(graph: OpGraph, found: tuple[tuple[int, ...], ...]) -> list[tuple[str, ...]]:
    return sorted(tuple(graph.ops[index].name for index in kernel) for kernel in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where Inductor is imported
def test_inductor_labels_exclude_the_convolution() -> None:
    """For a GPU, Inductor fuses batch norm, activation and sum, but not the convolution."""
    graph = trace(Workload(network(1), SHAPE, mode="infer"), target="cuda")
    found = inductor_kernels(network(1), SHAPE, graph, "cuda")
    assert names_of(graph, found) == [("convolution",), ("native_batch_norm", "relu", "add")]
    labels = LabelledGraph("", "", "", graph, found).edge_labels()
    fused = {(graph.ops[a].name, graph.ops[b].name) for (a, b), label in zip(graph.edges.T, labels, strict=True) if label == 1}
    assert fused == {("native_batch_norm", "relu"), ("relu", "add")}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_labels_agree_with_generated_kernels() -> None:
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


def labelled(depth: int, kernels_of_three: bool = True) -> LabelledGraph:
    """A chain of residual blocks in which everything but convolutions is fused, written by hand."""
    graph = trace(Workload(network(depth), SHAPE, mode="infer"), target="cpu")
    groups = [group for start in range(0, 4 * depth, 4) for group in ((start,), (start + 1, start + 2, start + 3))]
    return LabelledGraph("inductor-cpu", f"family {depth}", f"chain {depth}", graph, tuple(groups))


def test_fusion_network_generalizes_to_longer_networks() -> None:
    model = fitted([labelled(depth) for depth in (1, 2, 3)] * 4, epochs=60)
    row = labelled(6)
    score = score_of(model.chances(row.graph, "inductor-cpu"), row.edge_labels())
    assert (score["precision"], score["recall"], score["accuracy"]) == (1.0, 1.0, 1.0)


def test_labels_survive_a_truncated_line(tmp_path: Path) -> None:
    row = labelled(2)
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps(to_json(row)) + "\n" + json.dumps(to_json(row))[:200], encoding="utf-8")
    (read,) = read_labels(path)
    assert read.kernels == row.kernels
    assert read.graph.content_hash == row.graph.content_hash
    assert np.array_equal(read.edge_labels(), row.edge_labels())


def test_kernel_waiting_for_itself_is_not_made() -> None:
    """The second block adds the first one's sum to what its convolution makes of it."""
    graph = trace(Workload(network(2), SHAPE, mode="infer"), target="cpu")
    columns = {(a, b): at for at, (a, b) in enumerate(graph.edges.T.tolist())}
    relu, sums = 2, (3, 7)
    assert (graph.ops[relu].name, {graph.ops[at].name for at in sums}) == ("relu", {"add"})
    found = kernels_of(graph, np.array([columns[sums], columns[relu, sums[0]]]))
    assert [kernel for kernel in found if len(kernel) > 1] == [[relu, sums[0]]]
