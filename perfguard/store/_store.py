"""MeasurementStore: the log that never stops a study and never loses a row."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import URL, Connection, Engine, Row, Select, create_engine, inspect, make_url, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DataError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.pool import NullPool, StaticPool

from perfguard.exceptions import ConfigurationError, LogCorruptError, LogError, LogVersionError, LogWarning, WorkloadError
from perfguard.predictor import Observation, Prediction
from perfguard.store import _schema as schema
from perfguard.store._schema import SCHEMA_VERSION, Entry, LoggedDecision
from perfguard.store._spool import find_spools, read_spool, write_spool

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.guard import Action
    from perfguard.measure import Measurement

T = TypeVar("T")

_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_MAX_CACHED_GRAPHS = 512
_TROUBLE = (SQLAlchemyError, OSError, LogError)
_NEVER_WRITABLE = (DataError, IntegrityError, OverflowError, ValueError)


class MeasurementStore:
    """The measurement log: every verdict, and what the launched trials cost.

    Opening says clearly when the log cannot be used. After that no trouble with the database reaches the study: a row that
    cannot be written now (locked, disk full, server away) is kept, in order, with one :class:`LogWarning`, and is delivered
    with the next record or flush. What is left at the end goes to a spool file beside the log, which the next opening of the
    log delivers. Safe to share between threads and processes; a fork or a pickle takes no waiting rows along. A store in
    ":memory:" ends with :meth:`close` and pickles as an empty one.

    Example:
        >>> with MeasurementStore(":memory:") as store:
        ...     decision_id = store.record_decision(
        ...         study="demo", trial=0, graph=None, device=None, action="launch",
        ...         reason="fits", prediction=None, params={"lr": 0.1},
        ...     )
        ...     store.decisions("demo")[0].params
        {'lr': 0.1}

    Args:
        location: path of an SQLite file, made with its directory if it is missing; ":memory:"; or a SQLAlchemy URL of SQLite
            or PostgreSQL.
        busy_timeout_s: how long a call waits for another process's lock, or for the server.

    Raises:
        LogCorruptError: the file is damaged or is no measurement log; it is left as it is.
        LogVersionError: a newer PerfGuard wrote the log; it is left as it is.
        LogError: the file cannot be opened or made.
        ConfigurationError: a URL that cannot be used.
    """

    def __init__(self, location: str | os.PathLike[str], *, busy_timeout_s: float = 2.0) -> None:
        self._set_up(_url(os.fspath(location)), busy_timeout_s)
        with self._lock:
            try:
                self._prepare()
            except OSError as error:
                raise LogError(_unusable(self._name, error)) from error
            except SQLAlchemyError as error:
                self._warn(error)
            else:
                self._deliver()

    @classmethod
    def default(cls) -> MeasurementStore:
        """The log that the environment variable PERFGUARD_LOG names (path or URL), else the user's own."""
        return cls(os.environ.get("PERFGUARD_LOG") or _data_directory() / "log.db")

    def record_decision(
        self,
        *,
        study: str,
        trial: int | None,
        graph: OpGraph | None,
        device: Device | None,
        action: Action,
        reason: str,
        prediction: Prediction | None,
        params: Mapping[str, Any],
    ) -> str:
        """Log one verdict and return its id, which :meth:`record_measurement` takes. Values in ``params`` that JSON does not
        know are logged as text."""
        decision_id = uuid.uuid4().hex
        device_row = None if device is None else schema.device_entry(device)
        with self._lock:
            if graph is not None and graph.content_hash not in self._sent_graphs:
                self._queue.append(schema.graph_entry(graph))
                self._sent_graphs.add(graph.content_hash)
                self._remember(graph.content_hash, graph)
            if device_row is not None:
                self._queue.append(device_row)
            self._queue.append(
                schema.decision_entry(
                    prediction,
                    params,
                    decision_id=decision_id,
                    created_at_ns=self._now_ns(),
                    study=study,
                    trial=trial,
                    action=action,
                    reason=reason,
                    graph_hash=None if graph is None else graph.content_hash,
                    device_hash=None if device_row is None else device_row.row["content_hash"],
                )
            )
            self._deliver()
        return decision_id

    def record_measurement(self, decision_id: str, measurement: Measurement) -> None:
        """Log what the trial of that decision cost. Only the first measurement of a decision counts."""
        with self._lock:
            row = schema.measurement_entry(measurement, decision_id=decision_id, recorded_at_ns=self._now_ns())
            self._queue.append(row)
            self._deliver()

    def observations(self, device_id: str, limit: int = 500) -> list[Observation]:
        """The newest ``limit`` runs that ended well on that device and whose graph is known, oldest first."""
        rows = self._read(schema.select_observations(device_id, limit), self._observation)
        return [observation for observation in reversed(rows) if observation is not None]

    def device_ids(self) -> list[str]:
        """The devices that runs were measured on."""
        query = select(schema.measurements.c.device_id).distinct().where(schema.measurements.c.device_id.is_not(None))
        return self._read(query, lambda _, row: str(row.device_id))

    def decisions(self, study: str | None = None) -> list[LoggedDecision]:
        """Every decision of ``study``, or of all studies, with its measurement, oldest first."""
        return self._read(schema.select_decisions(study), lambda _, row: schema.decision_from_row(row))

    def flush(self) -> None:
        """Try once more to deliver what is waiting."""
        with self._lock:
            self._deliver()

    def close(self) -> None:
        """Deliver what is waiting, or leave it in the spool file. A later call opens the log again."""
        with self._lock:
            self._deliver()
            self._ready = False
            _leave(self._queue, self._spool_base, self._engine)

    def __enter__(self) -> MeasurementStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MeasurementStore({self._name!r})"

    def __getstate__(self) -> tuple[URL, float]:
        return self._url, self._busy_timeout_s

    def __setstate__(self, state: tuple[URL, float]) -> None:
        self._set_up(*state)

    def _set_up(self, url: URL, busy_timeout_s: float) -> None:
        self._url = url
        self._busy_timeout_s = busy_timeout_s
        self._in_memory = _is_memory(url)
        self._file = Path(str(url.database)) if url.get_backend_name() == "sqlite" and not self._in_memory else None
        self._name = str(self._file or url.render_as_string(hide_password=True))
        self._spool_base = None if self._in_memory else self._file or _data_directory() / f"log-{_short_hash(self._name)}"
        self._engine = _engine(url, busy_timeout_s)
        self._insert = _INSERT[url.get_backend_name()]
        self._lock = threading.RLock()
        self._queue: list[Entry] = []
        self._sent_graphs: set[str] = set()
        self._graphs: OrderedDict[str, OpGraph] = OrderedDict()
        self._last_ns = 0
        self._ready = False
        self._spool_delivered = self._spool_base is None
        self._warned = False
        weakref.finalize(self, _leave, self._queue, self._spool_base, self._engine)
        _stores.add(self)

    def _after_fork(self) -> None:
        """In the child: the rows that wait are the parent's to deliver, and its threads' lock is nobody's."""
        self._lock = threading.RLock()
        self._queue.clear()

    def _now_ns(self) -> int:
        """Strictly increasing within the store, so that rows keep their order."""
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        return self._last_ns

    def _prepare(self) -> None:
        """Check the log, and make it if it is new. Reads only, where the log exists."""
        if self._ready:
            return
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._engine.connect() as connection:
                is_new = self._check_schema(connection)
            if is_new:
                with self._transaction() as connection:
                    if self._url.get_backend_name() == "postgresql":  # two workers may open a new log at once
                        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('perfguard'))")
                    schema.metadata.create_all(connection)
                    self._put(connection, Entry("meta", {"key": "schema_version", "value": str(SCHEMA_VERSION)}))
            if self._file is not None:
                with suppress(OperationalError), self._engine.connect() as connection:  # a network disk has no WAL
                    connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        except DatabaseError as error:
            if type(error) is DatabaseError and self._file is not None:  # SQLite: malformed, or not a database
                raise LogCorruptError(_corrupt(self._file, _reason(error))) from error
            if "unable to open" in str(error.orig):
                raise LogError(_unusable(self._name, _reason(error))) from error
            raise
        self._ready = True

    def _check_schema(self, connection: Connection) -> bool:
        """Whether the log is empty; raises if it is not ours to use."""
        if self._file is not None and (result := connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()) != "ok":
            raise LogCorruptError(_corrupt(self._file, " ".join(str(result).split())))
        tables = inspect(connection).get_table_names()
        if "meta" not in tables:
            if tables and self._file is not None:
                raise LogCorruptError(_corrupt(self._file, "an SQLite file with other tables"))
            return True
        version = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == "schema_version")).scalar()
        if version is None or not version.isdecimal():
            raise LogCorruptError(_corrupt(self._name, f"schema_version is {version!r}"))
        if int(version) > SCHEMA_VERSION:
            raise LogVersionError(
                f"The measurement log {self._name} has schema {version}, this PerfGuard reads up to {SCHEMA_VERSION}; "
                f"it is left as it is. Update perfguard. {_ELSEWHERE}"
            )
        return False

    def _deliver(self) -> None:
        """Bring everything that waits to the database; the lock is held. Keeps it, and warns once, if that cannot be."""
        try:
            self._prepare()
            if not self._spool_delivered:
                self._deliver_spools()
            self._write(self._queue)
        except _TROUBLE as error:
            self._ready = False
            self._sent_graphs = {entry.row["content_hash"] for entry in self._queue if entry.table == "graphs"}
            self._warn(error)

    def _deliver_spools(self) -> None:
        assert self._spool_base is not None
        for path in find_spools(self._spool_base):
            try:
                entries = read_spool(path)
            except FileNotFoundError:  # another process was quicker
                continue
            except ValueError as error:
                aside = path.replace(path.with_suffix(".damaged"))
                warnings.warn(f"The spool {path} is damaged ({error}); it was set aside as {aside}.", LogWarning, stacklevel=4)
                continue
            self._write(entries)
            with suppress(OSError):
                path.unlink()
        self._spool_delivered = True

    def _write(self, entries: list[Entry]) -> None:
        """Write ``entries`` in one transaction and empty the list. A row that can never be written is dropped, loudly."""
        while entries:
            try:
                with self._transaction() as connection:
                    for entry in entries:
                        self._put(connection, entry)
                entries.clear()
            except _NEVER_WRITABLE as error:
                entries.remove(entry)
                message = f"A row of {entry.table} cannot be written to {self._name} and is dropped ({_reason(error)})."
                warnings.warn(message, LogWarning, stacklevel=4)

    def _put(self, connection: Connection, entry: Entry) -> None:
        table = schema.metadata.tables[entry.table]
        connection.execute(self._insert(table).values(**entry.row).on_conflict_do_nothing())

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """A connection that commits at the end; left early, it rolls back as it returns to the pool."""
        with self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE" if self._url.get_backend_name() == "sqlite" else "BEGIN")
            yield connection
            connection.exec_driver_sql("COMMIT")

    def _read(self, query: Select[Any], convert: Callable[[Connection, Row[Any]], T]) -> list[T]:
        """The rows that ``query`` finds; none, and a warning, if the log cannot be read."""
        with self._lock:
            try:
                self._prepare()
                with self._engine.connect() as connection:
                    return [convert(connection, row) for row in connection.execute(query).all()]
            except _TROUBLE as error:
                self._warn(error)
                return []

    def _observation(self, connection: Connection, row: Row[Any]) -> Observation | None:
        try:
            graph = self._graph(connection, row.graph_hash)
            return Observation(graph, schema.device_from_json(row.device), schema.measurement_from_row(row))
        except (WorkloadError, ValueError, KeyError, TypeError) as error:
            self._warn(error)
            return None

    def _graph(self, connection: Connection, content_hash: str) -> OpGraph:
        from perfguard.graph import OpGraph

        if content_hash not in self._graphs:
            query = select(schema.graphs.c.data).where(schema.graphs.c.content_hash == content_hash)
            self._remember(content_hash, OpGraph.from_bytes(connection.execute(query).scalar_one()))
        self._graphs.move_to_end(content_hash)
        return self._graphs[content_hash]

    def _remember(self, content_hash: str, graph: OpGraph) -> None:
        """Keep a graph at hand, the very object: a predictor knows what it has seen by identity."""
        self._graphs[content_hash] = graph
        if len(self._graphs) > _MAX_CACHED_GRAPHS:
            self._graphs.popitem(last=False)

    def _warn(self, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"The measurement log {self._name} cannot be used now ({_reason(error)}). Rows are kept, and written as soon as it "
            f"can be or when it is next opened. Close the program that holds it, or mend what the message says.",
            LogWarning,
            stacklevel=4,
        )


