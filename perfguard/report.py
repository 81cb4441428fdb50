"""The report of a guarded study: the summary, the pictures and a table of the trials, as one HTML file that needs no network.

All that users name is escaped. A content security policy allows the page's own scripts by their hashes and nothing else, so a
name that looks like a script would not run either.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfguard import __version__
from perfguard.budget import NOUNS, Quantity
from perfguard.exceptions import ConfigurationError, LogError
from perfguard.plots import OUTCOMES, graph_objects, outcome_of, plot_budget, plot_savings
from perfguard.quantities import format_quantity, format_seconds
from perfguard.record import QUANTITIES, TrialRecord
from perfguard.summary import Summary, summarize

if TYPE_CHECKING:
    from perfguard.log import MeasurementStore

READERS_GROUP = "perfguard.reports"
"""Entry-point group of functions ``read(source, study)`` that return a :class:`Report`, or None for a source that they do not
know. ``study`` is a name or None."""
Reader = Callable[[Any, "str | None"], "Report | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page shows."""

    title: str
    """Name of the study, or of the log."""
    source: str
    """What it was read from."""
    records: Sequence[TrialRecord]
    """The trials, in the order in which they were judged."""
    num_repeated: int = 0
    """Proposals that were pruned from memory and have no record."""

    @property
    def summary(self) -> Summary:
        """The counts of the trials."""
        return summarize(self.records, title=self.title, num_repeated=self.num_repeated)


# --- Where a report comes from --------------------------------------------------------------------------------------------------


def write_report(source: Any, path: str | os.PathLike[str], *, study: str | None = None) -> Path:
    """Write the report of a guarded study or of a measurement log as one HTML file.

    Example:
        >>> write_report(study, "report.html")                                                      # doctest: +SKIP
        >>> write_report("sqlite:///optuna.db", "report.html", study="resnet")                      # doctest: +SKIP
        >>> write_report("log.db", "report.html")                                                   # doctest: +SKIP

    Args:
        source, study: as for :func:`read_report`.
        path: the file to write, which is returned. Its folder is made if it is not there.

    Raises:
        ConfigurationError: for a source that cannot be read, a file that cannot be written, or without Plotly.
        LogError: for a log that cannot be used.
    """
    page = page_of(read_report(source, study=study))
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(page.encode("utf-8", "replace"))  # a name may hold half of a surrogate pair
    except OSError as error:
        raise ConfigurationError(f"The report cannot be written to {str(file)!r}: {error.strerror or error}") from error
    return file


def read_report(source: Any, *, study: str | None = None) -> Report:
    """Read the report of a guarded study or of a measurement log.

    Args:
        source: an Optuna study, the URL or the file of its storage, the search of a Ray Tune run, a MeasurementStore, or the
            file or URL of a measurement log.
        study: the study's name, where ``source`` has several. A log is reported as a whole without it.

    Raises:
        ConfigurationError: for a source that cannot be read.
        LogError: for a log that cannot be used.
    """
    from perfguard.log import MeasurementStore

    if isinstance(source, MeasurementStore):
        return _report_of_log(source, study)
    if isinstance(source, (str, os.PathLike)):
        source = os.fspath(source)
        if "://" not in source and not Path(source).is_file():
            raise ConfigurationError(
                f"There is no file {source!r}. Give a measurement log, or the storage of an Optuna study, "
                "for instance sqlite:///optuna.db with --study NAME."
            )
        if {"meta", "decisions"} <= tables_in(source):
            with MeasurementStore(source) as store:
                return _report_of_log(store, study)
    for point in entry_points(group=READERS_GROUP):
        try:
            reader: Reader = point.load()
        except ImportError:  # its tuner is not installed
            continue
        report = reader(source, study)
        if report is not None:
            return report
    what = "The database" if isinstance(source, str) and "://" in source else repr(source)  # a URL may have a password
    raise ConfigurationError(
        f"{what} is neither a measurement log nor a study that an installed integration can read. "
        "For an Optuna study: pip install 'perfguard[optuna]'."
    )


