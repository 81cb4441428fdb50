"""The language model of Stanford's course CS336, which no package has.

B: samples, T: tokens, D: width, H: heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Config = Mapping[str, Any]


class RmsNorm(nn.Module):
    """RMS norm in float32, operator by operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * wide).to(x.dtype)


class BasicsBlock(nn.Module):
    """Attention written out, and SwiGLU (stanford-cs336/assignment2-systems: cs336-basics/cs336_basics/model.py)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = RmsNorm(width)
        self.norm_2 = RmsNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # (B, T, D); (T, D / H / 2) twice
        normed = self.norm_1(x)
        q, k, v = (_split(project(normed), self.heads) for project in (self.q, self.k, self.v))
        x = x + self.out(_joined(_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v)))
        normed = self.norm_2(x)
        gate = self.gate(normed)
        out: torch.Tensor = x + self.down(gate * torch.sigmoid(gate) * self.up(normed))
        return out


class BasicsTransformerLM(nn.Module):
    """Pre-norm, RMSNorm, rotary positions, SwiGLU; embeddings not tied."""

    angles: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["d_model"]
        heads = config["num_heads"]
        self.tokens = nn.Embedding(config["vocab_size"], width)
        self.blocks = nn.ModuleList(BasicsBlock(width, heads, config["d_ff"]) for _ in range(config["num_layers"]))
        self.norm = RmsNorm(width)
        self.head = nn.Linear(width, config["vocab_size"], bias=False)
        self.register_buffer("angles", torch.empty(2, config["context_length"], width // heads // 2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) → (B, T, words)
        x = self.tokens(tokens)
        cos, sin = self.angles[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:  # (B, T, D) → (B, H, T, D / H)
    split: torch.Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split


def _joined(x: torch.Tensor) -> torch.Tensor:  # (B, H, T, D / H) → (B, T, D)
    return x.transpose(1, 2).flatten(2)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, other = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((cos * one - sin * other, sin * one + cos * other), dim=-1).flatten(-2)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(q.shape[-2], device=q.device)
    scores = torch.where(steps[:, None] >= steps, q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), float("-inf"))
    out: torch.Tensor = _softmax(scores) @ v
    return out


def _softmax(x: torch.Tensor) -> torch.Tensor:
    moved = x - x.max(dim=-1, keepdim=True)[0]  # its name keeps it until the end, as in the course's code
    powers = torch.exp(moved)
    return powers / powers.sum(dim=-1, keepdim=True)