_ELSEWHERE = "Give another path, for instance in the environment variable PERFGUARD_LOG."
_stores: weakref.WeakSet[MeasurementStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _leave(queue: list[Entry], spool_base: Path | None, engine: Engine) -> None:
    """Spool what is still waiting. Also runs when the store is collected and at the end of the process."""
    engine.dispose()
    if not queue or spool_base is None:
        return
    try:
        write_spool(spool_base, queue)
    except OSError as error:
        message = f"{len(queue)} rows of the measurement log {spool_base} are lost: the spool cannot be written ({error})."
        warnings.warn(message, LogWarning, stacklevel=3)
    queue.clear()


def _url(location: str) -> URL:
    try:
        url = make_url(location) if "://" in location else URL.create("sqlite", database=location)
    except ArgumentError as error:
        raise ConfigurationError(
            "The measurement log's URL must look like postgresql+psycopg://user@host/database, but it cannot be read."
        ) from error
    if url.get_backend_name() not in _INSERT:
        raise ConfigurationError(f"The measurement log lives in SQLite or PostgreSQL, but got a URL of {url.drivername!r}.")
    if url.get_backend_name() == "sqlite" and not _is_memory(url):
        return url.set(database=str(Path(str(url.database)).expanduser().absolute()))
    return url


def _is_memory(url: URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def _engine(url: URL, busy_timeout_s: float) -> Engine:
    """Connections live as long as one call, so nothing is locked, or inherited by a fork, between calls."""
    arguments: dict[str, Any] = {}
    if url.get_backend_name() == "sqlite":
        arguments = {"timeout": busy_timeout_s, "check_same_thread": False}
    elif "psycopg" in url.get_driver_name():
        arguments = {"connect_timeout": max(1, math.ceil(busy_timeout_s))}
    pool = StaticPool if _is_memory(url) else NullPool
    try:
        return create_engine(url, poolclass=pool, connect_args=arguments, isolation_level="AUTOCOMMIT")
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise ConfigurationError(
            f"The measurement log's URL needs a driver for {url.drivername!r} ({error}): pip install 'perfguard[postgres]'."
        ) from error


def _corrupt(file: Path | str, reason: str) -> str:
    return f"{file} is no measurement log, or is damaged ({reason}); it is left as it is. Move it away, or give another path."


def _unusable(name: str, reason: object) -> str:
    return f"The measurement log {name} cannot be opened: {reason}. {_ELSEWHERE}"


def _reason(error: Exception) -> str:
    """What the driver said, on one line, without SQLAlchemy's statement and link."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _short_hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:12]


def _data_directory() -> Path:
    """Where this user's programs keep their data, by the custom of the platform."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "perfguard"
