"""The recorder: what autograd does in place, and what a kernel takes while it runs, are as without a recorder."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

from perfguard.graph import OpGraph, Phase, trace
from perfguard.graph.recorder import Recorder
from perfguard.workload import TensorSpec, Workload
from tests.perfguard.graph.parts import Apply, total

ROWS = torch.tensor([3, 1, 1, 0, 2, 5])
OF_SUMS_AND_SELECTIONS = ("add", "index_put", "scatter", "scatter_add")


def swapped(x: torch.Tensor) -> torch.Tensor:
    """The gradients have swapped dimensions, as those of the heads of an attention."""
    heads = x.view(6, 2, 3).transpose(0, 1)
    return heads.sin() + heads.exp()


def held(x: torch.Tensor) -> torch.Tensor:
    """The gradient that is added to is one that a hook has kept."""
    x, kept = x.exp(), list[torch.Tensor]()
    first, second = x.sin(), x + 1
    second.register_hook(kept.append)
    return first + second * 2


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # PyTorch 2.11, once
@pytest.mark.parametrize(
    "use",
    [
        lambda x: x @ x.T + x @ x.T,
        lambda x: x + x.relu().exp() * x,
        lambda x: x * 4 + (x + x.exp()) * 2,
        lambda x: x.sum() + x.sum() + x.mean(),  # the gradients are expanded numbers
        lambda x: x[ROWS],
        lambda x: x.gather(1, ROWS[:, None].to(x.device).expand(6, 2)),
        swapped,
        held,
        lambda x: x.max(1)[0],
        lambda x: x.cummax(1)[0],
        lambda x: x.sort(1)[0],
        lambda x: x.scatter(1, ROWS[:, None].to(x.device), 0.0),  # its gradient is a changed copy in any case
    ],
    ids=["matmul", "residual", "shared", "expanded", "index", "gather", "swapped", "held", "max", "cummax", "sort", "scatter"],
)
def test_a_backward_pass_writes_where_it_would_without_a_recorder(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    # PyTorch sums gradients in place, and writes those of selections into fresh zeros. It makes copies where it sees a mode.
    layer = nn.Linear(6, 6)
    loss = use(layer(torch.ones(6, 6))).sum()
    with profile() as real:
        loss.backward()
    called = [event.name.removeprefix("aten::").replace("_index_put_impl", "index_put") for event in real.events()]
    graph = trace(Workload(nn.Sequential(layer, Apply(use)), (6, 6), loss=total))
    traced = [op.name for op in graph.ops if op.phase is Phase.BACKWARD]
    for name in (*OF_SUMS_AND_SELECTIONS, *(f"{name}_" for name in OF_SUMS_AND_SELECTIONS)):
        assert traced.count(name) == called.count(name), name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_recording_can_begin_within_an_evaluation(mode: Callable[[], AbstractContextManager[None]]) -> None:
    # A dry run at the first forward pass may begin in Lightning's sanity check.
    recorder = Recorder([], is_cpu=False)
    with mode(), recorder:
        recorder.calibrate()
    assert not recorder.ops


def peak(model: nn.Module, inputs: object, target: Literal["cuda", "cpu"]) -> int:
    return trace(Workload(model, inputs, loss=total), target=target).peak_live_bytes


def test_softmax_takes_a_product_in_its_backward_pass_on_a_gpu() -> None:
    # Liger-Kernel reads six tensors on an RTX 3090: five are there on any device.
    model, size = nn.Sequential(nn.Linear(1, 1024, bias=False), nn.Softmax(-1), Apply(lambda x: x * x)), 512 * 1024 * 4
    assert peak(model, (512, 1), "cuda") - peak(model, (512, 1), "cpu") == size


@pytest.mark.parametrize(("tokens", "rows"), [(3072, 0), (4096, 409 + 1000)])
def test_many_indices_of_an_embedding_are_summed_in_parts_on_a_gpu(tokens: int, rows: int) -> None:
    # EmbeddingBackwardKernel.cu: tokens / 10 rows, and one for each word that there may be, in float32.
    with torch.device("meta"):
        model = nn.Embedding(1000, 64, dtype=torch.bfloat16)
    graphs = [trace(Workload(model, TensorSpec((tokens,), "int64"), loss=total), target=target) for target in ("cuda", "cpu")]
    at = [[op.name for op in graph.ops].index("embedding_dense_backward") for graph in graphs]
    on_gpu, on_cpu = (graph.bytes_by_kind(index) for graph, index in zip(graphs, at, strict=True))
    assert sum(on_gpu.values()) - sum(on_cpu.values()) == rows * 64 * 4


def profiled_peak(loss: Callable[..., torch.Tensor], reduction: str) -> int:
    """The largest number of bytes that a ``loss`` of 1,000 elements holds on the CPU, as the profiler of PyTorch sees it."""
    x, target = torch.full((1000,), 0.5), torch.full((1000,), 0.25)
    loss(x, target, reduction=reduction)
    with profile(profile_memory=True) as profiled:
        kept = loss(x, target, reduction=reduction)
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    del kept
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
    ],
)  # fmt: skip
def test_a_loss_takes_what_the_profiler_sees_while_it_runs(loss: Callable[..., torch.Tensor], reduction: str) -> None:
    with torch.device("meta"):
        x, target = torch.empty(1000), torch.empty(1000)
    with Recorder([], is_cpu=False) as recorder:
        kept = loss(x, target, reduction=reduction)
    graph = OpGraph(tuple(recorder.ops), recorder.storages(), mode="infer", precision="fp32", layout="nchw")
    del kept
    beside_inputs = graph.peak_live_bytes - x.nbytes - target.nbytes
    assert beside_inputs == pytest.approx(profiled_peak(loss, reduction), abs=64)  # numbers that are freed at once
