"""``perfguard gpus``: the catalog, for people or as JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from perfguard.devices import Device, catalog
from perfguard.devices.catalog import aliases

if TYPE_CHECKING:
    from rich.table import Table

_RATES = ("fp32", "tf32", "fp16")
_FULL_WIDTH = 240
_LEAST_FULL_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard gpus`` takes."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def show_gpus(arguments: argparse.Namespace) -> None:
    """Print every GPU of the catalog to stdout: a table, or ``{"devices": [...], "aliases": {...}}`` in SI units."""
    if arguments.json:
        print(json.dumps({"devices": [asdict(device) for device in catalog().values()], "aliases": dict(aliases())}, indent=2))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a pipe or a file has no width; rich would cut the text at 80 columns
        console = Console(width=_FULL_WIDTH)
    console.print(_table(full=console.width >= _LEAST_FULL_WIDTH))
    console.print("Short names: " + ", ".join(f"{alias} = {id_}" for alias, id_ in aliases().items()), highlight=False)
    console.print("Rates are dense. --json has all figures and their sources.", highlight=False)


def _table(*, full: bool) -> Table:
    """The catalog; without names and sources where the terminal is too narrow for them (``full=False``)."""
    from rich.table import Table

    headings = ("memory\nGiB", "bandwidth\nGB/s", *(f"{rate}\nTFLOP/s" for rate in _RATES), "SMs")
    table = Table()
    table.add_column("id", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    if full:
        table.add_column("name")
        table.add_column("source")
    for device in catalog().values():
        table.add_row(device.id, *_figures(device), *((device.name, device.source.partition(";")[0]) if full else ()))
    return table


def _figures(device: Device) -> list[str]:
    rates = [f"{device.peak_flops[rate] / 1e12:.4g}" if rate in device.peak_flops else "-" for rate in _RATES]
    return [f"{device.memory_bytes / 2**30:.1f}", f"{device.bandwidth_bytes_per_s / 1e9:.0f}", *rates, str(device.num_sms)]
