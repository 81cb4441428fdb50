"""DNNAbacus's setting: 20 jobs on two machines, over many random queues.

    python benchmarks/packing.py [--queues 100] [--figure schedule.png]

The paper's times are not published, only its result: the genetic algorithm reaches the optimum (783.2 s) in 20 generations,
random planning takes 990.1 s on average. Here a queue is 20 jobs of 20 to 180 s on the first machine (uniform) that take 1 to
2.2 times as long on the second (the paper has an RTX 3090 and an RTX 2080); one job in ten fits the first machine only. Each
method is compared with the optimum that CP-SAT proves.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from rich.console import Console
from rich.table import Table

from perfguard.packing import Job, Schedule, Slot, _plan_by_evolution, _Problem, draw_schedule, plan

GIB = 2**30
SLOTS = (Slot("rtx3090-0", "rtx3090", 24 * GIB), Slot("rtx2080-0", "rtx2080", 8 * GIB))


def queue(seed: int, num_jobs: int = 20) -> list[Job]:
    """A queue of jobs."""
    generator = random.Random(seed)
    jobs = []
    for number in range(num_jobs):
        seconds = generator.uniform(20, 180)
        memory_bytes = int(generator.uniform(9, 20) * GIB) if generator.random() < 0.1 else int(generator.uniform(1, 7) * GIB)
        jobs.append(Job(f"job{number}", memory_bytes, {"rtx3090": seconds, "rtx2080": seconds * generator.uniform(1, 2.2)}))
    return jobs


def planned(method: str, jobs: list[Job], seed: int) -> Schedule:
    """The plan of ``method``; "genetic, as in the paper" is without improvement by moves and swaps."""
    if method == "genetic, as in the paper":
        return _plan_by_evolution(_Problem.of(jobs, SLOTS, at_once=1, slowdown=0.0), seed, improve=False)
    return plan(jobs, SLOTS, method=method, seed=seed)  # type: ignore[arg-type]


def main() -> None:
    """Print the table, draw the first queue's plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queues", type=int, default=100)
    parser.add_argument("--figure", metavar="FILE.png")
    arguments = parser.parse_args()
    queues = [queue(seed) for seed in range(arguments.queues)]
    optima = [plan(jobs, SLOTS, method="exact").makespan_s for jobs in queues]
    table = Table(title=f"{len(queues)} queues of 20 jobs on two machines")
    for heading in ("method", "mean over the optimum", "worst", "within 0.1%", "below random", "seconds a plan"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    random_s: list[float] = []
    for method in ("random", "longest-first", "genetic, as in the paper", "genetic", "exact"):
        start = time.perf_counter()
        makespans = [planned(method, jobs, seed).makespan_s for seed, jobs in enumerate(queues)]
        each_s = (time.perf_counter() - start) / len(queues)
        random_s = random_s or makespans
        over = [makespan / optimum - 1 for makespan, optimum in zip(makespans, optima, strict=True)]
        below = statistics.mean(1 - makespan / other for makespan, other in zip(makespans, random_s, strict=True))
        within = statistics.mean(excess <= 1e-3 for excess in over)
        table.add_row(
            method, f"{statistics.mean(over):.2%}", f"{max(over):.2%}", f"{within:.0%}", f"{below:.1%}", f"{each_s:.3f}"
        )
    Console(width=120).print(table)
    if arguments.figure:
        draw_schedule(plan(queues[0], SLOTS)).savefig(arguments.figure, dpi=150)


if __name__ == "__main__":
    main()
