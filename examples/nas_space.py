"""A search space of cells in the manner of NAS-Bench-201 (Dong and Yang 2020): 5 operators on each of 6 edges, 15,625 cells.

Nodes 0 to 3; every node is the sum of all earlier ones, each through the operator of its edge. A network is a stem, three
stages of equal cells with two residual blocks of stride 2 between them, and a linear classifier.
"""

from __future__ import annotations

import random

import torch
from torch import nn

OPERATORS = ("none", "skip", "conv1x1", "conv3x3", "pool3x3")
EDGES = tuple((start, end) for end in range(1, 4) for start in range(end))

Cell = tuple[str, ...]
"""The operator of each edge, in the order of EDGES."""


def random_cell(rng: random.Random) -> Cell:
    """Any cell whose output depends on its input."""
    while True:
        cell = tuple(rng.choice(OPERATORS) for _ in EDGES)
        if is_connected(cell):
            return cell


def mutated(cell: Cell, rng: random.Random) -> Cell:
    """``cell`` with another operator on one edge."""
    while True:
        at = rng.randrange(len(EDGES))
        other = rng.choice([name for name in OPERATORS if name != cell[at]])
        child = (*cell[:at], other, *cell[at + 1 :])
        if is_connected(child):
            return child


def is_connected(cell: Cell) -> bool:
    """Whether a path of operators leads from the first node to the last."""
    reached = {0}
    for (start, end), name in zip(EDGES, cell, strict=True):
        if start in reached and name != "none":
            reached.add(end)
    return 3 in reached


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """ReLU, convolution and batch norm, as NAS-Bench-201 has them."""
    return nn.Sequential(nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs))


def operator(name: str, width: int) -> nn.Module:
    """One edge."""
    if name == "conv1x1":
        return conv(width, width, 1)
    if name == "conv3x3":
        return conv(width, width, 3)
    return nn.AvgPool2d(3, 1, 1, count_include_pad=False) if name == "pool3x3" else nn.Identity()


class CellBlock(nn.Module):
    """One cell."""

    def __init__(self, cell: Cell, width: int) -> None:
        super().__init__()
        self.plan = [(edge, name) for edge, name in zip(EDGES, cell, strict=True) if name != "none"]
        self.operators = nn.ModuleList(operator(name, width) for _, name in self.plan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nodes: list[torch.Tensor | None] = [x, None, None, None]
        for ((start, end), _), module in zip(self.plan, self.operators, strict=True):
            source, before = nodes[start], nodes[end]
            if source is not None:
                made = module(source)
                nodes[end] = made if before is None else before + made
        out = nodes[3]
        assert out is not None
        return out


class Reduction(nn.Module):
    """The residual block between two stages: half the size, usually twice the width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(inputs, outputs, 3, 2), conv(outputs, outputs, 3))
        self.shortcut = nn.Sequential(nn.AvgPool2d(2, 2), nn.Conv2d(inputs, outputs, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) + self.shortcut(x)
        return out


def network(cell: Cell, *, width: int = 16, depth: int = 5, channels: int = 3, classes: int = 10) -> nn.Sequential:
    """The network of ``cell``: ``depth`` cells a stage, ``width`` channels in the first; the defaults are NAS-Bench-201's."""
    return network_of_stages(cell, (width, 2 * width, 4 * width), depth=depth, channels=channels, classes=classes)


def network_of_stages(
    cell: Cell, widths: tuple[int, int, int], *, depth: int = 5, channels: int = 3, classes: int = 10
) -> nn.Sequential:
    """The same with any channels in each of the three stages."""
    layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0])]
    for stage, here in enumerate(widths):
        layers += [CellBlock(cell, here) for _ in range(depth)]
        if stage < 2:
            layers.append(Reduction(here, widths[stage + 1]))
    last = widths[-1]
    layers += [nn.BatchNorm2d(last), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes)]
    return nn.Sequential(*layers)
