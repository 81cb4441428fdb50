"""What does measuring cost the trial that is measured?

    python benchmarks/probe_overhead.py [--rounds 40]

A training loop runs bare and under each probe in turn, block by block, so that whatever else the machine does hits all alike. A
probe's cost is the median, over the rounds, of its block's time against the bare block's of the same round; wall-clock and
CPU time. Below the table, what a mark and a sample take by themselves: steadier on a busy machine.

There is no GPU here: the GPU's probe runs with its thread, its events and its ten samples a second on a double of NVML and of
CUDA that lives in memory, whose calls cost nothing; what the real NVML's calls cost (in another thread, with Python's lock
released) is not in it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from perfguard import Run, resolve_device
from perfguard.measure import GpuProbe, StepTimer, _cpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fake_gpu import PID, FakeCuda, FakeGpu, FakeNvml


def main() -> None:
    """Run the blocks and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block-s", type=float, default=0.5, help="CPU time of one block")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    step = make_step()
    seconds_of(step, 100)  # warm-up
    steps = max(20, int(arguments.block_s / seconds_of(step, 100)[1] * 100))
    ways: dict[str, Callable[[], Any]] = {
        "bare": nullcontext,
        "bare again": nullcontext,
        "processor: the kernel's high-water mark": lambda: Run(resolve_device("cpu")),
        "processor: sampled every 20 ms": sampled_run,
        "GPU: allocator, NVML and events": gpu_run,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(arguments.rounds):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with ways[name]():
                times[name].append(seconds_of(step, steps))
    console = Console(width=130)
    console.print(as_table(times, steps))
    console.print(own_costs(), highlight=False)


def own_costs() -> str:
    """What one mark of a step and one sample take of a core, and what that makes of a second."""
    gpu = FakeGpu(initialized=True)
    probe = GpuProbe(500 * 2**20, cuda=FakeCuda(gpu), nvml=FakeNvml(gpu), pid=PID, interval_s=3600.0)
    probe.start()
    process = psutil.Process()
    timers = StepTimer(lambda: None), StepTimer(probe.stamp)
    costs_us = {
        "processor, mark": cpu_us(timers[0].step),
        "processor, sample (50 a second)": cpu_us(process.memory_info),
        "GPU, mark with an event": cpu_us(timers[1].step),
        "GPU, sample (10 a second), NVML's own calls not counted": cpu_us(probe._driver._take),
    }
    probe.finish()
    shares = {
        "processor, high-water mark": 100 * costs_us["processor, mark"],
        "processor, sampled": 100 * costs_us["processor, mark"] + 50 * costs_us["processor, sample (50 a second)"],
        "GPU": 100 * costs_us["GPU, mark with an event"]
        + 10 * costs_us["GPU, sample (10 a second), NVML's own calls not counted"],
    }
    lines = [f"{name}: {cost:.1f} us of CPU time" for name, cost in costs_us.items()]
    lines += [f"{name}: {share / 1e6:.3%} of a core at 100 steps a second" for name, share in shares.items()]
    return "\n".join(lines)


def cpu_us(call: Callable[[], object], times: int = 5000) -> float:
    """CPU microseconds of one ``call``: the least of five means."""

    def once() -> float:
        start = time.process_time()
        for _ in range(times):
            call()
        return (time.process_time() - start) / times * 1e6

    return min(once() for _ in range(5))


def make_step() -> Callable[[], None]:
    """One step of a perceptron with Adam."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = torch.randn(64, 256), torch.randint(10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def seconds_of(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Wall-clock and CPU seconds of ``steps`` steps."""
    start, own_start = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return time.perf_counter() - start, time.process_time() - own_start


@contextmanager
def sampled_run() -> Iterator[None]:
    """Where the kernel does not let a process reset its peak."""
    reset, _cpu._reset_peak = _cpu._reset_peak, lambda: False
    try:
        with Run(resolve_device("cpu")):
            yield
    finally:
        _cpu._reset_peak = reset


def gpu_run() -> Run:
    """A run on the GPU that lives in memory."""
    gpu = FakeGpu(initialized=True)
    device = resolve_device("a100")
    return Run(device, probe=GpuProbe(device.context_bytes, cuda=FakeCuda(gpu), nvml=FakeNvml(gpu), pid=PID))


def as_table(times: dict[str, list[tuple[float, float]]], steps: int) -> Table:
    """Medians, and the overhead over the bare blocks."""
    rounds = len(times["bare"])
    machine = (
        f"{datetime.date.today()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the end"
    )
    table = Table(title=f"{rounds} rounds of {steps} steps, {machine}")
    for heading in ("probe", "ms a step", "wall-clock", "CPU time"):
        table.add_column(heading, justify="left" if heading == "probe" else "right")
    for name, blocks in times.items():
        wall, own = (
            statistics.median(block[kind] / bare[kind] for block, bare in zip(blocks, times["bare"], strict=True)) - 1
            for kind in (0, 1)
        )
        median_ms = statistics.median(block[0] for block in blocks) / steps * 1e3
        table.add_row(name, f"{median_ms:.3f}", f"{wall:+.2%}", f"{own:+.2%}")
    return table


if __name__ == "__main__":
    main()
