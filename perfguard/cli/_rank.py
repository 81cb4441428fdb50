"""``perfguard rank``: one network on many GPUs, the fastest or the cheapest first."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from perfguard.cli._budget import estimate_as_json
from perfguard.cli._subject import Subject, check_subject, subject_of
from perfguard.cli._subject import add_arguments as add_subject_arguments
from perfguard.devices import Device, Price, catalog, price_of, resolve_device
from perfguard.devices._prices import Provider, own_prices
from perfguard.exceptions import ConfigurationError, TableError
from perfguard.predictor import SECONDS_PER_HOUR, Estimate, Prediction, load_predictor
from perfguard.quantities import format_bytes, format_dollars, format_seconds

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
    price: Price | None

    @property
    def fits(self) -> bool:
        """Whether it fits with a chance of at least 95%."""
        return self.prediction.p_oom(self.device.memory_bytes) <= 1 - _LIKELY_TO_FIT

    @property
    def throughput_per_s(self) -> float:
        return self.samples / self.prediction.step_time.median

    @property
    def throughput_per_price(self) -> float | None:
        """Samples for one dollar, or one unit of the price table's currency."""
        return None if self.price is None else SECONDS_PER_HOUR * self.throughput_per_s / self.price.per_hour

    @property
    def cost(self) -> Estimate | None:
        """Cost of the whole trial. None: the price or the number of steps is not known."""
        return None if self.price is None else self.prediction.cost(self.price.per_hour)

    @property
    def rank_by_cost(self) -> float:
        """A number that grows with the cost of the trial, or of a step where the number of steps is not known."""
        if self.price is None:
            return math.inf
        return (self.prediction.total_time or self.prediction.step_time).median * self.price.per_hour


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard rank`` takes."""
    add_subject_arguments(parser)
    parser.add_argument("--gpus", default="all", metavar="all|a100,t4", help="names from `perfguard gpus` (default: all)")
    parser.add_argument("--by", choices=("time", "cost"), default="time", help="fastest or cheapest first (default: time)")
    parser.add_argument(
        "--price-table",
        metavar="PRICES.csv",
        help="columns gpu and price_per_hour, in any currency (default: PERFGUARD_PRICES, else list prices)",
    )
    parser.add_argument(
        "--provider", choices=get_args(Provider), help="kind of provider for list prices (default: the cheapest of all)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def show_ranking(arguments: argparse.Namespace) -> None:
    """Predict on every GPU and print those that fit first, then by time or by cost.

    Raises:
        PerfGuardError: for a file, a GPU or a price table that cannot be right.
    """
    check_subject(arguments)
    own = own_prices(arguments.price_table)
    if own is not None and arguments.provider is not None:
        raise ConfigurationError("--provider picks list prices, and you have a table of your own. Leave one of the two out.")
    devices = _devices(arguments.gpus, own)
    prices = {device.id: price_of(device, own, provider=arguments.provider) for device in devices}
    rows = rank(subject_of(arguments), devices, samples=arguments.batch_size or 1, prices=prices)
    if arguments.by == "cost":
        if not any(prices.values()):
            raise ConfigurationError(
                "No price of these GPUs is known. Give --price-table with the columns gpu and price_per_hour."
            )
        rows.sort(key=lambda row: (not row.fits, row.rank_by_cost))
    if arguments.json:
        print(json.dumps([_as_json(row) for row in rows], indent=2))
        return
    _print(rows, by=arguments.by, has_batch=arguments.batch_size is not None)
    unpriced = [row.device.id for row in rows if row.price is None]
    if unpriced and own is not None:
        print(f"no price in your table: {', '.join(unpriced)}", file=sys.stderr)


def rank(subject: Subject, devices: Sequence[Device], *, samples: int, prices: Mapping[str, Price | None]) -> list[Ranked]:
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


def _as_json(row: Ranked) -> dict[str, Any]:
    return {
        "gpu": row.device.id,
        "fits": row.fits,
        "p_oom": row.prediction.p_oom(row.device.memory_bytes),
        "step_time_s": estimate_as_json(row.prediction.step_time),
        "peak_memory_bytes": row.prediction.peak_memory.median,
        "throughput_per_s": row.throughput_per_s,
        "price_per_hour": row.price and row.price.per_hour,
        "price_source": row.price and row.price.source,
        "cost": estimate_as_json(row.cost),
        "throughput_per_price": row.throughput_per_price,
        "trained_on_device": row.prediction.trained_on_device,
    }


def _print(rows: Sequence[Ranked], *, by: str, has_batch: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    priced, costed = any(row.price for row in rows), any(row.cost for row in rows)
    unit = "samples" if has_batch else "batches"
    table = Table(title=f"{'fastest' if by == 'time' else 'cheapest'} first; those that may not fit last")
    for heading in (
        "gpu",
        "time",
        "90%",
        f"{unit}/s",
        "peak memory",
        "fits",
        *(("trial cost (90%)",) if costed else (f"{unit} per unit of price",) if priced else ()),
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
            *((_in_words(row.cost),) if costed else ("-" if value is None else f"{value:,.0f}",) if priced else ()),
        )
    console.print(table)
    fitting = [row for row in rows if row.fits]
    if fitting:
        fastest = min(fitting, key=lambda row: row.prediction.step_time.median)
        console.print(f"fastest: {fastest.device.id}", highlight=False)
        cheapest = min((row for row in fitting if row.price), key=lambda row: row.rank_by_cost, default=None)
        if cheapest is not None and cheapest.price is not None:
            unit_of_cost = "trial" if costed else unit[: -1 if has_batch else -2]
            console.print(f"cheapest per {unit_of_cost}: {cheapest.device.id} ({cheapest.price})", highlight=False)
    if any(not row.prediction.trained_on_device for row in rows):
        console.print("* not trained on such steps on this GPU: read the interval and not the time", highlight=False)


def _in_words(cost: Estimate | None) -> str:
    if cost is None:
        return "-"
    low, high = map(format_dollars, cost.interval())
    return f"{format_dollars(cost.median)} ({low} to {high})"
