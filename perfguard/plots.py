"""Pictures of a guarded study, with Plotly: predicted against measured, what the guard saved, and the account of a prediction.

They take the records of a study (:class:`perfguard.record.TrialRecord`), whichever tuner or log they come from.
"""

from __future__ import annotations

import html
import math
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from perfguard.account import PHYSICS
from perfguard.exceptions import ConfigurationError
from perfguard.explain import lines_of
from perfguard.quantities import SPECS, Quantity, format_quantity, format_seconds
from perfguard.record import TrialRecord

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from perfguard.predictor import Estimate

Outcome = Literal["launched", "repaired", "over", "failed", "unmeasured", "unguarded", "pruned"]


class _Look(NamedTuple):
    words: str
    color: str
    """From Okabe and Ito's palette, which colour-blind people can tell apart (jfly.uni-koeln.de/color, 2008)."""
    symbol: str


OUTCOMES: Mapping[Outcome, _Look] = {
    "launched": _Look("ran within budget", "#0072B2", "circle"),
    "repaired": _Look("repaired, ran within budget", "#009E73", "triangle-up"),
    "over": _Look("ran, broke a budget", "#D55E00", "x"),
    "failed": _Look("failed or interrupted", "#CC79A7", "square"),
    "unmeasured": _Look("ran, not measured", "#56B4E9", "square-open"),
    "unguarded": _Look("ran without a verdict", "#8C8C8C", "circle-open"),
    "pruned": _Look("pruned before launch", "#E69F00", "diamond"),
}


def outcome_of(record: TrialRecord) -> Outcome:
    """Return what became of a trial."""
    if record.is_pruned:
        return "pruned"
    if record.is_measured and record.violates:
        return "over"
    if record.status in ("failed", "interrupted"):
        return "failed"
    if record.is_unguarded:
        return "unguarded"
    if not record.is_measured:
        return "unmeasured"
    return "repaired" if record.in_words == "repaired" else "launched"


def plot_budget(records: Sequence[TrialRecord], *, quantity: Quantity = "memory") -> go.Figure:
    """Draw predicted against measured, with 90% intervals and the budget.

    A launched trial stands where its prediction (up) and its measurement (right) meet: on the diagonal where both agree. Trials
    without a measurement stand in the margin on the left, at their prediction. Both axes are logarithmic.

    Raises:
        ConfigurationError: for a quantity that there is not, or without Plotly.
    """
    if quantity not in SPECS:
        raise ConfigurationError(f"quantity must be one of {', '.join(SPECS)}, but got {quantity!r}.")
    noun = SPECS[quantity].noun
    title = f"Predicted against measured {noun}"
    points = [record for record in records if quantity in record.predicted]
    if not points:
        return _empty(title, _why_nothing(records, quantity))
    unit, size = _unit_of(quantity, [record.predicted[quantity].median for record in points])
    measured = {id(record): _comparable(record, quantity) for record in points}
    pairs = [
        (record, value) for record in points if (value := measured[id(record)]) is not None and record.status in (None, "ok")
    ]
    inside = sum(low <= value <= high for record, value in pairs for low, high in [record.predicted[quantity].interval()])
    subtitle = f"{inside} of {len(pairs)} measured trials lie in their 90% interval" if pairs else "nothing was measured yet"
    limits = sorted({record.limits[quantity] / size for record in points if quantity in record.limits})
    values = [record.predicted[quantity].median / size for record in points] + limits
    values += [value / size for value in measured.values() if value is not None]
    low = min(values) / 1.3
    high = max(values) * 1.3
    left = low / math.pow(high / low, 0.14)  # the margin takes an eighth of the width
    figure = _figure(title, subtitle)
    for outcome, look in OUTCOMES.items():
        if not (group := [record for record in points if outcome_of(record) == outcome]):
            continue
        estimates = [record.predicted[quantity] for record in group]
        # Without a measurement: side by side in the margin. Multiples of the golden ratio spread evenly.
        shares = [0.2 + 0.6 * ((record.number or index) * 1.618034 % 1) for index, record in enumerate(group)]
        in_margin = [left * math.pow(low / left, share) for share in shares]
        figure.add_scatter(
            x=[
                place if (value := measured[id(record)]) is None else value / size
                for record, place in zip(group, in_margin, strict=True)
            ],
            y=[estimate.median / size for estimate in estimates],
            error_y={
                "array": [(estimate.interval()[1] - estimate.median) / size for estimate in estimates],
                "arrayminus": [(estimate.median - estimate.interval()[0]) / size for estimate in estimates],
                "color": _faint(look.color, 0.4),
                "thickness": 1.2,
                "width": 0,
            },
            mode="markers",
            marker={"symbol": look.symbol, "color": look.color, "size": 9, "line": {"width": 1}},
            name=f"{look.words} ({len(group)})",
            hovertext=[_hover(record, _in_words(record, quantity, measured[id(record)])) for record in group],
            hoverinfo="text",
        )
    ticks = _log_ticks(low, high)
    texts = [_tick_text(value) for value in ticks]
    figure.update_xaxes(
        type="log",
        range=[math.log10(left), math.log10(high)],
        tickvals=[math.sqrt(left * low), *ticks],
        ticktext=["not<br>measured", *texts],
        title=f"measured {noun} ({unit})",
    )
    figure.update_yaxes(
        type="log", range=[math.log10(low), math.log10(high)], tickvals=ticks, ticktext=texts, title=f"predicted {noun} ({unit})"
    )
    figure.add_vrect(x0=left, x1=low, fillcolor="#EFEFEF", line_width=0, layer="below")
    figure.add_shape(type="line", x0=low, y0=low, x1=high, y1=high, line={"color": "#8C8C8C", "width": 1}, layer="below")
    _draw_limits(figure, limits, unit)
    return figure


