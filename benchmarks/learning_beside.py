"""Does a decision take longer while the weights are fine-tuned in the process beside it?

    python benchmarks/learning_beside.py [--decisions 400]

A log of 600 runs of perceptrons on this CPU, whose times follow a pattern that the shipped weights do not know. The same guard
decides on the same workloads, with another batch each time, while nothing else runs, and while `perfguard learn` runs over and
over. Also: what a lesson takes on the trial's path, and what one update takes of processor time and memory.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from perfguard import Guard, Measurement, MeasurementStore, TensorSpec, Workload, resolve_device, trace
from perfguard.learning import LogSync
from perfguard_models import guardnet

_UPDATE = """
import resource, sys, time
import torch
torch.set_num_threads(1)
from perfguard import MeasurementStore
from perfguard.learning import OnlineTrainer
trainer = OnlineTrainer(MeasurementStore(sys.argv[1]), min_new=1)
begun = time.process_time()
generation = trainer.update()
seconds = time.process_time() - begun
print(f"{seconds:.2f} s of processor time, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB; {generation}")
"""


def workload(width: int, batch: int, *, norm: bool) -> Workload:
    """A step of a perceptron."""
    middle = [nn.BatchNorm1d(width)] if norm else [nn.Tanh()]
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, width), *middle, nn.ReLU(), nn.Linear(width, 10))
    return Workload(model, (batch, 32), TensorSpec((batch,), "int64"), nn.functional.cross_entropy)


def fill(path: Path, runs: int) -> None:
    """Log runs that take thrice as long with batch norm."""
    net, device, generator = guardnet.load(), resolve_device("cpu"), random.Random(0)
    with MeasurementStore(path) as log:
        for trial in range(runs):
            norm = generator.random() < 0.5
            graph = trace(workload(32 * generator.randint(2, 16), 32 * generator.randint(1, 4), norm=norm), target="cpu")
            prediction = net.predict(graph, device)
            seconds = prediction.step_time.median * (3 if norm else 1) * math.exp(generator.gauss(0, 0.05))
            decision_id = log.record_decision(
                study="s", trial=trial, graph=graph, device=device, action="launch", reason="", prediction=prediction, params={}
            )
            peak_bytes = int(prediction.peak_memory.median)
            log.record_measurement(
                decision_id, Measurement("ok", "cpu", device.name, peak_bytes, seconds, 120 * seconds, 100, "made up", "torch")
            )


def decisions_ms(guard: Guard, number: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Milliseconds of each decision."""
    times = []
    for index in range(number):
        one = workload(64 + 32 * (index % 12), 32 + index % 64, norm=bool(index % 2))
        begun = time.perf_counter()
        guard.check(one)
        times.append((time.perf_counter() - begun) * 1e3)
    return np.array(times)


def main() -> None:
    """Print the decisions' times side by side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--decisions", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.db"
        fill(path, 600)
        print(f"{datetime.date.today()}, {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f} at the start")
        with MeasurementStore(path) as log:
            sync = LogSync(guardnet.load(), log)
            sync.update("cpu")
            begun = time.process_time(), time.perf_counter()
            for _ in range(10):
                sync.update("cpu")
            cpu_ms, wall_ms = (
                1e2 * (now - then) for now, then in zip((time.process_time(), time.perf_counter()), begun, strict=True)
            )
        print(f"a lesson of 500 runs: {cpu_ms:.0f} ms of processor time, {wall_ms:.0f} ms")
        copy = Path(folder) / "copy.db"
        copy.write_bytes(path.read_bytes())
        done = subprocess.run([sys.executable, "-c", _UPDATE, str(copy)], capture_output=True, text=True, check=True)
        print(f"an update: {done.stdout.strip()}")
        guard = Guard("cpu", time_budget=None, memory_budget=0.9, log=str(path))
        decisions_ms(guard, 50)
        command = f"while true; do {sys.executable} -m perfguard.cli learn --min-new 1 >/dev/null 2>&1; done"
        for name in ("alone", "beside a learner", "alone again", "beside a learner again"):
            child = None
            if name.startswith("beside"):
                child = subprocess.Popen(
                    ["bash", "-c", command], env=os.environ | {"PERFGUARD_LOG": str(copy)}, start_new_session=True
                )
            found = decisions_ms(guard, arguments.decisions)
            if child is not None:
                os.killpg(child.pid, 15)
                child.wait()
            low, middle, high = np.quantile(found, [0.5, 0.9, 0.99])
            print(f"decisions {name}: median {low:.1f} ms, 90% {middle:.1f}, 99% {high:.1f}")
        guard.log.close()


if __name__ == "__main__":
    main()
