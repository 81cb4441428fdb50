"""Pictures of what the guard predicted and what came of it, with Matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import optuna

from perfguard_optuna._attributes import TrialRecord
from perfguard_optuna._summary import records_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UNITS = {"memory": ("peak memory", "MiB", 1 / 2**20), "time": ("trial time", "s", 1.0), "step_time": ("step time", "ms", 1e3)}


def plot_predictions(study: optuna.Study, quantities: tuple[str, ...] = ("memory", "time")) -> Figure:
    """Predicted against measured, with 90% intervals and the budget; pruned trials at their prediction, on the left edge.

    Args:
        study: a study that ran with a PerfGuardPruner.
        quantities: any of "memory", "time" and "step_time".

    Raises:
        ImportError: if Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The pictures need Matplotlib: pip install 'perfguard[plot]'.") from error
    records = records_of(study)
    figure = Figure(figsize=(5.4 * len(quantities), 5.0), layout="constrained")
    for axes, quantity in zip(figure.subplots(1, len(quantities), squeeze=False)[0], quantities, strict=True):
        _draw(axes, quantity, records)
    return figure


def _draw(axes: Axes, quantity: str, records: Sequence[TrialRecord]) -> None:
    noun, unit, scale = _UNITS[quantity]
    known = [record for record in records if quantity in record.predicted]
    ran = [record for record in known if quantity in record.measured]
    pruned = [record for record in known if record.verdict == "prune"]
    axes.set(xscale="log", yscale="log", xlabel=f"measured {noun} ({unit})", ylabel=f"predicted {noun} ({unit})")
    values = [
        value * scale for record in known for value in (*record.intervals[quantity], record.measured.get(quantity)) if value
    ]
    if not values:
        axes.set_title("nothing was predicted")
        return
    low, high = min(values) / 1.4, max(values) * 1.4
    axes.plot([low, high], [low, high], color="0.7", linewidth=1, zorder=0)
    for group, x, color, label in (
        (ran, [record.measured[quantity] * scale for record in ran], "tab:blue", f"launched ({len(ran)})"),
        (pruned, [low * 1.1] * len(pruned), "tab:orange", f"pruned before launch ({len(pruned)})"),
    ):
        if group:
            y = [record.predicted[quantity] * scale for record in group]
            spread = [
                [value - record.intervals[quantity][0] * scale for value, record in zip(y, group, strict=True)],
                [record.intervals[quantity][1] * scale - value for value, record in zip(y, group, strict=True)],
            ]
            axes.errorbar(
                x, y, yerr=spread, fmt="o", markersize=4, color=color, ecolor=color, elinewidth=0.7, alpha=0.8, label=label
            )
    if limit := next((record.limits[quantity] for record in known if quantity in record.limits), None):
        axes.axhline(limit * scale, color="tab:red", linewidth=1, linestyle="--", label="budget")
        axes.axvline(limit * scale, color="tab:red", linewidth=1, linestyle=":")
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.legend(loc="lower right", frameon=False)
