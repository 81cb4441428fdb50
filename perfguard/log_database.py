"""The database of a measurement log: SQLite or PostgreSQL, opened when it is needed, checked, made, and written to.

While it is locked, full or away, rows wait in files beside it: see :meth:`Database.keep`.
"""

from __future__ import annotations

import base64
import functools
import glob
import json
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DatabaseError, DataError, IntegrityError, NoSuchModuleError, OperationalError
from sqlalchemy.pool import StaticPool

from perfguard.exceptions import ConfigurationError, LogError, LogWarning, warn_user
from perfguard.log_location import data_directory
from perfguard.log_tables import LOG_FORMAT, Base, GraphRow, MetaRow, Row

_ELSEWHERE = "Give another path, for instance in the environment variable PERFGUARD_LOG."
_DAMAGED = (ValueError, KeyError, TypeError, RecursionError, OverflowError, IntegrityError, DataError)  # rows beside the log


class Database:
    """The database of a log, and the files beside it. Whoever uses it holds the store's lock."""

    def __init__(self, url: sql.URL, busy_timeout_s: float) -> None:
        self.url = url
        self.busy_timeout_s = busy_timeout_s
        self.in_memory = _is_memory(url)
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self.file = Path(str(url.database)) if self.is_sqlite and not self.in_memory else None
        self.name = ":memory:" if self.in_memory else str(self.file or url.render_as_string(hide_password=True))
        self.engine = _make_engine(url, busy_timeout_s)
        self.is_open = False
        self._beside = self.file or data_directory() / f"log-{sha256(self.name.encode()).hexdigest()[:12]}"
        self._is_write_ahead = False
        self._seen: tuple[int, ...] | None = None
        self.retry_at_s = 0.0

    @property
    def is_away(self) -> bool:
        """Whether the database was away a moment ago, so that it is not tried again yet."""
        return time.monotonic() < self.retry_at_s

    def _look(self) -> tuple[int, ...] | None:
        """What tells that the file is another one, or was overwritten. None: there is no file.

        With a write-ahead log, the file itself changes only at a checkpoint, every some thousand trials. Any other change is
        somebody else's. SQLite would not notice, and go on to write into a file that nobody can open any more.
        """
        if self.file is None or not self.file.exists():
            return None
        status = self.file.stat()
        identity = status.st_dev, status.st_ino
        return (*identity, status.st_size, status.st_mtime_ns) if self._is_write_ahead else identity

    def open(self) -> None:
        """Check the log if it was not open or its file has changed, make it if it is new, and bring in the rows beside it.

        A log that is damaged, not ours to use, or cannot be opened, is a LogError.
        """
        seen = self._look()
        before = self._seen
        if self.is_open and seen == before:
            return
        was_open = self.is_open
        self.is_open = False
        if self.file is not None:
            self.engine.dispose()  # its connection may have pages of another file in its cache
            self.file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.engine.connect() as connection:
                is_new = self._check(connection)
            if is_new:
                self._make()
            if self.file is not None:
                with self.engine.connect() as connection:
                    self._is_write_ahead = _write_ahead(connection)
            self._bring_in()
        except DatabaseError as error:
            if type(error) is DatabaseError and self.file is not None:  # SQLite: malformed, or not a database
                raise self._corrupt(reason_of(error)) from error
            if "unable to open" in str(error.orig):
                raise LogError(unusable(self.name, reason_of(error))) from error
            raise
        self.is_open = True
        self._seen = self._look()
        if was_open and (is_new or (before or ())[:2] != (seen or ())[:2]):
            warn_user(f"The measurement log {self.name} was moved or removed; another is begun there.", LogWarning)

    def _make(self) -> None:
        with self.transaction() as connection:
            if not self.is_sqlite:  # two workers may make the log at once; SQLite has one writer anyway
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('perfguard'))")
            if self._format_in(connection) is None:
                Base.metadata.create_all(connection)
                connection.execute(sql.insert(MetaRow), {"key": "format", "value": LOG_FORMAT})

    def _check(self, connection: sql.Connection) -> bool:
        """Whether the log is new; raises if it is damaged, or not ours to use."""
        # A larger file is not read through: that takes seconds a gigabyte.
        if self.file is not None and self.file.exists() and self.file.stat().st_size <= 256 * 2**20:
            result = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if result != "ok":
                raise self._corrupt(" ".join(str(result).split()))
        return self._format_in(connection) is None

    def _format_in(self, connection: sql.Connection) -> str | None:
        """The format of the log. None: there is no log yet."""
        names = sql.inspect(connection).get_table_names()
        if "meta" not in names:
            if names and self.file is not None:
                raise self._corrupt("an SQLite file with other tables")
            return None
        found: str = connection.execute(sql.select(MetaRow.value).where(MetaRow.key == "format")).scalar() or ""
        if not found.isdecimal():
            raise self._corrupt(f"its format is {found!r}")
        if found != LOG_FORMAT:
            is_what = f"has format {found}, this PerfGuard reads {LOG_FORMAT}; it is left as it is"
            hint = "Update perfguard. " if int(found) > int(LOG_FORMAT) else ""  # no released version has made an older one
            raise LogError(f"The measurement log {self.name} {is_what}. {hint}{_ELSEWHERE}")
        return found

    def _corrupt(self, reason: str) -> LogError:
        return LogError(
            f"{self.name} is no measurement log, or is damaged ({reason}); it is left as it is. "
            "Move it away, or give another path."
        )

    @contextmanager
    def transaction(self) -> Iterator[sql.Connection]:
        """A connection that commits at the end; left early, it rolls back as it returns to the pool."""
        with self.engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE" if self.is_sqlite else "BEGIN")
            yield connection
            connection.exec_driver_sql("COMMIT")
        if self.is_open:
            self._seen = self._look()  # the commit may have ended in a checkpoint

    def write(self, rows: Sequence[Row]) -> None:
        """Open the log and write ``rows`` in one transaction."""
        self.open()
        if rows:
            with self.transaction() as connection:
                _put(connection, rows)

    def keep(self, rows: list[Row]) -> None:
        """Move ``rows`` to a new file beside the log, one a line, where they outlive the process.

        The file has its name when it is complete, and nobody adds to it. So any process may bring it in and remove it.
        """
        if self.in_memory:
            return
        path = self._beside.with_name(f"{self._beside.name}.{uuid.uuid4().hex}.rows.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            part.write_text("".join(map(_as_line, rows)), encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        rows.clear()

    def _bring_in(self) -> None:
        """Write the rows that wait beside the log: those of this process, and of others, dead or alive."""
        if self.in_memory:
            return
        for path in sorted(self._beside.parent.glob(f"{glob.escape(self._beside.name)}.{'[0-9a-f]' * 32}.rows.jsonl")):
            aside = path.with_suffix(".damaged")
            damaged = []
            reason = ""
            with suppress(FileNotFoundError):  # another process was quicker
                for line in path.read_bytes().splitlines(keepends=True):
                    try:
                        row = _row_in(line)
                        with self.transaction() as connection:  # of its own: a row that is refused takes no other with it
                            _put(connection, [row])
                    except _DAMAGED as error:  # it would be tried for ever
                        damaged.append(line)
                        reason = f"{type(error).__name__}: {reason_of(error)}"
                if damaged:
                    aside.write_bytes(b"".join(damaged))
                with suppress(OSError):  # the others are written, and a row that comes twice is there once
                    path.unlink()
            if damaged:
                what = f"{len(damaged)} rows that waited in {path} are damaged ({reason})"
                warn_user(f"{what}; they were set aside as {aside}.", LogWarning)


def _as_line(row: Row) -> str:
    document = {"table": row.table, "row": row.values}
    return json.dumps(document, default=lambda graph: base64.b64encode(graph.to_bytes()).decode()) + "\n"


def _row_in(line: bytes) -> Row:
    """The row that :func:`_as_line` wrote. Its columns are checked, since SQLite stores a text where a number is meant."""
    document = json.loads(line)
    name = document["table"]
    values = document["row"]
    columns = Base.metadata.tables[name].columns
    if set(values) != set(columns.keys()):
        raise ValueError(f"a row of table {name!r} has other columns")
    for column in columns:
        value = values[column.name]
        kind = column.type.python_type
        if kind is bytes:
            values[column.name] = base64.b64decode(value)
        elif value is not None and not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"{column.name} of table {name!r} is {value!r}")
    return Row(name, values)


