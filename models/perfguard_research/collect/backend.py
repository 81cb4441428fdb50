"""Backends that run configurations in a worker process: the CPU, or one CUDA card."""

from __future__ import annotations

import gc
import platform
import resource
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from perfguard.devices import Device
from perfguard.measure import CpuProbe, GpuProbe, Probe
from perfguard_research.collect.health import DriverWindow
from perfguard_research.tables.recipe import Recipe

_LEFTOVER_BYTES = 2**20
_CUDA = torch.device("cuda")


class Backend(Protocol):
    """Interface of the device that a run uses."""

    torch_device: torch.device

    def limit(self, num_bytes: int) -> None:
        """Limit the memory of this process, the driver's context included."""

    def start_afresh(self, recipe: Recipe) -> str:
        """Remove the state of the last run, and set the switches of ``recipe``. Returns what could not be cleaned, in words."""

    def synchronize(self) -> None:
        """Wait until all that was launched is done."""

    def probe(self) -> Probe:
        """Probe that measures a whole run."""

    def window(self) -> DriverWindow | None:
        """Driver counters over the timed steps alone; None without a driver."""

    def facts(self) -> dict[str, str]:
        """Name, memory and versions, for the rows."""


class Processor:
    """This machine's CPU. Its limit is one on the process's data (RLIMIT_DATA); PyTorch says so when it is hit."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._limit_bytes: int | None = None

    def limit(self, num_bytes: int) -> None:
        self._limit_bytes = num_bytes

    def start_afresh(self, recipe: Recipe) -> str:
        gc.collect()
        if self._limit_bytes is not None:  # beside what the C library keeps of earlier runs
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + self._limit_bytes, hard))
        return ""

    def synchronize(self) -> None:
        pass

    def probe(self) -> Probe:
        return CpuProbe()

    def window(self) -> None:
        return None

    def facts(self) -> dict[str, str]:
        return {"versions": versions(), "uuid": "", "total_bytes": ""}


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
        torch_device: torch.device = _CUDA,
        nvml: Any = None,
        clear_workspaces: Callable[[], None] | None = None,
    ) -> None:
        self.torch_device = torch_device
        self._device = device
        self._cuda = torch.cuda if cuda is None else cuda
        self._nvml = nvml
        # Private, and in PyTorch since 1.11: without it the first matrix product's 8 to 32 MiB stay for all rows to come.
        self._clear_workspaces = clear_workspaces or torch._C._cuda_clearCublasWorkspaces

    def limit(self, num_bytes: int) -> None:
        total = int(self._cuda.get_device_properties(0).total_memory)
        share = (num_bytes - self._device.context_bytes) / total
        self._cuda.set_per_process_memory_fraction(min(max(share, 0.0), 1.0))

    def start_afresh(self, recipe: Recipe) -> str:
        gc.collect()
        self._clear_workspaces()
        self._cuda.empty_cache()
        torch.backends.cudnn.benchmark = recipe.cudnn_benchmark
        # PyTorch's own defaults: convolutions may take TF32, matrix products may not.
        torch.backends.cudnn.allow_tf32 = recipe.tf32 != "off"
        torch.backends.cuda.matmul.allow_tf32 = recipe.tf32 == "on"
        left = int(self._cuda.memory_allocated())
        return f"{left / 2**20:.0f} MiB of an earlier run could not be freed" if left > _LEFTOVER_BYTES else ""

    def synchronize(self) -> None:
        self._cuda.synchronize()

    def probe(self) -> Probe:
        return GpuProbe(self._device.context_bytes, cuda=self._cuda, nvml=self._nvml)

    def window(self) -> DriverWindow:
        return DriverWindow(cuda=self._cuda, nvml=self._nvml)

    def facts(self) -> dict[str, str]:
        properties = self._cuda.get_device_properties(0)
        return {
            "versions": f"cuda {torch.version.cuda}, cudnn {torch.backends.cudnn.version()}, {versions()}",
            "uuid": str(getattr(properties, "uuid", "")),
            "total_bytes": str(properties.total_memory),
        }


def versions() -> str:
    """Versions of Python and of the libraries that define networks."""
    found = [f"python {platform.python_version()}"]
    for name in ("timm", "torchvision", "transformers", "triton"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            pass
    return ", ".join(found)


def _data_bytes() -> int:
    """Bytes that RLIMIT_DATA counts: the private writable memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData")
