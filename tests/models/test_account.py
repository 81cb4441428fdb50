"""GuardNet's accounts: over graphs, devices and what was learnt, each prediction is physics and the shifts of its stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfguard import Guard
from perfguard.account import PHYSICS
from perfguard.devices import Device, resolve_device
from perfguard.graph import OpGraph, roofline_s, trace
from perfguard.measure import Measurement, Status
from perfguard.predictor import Observation, Prediction
from perfguard.workload import TensorSpec, Workload
from perfguard_models import guardnet
from perfguard_models.guardnet import GuardNet
from tests.doubles import TOY_CPU, TOY_GPU

DEVICES = [TOY_CPU, TOY_GPU, *map(resolve_device, ("a100", "t4", "a100/1g.5gb"))]


class Convolutions(nn.Module):
    """Two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3), nn.ReLU(), nn.Tanh(), nn.Conv2d(width, 64, 3, 2), nn.AdaptiveAvgPool2d(1)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x).flatten(1))
        return out


def workload(width: int = 32, **fields: object) -> Workload:
    with torch.device("meta"):
        model = Convolutions(width)
    return Workload(model, (16, 3, 64, 64), TensorSpec((16,), "int64"), F.cross_entropy, **fields)  # type: ignore[arg-type]


def graphs_for(device: Device) -> Iterator[OpGraph]:
    for fields in ({}, {"mode": "infer"}, {"cudnn_benchmark": True}, {"precision": "amp-fp16"}, {"precision": "bf16"}):
        graph = trace(workload(**fields), target=device)
        yield graph
    yield replace(trace(workload(mode="infer"), target=device), options=("compiled",))
    yield replace(trace(workload(), target=device), options=("ddp",))


def runs_of(net: GuardNet, graphs: Sequence[OpGraph], device: Device, statuses: Sequence[Status]) -> list[Observation]:
    """Runs that took 1.4 times what the shipped weights predict, and some MiB."""
    found = []
    for graph, status in zip(graphs, statuses, strict=False):
        said = net.predict(graph, device)
        num_bytes, step_s = int(1.4 * said.peak_memory.median) + 2**22, 1.4 * said.step_time.median
        measured = Measurement("ok", device.id, "Toy", num_bytes, step_s, 12 * step_s, 10, "double", "torch", energy_j=50.0)
        measurement = replace(measured, status=status)
        found.append(Observation(graph, device, measurement))
    return found


def check_law(prediction: Prediction, graph: OpGraph, device: Device, *, steps: int) -> None:
    """The shifts of each account add up to log(final / physics), where physics is computed here."""
    replayed = max(graph.peak_live_bytes if device.kind == "cpu" else graph.reserved_bytes(device), 1) + device.context_bytes
    least_s = float(roofline_s(graph, device).sum())
    assert prediction.total_time is not None
    for quantity, estimate, physics in (
        ("memory", prediction.peak_memory, replayed),
        ("step_time", prediction.step_time, least_s),
        ("time", prediction.total_time, steps * least_s),
    ):
        account = prediction.account[quantity]
        assert account[0].name == PHYSICS
        assert sum(stage.shift for stage in account) == pytest.approx(math.log(estimate.median / physics), abs=1e-5)
        assert account[-1].log_sigma == pytest.approx(estimate.log_sigma)
        assert all(len(stage.why.split()) <= 7 for stage in account)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.id)
def test_shifts_add_up_from_physics_to_the_last_bound(device: Device) -> None:
    net = guardnet.load()
    graphs = list(graphs_for(device))
    states = [[], runs_of(net, graphs, device, ["ok"]), runs_of(net, graphs, device, ["ok", "ok", "oom", "ok", "oom", "ok"])]
    for runs in states:
        net.fine_tune(runs)
        for graph in graphs:
            check_law(net.predict(graph, device, steps=10), graph, device, steps=10)
    names = {stage.name for stage in net.predict(graphs[0], device).account["step_time"]}
    assert {PHYSICS, "network", "this device's runs"} <= names


def test_guard_goes_on_with_the_account_to_its_own_bounds() -> None:
    guard = Guard(TOY_GPU, log=False)
    graph = guard.trace(workload())
    check_law(guard.predict(graph, steps=10, steps_log_sigma=0.2), graph, TOY_GPU, steps=10)
    assert "number of steps" in {stage.name for stage in guard.predict(graph, steps=10, steps_log_sigma=0.2).account["time"]}


def test_stages_of_a_part_and_of_what_ran_out_are_named() -> None:
    net, device = guardnet.load(), TOY_GPU
    graphs = list(graphs_for(device))
    net.fine_tune(runs_of(net, graphs, device, ["ok", "ok", "oom"]))
    assert "out of memory" in {stage.name for stage in net.predict(graphs[2], device).account["memory"]}
    assert "NCCL" in {stage.name for stage in net.predict(graphs[-1], device).account["memory"]}
    compiled = list(graphs_for(TOY_CPU))[-2]
    assert "compiler" in {stage.name for stage in net.predict(compiled, TOY_CPU).account["step_time"]}


def test_parts_are_those_of_the_shipped_weights_and_the_rest_is_named() -> None:
    """They were rescaled, so that the sum looked as if it had no history."""
    net, device = guardnet.load(), TOY_GPU
    graphs = list(graphs_for(device))[:2]
    before = net.predict(graphs[0], device)
    assert "correction" not in before.time_parts_s
    net.fine_tune(runs_of(net, graphs, device, ["ok", "ok"]))
    after = net.predict(graphs[0], device)
    assert after.time_parts_s["device"] == pytest.approx(before.time_parts_s["device"])
    assert after.time_parts_s["correction"] == pytest.approx(after.step_time.median - before.step_time.median)
