"""A part of a GPU as a device of its own: a MIG instance, or a share of the multiprocessors under MPS."""

from __future__ import annotations

import math
from dataclasses import replace

from perfguard.devices._mig import MigProfile
from perfguard.devices._spec import Device
from perfguard.exceptions import ConfigurationError

_COMPUTE_SLICES = 7
_MEMORY_SLICES = 8


def mig_instance(device: Device, profile: MigProfile) -> Device:
    """``device`` cut down to one instance of ``profile``: its sevenths of the multiprocessors, its eighths of memory, cache and
    bandwidth (NVIDIA's Multi-Instance GPU User Guide).

    Example:
        >>> from perfguard.devices import catalog, mig_profiles
        >>> a100 = catalog()["a100-pcie-40gb"]
        >>> mig_instance(a100, mig_profiles(a100)[1]).num_sms      # 2g.10gb: the guide gives 28 of 98
        28
    """
    # With MIG on, a GPU gives each slice the same number of multiprocessors and keeps the rest: 7 x 14 of an A100's 108.
    per_slice = 2 * (device.num_sms // _COMPUTE_SLICES // 2)
    memory_share = profile.memory_slices / _MEMORY_SLICES
    part = _with_multiprocessors(device, f"{device.id}:{profile.name}", per_slice * profile.compute_slices)
    return replace(
        part,
        name=f"{device.name} {profile.name}",
        memory_bytes=profile.memory_bytes,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * memory_share,
        l2_bytes=int(device.l2_bytes * memory_share),
        source=f"{device.source}; one MIG instance",
    )


def mps_share(device: Device, share: float) -> Device:
    """``device`` with ``share`` of its multiprocessors, as CUDA_MPS_ACTIVE_THREAD_PERCENTAGE gives; memory and bandwidth are
    those of the whole (LILOU, section 4).

    Args:
        device: one of NVIDIA's GPUs.
        share: within (0, 1].

    Raises:
        ConfigurationError: for a share outside (0, 1], a CPU, or a GPU of AMD's.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ConfigurationError(f"An MPS share must lie in (0, 1], for instance 0.5, but got {share!r}.")
    if device.kind != "cuda" or device.is_amd:
        raise ConfigurationError(f"{device.name} has no multiprocessors to share; MPS is for NVIDIA's GPUs.")
    part = _with_multiprocessors(device, f"{device.id}:mps{share:.0%}", max(1, math.ceil(share * device.num_sms)))
    return replace(part, name=f"{device.name}, {share:.0%} of its multiprocessors", source=f"{device.source}; an MPS share")


def _with_multiprocessors(device: Device, id_: str, num_sms: int) -> Device:
    share = num_sms / device.num_sms
    rates = {arithmetic: rate * share for arithmetic, rate in device.peak_flops.items()}
    return replace(device, id=id_, num_sms=num_sms, peak_flops=rates)