def _put(connection: sql.Connection, rows: Sequence[Row]) -> None:
    for name, values in rows:
        if name == "graphs":
            known = sql.select(GraphRow.content_hash).where(GraphRow.content_hash == values["content_hash"])
            if connection.execute(known).first() is not None:
                continue  # so its bytes are not made
            if not isinstance(values["data"], bytes):  # the row itself keeps its graph: it may be refused, and has to wait
                values = values | {"data": values["data"].to_bytes()}  # noqa: PLW2901
        connection.execute(_insert_into(name, connection.dialect.name), values)


@functools.cache
def _insert_into(name: str, dialect: str) -> Any:
    """Return the statement that inserts a row into a table. A row whose key is there already stays as it is.

    The exception is the measurement of an interrupted run: a later one replaces it.
    """
    table = Base.metadata.tables[name]
    statement: Any = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[dialect](table)
    if name != "measurements":
        return statement.on_conflict_do_nothing()
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=["decision_id"],
        set_={column.name: new[column.name] for column in table.columns if column.name != "decision_id"},
        where=(table.c.status == "interrupted") & (new.recorded_at_ns > table.c.recorded_at_ns),
    )


def leave(rows: list[Row], database: Database) -> None:
    """Close the database, and leave what waits beside it. Also runs when the store is collected and at the end of the process."""
    database.is_open = False
    database.engine.dispose()
    if rows:
        try:
            database.keep(rows)
        except OSError as error:
            what = f"{len(rows)} rows of the measurement log {database.name} are lost"
            warn_user(f"{what}: no file beside it can be written ({error}).", LogWarning)
    rows.clear()


