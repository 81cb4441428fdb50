"""Device: what a prediction needs to know of the hardware. The catalog: ``catalog.json``, and the names that people write."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

from perfguard.devices.parts import part_of
from perfguard.exceptions import ConfigurationError

DeviceKind = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as its data sheet describes it, or a CPU as it was measured.

    The rates are per second and dense: vendors' figures for structured sparsity are halved in the catalog.
    """

    id: str
    """Catalog id, for instance "a100-pcie-40gb"; "cpu" for the processor."""
    name: str
    """The name that people know it by."""
    kind: DeviceKind
    """"cuda" or "cpu"."""
    memory_bytes: int
    """Memory for programs, as CUDA reports it."""
    bandwidth_bytes_per_s: float
    """Peak bandwidth of the device memory."""
    peak_flops: Mapping[str, float]
    """FLOP/s by arithmetic: "fp32", "tf32", "fp16", "bf16"; the last three on matrix units. Missing: not supported."""
    num_sms: int
    """Streaming multiprocessors; cores for a CPU."""
    boost_clock_hz: float
    """Highest clock of the data sheet, in hertz."""
    l2_bytes: int
    """Size of the last-level cache."""
    tdp_w: float
    """Power limit, in watts. 0: unknown."""
    architecture: str
    """Vendor's name of the generation, for instance "Ampere"."""
    context_bytes: int
    """What the driver counts for a training process beside PyTorch's allocator: CUDA context and kernels. 0 on a CPU."""
    launch_overhead_s: float
    """Least time of one operator in eager PyTorch."""
    source: str
    """Source of the figures."""
    link_bytes_per_s: float = 0.0
    """Peak bandwidth to the other GPUs of its node, in one direction: NVLink's, or PCIe's. 0: unknown."""
    network_bytes_per_s: float = 0.0
    """The same between nodes, for each GPU. The catalog does not know it: see :meth:`with_network`. 0: nobody has stated it."""

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "bandwidth_bytes_per_s", "num_sms", "boost_clock_hz"):
            if getattr(self, field) <= 0:
                raise ConfigurationError(f"Device.{field} of {self.id!r} must be positive, but got {getattr(self, field)!r}.")
        for field in ("link_bytes_per_s", "network_bytes_per_s"):
            if not 0 <= (rate := getattr(self, field)) < math.inf:
                raise ConfigurationError(f"Device.{field} of {self.id!r} must be finite and not negative, but got {rate!r}.")
        if self.peak_flops.get("fp32", 0) <= 0:
            raise ConfigurationError(f'Device.peak_flops of {self.id!r} must hold a positive "fp32" rate.')

    def flops_per_s(self, arithmetic: str) -> float:
        """Peak rate for ``arithmetic`` ("fp32", "tf32", "fp16", "bf16"); the fp32 rate where the device has no such unit."""
        return self.peak_flops.get(arithmetic, self.peak_flops["fp32"])

    @property
    def identity(self) -> Mapping[str, object]:
        """The fields by which two devices are the same one.

        For a GPU these are all fields but those of links, which older logs do not have. For a CPU they leave out the rates, which
        each process measures anew. One machine with one number of threads and one limit of memory is one device.
        """
        names = [field.name for field in fields(self) if field.name not in ("link_bytes_per_s", "network_bytes_per_s")]
        if self.kind == "cpu":
            names = ["id", "name", "kind", "memory_bytes", "num_sms", "architecture"]
        return {name: getattr(self, name) for name in names}

    def with_memory(self, memory_bytes: int) -> Device:
        """Return the device with another capacity, for a part of a card or a limited process."""
        return replace(self, memory_bytes=memory_bytes)

    def with_network(self, bytes_per_s: float) -> Device:
        """Return the device in nodes that a network joins.

        Args:
            bytes_per_s: of the network in one direction, divided by the GPUs of a node. Eight GPUs that share two adapters of
                200 Gbit/s have 6.25e9.
        """
        return replace(self, network_bytes_per_s=bytes_per_s)


USABLE_MEMORY = 0.975
"""CUDA's total memory is 0.5 to 2.5% below the nominal size on the catalog's cards: the driver keeps the rest."""


