"""One configuration, really run and measured in a process of its own: whatever it does to the process costs that one row.

The process is forked from a server that has imported everything but has never touched CUDA, so that it costs little more than a
CUDA context.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from perfguard.devices import Device
from perfguard.measure import Measurement, Run
from perfguard.measure.step import run_steps, step_of
from perfguard_research.collect.spaces import TEXT_LIBRARIES
from perfguard_research.networks import Network
from perfguard_research.tables import MIB, MeasuredRow

Columns = dict[str, str]
"""Columns of a row of the table."""
_context = multiprocessing.get_context("forkserver")


def run_apart(row: MeasuredRow, device: Device, *, limit_bytes: int | None = None, limit_s: float = 60.0) -> Columns:
    """Run ``row`` in a new process, and return its cost as columns. Whatever happens to the process is the status of the row.

    Args:
        row: what is measured.
        device: on which it runs.
        limit_bytes: memory that the run may take. None: all there is.
        limit_s: seconds after which the process is ended.
    """
    # The server imports what this process could import. Else each row would be charged for the memory of its libraries.
    libraries = [name for name in ("timm", "torchvision.models", *TEXT_LIBRARIES) if name in sys.modules]
    _context.set_forkserver_preload([__name__, *libraries])
    ours, theirs = _context.Pipe(duplex=False)
    arguments = theirs, row, device, limit_bytes, limit_s, torch.get_num_threads()
    process = _context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        columns: Columns = ours.recv()
        return columns
    except EOFError:
        process.join()
        code = process.exitcode or 0
        if code == -signal.SIGALRM:
            return {"status": "timeout", "note": f"given up after {limit_s:g} s"}
        end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return {"status": "failed", "note": f"the process {end}"}
    finally:  # also of Ctrl-C
        process.kill()
        process.join()
        process.close()
        ours.close()


def _serve(pipe: Connection, row: MeasuredRow, device: Device, limit_bytes: int | None, limit_s: float, num_threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; it kills
    signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM ends the process, even if it hangs in the driver's code
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # its words on each of thousands of networks would hide ours
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()
    torch.set_num_threads(num_threads)
    if device.kind == "cpu":  # else the resident set would have what PyTorch loads when it first runs such a network
        run_row(dataclasses.replace(row, batch_size=2), device)
    pipe.send(run_row(row, device, limit_bytes=limit_bytes))


def run_row(row: MeasuredRow, device: Device, *, limit_bytes: int | None = None) -> Columns:
    """Run the step of ``row`` in this process, and return its cost as columns. An error of the run is its status."""
    on_gpu = device.kind == "cuda"
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = row.cudnn_benchmark
    # PyTorch's own defaults: convolutions may take TF32, matrix products may not.
    torch.backends.cudnn.allow_tf32 = row.tf32 != "off"
    torch.backends.cuda.matmul.allow_tf32 = row.tf32 == "on"
    run = Run(device)
    num_steps = 0
    with suppress(Exception), run:
        if limit_bytes is not None:
            limit_memory(device, limit_bytes)
        assert isinstance(row.network, Network)
        with torch.device(device.kind):
            model = row.network.make()
        step = step_of(row.workload(model), high=row.network.num_indices)
        num_steps = run_steps(step, run, seconds=0.2, synchronize=torch.cuda.synchronize if on_gpu else lambda: None)
    return measured_columns(run.measurement or run.finish("failed"), num_steps)


def limit_memory(device: Device, num_bytes: int) -> None:
    """Limit the memory of this process. On a GPU the driver's context is included, as on a smaller card.

    On a CPU the limit is one on the process's data (RLIMIT_DATA) beside what it has now; PyTorch says so when it is hit.
    """
    if device.kind == "cuda":
        share = (num_bytes - device.context_bytes) / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(max(share, 0.0), 1.0))
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    private_bytes = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (private_bytes + num_bytes, hard))


def measured_columns(measurement: Measurement, num_steps: int) -> Columns:
    """The columns of a row that are measured."""
    # Another process on the card disturbs the time; the memory is this process's own.
    is_timed = measurement.status == "ok" and "other processes used the GPU" not in measurement.note
    return {
        "status": measurement.status,
        "peak_memory_mib": _text(measurement.peak_memory_bytes or None, 1 / MIB),
        "allocated_peak_mib": _text(measurement.allocated_peak_bytes, 1 / MIB),
        "reserved_peak_mib": _text(measurement.reserved_peak_bytes, 1 / MIB),
        "step_time_ms": _text(measurement.step_time_s if is_timed else None, 1e3),
        "num_steps": str(num_steps) if num_steps else "",
        "framework": measurement.framework,
        "note": measurement.note,
    }


def _text(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.6g}"
