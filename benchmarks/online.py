"""How fast PerfGuard learns a GPU, a table or a family that its weights have never seen, on real rows, one at a time.

    perfguard leaderboard TABLE... --predictors guardnet --splits family,gpu,random --most-operators 30000
    python benchmarks/online.py TABLE... --cache .perfguard-cache [--rows 400] [--seeds 3] [--only NAME]

The first command keeps what GuardNet said of rows that its weights had not seen; this one streams those rows through the
product's own loop: predict, widen, log, teach (`perfguard.online.Lessons`), and every 25 rows an update by `OnlineTrainer`.
Beside the stream a fixed set of other rows is judged now and then. "Weights that know the like" have learnt from all kinds of
rows (the random split). Where GuardNet would answer by physics, or carry a time over from a card that it knows, is not replayed:
the zero-shot figures are those of the bare learner.
"""

from __future__ import annotations

import argparse
import datetime
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.progress import track

from perfguard.devices import Device, resolve_device
from perfguard.evidence import Evidence
from perfguard.graph import OpGraph, Storage, StorageKind
from perfguard.measure import Measurement
from perfguard.online import Lessons, OnlineTrainer
from perfguard.predictor import Prediction, Target
from perfguard.store import MeasurementStore
from perfguard_models._engines import TARGETS, UNTRAINED_LOG_SIGMA, Answer, embedding_of, physics_of, prior_of
from perfguard_models.dataset import Run
from perfguard_models.guardnet import GuardNet
from perfguard_models.held_out import log_sigmas_of
from perfguard_models.leaderboard import predictions

CHECKPOINTS = (0, 5, 20, 50, 100, 200, 400, 800)
UPDATE_EVERY = 25
WINDOW = 200
_Z = 1.6448536269514722
_NUM_STEPS = 100


class Row(NamedTuple):
    """A measured run, and what weights that had not seen it said of it."""

    run: Run
    log_value: dict[str, float]
    log_sigma: dict[str, float]
    by_all: dict[str, float]
    """What weights that have seen the like say; empty for most rows."""


class Scenario(NamedTuple):
    """Rows to stream, and which figure is looked at."""

    name: str
    target: Target
    rows: list[Row]


class HeldOut:
    """An engine for GuardNet that answers from a list of rows; a graph's one storage holds the row's number."""

    version = 0

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def trained_on(self, device: Device) -> bool:
        return False

    def interval_scale(self, target: str) -> float:
        return 1.0

    def answer(self, graph: OpGraph, device: Device) -> Answer:
        row = self._rows[graph.storages[0].num_bytes - 1]
        sums = row.run.view["sums"]
        return Answer(
            row.log_value,
            torch.zeros(0),
            dict.fromkeys(TARGETS, embedding_of(sums)),
            {target: physics_of(target, sums, row.log_value[target]) for target in TARGETS},
            {target: prior_of(row.log_sigma[target]) for target in TARGETS},
            {},
            dict.fromkeys(TARGETS, True),
            sums,
        )


def graph_of(index: int) -> OpGraph:
    """Stands for row ``index``."""
    return OpGraph((), (Storage(index + 1, StorageKind.INPUT, -1, 0, ""),), "infer", "fp32", "nchw")


class Curve(NamedTuple):
    """What one stream came to."""

    errors: dict[int, tuple[float, float]]
    """Mean and median relative error on the judged rows, after so many rows were learnt."""
    by_all: float
    """Mean error of weights that know the like, on those of the judged rows that they were judged on."""
    at_last_of_same: float
    """Mean error after the stream on those same rows."""
    coverages: list[float]
    """Of the 90% intervals, over every window of WINDOW rows of the stream."""
    promoted: int
    quarantined: int
    teach_s: float
    """Median processor time of one lesson, in the second half of the stream."""
    update_s: float
    """Longest processor time of one update."""


