"""Measurement: what one run really cost, and the device that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from perfguard.devices import Device, catalog, cpu_name
from perfguard.devices.catalog import DeviceKind, look_up, same_name
from perfguard.devices.detect import id_of
from perfguard.exceptions import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self

Status = Literal["ok", "oom", "timeout", "failed", "interrupted"]
"""How a run ended. "interrupted": something outside of it ended it (Ctrl-C, a driver that went away), so it says nothing about
the trial: it is logged, never learnt, and counts neither as ok nor as a violation. A trial that a scheduler stops early is "ok":
it cost what it cost."""
NOT_A_NUMBER = "{} was {}"
"""Note of a measurement with a NaN or infinite reading: the field's name, and the value."""
CutShort = Literal["", "by the tuner", "too slow"]
"""Why a trial was stopped before it had made all of its steps. "by the tuner": a pruner, a scheduler or a stopper did it. "too
slow": PerfGuard did, because of its pace. Empty: nobody did."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One observed run, in the same units as a Prediction. None: not measured."""

    status: Status
    device_id: str
    """Id of the device that the run really used; "cpu" for any processor."""
    device_name: str
    peak_memory_bytes: int | None
    """Peak device memory. On a GPU: what the driver counts for this process, its context included. On a CPU: the resident set's
    peak above what it was when the run began. With status "oom" a lower bound."""
    step_time_s: float | None
    """Median time of a step, from the end of the one before, warm-up excluded; see StepTimer."""
    total_time_s: float
    """Time from the launch to the end of the run."""
    num_steps: int
    method: str
    """Method of the memory reading, for instance "vmhwm", "rss-sampled" or "nvml-process+allocator"."""
    framework: str
    note: str = ""
    """Limits of its reliability, in words."""
    allocated_peak_bytes: int | None = None
    """Most bytes that PyTorch's CUDA allocator had handed out at once."""
    reserved_peak_bytes: int | None = None
    """Most bytes that PyTorch's CUDA allocator held at once, its cache included."""
    energy_j: float | None = None
    """Energy of the whole card from the run's start (or from its first use of CUDA) to its end."""
    driver: str | None = None
    """Version of the GPU's driver."""
    host: str | None = None
    """Name of the machine that ran it."""
    first_step_s: float | None = None
    """Time from the launch to the end of the first step: the set-up and a step. None: it made none."""
    cut_short: CutShort = ""
    """Who has stopped it before it had made all of its steps. Empty: nobody did."""

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            known = ", ".join(get_args(Status))
            raise ConfigurationError(f"Measurement.status must be one of {known}, but got {self.status!r}.")
        if self.cut_short not in get_args(CutShort):
            known = ", ".join(map(repr, get_args(CutShort)))
            raise ConfigurationError(f"Measurement.cut_short must be one of {known}, but got {self.cut_short!r}.")

    @property
    def has_result(self) -> bool:
        """Whether the trial came to its end, so that it has its result, and its steps are those of a whole trial."""
        return self.status == "ok" and not self.cut_short

    def is_of(self, device: Device) -> bool:
        """Return whether this is a reading of ``device``: whether the run really used it, and not another card or the processor.

        Example:
            >>> measurement = Measurement("ok", "cpu", "AMD EPYC 7763", 2**20, 0.1, 1.0, 10, "vmhwm", "torch2.9")
            >>> measurement.is_of(catalog()["a100-pcie-40gb"])
            False
        """
        return self.device_id == device.id or RanOn("cpu" if self.device_id == "cpu" else "cuda", self.device_name).is_a(device)


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
        # The driver names an instance "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
        card, _, profile = self.name.partition(" MIG ")
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
        # CUDA's total memory moves by up to 1.5% with the driver and ECC, so 5% leave room.
        return self.num_sms == device.num_sms and device.memory_bytes <= 1.05 * self.total_bytes


class CudaUse:
    """Detects on which CUDA device tensors were made since the start. Never initialises ``cuda``, which is torch.cuda."""

    def __init__(self, cuda: Any) -> None:
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
        return None if self._cuda.get_allocator_backend() == "native" else int(self._cuda.current_device())

    def _taken_bytes(self, index: int) -> int:
        """Bytes that were requested on the device since the start.

        A failed allocation counts as a use as well. A counter that fell was reset by the trial.
        """
        stats = self._cuda.memory_stats(index)
        before = self.before.get(index, {})
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


@dataclass(frozen=True, slots=True)
class Reading:
    """Readings of a probe for one run. The fields of a Measurement have the same names and units. None: not measured."""

    method: str
    peak_memory_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    energy_j: float | None = None
    driver: str | None = None
    notes: tuple[str, ...] = ()
    """Readings that are missing or unreliable, with the reasons."""
    ran_on: RanOn | None = None
    """The device that the run used. None: unknown, and the named device is assumed."""


class Probe(Protocol):
    """Watches one device for the length of one run. Its calls never raise for what the hardware or the driver does."""

    def start(self) -> None:
        """Forget what was before, and begin to watch."""

    def stamp(self) -> Any:
        """A time stamp on the device, for ``earlier.elapsed_time(later)`` in milliseconds. None: use the CPU's clock."""

    def read(self) -> Reading:
        """Readings so far. The measurement goes on."""

    def finish(self) -> Reading:
        """Stop watching and return the readings. Called once; also without :meth:`start`."""
