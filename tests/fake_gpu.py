"""A GPU that lives in memory, behind the functions of ``pynvml`` and ``torch.cuda`` that measuring calls.

A test moves it: memory of this and of other processes, sensors, refusals, a card that falls off the bus.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MiB = 2**20
PID = 4242
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, GPU_IS_LOST, UNINITIALIZED = 3, 4, 6, 15, 1


class FakeNvmlError(Exception):
    """With a code, as pynvml.NVMLError has it."""

    def __init__(self, value: int) -> None:
        names = {1: "Uninitialized", 3: "Not Supported", 4: "Insufficient Permissions", 6: "Not Found", 15: "GPU is lost"}
        super().__init__(names[value])
        self.value = value


@dataclass
class FakeGpu:
    """One card with this process (``PID``) and others on it. Bytes, watts, MHz; the clock is moved by hand."""

    name: str = "NVIDIA A100-PCIE-40GB"
    num_sms: int = 108
    uuid: str = "1234-abcd"
    total_bytes: int = 40_000 * MiB
    context_bytes: int = 450 * MiB
    firmware_bytes: int = 50 * MiB
    """Counted by the card, by no process."""
    others: dict[int, int] = field(default_factory=dict)
    """Used memory of other processes, by id."""
    own_pid: int = PID
    """This process, as the driver numbers it; another number in a container."""
    is_mig: bool = False
    energy_mj: int = 5_000_000
    reasons: int = 0x1
    lost: bool = False
    capturing: bool = False
    """Whether a CUDA graph is being recorded."""
    initialized: bool = False
    allocated: int = 0
    allocated_in_all: int = 0
    """What was freed included."""
    ooms: int = 0
    reserved: int = 0
    allocated_peak: int = 0
    reserved_peak: int = 0
    now_s: float = 0.0
    busy_until_s: float = 0.0

    def allocate(self, num_bytes: int) -> None:
        """PyTorch takes memory; CUDA is initialised with the first of it."""
        self.initialized = True
        self.allocated += num_bytes
        self.allocated_in_all += num_bytes
        self.reserved = max(self.reserved, self.allocated)
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def free(self, num_bytes: int) -> None:
        """PyTorch frees a tensor; the allocator keeps the block."""
        self.allocated -= num_bytes

    def give_cache_back(self) -> None:
        """The allocator returns what it does not use."""
        self.reserved = self.allocated

    @property
    def own_bytes(self) -> int:
        """What the driver counts for this process."""
        return self.context_bytes + self.reserved if self.initialized else 0

    @property
    def used_bytes(self) -> int:
        """What the driver counts for the card."""
        return self.firmware_bytes + self.own_bytes + sum(self.others.values())


@dataclass
class FakeNvml:
    """``pynvml`` on one FakeGpu. ``refusals`` names functions and the code of the error that they answer with."""

    gpu: FakeGpu
    refusals: dict[str, int] = field(default_factory=dict)
    hides_processes: bool = False
    """As in some containers: the list is empty."""
    sessions: int = 0
    calls: list[str] = field(default_factory=list)
    NVMLError: type[Exception] = FakeNvmlError

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return functools.partial(self._answer, name)

    def _answer(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        if self.sessions < 1 and name != "nvmlInit":
            raise FakeNvmlError(UNINITIALIZED)
        if self.gpu.lost and name != "nvmlShutdown":
            raise FakeNvmlError(GPU_IS_LOST)
        if name in self.refusals:
            raise FakeNvmlError(self.refusals[name])
        match name:
            case "nvmlInit":
                self.sessions += 1
            case "nvmlShutdown":
                self.sessions -= 1
            case "nvmlSystemGetDriverVersion":
                return b"550.54"
            case "nvmlDeviceGetHandleByUUID":
                if arguments != (f"{'MIG' if self.gpu.is_mig else 'GPU'}-{self.gpu.uuid}",):
                    raise FakeNvmlError(NOT_FOUND)
                return self.gpu
            case "nvmlDeviceGetMemoryInfo":
                return SimpleNamespace(total=self.gpu.total_bytes, used=self.gpu.used_bytes)
            case "nvmlDeviceGetComputeRunningProcesses":
                own = {self.gpu.own_pid: self.gpu.own_bytes} if self.gpu.initialized else {}
                processes = {} if self.hides_processes else own | self.gpu.others
                return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes.items()]
            case "nvmlDeviceGetTotalEnergyConsumption":
                return self.gpu.energy_mj
            case "nvmlDeviceGetCurrentClocksThrottleReasons":
                return self.gpu.reasons
            case _:
                raise AttributeError(name)


class FakeEvent:
    """A CUDA event: it happens when the device, which lags behind, gets to it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.at_s = 0.0

    def record(self, _stream: object) -> None:
        assert not self._gpu.capturing
        self._fail_if_lost()
        self.at_s = max(self._gpu.now_s, self._gpu.busy_until_s)

    def query(self) -> bool:
        self._fail_if_lost()
        return self.at_s <= self._gpu.now_s

    def synchronize(self) -> None:
        self._fail_if_lost()
        self._gpu.now_s = max(self._gpu.now_s, self.at_s)

    def elapsed_time(self, later: FakeEvent) -> float:
        self._fail_if_lost()
        return (later.at_s - self.at_s) * 1e3

    def _fail_if_lost(self) -> None:
        if self._gpu.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")


