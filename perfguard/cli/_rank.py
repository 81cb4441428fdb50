"""``perfguard rank``: one network on many GPUs, the fastest first, with what it costs there."""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perfguard.cli._subject import Subject, check_subject, subject_of
from perfguard.cli._subject import add_arguments as add_subject_arguments
from perfguard.devices import Device, catalog, resolve_device
from perfguard.exceptions import ConfigurationError, TableError, UnknownDeviceError
from perfguard.predictor import Prediction, load_predictor
from perfguard.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from perfguard.graph import OpGraph
    from perfguard.graph._target import Target

_COLUMNS = ("gpu", "price_per_hour")
_LARGEST_TABLE_BYTES = 2**20
_SECONDS_PER_HOUR = 3600
_LIKELY_TO_FIT = 0.95
_WIDTH = 140


class Ranked(NamedTuple):
    """A network on one GPU."""

    device: Device
    prediction: Prediction
    samples: int
    """Samples in one step or batch; 1 if the batch size is not known."""
    price_per_hour: float | None

    @property
    def fits(self) -> bool:
        """Whether it fits with a chance of at least 95%."""
        return self.prediction.p_oom(self.device.memory_bytes) <= 1 - _LIKELY_TO_FIT

    @property
    def throughput_per_s(self) -> float:
        return self.samples / self.prediction.step_time.median

    @property
    def throughput_per_price(self) -> float | None:
        """Samples for one unit of the price table's currency."""
        return None if self.price_per_hour is None else _SECONDS_PER_HOUR * self.throughput_per_s / self.price_per_hour


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard rank`` takes."""
    add_subject_arguments(parser)
    parser.add_argument("--gpus", default="all", metavar="all|a100,t4", help="names from `perfguard gpus` (default: all)")
    parser.add_argument("--price-table", metavar="PRICES.csv", help="columns gpu and price_per_hour, in any currency")
    parser.add_argument("--json", action="store_true", help="data on standard output")


def show_ranking(arguments: argparse.Namespace) -> None:
    """Predict on every GPU and print those that fit first, the fastest first.

    Raises:
        PerfGuardError: for a file, a GPU or a price table that cannot be right.
    """
    check_subject(arguments)
    prices = None if arguments.price_table is None else read_prices(Path(arguments.price_table))
    devices = _devices(arguments.gpus, prices)
    rows = rank(subject_of(arguments), devices, samples=arguments.batch_size or 1, prices=prices or {})
    if arguments.json:
        print(json.dumps([_as_json(row) for row in rows], indent=2))
        return
    _print(rows, has_batch=arguments.batch_size is not None)
    unpriced = [row.device.id for row in rows if prices is not None and row.price_per_hour is None]
    if unpriced:
        print(f"no price in {arguments.price_table}: {', '.join(unpriced)}", file=sys.stderr)


def rank(subject: Subject, devices: Sequence[Device], *, samples: int, prices: Mapping[str, float]) -> list[Ranked]:
    """``subject`` on each of ``devices``: those that fit first, then by time."""
    from perfguard.graph._target import target_of

    predictor = load_predictor()
    graphs: dict[Target, OpGraph] = {}
    rows = []
    for device in devices:
        target = target_of(device)
        if target not in graphs:
            graphs[target] = subject.graph_on(device)
        prediction = predictor.predict(graphs[target], device, steps=subject.steps)
        rows.append(Ranked(device, prediction, samples, prices.get(device.id)))
    return sorted(rows, key=lambda row: (not row.fits, row.prediction.step_time.median))


def _devices(names: str, prices: Mapping[str, float] | None) -> list[Device]:
    if names.strip().lower() == "all":
        return list(catalog().values())
    devices = [resolve_device(name.strip()) for name in names.split(",") if name.strip()]
    if not devices:
        raise ConfigurationError("--gpus must be 'all' or names with commas between them, for instance a100,t4.")
    missing = [device.id for device in devices if prices is not None and device.id not in prices]
    if missing:
        raise TableError(f"The price table has no row for {', '.join(missing)}. Add one, or leave the GPU out of --gpus.")
    return list({device.id: device for device in devices}.values())


def read_prices(path: Path) -> dict[str, float]:
    """Return prices per hour by catalog id, from a CSV with the columns ``gpu`` and ``price_per_hour``.

    ``gpu`` is any name that the catalog knows. Other columns and empty lines are ignored.

    Raises:
        TableError: For a missing file or column. For a row with an unknown GPU, with a price that is no positive number, or with
            a GPU that has a price already. The message names the line.
    """
    try:
        if path.stat().st_size > _LARGEST_TABLE_BYTES:
            raise TableError(f"{path} is larger than 1 MiB; a price table has a line for each GPU.")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"The price table {path} cannot be read: {error}") from error
    prices: dict[str, float] = {}
    for line, gpu, price in _price_rows(path, text):
        where = f"{path}, line {line}"
        try:
            device = resolve_device(gpu)
        except UnknownDeviceError as error:
            raise TableError(f"{where}: {error}") from None
        if device.id in prices:
            raise TableError(f"{where}: {device.id} has a price already. Keep one row for each GPU.")
        prices[device.id] = _price(price, where)
    if not prices:
        raise TableError(f"{path} has no rows. It needs lines such as a100-pcie-40gb,2.40 below the header {','.join(_COLUMNS)}.")
    return prices


def _price_rows(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    try:
        reader = csv.DictReader(text.splitlines(), strict=True, skipinitialspace=True)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise TableError(f"{path} has no column {missing[0]!r}. Its first line must name the columns {', '.join(_COLUMNS)}.")
        for row in reader:
            yield reader.line_num, (row["gpu"] or "").strip(), (row["price_per_hour"] or "").strip()
    except csv.Error as error:
        raise TableError(f"{path} is no CSV table: {error}") from error


def _price(text: str, where: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not (math.isfinite(price) and price > 0):
        raise TableError(f"{where}: price_per_hour must be a positive number, for instance 2.40, but got {text!r}.")
    return price


def _as_json(row: Ranked) -> dict[str, Any]:
    time_low, time_high = row.prediction.step_time.interval()
    return {
        "gpu": row.device.id,
        "fits": row.fits,
        "p_oom": row.prediction.p_oom(row.device.memory_bytes),
        "step_time_s": {"median": row.prediction.step_time.median, "low": time_low, "high": time_high},
        "peak_memory_bytes": row.prediction.peak_memory.median,
        "throughput_per_s": row.throughput_per_s,
        "price_per_hour": row.price_per_hour,
        "throughput_per_price": row.throughput_per_price,
        "trained_on_device": row.prediction.trained_on_device,
    }


def _print(rows: Sequence[Ranked], *, has_batch: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    priced = any(row.price_per_hour is not None for row in rows)
    unit = "samples" if has_batch else "batches"
    table = Table(title="fastest first; those that may not fit last")
    for heading in (
        "gpu",
        "time",
        "90%",
        f"{unit}/s",
        "peak memory",
        "fits",
        *((f"{unit} per unit of price",) if priced else ()),
    ):
        table.add_column(heading, justify="left" if heading == "gpu" else "right", no_wrap=True)
    for row in rows:
        low, high = map(format_seconds, row.prediction.step_time.interval())
        value = row.throughput_per_price
        table.add_row(
            row.device.id + ("" if row.prediction.trained_on_device else " *"),
            format_seconds(row.prediction.step_time.median),
            f"{low} to {high}",
            f"{row.throughput_per_s:,.0f}",
            format_bytes(row.prediction.peak_memory.median),
            "yes" if row.fits else f"no ({row.prediction.p_oom(row.device.memory_bytes):.0%} out of memory)",
            *(("-" if value is None else f"{value:,.0f}",) if priced else ()),
        )
    console.print(table)
    fitting = [row for row in rows if row.fits]
    if fitting:
        console.print(f"fastest: {fitting[0].device.id}", highlight=False)
        cheapest = max(
            (row for row in fitting if row.price_per_hour), key=lambda row: row.throughput_per_price or 0, default=None
        )
        if cheapest is not None:
            console.print(f"cheapest per {unit[: -1 if has_batch else -2]}: {cheapest.device.id}", highlight=False)
    if any(not row.prediction.trained_on_device for row in rows):
        console.print("* never trained on: physics with wider intervals", highlight=False)