def _in_words(record: TrialRecord, quantity: Quantity, measured: float | None) -> Iterator[str]:
    median, low, high = (
        format_quantity(quantity, value) for value in (record.predicted[quantity].median, *record.predicted[quantity].interval())
    )
    yield f"predicted {median} (90%: {low} to {high})"
    if measured is not None:
        yield f"measured {format_quantity(quantity, measured)}"


def _comparable(record: TrialRecord, quantity: Quantity) -> float | None:
    """The measured value. None: there is none, or the trial was stopped, so that its time does not show the whole."""
    value = record.counted(quantity)
    is_whole = quantity not in ("time", "cost") or not record.stopped_early or record.breaks(quantity)
    return value if is_whole and value is not None and math.isfinite(value) and value > 0 else None


def _draw_limits(figure: go.Figure, limits: Sequence[float], unit: str) -> None:
    """The budgets, a line each. A log of several studies may have several."""
    if not limits:
        return
    ends = " to ".join(dict.fromkeys((_tick_text(limits[0]), _tick_text(limits[-1]))))
    red = OUTCOMES["over"].color
    figure.add_scatter(x=[None], y=[None], mode="lines", line={"color": red, "dash": "dash"}, name=f"budget, {ends} {unit}")
    for limit in limits:
        figure.add_hline(y=limit, line={"color": red, "dash": "dash", "width": 2})
        figure.add_vline(x=limit, line={"color": red, "dash": "dot", "width": 1.5})


def plot_savings(records: Sequence[TrialRecord]) -> go.Figure:
    """Draw the compute time of the study, and the time that the trials pruned before launch would have added.

    The time of launched trials is measured, or taken from the tuner's clock. The time of pruned trials is predicted: what each
    would have taken to its end; a trial that fails in its first step would have taken none. There is one layer for each limit
    that pruned.

    Raises:
        ConfigurationError: without Plotly.
    """
    title = "What the guard saved"
    if all(record.verdict is None for record in records):
        return _empty(title, _why_nothing(records, None))
    pruned = [record for record in records if record.is_pruned]
    if pruned and not any("time" in record.predicted for record in pruned):
        words = f"{len(pruned)} of {len(records)} trials were pruned before launch."
        return _empty(title, f"{words} How long they would have taken is not known. Give Workload(steps=...).")
    costs = list(map(_cost, records))
    unit, size = _unit_of("time", [sum(costs) / 2])
    figure = _figure(title, _savings_in_words(records))
    numbers = list(range(len(records) + 1))  # the last step of the staircase has a width, too
    for layer, (label, color) in _LAYERS.items():
        members = [_layer_of(record) == layer for record in records]
        if not any(members):
            continue
        heights = list(accumulate(cost / size if inside else 0.0 for cost, inside in zip(costs, members, strict=True)))
        is_predicted = layer not in ("launched", "over")
        seconds = sum(cost for cost, inside in zip(costs, members, strict=True) if inside)
        amount = f", {format_seconds(seconds)}{' predicted' if is_predicted else ''}"
        figure.add_scatter(
            x=numbers,
            y=[*heights, heights[-1]],
            stackgroup="account",
            mode="lines",
            line={"shape": "hv", "width": 0},
            fillcolor=_faint(color, 0.35 if is_predicted else 0.9),
            fillpattern={"shape": "/", "fgcolor": "white", "size": 6, "solidity": 0.25} if is_predicted else None,
            name=f"{label} ({sum(members)}{amount})",
            hoverinfo="skip",
        )
    tops = list(accumulate(cost / size for cost in costs))
    marked = [index for index, record in enumerate(records) if record.is_pruned]
    figure.add_scatter(
        x=marked,
        y=[tops[index] for index in marked],
        mode="markers",
        marker={"symbol": "diamond", "size": 8, "color": OUTCOMES["pruned"].color, "line": {"width": 1, "color": "white"}},
        hovertext=[_hover(records[index]) for index in marked],
        hoverinfo="text",
        showlegend=False,
    )
    figure.update_xaxes(title="trial", tickformat="d")
    figure.update_yaxes(title=f"cumulative compute time ({unit})", rangemode="tozero")
    figure.update_layout(legend={"traceorder": "reversed"})
    return figure


