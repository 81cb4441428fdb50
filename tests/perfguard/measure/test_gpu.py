"""A run on a GPU: on one that lives in memory, with all that can go wrong, and on the real one where there is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from perfguard import Device, Measurement, Run, resolve_device
from perfguard.devices import cpu, mig_instance, mig_profiles, mps_share
from perfguard.measure import CpuProbe, GpuProbe
from tests.fake_gpu import NO_PERMISSION, NOT_SUPPORTED, PID, FakeCuda, FakeGpu, FakeNvml, MiB

A100 = resolve_device("a100")
DEVICE = replace(A100, context_bytes=500 * MiB)
MIG = mig_instance(A100, mig_profiles(A100)[1])
"""2g.10gb."""
NEVER_S = 3600.0
"""Between samples: only the first and the last are taken."""


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def nvml(gpu: FakeGpu) -> FakeNvml:
    return FakeNvml(gpu)


def make_run(gpu: FakeGpu, nvml: Any, *, interval_s: float = NEVER_S, device: Device = DEVICE, **options: Any) -> Run:
    probe = GpuProbe(device.context_bytes, cuda=FakeCuda(gpu, **options), nvml=nvml, pid=PID, interval_s=interval_s)
    return Run(device, probe=probe)


def train(gpu: FakeGpu) -> None:
    """1,000 MiB at the peak, 600 at the end; the allocator keeps all of it."""
    gpu.allocate(600 * MiB)
    gpu.allocate(400 * MiB)
    gpu.free(400 * MiB)


def measure(gpu: FakeGpu, nvml: Any, trial: Callable[[FakeGpu], None] = train, **options: Any) -> Measurement:
    with make_run(gpu, nvml, **options) as run:
        trial(gpu)
    assert run.measurement is not None
    return run.measurement


def test_peak_is_allocators_plus_what_driver_counts(gpu: FakeGpu, nvml: FakeNvml) -> None:
    def train_and_give_back(gpu: FakeGpu) -> None:
        train(gpu)
        gpu.give_cache_back()  # no sample has seen the peak

    measurement = measure(gpu, nvml, train_and_give_back)
    assert measurement.peak_memory_bytes == (1000 + 450) * MiB
    assert measurement.allocated_peak_bytes == measurement.reserved_peak_bytes == 1000 * MiB
    assert (measurement.method, measurement.note) == ("nvml-process+allocator", "")
    assert measurement.driver == "550.54"
    assert nvml.sessions == 0


def test_other_processes_on_the_card_do_not_count(gpu: FakeGpu, nvml: FakeNvml) -> None:
    gpu.others = {7: 9000 * MiB, 8: 500 * MiB}
    measurement = measure(gpu, nvml)
    assert measurement.peak_memory_bytes == 1450 * MiB
    assert measurement.method == "nvml-process+allocator"
    assert measurement.energy_j is None
    assert "2 other processes used the GPU, so its energy cannot be attributed" in measurement.note


def test_oom_run_keeps_its_peak_as_lower_bound(gpu: FakeGpu, nvml: FakeNvml) -> None:
    def fail(gpu: FakeGpu) -> None:
        train(gpu)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")

    run = make_run(gpu, nvml)
    with pytest.raises(torch.OutOfMemoryError), run:
        fail(gpu)
    assert run.measurement is not None
    assert (run.measurement.status, run.measurement.peak_memory_bytes) == ("oom", 1450 * MiB)


def test_sensor_figures_are_of_the_run_only(gpu: FakeGpu, nvml: FakeNvml) -> None:
    """Energy and throttling."""
    gpu.allocate(1)

    def trial(gpu: FakeGpu) -> None:
        gpu.allocate(1)
        gpu.energy_mj += 7500
        gpu.reasons = 0x4 | 0x20 | 0x1

    measurement = measure(gpu, nvml, trial)
    assert measurement.energy_j == 7.5
    assert measurement.note == "clocks were reduced: power cap, thermal"


def test_sampling_thread_sees_memory_outside_allocator(gpu: FakeGpu, nvml: FakeNvml) -> None:
    def library_allocates(gpu: FakeGpu) -> None:
        train(gpu)
        before = len(nvml.calls)
        gpu.context_bytes += 700 * MiB
        deadline = time.monotonic() + 30
        while "nvmlDeviceGetComputeRunningProcesses" not in nvml.calls[before:][8:] and time.monotonic() < deadline:
            time.sleep(0.001)
        gpu.context_bytes -= 700 * MiB

    assert measure(gpu, nvml, library_allocates, interval_s=0.001).peak_memory_bytes == (1000 + 450 + 700) * MiB
    assert "perfguard-nvml" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("refused", "card", "method", "note"),
    [
        ({"nvmlInit": NOT_SUPPORTED}, {}, "cuda-card", "NVML cannot be used (Not Supported)"),
        ({"nvmlDeviceGetComputeRunningProcesses": NO_PERMISSION}, {}, "cuda-card", "NVML could not read its processes"),
        ({"nvmlDeviceGetHandleByUUID": NOT_SUPPORTED}, {}, "cuda-card", "NVML does not know this CUDA device"),
        ({}, {"own_pid": 99}, "cuda-card", "NVML does not show this process by its id (a container?)"),
        ({}, {"own_pid": 99, "others": {7: 9000 * MiB}}, "catalog-context", "the context is the catalog's figure"),
    ],
)
def test_missing_nvml_figures_come_from_elsewhere(refused: Any, card: Any, method: str, note: str) -> None:
    """The note says so."""
    gpu = FakeGpu(**card)
    measurement = measure(gpu, FakeNvml(gpu, refused))
    assert measurement.method == f"{method}+allocator"
    assert measurement.peak_memory_bytes == (1000 + 500) * MiB  # 450 of the context, 50 of the firmware
    assert note in measurement.note


def test_neighbours_that_a_container_hides_do_not_count(gpu: FakeGpu, nvml: FakeNvml) -> None:
    nvml.hides_processes = True
    assert measure(gpu, nvml).method == "cuda-card+allocator"
    gpu.others = {7: 9000 * MiB}  # whose memory the card has, and whose process NVML does not show here
    assert measure(gpu, nvml).method == "catalog-context+allocator"


@pytest.mark.parametrize(
    ("function", "field", "words"),
    [
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_j", "energy"),
        ("nvmlSystemGetDriverVersion", "driver", "driver version"),
    ],
)
def test_missing_sensor_costs_only_its_own_figure(function: str, field: str, words: str, gpu: FakeGpu, nvml: FakeNvml) -> None:
    nvml.refusals[function] = NOT_SUPPORTED
    measurement = measure(gpu, nvml)
    assert getattr(measurement, field) is None
    assert measurement.note == f"NVML could not read its {words} (Not Supported)"
    assert measurement.peak_memory_bytes == 1450 * MiB


def test_lost_gpu_ends_sampling_not_the_measurement(gpu: FakeGpu, nvml: FakeNvml) -> None:
    gpu.allocate(1)
    run = make_run(gpu, nvml, interval_s=0.001).start()
    run.step()
    gpu.lost = True
    run.step()
    run.step()
    measurement = run.finish("failed")
    assert (measurement.peak_memory_bytes, measurement.method) == (450 * MiB + 1, "nvml-process")  # of the last sample
    assert "NVML could not read its processes (GPU is lost)" in measurement.note
    assert "CUDA's statistics could not be read" in measurement.note
    assert (measurement.num_steps, measurement.driver) == (3, "550.54")
    assert measurement.step_time_s is not None
    calls = len(nvml.calls)
    time.sleep(0.02)
    assert len(nvml.calls) == calls


def test_unknown_nvml_failure_stops_nothing(gpu: FakeGpu, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_handle: Any) -> Any:
        raise AttributeError("'NoneType' object has no attribute 'usedGpuMemory'")

    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", broken)
    measurement = measure(gpu, nvml)
    assert "NVML failed (AttributeError" in measurement.note
    assert measurement.reserved_peak_bytes == 1000 * MiB


def test_mig_instance_memory_is_read_but_no_sensors(gpu: FakeGpu, nvml: FakeNvml) -> None:
    """The sensors are the whole card's."""
    gpu.is_mig = True
    measurement = measure(gpu, nvml)
    assert (measurement.peak_memory_bytes, measurement.energy_j) == (1450 * MiB, None)
    assert "on a MIG instance" in measurement.note


