"""``perfguard collect``: rows of one's own, measured on the device at hand."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfguard.exceptions import ConfigurationError
from perfguard.quantities import parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from perfguard_research.collect import CollectReport, Space

_STATUSES = ("ok", "oom", "timeout", "failed")
_MOST_REASONS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard collect`` takes."""
    parser.add_argument("--out", required=True, type=Path, metavar="ROWS.csv.gz", help="the table to write")
    parser.add_argument("--gpu", default="auto", help='"auto", the name of the GPU of this machine, or "cpu" (default: auto)')
    parser.add_argument("--space", default="all", metavar="mlp,ops", help="of vision, text, mlp, rnn, nas, ops (default: all)")
    parser.add_argument("--minutes", type=float, metavar="M", help="start no new configuration after M minutes")
    parser.add_argument("--rows", type=int, metavar="N", help="stop after N rows of this session")
    parser.add_argument("--resume", action="store_true", help="continue an existing table")
    parser.add_argument(
        "--memory-limit", metavar="16GiB", help="memory limit of a run (default: all memory of a card, 256MiB on a CPU)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the order of the configurations (default: 0)")


def collect_rows(arguments: argparse.Namespace) -> None:
    """Measure, write and sum up.

    Raises:
        PerfGuardError: for arguments or a device that cannot be right.
    """
    for name in ("minutes", "rows"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise ConfigurationError(f"--{name} must be positive, but is {value!r}.")
    limit = None if arguments.memory_limit is None else parse_bytes(arguments.memory_limit, what="--memory-limit")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from perfguard_research.collect import collect, collecting_device

    console = Console(stderr=True)
    columns = TextColumn("{task.completed} rows"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=arguments.rows)
        summary = collect(
            arguments.out,
            device=collecting_device(arguments.gpu),
            spaces=spaces_of(arguments.space),
            minutes=arguments.minutes,
            max_rows=arguments.rows,
            resume=arguments.resume,
            memory_limit=limit,
            seed=arguments.seed,
            on_row=lambda row: progress.update(task, advance=1, description=f"{row['space']} {row['model']}: {row['status']}"),
            on_note=lambda text: console.print(text, markup=False, highlight=False),
        )
    try:
        show_summary(summary, arguments.out, console)
    except OSError:
        pass  # the terminal is gone, the rows are not


def spaces_of(text: str) -> list[Space]:
    """The spaces that ``text`` names, in their own order.

    Raises:
        ConfigurationError: for a name that is none.
    """
    from perfguard_research.collect import SPACES

    names = set(SPACES) if text == "all" else {name.strip() for name in text.split(",")}
    if unknown := sorted(names - set(SPACES)):
        raise ConfigurationError(f"--space takes {', '.join(SPACES)}, with commas between them, not {', '.join(unknown)}.")
    return [space for space in SPACES if space in names]


def show_summary(summary: CollectReport, out: Path, console: Console) -> None:
    """Print what a session brought."""
    from rich.table import Table

    pace = summary.num_rows / max(summary.seconds, 1e-9)
    table = Table(title=f"{summary.num_rows} rows in {summary.seconds:.0f} s, {pace:.2f} a second")
    for heading in ("space", *_STATUSES):
        table.add_column(heading, justify="left" if heading == "space" else "right")
    for space in sorted({space for space, _ in summary.rows}):
        table.add_row(space, *(str(summary.rows[space, status]) for status in _STATUSES))
    console.print(table)
    _print_common(console, "were left out", summary.left_out)
    _print_common(console, "are marked", summary.trouble)
    earlier = f", beside {summary.earlier_rows} of earlier sittings" if summary.earlier_rows else ""
    text = f"Ended because {summary.ended_by}; {summary.processes} processes. The rows are in {out}{earlier}."
    console.print(text, markup=False, highlight=False)


def _print_common(console: Console, what: str, reasons: Any) -> None:
    if reasons:
        console.print(f"{reasons.total()} {what}:", markup=False, highlight=False)
        for reason, count in reasons.most_common(_MOST_REASONS):
            console.print(f"  {count} x {reason}", markup=False, highlight=False)
