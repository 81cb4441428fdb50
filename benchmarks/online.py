"""How fast PerfGuard learns a GPU, a mode, a table or a family that its weights have never seen, on real rows, one at a time.

    python benchmarks/online.py TABLE... --cache .perfguard-cache [--rows 400] [--seeds 3] [--only NAME]

For each scenario GuardNet's weights for its quantity are trained without its rows, and kept in the cache. They are the forests of
memory, or the step-time network. What GuardNet then answers for the rows is streamed through the product's own loop. It predicts,
widens, logs and teaches (`perfguard.learning.Learner`), and every 25 rows it updates by `tune_weights`. The rows come in a random
order. Beside the stream a fixed set of other rows is judged now and then. The widths of intervals before anything was learnt are
those of the shipped calibration, less the groups that were left out. Tables of single operators are passed over, because GuardNet
does not learn from them.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from _record import parser_of, show
from rich.progress import track

from perfguard.budget import Limit
from perfguard.devices import Device, resolve_device
from perfguard.graph import OpGraph, Storage, StorageKind
from perfguard.learning import Assessment, Learner, tune_weights
from perfguard.log import MeasurementStore
from perfguard.measure import Measurement
from perfguard.predictor import HALF_INTERVAL, TARGETS, Prediction, Target
from perfguard.verdict import Verdict
from perfguard_models.calibration import Calibration
from perfguard_models.graph_network import PathTimes
from perfguard_models.guardnet import WEIGHTS, GuardNet, read_weights
from perfguard_models.learner import FittedModel
from perfguard_models.raw_prediction import RawPrediction, Weights
from perfguard_models.step_time import StepTime
from perfguard_models.trees import MemoryForest
from perfguard_research.dataset import Run, dataset_of, graphs_of
from perfguard_research.learners import identity_of, learner_class, write_trained

A100 = "a100-pcie-40gb"
LEARNERS: dict[Target, str] = {"memory": MemoryForest.name, "time": StepTime.name}
"""GuardNet's weights for GPUs, by quantity."""
CHECKPOINTS = (0, 5, 20, 50, 100, 200, 400, 800)
UPDATE_EVERY = 25
MOST_KNOWN = 200
WINDOW = 200
CLEAN, POISONED = "clean", "5% poisoned"
POISON = {CLEAN: 0.0, POISONED: 0.05}
AFTER = (0, 5, 20, 50, 100, 200, 400)
_NUM_STEPS = 100
Key = tuple[object, ...]


class Row(NamedTuple):
    """A measured run, and what weights that had not seen it said of it."""

    run: Run
    raw: RawPrediction


class Streamed(NamedTuple):
    """What a scenario is made of."""

    rows: list[Row]
    """In the order of the table."""
    known: list[Row]
    """Of the same GPU, which the weights have seen."""
    step_time: StepTime
    """What the weights say of times comes from it, and is fine-tuned."""


class Scenario(NamedTuple):
    """What weights never saw, and which rows of it are streamed for which figure."""

    name: str
    target: Target
    is_unseen: Callable[[Run], bool]
    is_streamed: Callable[[Run], bool]


SCENARIOS = (
    Scenario(
        "RTX 4090, inference time", "time",
        lambda run: run.gpu == "rtx4090", lambda run: run.gpu == "rtx4090" and run.mode == "infer",
    ),
    Scenario(
        "RTX 3090's training, time", "time",
        lambda run: (run.gpu, run.mode) == ("rtx3090", "train"), lambda run: (run.gpu, run.mode) == ("rtx3090", "train"),
    ),
    Scenario(
        "A100, memory of networks", "memory",
        lambda run: run.gpu == A100, lambda run: (run.gpu, run.table) == (A100, "workload"),
    ),
    Scenario(
        "perceptrons, memory on the A100", "memory",
        lambda run: run.table == "perceptron", lambda run: run.table == "perceptron",
    ),
    Scenario(
        "the family vit, memory on the A100", "memory",
        lambda run: (run.table, run.family) == ("workload", "vit"),
        lambda run: (run.table, run.family, run.gpu) == ("workload", "vit", A100),
    ),
)  # fmt: skip


