"""Recurrent layers are one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from perfguard.graph import Phase, trace
from perfguard.workload import Workload


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


def test_packed_sequences_count_only_their_own_steps() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 32, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            lengths = torch.tensor([5, 4, 3, 2], device="cpu")
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return (self.lstm(packed)[0].data,)

    graph = trace(Workload(Packed(), (4, 5, 16), loss=total))
    assert next(op for op in graph.ops if op.kind == "rnn").shape == (5 + 4 + 3 + 2, 32)


def test_autocast_runs_it_in_half_precision() -> None:
    graph = trace(Workload(nn.LSTM(16, 32), (5, 4, 16), loss=total, precision="amp-fp16"))
    assert [op.dtype for op in graph.ops if op.kind == "rnn"] == ["float16", "float16"]


def test_on_the_cpu_it_is_a_cell_a_step() -> None:
    graph = trace(Workload(nn.LSTM(16, 32), (5, 4, 16), loss=total), target="cpu")
    assert not any(op.name == "fused_rnn" for op in graph.ops)
    assert sum(op.kind == "matmul" and op.phase is Phase.FORWARD for op in graph.ops) >= 5
