"""The comparing half of benchmarks/allocator_record.py, on histories in PyTorch's format that were made by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfguard import OpGraph, TensorSpec, Workload, trace
from perfguard.exceptions import PerfGuardError
from perfguard.graph import replay_allocator

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "allocator_record.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    import importlib.util

    spec = importlib.util.spec_from_file_location("allocator_record", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10))
    workload = Workload(model, inputs=(64, 3, 32, 32), targets=TensorSpec((64,), "int64"), loss=F.cross_entropy, retain="nothing")
    return trace(workload)


def entry(action: str, size: int) -> dict[str, Any]:
    """As `torch.cuda.memory._snapshot` has them."""
    return {"action": action, "addr": 0, "size": size, "stream": 0, "frames": []}


def history_of(graph: OpGraph, script: ModuleType, *, workspace: Mapping[int, int] = {}, kept: Mapping[int, int] = {}) -> Any:
    """What the allocator would record if the trace were right, but for workspaces and tensors that it knows nothing of.

    What an operator is the last to use is freed after it, so before the end of the next one.
    """
    entries: list[dict[str, Any]] = []
    marks = []
    allocations = frees = 0
    for index, op in enumerate(graph.ops):
        for storage in graph.storages:
            if storage.death == index - 1 and storage.num_bytes:
                entries += [entry("free_requested", storage.num_bytes), entry("free_completed", storage.num_bytes)]
                frees += 1
        born = [storage.num_bytes for storage in graph.storages if storage.birth == index and storage.num_bytes]
        born += [kept[index]] if index in kept else []
        entries += [entry("alloc", size) for size in born]
        allocations += len(born)
        if index in workspace:
            entries += [entry("segment_alloc", 2**21), entry("alloc", workspace[index])]
            entries += [entry("free_requested", workspace[index]), entry("free_completed", workspace[index])]
            allocations, frees = allocations + 1, frees + 1
        marks.append(script.Mark(op.name, allocations, frees))
    return script.measured_ops(entries, marks, live=int(graph.live_bytes[0]), reserved=0)


def test_a_record_that_agrees_has_no_partings(script: ModuleType, graph: OpGraph) -> None:
    found = script.compare(graph, history_of(graph, script), reserved=replay_allocator(graph).reserved_bytes)
    assert (found.aligned, found.live, found.peak, found.reserved, found.workspace) == (1.0, 0.0, 0.0, 0.0, 0)
    assert found.partings == found.extras == ()


def test_a_workspace_is_beside_the_live_bytes(script: ModuleType, graph: OpGraph) -> None:
    at = next(index for index, op in enumerate(graph.ops) if op.name == "convolution")
    measured = history_of(graph, script, workspace={at: 10**7})
    found = script.compare(graph, measured, reserved=2 * replay_allocator(graph).reserved_bytes)
    assert found.extras == (script.Parting("convolution", 10**7),)
    assert found.workspace == 10**7
    assert found.live == 0.0
    assert found.reserved == pytest.approx(0.5)
    assert measured[at].reserved == 2**21


def test_unknown_tensor_parts_records_where_made(script: ModuleType, graph: OpGraph) -> None:
    at = next(index for index, op in enumerate(graph.ops) if "batch_norm" in op.name)
    found = script.compare(graph, history_of(graph, script, kept={at: 5 * 10**6}), reserved=1)
    assert found.partings == (script.Parting(graph.ops[at].name, 5 * 10**6),)
    assert found.live > 0
    text = script.as_markdown("today", {"mlp": [found]})
    assert f"| `{graph.ops[at].name}` | 1 | +4.77 MiB |" in text


def test_one_sided_operators_do_not_shift_the_others(script: ModuleType, graph: OpGraph) -> None:
    measured = history_of(graph, script)
    other = [measured[0], measured[0]._replace(name="a_kernel_of_cudnn"), *measured[1:]]
    found = script.compare(graph, other, reserved=1)
    assert found.aligned == pytest.approx(len(measured) / len(other))
    assert found.live == 0.0


def test_a_history_that_is_too_short_is_refused(script: ModuleType) -> None:
    with pytest.raises(PerfGuardError, match="The history ends before operator relu"):
        script.measured_ops([entry("alloc", 512)], [script.Mark("relu", 2, 0)], live=0, reserved=0)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_script_says_so() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "There is no CUDA GPU here" in done.stderr
