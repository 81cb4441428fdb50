"""MeasurementStore: the log that never stops a study and never loses a row."""

from __future__ import annotations

import math
import os
import platform
import sys
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import URL, ColumnElement, Connection, Engine, Row, Select, delete, func, inspect, select, update
from sqlalchemy.exc import (
    DatabaseError,
    DataError,
    IntegrityError,
    SQLAlchemyError,
)

from perfguard._warn import warn_user
from perfguard.exceptions import (
    ConfigurationError,
    LogCorruptError,
    LogError,
    LogVersionError,
    LogWarning,
    PredictorError,
    WorkloadError,
)
from perfguard.predictor import Observation, Prediction
from perfguard.store import _retention as retention
from perfguard.store import _schema as schema
from perfguard.store._database import INSERT, identity_of, is_memory, make_engine, parse_url, savepoint, write_ahead
from perfguard.store._migrations import migrate
from perfguard.store._retention import ROWS_AT_ONCE
from perfguard.store._schema import SCHEMA_VERSION, Entry, LoggedDecision, LoggedWeights, WeightsState
from perfguard.store._selection import Selection, select_ids, select_rows
from perfguard.store._spool import find_spools, read_spool, write_spool

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.measure import Measurement
    from perfguard.verdict import Action

T = TypeVar("T")

_MAX_CACHED_GRAPHS = 512
_MAX_OWN_SPOOLS = 64
_MAX_CHECKED_BYTES = 256 * 2**20
"""A larger SQLite file is not read through at each opening: that takes seconds a gigabyte."""
_PATIENCE = 10
_LONG_S = 0.2
"""A call that waited longer than this in vain for the database is followed by ten times that wait without a new try."""
_STRIPES = 8
_MAX_LISTED = 1000
"""Of a longer log not even the ids are listed to draw from them."""
_TROUBLE = (SQLAlchemyError, OSError, LogError)
_NEVER_WRITABLE = (DataError, IntegrityError, OverflowError, ValueError)