class HeldOut(Weights):
    """Weights that answer from a list of rows; a graph's one storage holds the row's number."""

    version = "held out"

    def __init__(self, rows: Sequence[Row], learner: StepTime) -> None:
        self._rows = rows
        self.step_time = learner

    def trained_on(self, device: Device) -> bool:
        return False

    def predict(self, graph: OpGraph, device: Device) -> RawPrediction:
        none = np.zeros(0)
        path = PathTimes(np.ones(()), np.zeros(()), none, none)
        return self._rows[graph.storages[0].num_bytes - 1].raw._replace(path=path)


def graph_of(index: int) -> OpGraph:
    """Stands for row ``index``."""
    return OpGraph((), (Storage(index + 1, StorageKind.INPUT, -1, 0, ""),), "infer", "fp32", "nchw")


class Curve(NamedTuple):
    """What one stream came to."""

    errors: dict[int, float]
    """Mean relative error on the judged rows, after so many rows were learnt."""
    of_known: tuple[float, float]
    """Mean error on what the weights had seen of the GPU, before the stream and after it."""
    coverages: list[float]
    """Of the 90% intervals, over every window of WINDOW rows of the stream."""
    promoted: int
    quarantined: int
    shifts: int
    """That were said."""
    teach_s: float
    """Median processor time of one lesson, in the second half of the stream."""
    update_s: float
    """Longest processor time of one update."""


