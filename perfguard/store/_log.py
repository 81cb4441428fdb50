"""The database of the measurement log: opened when it is needed, checked, brought to the present schema, written and paused."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, func, inspect, select, update
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from perfguard.exceptions import LogCorruptError, LogError, LogVersionError, LogWarning, warn_user
from perfguard.log import _schema as schema
from perfguard.store._database import INSERT, identity_of, is_memory, make_engine, write_ahead
from perfguard.store._migrations import migrate
from perfguard.store._retention import ROWS_AT_ONCE
from perfguard.store._schema import SCHEMA_VERSION, Entry

TROUBLE = (SQLAlchemyError, OSError, LogError)
"""Errors of a database that is away, locked or damaged."""
_MAX_CHECKED_BYTES = 256 * 2**20
"""A larger SQLite file is not read through at each opening: that takes seconds a gigabyte."""
_PATIENCE = 10
_LONG_S = 0.2
"""A call that waited longer than this in vain for the database is followed by ten times that wait without a new try."""
_ELSEWHERE = "Give another path, for instance in the environment variable PERFGUARD_LOG."


class Log:
    """One measurement log and the way to it. Whoever uses it holds :attr:`lock`.

    Args:
        url: of an SQLite file, of SQLite in memory, or of PostgreSQL.
        busy_timeout_s: how long a call waits for another process's lock, or for the server.
    """

    def __init__(self, url: URL, busy_timeout_s: float) -> None:
        self.url = url
        self.busy_timeout_s = busy_timeout_s
        self.in_memory = is_memory(url)
        self.file = Path(str(url.database)) if url.get_backend_name() == "sqlite" and not self.in_memory else None
        self.name = str(self.file or url.render_as_string(hide_password=True))
        self.spool_base = None if self.in_memory else self.file or data_directory() / f"log-{_short_hash(self.name)}"
        self.engine = make_engine(url, busy_timeout_s)
        self.insert_into = INSERT[url.get_backend_name()]
        self.lock = threading.RLock()
        self.sent_graphs: set[str] = set()
        """Content hashes of graphs that the database has, or that wait for it."""
        self._retry_at_s = 0.0
        self._last_ns = 0
        self._ready = False
        self._file_identity: tuple[int, int] | None = None
        self._warned = False

    def after_fork(self) -> None:
        """Make a new lock in a forked child, and leave the connections to the parent."""
        self.lock = threading.RLock()
        if not self.in_memory:
            _of_parents.append(self.engine)
            self.engine = make_engine(self.url, self.busy_timeout_s)
            self._ready = False

    @property
    def is_away(self) -> bool:
        """Whether the database was away a moment ago, so that it is not tried again yet."""
        return time.monotonic() < self._retry_at_s

    def reopen_later(self) -> None:
        """Check the log again before it is used next."""
        self._ready = False

    def pause_after(self, begun_s: float) -> None:
        """Pause after an attempt that began at ``begun_s`` and failed. One that failed at once may be repeated."""
        waited_s = time.monotonic() - begun_s
        self._retry_at_s = time.monotonic() + _PATIENCE * waited_s if waited_s > _LONG_S else 0.0

    def now_ns(self) -> int:
        """Return the time, in nanoseconds since 1970. It strictly increases, so that rows keep their order."""
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        return self._last_ns

    def prepare(self) -> None:
        """Check the log; make it if it is new, bring it to the present schema if it is old. Else it is only read."""
        if self._ready and (self.file is None or self._file_identity == identity_of(self.file)):
            return
        was_replaced = self._ready
        if was_replaced:
            self._ready = False
            self.engine.dispose()  # or rows would go into a file that cannot be opened any more
            self.sent_graphs.clear()
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.engine.connect() as connection:
                version = self._check_schema(connection)
            num_aside = 0
            if version != SCHEMA_VERSION:
                with self.transaction() as connection:
                    self.wait_for_turn(connection, "perfguard")  # two workers may open the log at once
                    num_aside = self._make_tables(connection, self._schema_version(connection))
            if self.file is not None:
                with self.engine.connect() as connection:
                    write_ahead(connection)
        except DatabaseError as error:
            if type(error) is DatabaseError and self.file is not None:  # SQLite: malformed, or not a database
                raise LogCorruptError(_corrupt(self.file, reason_of(error))) from error
            if "unable to open" in str(error.orig):
                raise LogError(unusable(self.name, reason_of(error))) from error
            raise
        self._file_identity = None if self.file is None else identity_of(self.file)
        self._ready = True
        if num_aside:
            self._warn_of_the_absent(num_aside)
        if was_replaced:
            message = f"The measurement log {self.name} was moved or removed; another is begun there."
            warn_user(message, LogWarning)

    def _warn_of_the_absent(self, number: int) -> None:
        warn_user(
            f"{number} readings in the measurement log {self.name} were booked to a device that was not there. They are set "
            "aside now, and nothing is learnt from them any more. `perfguard log quarantine` lists them. If weights were "
            "fine-tuned on this log (`perfguard weights list`), `perfguard weights rollback` takes them out of use.",
            LogWarning,
        )

    def _make_tables(self, connection: Connection, version: int | None) -> int:
        """Bring the log from schema ``version`` (None: empty) to the present one; the lock is held.

        Returns:
            How many readings the way there has set aside.
        """
        if version is None:
            schema.metadata.create_all(connection)
            self.put(connection, [Entry("meta", {"key": "schema_version", "value": str(SCHEMA_VERSION)})])
        elif version < SCHEMA_VERSION:  # another process may have been quicker
            migrate(connection, version, SCHEMA_VERSION)
            row = update(schema.meta).where(schema.meta.c.key == "schema_version")
            connection.execute(row.values(value=str(SCHEMA_VERSION)))
            if version < 4:
                is_aside = schema.measurements.c.set_aside.is_not(None)
                return int(connection.execute(select(func.count()).where(is_aside)).scalar_one())
        return 0

    def _check_schema(self, connection: Connection) -> int | None:
        """The log's schema, None if it is empty; raises if the log is damaged, or not ours to use."""
        if self.file is not None and self.file.exists() and self.file.stat().st_size <= _MAX_CHECKED_BYTES:
            result = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if result != "ok":
                raise LogCorruptError(_corrupt(self.file, " ".join(str(result).split())))
        return self._schema_version(connection)

    def _schema_version(self, connection: Connection) -> int | None:
        tables = inspect(connection).get_table_names()
        if "meta" not in tables:
            if tables and self.file is not None:
                raise LogCorruptError(_corrupt(self.file, "an SQLite file with other tables"))
            return None
        version = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == "schema_version")).scalar()
        if version is None or not version.isdecimal():
            raise LogCorruptError(_corrupt(self.name, f"schema_version is {version!r}"))
        if int(version) > SCHEMA_VERSION:
            raise LogVersionError(
                f"The measurement log {self.name} has schema {version}, this PerfGuard reads up to {SCHEMA_VERSION}; "
                f"it is left as it is. Update perfguard. {_ELSEWHERE}"
            )
        return int(version)

    def put(self, connection: Connection, entries: Iterable[Entry]) -> int:
        """Insert rows and return how many were new.

        A row whose key is there already stays as it is. The exception is a measurement of an interrupted run: a later one
        replaces it.
        """
        num_new = 0
        for (name, _columns), group in groupby(entries, key=lambda entry: (entry.table, tuple(entry.row))):
            rows = [entry.row for entry in group]
            statement = self.insert_into(schema.metadata.tables[name])
            if name == "measurements":
                statement = statement.on_conflict_do_update(**schema.replacing_interrupted(statement.excluded))
            else:
                statement = statement.on_conflict_do_nothing()
            for start in range(0, len(rows), ROWS_AT_ONCE):
                chunk = rows[start : start + ROWS_AT_ONCE]
                num_new += connection.execute(statement, chunk if len(chunk) > 1 else chunk[0]).rowcount
        return num_new

    def wait_for_turn(self, connection: Connection, what: str) -> None:
        """Wait until no other transaction does ``what`` on PostgreSQL. SQLite has one writer anyway."""
        if self.url.get_backend_name() == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock(hashtext('{what}'))")

    @contextmanager
    def writing(self) -> Iterator[Callable[[], AbstractContextManager[Connection]]]:
        """Give transactions for rows that must not wait in a spool. Any database error becomes a LogError."""
        with self.lock:
            try:
                self.prepare()
                yield self.transaction
            except LogError:
                raise
            except (SQLAlchemyError, OSError) as error:
                self._ready = False
                raise self.unusable_now(error) from error

    def unusable_now(self, error: Exception) -> LogError:
        return LogError(f"The measurement log {self.name} cannot be used now: {reason_of(error)}.")

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A connection that commits at the end; left early, it rolls back as it returns to the pool."""
        with self.engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE" if self.url.get_backend_name() == "sqlite" else "BEGIN")
            yield connection
            connection.exec_driver_sql("COMMIT")

    def warn(self, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        warn_user(
            f"The measurement log {self.name} cannot be used now ({reason_of(error)}). Rows are kept and written later, at the "
            f"latest when the log is opened again. Close the program that locks it, or fix the cause.",
            LogWarning,
        )


_of_parents: list[Engine] = []
"""Connections of the parent in a forked child. They are never closed, because closing would end the parent's."""


def _corrupt(file: Path | str, reason: str) -> str:
    return f"{file} is no measurement log, or is damaged ({reason}); it is left as it is. Move it away, or give another path."


def unusable(name: str, reason: object) -> str:
    return f"The measurement log {name} cannot be opened: {reason}. {_ELSEWHERE}"


def reason_of(error: Exception) -> str:
    """The driver's error message on one line, without SQLAlchemy's statement and link."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _short_hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:12]


def data_directory() -> Path:
    """The user's data directory by the convention of the platform."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "perfguard"


def default_location() -> str:
    """The path or URL in the environment variable PERFGUARD_LOG, else the file of the user's own log."""
    return os.environ.get("PERFGUARD_LOG") or str(data_directory() / "log.db")
