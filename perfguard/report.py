"""The report of a guarded study: the summary, the pictures and a table of the trials, as one HTML file that needs no network.

The page is `report.html`, in which Jinja escapes all that users name. A content security policy allows the page's own scripts by
their hashes and nothing else, so a name that looks like a script would not run either.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfguard import __version__
from perfguard.exceptions import ConfigurationError, LogError
from perfguard.explain import log_error
from perfguard.plots import OUTCOMES, graph_objects, outcome_of, plot_account, plot_budget, plot_savings
from perfguard.quantities import SPECS, Quantity, format_quantity, format_seconds
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


def write_report(source: object, path: str | os.PathLike[str], *, study: str | None = None) -> Path:
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


def read_report(source: object, *, study: str | None = None) -> Report:
    """Read the report of a guarded study or of a measurement log.

    Args:
        source: an Optuna study, the URL or the file of its storage, a MeasurementStore, or the file or URL of a measurement log.
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
        except (ImportError, AttributeError):  # its tuner is not installed, or it is of another version
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
    from jinja2 import Environment
    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    shown = report.records[-max_rows:]
    summary = report.summary
    known = {quantity for record in shown for quantity in record.predicted}
    # The time by which most trials can be compared: of the whole trial, else of a step.
    times: tuple[Quantity, ...] = ("time", "step_time", "epoch_time", "latency")
    compared = [quantity for quantity in ("memory", next((time for time in times if time in known), "time")) if quantity in known]
    limited = {quantity for record in shown for quantity in record.limits}
    quantities = [quantity for quantity in QUANTITIES if quantity in limited or quantity in compared]
    several = len({record.study for record in shown}) > 1
    pairs = [f"{SPECS[quantity].noun.capitalize()}, {number}" for quantity in quantities for number in ("predicted", "measured")]
    look: Any = {
        "full_html": False,
        "include_plotlyjs": False,
        "default_width": "100%",
        "default_height": "100%",
        "config": {"responsive": True, "displayModeBar": False},
    }
    pictures = [plot_savings(shown), *(plot_budget(shown, quantity=quantity) for quantity in compared)]
    pictures += [picture for quantity in compared if (picture := _account_picture(shown, quantity)) is not None]
    titles = [(picture.layout.meta["title"], picture.layout.meta["subtitle"]) for picture in pictures]
    for picture in pictures:  # a title in a picture is one line, which a phone cuts
        picture.update_layout(title=None, margin={"t": 20})
    plots = [to_html(picture, **look) for picture in pictures]
    plotly = get_plotlyjs()
    script = _asset("report.js")
    scripts = [plotly, script, *re.findall(r"<script[^>]*>(.*?)</script>", "".join(plots), flags=re.DOTALL)]
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts)
    page = Environment(autoescape=True)
    page.filters["cut"] = lambda text, longest=400: text if len(text) <= longest else f"{text[:longest]} …"
    return page.from_string(_asset("report.html")).render(
        report=report,
        summary=summary,
        figures={
            "trials ran": f"{summary.num_launched:,}",
            "pruned before launch": f"{summary.num_pruned:,}",
            "broke a budget": f"{summary.num_violations:,} of {summary.num_measured:,} measured" if summary.num_measured else "-",
            "time saved (predicted)": "-" if summary.saved_s is None else format_seconds(summary.saved_s),
            "time of the guard": "-" if summary.cost is None else summary.cost.in_short,
        },
        plots=list(zip(titles, plots, strict=True)),
        hidden=len(report.records) - len(shown),
        heads=["Trial", *(["Study"] if several else []), "Outcome", "Reason", *pairs, "Hyperparameters"],
        several=several,
        rows=[_row(record, index, quantities) for index, record in enumerate(shown)],
        outcomes=OUTCOMES,
        counts=Counter(map(outcome_of, shown)),
        css=_asset("report.css"),
        plotly=plotly,
        script=script,
        digests=" ".join(f"'sha256-{digest}'" for digest in digests),
        version=__version__,
    )


def _account_picture(records: Sequence[TrialRecord], quantity: Quantity) -> Any:
    """Draw the account of the prediction that is furthest from its measurement; without a measurement, of the newest.

    None: no prediction has an account.
    """
    known = [record for record in reversed(records) if quantity in record.predicted and record.predicted[quantity].stages]
    if not known:
        return None
    record = max(known, key=lambda one: log_error(one, quantity))
    which = "the newest" if log_error(record, quantity) < 0 else "the furthest from its measurement"
    return plot_account(
        record.predicted[quantity],
        quantity=quantity,
        of=f"trial {record.trial_id if record.number is None else record.number}, {which}",
        measured=record.counted(quantity),
        limit=record.limits.get(quantity),
    )


def _row(record: TrialRecord, index: int, quantities: Sequence[Quantity]) -> dict[str, Any]:
    """The cells of a trial."""
    numbers = []
    for quantity in quantities:
        estimate = record.predicted.get(quantity)
        measured = record.counted(quantity)
        interval = "" if estimate is None else " to ".join(format_quantity(quantity, end) for end in estimate.interval())
        for value, small in ((None if estimate is None else estimate.median, interval), (measured, "")):
            numbers.append(("", "–", "") if value is None else (repr(value), format_quantity(quantity, value), small))
    not_modelled = "" if record.verdict is None else record.verdict.unmodelled
    reasons = (
        record.reason,
        f"not modelled: {not_modelled}" if not_modelled else "",
        "" if record.status in (None, "ok") else str(record.status),
        record.not_measured,
    )
    values = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in flat(record.params).items()}
    return {
        "outcome": outcome_of(record),
        "number": index + 1 if record.number is None else record.number,
        "study": record.study,
        "reason": "; ".join(filter(None, reasons)),
        "numbers": numbers,
        "params": ", ".join(f"{name}={value}" for name, value in values.items()),
    }


def flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return hyperparameters without nesting: ``{"model": {"width": 8}}`` gives ``{"model/width": 8}``."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}/") if nested else {f"{prefix}{name}": value}
    return found


def _asset(name: str) -> str:
    return (files("perfguard") / name).read_text(encoding="utf-8")
