"""Selections whose size depends on the data have an expected size, and the graph says so.

The reference for mixtures of experts is a run on real tensors whose router spreads the tokens evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from perfguard.exceptions import TraceError
from perfguard.graph import OpGraph, Phase, has_assumed_sizes, trace
from perfguard.unmodelled import EVEN_CHOICES, GROUPED_PRODUCTS, HALF_CHOSEN
from perfguard.workload import TensorSpec, Workload
from tests.perfguard.graph.parts import Apply, total

EXPERTS, WIDTH, TOKENS = 8, 32, 64
Dispatch = Callable[["Experts", torch.Tensor, torch.Tensor], torch.Tensor]


class Experts(nn.Module):
    """A mixture of experts, as people write it by hand. ``dispatch`` takes the tokens and the router's probabilities."""

    def __init__(self, dispatch: Dispatch, width: int = WIDTH) -> None:
        super().__init__()
        self.dispatch = dispatch
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(EXPERTS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        return self.dispatch(self, tokens, self.router(tokens).softmax(-1)).view(x.shape)


def by_mask(layer: Experts, x: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
    choice = probability.argmax(-1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        mask = choice == number
        out[mask] = expert(x[mask]) * probability[mask, number][:, None]
    return out


def by_row(layer: Experts, x: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
    weight, selected = probability.topk(2)
    out = torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        rows, rank = torch.where(selected == number)
        out.index_add_(0, rows, expert(x[rows]) * weight[rows, rank, None])
    return out


def by_hit(layer: Experts, x: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
    weight, selected = probability.topk(2)
    out, mask = torch.zeros_like(x), F.one_hot(selected, EXPERTS).permute(2, 1, 0)
    for (number,) in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        rank, rows = torch.where(mask[number])
        out.index_add_(0, rows, layer.experts[number](x[rows]) * weight[rows, rank, None])
    return out


DISPATCHES: list[Dispatch] = [by_mask, by_row, by_hit]


def product_flops(graph: OpGraph) -> int:
    return sum(op.flops for op in graph.ops if op.kind == "matmul")


@pytest.mark.parametrize("training", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_mixture_of_experts_has_flops_of_balanced_run(dispatch: Dispatch, training: bool) -> None:
    model = Experts(dispatch)
    nn.init.eye_(model.router.weight)
    number = torch.arange(TOKENS)
    x = 2.0 * F.one_hot(number % EXPERTS, WIDTH) + F.one_hot((number + 1) % EXPERTS, WIDTH)
    with FlopCounterMode(display=False) as counter:
        output = model(x)
        if training:
            total(output).backward()
    graph = trace(Workload(model, (4, TOKENS // 4, WIDTH), mode="train" if training else "infer", loss=total))
    assert product_flops(graph) == counter.get_total_flops()
    assert graph.unmodelled == (EVEN_CHOICES,)


def test_few_tokens_hit_few_experts() -> None:
    """Decoding one token runs the two experts that it chooses."""
    graph = trace(Workload(Experts(by_hit), (1, 1, WIDTH), mode="infer"))
    assert sorted({op.module for op in graph.ops if op.kind == "matmul" and op.module != "router"}) == [
        "experts.0.0", "experts.0.2", "experts.1.0", "experts.1.2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("select", "shape"),
    [
        (lambda x: x[x.sum(1) > 0], (17, 8)),
        (lambda x: x[x > 0], (132,)),
        (lambda x: x[:, x.sum(0) > 0], (33, 4)),
        (lambda x: x.masked_select(x > 0), (132,)),
        (lambda x: x.masked_select(x.sum(1, keepdim=True) > 0), (132,)),
        (lambda x: x[torch.where(x.sum(1) > 0)], (17, 8)),
        (lambda x: x[torch.nonzero(x.sum(1) > 0, as_tuple=True)[0]], (17, 8)),
        (lambda x: x[(x.sum(1) > 0).nonzero().squeeze(1)], (17, 8)),
    ],
)
def test_other_masks_choose_half(select: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> None:
    shapes = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(output.shape))
        return output.sum()

    graph = trace(Workload(nn.Sequential(nn.Linear(8, 8), Apply(select)), (33, 8), loss=loss))
    assert shapes == [shape]
    assert graph.unmodelled == (HALF_CHOSEN,)
    assert has_assumed_sizes(graph)
    assert any(op.name in ("nonzero", "masked_select") for op in graph.ops)
    assert any(op.kind == "matmul" and op.phase is Phase.BACKWARD for op in graph.ops)


def test_assigned_values_say_how_many_are_chosen() -> None:
    """Their gradient has as many rows; no assumption is made."""

    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Linear(8, 8)

        def forward(self, text: torch.Tensor, is_image: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
            embedded = text * 1
            embedded[is_image] = self.patches(images)
            return embedded

    inputs = ((2, 16, 8), TensorSpec((2, 16), "bool"), (10, 8))
    graph = trace(Workload(Fills(), inputs, loss=total))
    gathered = [op.shape for op in graph.ops if op.name == "index"]
    assert gathered == [(10, 8)]
    assert not graph.unmodelled


@pytest.mark.parametrize(
    "read",
    [
        lambda x: (x > 0).nonzero()[0, 0].item(),
        lambda x: bool((x.argmax(-1) == 0).any()),
        lambda x: [row for row in (x.sum(1) > 0).nonzero() if row > 0],
    ],
)
def test_values_of_selections_cannot_be_read(read: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(TraceError, match="value is read from a tensor"):
        trace(Workload(nn.Sequential(nn.Linear(8, 8), Apply(read)), (32, 8), mode="infer"))


def ids(batch: int = 4, length: int = 16) -> TensorSpec:
    return TensorSpec((batch, length), "int64")


@pytest.mark.slow  # to import transformers takes seconds
@pytest.mark.filterwarnings("ignore")
def test_loop_over_experts_has_flops_of_grouped_products() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, vocab_size=100,
    )  # fmt: skip
    graphs = []
    for how in ("eager", "grouped_mm"):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=how)
        graphs.append(trace(Workload(model, {"input_ids": ids()}, mode="infer")))
    assert product_flops(graphs[0]) == product_flops(graphs[1])
    assert graphs[0].unmodelled == (EVEN_CHOICES,)
    assert graphs[1].unmodelled == (GROUPED_PRODUCTS,)
    assert [graph.has_all_bytes for graph in graphs] == [False, True]
