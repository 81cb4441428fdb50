"""``--slurm``: the lines of a batch script that reserve what a trial is predicted to need.

Slurm ends a job that takes more than it has reserved. So each line has the 95% quantile of its prediction, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from perfguard.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.predictor import Estimate, Prediction

_SURE = 0.95
_GIB = 2**30
_OF_CUDA_BYTES = 2 * _GIB
"""Added for what CUDA holds on the host in each process, which a dry run without a GPU does not show. Assumed, not measured."""


def slurm_lines(prediction: Prediction, device: Device, *, host_memory: Estimate | None, processes: int = 1) -> Iterator[str]:
    """Yield the lines of ``sbatch`` for a trial on one node, each below a comment that says where it comes from.

    Args:
        prediction: of the trial. Without its total time there is no ``--time``.
        device: each process has one.
        host_memory: bytes that one process holds in the memory of the host. None: not known, so there is no ``--mem``.
        processes: on the node.
    """
    if device.kind == "cuda":
        peak = format_bytes(prediction.peak_memory.quantile(_SURE))
        yield f"# Memory of each GPU: {peak} of the {format_bytes(device.memory_bytes)} of {device.name}, with a chance of 95%."
        yield f"#SBATCH --gres=gpu:{processes}"
    if host_memory is not None:
        own_bytes = _OF_CUDA_BYTES if device.kind == "cuda" else 0
        of_cuda = f", and {format_bytes(own_bytes)} for CUDA" if own_bytes else ""
        each = format_bytes(host_memory.quantile(_SURE))
        yield f"# Memory of the host for each process: {each} with a chance of 95%{of_cuda}."
        yield f"#SBATCH --mem={math.ceil(processes * (host_memory.quantile(_SURE) + own_bytes) / _GIB)}G"
    if prediction.total_time is not None:
        needed_s = prediction.total_time.quantile(_SURE)
        median = format_seconds(prediction.total_time.median)
        yield f"# Time of all steps: {median}; {format_seconds(needed_s)} with a chance of 95%. Add what comes before."
        yield f"#SBATCH --time={clock_of(needed_s)}"


def clock_of(seconds: float) -> str:
    """Return ``seconds`` as Slurm reads them, rounded up to a minute.

    Example:
        >>> clock_of(59.0), clock_of(90_061.0)
        ('00:01:00', '1-01:02:00')
    """
    minutes = max(math.ceil(seconds / 60), 1)
    days = minutes // 1440
    hours = minutes // 60 % 24
    rest = minutes % 60
    return f"{f'{days}-' if days else ''}{hours:02}:{rest:02}:00"
