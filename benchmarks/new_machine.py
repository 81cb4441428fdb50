"""How fast a new machine is learnt: the error of its step times after some of its own runs.

    python benchmarks/new_machine.py TABLE... --cache .perfguard-cache [--split gpu]

A machine is a source, a card and the source's folder of results. Each with at least 30 runs of any model is shown. The weights
are trained without its card, or without its source, and kept in the cache. Its runs come in a random order, three times. The
error is that of the runs from the 21st on.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import torch
from _record import parser_of, show
from online import Scenario, shipped_weights, weights_without

from perfguard.devices import Device
from perfguard.graph import OpGraph
from perfguard.measure import Measurement
from perfguard.predictor import HALF_INTERVAL, Observation
from perfguard_models.guardnet import GuardNet
from perfguard_models.raw_prediction import Weights
from perfguard_models.trees import MemoryForest
from perfguard_research.dataset import Fold, Run, dataset_of, folds, graphs_of, without_time
from perfguard_research.learners import learner_class

_LEARNT = (0, 1, 3, 5, 10, 20)
_FEWEST = 30
JUDGED = 60
ORDERS = 3
OPERATORS = 2000
Row = tuple[Run, Device, OpGraph]
_Scores = npt.NDArray[np.float64]
"""Mean and median error, and the share inside the 90% interval, after each number of runs. Shape: (len(_LEARNT), 3)."""


def observed(graph: OpGraph, device: Device, seconds: float) -> Observation:
    """A run as a guard would have logged it."""
    return Observation(graph, device, Measurement("ok", device.id, device.name, None, seconds, 10 * seconds, 10, "nvml", ""))


def score(net: GuardNet, rows: Sequence[Row]) -> tuple[float, float, float]:
    """Mean and median error of the predictions for ``rows``, and the share inside the 90% interval."""
    times = [net.predict(graph, device).step_time for _, device, graph in rows]
    apart = np.array([run.labels["time"] - math.log(time.median) for (run, *_), time in zip(rows, times, strict=True)])
    errors, half = np.abs(np.expm1(-apart)), HALF_INTERVAL * np.array([time.log_sigma for time in times])
    return float(errors.mean()), float(np.median(errors)), float((np.abs(apart) <= half).mean())


def scores(weights: Weights, rows: Sequence[Row]) -> _Scores:
    """The scores of the runs from the 21st on."""
    net, found = GuardNet({"cuda": weights}), []
    for learnt in _LEARNT:
        net.fine_tune([observed(graph, device, math.exp(run.labels["time"])) for run, device, graph in rows[:learnt]])
        found.append(score(net, rows[_LEARNT[-1] :][:JUDGED]))
    return np.array(found)


def of_orders(weights: Weights, rows: Sequence[Row]) -> _Scores:
    """The mean of :func:`scores` over some orders of ``rows``."""
    return np.asarray(np.mean([scores(weights, random.Random(seed).sample(rows, len(rows))) for seed in range(ORDERS)], axis=0))


def machines_of(table: Path, cache: Path) -> dict[tuple[str, str, str], list[Row]]:
    """The rows with a step time of each machine that has enough of them."""
    found: defaultdict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in graphs_of([table], lambda run: run.table == "run" and "time" in run.labels, cache=cache):
        found[row[0].machine].append(row)
    return {machine: rows for machine, rows in found.items() if len(rows) >= _FEWEST}


def learnt_runs(tables: Sequence[Path], cache: Path) -> list[Run]:
    """What weights learn from: rows with a step time, and a sample of the single operators."""
    views = learner_class("step-time").views
    return dataset_of(tables, views, cache=cache, most_operators=OPERATORS, unwanted=without_time).runs


def weights_of(fold: Fold, runs: Sequence[Run], cache: Path) -> Weights:
    """The weights for a fold: those for time without its runs, those for memory as they ship."""
    judged = {id(runs[index]) for index in fold.judge}
    scenario = Scenario(fold.name, "time", lambda run: id(run) in judged, lambda run: False)
    return Weights(shipped_weights(MemoryForest.name), weights_without(scenario, runs, cache))


def name_of(source: str, gpu: str, folder: str) -> str:
    """The machine, by the part of the folder that tells it apart."""
    return " ".join([source, gpu, *PurePosixPath(folder).parts[:2][-1:]])


def cell(mean: float, median: float, inside: float) -> str:
    return "-" if math.isnan(mean) else f"{mean:.0%} / {median:.0%}; {inside:.0%}"


def main() -> None:
    """Show one line for each machine, and the means of all."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", type=Path, nargs="+", help="the first has the machines, the others are learnt from, too")
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--split", choices=["gpu", "source"], default="gpu", help="what the weights have not seen")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cache = arguments.cache
    runs = learnt_runs(arguments.tables, cache)
    machines = machines_of(arguments.tables[0], cache)
    part = ("source", "gpu").index(arguments.split)  # of a machine's name

    found: dict[tuple[str, str, str], _Scores] = {}
    for fold in folds(runs, arguments.split):
        held_out = {getattr(runs[index], arguments.split) for index in fold.judge}
        own = [machine for machine in machines if machine[part] in held_out]
        if own:
            weights = weights_of(fold, runs, cache)
            found |= {machine: of_orders(weights, machines[machine]) for machine in own}
    lines = [[name_of(*one), str(len(machines[one])), *(cell(*row) for row in found[one])] for one in sorted(found)]
    means = np.array(list(found.values()))
    lines.append(["all machines alike", "", *(cell(*row) for row in means.mean(0))])
    worse = (means[:, :, 0] > means[:, :1, 0]).sum(0)
    lines.append(["machines that learning made worse", "", *(f"{number} of {len(means)}" for number in worse)])
    columns = ["machine", "runs", *(f"after {number}" for number in _LEARNT)]
    show(f"new-machines-{arguments.split}", columns, lines, record=arguments.record)


if __name__ == "__main__":
    main()
