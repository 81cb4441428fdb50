"""A CUDA card as a place to run: one that lives in memory, whose tensors are made on the processor."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

from perfguard import resolve_device
from perfguard_research.collect.run import Card, run_row
from perfguard_research.networks import Network
from perfguard_research.tables import MeasuredRow
from tests.fake_gpu import FakeCuda, FakeGpu, FakeNvml, MiB

A100 = dataclasses.replace(resolve_device("a100"), context_bytes=500 * MiB)
SIZES = {"inputs": 16, "width": 32, "depth": 1, "norm": False, "dropout": False, "activation": "relu", "classes": 10}
MLP = MeasuredRow(
    table="collected", source="collected", family="mlp", network=Network(name="perfguard:mlp", config=SIZES), mode="train",
    gpu="a100", batch_size=8, optimizer="sgd-momentum",
)  # fmt: skip


class WorkingCuda(FakeCuda):
    """Each wait for the device finds that it has worked meanwhile."""

    def synchronize(self) -> None:
        self.gpu.energy_mj += 600
        self.gpu.allocate(100 * MiB)
        self.gpu.free(100 * MiB)
        super().synchronize()


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu(initialized=True, own_pid=os.getpid())


@pytest.fixture
def card(gpu: FakeGpu) -> Card:
    cuda: Any = WorkingCuda(gpu)
    nvml = FakeNvml(gpu)
    return Card(A100, cuda=cuda, torch_device=torch.device("cpu"), nvml=nvml, clear_workspaces=gpu.give_cache_back)


def test_card_row_has_three_peaks_and_driver(gpu: FakeGpu, card: Card) -> None:
    row = run_row(MLP, A100, card)
    assert row["status"] == "ok", row
    assert (row["allocated_peak_mib"], row["reserved_peak_mib"]) == ("100", "100")
    assert row["peak_memory_mib"] == "550"  # and the context, as the driver counts it
    assert float(row["step_time_ms"]) >= 0
    assert int(row["num_steps"]) >= 4


def test_time_beside_another_process_is_left_out(gpu: FakeGpu, card: Card) -> None:
    gpu.others = {7: MiB}
    row = run_row(MLP, A100, card)
    assert (row["status"], row["step_time_ms"], row["reserved_peak_mib"]) == ("ok", "", "100")
    assert "other processes used the GPU" in row["note"]


def test_earlier_allocations_are_freed_or_noted(gpu: FakeGpu, card: Card) -> None:
    gpu.allocate(300 * MiB)
    gpu.free(300 * MiB)
    assert run_row(MLP, A100, card)["reserved_peak_mib"] == "100"
    gpu.allocate(40 * MiB)
    assert "40 MiB of an earlier run could not be freed" in run_row(MLP, A100, card)["note"]


def test_switches_of_a_row_are_set(card: Card) -> None:
    try:
        card.start_afresh(dataclasses.replace(MLP, tf32="on", cudnn_benchmark=True))
        assert torch.backends.cudnn.benchmark
        assert torch.backends.cuda.matmul.allow_tf32
        card.start_afresh(dataclasses.replace(MLP, tf32="off"))
        assert not torch.backends.cudnn.allow_tf32
    finally:
        card.start_afresh(MLP)


def test_limit_counts_context_like_a_smaller_card(gpu: FakeGpu, card: Card) -> None:
    card.limit(16_500 * MiB)
    assert gpu.share == pytest.approx(16_000 / 40_000)
