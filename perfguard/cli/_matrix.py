"""``--matrix "batch_size=16..512:x2" "gpu=a100,h100"``: every combination of the values of several names."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from perfguard.cli._subject import literal
from perfguard.exceptions import ConfigurationError

MOST_COMBINATIONS = 10_000
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?::([x+]?)(\d+))?")


def combinations(axes: Sequence[str]) -> list[dict[str, Any]]:
    """Return each combination of the values that ``axes`` give, the last one changing fastest.

    Example:
        >>> combinations(["batch_size=16..64:x2", "gpu=a100,h100"])[:2]
        [{'batch_size': 16, 'gpu': 'a100'}, {'batch_size': 16, 'gpu': 'h100'}]

    Args:
        axes: texts such as "width=64,128", "depth=2..8" (each integer), "depth=2..8:+2" or "batch_size=16..512:x2". The last
            value of a range is included if a step meets it.

    Raises:
        ConfigurationError: for a text of another form, a name that is there twice, or too many combinations.
    """
    values: dict[str, list[Any]] = {}
    for axis in axes:
        name, separator, text = axis.partition("=")
        if not separator or not name or not text:
            raise ConfigurationError(f"--matrix must look like NAME=16..512:x2 or NAME=a,b, but got {axis!r}.")
        if name in values:
            raise ConfigurationError(f"--matrix has {name!r} twice. Give all its values at once, for instance {name}=16,32.")
        values[name] = _values(text, axis)
    number = math.prod(map(len, values.values()))
    if number > MOST_COMBINATIONS:
        raise ConfigurationError(f"--matrix has {number:,} combinations, more than {MOST_COMBINATIONS:,}. Give fewer values.")
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def words_of(settings: Mapping[str, Any]) -> str:
    """Return settings as a text such as "batch_size=16 gpu=a100"."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _values(text: str, axis: str) -> list[Any]:
    found = _RANGE.fullmatch(text)
    if found is None:
        return list(dict.fromkeys(map(literal, text.split(","))))
    low, high, kind, step = int(found[1]), int(found[2]), found[3], int(found[4] or 1)
    grows = step > 1 and low > 0 if kind == "x" else step > 0
    if high < low or not grows:
        raise ConfigurationError(f"--matrix {axis}: a range goes upwards, as 16..512:x2, 16..512:+16 or 2..8 do.")
    if kind != "x":
        return list(range(low, min(high, low + step * MOST_COMBINATIONS) + 1, step))
    return list(itertools.takewhile(lambda value: value <= high, (low * step**power for power in itertools.count())))