def parse_url(location: str) -> sql.URL:
    try:
        url = sql.make_url(location) if "://" in location else sql.URL.create("sqlite", database=location)
    except ArgumentError as error:
        raise ConfigurationError(
            "The measurement log's URL must look like postgresql+psycopg://user@host/database, but it cannot be read."
        ) from error
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigurationError(f"The measurement log lives in SQLite or PostgreSQL, but got a URL of {url.drivername!r}.")
    if url.get_backend_name() == "sqlite" and not _is_memory(url):
        return url.set(database=str(Path(str(url.database)).expanduser().absolute()))
    return url


def _is_memory(url: sql.URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def _make_engine(url: sql.URL, busy_timeout_s: float) -> sql.Engine:
    """An engine that keeps one connection open between calls, without a lock: opening one costs more than writing a row."""
    options: dict[str, Any] = {"pool_size": 1, "pool_pre_ping": True}  # a server may have gone and come back
    if url.get_backend_name() == "sqlite":
        options = {"connect_args": {"timeout": busy_timeout_s, "check_same_thread": False}}
        options |= {"poolclass": StaticPool} if _is_memory(url) else {"pool_size": 1}
    elif "psycopg" in url.get_driver_name():
        options["connect_args"] = {"connect_timeout": max(1, math.ceil(busy_timeout_s))}
    try:
        engine = sql.create_engine(url, isolation_level="AUTOCOMMIT", **options)
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise ConfigurationError(
            f"The measurement log's URL needs a driver for {url.drivername!r} ({error}): pip install 'perfguard[postgres]'."
        ) from error
    if url.get_backend_name() == "sqlite":
        # Ids are random, so in a long log each row lands on other pages of the indices. They must not be read, and moved into the
        # main file, one by one: so the cache has 64 MiB, and a checkpoint takes 8,000 pages.
        pragmas = "PRAGMA cache_size=-65536; PRAGMA wal_autocheckpoint=8000"
        sql.event.listen(engine, "connect", lambda connection, _: connection.executescript(pragmas))
    return engine


def _write_ahead(connection: sql.Connection) -> bool:
    """Let readers continue while one process writes, and skip the sync to disk at each commit, which costs milliseconds.

    A commit still survives the death of the process. A power cut may lose the last rows, but never damages the log
    (sqlite.org/pragma.html#pragma_synchronous). A network disk has no write-ahead log (False). There each commit is synced.
    """
    with suppress(OperationalError):
        if connection.exec_driver_sql("PRAGMA journal_mode=WAL").scalar() == "wal":
            connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
            return True
    return False


def unusable(name: str, reason: object) -> str:
    return f"The measurement log {name} cannot be opened: {reason}. {_ELSEWHERE}"


def reason_of(error: Exception) -> str:
    """The driver's error message on one line, without SQLAlchemy's statement and link."""
    return " ".join(str(getattr(error, "orig", None) or error).split())
