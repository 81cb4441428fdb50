"""One configuration, really run and measured, on a CPU or on a CUDA card."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from perfguard.devices import Device
from perfguard.measure import CpuProbe, GpuProbe, Measurement, Run, status_of
from perfguard.measure.step import run_steps, step_of
from perfguard_research.networks import Network
from perfguard_research.tables import MIB, MeasuredRow

Columns = dict[str, str]
"""Columns of a row of the table."""


class Processor:
    """This machine's CPU. Its limit is one on the process's data (RLIMIT_DATA); PyTorch says so when it is hit."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._limit_bytes: int | None = None

    def limit(self, num_bytes: int) -> None:
        """Limit the memory of this process."""
        self._limit_bytes = num_bytes

    def start_afresh(self, row: MeasuredRow) -> str:
        """Free the memory of the last run. Returns what could not be freed, in words: nothing."""
        gc.collect()
        if self._limit_bytes is not None:  # beside what the C library keeps of earlier runs
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            status = Path("/proc/self/status").read_text()
            private_bytes = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
            resource.setrlimit(resource.RLIMIT_DATA, (private_bytes + self._limit_bytes, hard))
        return ""

    def synchronize(self) -> None:
        """Nothing runs behind the program's back."""

    def probe(self) -> CpuProbe:
        """Probe that measures a whole run."""
        return CpuProbe()


class Card:
    """The current CUDA device.

    Args:
        device: as the catalog or NVML describes it.
        cuda: stands in for the module ``torch.cuda``.
        torch_device: where tensors are made.
        nvml: stands in for the module ``pynvml``.
        clear_workspaces: gives cuBLAS's workspaces back to the allocator.
    """

    def __init__(
        self,
        device: Device,
        *,
        cuda: Any = None,
        torch_device: torch.device | None = None,
        nvml: Any = None,
        clear_workspaces: Callable[[], None] | None = None,
    ) -> None:
        self.torch_device = torch_device or torch.device("cuda")
        self._device = device
        self._cuda = torch.cuda if cuda is None else cuda
        self._nvml = nvml
        # Private, and in PyTorch since 1.11: without it the first matrix product's 8 to 32 MiB stay for all rows to come.
        self._clear_workspaces = clear_workspaces or torch._C._cuda_clearCublasWorkspaces

    def limit(self, num_bytes: int) -> None:
        """Limit the memory of this process, the driver's context included."""
        total = int(self._cuda.get_device_properties(0).total_memory)
        share = (num_bytes - self._device.context_bytes) / total
        self._cuda.set_per_process_memory_fraction(min(max(share, 0.0), 1.0))

    def start_afresh(self, row: MeasuredRow) -> str:
        """Free the memory of the last run, and set the switches of ``row``. Returns what could not be freed, in words."""
        gc.collect()
        self._clear_workspaces()
        self._cuda.empty_cache()
        torch.backends.cudnn.benchmark = row.cudnn_benchmark
        # PyTorch's own defaults: convolutions may take TF32, matrix products may not.
        torch.backends.cudnn.allow_tf32 = row.tf32 != "off"
        torch.backends.cuda.matmul.allow_tf32 = row.tf32 == "on"
        left = int(self._cuda.memory_allocated())
        return f"{left / MIB:.0f} MiB of an earlier run could not be freed" if left > MIB else ""

    def synchronize(self) -> None:
        """Wait until all that was launched is done."""
        self._cuda.synchronize()

    def probe(self) -> GpuProbe:
        """Probe that measures a whole run."""
        return GpuProbe(self._device.context_bytes, cuda=self._cuda, nvml=self._nvml)


Place = Processor | Card
"""The device that a run uses, in the process that uses it."""


def place_of(device: Device) -> Place:
    """The place to run on ``device`` in this process, ready to measure."""
    if device.kind == "cpu":
        return Processor()
    torch.cuda.init()
    torch.ones(1, device="cuda").add_(1)  # the context, before anything is measured
    return Card(device)


def run_row(row: MeasuredRow, device: Device, place: Place) -> Columns:
    """Run the step of ``row`` and return its cost as columns. An error of the run is its status, never raised."""
    leftovers = place.start_afresh(row)
    run = Run(device, probe=place.probe())
    torch.manual_seed(0)
    try:
        with run:
            num_steps = run_steps(make_step(row, place.torch_device), run, seconds=0.2, synchronize=place.synchronize)
    except Exception as error:
        num_steps = 0
        if run.measurement is None:  # it did not even begin; else the measurement has its status and the error's text
            return {"status": status_of(error), "note": f"{type(error).__name__}: {error}"}
    if row.compiled:
        torch.compiler.reset()
    assert run.measurement is not None
    return _columns(run.measurement, num_steps, leftovers)


def _columns(measurement: Measurement, num_steps: int, leftovers: str) -> Columns:
    # Another process on the card disturbs the time; the memory is this process's own.
    is_timed = measurement.status == "ok" and "other processes used the GPU" not in measurement.note
    return {
        "status": measurement.status,
        "peak_memory_mib": _text(measurement.peak_memory_bytes or None, 1 / MIB),
        "allocated_peak_mib": _text(measurement.allocated_peak_bytes, 1 / MIB),
        "reserved_peak_mib": _text(measurement.reserved_peak_bytes, 1 / MIB),
        "step_time_ms": _text(measurement.step_time_s if is_timed else None, 1e3),
        "num_steps": str(num_steps) if num_steps else "",
        "framework": measurement.framework,
        "note": "; ".join(filter(None, [measurement.note, measurement.throttled, leftovers])),
    }


def _text(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.6g}"


def make_step(row: MeasuredRow, device: torch.device) -> Callable[[], None]:
    """One training step, or one inference, of ``row``: what the trace of its workload says is launched."""
    assert isinstance(row.network, Network)
    with device:
        model = row.network.make()
    return step_of(row.workload(model), high=row.network.num_indices)
