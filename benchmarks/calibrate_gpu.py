"""What a calibration may bring on a GPU, simulated from tables: errors of a machine's steps after a sweep on its card.

    python benchmarks/calibrate_gpu.py TABLE... --operators TABLE... --cache .perfguard-cache

The weights learn from TABLEs, of whole steps and of single operators, but for those of the card. A sweep is of single operators
of the card, from the tables of --operators; of steps of the machine that take a quarter of a second at most, as those of
`perfguard calibrate`; or of both. The steps of a sweep are of half of the machine's families, and the errors are of the other
half. They are means of three draws of operators and families.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from _record import parser_of, show
from new_machine import JUDGED, OPERATORS, ORDERS, Row, cell, learnt_runs, name_of, observed, score, weights_of

from perfguard.graph import TraceCache
from perfguard.learning import CALIBRATION, assess
from perfguard.predictor import Observation
from perfguard_models.guardnet import GuardNet
from perfguard_models.raw_prediction import Weights
from perfguard_research.csv_rows import read_table
from perfguard_research.dataset import folds, graphs_of
from perfguard_research.tables import parser_of as parser_of_rows

_SWEEPS = {"20 operators": (20, 0), "100 operators": (100, 0), "5 steps": (0, 5), "10 steps": (0, 10), "100 and 10": (100, 10)}
"""Numbers of operators and of whole steps."""
_LONGEST_S = 0.25
_FEWEST = 10
_Machine = tuple[str, str, str]
_Sweep = tuple[str, str]
"""The source of operators, and the card."""


def operators_of(tables: Sequence[Path]) -> dict[_Sweep, list[Observation]]:
    """Some single operators of each source and card."""
    rows: defaultdict[_Sweep, list[Mapping[str, str]]] = defaultdict(list)
    for table in tables:
        columns, raw = read_table(table)
        parse = parser_of_rows(columns, table)
        for row in raw:
            rows[row.get("source") or "sitar-lab/NeuSight", row["gpu"]].append(row)
    found = {}
    for sweep, of_card in rows.items():
        parsed = (parse(row) for row in random.Random(0).sample(of_card, min(len(of_card), OPERATORS)))
        found[sweep] = [
            observed(row.graph(None, TraceCache(), row.device), row.device, row.step_time_s) for row in parsed if row.step_time_s
        ]
    return found


def scores(weights: Weights, rows: Sequence[Row], operators: Sequence[Observation], seed: int) -> npt.NDArray[np.float64]:
    """Mean and median error, and the share inside the interval: before, and after each sweep. NaN where there are no steps."""
    net, generator = GuardNet({"cuda": weights}), random.Random(seed)
    families = sorted({run.family for run, *_ in rows})
    swept = {*generator.sample(families, len(families) // 2)}
    judged = [row for row in rows if row[0].family not in swept]
    judged = generator.sample(judged, min(len(judged), JUDGED))
    found, steps = [score(net, judged)], []
    for run, device, graph in generator.sample(rows, len(rows)):
        if run.family in swept and net.predict(graph, device).step_time.median <= _LONGEST_S:
            steps.append(observed(graph, device, math.exp(run.labels["time"])))
    drawn = generator.sample(operators, max(number for number, _ in _SWEEPS.values()))
    for num_operators, num_steps in _SWEEPS.values():
        if len(steps) < num_steps:
            found.append((math.nan,) * 3)
            continue
        readings = [*drawn[:num_operators], *steps[:num_steps]]
        net.fine_tune(assess(readings, study=CALIBRATION).observations)  # as a guard does after `perfguard calibrate`
        found.append(score(net, judged))
    return np.array(found)


def main() -> None:
    """Show one line for each machine and source of operators, and the means of all."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", type=Path, nargs="+", help="the weights learn from them; they have the machines' steps, too")
    parser.add_argument("--operators", type=Path, nargs="+", required=True, help="tables of single operators to sweep")
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cache, sweeps = arguments.cache, operators_of(arguments.operators)
    runs = learnt_runs(arguments.tables, cache)
    cards, machines = {gpu for _, gpu in sweeps}, defaultdict[_Machine, list[Row]](list)
    for row in graphs_of(arguments.tables, lambda run: run.gpu in cards and "time" in run.labels, cache=cache):
        machines[row[0].machine].append(row)
    found: dict[tuple[_Machine, str], npt.NDArray[np.float64]] = {}
    for fold in folds(runs, "gpu"):
        held_out = {runs[index].gpu for index in fold.judge}
        own = [one for one, rows in machines.items() if one[1] in held_out and len(rows) >= _FEWEST]
        if not own:
            continue
        weights = weights_of(fold, runs, cache)
        for machine in own:
            for (source, gpu), operators in sweeps.items():
                if gpu == machine[1]:
                    of_seeds = [scores(weights, machines[machine], operators, seed) for seed in range(ORDERS)]
                    found[machine, source] = np.mean(of_seeds, axis=0)
    lines = [
        [name_of(*machine), source, str(len(machines[machine])), *(cell(*row) for row in of_one)]
        for (machine, source), of_one in sorted(found.items())
    ]
    means = np.array(list(found.values()))
    for name, some in (("lines with steps to sweep", means[np.isfinite(means).all((1, 2))]), ("all lines", means)):
        errors = some[:, :, 0]
        worse = np.where(np.isfinite(errors).all(0), (errors > errors[:, :1]).sum(0), -1)
        lines.append([name, "", "", *(cell(*row) for row in some.mean(0))])
        lines.append(["of them made worse", "", "", *("-" if number < 0 else f"{number} of {len(some)}" for number in worse)])
    columns = ["machine", "operators of", "steps", "before", *(f"after {name}" for name in _SWEEPS)]
    show("calibration-gpu", columns, lines, record=arguments.record)


if __name__ == "__main__":
    main()
