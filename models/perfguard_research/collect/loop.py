"""The loop: configurations in their order, run in a process of their own, watched, and written down one by one."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from perfguard.devices import Device, resolve_device
from perfguard.exceptions import ConfigurationError, MeasuringError
from perfguard_research.collect.health import CardHealth, Signs, Trouble, is_busy, trouble_between
from perfguard_research.collect.plan import Plan, planned
from perfguard_research.collect.rows import Journal, columns_of, figures_of
from perfguard_research.collect.run import Row
from perfguard_research.collect.spaces import Draft, drafts, without_missing_packages
from perfguard_research.collect.worker import Worker, preload_libraries
from perfguard_research.tables.recipe import Space

CPU_MEMORY_BYTES = 2**28
"""Default memory limit of a configuration on a CPU. It is low because other work shares the memory."""
_REACH = {"cuda": 1.0, "cpu": 0.6}
_ORDER = 2
"""Changes if the configurations of an order do."""
_MOST_FAILURES_IN_A_ROW = 25
_PLANS_AHEAD = 4
_GRACE_S = 30.0
"""Time to finish the current run after the time limit. A lease ends soon after."""
_MIB = 2**20
_OF_THE_STEPS = ("step_time_ms", "step_time_iqr_ms", "step_energy_j", "gpu_util", "sm_clock_mhz")
_MEASURED = (*_OF_THE_STEPS, "peak_memory_mib", "allocated_peak_mib", "reserved_peak_mib")


@dataclass(slots=True)
class CollectReport:
    """Result of one session of collecting."""

    rows: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows of this session, by space and status."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Configurations that were not run, by reason."""
    trouble: Counter[str] = field(default_factory=Counter)
    """Rows that are marked, by the error event of the card."""
    earlier_rows: int = 0
    processes: int = 0
    seconds: float = 0.0
    ended_by: str = "the sequence came to an end"

    @property
    def num_rows(self) -> int:
        """Number of rows of this session."""
        return self.rows.total()


def collecting_device(gpu: str) -> Device:
    """The device that ``gpu`` ("auto", "cpu" or a catalog name) means on this machine.

    Raises:
        MeasuringError: if there is no such GPU here, or PyTorch cannot use it.
    """
    wanted = resolve_device(gpu)
    if gpu.strip().lower() == "cpu":
        return wanted
    here = resolve_device("auto")
    if here.kind == "cpu":
        raise MeasuringError("NVML shows no GPU here. To collect on the CPU, use --gpu cpu.")
    if wanted.id != here.id:
        raise MeasuringError(f"--gpu {gpu} is the {wanted.name}, but this machine has the {here.name}. Use --gpu auto.")
    import torch

    if not torch.backends.cuda.is_built():
        raise MeasuringError(f"There is a {here.name}, but this PyTorch ({torch.__version__}) has no CUDA. Install one that has.")
    return here


