"""What is computed for widths is what a trace of the network says, byte for byte; what cannot be computed is traced."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfguard import OpGraph, Workload, trace
from perfguard.graph import ParametricGraph

INPUTS = (2, 3, 12, 12)
Widths = tuple[int, ...]


def tracer(build: Callable[..., nn.Module], inputs: tuple[int, ...] = INPUTS) -> Callable[[Widths], OpGraph]:
    def traced(widths: Widths) -> OpGraph:
        with torch.device("meta"):
            model = build(*widths)
        return trace(Workload(model, inputs, mode="infer"), target="cpu")

    return traced


def graphs_at(elastic: ParametricGraph, points: Sequence[Widths]) -> tuple[list[OpGraph], int]:
    """The graphs in the order of ``points``, and how many of them were computed."""
    computed, rows, found = elastic.at(np.array(points, dtype=np.int64), lambda graph: graph)
    if computed is not None:
        found |= dict(zip(rows.tolist(), computed, strict=True))
    return [found[at] for at in range(len(points))], len(rows)


def assert_equal_to_traces(
    build: Callable[..., nn.Module], values: Sequence[Sequence[int]], *, number: int = 12, inputs: tuple[int, ...] = INPUTS
) -> tuple[ParametricGraph, int]:
    """Of ``number`` random candidates; returns how many of them were computed."""
    traced = tracer(build, inputs)
    elastic = ParametricGraph(values, traced)
    rng = random.Random(7)
    points = [tuple(rng.choice(allowed) for allowed in values) for _ in range(number)]
    graphs, computed = graphs_at(elastic, points)
    for point, graph in zip(points, graphs, strict=True):
        assert graph.content_hash == traced(point).content_hash, point
    return elastic, computed


class Stack(nn.Module):
    """Any function of x as a network."""

    def __init__(self, parts: Mapping[str, nn.Module], run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(self, x)


def chain(a: int, b: int, c: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, a, 3), nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, b, 3, stride=2), nn.GELU(),
        nn.Conv2d(b, c, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * c, 10),
    )  # fmt: skip


def inverted(stem: int, hidden: int, ratio: int) -> nn.Module:
    """Depthwise convolutions, squeeze and excitation, a product of two widths."""
    inner = hidden * ratio
    parts = {
        "stem": nn.Conv2d(3, stem, 3), "up": nn.Conv2d(stem, inner, 1), "down": nn.Conv2d(inner, stem, 1),
        "deep": nn.Conv2d(inner, inner, 3, padding=1, groups=inner),
        "squeeze": nn.Conv2d(inner, 4, 1), "excite": nn.Conv2d(4, inner, 1),
    }  # fmt: skip

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = F.relu6(self.deep(F.relu6(self.up(x))))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        out: torch.Tensor = x + self.down(y)
        return out

    return Stack(parts, run)


def branches(a: int, b: int, c: int, d: int) -> nn.Module:
    """Concatenation: sizes that are sums of widths."""
    parts = {
        "a": nn.Conv2d(3, a, 1), "b": nn.Conv2d(3, b, 3, padding=1), "c": nn.Conv2d(3, c, 5, padding=2),
        "d": nn.Conv2d(a + b + c, d, 1),
    }  # fmt: skip
    return Stack(parts, lambda self, x: self.d(torch.cat([self.a(x), self.b(x), self.c(x)], 1)))


def transformer(heads: int, hidden: int) -> nn.Module:
    width = 8 * heads
    return nn.Sequential(
        nn.Conv2d(3, width, 4, stride=4), nn.Flatten(2), nn.Linear(9, 9),
        Stack({"norm": nn.LayerNorm(9)}, lambda self, x: self.norm(x).transpose(1, 2)),
        nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True, dropout=0.0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "values"),
    [
        pytest.param(chain, [range(5, 41), range(4, 65), range(8, 129)], id="chain"),
        pytest.param(chain, [(16, 32, 48), (16, 32, 64, 96), (128, 192, 256)], id="few choices"),
        pytest.param(inverted, [range(8, 33, 8), range(6, 40), (1, 2, 3, 4, 6)], id="depthwise, products of widths"),
        pytest.param(branches, [range(1, 20)] * 3 + [range(8, 40)], id="concatenation"),
        pytest.param(transformer, [range(2, 7), range(16, 65)], id="transformer"),
    ],
)
def test_elastic_computes_most_candidates_like_traces(build: Callable[..., nn.Module], values: Sequence[Sequence[int]]) -> None:
    elastic, computed = assert_equal_to_traces(build, values, number=30)
    assert elastic.why_traced is None
    assert computed >= 15
    assert elastic.num_traces <= 90


def shortcut(first: int, second: int, third: int) -> nn.Module:
    """A convolution on the way around where channels differ, as in ResNet."""

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.body = nn.Conv2d(inputs, outputs, 3, padding=1)
            self.around = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.body(x) + self.around(x))

    return nn.Sequential(nn.Conv2d(3, 16, 3), Block(16, first), Block(first, second), Block(second, third))


def test_missing_shortcut_at_equal_channels_is_traced() -> None:
    values = [range(8, 33)] * 3
    elastic, computed = assert_equal_to_traces(shortcut, values, number=30)
    assert elastic.why_traced is None
    assert computed > 15
    traced = tracer(shortcut)
    for point in ((16, 20, 24), (20, 20, 24), (12, 24, 24), (16, 16, 16), (32, 8, 8)):  # 16 is the width of the stem
        (graph,), _ = graphs_at(elastic, [point])
        assert graph.content_hash == traced(point).content_hash


def padded_to_eight(width: int, other: int) -> nn.Module:
    parts = {"first": nn.Conv2d(3, width, 1), "second": nn.Conv2d(-(-width // 8) * 8, other, 1)}
    return Stack(parts, lambda self, x: self.second(F.pad(self.first(x), (0, 0, 0, 0, 0, -width % 8))))


def test_elastic_computes_padding_of_multiples() -> None:
    """Padding of other sizes is traced."""
    _, computed = assert_equal_to_traces(padded_to_eight, [range(8, 129, 8), range(4, 65)])
    assert computed > 6
    assert_equal_to_traces(padded_to_eight, [range(8, 65), range(4, 65)])


def deeper_if_wide(width: int, other: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3), nn.ReLU()]
    if width > other:
        layers.append(nn.Conv2d(width, width, 1))
    return nn.Sequential(*layers, nn.Conv2d(width, other, 1))


def left_out(width: int, other: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, other, 3)]
    if width:
        layers += [nn.Conv2d(other, width, 1), nn.ReLU(), nn.Conv2d(width, other, 1)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("build", [deeper_if_wide, left_out])
def test_elastic_never_misses_other_operators(build: Callable[..., nn.Module]) -> None:
    values = [range(0 if build is left_out else 4, 40), range(4, 40)]
    assert_equal_to_traces(build, values, number=40)


def test_a_space_of_a_few_candidates_is_traced() -> None:
    elastic, computed = assert_equal_to_traces(chain, [(16, 32), (16, 32, 64), (128,)], number=20)
    assert (computed, elastic.why_traced) == (0, "there are only 6 candidates")
    assert elastic.num_traces <= 6


def test_elastic_traces_rounded_widths_with_reason() -> None:
    def build(width: int, other: int) -> nn.Module:
        rounded_width = max(8, round(width * 0.75 / 8) * 8)
        return nn.Sequential(nn.Conv2d(3, rounded_width, 3), nn.ReLU(), nn.Conv2d(rounded_width, other, 1))

    elastic, computed = assert_equal_to_traces(build, [range(8, 129), range(8, 65)], number=6)
    assert computed == 0
    assert "no polynomials" in str(elastic.why_traced)


def deeper_at_twenty(width: int, other: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3)]
    if width == 20:
        layers.append(nn.Sigmoid())
    return nn.Sequential(*layers, nn.Conv2d(width, other, 1))


def test_unexplained_trace_ends_the_computing() -> None:
    traced = tracer(deeper_at_twenty)
    elastic = ParametricGraph([range(8, 41), range(50, 91)], traced)
    graphs_at(elastic, [(36, other) for other in range(50, 91)])  # 36 and 20 leave the same by 16
    elastic._graph((20, 61))
    assert "no branch condition identifies them" in str(elastic.why_traced)
    points = [(20, 60), (21, 77), (20, 90)]
    graphs, computed = graphs_at(elastic, points)
    assert computed == 0
    assert [graph.content_hash for graph in graphs] == [traced(point).content_hash for point in points]


def random_space(rng: random.Random) -> tuple[Callable[..., nn.Module], list[Sequence[int]]]:
    """A stack of random blocks of three to four widths, some of which look at how the widths compare."""
    number = rng.randint(2, 4)
    choices: tuple[Sequence[int], ...] = (range(4, 40), range(8, 65, 8), (8, 16, 24, 48), range(3, 20))
    values = [rng.choice(choices) for _ in range(number)]
    plan = [rng.choice(("plain", "depthwise", "branch", "around", "residual", "halved", "pooled")) for _ in range(number)]
    kernel = rng.choice((1, 3))

    class Block(nn.Module):
        def __init__(self, what: str, inputs: int, outputs: int) -> None:
            super().__init__()
            self.what = what
            self.main = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
            if what == "depthwise":
                self.more: nn.Module = nn.Conv2d(outputs, outputs, 3, padding=1, groups=outputs)
            elif what == "branch":
                self.more = nn.Conv2d(inputs + outputs, outputs, 1)
            elif what == "around":
                self.more = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)
            elif what == "halved":
                self.more = nn.Sequential(nn.Conv2d(outputs, outputs // 2 + 1, 1), nn.Conv2d(outputs // 2 + 1, outputs, 1))
            elif what == "residual":
                self.more = nn.Sequential(nn.BatchNorm2d(outputs), nn.SiLU())
            else:
                self.more = nn.AvgPool2d(2, ceil_mode=True) if what == "pooled" else nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.main(x)
            if self.what == "branch":
                return self.more(torch.cat([x, out], 1))  # type: ignore[no-any-return]
            if self.what == "around":
                return out + self.more(x)  # type: ignore[no-any-return]
            return out + self.more(out) if self.what in ("residual", "halved") else self.more(out)  # type: ignore[no-any-return]

    def build(*widths: int) -> nn.Module:
        blocks, channels = [], 3
        for what, width in zip(plan, widths, strict=True):
            blocks.append(Block(what, channels, width))
            channels = width
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 7))

    return build, values


@pytest.mark.parametrize("seed", range(16))
def test_random_spaces_give_the_graphs_of_their_traces(seed: int) -> None:
    build, values = random_space(random.Random(seed))
    assert_equal_to_traces(build, values, number=10)


def test_widths_of_two_values_each_are_computed() -> None:
    def deep(*widths: int) -> nn.Module:
        return nn.Sequential(*(nn.Conv2d(a, b, 3, padding=1) for a, b in zip((3, *widths), widths, strict=False)))

    elastic, computed = assert_equal_to_traces(deep, [(16, 32)] * 6)
    assert elastic.why_traced is None
    assert computed > 0


def test_elastic_remembers_retraced_candidate_once() -> None:
    known: dict[Widths, OpGraph] = {}

    def build(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Linear(12, a), *([nn.ReLU()] if a == b else []), nn.Linear(a, b))

    def traced(widths: Widths) -> OpGraph:
        if widths not in known:
            known[widths] = tracer(build)(widths)
        return known[widths]

    elastic = ParametricGraph([range(8, 200)] * 2, traced)
    equal = [(width, width) for width in range(8, 108)]
    for point in equal * 2:
        graphs_at(elastic, [point])
    assert elastic.why_traced is None
    assert len(elastic._different) == len(set(elastic._different)) >= len(equal)


def test_candidates_that_were_computed_are_not_traced() -> None:
    elastic = ParametricGraph([range(5, 41), range(4, 65), range(8, 129)], tracer(chain))
    rng = random.Random(0)
    points = [(rng.randint(5, 40), rng.randint(4, 64), rng.randint(8, 128)) for _ in range(300)]
    graphs_at(elastic, points)
    before = elastic.num_traces
    assert before <= 50
    _, computed = graphs_at(elastic, points)
    assert (computed, elastic.num_traces) == (300, before)
