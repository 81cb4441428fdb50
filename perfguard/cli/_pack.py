"""``perfguard pack``: a schedule for a queue of jobs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from perfguard.exceptions import ConfigurationError
from perfguard.packing import Schedule, draw_schedule, parse_slots, plan, read_jobs
from perfguard.quantities import format_bytes, format_seconds


def show_schedule(arguments: argparse.Namespace) -> None:
    """Print the schedule for people or as JSON, and draw it where asked."""
    slots = parse_slots(arguments.gpus)
    schedule = plan(
        read_jobs(arguments.jobs, (slot.kind for slot in slots)),
        slots,
        method=arguments.method,
        at_once=arguments.at_once,
        slowdown=arguments.slowdown,
        seed=arguments.seed,
    )
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
