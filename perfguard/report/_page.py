"""The page of a report: one HTML file that holds its style, its script and Plotly.

All that users name is escaped. A content security policy allows our two scripts by their hashes and nothing else, so a name that
looks like a script would not run either. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from perfguard import __version__
from perfguard.budget import NOUNS, Quantity, quantity_of
from perfguard.exceptions import ConfigurationError, why_not_imported
from perfguard.report._advice import advice_of, honest_notes, times_in_words
from perfguard.report._border import Axis, Border, axes_of, fit_border, number_in_words
from perfguard.report._chart_data import border_sentence, chart_json, comparison_sentence, in_words, learning_rows
from perfguard.report._data import OUTCOMES, Report, ReportTrial
from perfguard.summary import time_in_words

_LONGEST = 400
"""Characters of a reason or of a value that are shown."""
_MOST_ROWS = 5000
"""Trials of the table and the charts; of a longer study the latest are shown, and the page says so."""
_MOST_DOUBTS = 50


def page_of(report: Report) -> str:
    """Return the report as one HTML page.

    Args:
        report: what to show.

    Raises:
        ConfigurationError: if Plotly is not installed.
    """
    plotly, script = _plotly(), _asset("page.js")
    axes = axes_of(report)
    borders = {quantity: border for quantity in report.compared if (border := fit_border(report, axes, quantity)) is not None}
    shown = _latest(report)
    sections = [
        ("saved", "What was saved, and what was not", _saved(report)),
        ("verdicts", "Verdict by verdict", _verdicts(report, shown)),
        ("accuracy", "Predicted against measured", _accuracy(report)),
        ("border", "The budget in the search space", _border(report, axes, borders)),
        ("learning", "Drift and learning", _learning(report)),
        ("next", "What to do next", _items(advice_of(report, axes, borders))),
    ]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{content}</section>'
        for name, title, content in sections
    )
    packed = base64.b64encode(gzip.compress(plotly.encode(), mtime=0)).decode()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}' '{_hash(plotly)}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="PerfGuard {__version__}">
<link rel="icon" href="data:,">
<title>{_text(report.title)}: PerfGuard report</title>
<style>{_asset("page.css")}{_dots()}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<header>
<h1>{_text(report.title)}</h1>
<p class="muted">{_text(_about(report))}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="main">{body}</main>
<footer><p>Written by PerfGuard {__version__}. This file is complete: it loads nothing from the network.</p></footer>
<script type="application/json" id="data">{chart_json(shown, axes, borders)}</script>
<script type="text/plain" id="plotly">{packed}</script>
<script>{script}</script>
</body>
</html>
"""


def _about(report: Report) -> str:
    device = f"Guarded device: {report.device}. " if report.device else ""
    return f"{device}{len(report.trials):,} trials, read from the {report.source}."


def _latest(report: Report) -> Report:
    if len(report.trials) <= _MOST_ROWS:
        return report
    first = len(report.trials) - _MOST_ROWS
    drifts = [(index - first, reason) for index, reason in report.history.drifts if index is not None and index >= first]
    return replace(report, trials=report.trials[first:], history=replace(report.history, drifts=drifts))


# --- sections


def _saved(report: Report) -> str:
    summary = report.summary
    violations = "-" if summary.num_violations is None else f"{summary.num_violations:,} of {summary.num_measured:,} measured"
    figures = [
        ("trials ran", f"{summary.num_launched:,}"),
        ("pruned before launch", f"{summary.num_pruned:,}"),
        ("broke a budget", violations),
        ("time saved (predicted)", time_in_words(summary.saved_s)),
    ]
    tiles = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in figures)
    rows = "".join(f'<tr><th scope="row">{_text(label)}</th><td>{_text(value)}</td></tr>' for label, value in summary.rows())
    return (
        f'<dl class="figures">{tiles}</dl>{_items(honest_notes(report))}'
        f'<h3>The summary</h3><table id="summary"><caption>The same counts as the guard prints.</caption>'
        f"<tbody>{rows}</tbody></table>"
    )


