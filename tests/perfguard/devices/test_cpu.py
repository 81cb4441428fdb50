"""The processor as a device."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest
import torch

from perfguard.devices import _cpu, cpu, detect_gpu, resolve_device


def test_the_cpu_is_measured_once() -> None:
    assert cpu() is cpu() is resolve_device("cpu")


def test_cpu_has_one_rate_and_no_context() -> None:
    device = cpu()
    assert (device.id, device.kind, device.context_bytes) == ("cpu", "cpu", 0)
    assert set(device.peak_flops) == {"fp32"}
    assert device.flops_per_s("bf16") == device.flops_per_s("fp32")


def test_the_measured_rates_are_those_of_a_processor() -> None:
    device = cpu()
    assert 1e8 < device.peak_flops["fp32"] < 1e14
    assert 1e8 < device.bandwidth_bytes_per_s < 2e12
    assert device.num_sms == torch.get_num_threads()
    assert 0 < device.memory_bytes <= psutil.virtual_memory().total


def test_cpu_measurement_keeps_random_state() -> None:
    state = torch.random.get_rng_state()
    cpu.cache_clear()
    cpu()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_cpu_is_measured_in_float32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def looked_at(call: Callable[[], torch.Tensor]) -> float:
        seen.append(call().dtype)
        return 1.0

    monkeypatch.setattr(_cpu, "_best_time", looked_at)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cpu.__wrapped__()
    assert seen == [torch.float32, torch.float32]


def test_the_cpu_is_no_gpu() -> None:
    found = detect_gpu()
    assert found is None or found.kind == "cuda"
