"""The catalog of GPUs: ``catalog.json``, read once, and the names that people write for them."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from perfguard.devices._mig import mig_profile
from perfguard.devices._partition import mig_instance
from perfguard.devices._spec import Device
from perfguard.exceptions import UnknownDeviceError

_SEPARATORS = re.compile(r"[\s_-]+")
_BRANDS = re.compile(r"^(nvidia|tesla|geforce|amd|instinct)+")

USABLE_MEMORY = 0.975
"""CUDA's total memory is 0.5 to 2.5% below the nominal size on the catalog's cards: the driver keeps the rest."""


def catalog() -> Mapping[str, Device]:
    """Every GPU that PerfGuard knows, by id, in the order of the file. The rates are dense.

    Example:
        >>> catalog()["a100-pcie-40gb"].num_sms
        108
    """
    return _devices()


@functools.lru_cache(maxsize=1)
def aliases() -> Mapping[str, str]:
    """Short names and the ids they stand for.

    A name that fits several cards means the one that has measurements: "a100" is the PCIe card with 40 GB, "v100" the PCIe
    card with 32 GB. Without measurements it means the most common card: "h100" is the SXM5 module.
    """
    return MappingProxyType(_file()["aliases"])


def look_up(name: str, memory_bytes: int | None = None) -> Device | None:
    """The GPU with this id, alias or NVML name; None if the catalog has none.

    Case, spaces, underscores and hyphens do not matter, nor a leading brand: "RTX 3090", "rtx-3090" and "NVIDIA GeForce RTX
    3090" are the same card. "a100-sxm-80gb/3g.40gb" is the MIG instance of that card, as is its id, "a100-sxm-80gb:3g.40gb".

    Args:
        name: as people or the driver write it.
        memory_bytes: the card's memory. It distinguishes cards with the same NVML name: the RTX 3080 is sold with 10 and 12 GB.
    """
    card, _, profile = name.replace("/", ":").partition(":")
    if profile:
        return _instance(card, profile)
    device = _by_key().get(_key(name))
    if device is None or memory_bytes is None:
        return device
    namesakes = [catalog()[id_] for id_, nvml_name in _nvml_names().items() if nvml_name == _nvml_names()[device.id]]
    return min(namesakes, key=lambda namesake: abs(namesake.memory_bytes - memory_bytes))


def find(name: str) -> Device:
    """The GPU with this name, as :func:`look_up` reads it.

    Raises:
        UnknownDeviceError: with the nearest names, if the catalog has none; with the card's profiles, for one that it lacks.
    """
    device = look_up(name)
    if device is not None:
        return device
    card, slash, profile = name.partition("/")
    if slash and (whole := look_up(card)) is not None:
        mig_profile(whole, profile)  # it raises
    known = {_key(known): known for known in (*catalog(), *aliases(), "auto", "cpu")}
    nearest = [known[key] for key in difflib.get_close_matches(_key(name), known, n=3, cutoff=0.5)]
    suggestion = f" Did you mean {' or '.join(repr(near) for near in nearest)}?" if nearest else ""
    if _key(name).rstrip("0123456789:") in ("", "cuda", "gpu"):
        suggestion = " For the GPU of this machine say 'auto'."
    raise UnknownDeviceError(
        f"gpu must be a name from the catalog, 'auto' or 'cpu', but got {name!r}.{suggestion} `perfguard gpus` lists all."
    )


def _instance(card: str, profile: str) -> Device | None:
    whole = _by_key().get(_key(card))
    try:
        return None if whole is None else mig_instance(whole, mig_profile(whole, profile.strip().lower()))
    except UnknownDeviceError:
        return None


def is_alias(name: str) -> bool:
    """Return whether ``name`` is a short name, which may fit several cards."""
    return _alias(name) is not None


def is_short_for(name: str, device: Device) -> bool:
    """Return whether ``name`` fits ``device`` as well as the card that it stands for.

    The alias "a100" fits every A100. A name that the driver gives to cards of several sizes fits each size.
    """
    alias = _alias(name)
    if alias is not None and set(alias.split("-")) <= set(re.split("[-:]", device.id)):
        return True
    named, nvml_names = look_up(name), _nvml_names()
    if named is None or named.id not in nvml_names or nvml_names.get(device.id) != nvml_names[named.id]:
        return False
    return alias is not None or _key(name) == _key(nvml_names[named.id])


def same_name(one: str, other: str) -> bool:
    """Return whether two names are the same but for case, spaces, hyphens and a leading brand."""
    return _key(one) == _key(other)


def _alias(name: str) -> str | None:
    """The alias that ``name`` is, as the catalog spells it."""
    return next((alias for alias in aliases() if _key(alias) == _key(name)), None)


def _key(name: str) -> str:
    return _BRANDS.sub("", _SEPARATORS.sub("", name.lower()))


@functools.lru_cache(maxsize=1)
def _file() -> Any:
    return json.loads(resources.files("perfguard.devices").joinpath("catalog.json").read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1)
def _devices() -> Mapping[str, Device]:
    devices = {}
    for row in _file()["devices"]:
        fields = {name: value for name, value in row.items() if name not in ("nvml_name", "memory_gb")}
        defaults = {
            "memory_bytes": int(USABLE_MEMORY * row["memory_gb"] * 2**30),
            **_file()["architectures"][row["architecture"]],
        }
        devices[row["id"]] = Device(kind="cuda", **(defaults | fields))
    return MappingProxyType(devices)


@functools.lru_cache(maxsize=1)
def _nvml_names() -> dict[str, str]:
    """NVML names by device id. Cards of several sizes may share one."""
    return {row["id"]: row["nvml_name"] for row in _file()["devices"]}


@functools.lru_cache(maxsize=1)
def _by_key() -> Mapping[str, Device]:
    first = {nvml_name: id_ for id_, nvml_name in reversed(_nvml_names().items())}  # the first of each name stays
    names = first | dict(aliases()) | {id_: id_ for id_ in catalog()}
    return {_key(name): catalog()[id_] for name, id_ in names.items()}
