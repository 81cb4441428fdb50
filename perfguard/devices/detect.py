"""Detection: the device that a name means, the GPU that NVML shows, and this machine's CPU."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import re
import timeit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from perfguard.devices.catalog import USABLE_MEMORY, Device, find, is_short_for, look_up
from perfguard.exceptions import ConfigurationError, MeasuringError

_T = TypeVar("_T")


def resolve_device(gpu: str | Device, *, nvml: object = None) -> Device:
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
        ConfigurationError: for a name that the catalog does not have.
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


def is_here(device: Device) -> bool:
    """Whether this process may use ``device``. Every CPU is taken for this machine's."""
    return device.kind == "cpu" or ((here := visible_gpu()) is not None and here.id == device.id)


def device_here(gpu: str) -> Device:
    """Return the device that ``--gpu`` names, on which PyTorch can run in this process.

    Raises:
        ConfigurationError: for a name that the catalog does not have.
        MeasuringError: if the device is another one than this machine's, or this PyTorch has no CUDA.
    """
    import torch

    device = resolve_device(gpu)
    if not is_here(device):
        here = visible_gpu() or cpu()
        raise MeasuringError(f"--gpu {gpu} is the {device.name}, but this machine has the {here.name}. Use --gpu auto.")
    if device.kind == "cuda" and not torch.backends.cuda.is_built():
        raise MeasuringError(
            f"There is a {device.name}, but this PyTorch ({torch.__version__}) has no CUDA. Install one that has."
        )
    return device


def visible_gpu(*, nvml: object = None) -> Device | None:
    """The first GPU that this process may use (``CUDA_VISIBLE_DEVICES``); None: there is none. Does not initialise CUDA.

    Args:
        nvml: stands in for the module ``pynvml``.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()  # an index or a UUID
    if not first or first.startswith("-"):  # which hides all
        return None
    return detect_gpu(int(first) if first.isdecimal() else first, nvml=nvml)


def detect_gpu(index: int | str = 0, *, nvml: Any = None) -> Device | None:
    """The GPU that NVML shows at ``index``; None where there is no NVML, no such GPU, or no permission.

    A card of the catalog gets the catalog's figures, with NVML's memory where the sizes differ. Any other card gets NVML's
    figures and cautious rates; its ``source`` says so.

    Args:
        index: as NVML counts, in the order of the PCI bus whatever ``CUDA_VISIBLE_DEVICES`` says; or a UUID ("GPU-...",
            "MIG-...").
        nvml: stands in for the module ``pynvml``.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
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


def _describe(nvml: Any, handle: Any) -> Device:
    raw_name = nvml.nvmlDeviceGetName(handle)
    name = raw_name.decode() if isinstance(raw_name, bytes) else raw_name
    total_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    known = look_up(name, total_bytes)
    if known is None:
        return _from_nvml(nvml, handle, name, int(total_bytes * USABLE_MEMORY))
    if abs(total_bytes / known.memory_bytes - 1) < 0.1:  # the sizes that one name is sold with are at least a fifth apart
        return known
    source = f"{known.source}; memory of this card from NVML"
    return replace(known, memory_bytes=int(total_bytes * USABLE_MEMORY), source=source)


def id_of(name: str) -> str:
    """The id of a GPU that the catalog does not know."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


def _from_nvml(nvml: Any, handle: Any, name: str, memory_bytes: int) -> Device:
    def read(query: Callable[[], _T], default: _T) -> _T:
        try:
            return query() or default
        except nvml.NVMLError:
            return default

    # Low guesses for what NVML does not say: an unknown card is thought slower rather than faster than it is.
    major, minor = read(lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)), (0, 0))
    cores = read(lambda: nvml.nvmlDeviceGetNumGpuCores(handle), 2048)
    cores_per_sm = 64 if (major, minor) == (6, 0) or (7, 0) <= (major, minor) <= (8, 0) else 128
    clock_mhz = read(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM), 1400)
    clock_hz = 0.85e6 * clock_mhz  # NVML reports the highest clock; data sheets use the boost clock
    memory_clock_mhz = read(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM), 0)
    bus_bits = read(lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle), 0)
    power_mw = read(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle), 0)
    # The ratios to fp32 hold for the slowest cards of each generation (GeForce, and GTX 16 for Turing).
    fp32 = 2 * cores * clock_hz
    rates = {"fp32": fp32} | ({"fp16": 2 * fp32} if (major, minor) >= (7, 0) else {})
    rates |= {"tf32": fp32, "bf16": 2 * fp32} if (major, minor) >= (8, 0) else {}
    return Device(
        id=id_of(name),
        name=name,
        kind="cuda",
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=2 * memory_clock_mhz * 1e6 * bus_bits / 8 or 200e9,  # two transfers per clock
        peak_flops=rates,
        num_sms=max(1, cores // cores_per_sm),
        boost_clock_hz=clock_hz,
        l2_bytes=4 * 2**20,
        tdp_w=power_mw / 1e3,
        architecture=f"compute {major}.{minor}" if major else "unknown",
        context_bytes=520 * 2**20,
        launch_overhead_s=6e-6,
        source="NVML; not in the catalog: rates are cautious guesses from cores and clocks, L2 and context are guesses",
    )


@functools.cache
def cpu() -> Device:
    """This machine's CPU: best of a few matrix products and copies with torch's current number of threads.

    Its rates are measured once per process, in about a third of a second.
    """
    import torch

    # the copy exceeds most caches; the product is large enough for all threads
    matrix_size = 768
    copy_bytes = 60 * 2**20

    here: Any = {"device": "cpu", "dtype": torch.float32}  # whatever the script's defaults are
    source = torch.ones(copy_bytes // 4, **here)
    target = torch.empty(copy_bytes // 4, **here)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        copy_s = _best_time(functools.partial(target.copy_, source))
        del source, target  # products load their library, which needs memory too
        matrix = torch.ones(matrix_size, matrix_size, **here)
        matmul_s = _best_time(lambda: matrix @ matrix)
    flops_per_s = 2 * matrix_size**3 / matmul_s
    frequency = psutil.cpu_freq()
    return Device(
        id="cpu",
        name=cpu_name(),
        kind="cpu",
        memory_bytes=host_memory_bytes(),
        bandwidth_bytes_per_s=2 * copy_bytes / copy_s,
        peak_flops={"fp32": flops_per_s},
        num_sms=torch.get_num_threads(),
        boost_clock_hz=(frequency.max or frequency.current or 2000.0) * 1e6 if frequency else 2e9,
        l2_bytes=2**20 * torch.get_num_threads(),
        tdp_w=0.0,
        architecture=platform.machine(),
        context_bytes=0,
        launch_overhead_s=5e-6,
        source="measured on this machine",
    )


def _best_time(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=1, repeat=15))


@functools.cache
def cpu_name() -> str:
    """Return the name of this machine's processor, for instance "AMD EPYC 7763"."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def host_memory_bytes() -> int:
    """Return this machine's physical memory, or the container's limit where it is lower."""
    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total
