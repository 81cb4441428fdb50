"""MeasurementStore: the log that never stops a study and never loses a row."""

from __future__ import annotations

import math
import os
import platform
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import URL, ColumnElement, Connection, Row, Select, func, select, update
from sqlalchemy.exc import SQLAlchemyError

from perfguard.exceptions import ConfigurationError, LogError, PredictorError, WorkloadError
from perfguard.log import _retention as retention
from perfguard.log import _schema as schema
from perfguard.predictor import Observation, Prediction
from perfguard.store._database import parse_url
from perfguard.store._delivery import Delivery
from perfguard.store._log import TROUBLE, Log, default_location, unusable
from perfguard.store._schema import Entry, LoggedDecision
from perfguard.store._selection import Selection, select_ids, select_rows
from perfguard.store._weights_registry import WeightsRegistry

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.measure import Measurement
    from perfguard.verdict import Action

T = TypeVar("T")

_MAX_CACHED_GRAPHS = 512
_STRIPES = 8
_MAX_LISTED = 1000
"""Up to this number of rows, all ids are listed and drawn from. A longer log is sampled without a list."""


class MeasurementStore(WeightsRegistry):
    """The measurement log: every verdict, and what the launched trials cost.

    Opening raises an error if the log cannot be used, and migrates an older log to the present schema. After that, no failure of
    the database reaches the study. If a row cannot be written now (database locked, disk full, server down), it is kept in memory
    and in a spool file, with one :class:`LogWarning`. A later record, read or flush writes it, or the next opening of the log.
    Such attempts take at most a tenth of the time. Threads and processes may share a store. A fork or a pickle has no waiting
    rows. A store in ":memory:" ends with :meth:`close` and pickles as an empty one.

    Example:
        >>> with MeasurementStore(":memory:") as store:
        ...     decision_id = store.record_decision(
        ...         study="demo", trial=0, graph=None, device=None, action="launch",
        ...         reason="fits", prediction=None, params={"lr": 0.1},
        ...     )
        ...     store.decisions("demo")[0].params
        {'lr': 0.1}

    Args:
        location: path of an SQLite file, ":memory:", or a SQLAlchemy URL of SQLite or PostgreSQL. A missing file is made, with
            its directory.
        busy_timeout_s: how long a call waits for another process's lock, or for the server.

    Raises:
        LogCorruptError: the file is damaged or is no measurement log. It stays as it is.
        LogVersionError: a newer PerfGuard wrote the log. It stays as it is.
        LogError: the file cannot be opened or made.
        ConfigurationError: a URL that cannot be used.
    """

    def __init__(self, location: str | os.PathLike[str], *, busy_timeout_s: float = 2.0) -> None:
        self._set_up(parse_url(os.fspath(location)), busy_timeout_s)
        with self._log.lock:
            try:
                self._log.prepare()
            except OSError as error:
                raise LogError(unusable(self._log.name, error)) from error
            except SQLAlchemyError as error:
                self._log.warn(error)
            else:
                self._delivery.deliver()

    @classmethod
    def default(cls) -> MeasurementStore:
        """The log at :func:`perfguard.store.default_location`."""
        return cls(default_location())

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
        with self._log.lock:
            if graph is not None and graph.content_hash not in self._log.sent_graphs:
                self._delivery.add(schema.graph_entry(graph))
                self._log.sent_graphs.add(graph.content_hash)
                self._remember(graph.content_hash, graph)
            if device_row is not None:
                self._delivery.add(device_row)
            self._delivery.add(
                schema.decision_entry(
                    prediction,
                    params,
                    decision_id=decision_id,
                    created_at_ns=self._log.now_ns(),
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
            self._delivery.deliver()
        return decision_id

    def record_measurement(self, decision_id: str, measurement: Measurement) -> None:
        """Log what the trial of that decision cost. Only the first measurement of a decision counts.

        The measurement of an interrupted run is replaced by a later one. So a resumed trial fills the row that it began.
        """
        with self._log.lock:
            row = schema.measurement_entry(measurement, decision_id=decision_id, recorded_at_ns=self._log.now_ns())
            self._delivery.add(row)
            self._delivery.deliver()

    def observations(self, device: str | Device, limit: int = 500) -> list[Observation]:
        """The newest ``limit`` runs on that device that ended well or out of memory, and whose graph is known, oldest first.

        For a run with status "oom" the peak memory is a lower bound, and the times are not those of a complete run. Measurements
        that are set aside are left out.

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
        """Number of measurements that were logged after that time, in nanoseconds since 1970.

        Measurements that are set aside do not count. The result is 0 if the log cannot be read now.
        """
        table = schema.measurements
        query = select(func.count()).where(table.c.recorded_at_ns > since_ns, table.c.set_aside.is_(None))
        return next(iter(self._read(query, lambda _, row: int(row[0]))), 0)

    def sample(self, size: int, random: Random, *, device_id: str | None = None) -> list[Observation]:
        """About ``size`` observations, drawn at random from all of the log; fewer where it has fewer.

        In a log of up to a thousand observations, all have the same chance. In a larger log, eight runs of rows are read, each
        from a random id on. So the other rows are not read. Ids are random themselves, so the chance of a row varies by about a
        quarter, independent of its content.

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
        """Number of rows of each table.

        Raises:
            LogError: if the log cannot be read now.
        """
        tables = (schema.decisions, schema.measurements, schema.graphs, schema.devices, schema.weights)
        with self._log.writing(), self._log.engine.connect() as connection:
            return {table.name: int(connection.execute(select(func.count()).select_from(table)).scalar_one()) for table in tables}

    def set_aside(self, selection: Selection, reason: str) -> int:
        """Mark the selected measurements, so that nothing is learnt from them any more. They stay in the log.

        Args:
            selection: which. What is set aside already keeps its reason.
            reason: a sentence that is kept with them.

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
        """Undo :meth:`set_aside` for the selected measurements, whatever the reason was. They are used again.

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
        with self._log.writing() as transaction, transaction() as connection:
            return connection.execute(
                update(table).where(condition, table.c.decision_id.in_(select_ids(selection))).values(set_aside=set_aside)
            ).rowcount

    def prune(self, selection: Selection | None = None, *, keep_newest: int | None = None) -> int:
        """Remove decisions with their measurements, the oldest first, and the graphs and devices that nothing refers to any more.

        SQLite reuses the space, but the file does not shrink. Weights stay.

        Args:
            selection: which decisions. None: all. Without ``keep_newest`` all selected decisions are removed.
            keep_newest: the largest number of selected decisions that may stay. The oldest ones above that number are removed,
                and all those before ``selection.before``. None: no limit on the number.

        Returns:
            How many decisions were removed.

        Raises:
            LogError: if the log cannot be written now. Rows that were removed until then stay removed.
            ConfigurationError: if everything is selected, and ``keep_newest`` is not given either.
        """
        selection = selection or Selection()
        if selection.is_everything and keep_newest is None:
            raise ConfigurationError("Say what to remove: a selection, keep_newest, or both.")
        if keep_newest is not None and keep_newest < 0:
            raise ConfigurationError(f"keep_newest must be at least 0 or None, but got {keep_newest!r}.")
        with self._log.writing() as transaction:
            num_removed = retention.prune(transaction, selection, keep_newest)
            self._log.sent_graphs.clear()
        return num_removed

    def rows(self, table: str, selection: Selection | None = None) -> Iterator[dict[str, Any]]:
        """The rows of one of the log's tables, in the order of its key, as they were when the reading began.

        Args:
            table: its name.
            selection: only what belongs to these decisions; weights belong to none. None: every row.

        Raises:
            LogError: if the log cannot be read now.
        """
        query = select_rows(table, selection or Selection())
        with self._log.writing():
            pass  # the log is there, and of the present schema
        try:
            with self._log.engine.connect() as connection:
                connection.exec_driver_sql("BEGIN")  # a snapshot, which does not block writers
                for row in connection.execution_options(yield_per=retention.ROWS_AT_ONCE).execute(query):
                    yield dict(row._mapping)
        except SQLAlchemyError as error:
            raise self._log.unusable_now(error) from error

    def insert(self, entries: Sequence[Entry]) -> int:
        """Write rows as they are, in one transaction, and return how many were new. A row whose key the log has is left out.

        Raises:
            LogError: if the log cannot be written now, or refuses one of the rows. Then nothing is written.
        """
        with self._log.writing() as transaction, transaction() as connection:
            return self._log.put(connection, entries)

    def flush(self) -> None:
        """Try once more to deliver what is waiting."""
        with self._log.lock:
            self._delivery.deliver(at_once=True)

    def close(self) -> None:
        """Deliver what is waiting, or leave it in a spool file. A later call opens the log again."""
        with self._log.lock:
            self._delivery.close()

    def __enter__(self) -> MeasurementStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MeasurementStore({self._log.name!r})"

    @property
    def location(self) -> str:
        """The path, or the URL without its password; ":memory:" for a log in this process's memory."""
        return self._log.name

    @property
    def url(self) -> str | None:
        """The URL with which another process can open the same log, with its password.

        None: the log is in this process's memory.
        """
        return None if self._log.in_memory else self._log.url.render_as_string(hide_password=False)

    def __getstate__(self) -> tuple[URL, float]:
        return self._log.url, self._log.busy_timeout_s

    def __setstate__(self, state: tuple[URL, float]) -> None:
        self._set_up(*state)

    def _set_up(self, url: URL, busy_timeout_s: float) -> None:
        self._log = Log(url, busy_timeout_s)
        self._graphs: OrderedDict[str, OpGraph] = OrderedDict()
        self._delivery = Delivery(self._log, self._graphs)

    def _read(self, query: Select[Any], convert: Callable[[Connection, Row[Any]], T]) -> list[T]:
        """The rows that ``query`` finds; none, and a warning, if the log cannot be read."""
        with self._log.lock:
            begun_s = time.monotonic()
            if self._log.is_away:
                return []
            if self._delivery.is_waiting:
                self._delivery.deliver()
            try:
                self._log.prepare()
                with self._log.engine.connect() as connection:
                    return [convert(connection, row) for row in connection.execute(query).all()]
            except TROUBLE as error:
                self._log.pause_after(begun_s)
                self._log.warn(error)
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
            self._log.warn(error)
            return None

    def _graph(self, connection: Connection, content_hash: str) -> OpGraph:
        from perfguard.graph import OpGraph

        if content_hash not in self._graphs:
            query = select(schema.graphs.c.data).where(schema.graphs.c.content_hash == content_hash)
            self._remember(content_hash, OpGraph.from_bytes(connection.execute(query).scalar_one()))
        self._graphs.move_to_end(content_hash)
        return self._graphs[content_hash]

    def _remember(self, content_hash: str, graph: OpGraph) -> None:
        """Keep the graph object itself: a predictor recognises graphs that it has seen by identity."""
        self._graphs[content_hash] = graph
        if len(self._graphs) > _MAX_CACHED_GRAPHS:
            self._graphs.popitem(last=False)
