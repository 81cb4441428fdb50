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

from perfguard.devices._spec import Device
from perfguard.exceptions import UnknownDeviceError

_SEPARATORS = re.compile(r"[\s_-]+")
_BRANDS = re.compile(r"^(nvidia|tesla|geforce)+")


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


def look_up(name: str) -> Device | None:
    """The GPU with this id, alias or NVML name; None if the catalog has none.

    Case, spaces, underscores and hyphens do not matter, nor a leading brand: "RTX 3090", "rtx-3090" and "NVIDIA GeForce RTX
    3090" are the same card.
    """
    return _by_key().get(_key(name))


def find(name: str) -> Device:
    """The GPU with this name, as :func:`look_up` reads it.

    Raises:
        UnknownDeviceError: with the nearest names, if the catalog has none.
    """
    device = look_up(name)
    if device is not None:
        return device
    known = {_key(known): known for known in (*catalog(), *aliases(), "auto", "cpu")}
    nearest = [known[key] for key in difflib.get_close_matches(_key(name), known, n=3, cutoff=0.5)]
    suggestion = f" Did you mean {' or '.join(repr(near) for near in nearest)}?" if nearest else ""
    if _key(name).rstrip("0123456789:") in ("", "cuda", "gpu"):
        suggestion = " For the GPU of this machine say 'auto'."
    raise UnknownDeviceError(
        f"gpu must be a name from the catalog, 'auto' or 'cpu', but got {name!r}.{suggestion} `perfguard gpus` lists all."
    )


def is_alias(name: str) -> bool:
    """Return whether ``name`` is a short name, which may fit several cards."""
    return any(_key(alias) == _key(name) for alias in aliases())


def is_short_for(name: str, device: Device) -> bool:
    """Return whether ``name`` is an alias that fits ``device`` as well as the card that it stands for: "a100" fits every A100."""
    words = next((alias.split("-") for alias in aliases() if _key(alias) == _key(name)), None)
    return words is not None and set(words) <= set(re.split("[-:]", device.id))


def same_name(one: str, other: str) -> bool:
    """Return whether two names are the same but for case, spaces, hyphens and a leading brand."""
    return _key(one) == _key(other)


def _key(name: str) -> str:
    return _BRANDS.sub("", _SEPARATORS.sub("", name.lower()))


@functools.lru_cache(maxsize=1)
def _file() -> Any:
    return json.loads(resources.files("perfguard.devices").joinpath("catalog.json").read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1)
def _devices() -> Mapping[str, Device]:
    devices = {}
    for row in _file()["devices"]:
        fields = {name: value for name, value in row.items() if name != "nvml_name"}
        devices[row["id"]] = Device(kind="cuda", **fields)
    return MappingProxyType(devices)


@functools.lru_cache(maxsize=1)
def _by_key() -> Mapping[str, Device]:
    names = {row["nvml_name"]: row["id"] for row in _file()["devices"]} | dict(aliases()) | {id_: id_ for id_ in catalog()}
    return {_key(name): catalog()[id_] for name, id_ in names.items()}
