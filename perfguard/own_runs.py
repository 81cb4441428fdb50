"""What a configuration needed when it ran on the device before. It counts more than any prediction."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from perfguard.physics import scatter_of_readings
from perfguard.predictor import SIGMA_OF_MAD, Estimate, Observation
from perfguard.quantities import format_bytes
from perfguard.verdict import Verdict

if TYPE_CHECKING:
    from perfguard.budget import Limit
    from perfguard.quantities import Quantity

_LEAST_LOG_SIGMA = 0.03
"""Of the next reading of a configuration that was read once. Equal trials differ by some percent, on a CPU by more."""


def by_graph(runs: Iterable[Observation]) -> Mapping[str, Sequence[Observation]]:
    """Return the runs of each graph, by its content hash."""
    found: defaultdict[str, list[Observation]] = defaultdict(list)
    for run in runs:
        found[run.graph.content_hash].append(run)
    return found


def judged_by(verdict: Verdict, runs: Sequence[Observation], *, steps: int | None) -> Verdict:
    """Return ``verdict`` as the earlier ``runs`` of the configuration decide it.

    A configuration that ran to its end is pruned only if its own readings exceed a limit. One that ran out of memory whenever it
    ran is pruned without regard to what is left to lose. Everything else stays as predicted.

    Args:
        verdict: that prunes the configuration by a prediction.
        runs: of the same graph on the same device.
        steps: of the trial. None: unknown.
    """
    if verdict.is_ruled_out:
        return verdict
    whole = [run for run in runs if run.measurement.has_result]
    broken = [limit for limit in verdict.limits if limit.margin(verdict.accepted) > 0]
    if whole:
        read = [_as_read(limit, verdict, whole, steps=steps) for limit in broken]
        if all(limit is not None and limit.margin(verdict.accepted) <= 0 for limit in read):
            values = " and ".join(limit.format(limit.estimate.median) for limit in read if limit is not None)
            return replace(verdict, action="launch", grounds=f"but it ran to its end before, with {values}")
        return verdict
    is_of_memory = not verdict.phase and any(limit.quantity == "memory" for limit in broken)
    peaks = [run.measurement.peak_memory_bytes or 0 for run in runs if run.measurement.status == "oom"]
    if not peaks or not is_of_memory:
        return verdict
    bound = f"more than the {format_bytes(max(peaks))} at which it ran out of memory before"
    return replace(verdict, bound=bound, is_ruled_out=True)


def _as_read(limit: Limit, verdict: Verdict, runs: Sequence[Observation], *, steps: int | None) -> Limit | None:
    """Return ``limit`` beside the readings of ``runs``. None: they do not show the quantity."""
    values = [value for run in runs if (value := _reading(limit.quantity, verdict, run, steps=steps)) is not None]
    if not values:
        return None
    logs = [math.log(value) for value in values]
    middle = statistics.median(logs)
    scatter = SIGMA_OF_MAD * statistics.median(abs(value - middle) for value in logs)
    median = math.exp(middle)
    of_readings = scatter_of_readings(median, runs[0].device.kind) if limit.quantity == "memory" else 0.0
    return replace(limit, estimate=Estimate(median, max(scatter, of_readings, _LEAST_LOG_SIGMA)))


def _reading(quantity: Quantity, verdict: Verdict, run: Observation, *, steps: int | None) -> float | None:
    """Return what ``run`` says of a quantity of the trial. None: nothing.

    The memory of a larger phase than the step belongs to no graph, so a run of the same step says nothing of it.
    """
    measured = run.measurement
    if quantity == "memory":
        return None if verdict.phase else measured.peak_memory_bytes or None
    base: Quantity = "time" if quantity in ("time", "cost") else "step_time"
    value = measured.step_time_s
    if base == "time":
        if not measured.num_steps or steps is None:
            return None
        value = measured.total_time_s * max(1.0, steps / measured.num_steps)
    elif quantity not in ("step_time", "epoch_time", "latency"):
        return None
    predicted = verdict.predicted.get(quantity)
    of_base = verdict.predicted.get(base)
    if not value or predicted is None or of_base is None:
        return None
    return value * predicted.median / of_base.median
