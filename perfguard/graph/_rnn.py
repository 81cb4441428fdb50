"""Recurrent layers as cuDNN runs them, and oneDNN some of them: one kernel for all time steps and layers.

On meta tensors ``torch.lstm`` and its kin decompose into one cell a time step. Two operators of our own stand for cuDNN's
forward and backward, with the outputs of ``aten::_cudnn_rnn`` and the reserve space that training keeps for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

FUSED_RNNS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
# Values that cuDNN keeps for each unit, time step and sample, beside the layer's output: the gates, and of an LSTM the cell's
# state and its tanh, of a GRU the candidate before its gate. An estimate: cuDNN does not document its layout.
_RESERVED = {"lstm": 6, "gru": 4, "rnn_tanh": 1, "rnn_relu": 1}

_library = torch.library.Library("perfguard", "FRAGMENT")
_library.define(
    "fused_rnn(Tensor input, Tensor hx, Tensor? cx, Tensor[] weights, int gates, int reserved, int num_layers, "
    "int num_directions, bool train) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "fused_rnn_backward(Tensor grad_output, Tensor input, Tensor output, Tensor hx, Tensor? cx, Tensor[] weights, "
    "Tensor reserve, int gates, int num_layers, int num_directions) -> Tensor[]"
)


@torch.library.impl(_library, "fused_rnn", "Meta")
def _forward(
    input: torch.Tensor,  # shape: (*steps, input size), packed or not
    hx: torch.Tensor,  # shape: (layers * directions, batch, output size)
    cx: torch.Tensor | None,  # shape: (layers * directions, batch, hidden size); of an LSTM only
    weights: Sequence[torch.Tensor],
    gates: int,
    reserved: int,
    num_layers: int,
    num_directions: int,
    train: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    output = input.new_empty(*input.shape[:-1], hx.shape[-1] * num_directions)
    positions = input.shape[:-1].numel()
    hidden = weights[0].shape[0] // gates
    kept = reserved * hidden * num_directions * num_layers + hx.shape[-1] * num_directions * (num_layers - 1)
    reserve = input.new_empty(positions * kept if train else 0)
    return output, torch.empty_like(hx), input.new_empty(0) if cx is None else torch.empty_like(cx), reserve


@torch.library.impl(_library, "fused_rnn_backward", "Meta")
def _backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    output: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    reserve: torch.Tensor,
    gates: int,
    num_layers: int,
    num_directions: int,
) -> list[torch.Tensor]:
    states = [hx] if cx is None else [hx, cx]
    return [torch.empty_like(tensor) for tensor in (input, *states, *weights)]


class _FusedRnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: str, num_layers: int, num_directions: int, train: bool,
        input: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor | None, *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        gates = _GATES[kind]
        output, hy, cy, reserve = torch.ops.perfguard.fused_rnn(
            input, hx, cx, weights, gates, _RESERVED[kind], num_layers, num_directions, train
        )
        ctx.save_for_backward(input, output, hx, cx, reserve, *weights)
        ctx.geometry = gates, num_layers, num_directions
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        input, output, hx, cx, reserve, *weights = ctx.saved_tensors
        grad_input, grad_hx, *rest = torch.ops.perfguard.fused_rnn_backward(
            grad_output, input, output, hx, cx, weights, reserve, *ctx.geometry
        )
        if cx is None:
            return None, None, None, None, grad_input, grad_hx, None, *rest
        return None, None, None, None, grad_input, grad_hx, *rest


def is_fused_on_cpu(kind: str, input: torch.Tensor, states: Any, *_: Any) -> bool:
    """Whether oneDNN runs the layer: an LSTM in float32, padded and without projections (PyTorch's RNN.cpp, `use_mkldnn`)."""
    is_padded = not isinstance(states, torch.Tensor)
    return kind == "lstm" and is_padded and input.dtype is torch.float32 and states[0].shape == states[1].shape


def fused_rnn(kind: str, input: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``, in either of their forms (padded, packed), as cuDNN runs it."""
    packed = isinstance(args[0], torch.Tensor) and isinstance(args[2], (list, tuple))
    states, weights, _biases, num_layers, _dropout, train, bidirectional = args[1:8] if packed else args[:7]
    hx, cx = states if kind == "lstm" else (states, None)
    output, hy, cy = _FusedRnn.apply(kind, num_layers, 2 if bidirectional else 1, train, input, hx, cx, *weights)  # type: ignore[no-untyped-call]
    return (output, hy, cy) if kind == "lstm" else (output, hy)


def fused_rnn_flops(input: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """FLOPs of a fused recurrent layer. Each weight is used once at each position; a multiply-add counts as two."""
    positions = input.shape[:-1].numel()
    return 2 * positions * sum(weight.numel() for weight in weights if weight.dim() == 2)
