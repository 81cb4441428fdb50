"""Access to the log's database: its URL, its connections, and error messages without secrets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError
from sqlalchemy.pool import QueuePool, StaticPool

from perfguard.exceptions import ConfigurationError

INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}

# Ids are random, so in a long log each row lands on other pages of the indices; they must not be read, and moved into the main
# file, one by one.
_CACHE_KIB = 64 * 1024
_CHECKPOINT_PAGES = 8000


def parse_url(location: str) -> URL:
    try:
        url = make_url(location) if "://" in location else URL.create("sqlite", database=location)
    except ArgumentError as error:
        raise ConfigurationError(
            "The measurement log's URL must look like postgresql+psycopg://user@host/database, but it cannot be read."
        ) from error
    if url.get_backend_name() not in INSERT:
        raise ConfigurationError(f"The measurement log lives in SQLite or PostgreSQL, but got a URL of {url.drivername!r}.")
    if url.get_backend_name() == "sqlite" and not is_memory(url):
        return url.set(database=str(Path(str(url.database)).expanduser().absolute()))
    return url


def is_memory(url: URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def make_engine(url: URL, busy_timeout_s: float) -> Engine:
    """Make an engine that keeps one connection open between calls, without a lock.

    Opening a connection costs more than writing a row. When the last connection closes, SQLite moves all new rows into the main
    file.
    """
    is_sqlite = url.get_backend_name() == "sqlite"
    arguments: dict[str, Any] = {}
    if is_sqlite:
        arguments = {"timeout": busy_timeout_s, "check_same_thread": False}
    elif "psycopg" in url.get_driver_name():
        arguments = {"connect_timeout": max(1, math.ceil(busy_timeout_s))}
    # A server may have gone and come back since the last call.
    pool: dict[str, Any] = {"pool_size": 1, "pool_pre_ping": not is_sqlite}
    try:
        engine = create_engine(
            url,
            connect_args=arguments,
            isolation_level="AUTOCOMMIT",
            **({"poolclass": StaticPool} if is_memory(url) else {"poolclass": QueuePool} | pool),
        )
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise ConfigurationError(
            f"The measurement log's URL needs a driver for {url.drivername!r} ({error}): pip install 'perfguard[postgres]'."
        ) from error
    if is_sqlite:
        event.listen(engine, "connect", _set_up_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: object) -> None:
    connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")


def write_ahead(connection: Connection) -> None:
    """Let readers continue while one process writes, and skip the sync to disk at each commit, which costs milliseconds.

    A commit still survives the death of the process. A power cut may lose the last rows, but never damages the log
    (sqlite.org/pragma.html#pragma_synchronous). A network disk has no write-ahead log. There each commit is synced.
    """
    with suppress(OperationalError):
        if connection.exec_driver_sql("PRAGMA journal_mode=WAL").scalar() == "wal":
            connection.exec_driver_sql("PRAGMA synchronous=NORMAL")


def identity_of(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def savepoint(connection: Connection) -> Iterator[None]:
    """Undo the block's statements, and no others, if it raises. (PostgreSQL ends a transaction in which one failed.)"""
    connection.exec_driver_sql("SAVEPOINT perfguard")
    try:
        yield
    except BaseException:
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT perfguard")
        raise
    connection.exec_driver_sql("RELEASE SAVEPOINT perfguard")
