"""Error events of a GPU beside our own work: other processes, memory errors, Xid events, a card that falls off the bus."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from perfguard.measure.gpu import CudaIdentity, DriverReading, NvmlProbe, ways_to_find

_T = TypeVar("_T")
_UNCORRECTED, _VOLATILE = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
_XID_EVENTS = 8  # nvmlEventTypeXidCriticalError
_MOST_EVENTS = 64
_BUSY = 0.1


class DriverWindow:
    """The driver's counters over a stretch of a run: energy, utilisation, clocks, and how many others were there.

    Args:
        cuda: stands in for the module ``torch.cuda``.
        nvml: stands in for the module ``pynvml``.
        interval_s: between two samples.
    """

    def __init__(self, *, cuda: Any, nvml: Any = None, interval_s: float = 0.05) -> None:
        self._probe = NvmlProbe(lambda: identity_of(cuda), lambda: None, nvml=nvml, interval_s=interval_s)

    def start(self) -> None:
        """Begin to watch."""
        self._probe.start()

    def finish(self) -> DriverReading:
        """Stop, and return the observations."""
        return self._probe.finish()


def identity_of(cuda: Any, index: int = 0) -> CudaIdentity:
    """Identifiers of CUDA's device ``index`` for a look-up in NVML."""
    properties = cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    return CudaIdentity(None if uuid is None else str(uuid), None)


@dataclass(frozen=True, slots=True)
class Signs:
    """State of the card at one moment. None: not reported."""

    others: tuple[int, ...] | None = None
    """Ids of processes on the card that are not ours."""
    memory_errors: int | None = None
    """Uncorrected ECC errors since the driver was loaded."""
    xids: tuple[int, ...] = ()
    """Numbers of the critical Xid events since the last look."""
    utilisation: float | None = None
    """Share of the last moment in which a kernel ran, 0 to 1."""
    lost: str = ""
    """Reason why the card can no longer be read; empty: it can."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Trouble of the card during a run."""

    words: tuple[str, ...] = field(default=())
    spoils_time: bool = False
    """Whether the run's time and energy are unusable."""
    spoils_all: bool = False
    """Whether the whole run is unusable."""
    fatal: bool = False
    """Whether the card cannot be measured any more."""


class CardHealth:
    """Reads the state of one card through NVML. Values that the driver does not report are left out.

    Args:
        uuid: the card's UUID without its prefix, as CUDA reports it.
        nvml: stands in for the module ``pynvml``.
    """

    def __init__(self, uuid: str, *, nvml: Any = None) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._events: Any = None
        self._lost = ""
        try:
            self._nvml = importlib.import_module("pynvml") if nvml is None else nvml
            self._nvml.nvmlInit()
            self._handle = self._find(uuid)
            self._events = self._query(self._registered)
        except Exception as error:
            self._lost = f"NVML cannot be used ({type(error).__name__}: {error})" if self._handle is None else ""

    @property
    def is_readable(self) -> bool:
        """Whether NVML shows the card at all; without it other processes and errors go unseen."""
        return self._handle is not None

    def look(self, own: int) -> Signs:
        """State of the card now, without the process ``own``."""
        if self._handle is None:
            return Signs()
        nvml, handle = self._nvml, self._handle
        running = self._query(lambda: [int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)])
        errors = self._query(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE)))
        rates = self._query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        return Signs(None if running is None else _others(running, own), errors, self._new_xids(), rates, self._lost)

    def close(self) -> None:
        """End the session with the driver."""
        if self._nvml is not None:
            if self._events is not None:
                self._query(lambda: self._nvml.nvmlEventSetFree(self._events))
            self._query(self._nvml.nvmlShutdown)
            self._nvml = self._handle = self._events = None

    def _find(self, uuid: str) -> Any:
        ways = ways_to_find(self._nvml, CudaIdentity(uuid, None))
        for number, (find, name) in enumerate(ways, 1):
            try:
                return find(name)
            except self._nvml.NVMLError:
                if number == len(ways):
                    raise
        return None

    def _registered(self) -> Any:
        events = self._nvml.nvmlEventSetCreate()
        self._nvml.nvmlDeviceRegisterEvents(self._handle, _XID_EVENTS, events)
        return events

    def _new_xids(self) -> tuple[int, ...]:
        found: list[int] = []
        while self._events is not None and len(found) < _MOST_EVENTS:
            try:
                found.append(int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData))
            except self._nvml.NVMLError:  # nothing more has happened
                break
        return tuple(found)

    def _query(self, query: Callable[[], _T]) -> _T | None:
        try:
            return query()
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST:
                self._lost = "the GPU was lost"
            return None


def trouble_between(before: Signs, after: Signs) -> Trouble:
    """Trouble of the card between two states."""
    if after.lost:
        return Trouble((after.lost,), True, True, True)
    words: list[str] = []
    others = sorted({*(before.others or ()), *(after.others or ())})
    if others:
        words.append(f"other processes on the GPU: {', '.join(map(str, others))}")
    errors = (after.memory_errors or 0) - (before.memory_errors or 0)
    if errors > 0:
        words.append(f"{errors} uncorrected memory errors (ECC)")
    if after.xids:
        words.append(f"Xid {', '.join(map(str, after.xids))}")
    return Trouble(tuple(words), bool(others), errors > 0 or bool(after.xids))


def is_busy(signs: Signs) -> bool:
    """Whether a card without our work is busy, with or without a visible process."""
    return bool(signs.others) or (signs.utilisation or 0.0) > _BUSY


def _others(running: list[int], own: int) -> tuple[int, ...]:
    if own in running:
        return tuple(pid for pid in running if pid != own)
    return tuple(running[1:])  # in another namespace of process ids, one of the strangers is ours