def stream(scenario: Scenario, *, num_rows: int, seed: int, poison: float = 0.0, in_order: bool = False) -> Curve:
    """Feed ``num_rows`` rows one by one; judge on up to 300 others."""
    order = list(range(len(scenario.rows)))
    random.Random(seed).shuffle(order)
    judged, fed = order[:300], order[300:][:num_rows]
    if in_order:
        fed = sorted(order[300:])[:num_rows]
    graphs = {index: graph_of(index) for index in order}
    device = replace(resolve_device(scenario.rows[0].run.gpu), id="streamed")
    generator = random.Random(seed + 1)

    def make() -> GuardNet:
        return GuardNet({"cuda": HeldOut(scenario.rows), "cpu": HeldOut(scenario.rows)})

    net, errors, hits, teach_s, update_s = make(), {}, [], [], [0.0]
    with MeasurementStore(":memory:") as log:
        lessons, trainer = Lessons(net, log), OnlineTrainer(log, predictor=make, min_new=UPDATE_EVERY)
        evidence = Evidence()
        for count, index in enumerate(fed):
            if count in CHECKPOINTS:
                errors[count] = judge(net, scenario, judged, graphs, device)
            prediction = net.predict(graphs[index], device).widened(evidence.widening)
            is_poisoned = generator.random() < poison
            if not is_poisoned:
                hits.append(is_inside(prediction, scenario, index))
            decision_id = log.record_decision(
                study="s", trial=count, graph=graphs[index], device=device, action="launch", reason="",
                prediction=prediction, params={},
            )  # fmt: skip
            log.record_measurement(
                decision_id, measurement_of(scenario.rows[index].run, device, generator if is_poisoned else None)
            )
            begun = time.process_time()
            evidence = lessons.teach(device.id)
            teach_s.append(time.process_time() - begun)
            if (count + 1) % UPDATE_EVERY == 0:
                begun = time.process_time()
                trainer.update()
                update_s.append(time.process_time() - begun)
        lessons.teach(device.id)
        errors[len(fed)] = judge(net, scenario, judged, graphs, device)
        known = [index for index in judged if scenario.target in scenario.rows[index].by_all]
        of_all = [
            relative(scenario.rows[index].by_all[scenario.target], scenario.rows[index], scenario.target) for index in known
        ]
        same = judge(net, scenario, known, graphs, device)[0] if known else math.nan
        promoted = sum(weights.state in ("promoted", "superseded") for weights in log.weights())
    windows = [statistics.fmean(hits[start : start + WINDOW]) for start in range(0, len(hits) - WINDOW + 1, 20)]
    return Curve(
        errors, statistics.fmean(of_all) if of_all else math.nan, same, windows, promoted, len(evidence.quarantined),
        statistics.median(teach_s[len(teach_s) // 2 :]), max(update_s),
    )  # fmt: skip


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


def relative(log_value: float, row: Row, target: Target) -> float:
    return abs(math.exp(log_value - row.run.labels[target]) - 1)


def estimate_of(prediction: Prediction, target: Target) -> tuple[float, float]:
    """Median's logarithm, and its standard deviation."""
    estimate = prediction.peak_memory if target == "memory" else prediction.step_time
    return math.log(estimate.median), estimate.log_sigma


def is_inside(prediction: Prediction, scenario: Scenario, index: int) -> bool:
    log_value, log_sigma = estimate_of(prediction, scenario.target)
    return abs(scenario.rows[index].run.labels[scenario.target] - log_value) <= _Z * log_sigma


def judge(
    net: GuardNet, scenario: Scenario, judged: Sequence[int], graphs: dict[int, OpGraph], device: Device
) -> tuple[float, float]:
    errors = [
        relative(estimate_of(net.predict(graphs[index], device), scenario.target)[0], scenario.rows[index], scenario.target)
        for index in judged
    ]
    return statistics.fmean(errors), statistics.median(errors)


def scenarios(tables: Sequence[Path], cache: Path) -> list[Scenario]:
    """Those of the issue: a card never seen, its training rows, memory never measured, perceptrons, one family."""
    runs, found = predictions(tables, {"guardnet": {}}, ["family", "gpu", "random"], cache=cache, most_operators=30_000)
    said: dict[str, dict[int, tuple[dict[str, float], dict[str, float]]]] = {"family": {}, "gpu": {}, "random": {}}
    for (split, _), judged in found.items():
        for (fold, predicted), sigmas in zip(judged, log_sigmas_of(runs, split, judged), strict=True):
            for position, index in enumerate(fold.judge):
                values = {target: float(predicted[target][position]) for target in TARGETS}
                said[split][index] = values, {target: float(sigmas[target][position]) for target in TARGETS}

    def rows(split: str, target: Target, wanted: Callable[[Run], bool]) -> list[Row]:
        chosen = []
        for index, (values, sigmas) in said[split].items():
            run = runs[index]
            if run.table == "operator" or target not in run.labels or not math.isfinite(values[target]) or not wanted(run):
                continue
            usable = {name: value if math.isfinite(value) else 0.0 for name, value in values.items()}
            sure = {name: value if math.isfinite(value) else UNTRAINED_LOG_SIGMA[name] for name, value in sigmas.items()}
            chosen.append(Row(run, usable, sure, said["random"].get(index, ({}, {}))[0]))
        return chosen

    def on(gpu: str, mode: str = "train", table: str = "workload") -> Callable[[Run], bool]:
        return lambda run: (run.gpu, run.mode, run.table) == (gpu, mode, table)

    a100 = "a100-pcie-40gb"
    return [
        Scenario("RTX 4090 never seen, inference time", "time", rows("gpu", "time", on("rtx4090", "infer"))),
        Scenario("RTX 3090 never seen, training time", "time", rows("gpu", "time", on("rtx3090"))),
        Scenario("A100 never seen, memory of networks", "memory", rows("gpu", "memory", on(a100))),
        Scenario("A100 never seen, memory of perceptrons", "memory", rows("gpu", "memory", on(a100, table="perceptron"))),
        Scenario(
            "family vit never seen, A100 memory",
            "memory",
            rows("family", "memory", lambda run: on(a100)(run) and run.family == "vit"),
        ),
    ]


def main() -> None:
    """Print curves, coverage and costs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}, {arguments.seeds} orders of up to {arguments.rows} rows")
    for scenario in scenarios(arguments.tables, arguments.cache):
        if arguments.only in scenario.name and len(scenario.rows) > 350:
            show(scenario, arguments.rows, range(arguments.seeds))


def show(scenario: Scenario, num_rows: int, seeds: Sequence[int]) -> None:
    print(f"\n{scenario.name}: {len(scenario.rows)} rows")
    kinds = {"clean": {}, "5% poisoned": {"poison": 0.05}, "table's order": {"in_order": True}}
    for kind, options in kinds.items():
        curves = [
            stream(scenario, num_rows=num_rows, seed=seed, **options)  # type: ignore[arg-type]
            for seed in track(seeds, description=kind, transient=True)
        ]
        counts = sorted(set.intersection(*(set(curve.errors) for curve in curves)))
        means = {count: np.mean([curve.errors[count] for curve in curves], axis=0) for count in counts}
        print(f"  {kind}: mean / median error after rows: ", end="")
        print("; ".join(f"{count}: {mean:.1%} / {median:.1%}" for count, (mean, median) in means.items()))
        windows = [coverage for curve in curves for coverage in curve.coverages]
        if windows:
            print(f"    coverage over windows of {WINDOW}: {min(windows):.1%} to {max(windows):.1%}, mean {np.mean(windows):.1%}")
        print(
            f"    weights promoted: {sum(curve.promoted for curve in curves)}; readings quarantined: "
            f"{sum(curve.quarantined for curve in curves)}; a lesson {max(c.teach_s for c in curves) * 1e3:.0f} ms, "
            f"an update at most {max(c.update_s for c in curves):.1f} s of processor time"
        )
        if kind == "clean":
            of_all, same = np.nanmean([c.by_all for c in curves]), np.nanmean([c.at_last_of_same for c in curves])
            print(f"    weights that know the like: {of_all:.1%}; on the same rows after the stream: {same:.1%}")


if __name__ == "__main__":
    main()
