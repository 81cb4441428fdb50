"""The properties of a device that decide which operators PyTorch runs on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from perfguard.devices import Device

_BEFORE_AMPERE = ("kepler", "pascal", "volta", "turing")


class Target(NamedTuple):
    """The kind of device that a step is traced for. Two devices with equal targets share one trace."""

    is_cpu: bool = False
    flash_attention: bool = True
    """FlashAttention needs compute capability 8.0 (Ampere)."""


def target_of(device: Device | Literal["cuda", "cpu"]) -> Target:
    """The target of ``device``; "cuda" means a recent GPU."""
    kind = device if isinstance(device, str) else device.kind
    if kind == "cpu":
        return Target(is_cpu=True, flash_attention=False)
    return Target(flash_attention=isinstance(device, str) or device.architecture.lower() not in _BEFORE_AMPERE)
