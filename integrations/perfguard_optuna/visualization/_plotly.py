"""The pictures with Plotly."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
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
    import plotly.graph_objects as go

_SYMBOLS: Mapping[Group, str] = {
    "launched": "circle",
    "repaired": "triangle-up",
    "over": "x",
    "unmeasured": "square-open",
    "pruned": "diamond",
    "pruned_elsewhere": "diamond-open",
}
_HOVER_WIDTH = 60
_GREY_TEXT = "#595959"


def plot_budget(study: optuna.Study, *, quantity: Quantity = "memory") -> go.Figure:
    """Predicted against measured, with 90% intervals and the budget.

    A launched trial stands where its prediction (up) and its measurement (right) meet: on the diagonal where both agree. Trials
    that were pruned have no measurement and stand in the margin on the left, at their prediction. Both axes are logarithmic.

    Args:
        study: a study that ran with a guard.
        quantity: "memory", "time" (of the trial), "epoch_time", "step_time", "latency" or "energy".

    Raises:
        ImportError: if Plotly is not installed.
        ConfigurationError: for a quantity that there is not.
    """
    graph_objects = _graph_objects()
    view = budget_view(study, quantity)
    figure = graph_objects.Figure(layout=_layout(f"Predicted against measured {view.noun}", view.headline))
    if view.message:
        return _only_text(figure, view.message)
    _draw_scales(figure, view)
    for group, points in view.groups():
        color = GROUP_COLORS[group]
        figure.add_scatter(
            x=[view.x_of(point) for point in points],
            y=[point.predicted for point in points],
            error_y={
                "array": [point.high - point.predicted for point in points],
                "arrayminus": [point.predicted - point.low for point in points],
                "color": _faint(color, 0.4),
                "thickness": 1.2,
                "width": 0,
            },
            mode="markers",
            marker={"symbol": _SYMBOLS[group], "color": color, "size": 9, "line": {"width": 1}},
            name=f"{view.labels[group]} ({len(points)})",
            hovertext=[_hover(point.hover) for point in points],
            hoverinfo="text",
        )
    _draw_limits(figure, view)
    return figure


def _draw_scales(figure: go.Figure, view: BudgetView) -> None:
    low, high = view.bounds
    ticks = log_ticks(low, high)
    texts = list(map(tick_text, ticks))
    figure.update_xaxes(
        type="log",
        range=[math.log10(view.left), math.log10(high)],
        tickvals=[view.margin, *ticks],
        ticktext=["not<br>measured", *texts],
        title=f"measured {view.noun} ({view.unit})",
    )
    figure.update_yaxes(
        type="log",
        range=[math.log10(low), math.log10(high)],
        tickvals=ticks,
        ticktext=texts,
        title=f"predicted {view.noun} ({view.unit})",
    )
    figure.add_vrect(x0=view.left, x1=low, fillcolor="#EFEFEF", line_width=0, layer="below")
    figure.add_shape(type="line", x0=low, y0=low, x1=high, y1=high, line={"color": "#8C8C8C", "width": 1}, layer="below")


def _draw_limits(figure: go.Figure, view: BudgetView) -> None:
    """A legend entry of its own, and lines across the whole picture."""
    if not view.limits:
        return
    figure.add_scatter(x=[None], y=[None], mode="lines", line={"color": RED, "dash": "dash"}, name=view.budget_label)
    if len(view.limits) > MOST_BUDGET_LINES:
        figure.add_hrect(y0=view.limits[0], y1=view.limits[-1], fillcolor=RED, opacity=0.08, line_width=0, layer="below")
        return
    for limit in view.limits:
        figure.add_hline(y=limit, line={"color": RED, "dash": "dash", "width": 2})
        figure.add_vline(x=limit, line={"color": RED, "dash": "dot", "width": 1.5})


def plot_savings(study: optuna.Study) -> go.Figure:
    """Plot the cost of the study, and the cost that the trials pruned before launch would have added.

    The time of launched trials is measured, or taken from the study's clock. The time of pruned trials is predicted: what each
    would have taken to its end. There is one layer for each limit that pruned. Without ``Workload(steps=...)`` no trial time is
    predicted, and trials are counted instead.

    Args:
        study: a study that ran with a guard.

    Raises:
        ImportError: if Plotly is not installed.
    """
    graph_objects = _graph_objects()
    view = savings_view(study)
    figure = graph_objects.Figure(layout=_layout("What the guard saved", view.headline))
    if view.message:
        return _only_text(figure, view.message)
    x = [*view.numbers, view.numbers[-1] + 1]
    for band in view.bands:
        figure.add_scatter(
            x=x,
            y=[*band.heights, band.heights[-1]],
            stackgroup="account",
            line={"shape": "hv", "width": 0},
            fillcolor=_faint(band.color, 0.35 if band.is_predicted else 0.9),
            fillpattern={"shape": "/", "fgcolor": "white", "size": 6, "solidity": 0.25} if band.is_predicted else None,
            mode="lines",
            name=band.label,
            hoverinfo="skip",
        )
    figure.add_scatter(
        x=[skip.x for skip in view.skips],
        y=[skip.y for skip in view.skips],
        mode="markers",
        marker={
            "symbol": "diamond",
            "size": 8,
            "color": [skip.color for skip in view.skips],
            "line": {"width": 1, "color": "white"},
        },
        hovertext=[_hover(skip.hover) for skip in view.skips],
        hoverinfo="text",
        cliponaxis=False,
        showlegend=False,
    )
    _draw_totals(figure, view, x[-1])
    figure.update_xaxes(
        title=f"trial<br><sub>{_lines(view.caption)}</sub>", range=[x[0], x[-1] + 0.15 * (x[-1] - x[0])], tickformat="d"
    )
    figure.update_yaxes(title=view.axis, rangemode="tozero")
    figure.update_layout(legend={"traceorder": "reversed", "x": 0.01, "y": 0.99, "bgcolor": "rgba(255,255,255,0.85)"})
    return figure


def _draw_totals(figure: go.Figure, view: SavingsView, x: float) -> None:
    for total in view.totals:
        if total.interval is not None:
            low, high = total.interval
            figure.add_scatter(
                x=[x],
                y=[total.y],
                error_y={"array": [high - total.y], "arrayminus": [total.y - low], "color": _GREY_TEXT},
                mode="markers",
                marker={"size": 1, "color": _GREY_TEXT},
                hoverinfo="skip",
                showlegend=False,
            )
        figure.add_annotation(
            x=x, y=total.y, text=_lines(total.label.splitlines()), showarrow=False, xanchor="left", xshift=8, align="left"
        )


def _layout(title: str, headline: str) -> dict[str, Any]:
    axis = {"gridcolor": "#EBEBEB", "linecolor": "#8C8C8C", "zeroline": False}
    return {
        "title": {"text": f"{title}<br><sub>{html.escape(headline)}</sub>"},
        "template": "plotly_white",
        "xaxis": axis,
        "yaxis": axis,
    }


def _only_text(figure: go.Figure, message: str) -> go.Figure:
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    text = _lines(message.splitlines())
    figure.add_annotation(
        text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"color": _GREY_TEXT, "size": 14}
    )
    return figure


def _hover(lines: Sequence[str]) -> str:
    return _lines([part for line in lines for part in textwrap.wrap(line, _HOVER_WIDTH) or [""]])


def _lines(lines: Sequence[str]) -> str:
    return "<br>".join(map(html.escape, lines))


def _faint(color: str, opacity: float) -> str:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _graph_objects() -> Any:
    try:
        import plotly.graph_objects as graph_objects
    except ImportError as error:
        missing = "These pictures need Plotly: pip install 'perfguard[plot]'."
        raise ImportError(why_not_imported(error, "plotly", missing)) from error
    return graph_objects