def test_cuda_is_not_initialised_by_measuring(gpu: FakeGpu, nvml: FakeNvml) -> None:
    measurement = measure(gpu, nvml, lambda gpu: None)
    assert not gpu.initialized
    assert nvml.calls == []
    assert (measurement.peak_memory_bytes, measurement.method) == (None, "none")
    assert "the trial did not use CUDA in this process" in measurement.note


def test_steps_are_timed_on_the_device(gpu: FakeGpu, nvml: FakeNvml) -> None:
    gpu.initialized = True
    run = make_run(gpu, nvml).start()
    for _ in range(4):  # the processor runs ahead: it launches 2 s of work in no time
        gpu.busy_until_s += 2.0
        run.step()
    assert run.finish().step_time_s == pytest.approx(2.0)


def test_concurrent_gpu_runs_cannot_be_told_apart(gpu: FakeGpu, nvml: FakeNvml) -> None:
    first = make_run(gpu, nvml).start()
    with make_run(gpu, nvml) as second:
        train(gpu)
    assert first.finish().peak_memory_bytes is None
    assert second.measurement is not None
    assert second.measurement.peak_memory_bytes == 1450 * MiB


@pytest.mark.parametrize(
    ("name", "guarded", "booked"),
    [
        ("NVIDIA A100-PCIE-40GB", A100, A100.id),
        ("NVIDIA A100-SXM4-80GB", A100, "a100-sxm-80gb"),  # "a100" is an alias of the other card
        ("NVIDIA GeForce RTX 3090", A100, "rtx3090"),
        ("NVIDIA A100-PCIE-40GB MIG 2g.10gb", A100, "a100-pcie-40gb:2g.10gb"),
        ("NVIDIA A100-PCIE-40GB MIG 2g.10gb", MIG, MIG.id),
        ("NVIDIA A100-PCIE-40GB", MIG, A100.id),
        ("NVIDIA A100-PCIE-40GB", mps_share(A100, 0.5), "a100-pcie-40gb:mps50%"),
        ("NVIDIA A100-PCIE-40GB", A100.with_memory(2**30), A100.id),
        ("NVIDIA X9000", A100, "nvidia-x9000"),  # a card that the catalog does not know
        ("NVIDIA X9000", replace(A100, id="x9000", name="nvidia x9000"), "x9000"),
        ("NVIDIA A100-PCIE-40GB", replace(A100, id="ours", name="Our card"), "ours"),  # by its multiprocessors and memory
        ("NVIDIA A100-PCIE-40GB", replace(A100, id="ours", name="Our card", num_sms=80), A100.id),
    ],
)
def test_measurement_names_the_gpu_really_used(name: str, guarded: Device, booked: str, gpu: FakeGpu, nvml: FakeNvml) -> None:
    """Finding 1: what was measured was booked to the device that the guard was told, whatever ran."""
    gpu.name = name
    measurement = measure(gpu, nvml, device=guarded)
    assert measurement.device_id == booked
    assert measurement.is_of(guarded) == (booked == guarded.id)
    assert measurement.peak_memory_bytes is not None  # it is a reading of that card


