"""Parts of a GPU as devices: a MIG instance of an A100, H100, H200 or B200, or a share of the multiprocessors under MPS."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING

from perfguard.exceptions import ConfigurationError

if TYPE_CHECKING:
    from perfguard.devices.catalog import Device

_MEMORY_SLICES = 8


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One way to cut a part from a GPU."""

    name: str
    """The profile as nvidia-smi writes it, for instance "2g.10gb"."""
    compute_slices: int
    """Sevenths of the GPU's multiprocessors."""
    memory_slices: int
    """Eighths of the GPU's memory."""
    memory_bytes: int
    """Memory of a process in the instance, a cautious value."""

    @property
    def num_instances(self) -> int:
        """Number of such instances on one GPU."""
        return min(7 // self.compute_slices, _MEMORY_SLICES // self.memory_slices)


def mig_profiles(device: Device) -> tuple[MigProfile, ...]:
    """The profiles that ``device`` can be split into, smallest first; none where it cannot.

    Example:
        >>> from perfguard.devices import catalog
        >>> [profile.name for profile in mig_profiles(catalog()["h200-sxm-141gb"])]
        ['1g.18gb', '2g.35gb', '3g.71gb', '7g.141gb']
    """
    return _profiles_of(device, "devices")


def mig_profile(device: Device, name: str) -> MigProfile:
    """The MIG profile of ``device`` called ``name``: one of :func:`mig_profiles`, or 4g, or 1g with two memory slices.

    Raises:
        ConfigurationError: with the profiles that ``device`` has.
    """
    known = {profile.name: profile for profile in (*mig_profiles(device), *_profiles_of(device, "others"))}
    if name not in known:
        raise ConfigurationError(f"{device.name} has no MIG profile {name!r}. It has: {', '.join(known) or 'none'}.")
    return known[name]


def part_of(device: Device, name: str) -> Device:
    """The part of ``device`` called ``name``: a MIG profile such as "3g.20gb", or a share of the multiprocessors: "mps25%".

    Raises:
        ConfigurationError: if the device has no such part.
    """
    share = re.fullmatch(r"mps(\d+)%", name)
    return mps_share(device, int(share[1]) / 100) if share else mig_instance(device, mig_profile(device, name))


def smallest_profile(device: Device, num_bytes: float) -> MigProfile | None:
    """The smallest MIG profile of ``device`` that holds ``num_bytes``; None if none does.

    DIPPM's rule (Panner Selvam and Brorsson 2023, equation 2), with what an instance really has instead of its nominal size.
    Give an upper bound of the peak memory, such as a quantile, with the driver's context.

    Raises:
        ConfigurationError: for a device that MIG cannot split.
    """
    profiles = mig_profiles(device)
    if not profiles:
        known = ", ".join(_profiles())
        raise ConfigurationError(f"{device.name} ({device.id}) has no MIG profiles. Those that have: {known}.")
    return next((profile for profile in profiles if num_bytes <= profile.memory_bytes), None)


def _profiles_of(device: Device, group: str) -> tuple[MigProfile, ...]:
    # An instance has a little less than its eighths: nvidia-smi lists 4.75 GiB for 1g.5gb (39.4 / 8 = 4.92) and 16 GiB for
    # 1g.18gb (139.8 / 8 = 17.5). We have no such card with MIG on to read all of them, so one cautious share stands for every
    # part.
    def usable_bytes(slices: int) -> int:
        return int((0.98 if slices == _MEMORY_SLICES else 0.9) * device.memory_bytes * slices / _MEMORY_SLICES)

    found = _profiles(group).get(device.id, ())
    return tuple(MigProfile(name, compute, memory, usable_bytes(memory)) for name, compute, memory in found)


@functools.cache
def _profiles(group: str = "devices") -> Mapping[str, list[tuple[str, int, int]]]:
    text = resources.files("perfguard.devices").joinpath("mig.json").read_text(encoding="utf-8")
    devices: Mapping[str, list[tuple[str, int, int]]] = json.loads(text)[group]
    return devices


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
    per_slice = 2 * (device.num_sms // 7 // 2)
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

    Raises:
        ConfigurationError: for a share outside (0, 1], or for a CPU.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ConfigurationError(f"An MPS share must lie in (0, 1], for instance 0.5, but got {share!r}.")
    if device.kind != "cuda":
        raise ConfigurationError(f"{device.name} has no multiprocessors to share; MPS is for NVIDIA's GPUs.")
    part = _with_multiprocessors(device, f"{device.id}:mps{share:.0%}", max(1, math.ceil(share * device.num_sms)))
    return replace(part, name=f"{device.name}, {share:.0%} of its multiprocessors", source=f"{device.source}; an MPS share")


def _with_multiprocessors(device: Device, id_: str, num_sms: int) -> Device:
    share = num_sms / device.num_sms
    rates = {arithmetic: rate * share for arithmetic, rate in device.peak_flops.items()}
    return replace(device, id=id_, num_sms=num_sms, peak_flops=rates)