def _verdicts(report: Report, shown: Report) -> str:
    if not shown.trials:
        return "<p>No trial has finished yet.</p>"
    several = len({trial.study for trial in shown.trials}) > 1
    quantities = shown.quantities
    heads = [("Trial", "number"), *([("Study", "")] if several else []), ("Outcome", ""), ("Reason", "reason")]
    for quantity in quantities:
        noun = NOUNS[quantity].capitalize()
        heads += [(f"{noun}, predicted", "number"), (f"{noun}, measured", "number")]
    heads.append(("Hyperparameters", "params"))
    head = "".join(
        f'<th scope="col" class="{name}" aria-sort="none"><button type="button">{label}</button></th>' for label, name in heads
    )
    rows = "".join(_row(trial, index, quantities, several=several) for index, trial in enumerate(shown.trials))
    hidden = len(report.trials) - len(shown.trials)
    note = (
        f"<p>The latest {len(shown.trials):,} trials are shown, {hidden:,} earlier ones are counted above.</p>" if hidden else ""
    )
    return (
        f"{note if hidden else ''}{_filters(shown)}"
        f'<div class="scroll" role="region" aria-labelledby="trials-caption" tabindex="0"><table id="trials">'
        f'<caption id="trials-caption">One row for each trial. In brackets: the 90% interval. '
        f"The buttons in the header sort the rows.</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _filters(shown: Report) -> str:
    counts = Counter(trial.outcome for trial in shown.trials)
    options = "".join(
        f'<option value="{name}">{words} ({counts[name]})</option>' for name, words in OUTCOMES.items() if counts[name]
    )
    doubtful = sum(bool(trial.doubt) for trial in shown.trials)
    options += f'<option value="doubt">reading not believed ({doubtful})</option>' if doubtful else ""
    return (
        '<form id="filters" class="controls" hidden>'
        f'<label for="outcome">Outcome<select id="outcome"><option value="">all</option>{options}</select></label>'
        '<label for="words">Words to find<input id="words" type="search" autocomplete="off"></label>'
        '<p role="status" id="shown" class="muted"></p></form>'
    )


def _row(trial: ReportTrial, index: int, quantities: Sequence[Quantity], *, several: bool) -> str:
    record, outcome = trial.record, trial.outcome
    number = record.number if record.number >= 0 else index + 1
    name = f"{record.number}" if record.number >= 0 else f"#{number}"
    cells = [f'<th scope="row" class="number" data-value="{number}">{name}</th>']
    if several:
        cells.append(f"<td>{_text(trial.study)}</td>")
    cells += [f'<td class="outcome">{OUTCOMES[outcome]}</td>', f'<td class="reason">{_reason(trial)}</td>']
    for quantity in quantities:
        low, high = record.intervals.get(quantity, (None, None))
        ends = "" if low is None else f"<small>({in_words(quantity, low)} to {in_words(quantity, high)})</small>"
        cells += [
            _number(record.predicted.get(quantity), quantity, ends),
            _number(record.measured.get(quantity), quantity),
        ]
    params = ", ".join(f"{name}={_value(value)}" for name, value in trial.params.items())
    cells.append(f'<td class="params">{_text(params)}</td>')
    doubt = ' data-doubt=""' if trial.doubt else ""
    return f'<tr data-outcome="{outcome}"{doubt}>{"".join(cells)}</tr>'


def _reason(trial: ReportTrial) -> str:
    record = trial.record
    parts = [record.reason.removeprefix("not judged: ")]
    if record.status not in (None, "ok"):
        parts.append({"oom": "ran out of memory", "timeout": "ran out of time"}.get(str(record.status), str(record.status)))
    parts += [record.not_measured, f"reading not believed: {trial.doubt}" if trial.doubt else ""]
    return _text("; ".join(filter(None, parts)))


def _number(value: float | None, quantity: Quantity, more: str = "") -> str:
    if value is None:
        return '<td class="number" data-value="">–</td>'
    data = f"{value!r}" if math.isfinite(value) else ""
    return f'<td class="number" data-value="{data}">{in_words(quantity, value)}{more}</td>'


def _accuracy(report: Report) -> str:
    if not report.compared:
        return "<p>Nothing was predicted, so there is nothing to compare.</p>"
    charts = "".join(_chart("fit", quantity, comparison_sentence(report, quantity)) for quantity in report.compared)
    return (
        "<p>A trial on the diagonal cost what was predicted. Bars are 90% intervals, and dashed lines are the budget. "
        f'Trials without a measurement stand in the grey margin.</p><div class="pair">{charts}</div>'
    )


def _border(report: Report, axes: Sequence[Axis], borders: Mapping[Quantity, Border]) -> str:
    limited = [quantity for quantity in report.compared if any(quantity in trial.record.limits for trial in report.trials)]
    if not axes or not limited:
        return "<p>No hyperparameter varies, or no budget was recorded with a prediction.</p>"
    refused = Counter(quantity_of(trial.record.reason) for trial in report.trials if trial.outcome == "pruned")
    first = max(limited, key=lambda quantity: refused[quantity])
    names = [axis.name for axis in axes]
    ranked = [names.index(name) for name, _ in borders[first].ranked()] if first in borders else list(range(len(names)))
    x, y = ranked[0], ranked[1] if len(ranked) > 1 else ""
    labels = [(str(index), name) for index, name in enumerate(names)]
    controls = (
        _select("budget", "Budget", [(quantity, NOUNS[quantity]) for quantity in limited], first)
        + _select("x", "Across", labels, str(x))
        + _select("y", "Up", [*labels, ("", "share of the budget")], str(y))
    )
    sentences = [border_sentence(borders.get(quantity), quantity) for quantity in limited]
    caption = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return (
        "<p>Red trials are predicted to need more than the budget, blue ones less. The dashed line is the border of the budget "
        "by a fit of the predictions, with the other hyperparameters as is typical. It is drawn where it agrees with most "
        "predictions. Circles ran, diamonds were pruned, and crosses broke a budget.</p>"
        f'<div class="controls">{controls}</div>'
        f'<figure><div class="plot" id="border-chart" data-chart="border" role="img" aria-label="{escape(" ".join(sentences))}">'
        f"</div><figcaption>{caption}</figcaption></figure>{_parameters(axes, borders)}"
    )


def _parameters(axes: Sequence[Axis], borders: Mapping[Quantity, Border]) -> str:
    if not borders:
        return ""
    heads = ["Hyperparameter", "Tried"]
    for quantity in borders:
        heads += [f"Changes {NOUNS[quantity]} by", "Border, others as is typical"]
    rows = []
    order = {name: place for border in [*borders.values()][:1] for place, (name, _) in enumerate(border.ranked())}
    for axis in sorted(axes, key=lambda axis: order[axis.name]):
        tried = ", ".join(axis.choices) if axis.choices else f"{number_in_words(axis.low)} to {number_in_words(axis.high)}"
        cells = [f"<td>{_text(tried)}</td>"]
        for border in borders.values():
            crossing = border.crossing(axis)
            cells += [
                f'<td class="number">{times_in_words(border.factor(axis.name))}</td>',
                f'<td class="number">{"–" if crossing is None else number_in_words(crossing)}</td>',
            ]
        rows.append(f'<tr><th scope="row">{_text(axis.name)}</th>{"".join(cells)}</tr>')
    return _table("parameters", "What moves the cost, by a log-linear fit of the predictions.", heads, rows)


def _learning(report: Report) -> str:
    history, parts = report.history, []
    compared = [quantity for quantity in report.compared if report.coverage(quantity)[1]]
    if compared:
        charts = "".join(_chart("learning", quantity, _learning_sentence(report, quantity), low=True) for quantity in compared)
        parts.append(
            "<p>Each point is what a trial took, as a factor of what was predicted. Grey bars are the 90% intervals. "
            f'Dotted lines mark changed conditions.</p><div class="pair">{charts}</div>'
        )
        rows = [
            f'<tr><th scope="row">{_text(trials)}</th><td>{NOUNS[quantity]}</td><td class="number">{count}</td>'
            f'<td class="number">{error}</td><td class="number">{inside}</td></tr>'
            for quantity in compared
            for trials, count, error, inside in learning_rows(report, quantity)
        ]
        heads = ["Trials", "Quantity", "Measured", "Median error", "In their interval"]
        parts.append(_table("errors", "Errors of the predictions over the study.", heads, rows))
    else:
        parts.append("<p>Nothing was measured, so nothing was learnt.</p>")
    parts.append("<h3>Changed conditions</h3>")
    if not history.log:
        parts.append("<p>No measurement log was read, so changes of the machine are not known. Name it with --log.</p>")
    elif not history.drifts:
        parts.append("<p>The log shows no change of driver, framework or speed.</p>")
    else:
        parts.append(_items(_drift_in_words(report, index, reason) for index, reason in history.drifts))
    doubts = [(trial, index) for index, trial in enumerate(report.trials) if trial.doubt]
    if doubts:
        rows = [
            f'<tr><th scope="row">{_trial_name(trial, index)}</th><td>{_text(trial.doubt)}</td></tr>'
            for trial, index in doubts[:_MOST_DOUBTS]
        ]
        more = f" The first {_MOST_DOUBTS} of {len(doubts)}." if len(doubts) > _MOST_DOUBTS else ""
        parts.append(
            _table("doubts", f"Readings that are not believed. Nothing is learnt from them.{more}", ["Trial", "Reason"], rows)
        )
    if history.weights:
        rows = [
            f'<tr><th scope="row">{_text(made)}</th><td>{_text(state)}</td><td>{_text(metrics)}</td></tr>'
            for made, state, metrics in history.weights
        ]
        caption = "Fine-tuned weights since the first trial, with their errors before and after on the newest runs."
        parts.append(_table("weights", caption, ["Made (UTC)", "State", "Learnt from"], rows))
    if history.predictors:
        parts.append(f"<p>Verdicts by: {_text(', '.join(history.predictors))}.</p>")
    return "".join(parts)


def _learning_sentence(report: Report, quantity: Quantity) -> str:
    rows = learning_rows(report, quantity)
    if len(rows) < 2:
        return comparison_sentence(report, quantity)
    (_, first, first_error, _), (_, last, last_error, _) = rows[0], rows[-1]
    return (
        f"The median error of {NOUNS[quantity]} is {first_error} over the first {first} measured trials, "
        f"and {last_error} over the last {last}."
    )


def _drift_in_words(report: Report, index: int | None, reason: str) -> str:
    where = "In another study" if index is None else f"From trial {_trial_name(report.trials[index], index)} on"
    return f"{where}: {reason}."


# --- elements


def _chart(kind: str, quantity: Quantity, sentence: str, *, low: bool = False) -> str:
    size = "plot low" if low else "plot"
    return (
        f"<figure><h3>{NOUNS[quantity].capitalize()}</h3>"
        f'<div class="{size}" data-chart="{kind}" data-quantity="{quantity}" role="img" aria-label="{_text(sentence)}"></div>'
        f"<figcaption>{_text(sentence)}</figcaption></figure>"
    )


def _table(name: str, caption: str, heads: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f'<th scope="col">{_text(label)}</th>' for label in heads)
    return (
        f'<table id="{name}"><caption>{_text(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _select(name: str, label: str, options: Iterable[tuple[str, str]], chosen: str) -> str:
    inner = "".join(
        f'<option value="{value}"{" selected" if value == chosen else ""}>{_text(text)}</option>' for value, text in options
    )
    return f'<label for="{name}">{label}<select id="{name}">{inner}</select></label>'


def _items(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _trial_name(trial: ReportTrial, index: int) -> str:
    return f"{trial.record.number}" if trial.record.number >= 0 else f"#{index + 1}"


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _text(text: str) -> str:
    """``text`` as HTML, cut where it is very long."""
    return escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …")


def _dots() -> str:
    """The colour of each outcome in the table."""
    return "".join(f'tr[data-outcome="{name}"] {{ --dot: var(--{name}); }}' for name in OUTCOMES)


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return (files("perfguard.report") / name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        missing = "The report needs Plotly: pip install 'perfguard[plot]'."
        raise ConfigurationError(why_not_imported(error, "plotly", missing)) from error
    return str(get_plotlyjs())
