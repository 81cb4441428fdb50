"""The pictures with Matplotlib; see :mod:`perfguard_optuna.visualization` for what they show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optuna

from perfguard.budget import Quantity
from perfguard.exceptions import why_not_imported
from perfguard_optuna.visualization._views import (
    GROUP_COLORS,
    MOST_BUDGET_LINES,
    RED,
    BudgetView,
    Group,
    SavingsView,
    budget_view,
    log_ticks,
    savings_view,
    tick_text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

_MARKERS: Mapping[Group, str] = {
    "launched": "o",
    "repaired": "^",
    "over": "X",
    "unmeasured": "s",
    "pruned": "D",
    "pruned_elsewhere": "D",
}
_HOLLOW: tuple[Group, ...] = ("unmeasured", "pruned_elsewhere")


def plot_budget(study: optuna.Study, *, quantity: Quantity = "memory", ax: Axes | None = None) -> Axes:
    """Same as :func:`perfguard_optuna.visualization.plot_budget`, with Matplotlib.

    Args:
        study: a study that ran with a guard.
        quantity: "memory", "time" (of the trial), "epoch_time", "step_time", "latency" or "energy".
        ax: where to draw. None: a new figure of pyplot's.

    Raises:
        ImportError: if Matplotlib is not installed.
        ConfigurationError: for a quantity that there is not.
    """
    view = budget_view(study, quantity)
    ax = _prepared(ax, (6.4, 5.4), f"Predicted against measured {view.noun}", view.headline)
    if view.message:
        return _only_text(ax, view.message)
    _draw_scales(ax, view)
    for group, points in view.groups():
        x = [view.x_of(point) for point in points]
        y = [point.predicted for point in points]
        spread = [[point.predicted - point.low for point in points], [point.high - point.predicted for point in points]]
        color, hollow = GROUP_COLORS[group], group in _HOLLOW
        ax.errorbar(x, y, yerr=spread, fmt="none", ecolor=color, elinewidth=1.0, alpha=0.35, zorder=2)
        ax.scatter(
            x,
            y,
            s=36,
            marker=_MARKERS[group],
            facecolor="white" if hollow else color,
            edgecolor=color if hollow else "white",
            linewidth=1.0 if hollow else 0.5,
            label=f"{view.labels[group]} ({len(points)})",
            zorder=3,
        )
    _draw_limits(ax, view)
    ax.legend(loc="lower right", fontsize="small", framealpha=0.9)
    return ax


def _draw_scales(ax: Axes, view: BudgetView) -> None:
    low, high = view.bounds
    ticks = log_ticks(low, high)
    ax.set(xscale="log", yscale="log", xlim=(view.left, high), ylim=(low, high))
    ax.minorticks_off()
    ax.set_xticks([view.margin, *ticks], ["not\nmeasured", *map(tick_text, ticks)])
    ax.set_yticks(ticks, list(map(tick_text, ticks)))
    ax.set(xlabel=f"measured {view.noun} ({view.unit})", ylabel=f"predicted {view.noun} ({view.unit})")
    ax.axvspan(view.left, low, color="0.94", linewidth=0, zorder=0)
    ax.plot([low, high], [low, high], color="0.55", linewidth=1, zorder=1)


def _draw_limits(ax: Axes, view: BudgetView) -> None:
    if len(view.limits) > MOST_BUDGET_LINES:
        ax.axhspan(view.limits[0], view.limits[-1], color=RED, alpha=0.08, linewidth=0, zorder=0, label=view.budget_label)
        return
    for index, limit in enumerate(view.limits):
        ax.axhline(limit, color=RED, linewidth=1.3, linestyle="--", zorder=1, label=view.budget_label if not index else None)
        ax.axvline(limit, color=RED, linewidth=1.0, linestyle=":", zorder=1)


def plot_savings(study: optuna.Study, *, ax: Axes | None = None) -> Axes:
    """Same as :func:`perfguard_optuna.visualization.plot_savings`, with Matplotlib.

    Args:
        study: a study that ran with a guard.
        ax: where to draw. None: a new figure of pyplot's.

    Raises:
        ImportError: if Matplotlib is not installed.
    """
    view = savings_view(study)
    ax = _prepared(ax, (7.6, 5.0), "What the guard saved", view.headline)
    if view.message:
        return _only_text(ax, view.message)
    from matplotlib.ticker import MaxNLocator

    x = [*view.numbers, view.numbers[-1] + 1]
    floor = [0.0] * len(x)
    for band in view.bands:
        heights = [*band.heights, band.heights[-1]]
        top = [below + height for below, height in zip(floor, heights, strict=True)]
        ax.fill_between(
            x,
            floor,
            top,
            step="post",
            facecolor=band.color,
            alpha=0.45 if band.is_predicted else 0.9,
            hatch="///" if band.is_predicted else None,
            edgecolor="white",
            linewidth=0.0,
            label=band.label,
        )
        floor = top
    ax.scatter(
        [skip.x for skip in view.skips],
        [skip.y for skip in view.skips],
        s=26,
        marker="D",
        color=[skip.color for skip in view.skips],
        edgecolor="white",
        linewidth=0.5,
        clip_on=False,
        zorder=3,
    )
    _draw_totals(ax, view, x[-1])
    ax.set(xlim=(x[0], x[-1] + (x[-1] - x[0]) * 0.15), xlabel="trial", ylabel=view.axis)
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
    ax.annotate(
        "\n".join(view.caption),
        (0, 0),
        xytext=(0, -38),
        xycoords="axes fraction",
        textcoords="offset points",
        va="top",
        fontsize="small",
        color="0.35",
    )
    ax.legend(*_upside_down(ax), loc="upper left", fontsize="small", framealpha=0.9)
    return ax


def _draw_totals(ax: Axes, view: SavingsView, x: float) -> None:
    for total in view.totals:
        if total.interval is not None:
            low, high = total.interval
            ax.errorbar([x], [total.y], yerr=[[total.y - low], [high - total.y]], color="0.3", capsize=3, linewidth=1)
        ax.annotate(total.label, (x, total.y), xytext=(8, 0), textcoords="offset points", va="center", fontsize="small")


def _upside_down(ax: Axes) -> tuple[list[Any], list[str]]:
    """The legend in the order of the layers, the highest first."""
    handles, labels = ax.get_legend_handles_labels()
    return handles[::-1], labels[::-1]


def _prepared(ax: Axes | None, size: tuple[float, float], title: str, headline: str) -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        missing = "These pictures need Matplotlib: pip install 'perfguard[plot]'."
        raise ImportError(why_not_imported(error, "matplotlib", missing)) from error
    if ax is None:
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
    ax.set_title(f"{title}\n", loc="left", fontsize="large", fontweight="bold")
    ax.annotate(headline, (0, 1), xytext=(0, 5), xycoords="axes fraction", textcoords="offset points", fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="0.92", linewidth=0.8)
    ax.set_axisbelow(True)
    return ax


def _only_text(ax: Axes, message: str) -> Axes:
    ax.set_axis_off()
    ax.text(0.5, 0.5, message, ha="center", va="center", color="0.35", transform=ax.transAxes)
    return ax
