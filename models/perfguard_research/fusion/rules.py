"""A baseline for the network of `fusion`: rules of pairs of operators.

The method of nn-Meter (Zhang et al. 2021, section 3) finds its rules with tests. For each pair of operators from a list, it
builds a tiny network of the two and tests whether the device fuses them. Another test shows whether an operator with several
readers is fused with any of them. The original tests measure times. Here the rules come from the compiler's own record
(`fusion_labels`), so they have no measurement error. The list of operators is that of the original tests. Pairs of other
operators are not fused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from perfguard.graph import OpGraph, trace
from perfguard.workload import Workload
from perfguard_research.fusion.labels import LabelledGraph, inductor_kernels
from perfguard_research.fusion.labels_onnx import onnxruntime_case

_CHANNELS = 16
_PROBED: Mapping[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1),
    "dwconv": lambda: nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, groups=_CHANNELS),
    "bn": lambda: nn.BatchNorm2d(_CHANNELS),
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "sigmoid": nn.Sigmoid,
    "hswish": nn.Hardswish,
    "add": lambda: _WithAnother(torch.add),
    "mul": lambda: _WithAnother(torch.mul),
    "concat": lambda: _WithAnother(lambda x, y: torch.cat([x, y], dim=2)),
    "maxpool": lambda: nn.MaxPool2d(3, 1, 1),
    "avgpool": lambda: nn.AvgPool2d(3, 1, 1),
    "global avgpool": lambda: nn.AdaptiveAvgPool2d(1),
    "fc": lambda: _OnFlat(nn.Linear(_CHANNELS, _CHANNELS)),
}


@dataclass(frozen=True, slots=True)
class PairRules:
    """Fusion of pairs of operators, by their names without the mark of running in place."""

    fused: frozenset[tuple[str, str]]
    several_readers: bool
    """Whether an operator that several others read is fused with any of them."""

    def labels(self, graph: OpGraph) -> npt.NDArray[np.int8]:
        """1 for each edge that the rules fuse, else 0. Shape: (num_edges,)."""
        source, sink = graph.edges
        readers = np.bincount(source, minlength=len(graph.ops))
        pairs = [(_name(graph, a), _name(graph, b)) for a, b in zip(source, sink, strict=True)]
        return np.array(
            [pair in self.fused and (self.several_readers or readers[a] == 1) for a, pair in zip(source, pairs, strict=True)],
            dtype=np.int8,
        )


def probed_rules(compiler: str) -> PairRules:
    """nn-Meter's way, for one of `fusion_labels.COMPILERS`: a network for each pair, and one with two readers."""
    fused: set[tuple[str, str]] = set()
    for first in _PROBED.values():
        graph, labels = _asked(_Pairs(first, list(_PROBED.values())), len(_PROBED), compiler)
        for (a, b), label in zip(graph.edges.T, labels, strict=True):
            if label == 1:
                fused.add((_name(graph, a), _name(graph, b)))
    graph, labels = _asked(_TwoReaders(), 1, compiler)
    several = any(
        label == 1 for (a, _), label in zip(graph.edges.T, labels, strict=True) if _name(graph, a) == "native_batch_norm"
    )
    return PairRules(frozenset(fused), several)


def _asked(model: nn.Module, inputs: int, compiler: str) -> tuple[OpGraph, npt.NDArray[np.int8]]:
    """Inputs differ in size, so that nothing fuses across pairs."""
    model = model.to("meta").eval()
    shapes = tuple((2, _CHANNELS, 8 + at, 16) for at in range(inputs))
    if compiler == "onnxruntime":
        graph, kernels = onnxruntime_case(model, shapes)
    else:
        target: Any = compiler.partition("-")[2]
        graph = trace(Workload(model, shapes, mode="infer"), target=target)
        kernels = inductor_kernels(model, shapes, graph, target)
    return graph, LabelledGraph("", "", "", graph, kernels).edge_labels()


class _Pairs(nn.Module):
    """``first`` and then each of ``seconds``, each pair on an input of its own."""

    def __init__(self, first: Callable[[], nn.Module], seconds: Sequence[Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.Sequential(first(), second()) for second in seconds)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [pair(x) for pair, x in zip(self.pairs, inputs, strict=True)]


class _TwoReaders(nn.Module):
    """Batch norm, which an activation and a convolution read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(_CHANNELS), nn.Conv2d(_CHANNELS, _CHANNELS, 1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        made = self.norm(x)
        return [torch.relu(made), self.conv(made)]


class _WithAnother(nn.Module):
    """An operator of two tensors; the other one is a parameter."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.other = nn.Parameter(torch.zeros(1, _CHANNELS, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.other.expand_as(x))


class _OnFlat(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x.reshape(-1, _CHANNELS))
        return out.reshape(x.shape)


def most_frequent_rules(rows: Iterable[LabelledGraph]) -> PairRules:
    """Rules learnt from whole networks instead of tests: a pair is fused if it mostly was."""
    seen: Counter[tuple[str, str]] = Counter()
    fused: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for (a, b), label in zip(row.graph.edges.T, row.edge_labels(), strict=True):
            if label >= 0:
                pair = (_name(row.graph, a), _name(row.graph, b))
                seen[pair] += 1
                fused[pair] += int(label)
    return PairRules(frozenset(pair for pair in seen if 2 * fused[pair] > seen[pair]), several_readers=True)


def _name(graph: OpGraph, index: int) -> str:
    return graph.ops[index].name.rstrip("_")
