"""Features of a graph on a device: one module for each set of features.

step            one row for a step. Trees read it.
launches        the operators of a step in launch order, and the tensors between them. The graph network reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy.typing as npt

from perfguard.devices import Device
from perfguard.graph import OpGraph

Arrays = dict[str, npt.NDArray[Any]]
"""Features of one step on one device, by name."""


class FeatureSet(NamedTuple):
    """Features of steps that a learner may read."""

    columns: object
    """The names of all its columns, in their order. Weights that were fitted to other columns are refused."""
    compute: Callable[[OpGraph, Device], Arrays]
    """Computes the features of a graph on a device. It can be pickled, because processes exchange it."""


def features_of(views: Iterable[FeatureSet], graph: OpGraph, device: Device) -> Arrays:
    """The features of ``graph`` on ``device`` in all of ``views``."""
    return {name: values for view in views for name, values in view.compute(graph, device).items()}
