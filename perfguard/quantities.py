"""Bytes, seconds, joules and dollars: from what people write, and back into what people read."""

from __future__ import annotations

import math
import re

from perfguard.exceptions import ConfigurationError

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECOND_UNITS = {
    "": 1.0,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_JOULE_UNITS = {"": 1.0, "uj": 1e-6, "mj": 1e-3, "j": 1.0, "kj": 1e3, "wh": 3600.0, "kwh": 3.6e6}
_DOLLAR_UNITS = {"": 1.0, "usd": 1.0}
_QUANTITY = re.compile(r"\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def _parse(text: str, units: dict[str, float] | dict[str, int], *, what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ConfigurationError(f"{what} must look like {example}, but got {text!r}.")
    try:
        value = float(match[1])
    except ValueError:
        raise ConfigurationError(f"{what} must look like {example}, but got {text!r}.") from None
    return value * units[match[2].lower()]


def _require_positive(value: float, given: object, *, what: str, example: str) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ConfigurationError(f"{what} must be positive and finite ({example}), but got {given!r}.")
    return value


def parse_bytes(value: int | float | str, *, what: str = "memory") -> int:
    """Bytes from a number of bytes or a text such as ``"38GiB"``, ``"800 MB"``.

    Raises:
        ConfigurationError: for anything that is not a positive, finite amount of at least one byte.
    """
    example = 'for instance 2**30, "38GiB" or "800MB"'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigurationError(f"{what} must be bytes or a text, {example}, but got {value!r}.")
    number = _parse(value, _BYTE_UNITS, what=what, example=example) if isinstance(value, str) else value
    if _require_positive(float(number), value, what=what, example=example) < 1:
        raise ConfigurationError(
            f"{what} is in bytes and must be at least 1, but got {value!r}. "
            f"For a fraction of the device give a float between 0 and 1 to `memory_budget`."
        )
    return int(number)


def parse_seconds(value: int | float | str, *, what: str = "time") -> float:
    """Seconds from a number of seconds or a text such as ``"90s"``, ``"250ms"``, ``"2h"``.

    Raises:
        ConfigurationError: for anything that is not a positive, finite duration.
    """
    return _parse_amount(value, _SECOND_UNITS, what=what, unit="seconds", example='for instance 90, "250ms" or "2h"')


def parse_joules(value: int | float | str, *, what: str = "energy") -> float:
    """Joules from a number of joules or a text such as ``"5J"``, ``"250mJ"``, ``"2Wh"``.

    Raises:
        ConfigurationError: for anything that is not a positive, finite energy.
    """
    return _parse_amount(value, _JOULE_UNITS, what=what, unit="joules", example='for instance 5, "250mJ" or "2Wh"')


def parse_dollars(value: int | float | str, *, what: str = "cost") -> float:
    """Dollars from a number or a text such as ``"$2"``, ``"0.50"``, ``"3 USD"``.

    Raises:
        ConfigurationError: for anything that is not a positive, finite amount.
    """
    amount = value.strip().removeprefix("$") if isinstance(value, str) else value
    return _parse_amount(amount, _DOLLAR_UNITS, what=what, unit="dollars", example='for instance 2 or "$2.50"')


def _parse_amount(value: int | float | str, units: dict[str, float], *, what: str, unit: str, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigurationError(f"{what} must be {unit} or a text, {example}, but got {value!r}.")
    number = _parse(value, units, what=what, example=example) if isinstance(value, str) else value
    return _require_positive(float(number), value, what=what, example=example)


def format_bytes(num_bytes: float) -> str:
    """``46.1 GiB``: three significant digits in the largest unit that leaves at least one."""
    for unit, size in (("EiB", 2**60), ("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """``12.3 ms``, ``4.56 s``, ``2.1 h``: three significant digits."""
    magnitude = abs(seconds)
    if not magnitude:
        return "0 s"
    if magnitude >= 3600:
        return f"{_three_digits(seconds / 3600)} h"
    if magnitude >= 120:
        return f"{_three_digits(seconds / 60)} min"
    if magnitude >= 1:
        return f"{_three_digits(seconds)} s"
    if magnitude >= 1e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
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
    return {"memory": format_bytes, "energy": format_joules, "cost": format_dollars}.get(quantity, format_seconds)(value)


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    return f"{value:.0f}" if magnitude >= 99.95 else f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"