_LAYERS: Mapping[str, tuple[str, str]] = {
    "launched": ("launched, within budget", OUTCOMES["launched"].color),
    "over": ("launched, broke a budget", OUTCOMES["over"].color),
    "memory": ("pruned: peak memory", OUTCOMES["pruned"].color),
    "time": ("pruned: trial time", OUTCOMES["failed"].color),
    "other": ("pruned: another limit", OUTCOMES["unmeasured"].color),
}
"""Label and colour of each layer, the lowest first."""


def _layer_of(record: TrialRecord) -> str:
    if not record.is_pruned:
        return "over" if record.is_measured and record.violates else "launched"
    return str(record.broken_limit) if record.broken_limit in ("memory", "time") else "other"


def _cost(record: TrialRecord) -> float:
    """Seconds that a trial took, or that a pruned one would have taken."""
    seconds = record.saved_s if record.is_pruned else record.ran_s
    return seconds if seconds is not None and math.isfinite(seconds) else 0.0


def _savings_in_words(records: Sequence[TrialRecord]) -> str:
    pruned = [record for record in records if record.is_pruned]
    words = f"{len(pruned)} of {len(records)} trials pruned before launch"
    estimates = [record.predicted["time"] for record in pruned if record.saved_s is not None]
    if not estimates:
        return words
    about = format_seconds(sum(estimate.median for estimate in estimates))
    ends = [format_seconds(sum(estimate.interval()[side] for estimate in estimates)) for side in (0, 1)]
    return f"{words}, about {about} saved ({' to '.join(ends)}, if all predictions err to one side)"


