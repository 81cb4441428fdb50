"""Where a report comes from: a study of an integration, or a measurement log."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perfguard.exceptions import ConfigurationError, LogError
from perfguard.report._data import Report
from perfguard.report._log_reader import report_of_log
from perfguard.report._page import page_of

if TYPE_CHECKING:
    from perfguard.log import MeasurementStore

READERS_GROUP = "perfguard.reports"
"""Entry-point group of functions ``read(source, study, log)`` that return a :class:`Report`. They return None for a source that
they do not know. ``study`` is a name or None, and ``log`` an open measurement log or None."""
Reader = Callable[[Any, "str | None", "MeasurementStore | None"], "Report | None"]


def write_report(
    source: Any,
    path: str | os.PathLike[str],
    *,
    study: str | None = None,
    log: str | os.PathLike[str] | Literal[False] | None = None,
) -> Path:
    """Write the report of a guarded study or of a measurement log as one HTML file. It needs no network.

    Example:
        >>> write_report(study, "report.html")                                                      # doctest: +SKIP
        >>> write_report("sqlite:///optuna.db", "report.html", study="resnet")                      # doctest: +SKIP
        >>> write_report("log.db", "report.html")                                                   # doctest: +SKIP

    Args:
        source: as for :func:`read_report`.
        path: the file to write. Its folder is made if it is not there.
        study: as for :func:`read_report`.
        log: as for :func:`read_report`.

    Returns:
        The path.

    Raises:
        ConfigurationError: for a source that cannot be read, a file that cannot be written, or without Plotly.
        LogError: for a log that cannot be used.
    """
    page = page_of(read_report(source, study=study, log=log))
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(page.encode("utf-8", "replace"))  # a name may hold half of a surrogate pair
    except OSError as error:
        raise ConfigurationError(f"The report cannot be written to {str(file)!r}: {error.strerror or error}") from error
    return file


def read_report(source: Any, *, study: str | None = None, log: str | os.PathLike[str] | Literal[False] | None = None) -> Report:
    """Read the report of a guarded study or of a measurement log.

    Args:
        source: an Optuna study, the URL or the file of its storage, the search of a Ray Tune run, a MeasurementStore, or the
            file or URL of a measurement log.
        study: the study's name, where ``source`` has several. A log is reported as a whole without it.
        log: the measurement log of a study, for drift, learning and doubtful readings. None: the default log, if it is there.
            False: none.

    Raises:
        ConfigurationError: for a source that cannot be read.
        LogError: for a log that cannot be used.
    """
    from perfguard.log import MeasurementStore

    if isinstance(source, MeasurementStore):
        return report_of_log(source, study)
    if isinstance(source, (str, os.PathLike)):
        source = os.fspath(source)
        if "://" not in source and not Path(source).is_file():
            raise ConfigurationError(
                f"There is no file {source!r}. Give a measurement log, or the storage of an Optuna study, "
                "for instance sqlite:///optuna.db with --study NAME."
            )
        if is_log(source):
            with MeasurementStore(source) as store:
                return report_of_log(store, study)
    with _log_of_study(log) as store_or_none:
        for point in entry_points(group=READERS_GROUP):
            try:
                reader: Reader = point.load()
            except ImportError:  # its host is not installed
                continue
            report = reader(source, study, store_or_none)
            if report is not None:
                return report
    what = "The database" if isinstance(source, str) and "://" in source else repr(source)  # a URL may have a password
    raise ConfigurationError(
        f"{what} is neither a measurement log nor a study that an installed integration can read. "
        "For an Optuna study: pip install 'perfguard[optuna]'."
    )


def is_log(location: str) -> bool:
    """Whether a file or a URL is that of a measurement log."""
    return {"meta", "decisions"} <= tables_in(location)


def tables_in(location: str) -> set[str]:
    """Return the names of the tables of a database, given as a URL or as an SQLite file. Empty: it is no database.

    Raises:
        ConfigurationError: if the database of a URL cannot be opened.
    """
    from sqlalchemy import URL, create_engine, inspect, make_url
    from sqlalchemy.exc import ArgumentError, DatabaseError, SQLAlchemyError

    try:
        url = make_url(location) if "://" in location else URL.create("sqlite", database=str(Path(location).absolute()))
        if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
            raise ConfigurationError(f"There is no database at {location!r}.")
        engine = create_engine(url)
        try:
            return set(inspect(engine).get_table_names())
        finally:
            engine.dispose()
    except DatabaseError as error:
        if "://" not in location and "not a database" in str(error.orig):
            return set()
        raise ConfigurationError(f"The database cannot be opened: {error.orig}") from error
    except ArgumentError as error:
        raise ConfigurationError(f"That is no URL of a database: {error}") from error
    except (SQLAlchemyError, ImportError) as error:
        raise ConfigurationError(f"The database cannot be opened: {error}") from error


@contextmanager
def _log_of_study(log: str | os.PathLike[str] | Literal[False] | None) -> Iterator[MeasurementStore | None]:
    """The log that was named; else the default one, if it is there and can be used."""
    from perfguard.log import MeasurementStore, default_location

    location = os.fspath(log) if log else default_location()
    is_missing = "://" not in location and not Path(location).is_file()
    if log is False or (log is None and is_missing):
        yield None
        return
    if is_missing:
        raise LogError(f"There is no measurement log at {location}.")
    try:
        store = MeasurementStore(location)
    except LogError:
        if log is not None:
            raise
        yield None
        return
    with store:
        yield store
