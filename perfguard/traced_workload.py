"""A workload that comes with its graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfguard.workload import Workload

if TYPE_CHECKING:
    from perfguard.graph import OpGraph


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TracedWorkload(Workload):
    """A workload whose step was traced elsewhere, where the model's package is installed. Its ``model`` is not used."""

    graph: OpGraph
