"""How soon a machine that became slower or faster within a study is noticed, and what is predicted then.

    make demo ARGS="--trials 70 --log out/shifts.db"
    python benchmarks/shifts.py out/shifts.db [--orders 5] [--at 30]

The runs of a measurement log are streamed in several orders through the product's own loop (predict, widen, log, teach), as a
new study would meet them. From run ``--at`` on, each took a multiple of its time.
"""

from __future__ import annotations

import math
import random
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from _record import parser_of, show

from perfguard import MeasurementStore
from perfguard.learning import LogAssessment, LogSync
from perfguard.predictor import HALF_INTERVAL, Estimate, Observation
from perfguard_models import guardnet

FACTORS = (1.0, 1.3, 0.5, 2.0, 6.0)
AFTER = 10


class Played(NamedTuple):
    """What one order came to."""

    scores: list[float]
    """log(measured / predicted) of each run."""
    predicted: list[Estimate]
    seen_at: int | None
    """The run that showed the shift; None: nothing did."""
    false: int
    """Shifts of step times that were said and were not the one."""

    def error(self, first: int, last: int) -> float:
        """Mean relative error of the runs from ``first`` until before ``last``."""
        return statistics.fmean(abs(1 - math.exp(-score)) for score in self.scores[first:last])

    def width(self, first: int, last: int) -> float:
        """Median factor from the middle of the 90% interval to its end."""
        return statistics.median(math.exp(HALF_INTERVAL * estimate.log_sigma) for estimate in self.predicted[first:last])

    @property
    def num_missed(self) -> int:
        """Runs outside of their 90% interval."""
        pairs = zip(self.scores, self.predicted, strict=True)
        return sum(abs(score) > HALF_INTERVAL * estimate.log_sigma for score, estimate in pairs)

    def line(self, at: int) -> tuple[float, ...]:
        """Errors before run ``at``, from there until the shift was seen, and of the runs after; widths before and after."""
        start = min((self.seen_at or at + AFTER) + 1, len(self.scores) - AFTER)
        before, then = (at - AFTER, at), (start, start + AFTER)
        return self.error(*before), self.error(at, start), self.error(*then), self.width(*before), self.width(*then)


def play(runs: Sequence[Observation], *, factor: float, at: int) -> Played:
    """Stream ``runs``, of which those from ``at`` on took ``factor`` times as long."""
    net, device, assessment = guardnet.load(), runs[0].device, LogAssessment()
    scores: list[float] = []
    predicted: list[Estimate] = []
    with MeasurementStore(":memory:") as log:
        sync = LogSync(net, log)
        for trial, run in enumerate(runs):
            prediction = net.predict(run.graph, device).widened(assessment.widening)
            measurement, step_time_s = run.measurement, run.measured("time")
            assert step_time_s is not None
            if trial >= at:
                step_time_s *= factor
                measurement = replace(measurement, step_time_s=step_time_s, total_time_s=factor * measurement.total_time_s)
            decision_id = log.record_decision(
                study="s", trial=trial, graph=run.graph, device=device, action="launch", reason="", prediction=prediction,
                params={},
            )  # fmt: skip
            log.record_measurement(decision_id, measurement)
            assessment = sync.update(device.id)
            scores.append(math.log(step_time_s / prediction.step_time.median))
            predicted.append(prediction.step_time)
    number = {observation.decision_id: trial for trial, observation in enumerate(assessment.observations)}
    said = [number[drift.noticed.decision_id] for drift in assessment.drifts if drift.reason.startswith("step times")]
    seen_at = None if factor == 1 else next((trial for trial in said if trial >= at), None)
    return Played(scores, predicted, seen_at, len(said) - (seen_at is not None))


def main() -> None:
    """Show a line for each factor."""
    parser = parser_of(__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--orders", type=int, default=5)
    parser.add_argument("--at", type=int, default=30, help="the first run of the slower or faster machine")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with MeasurementStore(arguments.log) as log:
        runs = [run for run in log.observations("cpu") if run.measurement.status == "ok" and run.measured("time") is not None]
    at = arguments.at
    if at < AFTER:
        parser.error(f"--at must be at least {AFTER}, but got {at}.")
    if len(runs) < at + 3 * AFTER:
        parser.error(f"{arguments.log} holds {len(runs)} measured runs on the CPU, but {at + 3 * AFTER} are needed.")
    rows = []
    for factor in FACTORS:
        orders = [random.Random(seed).sample(runs, len(runs)) for seed in range(arguments.orders)]
        played = [play(order, factor=factor, at=at) for order in orders]
        seen = [one.seen_at - at + 1 for one in played if one.seen_at is not None]
        *errors, width_before, width_after = map(statistics.fmean, zip(*(one.line(at) for one in played), strict=True))
        columns = (
            f"{factor:g}",
            f"{statistics.median(seen):g} runs" if seen else "-",
            f"{len(seen)} of {len(played)}" if factor != 1 else "-",
            f"{sum(one.false for one in played)}",
            *(f"{error:.0%}" for error in errors),
            f"{width_before:.2f}, {width_after:.2f}",
            f"{sum(one.num_missed for one in played) / sum(len(one.scores) for one in played):.0%}",
        )
        rows.append(columns)
    headings = ["times", "noticed after", "noticed in", "false alarms", "error before", "until noticed", "of the ten runs after",
                "90% interval, before and after: a factor of", "outside of it, all runs"]  # fmt: skip
    show("shifts", headings, rows, record=arguments.record)


if __name__ == "__main__":
    main()