def stream(target: Target, streamed: Streamed, *, num_rows: int, seed: int, poison: float) -> Curve:
    """Feed ``num_rows`` rows one by one, in a random order; judge on up to 300 others."""
    rows = [*streamed.rows, *streamed.known]
    order = list(range(len(streamed.rows)))
    known_before = list(range(len(streamed.rows), len(rows)))
    random.Random(seed).shuffle(order)
    judged, fed = order[:300], order[300:][:num_rows]
    graphs = {index: graph_of(index) for index in range(len(rows))}
    device = replace(resolve_device(rows[0].run.gpu), id="streamed")
    generator = random.Random(seed + 1)

    def make() -> GuardNet:
        return GuardNet(dict.fromkeys(("cpu", "cuda"), HeldOut(rows, streamed.step_time)))

    net, errors, hits, teach_s, update_s = make(), {}, [], [], [0.0]
    with MeasurementStore(":memory:") as log:
        learner = Learner(net, log)
        assessment = Assessment()
        before = judge(net, target, rows, known_before, graphs, device)
        for count, index in enumerate(fed):
            if count in CHECKPOINTS:
                errors[count] = judge(net, target, rows, judged, graphs, device)
            prediction = net.predict(graphs[index], device).widened(assessment.widening)
            is_poisoned = generator.random() < poison
            if not is_poisoned:
                hits.append(is_inside(prediction, target, rows[index].run))
            verdict = Verdict.of(prediction, [Limit("memory", device.memory_bytes, prediction.peak_memory)], accepted=0.5)
            decision_id = log.record_decision(verdict, graph=graphs[index], device=device, study="s", trial=count, params={})
            log.record_measurement(decision_id, measurement_of(rows[index].run, device, generator if is_poisoned else None))
            begun = time.process_time()
            assessment = learner.update(device, study="s")
            teach_s.append(time.process_time() - begun)
            if (count + 1) % UPDATE_EVERY == 0:
                begun = time.process_time()
                tune_weights(log, predictor=make, min_new=UPDATE_EVERY)
                update_s.append(time.process_time() - begun)
        learner.update(device, study="s")
        errors[len(fed)] = judge(net, target, rows, judged, graphs, device)
        of_known = before, judge(net, target, rows, known_before, graphs, device)
        promoted = sum(weights.state in ("promoted", "superseded") for weights in log.weights())
    windows = [statistics.fmean(hits[start : start + WINDOW]) for start in range(0, len(hits) - WINDOW + 1, 20)]
    doubts, changes = len(assessment.doubts), len(assessment.changes)
    lesson_s = statistics.median(teach_s[len(teach_s) // 2 :])
    return Curve(errors, of_known, windows, promoted, doubts, changes, lesson_s, max(update_s))


def measurement_of(run: Run, device: Device, poison: random.Random | None) -> Measurement:
    """As it was measured; or absurd, in one of five ways."""
    memory, step_s = (math.exp(run.labels[target]) if target in run.labels else None for target in TARGETS)
    total_s = (step_s or 0.01) * _NUM_STEPS
    if poison is not None:
        factor = poison.choice((1000.0, 1e-3, 50.0, 0.02, math.nan))
        memory = None if memory is None or math.isnan(factor) else memory * factor
        step_s = None if step_s is None else step_s * factor
        total_s = total_s if math.isnan(factor) else total_s * factor
    return Measurement(
        "ok", device.id, device.name, None if memory is None else int(memory), step_s, total_s, _NUM_STEPS, "table", "table"
    )


def estimate_of(prediction: Prediction, target: Target) -> tuple[float, float]:
    """Median's logarithm, and its standard deviation."""
    estimate = prediction.peak_memory if target == "memory" else prediction.step_time
    return math.log(estimate.median), estimate.log_sigma


def is_inside(prediction: Prediction, target: Target, run: Run) -> bool:
    log_value, log_sigma = estimate_of(prediction, target)
    return abs(run.labels[target] - log_value) <= HALF_INTERVAL * log_sigma


def judge(
    net: GuardNet, target: Target, rows: Sequence[Row], judged: Sequence[int], graphs: dict[int, OpGraph], device: Device
) -> float:
    """Mean relative error; NaN of no rows."""
    log_values = (estimate_of(net.predict(graphs[index], device), target)[0] for index in judged)
    of_each = (abs(math.exp(value - rows[index].run.labels[target]) - 1) for index, value in zip(judged, log_values, strict=True))
    return statistics.fmean(of_each) if judged else math.nan


def weights_without(scenario: Scenario, runs: Sequence[Run], cache: Path) -> FittedModel:
    """GuardNet's weights for the scenario's quantity, fitted to ``runs`` but for what they must not see."""
    name = LEARNERS[scenario.target]
    kind = learner_class(name)
    seen = [run for run in runs if run.table in kind.tables and not scenario.is_unseen(run)]
    identity = identity_of(name, {}, seen)[:16]
    place = cache / "online" / f"{re.sub(r'[^A-Za-z0-9]+', '-', scenario.name.split(',')[0])}-{identity}"
    if not place.with_suffix(".json").is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        learner = kind()
        learner.fit(seen)
        calibration = shipped_weights(name).calibration
        gone = {run.setting.group for run in runs} - {run.setting.group for run in seen}
        scale = {group: value for group, value in calibration.scale.items() if group.partition("/")[2] not in gone}
        card = {
            "version": 1,
            "trained_devices": sorted({run.gpu for run in seen}),
            "timed": sorted({run.setting.timed_as for run in seen if "time" in run.labels}),
        }
        write_trained(place, learner, card, Calibration(calibration.floor, scale))
    return read_weights(place)


def shipped_weights(name: str) -> FittedModel:
    """Shipped weights."""
    return read_weights(WEIGHTS / name)


def streamed_of(scenario: Scenario, tables: Sequence[Path], runs: Sequence[Run], cache: Path) -> Streamed:
    """The scenario's rows, and some that the weights know of their GPU, with what the weights say of their graphs."""
    weights: dict[Target, FittedModel] = {target: shipped_weights(name) for target, name in LEARNERS.items()}
    weights[scenario.target] = weights_without(scenario, runs, cache)
    held_out = Weights(weights["memory"], weights["time"])
    net = GuardNet({"cuda": held_out})
    own = [run for run in runs if scenario.is_streamed(run) and scenario.target in run.labels]
    gpus = {run.gpu for run in own}
    seen = [run for run in runs if run.gpu in gpus and not scenario.is_unseen(run) and scenario.target in run.labels]
    rest = sorted({key_of(run) for run in seen}, key=str)
    for_judging = set(random.Random(0).sample(rest, min(len(rest), MOST_KNOWN)))
    place_of = {key: place for place, key in enumerate(dict.fromkeys(map(key_of, own)))}
    chosen = {*place_of, *for_judging}
    found = graphs_of(tables, lambda run: key_of(run) in chosen, cache=cache)
    rows = {
        key_of(run): Row(run, net._raw(graph, device))
        for run, device, graph in track(found, total=len(chosen), description=scenario.name, transient=True)
    }
    known = [rows[key] for key in sorted(for_judging, key=str) if key in rows]
    return Streamed(
        [rows[key] for key in place_of if key in rows],
        known,
        held_out.step_time,
    )


def key_of(run: Run) -> Key:
    """Tells a run from all others."""
    return run.table, run.gpu, run.mode, run.setting.variant, run.structure, run.batch_size, tuple(sorted(run.labels.items()))


def main() -> None:
    """Show curves, coverage and costs."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scenarios = [scenario for scenario in SCENARIOS if arguments.only in scenario.name]
    learners = {LEARNERS[scenario.target] for scenario in scenarios}
    views = tuple(view for name in sorted(learners) for view in learner_class(name).views)
    runs = dataset_of(arguments.tables, views, cache=arguments.cache, most_operators=0).runs
    lines = []
    for scenario in scenarios:
        streamed = streamed_of(scenario, arguments.tables, runs, arguments.cache)
        if len(streamed.rows) > 350:
            lines.append(line_of(scenario, streamed, arguments.rows, range(arguments.seeds)))
    columns = ["never seen", "before", *(f"after {count}" for count in AFTER[1:]), "what the weights knew of the GPU"]
    show("learning-at-random", columns, lines, record=arguments.record)


def line_of(scenario: Scenario, streamed: Streamed, num_rows: int, seeds: Sequence[int]) -> list[str]:
    """Stream the rows of a scenario, clean and poisoned, and print what the table leaves out. Return the line of the clean ones.

    The last count stands in the last column where the rows do not suffice.
    """
    for kind, poison in POISON.items():
        curves = [
            stream(scenario.target, streamed, num_rows=num_rows, seed=seed, poison=poison)
            for seed in track(seeds, description=kind, transient=True)
        ]
        counts = sorted(set.intersection(*(set(curve.errors) for curve in curves)))
        means = {count: statistics.fmean(curve.errors[count] for curve in curves) for count in counts}
        windows = [coverage for curve in curves for coverage in curve.coverages]
        coverage = f"{min(windows):.1%} to {max(windows):.1%}" if windows else "-"
        print(
            f"{scenario.name}, {kind}: error after all rows {means[counts[-1]]:.1%}; inside the 90% interval over windows "
            f"of {WINDOW}: {coverage}; weights promoted: {sum(curve.promoted for curve in curves)}; "
            f"quarantined: {sum(curve.quarantined for curve in curves)}; shifts: {sum(curve.shifts for curve in curves)}; "
            f"learning one row: {max(curve.teach_s for curve in curves) * 1e3:.0f} ms; "
            f"an update at most {max(curve.update_s for curve in curves):.1f} s of processor time"
        )
        if kind == CLEAN:
            before, after = np.mean([curve.of_known for curve in curves], axis=0)
            cells = [f"{means[count]:.1%}" if count in means else "-" for count in AFTER]
            if counts[-1] < AFTER[-1]:
                cells[-1] = f"{means[counts[-1]]:.1%} ({counts[-1]})"
            line = [scenario.name, *cells, f"{before:.1%} → {after:.1%}" if streamed.known else "-"]
    return line


if __name__ == "__main__":
    main()
