"""RanOn: the device that a run really used, as the process itself names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from perfguard.devices import Device, catalog
from perfguard.devices.catalog import DeviceKind, look_up, same_name
from perfguard.devices.detect import cpu_name, id_of

if TYPE_CHECKING:
    from typing_extensions import Self

_MIG = " MIG "
"""Text of the driver between a card's name and the profile of an instance: "NVIDIA A100-SXM4-40GB MIG 1g.5gb"."""
_SAME_MEMORY = 1.05


@dataclass(frozen=True, slots=True)
class RanOn:
    """One device of this machine.

    Example:
        >>> RanOn("cuda", "NVIDIA A100-SXM4-80GB").is_a(catalog()["a100-pcie-40gb"])
        False
    """

    kind: DeviceKind
    """"cuda" stands for any accelerator."""
    name: str
    """Name from the driver, including a MIG profile. For a CPU, its model."""
    num_sms: int | None = None
    """Multiprocessors. None: not known."""
    total_bytes: int | None = None
    """Memory. None: not known."""

    @classmethod
    def without_cuda(cls) -> Self:
        """The device of a run without a tensor on a CUDA device: Apple's or Intel's GPU if the process uses it, else the CPU."""
        import torch

        if torch.backends.mps.is_available() and torch.mps.driver_allocated_memory() > 0:
            return cls("cuda", "Apple GPU (MPS)")
        if torch.xpu.is_initialized():
            return cls("cuda", torch.xpu.get_device_name())
        return cls("cpu", cpu_name())

    @property
    def id(self) -> str:
        """The id of the Device that this is: the catalog's, with the profile of a MIG instance; "cpu" for any processor."""
        if self.kind == "cpu":
            return "cpu"
        card, _, profile = self.name.partition(_MIG)
        known = look_up(card, None if profile else self.total_bytes)
        if known is None:
            return id_of(self.name)
        return f"{known.id}:{profile}" if profile else known.id

    def is_a(self, device: Device) -> bool:
        """Return whether readings of this device are readings of ``device``.

        A catalog GPU is identified by its name, an instance of MIG also by its profile; a share under MPS is the whole card to
        the process. A Device that is in no catalog is identified by its name, or else by its multiprocessors and its memory,
        which may be a part of the card's.
        """
        if device.kind == "cpu" or self.kind == "cpu":
            return device.kind == self.kind
        card, _, part = device.id.partition(":")
        if card in catalog():
            return self.id == (card if part.startswith("mps") else device.id)
        if same_name(self.name, device.name):
            return True
        if self.num_sms is None or self.total_bytes is None:
            return False
        return self.num_sms == device.num_sms and device.memory_bytes <= _SAME_MEMORY * self.total_bytes


class Cuda(Protocol):
    """The part of the module ``torch.cuda`` that shows which device is used."""

    def is_initialized(self) -> bool: ...
    def current_device(self) -> int: ...
    def device_count(self) -> int: ...
    def get_allocator_backend(self) -> str: ...
    def memory_stats(self, device: int) -> Mapping[str, Any]: ...
    def get_device_properties(self, device: int) -> Any: ...


class CudaUse:
    """Detects on which CUDA device tensors were made since the start. Never initialises CUDA.

    Args:
        cuda: stands in for the module ``torch.cuda``.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.before: dict[int, Mapping[str, Any]] = {}
        """The allocator's figures at the start, by device."""

    def start(self) -> None:
        """Start counting allocations.

        Raises:
            RuntimeError: if a device is lost.
        """
        if self._cuda.is_initialized():
            self.before = {index: dict(self._cuda.memory_stats(index)) for index in range(self._cuda.device_count())}

    def index(self) -> int | None:
        """The device on which most bytes were allocated since the start, freed ones included; None: no tensor was on any.

        Raises:
            RuntimeError: if a device is lost.
        """
        if not self._cuda.is_initialized():
            return None
        taken = {index: self._taken_bytes(index) for index in range(self._cuda.device_count())}
        most = max(taken, key=lambda index: taken[index])
        if taken[most] > 0:
            return most
        # Other allocators than PyTorch's own keep no statistics.
        return None if self._cuda.get_allocator_backend() == "native" else self._cuda.current_device()

    def _taken_bytes(self, index: int) -> int:
        """Bytes that were requested on the device since the start.

        A failed allocation counts as a use as well. A counter that fell was reset by the trial.
        """
        stats, before = self._cuda.memory_stats(index), self.before.get(index, {})
        counters = [(int(stats.get(key, 0)), int(before.get(key, 0))) for key in ("allocated_bytes.all.allocated", "num_ooms")]
        return sum(now if now < then else now - then for now, then in counters)

    def ran_on(self) -> RanOn | None:
        """The device that the run has used until now, else the CPU; None: unknown, because a device is lost."""
        try:
            index = self.index()
            if index is None:
                return RanOn.without_cuda()
            properties = self._cuda.get_device_properties(index)
        except RuntimeError:
            return None
        name = getattr(properties, "name", None)
        if name is None:
            return None
        return RanOn("cuda", name, getattr(properties, "multi_processor_count", None), getattr(properties, "total_memory", None))
