"""Peak resident memory of a stretch of a process, above what it held at the start."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from perfguard.measure.measurement import CudaUse, Reading

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_SCATTER_BYTES = 5 * 2**19
"""Growth below which nothing is collected: readings of equal runs differ by as much (`benchmarks/resident_set.py`)."""
_MOST_GROWN_BYTES = 5 * 2**23
"""Growth above which garbage is collected, even if what the trial has trained is gone: there may be other garbage."""
_settled_bytes = 0
"""The smallest resident set between two trials since the last collection."""
_trained: dict[int, weakref.ref[torch.Tensor]] = {}
"""A parameter of each optimizer of the latest run, by the optimizer's id. Empty: none was seen."""
_MOST_TRAINED = 16


def note_trained(optimizer: torch.optim.Optimizer) -> None:
    """Note what an ``optimizer`` of the running trial trains. If it is gone at the next start, the trial has left no garbage."""
    known = _trained.get(id(optimizer))
    if (known is not None and known() is not None) or len(_trained) >= _MOST_TRAINED:
        return
    first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    if first is not None:
        _trained[id(optimizer)] = weakref.ref(first)


class CpuProbe:
    """A run on the processor: the peak of this process's resident set. Notices a run that is on a GPU instead.

    On Linux the kernel keeps the peak (VmHWM), and a process may reset its own. Elsewhere a thread samples every 20 ms and may
    miss short peaks. The reading's method says which.

    Args:
        cuda: stands in for the module ``torch.cuda``.
    """

    def __init__(self, *, cuda: object = None) -> None:
        import torch

        self._use = CudaUse(torch.cuda if cuda is None else cuda)
        self._base_bytes: int | None = None
        """The resident set at the start. None: not started."""
        self._sampled_peak_bytes = 0
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None
        """None: the kernel keeps the peak."""

    def start(self) -> None:
        """Return freed memory to the system, so that an earlier trial's leftovers do not count, and reset the peak."""
        global _settled_bytes
        try:
            self._use.start()
        except RuntimeError:
            pass  # a GPU is lost
        process = psutil.Process()
        _trim_heap()
        left_bytes = process.memory_info().rss
        if (grown_bytes := left_bytes - _settled_bytes) > _SCATTER_BYTES:
            if grown_bytes > _MOST_GROWN_BYTES or _may_have_left_garbage():
                gc.collect()  # a quarter of a second where many libraries are loaded, so only if there may be something
                _trim_heap()
            _settled_bytes = process.memory_info().rss
        _trained.clear()
        _settled_bytes = min(_settled_bytes, left_bytes)
        self._base_bytes = self._sampled_peak_bytes = process.memory_info().rss
        if not reset_peak():
            self._sampler = threading.Thread(target=self._sample, name="perfguard-rss", daemon=True)
            self._sampler.start()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What the block leaves behind is none of the run's."""
        before = psutil.Process().memory_info().rss
        yield
        if self._base_bytes is not None:
            self._base_bytes += max(0, psutil.Process().memory_info().rss - before)

    def stamp(self) -> None:
        return None

    def read(self) -> Reading:
        ran_on = self._use.ran_on()
        if self._base_bytes is None:
            return Reading("vmhwm", ran_on=ran_on)
        if self._sampler is not None:
            grown = max(0, self._sampled_peak_bytes - self._base_bytes)
            return Reading("rss-sampled", peak_memory_bytes=grown, ran_on=ran_on)
        grown = max(0, _high_water_mark() - self._base_bytes)
        return Reading("vmhwm", peak_memory_bytes=grown, ran_on=ran_on)

    def finish(self) -> Reading:
        reading = self.read()
        self._stop.set()
        if self._sampler is not None:
            self._sampler.join()
        return reading

    def _sample(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(0.02):
            self._sampled_peak_bytes = max(self._sampled_peak_bytes, process.memory_info().rss)


def _may_have_left_garbage() -> bool:
    """Whether a cycle of objects may keep alive what the run before has trained, or nobody has seen what that was.

    Otherwise the process has grown by what it needs: code that ran for the first time, what the study remembers.
    """
    return not _trained or any(reference() is not None for reference in _trained.values())


def reset_peak() -> bool:
    """Let the peak of the resident set begin anew. Returns whether the kernel keeps one."""
    try:
        _CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident set to the current value
        _high_water_mark()
    except OSError:
        return False
    return True


def peak_resident_bytes() -> int:
    """Bytes of the largest resident set of this process so far. Where the kernel keeps none: of the present one."""
    try:
        return _high_water_mark()
    except OSError:
        return int(psutil.Process().memory_info().rss)


def _high_water_mark() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def _trim_heap() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory in its arenas, where it still counts as resident
    except (AttributeError, OSError, TypeError):  # not glibc
        pass
