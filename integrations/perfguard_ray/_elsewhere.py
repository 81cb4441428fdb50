"""Building and tracing on a worker, for a model whose package the driver does not have."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from torch import nn

from perfguard.devices import Device
from perfguard.exceptions import BuildError
from perfguard.graph import OpGraph
from perfguard.traced_workload import TracedWorkload
from perfguard.workload import Build, Workload, build_workload

if TYPE_CHECKING:
    from perfguard.graph import TraceCache

_TIMEOUT_S = 120.0


def build_here_or_on_a_worker(build: Build, config: Mapping[str, Any], device: Device) -> Workload:
    """The workload of ``config``; where a package that ``build`` needs is missing here, as a worker of the cluster traces it.

    Raises:
        BuildError: if it cannot be built there either.
        GetTimeoutError: if no worker answers within two minutes.
    """
    try:
        return build_workload(build, config)
    except BuildError as error:
        if not isinstance(error.__cause__, ImportError) or not ray.is_initialized():
            raise
    task: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(_trace)
    graph, fields = ray.get(task.remote(build, dict(config), device), timeout=_TIMEOUT_S)
    return TracedWorkload(nn.Identity(), inputs=(), graph=OpGraph.from_bytes(graph), **fields)


def _trace(build: Build, config: Mapping[str, Any], device: Device) -> tuple[bytes, dict[str, Any]]:
    workload = build_workload(build, config)
    fields = {name: getattr(workload, name) for name in ("mode", "steps", "steps_per_epoch")}
    return _traces().trace(workload, target=device).to_bytes(), fields


@functools.cache
def _traces() -> TraceCache:
    """The worker's own; it serves the next task that runs in this process."""
    from perfguard.graph import TraceCache

    return TraceCache()