def plot_account(
    estimate: Estimate, *, quantity: Quantity, of: str = "", measured: float | None = None, limit: float | None = None
) -> go.Figure:
    """Draw the account of one estimate as a waterfall, from physics down to the number that decided.

    Each stage is a row. Its bar reaches from the median before it to the median after it, where the mark stands. The line through
    the mark is the 90% interval after the stage. The axis is logarithmic, so equal factors have bars of equal length.

    Args:
        estimate: with its account.
        quantity: what it is of.
        of: whose it is, for the title, such as "trial 12".
        measured: what was measured. None: nothing was.
        limit: the budget. None: there is none.

    Raises:
        ConfigurationError: without Plotly.
    """
    noun = SPECS[quantity].noun
    lines = lines_of(estimate)
    title = f"How the predicted {noun} came to be"
    if not lines:
        return _empty(title, "The prediction has no account. Its predictor gives none, or an older PerfGuard has made it.")
    unit, size = _unit_of(quantity, [line.median for line in lines])
    words = [of, f"predicted {format_quantity(quantity, estimate.median)}"]
    words += [] if measured is None else [f"measured {format_quantity(quantity, measured)}"]
    figure = _figure(title, ", ".join(filter(None, words)))
    befores = [lines[0].median, *(line.median for line in lines[:-1])]
    rows = list(range(len(lines)))
    first = (
        lines[:1] if lines[0].name == PHYSICS and len(lines) > 1 else []
    )  # how wrong physics alone would be is a guess, which is not drawn
    judged = lines[len(first) :]
    rises = OUTCOMES["pruned"].color
    falls = OUTCOMES["unmeasured"].color
    figure.add_bar(
        orientation="h",
        y=rows,
        base=[min(before, line.median) / size for before, line in zip(befores, lines, strict=True)],
        x=[abs(line.median - before) / size for before, line in zip(befores, lines, strict=True)],
        marker={"color": [rises if line.factor >= 1 else falls for line in lines]},
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_scatter(
        x=[line.median / size for line in lines],
        y=rows,
        error_x={
            "array": [*(0.0 for _ in first), *((line.high - line.median) / size for line in judged)],
            "arrayminus": [*(0.0 for _ in first), *((line.median - line.low) / size for line in judged)],
            "color": _faint(OUTCOMES["launched"].color, 0.5),
            "thickness": 1.2,
            "width": 3,
        },
        mode="markers",
        marker={"color": OUTCOMES["launched"].color, "size": 8},
        name="median after the stage, and its 90% interval",
        hovertext=[f"{line.name}: {format_quantity(quantity, line.median)}<br>{html.escape(line.why)}" for line in lines],
        hoverinfo="text",
    )
    for value, name, color in ((measured, "measured", "#000000"), (limit, "budget", OUTCOMES["over"].color)):
        if value is not None:
            dash = {"color": color, "dash": "dash" if name == "budget" else "solid"}
            figure.add_scatter(x=[None], y=[None], mode="lines", line=dash, name=f"{name} {format_quantity(quantity, value)}")
            figure.add_vline(x=value / size, line=dash)
    known = [lines[0].median / size, *(end / size for line in judged for end in (line.low, line.high))]
    known += [value / size for value in (measured, limit) if value]
    low = min(known) / 1.2
    high = max(known) * 1.2
    ticks = _log_ticks(low, high)
    figure.update_xaxes(
        type="log",
        range=[math.log10(low), math.log10(high)],
        tickvals=ticks,
        ticktext=[_tick_text(value) for value in ticks],
        title=f"{noun} ({unit})",
    )
    figure.update_yaxes(tickvals=rows, ticktext=[html.escape(line.name) for line in lines], autorange="reversed")
    return figure


def write_page(figure: go.Figure, path: str) -> None:
    """Write a picture as one HTML file. Its folder is made if it is not there.

    Raises:
        ConfigurationError: if the file cannot be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.write_html(path)
    except OSError as error:
        raise ConfigurationError(f"The picture cannot be written to {path!r}: {error}") from error


# --- The parts of a figure ------------------------------------------------------------------------------------------------------


def _figure(title: str, subtitle: str) -> go.Figure:
    axis = {"gridcolor": "#EBEBEB", "linecolor": "#8C8C8C", "zeroline": False, "automargin": True}
    return graph_objects().Figure(
        layout={
            "title": {"text": f"{title}<br><sub>{html.escape(subtitle)}</sub>"},
            "meta": {"title": title, "subtitle": subtitle},  # as plain text, for a page that shows them itself
            "template": "plotly_white",
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},  # under the plot, on a phone too
            "margin": {"t": 70, "r": 20, "b": 110},
        }
    )


def _empty(title: str, message: str) -> go.Figure:
    """A picture that says why there is nothing to draw."""
    figure = _figure(title, "")
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    words = "<br>".join(map(html.escape, textwrap.wrap(message, 60)))
    figure.add_annotation(
        text=words, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"color": "#595959", "size": 14}
    )
    return figure


def _why_nothing(records: Sequence[TrialRecord], quantity: Quantity | None) -> str:
    if not records:
        return "No trial has finished yet."
    known = {name for record in records for name in record.predicted}
    if not known or quantity is None:
        return "No trial was judged by PerfGuard. Run the study with a guard."
    spec = SPECS[quantity]
    others = ", ".join(other.noun for name, other in SPECS.items() if name in known)
    return f"{spec.noun.capitalize()} was not predicted, only {others}. {spec.how_predicted}".rstrip()


def _hover(record: TrialRecord, words: Iterable[str] = ()) -> str:
    lines = [f"trial {'' if record.number is None else record.number}", *words]
    lines += [f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}" for name, value in record.params.items()]
    lines += [] if record.status in (None, "ok") else [f"status: {record.status}"]
    lines += [record.reason] if record.reason else []
    return "<br>".join(html.escape(part) for line in lines for part in textwrap.wrap(line, 60) or [""])


def _log_ticks(low: float, high: float) -> list[float]:
    """Round values between ``low`` and ``high``, as many as stay legible on a logarithmic axis: eight at most."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    for steps in (*((fine,) if high <= 10 * low else ()), (1.0, 2.0, 5.0), (1.0, 3.0)):  # over more, 1,500 and 2,000 would touch
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) <= 8:
            return ticks
    return [10.0**decade for decade in decades if low <= 10.0**decade <= high]


def _tick_text(value: float) -> str:
    """A number as people write it: 0.05, 20, 1,500."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _unit_of(quantity: Quantity, values: Sequence[float]) -> tuple[str, float]:
    """The largest unit that leaves most of ``values`` at one or more, and what it is worth."""
    units = SPECS[quantity].unit.scales
    middle = statistics.median(values)
    return next(((name, size) for name, size in reversed(units) if middle >= size), units[0])


def _faint(color: str, opacity: float) -> str:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def graph_objects() -> Any:
    """Return the module ``plotly.graph_objects``.

    Raises:
        ConfigurationError: if Plotly is not installed.
    """
    try:
        import plotly.graph_objects
    except ImportError as error:
        raise ConfigurationError(f"Pictures and reports need Plotly: pip install 'perfguard[plot]' ({error}).") from error
    return plotly.graph_objects