def _report_of_log(log: MeasurementStore, study: str | None) -> Report:
    records = log.records(study)
    if not records:
        known = sorted({record.study for record in log.records()}) if study is not None else []
        names = f" It has {', '.join(map(repr, known[:10]))}." if known else ""
        raise LogError(f"The measurement log {log.location} has no decision{f' of study {study!r}' if study else ''}.{names}")
    studies = list(dict.fromkeys(record.study for record in records))
    return Report(
        title=studies[0] if len(studies) == 1 else f"{len(studies)} studies",
        source=f"measurement log {log.location}",
        records=records,
    )


def tables_in(location: str) -> set[str]:
    """Return the names of the tables of a database, given as a URL or as an SQLite file. Empty: it is no database.

    Raises:
        ConfigurationError: if the database of a URL cannot be opened.
    """
    from sqlalchemy import URL, create_engine, inspect, make_url
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    from perfguard.log_database import reason_of

    try:
        url = make_url(location) if "://" in location else URL.create("sqlite", database=str(Path(location).absolute()))
        if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
            raise ConfigurationError(f"There is no database at {location!r}.")
        engine = create_engine(url)
        try:
            return set(inspect(engine).get_table_names())
        finally:
            engine.dispose()
    except ArgumentError as error:
        raise ConfigurationError(f"That is no URL of a database: {error}") from error
    except (SQLAlchemyError, ImportError) as error:
        if "://" not in location and "not a database" in str(error):
            return set()
        raise ConfigurationError(f"The database cannot be opened: {reason_of(error)}") from error


# --- The page -------------------------------------------------------------------------------------------------------------------


def page_of(report: Report, *, max_rows: int = 5000) -> str:
    """Return the report as one HTML page. Of more than ``max_rows`` trials the latest are shown, and the page says so.

    Raises:
        ConfigurationError: if Plotly is not installed.
    """
    graph_objects()
    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    shown = report.records[-max_rows:]
    hidden = len(report.records) - len(shown)
    known = {quantity for record in shown for quantity in record.predicted}
    # The time by which most trials can be compared: of the whole trial, else of a step.
    times: tuple[Quantity, ...] = ("time", "step_time", "epoch_time", "latency")
    compared = [quantity for quantity in ("memory", next((time for time in times if time in known), "time")) if quantity in known]
    look: Any = {
        "full_html": False,
        "include_plotlyjs": False,
        "default_width": "100%",
        "default_height": "100%",
        "config": {"responsive": True, "displayModeBar": False},
    }
    pictures = [plot_savings(shown), *(plot_budget(shown, quantity=quantity) for quantity in compared)]
    plots = "".join(f'<div class="plot">{to_html(picture, **look)}</div>' for picture in pictures)
    note = f"<p>The latest {len(shown):,} trials are shown; {hidden:,} earlier ones are counted above.</p>" if hidden else ""
    dots = "".join(f'tr[data-outcome="{name}"] {{ --dot: var(--{name}); }}' for name in OUTCOMES)
    summary = report.summary
    device = f"Guarded device: {summary.device}. " if summary.device else ""
    about = f"{device}{len(report.records):,} trials, read from the {report.source}."
    body = (
        f"<header><h1>{_text(report.title)}</h1><p class='muted'>{_text(about)}</p></header>"
        f"<main><h2>What was saved</h2>{_counts(summary)}{plots}"
        f"<h2>Verdict by verdict</h2>{note}{_trials(report, shown, compared)}</main>"
        f"<footer><p class='muted'>Written by PerfGuard {__version__}. This file loads nothing from the network.</p></footer>"
    )
    page = f"<script>{get_plotlyjs()}</script>{body}<script>{_asset('report.js')}</script>"
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, flags=re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{_text(report.title)}: PerfGuard report</title><style>{_asset('report.css')}{dots}</style></head>"
        f"<body>{page}</body></html>\n"
    )


