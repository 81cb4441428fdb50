"""Libraries ask PyTorch about CUDA as they are imported. A build for the CPU lacks what they name, and a dry run has it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.exceptions import CaptureError

A100, CPU = resolve_device("a100"), resolve_device("cpu")
LIBRARY = """
import torch
if torch.cuda.is_available():
    current_stream = torch._C._cuda_getCurrentRawStream  # as bitsandbytes and Triton do
    device = torch._C._cuda_getDevice()
    stream = current_stream(device)
    major = int(torch.version.cuda.split(".")[0])
    is_recent = any(int(name.removeprefix("sm_")) >= 80 for name in torch.cuda.get_arch_list())
    cudnn = torch.backends.cudnn.version() >= 8000 and torch.backends.cudnn.is_available() and torch.backends.cuda.is_built()
    warp = torch.cuda.get_device_properties(0).warp_size
    used = torch.cuda.utilization() + torch.cuda.memory_usage()
    assert torch.cuda.is_initialized()
"""


def _step() -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(2, 4).cuda()).sum().backward()
        optimizer.step()


def test_a_library_that_names_functions_of_cuda_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asking_cuda.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)

    def objective() -> None:
        import asking_cuda  # type: ignore[import-not-found]

        assert asking_cuda.stream == 0
        assert asking_cuda.major >= 11
        assert asking_cuda.is_recent
        assert asking_cuda.cudnn
        assert asking_cuda.warp == 32
        _step()

    try:
        assert capture(objective, A100).steps == 3
    finally:
        sys.modules.pop("asking_cuda", None)


def test_what_a_build_lacks_is_lacking_again_after_a_dry_run() -> None:
    before = hasattr(torch._C, "_cuda_getCurrentRawStream"), torch.version.cuda, torch.backends.cudnn.version()
    capture(_step, A100)
    assert (hasattr(torch._C, "_cuda_getCurrentRawStream"), torch.version.cuda, torch.backends.cudnn.version()) == before
    with pytest.raises(AttributeError, match="no attribute '_no_such_function'"):
        _ = torch._C._no_such_function  # type: ignore[attr-defined]


def test_graphs_of_cuda_run_what_they_capture() -> None:
    def objective(graphed: bool) -> None:
        model: Any = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(16, 64, device="cuda")
        if graphed:
            model = torch.cuda.make_graphed_callables(model, (x,))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()), torch.no_grad():
                model(x)
            graph.replay()
        for _ in range(4):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

    graphed, plain = (capture(partial(objective, is_graphed), A100).graph for is_graphed in (True, False))
    assert graphed.ops == plain.ops


def test_steps_that_a_graph_replays_are_not_known() -> None:
    def objective() -> None:
        model = nn.Linear(64, 10).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(16, 64, device="cuda")
        graph = torch.cuda.CUDAGraph()

        def step() -> None:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

        for _ in range(3):
            step()
        with torch.cuda.graph(graph):
            step()
        for _ in range(50):
            graph.replay()

    assert capture(objective, A100).steps is None


def test_flex_attention_is_refused_with_a_sentence() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def objective() -> None:
        qkv = nn.Linear(64, 192, device="cuda")
        q, k, v = qkv(torch.randn(1, 128, 64, device="cuda")).view(1, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
        flex_attention(q, k, v).mean().backward()

    with pytest.raises(CaptureError, match=r"^flex_attention cannot be dry-run: .* take another attention"):
        capture(objective, A100)
