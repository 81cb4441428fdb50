"""A script that describes its model before it trains, in a graph, a file or a table, is dry-run as without the description."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.graph import OpGraph

A100 = resolve_device("a100")
Describe = Callable[[nn.Module, torch.Tensor, Path], nn.Module]


class Net(nn.Module):
    """It reshapes by a size of its input, which is a tensor in a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8 * 30 * 30, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).relu().view(x.size(0), -1))  # type: ignore[no-any-return]


def _traced(model: nn.Module, x: torch.Tensor, folder: Path) -> nn.Module:
    traced: Any = torch.jit.trace(model, x)
    traced.save(str(folder / "model.pt"))
    torch.jit.save(traced, folder / "model.pt")
    assert traced.state_dict().keys() == model.state_dict().keys()
    return traced  # type: ignore[no-any-return]


def _drawn(model: nn.Module, x: torch.Tensor, folder: Path) -> nn.Module:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(folder)
    writer.add_graph(model, x)
    writer.close()
    return model


def _exported(model: nn.Module, x: torch.Tensor, _: Path) -> nn.Module:
    assert len([*torch.export.export(model, (x,)).graph.nodes]) > 4
    return model


def _as_onnx(model: nn.Module, x: torch.Tensor, folder: Path) -> nn.Module:
    torch.onnx.export(model, (x,), folder / "model.onnx")
    return model


def _counted(model: nn.Module, x: torch.Tensor, _: Path) -> nn.Module:
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_total_flops() > 0
    return model


def _in_hooks(model: nn.Module, x: torch.Tensor, _: Path) -> nn.Module:
    shapes: list[list[int]] = []
    hooks = [part.register_forward_hook(lambda _, __, output: shapes.append([*output.size()])) for part in model.children()]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    assert shapes == [[1, 8, 30, 30], [1, 10]]
    return model


def _graph(describe: Describe, folder: Path) -> OpGraph:
    def objective() -> None:
        model: nn.Module = Net().to("cuda")
        model = describe(model, torch.rand(1, 3, 32, 32, device="cuda"), folder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.rand(16, 3, 32, 32, device="cuda")).mean().backward()
            optimizer.step()

    return capture(objective, A100).graph


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("describe", [_traced, _drawn, _exported, _as_onnx, _counted, _in_hooks])
def test_a_described_model_is_dry_run_as_without_the_description(describe: Describe, tmp_path: Path) -> None:
    described, plain = _graph(describe, tmp_path), _graph(lambda model, *_: model, tmp_path)
    assert [op.name for op in described.ops] == [op.name for op in plain.ops]
    assert described.peak_live_bytes == plain.peak_live_bytes


def test_a_profiler_within_training_leaves_the_step_as_it_is() -> None:
    def objective() -> None:
        model = Net().to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autograd.profiler.emit_nvtx(), torch.profiler.profile(record_shapes=True) as profiler:
            for _ in range(4):
                torch.cuda.nvtx.range_push("step")
                model(torch.rand(16, 3, 32, 32, device="cuda")).mean().backward()
                optimizer.step()
                torch.cuda.nvtx.range_pop()
                profiler.step()

    assert capture(objective, A100).steps == 4