class MeasurementStore:
    """The measurement log: every verdict, and what the launched trials cost.

    Opening says clearly when the log cannot be used, and brings an older log to the present schema. After that no trouble with
    the database reaches the study: a row that cannot be written now (locked, disk full, server away) is kept, in order, with
    one :class:`LogWarning`, in memory and in a spool file; a later record, a read, a flush or the next opening of the log
    delivers it, once. While the database is away, at most a tenth of the time is spent on trying. Safe to share between threads
    and processes; a fork or a pickle takes no waiting rows along. A store in ":memory:" ends with :meth:`close` and pickles as
    an empty one.

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
        self._set_up(parse_url(os.fspath(location)), busy_timeout_s)
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
        trial_id: str | None = None,
    ) -> str:
        """Log one verdict and return its id, which :meth:`record_measurement` takes. Values in ``params`` that JSON does not
        know are logged as text. ``trial_id`` is the tuner's own name of the trial, where it has one beside the number."""
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
                    trial_id=trial_id,
                    host=platform.node(),
                    action=action,
                    reason=reason,
                    graph_hash=None if graph is None else graph.content_hash,
                    device_hash=None if device_row is None else device_row.row["content_hash"],
                )
            )
            self._deliver()
        return decision_id

    def record_measurement(self, decision_id: str, measurement: Measurement) -> None:
        """Log what the trial of that decision cost. Only the first measurement of a decision counts; one of a run that was
        interrupted gives way to a later one, so that a trial that is resumed fills the row that it began."""
        with self._lock:
            row = schema.measurement_entry(measurement, decision_id=decision_id, recorded_at_ns=self._now_ns())
            self._queue.append(row)
            self._deliver()

    def observations(self, device: str | Device, limit: int = 500) -> list[Observation]:
        """The newest ``limit`` runs on that device that ended well or out of memory, and whose graph is known, oldest first.

        Of a run with status "oom" the peak memory is a lower bound, and its times are no complete run's. What is set aside is
        left out.

        Args:
            device: its id, or the device itself: runs on the very same one (see :attr:`Device.identity`) then carry it. The rates
                of a CPU differ from process to process, and what is learnt must be relative to the rates that predictions use.
            limit: the most runs.
        """
        device_id = device if isinstance(device, str) else device.id
        rows = self._read(schema.select_observations(device_id, limit), self._observation)
        found = [observation for observation in reversed(rows) if observation is not None]
        if isinstance(device, str):
            return found
        identity = device.identity
        return [replace(row, device=device) if row.device.identity == identity else row for row in found]

    def device_ids(self) -> list[str]:
        """The devices that runs were measured on."""
        query = select(schema.measurements.c.device_id).distinct().where(schema.measurements.c.device_id.is_not(None))
        return self._read(query, lambda _, row: str(row.device_id))

    def num_measured(self, *, since_ns: int) -> int:
        """How many measurements came into the log after that time, in nanoseconds since 1970, without those that are set aside;
        0 if it cannot be read now."""
        table = schema.measurements
        query = select(func.count()).where(table.c.recorded_at_ns > since_ns, table.c.set_aside.is_(None))
        return next(iter(self._read(query, lambda _, row: int(row[0]))), 0)

    def sample(self, size: int, random: Random, *, device_id: str | None = None) -> list[Observation]:
        """About ``size`` observations, drawn at random from all of the log; fewer where it has fewer.

        Of up to a thousand, every one has the same chance. Of more, eight stretches are read that follow random ids, which costs
        no look at the others; since ids are random themselves, a row's chance varies by a quarter or so, whatever is in it.

        Args:
            size: how many, at least 1.
            random: decides which.
            device_id: only of this device. None: of all.
        """
        ids = self._read(schema.select_measured_ids(device_id, _MAX_LISTED + 1), lambda _, row: str(row.decision_id))
        if len(ids) <= _MAX_LISTED:
            drawn = random.sample(ids, min(size, len(ids)))
            queries = [schema.select_observations_of(some) for some in schema.in_lists(drawn)]
        else:
            firsts = [f"{random.getrandbits(128):032x}" for _ in range(_STRIPES)]
            queries = [schema.select_observations_from(first, device_id, math.ceil(size / _STRIPES)) for first in firsts]
        found: dict[str, Observation] = {}
        for query in queries:
            rows = self._read(query, lambda connection, row: (row.decision_id, self._observation(connection, row)))
            found |= {decision_id: observation for decision_id, observation in rows if observation is not None}
        return list(found.values())[:size]

    def decisions(self, of: str | Selection | None = None, *, newest: int | None = None) -> list[LoggedDecision]:
        """The decisions of a study (its name) or of a selection, with their measurements, oldest first.

        Args:
            of: whose. None: all.
            newest: only so many, the newest ones.
        """
        selection = of if isinstance(of, Selection) else Selection(study=of)
        return self._read(schema.select_decisions(select_ids(selection), newest), lambda _, row: schema.decision_from_row(row))

    def counts(self) -> dict[str, int]:
        """How many rows each table has.

        Raises:
            LogError: if the log cannot be read now.
        """
        tables = (schema.decisions, schema.measurements, schema.graphs, schema.devices, schema.weights)
        with self._writing(), self._engine.connect() as connection:
            return {table.name: int(connection.execute(select(func.count()).select_from(table)).scalar_one()) for table in tables}

    def set_aside(self, selection: Selection, reason: str) -> int:
        """Mark the selected measurements, so that nothing is learnt from them any more. They stay in the log.

        Args:
            selection: which. What is set aside already keeps its reason.
            reason: a sentence for those who ask later.

        Returns:
            How many are new.

        Raises:
            LogError: if the log cannot be written now.
            ConfigurationError: if everything is selected, or without a reason.
        """
        if not reason:
            raise ConfigurationError("Say why the measurements are set aside: reason is empty.")
        return self._mark(selection, schema.measurements.c.set_aside.is_(None), reason)

    def take_back(self, selection: Selection) -> int:
        """Use the selected measurements again that were set aside, whatever the reason; the opposite of :meth:`set_aside`.

        Returns:
            How many there were.

        Raises:
            LogError: if the log cannot be written now.
            ConfigurationError: if everything is selected.
        """
        return self._mark(selection, schema.measurements.c.set_aside.is_not(None), None)

    def _mark(self, selection: Selection, condition: ColumnElement[bool], set_aside: str | None) -> int:
        if selection.is_everything:
            raise ConfigurationError("Say which measurements: a study, a device, a host, a status, a verdict or a time.")
        table = schema.measurements
        with self._writing() as transaction, transaction() as connection:
            return connection.execute(
                update(table).where(condition, table.c.decision_id.in_(select_ids(selection))).values(set_aside=set_aside)
            ).rowcount

    def weights_since(self, time: datetime) -> list[LoggedWeights]:
        """The weights in use that were made after that time, so that they may have learnt from a run at that time.

        They come in the order in which to roll them back: after each of them the one before it, which is then in use again.
        """
        known = {weights.weights_id: weights for weights in self.weights()}
        found = []
        for weights in known.values():
            in_use = weights if weights.state == "promoted" else None
            while in_use is not None and in_use.created_at >= time:
                found.append(in_use)
                parent = known.get(in_use.parent_id or "")
                in_use = parent if parent is not None and parent.state == "superseded" else None
        return found

    def prune(self, selection: Selection | None = None, *, keep_newest: int | None = None) -> int:
        """Remove decisions with their measurements, the oldest first, and the graphs and devices that nothing refers to any more.

        SQLite uses the room again; the file does not shrink. Weights stay.

        Args:
            selection: which. None: of all. Without ``keep_newest`` all that is selected is removed.
            keep_newest: remove what is older than ``selection.before``, and as many more as it takes to keep at most so many of
                those that are selected otherwise. None: number is no reason.

        Returns:
            How many decisions were removed.

        Raises:
            LogError: if the log cannot be written now; what was removed until then stays removed.
            ConfigurationError: if everything is selected, and ``keep_newest`` is not given either.
        """
        selection = selection or Selection()
        if selection.is_everything and keep_newest is None:
            raise ConfigurationError("Say what to remove: a selection, keep_newest, or both.")
        if keep_newest is not None and keep_newest < 0:
            raise ConfigurationError(f"keep_newest must be at least 0 or None, but got {keep_newest!r}.")
        with self._writing() as transaction:
            with transaction() as connection:
                cutoff_ns = retention.cutoff_ns(connection, selection, keep_newest)
            num_removed = 0
            while cutoff_ns is not None:
                with transaction() as connection:  # in small bites: others want to write too
                    removed = retention.remove_decisions(connection, selection, cutoff_ns)
                num_removed += removed
                if removed < ROWS_AT_ONCE:
                    break
            if cutoff_ns is not None:
                with transaction() as connection:
                    retention.remove_orphans(connection, cutoff_ns if replace(selection, before=None).is_everything else 0)
            self._sent_graphs.clear()
        return num_removed

    def record_weights(
        self,
        *,
        predictor: str,
        data: bytes,
        parent_id: str | None = None,
        metrics: Mapping[str, Any] | None = None,
        keep_data: bool = True,
    ) -> str:
        """Log a new generation of weights as "candidate" and return its id.

        Args:
            predictor: whose, for instance "guardnet".
            data: the bytes of the weights' file.
            parent_id: the generation that it was fine-tuned from. None: the shipped one.
            metrics: what it is judged by.
            keep_data: store the bytes too, so that others can take them from the log; otherwise only their SHA-256.

        Raises:
            LogError: if the log cannot be written now. A promotion must not wait in a spool.
        """
        weights_id = uuid.uuid4().hex
        now_ns = self._now_ns()
        entry = schema.weights_entry(
            metrics or {},
            data if keep_data else None,
            weights_id=weights_id,
            parent_id=parent_id,
            predictor=predictor,
            created_at_ns=now_ns,
            sha256=sha256(data).hexdigest(),
            state="candidate",
            state_changed_at_ns=now_ns,
        )
        with self._writing() as transaction, transaction() as connection:
            self._put(connection, [entry])
        return weights_id

    def set_weights_state(self, weights_id: str, state: WeightsState) -> None:
        """Promote, reject or roll back a generation, in one transaction. Promoting one supersedes the one that was promoted.

        Raises:
            LogError: if there are no such weights, or the log cannot be written now.
        """
        table, now_ns = schema.weights, self._now_ns()
        with self._writing() as transaction, transaction() as connection:
            self._one_at_a_time(connection)
            predictor = connection.execute(select(table.c.predictor).where(table.c.weights_id == weights_id)).scalar()
            if predictor is None:
                raise LogError(f"The measurement log {self._name} has no weights {weights_id!r}.")
            changed = update(table).values(state_changed_at_ns=now_ns)
            if state == "promoted":
                others = changed.where(table.c.predictor == predictor, table.c.state == "promoted")
                connection.execute(others.values(state="superseded"))
            connection.execute(changed.where(table.c.weights_id == weights_id).values(state=state))

    def promote_candidate(self, weights_id: str) -> bool:
        """Promote a candidate if the generation that it was judged against, its parent, is still in use; else reject it.

        In between another learner may have promoted another, or somebody rolled the parent back.

        Returns:
            Whether it is in use now.

        Raises:
            LogError: if there is no such candidate, or the log cannot be written now.
        """
        table, now_ns = schema.weights, self._now_ns()
        with self._writing() as transaction, transaction() as connection:
            self._one_at_a_time(connection)
            candidate = select(table.c.predictor, table.c.parent_id).where(table.c.weights_id == weights_id)
            row = connection.execute(candidate.where(table.c.state == "candidate")).first()
            if row is None:
                raise LogError(f"The measurement log {self._name} has no candidate {weights_id!r}.")
            is_unchanged = bool(connection.execute(schema.select_promoted(row.predictor)).scalar() == row.parent_id)
            changed = update(table).values(state_changed_at_ns=now_ns)
            if is_unchanged:
                in_use = table.c.predictor == row.predictor, table.c.state == "promoted"
                connection.execute(changed.where(*in_use).values(state="superseded"))
            state = "promoted" if is_unchanged else "rejected"
            connection.execute(changed.where(table.c.weights_id == weights_id).values(state=state))
            return is_unchanged

    def _one_at_a_time(self, connection: Connection) -> None:
        """Whoever changes which weights are in use waits here for the one before to commit; SQLite has one writer anyway."""
        if self._url.get_backend_name() == "postgresql":
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('perfguard weights'))")

    def weights(self, predictor: str | None = None) -> list[LoggedWeights]:
        """The generations of ``predictor``'s weights, or of all predictors', oldest first."""
        columns = [column for column in schema.weights.c if column.name != "data"]
        query = select(*columns).order_by(schema.weights.c.created_at_ns, schema.weights.c.weights_id)
        if predictor is not None:
            query = query.where(schema.weights.c.predictor == predictor)
        return self._read(query, lambda _, row: schema.weights_from_row(row))

    @property
    def location(self) -> str:
        """The path, or the URL without its password; ":memory:" for a log in this process's memory."""
        return self._name

    @property
    def url(self) -> str | None:
        """By which another process can open the same log, its password included; None: it is in this process's memory."""
        return None if self._in_memory else self._url.render_as_string(hide_password=False)

    def promoted_weights(self, predictor: str) -> str | None:
        """The id of the generation of ``predictor``'s weights that is in use; None: the shipped ones are.

        Raises:
            LogError: if the log cannot be read now.
        """
        with self._lock:
            if time.monotonic() < self._retry_at_s:
                raise LogError(f"The measurement log {self._name} was away a moment ago.")
            with self._writing(), self._engine.connect() as connection:
                found = connection.execute(schema.select_promoted(predictor)).scalar()
        return None if found is None else str(found)

    def roll_back_weights(self, weights_id: str) -> str | None:
        """Take a promoted generation out of use, and put the one that it was fine-tuned from back in, in one transaction.

        Returns:
            The generation that is now in use; None: the shipped weights.

        Raises:
            LogError: if the generation is not in use, or the log cannot be written now.
        """
        table, now_ns = schema.weights, self._now_ns()
        with self._writing() as transaction, transaction() as connection:
            self._one_at_a_time(connection)
            row = connection.execute(select(table.c.state, table.c.parent_id).where(table.c.weights_id == weights_id)).first()
            if row is None or row.state != "promoted":
                state = "not in the log" if row is None else row.state
                raise LogError(f"Only weights that are in use can be rolled back, but {weights_id!r} is {state}.")
            changed = update(table).values(state_changed_at_ns=now_ns)
            connection.execute(changed.where(table.c.weights_id == weights_id).values(state="rolled back"))
            back = changed.where(table.c.weights_id == row.parent_id, table.c.state == "superseded").values(state="promoted")
            return str(row.parent_id) if row.parent_id and connection.execute(back).rowcount else None

    def lease(self, name: str, holder: str, *, seconds: float) -> bool:
        """Take or renew the right to do what only one process may do at a time; False: another holds it.

        A holder that dies leaves it after ``seconds``. The clocks of two machines may differ by less than that.

        Raises:
            LogError: if the log cannot be written now.
        """
        table, now_ns = schema.leases, time.time_ns()
        row = {"name": name, "holder": holder, "expires_at_ns": now_ns + int(seconds * 1e9)}
        with self._writing() as transaction, transaction() as connection:
            taken = self._insert(table).on_conflict_do_update(
                index_elements=["name"], set_=row, where=(table.c.holder == holder) | (table.c.expires_at_ns < now_ns)
            )
            return connection.execute(taken.returning(table.c.holder), row).first() is not None

    def release(self, name: str, holder: str) -> None:
        """Give a lease back before its time; nothing happens if another holds it.

        Raises:
            LogError: if the log cannot be written now.
        """
        table = schema.leases
        with self._writing() as transaction, transaction() as connection:
            connection.execute(delete(table).where(table.c.name == name, table.c.holder == holder))

    def weights_data(self, weights_id: str) -> bytes | None:
        """The bytes of that generation; None if the log does not have them."""
        query = select(schema.weights.c.data).where(schema.weights.c.weights_id == weights_id)
        return next(iter(self._read(query, lambda _, row: row.data)), None)

    def rows(self, table: str, selection: Selection | None = None) -> Iterator[dict[str, Any]]:
        """The rows of one of the log's tables, in the order of its key, as they were when the reading began.

        Args:
            table: its name.
            selection: only what belongs to these decisions; weights belong to none. None: every row.

        Raises:
            LogError: if the log cannot be read now.
        """
        query = select_rows(table, selection or Selection())
        with self._writing():
            pass  # the log is there, and of the present schema
        try:
            with self._engine.connect() as connection:
                connection.exec_driver_sql("BEGIN")  # a snapshot, which keeps nobody from writing
                for row in connection.execution_options(yield_per=ROWS_AT_ONCE).execute(query):
                    yield dict(row._mapping)
        except SQLAlchemyError as error:
            raise self._unusable_now(error) from error

    def insert(self, entries: Sequence[Entry]) -> int:
        """Write rows as they are, in one transaction, and return how many were new: a row whose key the log has is left out.

        Raises:
            LogError: if the log cannot be written now, or takes one of the rows for wrong; nothing is written then.
        """
        with self._writing() as transaction, transaction() as connection:
            return self._put(connection, entries)

    def flush(self) -> None:
        """Try once more to deliver what is waiting."""
        with self._lock:
            self._deliver(at_once=True)

    def close(self) -> None:
        """Deliver what is waiting, or leave it in a spool file. A later call opens the log again."""
        with self._lock:
            self._deliver(at_once=True)
            self._ready = False
            self._merge_own_spools()
            self._kept.clear()
            self._own_spools.clear()
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
        self._in_memory = is_memory(url)
        self._file = Path(str(url.database)) if url.get_backend_name() == "sqlite" and not self._in_memory else None
        self._name = str(self._file or url.render_as_string(hide_password=True))
        self._spool_base = None if self._in_memory else self._file or _data_directory() / f"log-{_short_hash(self._name)}"
        self._engine = make_engine(url, busy_timeout_s)
        self._insert = INSERT[url.get_backend_name()]
        self._lock = threading.RLock()
        self._queue: list[Entry] = []  # waits, and is nowhere else
        self._kept: list[Entry] = []  # waits, and is in _own_spools too
        self._own_spools: list[Path] = []
        self._retry_at_s = 0.0
        self._sent_graphs: set[str] = set()
        self._graphs: OrderedDict[str, OpGraph] = OrderedDict()
        self._last_ns = 0
        self._ready = False
        self._file_identity: tuple[int, int] | None = None
        self._spool_delivered = self._spool_base is None
        self._warned = False
        self._finalizer = weakref.finalize(self, _leave, self._queue, self._spool_base, self._engine)
        _stores.add(self)

    def _after_fork(self) -> None:
        """In the child: the rows that wait are the parent's to deliver, and its threads' lock is nobody's."""
        self._lock = threading.RLock()
        self._queue.clear()
        self._kept.clear()
        self._own_spools.clear()
        if self._in_memory:
            return
        self._finalizer.detach()
        _of_parents.append(self._engine)
        self._engine = make_engine(self._url, self._busy_timeout_s)
        self._finalizer = weakref.finalize(self, _leave, self._queue, self._spool_base, self._engine)
        self._ready = False

    def _now_ns(self) -> int:
        """Strictly increasing within the store, so that rows keep their order."""
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        return self._last_ns

    def _prepare(self) -> None:
        """Check the log; make it if it is new, bring it to the present schema if it is old. Else it is only read."""
        if self._ready and (self._file is None or self._file_identity == identity_of(self._file)):
            return
        was_replaced = self._ready
        if was_replaced:
            self._ready = False
            self._engine.dispose()  # or rows would go on into a file that nobody can open any more
            self._sent_graphs.clear()
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._engine.connect() as connection:
                version = self._check_schema(connection)
            num_aside = 0
            if version != SCHEMA_VERSION:
                with self._transaction() as connection:
                    if self._url.get_backend_name() == "postgresql":  # two workers may open the log at once
                        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('perfguard'))")
                    num_aside = self._make_tables(connection, self._schema_version(connection))
            if self._file is not None:
                with self._engine.connect() as connection:
                    write_ahead(connection)
        except DatabaseError as error:
            if type(error) is DatabaseError and self._file is not None:  # SQLite: malformed, or not a database
                raise LogCorruptError(_corrupt(self._file, _reason(error))) from error
            if "unable to open" in str(error.orig):
                raise LogError(_unusable(self._name, _reason(error))) from error
            raise
        self._file_identity = None if self._file is None else identity_of(self._file)
        self._ready = True
        if num_aside:
            self._warn_of_the_absent(num_aside)
        if was_replaced:
            message = f"The measurement log {self._name} was moved or removed; another is begun there."
            warn_user(message, LogWarning)

    def _warn_of_the_absent(self, number: int) -> None:
        warn_user(
            f"{number} readings in the measurement log {self._name} were booked to a device that was not there. They are set "
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
            self._put(connection, [Entry("meta", {"key": "schema_version", "value": str(SCHEMA_VERSION)})])
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
        if self._file is not None and self._file.exists() and self._file.stat().st_size <= _MAX_CHECKED_BYTES:
            result = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if result != "ok":
                raise LogCorruptError(_corrupt(self._file, " ".join(str(result).split())))
        return self._schema_version(connection)

    def _schema_version(self, connection: Connection) -> int | None:
        tables = inspect(connection).get_table_names()
        if "meta" not in tables:
            if tables and self._file is not None:
                raise LogCorruptError(_corrupt(self._file, "an SQLite file with other tables"))
            return None
        version = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == "schema_version")).scalar()
        if version is None or not version.isdecimal():
            raise LogCorruptError(_corrupt(self._name, f"schema_version is {version!r}"))
        if int(version) > SCHEMA_VERSION:
            raise LogVersionError(
                f"The measurement log {self._name} has schema {version}, this PerfGuard reads up to {SCHEMA_VERSION}; "
                f"it is left as it is. Update perfguard. {_ELSEWHERE}"
            )
        return int(version)

    def _deliver(self, *, at_once: bool = False) -> None:
        """Bring everything that waits to the database; the lock is held. Keeps it, and warns once, if that cannot be.

        After a try that took long, the next ones only keep their rows for a while, unless ``at_once``.
        """
        begun_s = time.monotonic()
        if not at_once and begun_s < self._retry_at_s:
            self._keep()
            return
        try:
            self._prepare()
            if not self._spool_delivered:
                self._deliver_spools()
            self._write(self._kept)
            self._write(self._queue)
        except _TROUBLE as error:
            self._ready = False
            self._be_patient(begun_s)
            self._sent_graphs = {entry.row["content_hash"] for entry in self._kept + self._queue if entry.table == "graphs"}
            self._keep()
            self._warn(error)
        else:
            self._remove_own_spools()

    def _be_patient(self, begun_s: float) -> None:
        """After a vain try that began at ``begun_s``; one that failed at once costs nothing and may be repeated."""
        waited_s = time.monotonic() - begun_s
        self._retry_at_s = time.monotonic() + _PATIENCE * waited_s if waited_s > _LONG_S else 0.0

    def _keep(self) -> None:
        """Write what waits to a spool now: this process may be killed before the database is back."""
        if self._spool_base is None or not self._queue:
            return
        try:
            self._own_spools.append(write_spool(self._spool_base, self._queue))
        except OSError:
            return  # the disk is full, perhaps; they wait in memory, and the next call tries again
        self._kept += self._queue
        self._queue.clear()
        if len(self._own_spools) > _MAX_OWN_SPOOLS:
            self._merge_own_spools()

    def _merge_own_spools(self) -> None:
        """One file for all that this store keeps. Should the process die in between, both are delivered, as one."""
        if self._spool_base is None or len(self._own_spools) < 2:
            return
        with suppress(OSError):
            merged = write_spool(self._spool_base, self._kept)
            self._remove_own_spools()
            self._own_spools.append(merged)

    def _remove_own_spools(self) -> None:
        for path in self._own_spools:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # another process that opened the log has delivered it
        self._own_spools.clear()

    def _deliver_spools(self) -> None:
        assert self._spool_base is not None
        for path in find_spools(self._spool_base):
            try:
                entries = read_spool(path)
            except FileNotFoundError:  # another process was quicker
                continue
            except LogVersionError as error:
                warn_user(f"The spool {path} waits for a newer PerfGuard ({error}).", LogWarning)
                continue
            except ValueError as error:
                aside = path.replace(path.with_suffix(".damaged"))
                warn_user(f"The spool {path} is damaged ({error}); it was set aside as {aside}.", LogWarning)
                continue
            self._write(entries)
            with suppress(OSError):
                path.unlink()
        self._spool_delivered = True

    def _write(self, entries: list[Entry]) -> None:
        """Write ``entries`` in one transaction and empty the list. A row that can never be written is dropped, loudly."""
        if not entries:
            return
        try:
            with self._transaction() as connection:
                self._put(connection, entries)
                self._put_pruned_graphs(connection, entries)
        except _NEVER_WRITABLE:
            self._write_one_by_one(entries)
        entries.clear()

    def _write_one_by_one(self, entries: Sequence[Entry]) -> None:
        with self._transaction() as connection:
            for entry in entries:
                try:
                    with savepoint(connection):
                        self._put(connection, [entry])
                except _NEVER_WRITABLE as error:
                    message = f"A row of {entry.table} cannot be written to {self._name} and is dropped ({_reason(error)})."
                    warn_user(message, LogWarning)

    def _put(self, connection: Connection, entries: Iterable[Entry]) -> int:
        """Insert rows; those whose key is there already are left alone, but for measurements of interrupted runs, which later
        ones replace. Returns how many were new."""
        num_new = 0
        for (name, _columns), group in groupby(entries, key=lambda entry: (entry.table, tuple(entry.row))):
            rows = [entry.row for entry in group]
            statement = self._insert(schema.metadata.tables[name])
            if name == "measurements":
                statement = statement.on_conflict_do_update(**schema.replacing_interrupted(statement.excluded))
            else:
                statement = statement.on_conflict_do_nothing()
            for start in range(0, len(rows), ROWS_AT_ONCE):
                chunk = rows[start : start + ROWS_AT_ONCE]
                num_new += connection.execute(statement, chunk if len(chunk) > 1 else chunk[0]).rowcount
        return num_new

    def _put_pruned_graphs(self, connection: Connection, entries: Sequence[Entry]) -> None:
        """Bring a graph once more that another process has pruned since this one sent it."""
        for graph_hash in {entry.row.get("graph_hash") for entry in entries if entry.table == "decisions"}:
            graph = self._graphs.get(graph_hash or "")
            if graph is None:
                continue
            known = select(schema.graphs.c.content_hash).where(schema.graphs.c.content_hash == graph_hash)
            if connection.execute(known).first() is None:
                self._put(connection, [schema.graph_entry(graph)])

    @contextmanager
    def _writing(self) -> Iterator[Callable[[], AbstractContextManager[Connection]]]:
        """For what must not wait in a spool: gives transactions; any trouble with the database is a LogError."""
        with self._lock:
            try:
                self._prepare()
                yield self._transaction
            except LogError:
                raise
            except (SQLAlchemyError, OSError) as error:
                self._ready = False
                raise self._unusable_now(error) from error

    def _unusable_now(self, error: Exception) -> LogError:
        return LogError(f"The measurement log {self._name} cannot be used now: {_reason(error)}.")

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
            begun_s = time.monotonic()
            if begun_s < self._retry_at_s:
                return []
            if self._queue or self._kept:
                self._deliver()
            try:
                self._prepare()
                with self._engine.connect() as connection:
                    return [convert(connection, row) for row in connection.execute(query).all()]
            except _TROUBLE as error:
                self._be_patient(begun_s)
                self._warn(error)
                return []

    def _observation(self, connection: Connection, row: Row[Any]) -> Observation | None:
        try:
            graph = self._graph(connection, row.graph_hash)
            return Observation(
                graph,
                schema.device_from_json(row.device),
                schema.measurement_from_row(row),
                schema.predicted_from_row(row),
                schema.widening_from_row(row),
                row.predictor or "",
                decision_id=row.decision_id,
                recorded_at_ns=row.recorded_at_ns,
                study=row.study or "",
            )
        except (WorkloadError, PredictorError, ValueError, KeyError, TypeError) as error:
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
        warn_user(
            f"The measurement log {self._name} cannot be used now ({_reason(error)}). Rows are kept, and written as soon as it "
            f"can be or when it is next opened. Close the program that holds it, or mend what the message says.",
            LogWarning,
        )


_ELSEWHERE = "Give another path, for instance in the environment variable PERFGUARD_LOG."
_of_parents: list[Engine] = []
"""In a forked child: never used and never closed, because closing would end what the parent has open."""
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
        warn_user(message, LogWarning)
    queue.clear()


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