@dataclass
class FakeCuda:
    """``torch.cuda`` on one FakeGpu."""

    gpu: FakeGpu
    keeps_statistics: bool = True
    """False: as with the backend cudaMallocAsync."""
    count: int = 1
    """How many devices there are; the FakeGpu is the last of them, the first is current."""

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self.gpu)

    def is_current_stream_capturing(self) -> bool:
        return self.gpu.capturing

    def is_initialized(self) -> bool:
        return self.gpu.initialized

    def current_device(self) -> int:
        assert self.gpu.initialized, "this would initialise CUDA"
        return 0

    def get_allocator_backend(self) -> str:
        return "native" if self.keeps_statistics else "cudaMallocAsync"

    def current_stream(self, device: int) -> int:
        assert device == self.count - 1, "an event on another device than the run's"
        return device

    def device_count(self) -> int:
        return self.count

    def empty_cache(self) -> None:
        self.gpu.give_cache_back()

    def reset_peak_memory_stats(self, device: int) -> None:
        if device == self.count - 1:
            self.gpu.allocated_peak, self.gpu.reserved_peak = self.gpu.allocated, self.gpu.reserved

    def memory_stats(self, device: int) -> Mapping[str, Any]:
        if self.gpu.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        gpu = self.gpu
        figures = {
            "allocated_bytes.all.current": gpu.allocated,
            "allocated_bytes.all.peak": gpu.allocated_peak,
            "reserved_bytes.all.current": gpu.reserved,
            "reserved_bytes.all.peak": gpu.reserved_peak,
            "allocated_bytes.all.allocated": gpu.allocated_in_all,
            "num_ooms": gpu.ooms,
        }
        return figures if self.keeps_statistics and device == self.count - 1 else dict.fromkeys(figures, 0)

    def memory_stats_as_nested_dict(self, device: int) -> Mapping[str, Any]:
        return {"reserved_bytes": {"all": {"current": self.memory_stats(device)["reserved_bytes.all.current"]}}}

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return self.gpu.total_bytes - self.gpu.used_bytes, self.gpu.total_bytes

    def memory_allocated(self) -> int:
        return self.gpu.allocated

    def synchronize(self) -> None:
        self.gpu.now_s = max(self.gpu.now_s, self.gpu.busy_until_s)

    def get_device_properties(self, device: int) -> Any:
        gpu = self.gpu
        return SimpleNamespace(
            name=gpu.name, total_memory=gpu.total_bytes, multi_processor_count=gpu.num_sms, uuid=gpu.uuid,
        )  # fmt: skip
