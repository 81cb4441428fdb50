"""The common interface of table rows: a measured run, and how to get its graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from perfguard.devices import Device, resolve_device
from perfguard.graph import OpGraph, TraceCache
from perfguard.workload import Mode, Workload

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow(ABC):
    """One measured run. None: not measured."""

    source: str
    model: str
    family: str
    """Rows of one family share enough to flatter a predictor that has seen some of them: they are held out together."""
    mode: Mode
    gpu: str
    batch_size: int
    status: str = "ok"
    framework: str = field(default="", compare=False, repr=False)
    """Versions, as the table writes them; runs of one network under different ones do not bracket a card together."""
    step_time_s: float | None = None
    peak_memory_bytes: float | None = None
    gpu_util: float | None = None
    """Share of the time in which a kernel ran, 0 to 1."""
    sm_active: float | None = None
    """Share of the multiprocessors' time in which they had work, 0 to 1."""
    capacity_bytes: float | None = None
    """Memory limit of the run, if it was below the device's memory."""

    @property
    def device(self) -> Device:
        """The device of the run.

        Raises:
            UnknownDeviceError: if the catalog does not have it.
        """
        return resolve_device(self.gpu)

    @property
    @abstractmethod
    def structure(self) -> tuple[Any, ...]:
        """Key that rows share if only their batches and GPUs differ."""

    @abstractmethod
    def make_model(self) -> nn.Module | None:
        """The network; None if the graph needs none. Call it under the meta device.

        Raises:
            TableError: if it cannot be made.
        """

    @abstractmethod
    def workload(self, model: nn.Module) -> Workload:
        """The workload of the row with ``model``."""

    def graph(self, model: nn.Module | None, traces: TraceCache, device: Device) -> OpGraph:
        """The row's graph. Rows of one structure share ``model`` and ``traces``."""
        assert model is not None
        return traces.trace(self.workload(model), target=device)


def model_on_meta(row: MeasuredRow) -> nn.Module | None:
    """``row.make_model()``, without memory."""
    with torch.device("meta"):
        return row.make_model()
