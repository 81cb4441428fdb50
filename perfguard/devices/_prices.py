"""Prices of an hour on a device: the user's own, else list prices from ``prices.json``."""

from __future__ import annotations

import csv
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from perfguard.devices._detect import resolve_device
from perfguard.devices._spec import Device
from perfguard.exceptions import ConfigurationError, TableError, UnknownDeviceError
from perfguard.quantities import format_dollars

Provider = Literal["hyperscaler", "gpu-cloud"]
"""The general clouds, and the providers that rent GPUs above all."""
VARIABLE = "PERFGUARD_PRICES"
"""Environment variable that names the user's table of prices."""
_COLUMNS = ("gpu", "price_per_hour")
_LARGEST_TABLE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Price:
    """The price of one device for one hour."""

    per_hour: float
    """In US dollars, or in the currency of the user's table."""
    source: str
    """Where it is from, for instance "list price of Lambda, 1x A10 (gpu-cloud), as of 2024-12"."""

    def __str__(self) -> str:
        return f"{format_dollars(self.per_hour)} per hour, {self.source}"


def price_of(device: Device, prices: Mapping[str, float] | None = None, *, provider: Provider | None = None) -> Price | None:
    """Return the price of an hour on ``device``; None if there is none.

    A user's own prices replace the list prices altogether, because they may be in another currency. The list prices are
    published prices on demand, with their month. They age: give your own where it matters.

    Example:
        >>> from perfguard.devices import catalog, price_of
        >>> price_of(catalog()["t4"], {"t4": 0.35}).per_hour
        0.35

    Args:
        device: a GPU of the catalog, or any device that ``prices`` has.
        prices: prices by the device's id, as :func:`read_prices` returns them. None: those of the table that the environment
            variable PERFGUARD_PRICES names, else the list prices.
        provider: the kind of provider whose list price to return. None: the lowest list price of all.

    Raises:
        ConfigurationError: for an unknown kind of provider.
        TableError: for a table in PERFGUARD_PRICES that cannot be used.
    """
    if provider is not None and provider not in get_args(Provider):
        raise ConfigurationError(f"provider must be one of {', '.join(get_args(Provider))}, but got {provider!r}.")
    own = own_prices() if prices is None else prices
    if own is not None:
        return Price(own[device.id], "your own price") if device.id in own else None
    rows = [row for row in _list_prices() if row["gpu"] == device.id and provider in (None, row["provider"])]
    row = min(rows, key=lambda row: float(row["per_hour"]), default=None)
    if row is None:
        return None
    return Price(row["per_hour"], f"list price of {row['source']} ({row['provider']}), as of {row['as_of']}")


@functools.lru_cache(maxsize=1)
def _list_prices() -> Sequence[Mapping[str, Any]]:
    text = resources.files("perfguard.devices").joinpath("prices.json").read_text(encoding="utf-8")
    rows: Sequence[Mapping[str, Any]] = json.loads(text)["prices"]
    return rows


def own_prices(table: str | Path | None = None) -> dict[str, float] | None:
    """Return the prices of ``table``, else of the table that PERFGUARD_PRICES names. None: the user has none."""
    path = table or os.environ.get(VARIABLE)
    return read_prices(Path(path)) if path else None


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
