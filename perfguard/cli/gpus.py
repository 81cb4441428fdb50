"""``perfguard gpus``: the catalog."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from perfguard.devices import catalog
from perfguard.devices.catalog import aliases

if TYPE_CHECKING:
    from rich.console import Console


def add_gpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard gpus`` takes."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def gpus(arguments: argparse.Namespace) -> None:
    """Print every GPU of the catalog to stdout: a table, or ``{"devices": [...], "aliases": {...}}`` in SI units."""
    if arguments.json:
        print(json.dumps({"devices": [asdict(device) for device in catalog().values()], "aliases": dict(aliases())}, indent=2))
        return
    from rich.table import Table

    console = wide_console(240)
    full = console.width >= 120  # else there is no room for names and sources
    rates = ("fp32", "tf32", "fp16")
    table = Table()
    for heading in ("id", "memory\nGiB", "bandwidth\nGB/s", *(f"{rate}\nTFLOP/s" for rate in rates), "SMs"):
        table.add_column(heading, justify="left" if heading == "id" else "right", no_wrap=True)
    for heading in ("name", "source") if full else ():
        table.add_column(heading)
    for device in catalog().values():
        peaks = [f"{device.peak_flops[rate] / 1e12:.4g}" if rate in device.peak_flops else "-" for rate in rates]
        figures = [f"{device.memory_bytes / 2**30:.1f}", f"{device.bandwidth_bytes_per_s / 1e9:.0f}", *peaks, str(device.num_sms)]
        table.add_row(device.id, *figures, *((device.name, device.source.partition(";")[0]) if full else ()))
    console.print(table)
    console.print("Short names: " + ", ".join(f"{alias} = {id_}" for alias, id_ in aliases().items()), highlight=False)
    console.print("Rates are dense. --json has all figures and their sources.", highlight=False)


def wide_console(width: int) -> Console:
    """Return the terminal, or a console of ``width`` columns: a pipe has no width, and rich would cut the text at 80."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)
