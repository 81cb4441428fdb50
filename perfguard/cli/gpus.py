"""``perfguard gpus`` and ``perfguard rank``: the catalog, and one network on many of its GPUs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from perfguard.cli.predict import estimate_as_json
from perfguard.cli.subject import add_subject_arguments, check_subject, in_network, subject_of
from perfguard.devices import Device, catalog, resolve_device
from perfguard.devices.catalog import aliases
from perfguard.exceptions import ConfigurationError
from perfguard.predictor import Prediction, load_predictor
from perfguard.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from perfguard.cli.subject import Work
    from perfguard.graph.kernels import Target


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


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard rank`` takes."""
    add_subject_arguments(parser)
    parser.add_argument("--gpus", default="all", metavar="all|a100,t4", help="names from `perfguard gpus` (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def rank(arguments: argparse.Namespace) -> None:
    """Predict on every GPU, and print those that fit with a chance of 95% first, then by time."""
    check_subject(arguments)
    from perfguard.graph.kernels import target_of

    devices = [in_network(device, arguments) for device in _devices(arguments.gpus)]
    work_on, predictor = subject_of(arguments), load_predictor()
    works: dict[Target, Work] = {}
    ranked: list[tuple[Device, Prediction]] = []
    for device in devices:
        target = target_of(device)  # cards of one kind run the same operators
        if target not in works:
            works[target] = work_on(device)
        ranked.append((device, works[target].predict(predictor, device)[0]))
    rows = [_row(device, prediction, arguments.batch_size or 1) for device, prediction in ranked]
    rows.sort(key=lambda row: (not row["fits"], row["step_time_s"]["median"]))
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        _print(rows, "batches" if arguments.batch_size is None else "samples")


def _devices(names: str) -> list[Device]:
    if names.strip().lower() == "all":
        return list(catalog().values())
    devices = [resolve_device(name.strip()) for name in names.split(",") if name.strip()]
    if not devices:
        raise ConfigurationError("--gpus must be 'all' or names with commas between them, for instance a100,t4.")
    return list({device.id: device for device in devices}.values())


def _row(device: Device, prediction: Prediction, samples: int) -> dict[str, Any]:
    p_oom = prediction.p_oom(device.memory_bytes)
    return {
        "gpu": device.id,
        "fits": p_oom <= 0.05,
        "p_oom": p_oom,
        "step_time_s": estimate_as_json(prediction.step_time),
        "total_time_s": estimate_as_json(prediction.total_time),
        "peak_memory_bytes": prediction.peak_memory.median,
        "throughput_per_s": samples / prediction.step_time.median,
        "trained_on_device": prediction.trained_on_device,
    }


def _print(rows: list[dict[str, Any]], unit: str) -> None:
    from rich.table import Table

    console = wide_console(140)
    table = Table(title="fastest first; those that may not fit last")
    for heading in ("gpu", "time", "90%", f"{unit}/s", "peak memory", "fits"):
        table.add_column(heading, justify="left" if heading == "gpu" else "right", no_wrap=True)
    for row in rows:
        time = {name: format_seconds(seconds) for name, seconds in row["step_time_s"].items()}
        table.add_row(
            row["gpu"] + ("" if row["trained_on_device"] else " *"),
            time["median"],
            f"{time['low']} to {time['high']}",
            f"{row['throughput_per_s']:,.0f}",
            format_bytes(row["peak_memory_bytes"]),
            "yes" if row["fits"] else f"no ({row['p_oom']:.0%} out of memory)",
        )
    console.print(table)
    if rows[0]["fits"]:
        console.print(f"fastest: {rows[0]['gpu']}", highlight=False)
    if not all(row["trained_on_device"] for row in rows):
        console.print("* not trained on such steps on this GPU: read the interval and not the time", highlight=False)
