"""Sums and logarithms that are the same to the last bit for one graph and for a thousand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def log(values: npt.NDArray[Any]) -> Floats:
    """Return `math.log` of each value; NumPy's own differs from it in the last bit on some processors."""
    return _mapped(math.log, values)


def log1p(values: npt.NDArray[Any]) -> Floats:
    """Return `math.log1p` of each value."""
    return _mapped(math.log1p, values)


def _mapped(function: Callable[[float], float], values: npt.NDArray[Any]) -> Floats:
    return np.array(list(map(function, values.ravel().tolist())), dtype=np.float64).reshape(values.shape)


def sum_of(values: Floats, index: npt.NDArray[np.int64]) -> Floats:
    """Return the sums of some columns, as if each row stood alone. Shapes: (C, n), (m,) → (C,)."""
    return np.asarray(np.take(values, index, axis=1).sum(axis=1))  # `values[:, index]` may be in another order in memory


def sum_where(values: Floats, chosen: npt.NDArray[np.bool_]) -> Floats:
    """Return the sums of what is ``chosen``, as if each row stood alone. Shapes: (C, n), (C, n) → (C,)."""
    return np.array([row[own].sum() for row, own in zip(values, chosen, strict=True)], dtype=np.float64)
