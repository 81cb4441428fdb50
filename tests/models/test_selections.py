"""Predictions of steps whose sizes depend on the data: they say what is assumed, and their intervals are wider."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from perfguard.devices import Device, resolve_device
from perfguard.graph import OpGraph, trace
from perfguard.predictor import Prediction
from perfguard.unmodelled import EVEN_CHOICES, GROUPED_PRODUCTS, HALF_CHOSEN
from perfguard.workload import Workload
from perfguard_models import guardnet
from tests.doubles import TOY_CPU

DEVICES = [resolve_device("a100"), TOY_CPU]


class Network(nn.Module):
    """A layer whose tokens pass all experts, or each the one that its router chooses, or only those that are kept."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, choice = self.router(x).max(-1)
        out = x * weight[:, None]
        for number, expert in enumerate(self.experts):
            if self.how == "dense":
                out = out + expert(x)
            else:
                mask = choice == number if self.how == "experts" else weight > number
                rows = torch.where(mask)[0]
                out = out.index_add(0, rows, expert(x[rows]))
        return out  # type: ignore[no-any-return]


def traced(how: str, mode: str) -> OpGraph:
    return trace(Workload(Network(how), (4096, 64), loss=lambda output: output.sum(), mode=mode))  # type: ignore[arg-type]


def widths(prediction: Prediction) -> tuple[float, float]:
    return prediction.peak_memory.log_sigma, prediction.step_time.log_sigma


@pytest.mark.parametrize("how", ["experts", "kept"])
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("device", DEVICES, ids=["a100", "cpu"])
def test_assumed_sizes_widen_intervals(device: Device, mode: str, how: str) -> None:
    net, graph = guardnet.load(), traced(how, mode)
    prediction = net.predict(graph, device)
    assert prediction.unmodelled == (EVEN_CHOICES if how == "experts" else HALF_CHOSEN,)
    memory, time = widths(prediction)
    certain = widths(net.predict(replace(graph, unmodelled=()), device))
    assert memory > max(certain[0], 0.2 if how == "experts" else 0.42)
    assert time > certain[1]


def test_grouped_products_keep_the_interval_of_memory() -> None:
    """Their bytes do not depend on how tokens are spread, so the replay and the lower bound hold for them."""
    net, graph = guardnet.load(), traced("dense", "train")
    grouped = replace(graph, unmodelled=(GROUPED_PRODUCTS,))
    before, after = (net.predict(one, DEVICES[0]) for one in (graph, grouped))
    assert after.peak_memory == before.peak_memory
    assert before.step_time.log_sigma < after.step_time.log_sigma < 1.2 * before.step_time.log_sigma
    assert grouped.least_bytes_by_kind == graph.least_bytes_by_kind
