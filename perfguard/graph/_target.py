"""What of a device decides which operators PyTorch runs on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from perfguard.devices import Device

_BEFORE_AMPERE = ("pascal", "volta", "turing")


class Target(NamedTuple):
    """The kind of device that a step is traced for. Two devices with equal targets share one trace."""

    is_cpu: bool = False
    flash_attention: bool = True
    """FlashAttention needs compute capability 8.0 (Ampere)."""

    @classmethod
    def of(cls, device: Device) -> Target:
        """The target that ``device`` is."""
        if device.kind == "cpu":
            return cls(is_cpu=True, flash_attention=False)
        return cls(flash_attention=device.architecture.lower() not in _BEFORE_AMPERE)


CPU = Target(is_cpu=True, flash_attention=False)
CUDA = Target()