def collect(
    out: Path,
    *,
    device: Device,
    spaces: Sequence[Space],
    minutes: float | None = None,
    max_rows: int | None = None,
    resume: bool = False,
    memory_limit: int | None = None,
    seed: int = 0,
    row_limit_s: float = 60.0,
    on_row: Callable[[Row], None] = lambda row: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> CollectReport:
    """Measure configurations until the time is over, there are enough rows, or a signal arrives.

    Args:
        out: the table, ``.csv`` or ``.csv.gz``.
        device: as :func:`collecting_device` gives it.
        spaces: the kinds of networks. They take turns.
        minutes: no further configuration begins after this time. None: no limit.
        max_rows: of this session. None: no limit.
        resume: go on with a table that is there; configurations that it has are not measured again.
        memory_limit: bytes that a run may take. None: all of a card's, CPU_MEMORY_BYTES of a processor's.
        seed: of the order.
        row_limit_s: seconds for one configuration. A longer run is ended.
        on_row: called with each row.
        on_note: called with whatever a person should know meanwhile.

    Raises:
        ConfigurationError: for a table that is there, or cannot be written.
        MeasuringError: if nothing can be run on the device.
    """
    began = time.monotonic()
    last_moment = math.inf if minutes is None else began + 60 * minutes + _GRACE_S
    there, lines = without_missing_packages(spaces)
    for line in lines:
        on_note(line)
    if not there:
        raise ConfigurationError("No space is left to collect from.")
    if {"vision", "text"} & set(there):
        preload_libraries()
    if memory_limit is None and device.kind == "cpu":
        memory_limit = CPU_MEMORY_BYTES
    order = f"{_ORDER}/{seed}/{'+'.join(there)}/{device.id}/{memory_limit or 'all'}"
    summary = CollectReport()
    journal = Journal(out, resume=resume)
    summary.earlier_rows = len(journal.earlier)
    done = {int(row["index"]) for row in journal.earlier if row["order"] == order}
    with ExitStack() as stack:
        stack.callback(journal.finish)
        stop = stack.enter_context(_stopped_by_signals())
        worker = Worker(device, limit_bytes=memory_limit, row_limit_s=row_limit_s)
        stack.callback(worker.close)
        worker.start()
        watch = stack.enter_context(_Watch.on(device, worker, on_note))
        capacity = memory_limit or int(worker.facts.get("total_bytes") or device.memory_bytes)
        order_of_drafts = drafts(there, seed=seed, on_gpu=device.kind != "cpu", reach=_REACH[device.kind])
        plans = stack.enter_context(_planner(order_of_drafts, done, device, capacity))
        fixed = {
            "gpu": device.id,
            "gpu_name": device.name,
            "device": figures_of(device),
            "versions": worker.facts.get("versions", ""),
            "memory_limit_mib": "" if memory_limit is None else f"{memory_limit / _MIB:.6g}",
            "order": order,
        }
        failures = 0
        while True:
            reason = stop()
            if not reason and minutes is not None and time.monotonic() - began >= 60 * minutes:
                reason = f"{minutes:g} minutes are over"
            if not reason and max_rows is not None and summary.num_rows >= max_rows:
                reason = f"{max_rows} rows are there"
            if not reason and failures >= _MOST_FAILURES_IN_A_ROW:
                reason = f"{failures} configurations in a row failed"
            if reason:
                summary.ended_by = reason
                break
            plan = next(plans)
            if plan.recipe is None:
                summary.left_out[plan.reason] += 1
                continue
            row, trouble = watch.run(plan, stop=lambda: bool(stop()) or time.monotonic() > last_moment)
            if row is None:
                continue  # ended early; the reason is printed above
            row = columns_of(plan) | fixed | row
            journal.write(row)
            on_row(row)
            summary.rows[row["space"], row["status"]] += 1
            summary.trouble.update(trouble.words)
            failures = failures + 1 if row["status"] == "failed" else 0
            if trouble.fatal:
                summary.ended_by = trouble.words[0]
                break
        summary.processes = worker.starts
    summary.seconds = time.monotonic() - began
    return summary


class _Watch:
    """Runs configurations and looks at the card before and after each."""

    def __init__(self, worker: Worker, health: CardHealth | None) -> None:
        self._worker = worker
        self._health = health
        self._before = self._look()
        self._busy_by_itself = False

    @classmethod
    @contextmanager
    def on(cls, device: Device, worker: Worker, on_note: Callable[[str], None]) -> Iterator[_Watch]:
        """A watch with the health of the worker's card. A CPU has none."""
        if device.kind == "cpu":
            yield cls(worker, None)
            return
        health = CardHealth(worker.facts.get("uuid", ""))
        watch = cls(worker, health)
        if not health.is_readable:
            on_note("NVML does not show this card: other processes and errors on it go unseen.")
        watch.look_at_the_idle_card(on_note)
        try:
            yield watch
        finally:
            health.close()

    def look_at_the_idle_card(self, on_note: Callable[[str], None]) -> None:
        """Check the card before the first run. Any load at that time belongs to other users."""
        if not is_busy(self._before):
            return
        self._busy_by_itself = not self._before.others
        who = (
            f"processes {', '.join(map(str, self._before.others))} use it" if self._before.others else "no process is seen on it"
        )
        share = f"{self._before.utilisation or 0:.0%}"
        on_note(f"The GPU is not ours alone ({share} busy, {who}): rows are marked, their times and energy left out.")

    def run(self, plan: Plan, *, stop: Callable[[], bool]) -> tuple[Row | None, Trouble]:
        """The measured columns of ``plan``, and the trouble of the card; no row if ``stop()`` ended the run."""
        assert plan.recipe is not None
        self._worker.start()
        age = self._worker.rows
        row = self._worker.run(plan.recipe, long=plan.draft.long, stop=stop)
        before, self._before = self._before, self._look()
        trouble = trouble_between(before, self._before)
        if self._busy_by_itself:
            trouble = Trouble((*trouble.words, "the GPU was busy before the first run"), True, trouble.spoils_all, trouble.fatal)
        if row is None:
            return None, trouble
        return marked(row, trouble) | {"rows_in_process": str(age)}, trouble

    def _look(self) -> Signs:
        return Signs() if self._health is None else self._health.look(self._worker.last_pid)


def marked(row: Row, trouble: Trouble) -> Row:
    """``row`` with the trouble in words, and without what that has spoiled."""
    spoiled = _MEASURED if trouble.spoils_all else _OF_THE_STEPS if trouble.spoils_time else ()
    row = row | dict.fromkeys(spoiled, "") | {"trouble": "; ".join(trouble.words)}
    return row | {"status": "failed"} if trouble.spoils_all else row


@contextmanager
def _planner(stream: Iterator[Draft], done: set[int], device: Device, capacity: int) -> Iterator[Iterator[Plan]]:
    """Plans in their order. While a GPU works, other cores plan ahead; on a processor that would disturb the run."""
    todo = (draft for draft in stream if draft.number not in done)
    jobs = 0 if device.kind == "cpu" else min(8, (os.cpu_count() or 1) - 1)
    if jobs < 1:
        yield (planned(draft, device, capacity) for draft in todo)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare_planner) as pool:
        try:
            yield _ahead(pool, todo, jobs * _PLANS_AHEAD, device, capacity)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ahead(pool: ProcessPoolExecutor, todo: Iterator[Draft], number: int, device: Device, capacity: int) -> Iterator[Plan]:
    waiting: deque[Future[Plan]] = deque(
        pool.submit(planned, draft, device, capacity) for draft in itertools.islice(todo, number)
    )
    for draft in todo:
        yield waiting.popleft().result()
        waiting.append(pool.submit(planned, draft, device, capacity))


def _prepare_planner() -> None:
    import warnings

    import torch

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    gc.freeze()
    warnings.simplefilter("ignore")


@contextmanager
def _stopped_by_signals() -> Iterator[Callable[[], str]]:
    """Yield a function that returns which signal arrived; empty: none. A lost connection sends SIGHUP."""
    received: list[str] = []

    def receive(number: int, _: FrameType | None) -> None:
        received.append(f"{signal.Signals(number).name} was received")

    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():  # handlers belong to the main thread
        yield lambda: ""
        return
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield lambda: received[0] if received else ""
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
