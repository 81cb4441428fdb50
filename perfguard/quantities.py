"""Bytes, seconds, joules and dollars: from what people write, and back into what people read.

What cannot be read, or is not positive and finite, is a ConfigurationError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from perfguard.exceptions import ConfigurationError


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


def format_quantity(quantity: str, value: float) -> str:
    """``value`` of a quantity that a budget can limit, in words: memory in bytes, energy in joules, cost in dollars, others in
    seconds."""
    forms = {"memory": format_bytes, "host_memory": format_bytes, "energy": format_joules, "cost": format_dollars}
    return forms.get(quantity, format_seconds)(value)


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    return f"{value:.0f}" if magnitude >= 99.95 else f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"
