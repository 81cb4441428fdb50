"""Architecture search under a latency limit: how many candidates a second, and how many are judged right.

    python benchmarks/nas.py                      # on a quiet machine
    python benchmarks/nas.py --clock cpu          # on a busy one: processor time of one thread instead of wall time

Candidates are cells in the manner of NAS-Bench-201 (`examples/nas_space.py`) at 32 x 32 pixels. Speed: from the cell to the
verdict on this machine's CPU, for new cells, for known ones, and for cells of another width; beside it the plain trace. Accuracy:
random cells of random widths are measured; 30 of them are told to the constraint, whose limit is the median of all; the others
are judged.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from _record import parser_of, show
from scipy.stats import spearmanr
from torch import nn

from perfguard import Workload, trace
from perfguard.nas import LatencyConstraint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from nas_space import Cell, network, random_cell

SHAPE = (8, 3, 32, 32)
WIDTHS = (8, 12, 16, 20, 24, 32)
DEPTH = 1
WARMUP, RUNS = 2, 7
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}

Candidate = tuple[Cell, int]
"""A cell and the width of its first stage."""


def described(candidate: Candidate, depth: int) -> nn.Module:
    """The network without memory."""
    with torch.device("meta"):
        return network(candidate[0], width=candidate[1], depth=depth)


def rate(call: Callable[[Any], Any], values: Sequence[Any], clock: Callable[[], float]) -> float:
    """Calls a second."""
    start = clock()
    for value in values:
        call(value)
    return len(values) / (clock() - start)


def latency_s(candidate: Candidate, clock: Callable[[], float]) -> float:
    """Median seconds of one batch."""
    model = network(candidate[0], width=candidate[1], depth=DEPTH).eval()
    batch = torch.randn(SHAPE)
    times = []
    with torch.inference_mode():
        for index in range(WARMUP + RUNS):
            start = clock()
            model(batch)
            if index >= WARMUP:
                times.append(clock() - start)
    return statistics.median(times)


def speeds(cells: Sequence[Cell], clock: Callable[[], float]) -> dict[str, float]:
    """Candidates a second, networks of NAS-Bench-201's own size (17 blocks)."""
    constraint = LatencyConstraint("cpu", max_latency_ms=100, inputs=SHAPE)
    first, *others = [(cell, 16) for cell in cells]

    def verdict(candidate: Candidate) -> None:
        constraint(described(candidate, 5))

    verdict(first)  # what is loaded at first use
    return {
        "new cells": rate(verdict, others, clock),
        "known cells": rate(verdict, others, clock),
        "a known cell, new widths": rate(verdict, [(others[0][0], width) for width in range(17, 17 + len(others))], clock),
        "new cells, the trace alone": rate(
            lambda candidate: trace(Workload(described(candidate, 5), SHAPE, mode="infer"), target="cpu"), others, clock
        ),
    }


def judged(measured: Sequence[tuple[Candidate, float]], told: int) -> dict[str, float]:
    """How well the rest is judged once ``told`` were told: share classified right, rank correlation, median error."""
    limit_s = statistics.median(seconds for _, seconds in measured)
    constraint = LatencyConstraint("cpu", max_latency_ms=1e3 * limit_s, inputs=SHAPE)
    for candidate, seconds in measured[:told]:
        constraint.learn(described(candidate, DEPTH), seconds)
    rest = measured[told:]
    estimates = [constraint.predict(described(candidate, DEPTH)).step_time for candidate, _ in rest]
    predicted, intervals = [one.median for one in estimates], [one.interval() for one in estimates]
    pairs = list(zip(predicted, (seconds for _, seconds in rest), strict=True))
    return {
        "classified right": statistics.mean((guess <= limit_s) == (seconds <= limit_s) for guess, seconds in pairs),
        "Spearman": float(spearmanr(predicted, [seconds for _, seconds in rest]).statistic),
        "median error": statistics.median(abs(guess / seconds - 1) for guess, seconds in pairs),
        "inside": statistics.mean(low <= seconds <= high for (low, high), (_, seconds) in zip(intervals, rest, strict=True)),
    }


def draw(number: int, rng: random.Random) -> Iterable[Candidate]:
    """Different candidates."""
    seen: set[Candidate] = set()
    while len(seen) < number:
        candidate = random_cell(rng), rng.choice(WIDTHS)
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


def main() -> None:
    """Measure both and show the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--candidates", type=int, default=200)
    parser.add_argument("--told", type=int, nargs="+", default=[0, 10, 30])
    parser.add_argument("--speed-candidates", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--measured", type=Path, help="keep the measured latencies in this file, or read them from it")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rng, clock = random.Random(arguments.seed), CLOCKS[arguments.clock]
    found = speeds([random_cell(rng) for _ in range(arguments.speed_candidates + 1)], clock)
    rows = [[what, f"{value:,.1f}"] for what, value in found.items()]
    show("nas-speed", ["candidates", f"a second of {arguments.clock} time"], rows, record=arguments.record)

    if arguments.measured is not None and arguments.measured.exists():
        measured = [((tuple(cell), width), seconds) for cell, width, seconds in json.loads(arguments.measured.read_text())]
    else:
        measured = [(candidate, latency_s(candidate, clock)) for candidate in draw(arguments.candidates, rng)]
        if arguments.measured is not None:
            arguments.measured.write_text(json.dumps([(*candidate, seconds) for candidate, seconds in measured]))
    rows = []
    for told in arguments.told:
        found = judged(measured, told)
        classified, median, inside = (f"{found[name]:.1%}" for name in ("classified right", "median error", "inside"))
        rows.append([str(told), classified, f"{found['Spearman']:.3f}", median, inside])
    columns = ["measured", "the others classified right", "Spearman", "median error of the latency", "inside the 90% interval"]
    show("nas-accuracy", columns, rows, record=arguments.record)


if __name__ == "__main__":
    main()
