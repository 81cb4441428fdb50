"""How fast a new machine is learnt: the error of its step times after some of its own runs.

    python benchmarks/new_machine.py RUNS --cache .perfguard-cache

RUNS is a table of runs of any model (docs/tables.md). Each machine with at least 30 step times is shown. Its
runs come in a random order. The error is that of the others, which come later. The weights have seen these rows, but not the
factors of the machines.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from _record import parser_of, show

from perfguard.devices import Device
from perfguard.graph import OpGraph
from perfguard.measure import Measurement
from perfguard.predictor import HALF_INTERVAL, Observation
from perfguard_models.guardnet import load
from perfguard_research.dataset import Run, dataset_of, graphs_of

_LEARNT = (0, 1, 3, 5, 10, 20)
_FEWEST = 30
_JUDGED = 60


def observed(run: Run, device: Device, graph: OpGraph) -> Observation:
    """The run as a guard would have logged it."""
    seconds = math.exp(run.labels["time"])
    return Observation(graph, device, Measurement("ok", device.id, device.name, None, seconds, 10 * seconds, 10, "nvml", ""))


def score(rows: Sequence[tuple[Run, Device, OpGraph]], learnt: int) -> tuple[float, float, float]:
    """Mean and median error, and the share inside the 90% interval, of the runs from the 21st on."""
    net = load()
    if learnt:
        net.fine_tune([observed(*row) for row in rows[:learnt]])
    later = rows[_LEARNT[-1] :][:_JUDGED]
    times = [net.predict(graph, device).step_time for _, device, graph in later]
    apart = np.array([run.labels["time"] - math.log(time.median) for (run, *_), time in zip(later, times, strict=True)])
    errors = np.abs(np.expm1(-apart))
    inside = np.abs(apart) <= HALF_INTERVAL * np.array([time.log_sigma for time in times])
    return float(errors.mean()), float(np.median(errors)), float(inside.mean())


def _name(source: str, gpu: str, folder: str) -> str:
    """The machine, by the part of the folder that tells it apart."""
    return " ".join([source, gpu, *PurePosixPath(folder).parts[:2][-1:]])


def main() -> None:
    """Show one line for each machine."""
    parser = parser_of(__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dataset_of([arguments.table], "launches", cache=arguments.cache)  # traces what is not in the cache
    machines: defaultdict[tuple[str, str, str], list[tuple[Run, Device, OpGraph]]] = defaultdict(list)
    for row in graphs_of([arguments.table], lambda run: "time" in run.labels, cache=arguments.cache):
        machines[row[0].machine].append(row)
    lines = []
    for machine, rows in sorted(machines.items()):
        if len(rows) >= _FEWEST:
            random.Random(0).shuffle(rows)
            cells = [f"{mean:.0%} / {median:.0%}; {inside:.0%}" for mean, median, inside in (score(rows, n) for n in _LEARNT)]
            lines.append([_name(*machine), str(len(rows)), *cells])
    columns = ["machine", "runs", *(f"after {number}" for number in _LEARNT)]
    show("new-machines", columns, lines, record=arguments.record)


if __name__ == "__main__":
    main()