@functools.cache
def catalog() -> Mapping[str, Device]:
    """Every GPU that PerfGuard knows, by id, in the order of the file. The rates are dense.

    Example:
        >>> catalog()["a100-pcie-40gb"].num_sms
        108
    """
    devices = {}
    for row in _file()["devices"]:
        assumed = {"memory_bytes": int(USABLE_MEMORY * row["memory_gb"] * 2**30), **_file()["architectures"][row["architecture"]]}
        figures = {name: value for name, value in (assumed | row).items() if name not in ("nvml_name", "memory_gb", "link")}
        link = _file()["links"][(assumed | row)["link"]]
        devices[row["id"]] = Device(kind="cuda", link_bytes_per_s=link["bytes_per_s"], **figures)
    return MappingProxyType(devices)


@functools.cache
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
    "t4/mps25%" is a quarter of the multiprocessors.

    Args:
        name: as people or the driver write it.
        memory_bytes: the card's memory. It distinguishes cards with the same NVML name: the RTX 3080 is sold with 10 and 12 GB.
    """
    card, _, part = name.replace("/", ":").partition(":")
    if part:
        whole = _by_key().get(_key(card))
        try:
            return None if whole is None else part_of(whole, part.strip().lower())
        except ConfigurationError:
            return None
    device = _by_key().get(_key(name))
    if device is None or memory_bytes is None:
        return device
    namesakes = [catalog()[id_] for id_, nvml_name in _nvml_names().items() if nvml_name == _nvml_names()[device.id]]
    return min(namesakes, key=lambda namesake: abs(namesake.memory_bytes - memory_bytes))


def find(name: str) -> Device:
    """The GPU with this name, as :func:`look_up` reads it.

    Raises:
        ConfigurationError: with the nearest names, if the catalog has none; with the card's profiles, for a part that it lacks.
    """
    device = look_up(name)
    if device is not None:
        return device
    card, slash, part = name.partition("/")
    if slash and (whole := look_up(card)) is not None:
        part_of(whole, part)  # it raises
    known = {_key(known): known for known in (*catalog(), *aliases(), "auto", "cpu")}
    nearest = [known[key] for key in difflib.get_close_matches(_key(name), known, n=3, cutoff=0.5)]
    suggestion = f" Did you mean {' or '.join(repr(near) for near in nearest)}?" if nearest else ""
    if _key(name).rstrip("0123456789:") in ("", "cuda", "gpu"):
        suggestion = " For the GPU of this machine say 'auto'."
    raise ConfigurationError(
        f"gpu must be a name from the catalog, 'auto' or 'cpu', but got {name!r}.{suggestion} `perfguard gpus` lists all."
    )


def alias_of(name: str) -> str | None:
    """Return the short name, which may fit several cards, as the catalog spells it. None: ``name`` is no short name."""
    return next((alias for alias in aliases() if same_name(alias, name)), None)


def is_short_for(name: str, device: Device) -> bool:
    """Return whether ``name`` fits ``device`` as well as the card that it stands for.

    The alias "a100" fits every A100. A name that the driver gives to cards of several sizes fits each size.
    """
    alias = alias_of(name)
    if alias is not None and set(alias.split("-")) <= set(re.split("[-:]", device.id)):
        return True
    named = look_up(name)
    nvml_names = _nvml_names()
    if named is None or named.id not in nvml_names or nvml_names.get(device.id) != nvml_names[named.id]:
        return False
    return alias is not None or _key(name) == _key(nvml_names[named.id])


def same_name(one: str, other: str) -> bool:
    """Return whether two names are the same but for case, spaces, hyphens and a leading brand."""
    return _key(one) == _key(other)


def _key(name: str) -> str:
    return re.sub(r"^(nvidia|tesla|geforce)+", "", re.sub(r"[\s_-]+", "", name.lower()))


@functools.cache
def _file() -> Any:
    return json.loads(resources.files("perfguard.devices").joinpath("catalog.json").read_text(encoding="utf-8"))


@functools.cache
def _nvml_names() -> dict[str, str]:
    """NVML names by device id. Cards of several sizes may share one."""
    return {row["id"]: row["nvml_name"] for row in _file()["devices"]}


@functools.cache
def _by_key() -> Mapping[str, Device]:
    first = {nvml_name: id_ for id_, nvml_name in reversed(_nvml_names().items())}  # the first of each name stays
    names = first | dict(aliases()) | {id_: id_ for id_ in catalog()}
    return {_key(name): catalog()[id_] for name, id_ in names.items()}
