"""The loop of `perfguard collect`: configurations in their order, run in a process of their own, written down one by one."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from perfguard.devices import Device, catalog
from perfguard.devices.detect import device_here
from perfguard.exceptions import ConfigurationError, MeasuringError, PerfGuardError
from perfguard.graph import TraceCache, roofline_s
from perfguard_research.collect.run import Columns, run_apart
from perfguard_research.collect.spaces import Draft, Space, drafts, import_libraries
from perfguard_research.csv_rows import read_table
from perfguard_research.tables import MIB, MeasuredRow

CPU_MEMORY_BYTES = 2**28
"""Default memory limit of a configuration on a CPU. It is low because other work shares the memory."""
COLUMNS = (
    # Those of the table of runs.
    "source", "model", "config", "family", "mode", "gpu", "num_gpus", "parallel", "precision", "layout", "compiled", "optimizer",
    "checkpointing", "accumulation", "cudnn_benchmark", "zero_grad", "batch_size", "input", "step_time_ms", "peak_memory_mib",
    "memory_kind", "status", "framework", "includes", "note",
    # What was chosen and measured beside it.
    "space", "memory_share", "memory_limit_mib", "allocated_peak_mib", "reserved_peak_mib", "num_steps", "order", "index",
    "device",
)  # fmt: skip
"""docs/collect.md has the meaning of each."""


@dataclass(slots=True)
class CollectReport:
    """Result of one session of collecting."""

    rows: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows of this session, by space and status."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Configurations that were not run, by reason."""
    ended_by: str = ""


def collecting_device(gpu: str) -> Device:
    """The device that ``gpu`` ("auto", "cpu" or a catalog name) means on this machine.

    Raises:
        MeasuringError: if there is no such GPU here, or PyTorch cannot use it.
    """
    device = device_here(gpu)
    if device.kind == "cpu" and gpu.strip().lower() != "cpu":
        raise MeasuringError("NVML shows no GPU here. To collect on the CPU, use --gpu cpu.")
    return device


def collect(
    out: Path,
    *,
    device: Device,
    spaces: Sequence[Space],
    minutes: float = math.inf,
    max_rows: float = math.inf,
    resume: bool = False,
    memory_limit: int | None = None,
    seed: int = 0,
    on_row: Callable[[Columns], None] = lambda row: None,
) -> CollectReport:
    """Measure configurations until the time is over, there are enough rows, or Ctrl-C. Each row is in the file at once.

    Args:
        out: the table, a file ``.csv``.
        device: as :func:`collecting_device` gives it.
        spaces: the kinds of networks. They take turns.
        minutes: no further configuration begins after this time.
        max_rows: of this session.
        resume: go on with a table that is there; configurations that it has are not measured again.
        memory_limit: bytes that a run may take. None: all of a card's, CPU_MEMORY_BYTES of a processor's.
        seed: of the order.
        on_row: called with each row.

    Raises:
        ConfigurationError: for a table that is there, or cannot be written.
    """
    ends_at = time.monotonic() + 60 * minutes
    if memory_limit is None and device.kind == "cpu":
        memory_limit = CPU_MEMORY_BYTES
    order = f"{seed}/{'+'.join(spaces)}/{device.id}/{memory_limit or 'all'}"
    done = _begin_table(out, resume=resume, order=order)
    import_libraries(spaces)
    report = CollectReport()
    failures = 0
    fixed = {
        "device": "" if device.id in catalog() else json.dumps(dataclasses.asdict(device), separators=(",", ":")),
        "memory_limit_mib": "" if memory_limit is None else f"{memory_limit / MIB:.6g}",
        "order": order,
    }
    try:
        for draft in drafts(spaces, seed=seed, device=device):
            if time.monotonic() >= ends_at:
                report.ended_by = f"{minutes:g} minutes are over"
            elif report.rows.total() >= max_rows:
                report.ended_by = f"{max_rows:g} rows are there"
            elif failures >= 25:  # the card is broken, or PyTorch, or a library is missing
                report.ended_by = f"{failures} configurations in a row failed"
            if report.ended_by:
                break
            if draft.columns["index"] in done:
                continue
            row = planned(draft, device, memory_limit or device.memory_bytes)
            if isinstance(row, str):
                report.left_out[row] += 1
                failures += 1
                continue
            measured = run_apart(row, device, limit_bytes=memory_limit, limit_s=240 if row.compiled else 60)
            measured["framework"] = ", ".join(filter(None, (measured.get("framework"), _versions(row))))
            columns = {**draft.columns, "batch_size": str(row.batch_size)} | fixed | measured
            _append(out, columns)
            on_row(columns)
            report.rows[columns["space"], columns["status"]] += 1
            failures = failures + 1 if columns["status"] == "failed" else 0
    except KeyboardInterrupt:
        report.ended_by = "Ctrl-C was pressed"
    return report


