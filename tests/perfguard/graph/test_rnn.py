"""Recurrent layers are one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from perfguard.graph import Phase, trace
from perfguard.workload import TensorSpec, Workload


def total(output: Any) -> torch.Tensor:
    return output[0].float().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_one_kernel_each_way_with_flops_by_hand(layer: Callable[..., nn.RNNBase], gates: int, bidirectional: bool) -> None:
    steps, batch, inputs, hidden = 20, 8, 32, 64
    model = layer(inputs, hidden, num_layers=2, bidirectional=bidirectional)
    graph = trace(Workload(model, (steps, batch, inputs), loss=total))
    one, two = [op for op in graph.ops if op.kind == "rnn"]
    assert (one.phase, two.phase) == (Phase.FORWARD, Phase.BACKWARD)
    directions = 2 if bidirectional else 1
    weights = directions * gates * hidden * ((inputs + hidden) + (directions * hidden + hidden))
    assert one.flops == 2 * steps * batch * weights
    assert two.flops == 2 * one.flops
    assert one.shape == (steps, batch, directions * hidden)
    assert one.attributes["steps"] == two.attributes["steps"] == steps * 2 * directions


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnn_training_keeps_what_backward_needs(layer: Callable[..., nn.RNNBase]) -> None:
    """Inference does not keep it."""
    model = layer(64, 64, num_layers=2)
    training, inference = (
        trace(Workload(model, (100, 32, 64), loss=total if mode == "train" else None, mode=mode)) for mode in ("train", "infer")
    )
    output_bytes = 100 * 32 * 64 * 4
    assert training.peak_live_bytes > inference.peak_live_bytes + 2 * output_bytes
    assert any("reserve space" in text for text in training.unmodelled)


def packed_of(x: torch.Tensor) -> Any:
    """Four sequences of different lengths."""
    return nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 3, 2], device="cpu"), batch_first=True)


class Packed(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return (self.layer(packed_of(x))[0].data,)


def test_packed_sequences_count_only_their_own_steps() -> None:
    graph = trace(Workload(Packed(nn.LSTM(16, 32, batch_first=True)), (4, 5, 16), loss=total))
    assert next(op for op in graph.ops if op.kind == "rnn").shape == (5 + 4 + 3 + 2, 32)


def test_autocast_runs_it_in_half_precision() -> None:
    graph = trace(Workload(nn.LSTM(16, 32), (5, 4, 16), loss=total, precision="amp-fp16"))
    assert [op.dtype for op in graph.ops if op.kind == "rnn"] == ["float16", "float16"]


def really_fused(layer: nn.RNNBase, x: Any) -> bool:
    """Whether oneDNN's kernel runs on this machine's CPU."""
    with torch.profiler.profile() as profile:
        layer(x)
    return any(event.key == "aten::mkldnn_rnn_layer" for event in profile.key_averages())


@pytest.mark.parametrize(
    ("layer", "options", "packed"),
    [
        (nn.LSTM, {}, False), (nn.LSTM, {"bidirectional": True, "num_layers": 2}, False), (nn.LSTM, {"proj_size": 4}, False),
        (nn.LSTM, {"dtype": torch.float64}, False), (nn.LSTM, {}, True), (nn.GRU, {}, False), (nn.RNN, {}, False),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_on_the_cpu_it_is_one_kernel_where_onednn_runs_it(layer: Any, options: dict[str, Any], packed: bool) -> None:
    model = layer(16, 32, batch_first=True, **options)
    sizes = TensorSpec((4, 5, 16), str(options.get("dtype", torch.float32)).removeprefix("torch."))
    graph = trace(Workload(Packed(model) if packed else model, sizes, loss=total), target="cpu")
    fused = any(op.name == "fused_rnn" for op in graph.ops)
    cells = sum(op.kind == "matmul" and op.phase is Phase.FORWARD for op in graph.ops)
    assert fused == (cells < 5)
    x = torch.randn(4, 5, 16, dtype=options.get("dtype"))
    assert fused == really_fused(model, packed_of(x) if packed else x)
