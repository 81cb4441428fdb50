"""The quantities that a budget can limit: bytes, seconds, joules and dollars, as people write and read them.

All that differs from quantity to quantity stands in :data:`SPECS`: words, unit, parser, formatter, and the scales of pictures.
What cannot be read, or is not positive and finite, is a ConfigurationError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from perfguard.exceptions import ConfigurationError

Quantity = Literal["memory", "host_memory", "time", "epoch_time", "step_time", "latency", "energy", "cost"]


def parse_bytes(value: int | float | str, *, what: str = "memory") -> int:
    """Bytes from a number of bytes or a text such as ``"38GiB"``, ``"800 MB"``."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        # "k" and "kib" are powers of 1024, as torch and nvidia-smi count; "kb" is a power of 1000.
        units |= {letter: 1024**power, f"{letter}ib": 1024**power, f"{letter}b": 1000**power}
    number = _parse(value, units, what=what, unit="bytes", example='for instance 2**30, "38GiB" or "800MB"')
    if number < 1:
        raise ConfigurationError(
            f"{what} is in bytes and must be at least 1, but got {value!r}. "
            f"For a fraction of the device give a float between 0 and 1 to `memory_budget`."
        )
    return int(number)


def parse_seconds(value: int | float | str, *, what: str = "time") -> float:
    """Seconds from a number of seconds or a text such as ``"90s"``, ``"250ms"``, ``"2h"``."""
    units = {"": 1, "us": 1e-6, "ms": 1e-3, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
    return _parse(value, units, what=what, unit="seconds", example='for instance 90, "250ms" or "2h"')


def parse_joules(value: int | float | str, *, what: str = "energy") -> float:
    """Joules from a number of joules or a text such as ``"5J"``, ``"250mJ"``, ``"2Wh"``."""
    units = {"": 1, "uj": 1e-6, "mj": 1e-3, "j": 1, "kj": 1e3, "wh": 3600, "kwh": 3.6e6}
    return _parse(value, units, what=what, unit="joules", example='for instance 5, "250mJ" or "2Wh"')


def parse_dollars(value: int | float | str, *, what: str = "cost") -> float:
    """Dollars from a number or a text such as ``"$2"``, ``"0.50"``, ``"3 USD"``."""
    amount = value.strip().removeprefix("$") if isinstance(value, str) else value
    return _parse(amount, {"": 1, "usd": 1}, what=what, unit="dollars", example='for instance 2 or "$2.50"')


def _parse(value: int | float | str, units: Mapping[str, float], *, what: str, unit: str, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigurationError(f"{what} must be {unit} or a text, {example}, but got {value!r}.")
    number = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([a-z]*)\s*", value, re.IGNORECASE | re.ASCII)
        if match is None or match[2].lower() not in units:
            raise ConfigurationError(f"{what} must look like {example}, but got {value!r}.")
        number = float(match[1]) * units[match[2].lower()]
    if not math.isfinite(float(number)) or float(number) <= 0:
        raise ConfigurationError(f"{what} must be positive and finite ({example}), but got {value!r}.")
    return float(number)


def format_bytes(num_bytes: float) -> str:
    """``46.1 GiB``: three significant digits in the largest unit that leaves at least one."""
    for unit, size in (("EiB", 2**60), ("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """``12.3 ms``, ``4.56 s``, ``2.1 h``: three significant digits."""
    if not seconds:
        return "0 s"
    for least, size, unit in ((3600, 3600, "h"), (120, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms")):
        if abs(seconds) >= least:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def format_joules(joules: float) -> str:
    """``12.3 mJ``, ``4.56 J``, ``2.10 kJ``: three significant digits."""
    for unit, size in (("kJ", 1e3), ("J", 1.0)):
        if abs(joules) >= size:
            return f"{_three_digits(joules / size)} {unit}"
    return f"{_three_digits(joules * 1e3)} mJ"


def format_dollars(dollars: float) -> str:
    """``$0.0123``, ``$4.56``, ``$1234``: three significant digits."""
    magnitude = abs(dollars)
    if magnitude == 0 or magnitude >= 1:
        return f"${_three_digits(dollars)}"
    return f"${dollars:.{2 - math.floor(math.log10(magnitude))}f}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    return f"{value:.0f}" if magnitude >= 99.95 else f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"


# --- The table of quantities ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A kind of numbers."""

    column: str
    """Last part of the names of columns, such as "bytes" in "memory_limit_bytes"."""
    parse: Callable[..., float]
    format: Callable[[float], str]
    scales: tuple[tuple[str, float], ...]
    """Units for the axis of a picture, the smallest first, and what each is worth."""


_BYTES = _Unit(
    column="bytes",
    parse=parse_bytes,
    format=format_bytes,
    scales=(("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30)),
)
_SECONDS = _Unit(
    column="s",
    parse=parse_seconds,
    format=format_seconds,
    scales=(("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)),
)
_JOULES = _Unit(column="j", parse=parse_joules, format=format_joules, scales=(("mJ", 1e-3), ("J", 1.0), ("kJ", 1e3)))
_DOLLARS = _Unit(column="dollars", parse=parse_dollars, format=format_dollars, scales=(("$", 1.0),))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantitySpec:
    """The facts of one quantity."""

    noun: str
    """Its name in messages, such as "peak memory"."""
    verb: str
    """What a trial does with it, before the number in a sentence: "needs"."""
    unit: _Unit
    after: str = ""
    """What follows the number in a sentence: " a step"."""
    may_be_share: bool = False
    """Whether a budget may be a share of what there is, in (0, 1]."""
    multiple_of: Quantity | None = None
    """The quantity through which it is measured, as a multiple by steps or by a price. None: it has readings of its own."""
    how_predicted: str = ""
    """What a user has to give for a prediction. Empty: nothing."""


SPECS: Mapping[Quantity, QuantitySpec] = {
    "memory": QuantitySpec(noun="peak memory", verb="needs", unit=_BYTES, may_be_share=True),
    "host_memory": QuantitySpec(noun="host memory", verb="needs", after=" of host memory", unit=_BYTES, may_be_share=True),
    "time": QuantitySpec(noun="trial time", verb="takes", unit=_SECONDS, how_predicted="Give Workload(steps=...)."),
    "epoch_time": QuantitySpec(
        noun="epoch time",
        verb="takes",
        after=" an epoch",
        unit=_SECONDS,
        multiple_of="step_time",
        how_predicted="Give Workload(steps_per_epoch=...) and epoch_time_budget=.",
    ),
    "step_time": QuantitySpec(noun="step time", verb="takes", after=" a step", unit=_SECONDS),
    "latency": QuantitySpec(noun="latency", verb="takes", after=" a batch", unit=_SECONDS, multiple_of="step_time"),
    "energy": QuantitySpec(noun="energy", verb="uses", after=" a batch", unit=_JOULES),
    "cost": QuantitySpec(
        noun="trial cost",
        verb="costs",
        unit=_DOLLARS,
        multiple_of="time",
        how_predicted="Give Workload(steps=...), and cost_budget= with price_per_hour=.",
    ),
}
"""The facts of each quantity. A new quantity is a row here, and a limit in :meth:`perfguard.Budget.limits`."""


def format_quantity(quantity: Quantity, value: float) -> str:
    """Return ``value`` of ``quantity`` in words."""
    return SPECS[quantity].unit.format(value)