# The table


def _begin_table(out: Path, *, resume: bool, order: str) -> set[str]:
    """Make the table, unless it is there and may be continued. Returns the indices that it has of this order."""
    if out.suffix != ".csv":
        raise ConfigurationError(f"--out must end in .csv, so that each row can be added at once, but is {str(out)!r}.")
    try:
        if not out.exists() or not out.stat().st_size:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(",".join(COLUMNS) + "\r\n", encoding="utf-8")
            return set()
        if not resume:
            raise ConfigurationError(f"{out} is there already. Continue it with --resume, or give --out another name.")
        # A program that was killed may have cut its last line short.
        text = out.read_bytes()
        out.write_bytes(text[: text.rfind(b"\n") + 1])
    except OSError as error:
        raise ConfigurationError(f"The rows cannot be written to {out}: {error}") from error
    columns, rows = read_table(out)
    if tuple(columns) != COLUMNS:
        raise ConfigurationError(f"{out} is no table of `perfguard collect` of this version. Give --out another name.")
    return {row["index"] for row in rows if row["order"] == order}


def _append(out: Path, columns: Columns) -> None:
    try:
        with out.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, restval="").writerow(columns)
    except OSError as error:
        raise ConfigurationError(f"The rows cannot be written to {out}: {error}") from error


def _versions(row: MeasuredRow) -> str:
    """The version of the library that defines the network: names of models change their meaning."""
    library = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}.get(row.model.partition(":")[0])
    try:
        return f"{library} {version(library)}" if library else ""
    except PackageNotFoundError:
        return ""


# The batch


def planned(draft: Draft, device: Device, capacity_bytes: int) -> MeasuredRow | str:
    """The row of ``draft`` with the batch whose traced peak is its share of ``capacity_bytes`` (the driver's context included).

    The batch is smaller if its step would be too long. On a CPU, most steps are short.

    Returns:
        The row, or the reason why it is left out.
    """
    on_cpu = device.kind == "cpu"
    # Longer steps take the time of many rows. Runs that should not fit a card are exempt: they end early.
    longest_s = 0.03 if on_cpu else 0.25
    try:
        model = draft.row.make_model()
        traces = TraceCache()

        @functools.cache
        def cost(batch_size: int) -> tuple[float, float]:
            """Bytes alive at the peak, and seconds by the roofline."""
            graph = dataclasses.replace(draft.row, batch_size=batch_size).graph(model, traces, device)
            return graph.peak_live_bytes, float(roofline_s(graph, device).sum())

        batch_size = batch_at(draft.memory_share * capacity_bytes - device.context_bytes, lambda n: cost(n)[0])
        if on_cpu:
            if cost(2)[1] > longest_s:
                return "a step would take too long on a CPU"
            longest_s *= min(draft.memory_share, 1.0)
        if (on_cpu or draft.memory_share < 1) and cost(batch_size)[1] > longest_s:
            batch_size = min(batch_size, batch_at(longest_s, lambda n: cost(n)[1]))
    except Exception as error:  # one configuration that cannot be traced is no reason to stop
        return " ".join((str(error) if isinstance(error, PerfGuardError) else f"{type(error).__name__}: {error}").split())
    if draft.round_batch and batch_size > 16:  # a common choice, which suits tensor cores
        batch_size -= batch_size % 16
    return dataclasses.replace(draft.row, batch_size=batch_size)


def batch_at(target: float, cost_of: Callable[[int], float], *, most: int = 2**20) -> int:
    """A batch whose cost is about ``target``, by the secant method; 2 where a batch of 2 costs more.

    The cost rises with the batch and bends upwards: small batches are all weights, large ones all activations.
    """
    low, high = 2, 8  # a batch of one is too small for a batch norm
    small = cost_of(low)
    large = cost_of(high)
    for _ in range(4):
        slope = (large - small) / (high - low)
        wanted = low + (target - small) / slope if slope > 0 else most if target > large else 2
        low = high
        small = large
        high = int(min(max(wanted, 2), most))
        if high == low:
            break
        large = cost_of(high)
        if abs(large / target - 1) < 0.05:
            break
    return high
