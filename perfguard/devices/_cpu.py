"""The processor as a device: its rates are measured once per process, in about a third of a second."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from perfguard.devices._spec import Device

_MATRIX_SIZE = 768
_COPY_BYTES = 60 * 2**20
_REPEATS = 15


@functools.lru_cache(maxsize=1)
def cpu() -> Device:
    """This machine's CPU: best of a few matrix products and copies with torch's current number of threads."""
    import torch

    here: Any = {"device": "cpu", "dtype": torch.float32}  # whatever the script's defaults are
    source, target = torch.ones(_COPY_BYTES // 4, **here), torch.empty(_COPY_BYTES // 4, **here)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        copy_s = _best_time(functools.partial(target.copy_, source))
        del source, target  # products load their library, which needs memory too
        matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, **here)
        matmul_s = _best_time(lambda: matrix @ matrix)
    flops_per_s = 2 * _MATRIX_SIZE**3 / matmul_s
    frequency = psutil.cpu_freq()
    return Device(
        id="cpu",
        name=cpu_name(),
        kind="cpu",
        memory_bytes=_memory_limit_bytes(),
        bandwidth_bytes_per_s=2 * _COPY_BYTES / copy_s,
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
    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(once() for _ in range(_REPEATS))


def cpu_name() -> str:
    """Return the name of this machine's processor, for instance "AMD EPYC 7763"."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_limit_bytes() -> int:
    """Physical memory, or the container's limit where it is lower."""
    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total