def _counts(summary: Summary) -> str:
    violations = "-" if summary.num_violations is None else f"{summary.num_violations:,} of {summary.num_measured:,} measured"
    figures = {
        "trials ran": f"{summary.num_launched:,}",
        "pruned before launch": f"{summary.num_pruned:,}",
        "broke a budget": violations,
        "time saved (predicted)": "-" if summary.saved_s is None else format_seconds(summary.saved_s),
    }
    tiles = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in figures.items())
    rows = "".join(f'<tr><th scope="row">{_text(label)}</th><td>{_text(value)}</td></tr>' for label, value in summary.rows())
    return f'<dl class="figures">{tiles}</dl><table id="summary"><tbody>{rows}</tbody></table>'


def _trials(report: Report, shown: Sequence[TrialRecord], compared: Sequence[Quantity]) -> str:
    if not shown:
        return "<p>No trial has finished yet.</p>"
    several = len({record.study for record in shown}) > 1
    limited = {quantity for record in shown for quantity in record.limits}
    quantities = [quantity for quantity in QUANTITIES if quantity in limited or quantity in compared]
    heads = ["Trial", *(["Study"] if several else []), "Outcome", "Reason"]
    for quantity in quantities:
        heads += [f"{NOUNS[quantity].capitalize()}, predicted", f"{NOUNS[quantity].capitalize()}, measured"]
    heads.append("Hyperparameters")
    head = "".join(f'<th scope="col" aria-sort="none"><button type="button">{label}</button></th>' for label in heads)
    counts = Counter(outcome_of(record) for record in shown)
    options = "".join(
        f'<option value="{name}">{look.words} ({counts[name]})</option>' for name, look in OUTCOMES.items() if counts[name]
    )
    rows = "".join(_row(record, index, quantities, several=several) for index, record in enumerate(shown))
    filters = (
        '<form id="filters" class="controls" hidden><label for="outcome">Outcome<select id="outcome">'
        f'<option value="">all</option>{options}</select></label>'
        '<label for="words">Words to find<input id="words" type="search" autocomplete="off"></label>'
        '<p role="status" id="shown" class="muted"></p></form>'
    )
    caption = "One row for each trial. Under a prediction: its 90% interval. The buttons in the header sort the rows."
    return (
        f'{filters}<div class="scroll" role="region" aria-label="Trials" tabindex="0"><table id="trials">'
        f"<caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(record: TrialRecord, index: int, quantities: Sequence[Quantity], *, several: bool) -> str:
    outcome = outcome_of(record)
    number = index + 1 if record.number is None else record.number
    reasons = [record.reason, "" if record.status in (None, "ok") else str(record.status), record.not_measured]
    cells = [f'<th scope="row" class="number" data-value="{number}">{number}</th>']
    cells += [f"<td>{_text(record.study)}</td>"] if several else []
    cells += [
        f'<td class="outcome">{OUTCOMES[outcome].words}</td>',
        f'<td class="reason">{_text("; ".join(filter(None, reasons)))}</td>',
    ]
    for quantity in quantities:
        estimate = record.predicted.get(quantity)
        interval = "" if estimate is None else " to ".join(format_quantity(quantity, end) for end in estimate.interval())
        cells.append(_number(quantity, None if estimate is None else estimate.median, interval))
        cells.append(_number(quantity, record.measured.get(quantity)))
    values = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in flat(record.params).items()}
    params = ", ".join(f"{name}={value}" for name, value in values.items())
    return f'<tr data-outcome="{outcome}">{"".join(cells)}<td class="params">{_text(params)}</td></tr>'


def _number(quantity: Quantity, value: float | None, interval: str = "") -> str:
    if value is None:
        return '<td class="number" data-value="">–</td>'
    small = f"<small>{interval}</small>" if interval else ""
    return f'<td class="number" data-value="{value!r}">{format_quantity(quantity, value)}{small}</td>'


def flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return hyperparameters without nesting: ``{"model": {"width": 8}}`` gives ``{"model/width": 8}``."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}/") if nested else {f"{prefix}{name}": value}
    return found


def _text(text: str, *, longest: int = 400) -> str:
    """``text`` as HTML, cut where it is very long."""
    return escape(text if len(text) <= longest else f"{text[:longest]} …")


def _asset(name: str) -> str:
    return (files("perfguard") / name).read_text(encoding="utf-8")
