"""MIG: the parts that an A100, H100, H200 or B200 can be split into, and the smallest one that a workload fits."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from perfguard.devices._spec import Device
from perfguard.exceptions import ConfigurationError, UnknownDeviceError

_MEMORY_SLICES = 8
# An instance has a little less than its eighths: nvidia-smi lists 4.75 GiB for 1g.5gb (39.4 / 8 = 4.92) and 16 GiB for 1g.18gb
# (139.8 / 8 = 17.5). We have no such card with MIG on to read all of them, so one cautious share stands for every part.
_USABLE_OF_A_PART = 0.9
_USABLE_OF_THE_WHOLE = 0.98


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
    """Memory of a process in the instance, a cautious value; see the note in the module."""

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
        UnknownDeviceError: with the profiles that ``device`` has.
    """
    known = {profile.name: profile for profile in (*mig_profiles(device), *_profiles_of(device, "others"))}
    if name not in known:
        raise UnknownDeviceError(f"{device.name} has no MIG profile {name!r}. It has: {', '.join(known) or 'none'}.")
    return known[name]


def smallest_profile(device: Device, num_bytes: float) -> MigProfile | None:
    """The smallest MIG profile of ``device`` that holds ``num_bytes``; None if none does.

    DIPPM's rule (Panner Selvam and Brorsson 2023, equation 2), with what an instance really has instead of its nominal size.

    Args:
        device: a GPU of the catalog.
        num_bytes: peak memory, the driver's context included; give an upper bound, such as a quantile, not a median.

    Raises:
        ConfigurationError: for a device that MIG cannot split.
    """
    profiles = mig_profiles(device)
    if not profiles:
        known = ", ".join(_profiles())
        raise ConfigurationError(f"{device.name} ({device.id}) has no MIG profiles. Those that have: {known}.")
    return next((profile for profile in profiles if num_bytes <= profile.memory_bytes), None)


def _profiles_of(device: Device, group: str) -> tuple[MigProfile, ...]:
    return tuple(
        MigProfile(name, compute_slices, memory_slices, _usable_bytes(device, memory_slices))
        for name, compute_slices, memory_slices in _profiles(group).get(device.id, ())
    )


def _usable_bytes(device: Device, memory_slices: int) -> int:
    usable = _USABLE_OF_THE_WHOLE if memory_slices == _MEMORY_SLICES else _USABLE_OF_A_PART
    return int(usable * device.memory_bytes * memory_slices / _MEMORY_SLICES)


@functools.lru_cache(maxsize=2)
def _profiles(group: str = "devices") -> Mapping[str, list[tuple[str, int, int]]]:
    text = resources.files("perfguard.devices").joinpath("mig.json").read_text(encoding="utf-8")
    devices: Mapping[str, list[tuple[str, int, int]]] = json.loads(text)[group]
    return devices
