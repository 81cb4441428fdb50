"""``perfguard rank``: one network on many GPUs, the fastest first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from perfguard.cli._budget import estimate_as_json
from perfguard.cli._subject import Subject, check_subject, subject_of
from perfguard.cli._subject import add_arguments as add_subject_arguments
from perfguard.devices import Device, catalog, resolve_device
from perfguard.exceptions import ConfigurationError
from perfguard.predictor import Prediction, load_predictor
from perfguard.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from perfguard.graph import OpGraph
    from perfguard.graph.kernels import Target

_LIKELY_TO_FIT = 0.95
_WIDTH = 140


class Ranked(NamedTuple):
    """A network on one GPU."""

    device: Device
    prediction: Prediction
    samples: int
    """Samples in one step or batch; 1 if the batch size is not known."""

    @property
    def fits(self) -> bool:
        """Whether it fits with a chance of at least 95%."""
        return self.prediction.p_oom(self.device.memory_bytes) <= 1 - _LIKELY_TO_FIT

    @property
    def throughput_per_s(self) -> float:
        return self.samples / self.prediction.step_time.median


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard rank`` takes."""
    add_subject_arguments(parser)
    parser.add_argument("--gpus", default="all", metavar="all|a100,t4", help="names from `perfguard gpus` (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def show_ranking(arguments: argparse.Namespace) -> None:
    """Predict on every GPU and print those that fit first, then by time.

    Raises:
        PerfGuardError: for a file or a GPU that cannot be right.
    """
    check_subject(arguments)
    devices = _devices(arguments.gpus)
    rows = rank(subject_of(arguments), devices, samples=arguments.batch_size or 1)
    if arguments.json:
        print(json.dumps([_as_json(row) for row in rows], indent=2))
        return
    _print(rows, has_batch=arguments.batch_size is not None)


def rank(subject: Subject, devices: Sequence[Device], *, samples: int) -> list[Ranked]:
    """``subject`` on each of ``devices``: those that fit first, then by time."""
    from perfguard.graph.kernels import target_of

    predictor = load_predictor()
    graphs: dict[Target, OpGraph] = {}
    rows = []
    for device in devices:
        target = target_of(device)
        if target not in graphs:
            graphs[target] = subject.graph_on(device)
        prediction = predictor.predict(graphs[target], device, steps=subject.steps)
        rows.append(Ranked(device, prediction, samples))
    return sorted(rows, key=lambda row: (not row.fits, row.prediction.step_time.median))


def _devices(names: str) -> list[Device]:
    if names.strip().lower() == "all":
        return list(catalog().values())
    devices = [resolve_device(name.strip()) for name in names.split(",") if name.strip()]
    if not devices:
        raise ConfigurationError("--gpus must be 'all' or names with commas between them, for instance a100,t4.")
    return list({device.id: device for device in devices}.values())


def _as_json(row: Ranked) -> dict[str, Any]:
    return {
        "gpu": row.device.id,
        "fits": row.fits,
        "p_oom": row.prediction.p_oom(row.device.memory_bytes),
        "step_time_s": estimate_as_json(row.prediction.step_time),
        "peak_memory_bytes": row.prediction.peak_memory.median,
        "throughput_per_s": row.throughput_per_s,
        "trained_on_device": row.prediction.trained_on_device,
    }


def _print(rows: Sequence[Ranked], *, has_batch: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    unit = "samples" if has_batch else "batches"
    table = Table(title="fastest first; those that may not fit last")
    for heading in (
        "gpu",
        "time",
        "90%",
        f"{unit}/s",
        "peak memory",
        "fits",
    ):
        table.add_column(heading, justify="left" if heading == "gpu" else "right", no_wrap=True)
    for row in rows:
        low, high = map(format_seconds, row.prediction.step_time.interval())
        table.add_row(
            row.device.id + ("" if row.prediction.trained_on_device else " *"),
            format_seconds(row.prediction.step_time.median),
            f"{low} to {high}",
            f"{row.throughput_per_s:,.0f}",
            format_bytes(row.prediction.peak_memory.median),
            "yes" if row.fits else f"no ({row.prediction.p_oom(row.device.memory_bytes):.0%} out of memory)",
        )
    console.print(table)
    fitting = [row for row in rows if row.fits]
    if fitting:
        fastest = min(fitting, key=lambda row: row.prediction.step_time.median)
        console.print(f"fastest: {fastest.device.id}", highlight=False)
    if any(not row.prediction.trained_on_device for row in rows):
        console.print("* not trained on such steps on this GPU: read the interval and not the time", highlight=False)