def test_measurement_is_of_cpu_where_cuda_was_idle(gpu: FakeGpu, nvml: FakeNvml) -> None:
    """A script that prints the card's name, holds an old tensor there and trains on the processor."""
    gpu.allocate(100 * MiB)
    measurement = measure(gpu, nvml, lambda gpu: None)
    assert (measurement.device_id, measurement.peak_memory_bytes) == ("cpu", None)
    assert not measurement.is_of(DEVICE)
    assert measurement.is_of(resolve_device("cpu"))


def test_refused_allocation_is_a_use_of_the_gpu(gpu: FakeGpu, nvml: FakeNvml) -> None:
    """A model that does not fit at all is out of memory on the card, not on the processor."""

    def fail(gpu: FakeGpu) -> None:
        gpu.initialized, gpu.ooms = True, 1

    assert measure(gpu, nvml, fail).device_id == DEVICE.id


def test_gpu_run_is_no_reading_of_guarded_cpu(gpu: FakeGpu) -> None:
    """gpu="cpu" while the trial trains on a GPU: the step's time is the GPU's, and the tensors are not in the resident set."""
    processor = resolve_device("cpu")
    with Run(processor, probe=CpuProbe(cuda=FakeCuda(gpu))) as run:
        train(gpu)
        assert run.is_elsewhere
    assert run.measurement is not None
    assert (run.measurement.device_id, run.measurement.peak_memory_bytes) == (A100.id, None)
    assert not run.measurement.is_of(processor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_real_gpu_peak_is_allocators_plus_context() -> None:
    device = resolve_device("auto")
    with Run(device) as run:
        for _ in range(3):
            matrix = torch.ones(64 * MiB, device="cuda")
            (matrix * 2).sum().item()
            del matrix
            run.step()
    measurement = run.measurement
    assert measurement is not None
    assert measurement.reserved_peak_bytes is not None
    assert measurement.reserved_peak_bytes >= 512 * MiB
    assert measurement.peak_memory_bytes is not None
    assert 50 * MiB < measurement.peak_memory_bytes - measurement.reserved_peak_bytes < 3000 * MiB
    assert measurement.step_time_s is not None


def test_apple_gpu_run_is_no_reading_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Mac "auto" is the CPU, and a trial on "mps" would be learnt as what the CPU can do."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2**20)
    with Run(cpu()) as run:
        run.step()
    assert run.measurement is not None
    assert not run.measurement.is_of(cpu())


def test_trial_failed_before_first_step_keeps_device() -> None:
    """A wrong path to the data must not be told as "this process has no A100"."""
    device = resolve_device("a100-pcie-40gb")
    run = Run(device).start()
    assert run.finish("failed").is_of(device)
    run = Run(device).start()
    run.step()
    assert not run.finish("failed").is_of(device)
