"""Finds a device by its name, as a Device, or as the GPU that NVML shows."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from perfguard.devices._catalog import USABLE_MEMORY, find, is_short_for, look_up
from perfguard.devices._cpu import cpu
from perfguard.devices._spec import Device
from perfguard.exceptions import ConfigurationError

_T = TypeVar("_T")

_SAME_MEMORY = 0.1  # the sizes that one name is sold with are at least a fifth apart

# For cards outside the catalog: low guesses, so that an unknown card is thought slower rather than faster than it is.
_SUSTAINED_CLOCK = 0.85  # NVML reports the highest clock; data sheets use the boost clock
_CORES_PER_SM = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_DEFAULT_CORES_PER_SM = 128
_DEFAULT_CORES = 2048
_DEFAULT_CLOCK_MHZ = 1400
_DEFAULT_BANDWIDTH_BYTES_PER_S = 200e9
_L2_BYTES = 4 * 2**20
_CONTEXT_BYTES = 520 * 2**20
_LAUNCH_OVERHEAD_S = 6e-6


class Nvml(Protocol):
    """The part of the module ``pynvml`` that detection uses. Handles are opaque."""

    NVMLError: type[Exception]
    NVML_CLOCK_SM: int
    NVML_CLOCK_MEM: int

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any) -> str | bytes: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> Any: ...
    def nvmlDeviceGetNumGpuCores(self, handle: Any) -> int: ...
    def nvmlDeviceGetMaxClockInfo(self, handle: Any, clock: int) -> int: ...
    def nvmlDeviceGetMemoryBusWidth(self, handle: Any) -> int: ...
    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Any) -> int: ...


def resolve_device(gpu: str | Device, *, nvml: Nvml | None = None) -> Device:
    """Return the device that ``gpu`` names.

    Example:
        >>> resolve_device("RTX 3090").id
        'rtx3090'

    Args:
        gpu: a Device (returned as it is), a name from the catalog, "cpu", or "auto". With "auto" it is the first GPU that this
            process may use (``CUDA_VISIBLE_DEVICES``), else the CPU. A short name such as "a100" means the A100 in this machine,
            or without one the card of the catalog. "a100-sxm-80gb/3g.40gb" means that MIG instance of the card.
        nvml: stands in for the module ``pynvml``.

    Raises:
        UnknownDeviceError: for a name that the catalog does not have.
        ConfigurationError: for anything that is neither a text nor a Device.
    """
    if isinstance(gpu, Device):
        return gpu
    if not isinstance(gpu, str):
        raise ConfigurationError(f'gpu must be a text such as "a100", "auto" or "cpu", or a Device, but got {gpu!r}.')
    name = gpu.strip().lower()
    if name == "cpu":
        return cpu()
    if name == "auto":
        return visible_gpu(nvml=nvml) or cpu()
    named = find(gpu)
    here = visible_gpu(nvml=nvml)
    return here if here is not None and is_short_for(gpu, here) else named


def visible_gpu(*, nvml: Nvml | None = None) -> Device | None:
    """The first GPU that this process may use (``CUDA_VISIBLE_DEVICES``); None: there is none. Does not initialise CUDA.

    Args:
        nvml: stands in for the module ``pynvml``.
    """
    first = _first_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return None if first is None else detect_gpu(first, nvml=nvml)


def detect_gpu(index: int | str = 0, *, nvml: Nvml | None = None) -> Device | None:
    """The GPU that NVML shows at ``index``; None where there is no NVML, no such GPU, or no permission.

    A card of the catalog gets the catalog's figures, with NVML's memory where the sizes differ. Any other card gets NVML's
    figures and cautious rates; its ``source`` says so.

    Args:
        index: as NVML counts, in the order of the PCI bus whatever ``CUDA_VISIBLE_DEVICES`` says; or a UUID ("GPU-...",
            "MIG-...").
        nvml: stands in for the module ``pynvml``.
    """
    try:
        nvml = nvml or cast(Nvml, importlib.import_module("pynvml"))
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(index) if isinstance(index, str) else nvml.nvmlDeviceGetHandleByIndex(index)
        return _describe(nvml, handle)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _first_visible(cuda_visible_devices: str | None) -> int | str | None:
    """The first GPU in ``CUDA_VISIBLE_DEVICES``: index or UUID; None if it hides all."""
    if cuda_visible_devices is None:
        return 0
    first = cuda_visible_devices.split(",")[0].strip()
    if not first or first.startswith("-"):
        return None
    return int(first) if first.isdecimal() else first


def _describe(nvml: Nvml, handle: Any) -> Device:
    raw_name = nvml.nvmlDeviceGetName(handle)
    name = raw_name.decode() if isinstance(raw_name, bytes) else raw_name
    total_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    known = look_up(name, total_bytes)
    if known is None:
        return _from_nvml(nvml, handle, name, int(total_bytes * USABLE_MEMORY))
    if abs(total_bytes / known.memory_bytes - 1) < _SAME_MEMORY:
        return known
    source = f"{known.source}; memory of this card from NVML"
    return replace(known, memory_bytes=int(total_bytes * USABLE_MEMORY), source=source)


def id_of(name: str) -> str:
    """The id of a GPU that the catalog does not know."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


def _from_nvml(nvml: Nvml, handle: Any, name: str, memory_bytes: int) -> Device:
    def read(query: Callable[[], _T], default: _T) -> _T:
        try:
            return query() or default
        except nvml.NVMLError:
            return default

    major, minor = read(lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)), (0, 0))
    cores = read(lambda: nvml.nvmlDeviceGetNumGpuCores(handle), _DEFAULT_CORES)
    clock_mhz = read(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM), _DEFAULT_CLOCK_MHZ)
    memory_clock_mhz = read(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM), 0)
    bus_bits = read(lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle), 0)
    power_mw = read(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle), 0)
    clock_hz = clock_mhz * 1e6 * _SUSTAINED_CLOCK
    return Device(
        id=id_of(name),
        name=name,
        kind="cuda",
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=2 * memory_clock_mhz * 1e6 * bus_bits / 8 or _DEFAULT_BANDWIDTH_BYTES_PER_S,
        peak_flops=_cautious_rates(2 * cores * clock_hz, (major, minor)),
        num_sms=max(1, cores // _CORES_PER_SM.get((major, minor), _DEFAULT_CORES_PER_SM)),
        boost_clock_hz=clock_hz,
        l2_bytes=_L2_BYTES,
        tdp_w=power_mw / 1e3,
        architecture=f"compute {major}.{minor}" if major else "unknown",
        context_bytes=_CONTEXT_BYTES,
        launch_overhead_s=_LAUNCH_OVERHEAD_S,
        source="NVML; not in the catalog: rates are cautious guesses from cores and clocks, L2 and context are guesses",
    )


def _cautious_rates(fp32: float, capability: tuple[int, int]) -> dict[str, float]:
    """Peak FLOP/s with ratios to fp32 that hold for the slowest cards of each generation (GeForce, and GTX 16 for Turing)."""
    rates = {"fp32": fp32}
    if capability >= (7, 0):
        rates |= {"fp16": 2 * fp32}
    if capability >= (8, 0):
        rates |= {"tf32": fp32, "bf16": 2 * fp32}
    return rates
