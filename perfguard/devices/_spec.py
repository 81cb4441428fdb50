"""Device: what a prediction needs to know about the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from perfguard.exceptions import ConfigurationError

DeviceKind = Literal["cuda", "cpu"]

_IDENTITY_OF_CPU = ("id", "name", "kind", "memory_bytes", "num_sms", "architecture")


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
    """"cuda" or "cpu". As in PyTorch, AMD's GPUs are "cuda", too; see :attr:`is_amd`."""
    memory_bytes: int
    """Memory for programs, as CUDA reports it."""
    bandwidth_bytes_per_s: float
    """Peak bandwidth of the device memory."""
    peak_flops: Mapping[str, float]
    """FLOP/s by arithmetic: "fp32", "tf32", "fp16", "bf16"; the last three on matrix units. Missing: not supported."""
    num_sms: int
    """Streaming multiprocessors; AMD's compute units; cores for a CPU."""
    boost_clock_hz: float
    """Highest clock of the data sheet, in hertz."""
    l2_bytes: int
    """Size of the last-level cache."""
    tdp_w: float
    """Power limit, in watts. 0: unknown."""
    architecture: str
    """Vendor's name of the generation, for instance "Ampere"."""
    context_bytes: int
    """Memory of the driver before the first tensor: CUDA context and kernels. 0 on a CPU."""
    launch_overhead_s: float
    """Least time of one operator in eager PyTorch."""
    source: str
    """Source of the figures."""

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "bandwidth_bytes_per_s", "num_sms", "boost_clock_hz"):
            if getattr(self, field) <= 0:
                raise ConfigurationError(f"Device.{field} of {self.id!r} must be positive, but got {getattr(self, field)!r}.")
        if self.peak_flops.get("fp32", 0) <= 0:
            raise ConfigurationError(f'Device.peak_flops of {self.id!r} must hold a positive "fp32" rate.')

    @property
    def is_amd(self) -> bool:
        """Whether it is one of AMD's GPUs. PyTorch calls them "cuda", too, so ``kind`` does not tell.

        No measurement on them was ever compared with a prediction, so GuardNet does not trust what it learnt of NVIDIA's.
        """
        return self.architecture.startswith("CDNA")

    def flops_per_s(self, arithmetic: str) -> float:
        """Peak rate for ``arithmetic`` ("fp32", "tf32", "fp16", "bf16"); the fp32 rate where the device has no such unit."""
        return self.peak_flops.get(arithmetic, self.peak_flops["fp32"])

    @property
    def identity(self) -> Mapping[str, object]:
        """The fields by which two devices are the same one.

        For a GPU these are all fields. For a CPU they leave out the rates, which each process measures anew. One machine with one
        number of threads and one limit of memory is one device.
        """
        names = _IDENTITY_OF_CPU if self.kind == "cpu" else tuple(field.name for field in fields(self))
        return {name: getattr(self, name) for name in names}

    def with_memory(self, memory_bytes: int) -> Device:
        """The same device with another capacity, for a part of a card or a limited process."""
        return replace(self, memory_bytes=memory_bytes)
