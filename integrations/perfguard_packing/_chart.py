"""A schedule as a Gantt chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfguard.exceptions import ConfigurationError, why_not_imported
from perfguard_packing._plan import TINY_S, Placement, Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_schedule(schedule: Schedule) -> Figure:
    """A Gantt chart: one row a device, one bar a job; jobs that share a device stand side by side in its row.

    Raises:
        ConfigurationError: if Matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        missing = "The picture needs Matplotlib: pip install 'perfguard[plot]'."
        raise ConfigurationError(why_not_imported(error, "matplotlib", missing)) from error
    slots = sorted({placement.slot for placement in schedule.placements}, key=lambda slot: slot.name)
    figure = Figure(figsize=(9, 0.9 + 0.55 * len(slots)), layout="constrained")
    axes = figure.subplots()
    colors = colormaps["tab20"].colors  # type: ignore[attr-defined]
    names = sorted(placement.job.name for placement in schedule.placements)
    for row, slot in enumerate(slots):
        mine = sorted((placement for placement in schedule.placements if placement.slot == slot), key=lambda one: one.start_s)
        lanes = _lanes(mine)
        height = 0.8 / (max(lanes, default=0) + 1)
        for placement, lane in zip(mine, lanes, strict=True):
            length_s = placement.end_s - placement.start_s
            bottom = row - 0.4 + lane * height
            color = colors[names.index(placement.job.name) % len(colors)]
            axes.barh(bottom, length_s, height, left=placement.start_s, align="edge", color=color, edgecolor="white")
            if length_s > 0.04 * schedule.makespan_s:
                middle = placement.start_s + length_s / 2
                axes.text(middle, bottom + height / 2, placement.job.name, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(slots)), [slot.name for slot in slots])
    axes.invert_yaxis()
    axes.set(xlabel="seconds", xlim=(0, schedule.makespan_s * 1.02 or 1))
    proof = ", proven to be the shortest" if schedule.is_optimal else ""
    axes.set_title(f"{len(names)} jobs in {schedule.makespan_s:.4g} s ({schedule.method}{proof})", fontsize=10)
    return figure


def _lanes(placements: Sequence[Placement]) -> list[int]:
    """The lowest free row of its device for each placement, in the order of their starts."""
    free_at: list[float] = []
    lanes = []
    for placement in placements:
        lane = next((lane for lane, end_s in enumerate(free_at) if end_s <= placement.start_s + TINY_S), len(free_at))
        free_at[lane : lane + 1] = [placement.end_s]
        lanes.append(lane)
    return lanes
