"""`perfguard pack`: a schedule for a queue of jobs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from perfguard.exceptions import ConfigurationError
from perfguard.quantities import format_bytes, format_seconds
from perfguard_packing import DEFAULT_SLOWDOWN, Method, Schedule, draw_schedule, parse_slots, plan, read_jobs


def pack(words: Sequence[str]) -> None:
    """Plan the jobs of a table, print the schedule as text or JSON, and draw it on request.

    Raises:
        ConfigurationError: for a table or a word that cannot be right.
    """
    parser = argparse.ArgumentParser(prog="perfguard pack", description="Plan a queue of jobs on several devices.")
    parser.add_argument("jobs", metavar="JOBS.csv", help="columns name, memory (12GiB) and time_<gpu> (90s)")
    parser.add_argument("--gpus", required=True, metavar="a100:2,t4:4", help="names from `perfguard gpus`, and how many of each")
    parser.add_argument("--method", choices=get_args(Method), default="best", help="default: best")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="jobs that may share a device (default: 1)")
    parser.add_argument("--slowdown", type=float, default=DEFAULT_SLOWDOWN, help="slowdown of jobs that share a device, 0 to 1")
    parser.add_argument("--plot", metavar="FILE.png", help="draw a Gantt chart")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(words)
    slots = parse_slots(arguments.gpus)
    jobs = read_jobs(arguments.jobs, (slot.kind for slot in slots))
    schedule = plan(jobs, slots, method=arguments.method, at_once=arguments.at_once, slowdown=arguments.slowdown)
    if arguments.plot:
        try:
            Path(arguments.plot).parent.mkdir(parents=True, exist_ok=True)
            draw_schedule(schedule).savefig(arguments.plot, dpi=150)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"The picture cannot be written to {arguments.plot!r}: {error}") from error
    if arguments.json:
        print(json.dumps(_as_data(schedule), indent=2))
        return
    console = Console()
    console.print(_table(schedule))
    proof = ", proven to be the shortest" if schedule.is_optimal else ""
    console.print(f"{format_seconds(schedule.makespan_s)} in all ({schedule.method}{proof})", highlight=False)


def _as_data(schedule: Schedule) -> dict[str, object]:
    rows = [
        {"job": one.job.name, "device": one.slot.name, "start_s": one.start_s, "end_s": one.end_s} for one in schedule.placements
    ]
    return {
        "makespan_s": schedule.makespan_s,
        "method": schedule.method,
        "is_optimal": schedule.is_optimal,
        "placements": rows,
    }


def _table(schedule: Schedule) -> Table:
    table = Table()
    for heading in ("device", "job"):
        table.add_column(heading, no_wrap=True)
    for heading in ("start", "end", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in sorted(schedule.placements, key=lambda one: (one.slot.name, one.start_s)):
        start, end = format_seconds(one.start_s), format_seconds(one.end_s)
        table.add_row(one.slot.name, one.job.name, start, end, format_bytes(one.job.memory_bytes))
    return table
