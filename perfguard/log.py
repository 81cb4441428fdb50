"""The measurement log: every verdict, and what the launched trials really cost. It never stops a study and never loses a row.

A row goes to the database at once. While the database is locked, full or away, rows go to files beside the log. A later call, or
the next opening of the log, brings them in. Keys of rows are random, and an insert leaves out a row that is there already. So a
row that is written twice is there once.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import threading
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import sqlalchemy as sql
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from perfguard import log_tables as tables
from perfguard.exceptions import ConfigurationError, LogError, LogWarning, PerfGuardError, warn_user
from perfguard.log_database import Database, leave, parse_url, reason_of, unusable
from perfguard.log_export import write_csv, write_parquet
from perfguard.log_location import default_location
from perfguard.log_tables import DecisionRow, DeviceRow, GraphRow, LoggedWeights, MeasurementRow, Row, WeightsRow
from perfguard.predictor import Observation
from perfguard.risk_budget import EVEN_CHANCE, History

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.measure import Measurement, Status
    from perfguard.record import TrialRecord
    from perfguard.verdict import Action, Verdict

__all__ = ["LoggedWeights", "MeasurementStore", "Selection", "default_location"]

_TROUBLE = (SQLAlchemyError, OSError, LogError)  # the database is away, locked or damaged
_DAMAGED = (PerfGuardError, ValueError, KeyError, TypeError)  # a row is


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Selects the decisions, with their measurements, that match every given field. None: any value matches.

    Example:
        >>> Selection(device="a100-pcie-40gb", status="ok").is_everything
        False

    Raises:
        ConfigurationError: for a time without a time zone, or an end that is not after the begin.
    """

    study: str | None = None
    device: str | tuple[str, ...] | None = None
    """Id of the device that was decided for, or that was measured, or several; "a100-sxm-80gb:" means all parts of that GPU."""
    status: Status | None = None
    """Status of the measurement."""
    verdict: Action | None = None
    host: str | None = None
    """Name of the machine that ran the trial, or that decided where the trial was not measured."""
    since: datetime | None = None
    """Decided at this time or later."""
    before: datetime | None = None
    """Decided before this time."""

    def __post_init__(self) -> None:
        for name in ("since", "before"):
            value = getattr(self, name)
            if value is not None and value.tzinfo is None:
                raise ConfigurationError(
                    f"{name} must have a time zone, for instance datetime.now(timezone.utc), but got {value!r}."
                )
        if self.since is not None and self.before is not None and self.since >= self.before:
            raise ConfigurationError(f"since must be earlier than before, but got {self.since} and {self.before}.")

    @property
    def is_everything(self) -> bool:
        """Whether nothing was given."""
        return self == Selection()

    def query(self, *wanted: Any) -> sql.Select[Any]:
        """Return a query for ``wanted`` of the selected decisions, which are joined with their measurements and devices."""
        exact: Mapping[Any, str | None] = {
            DecisionRow.study: self.study,
            MeasurementRow.status: self.status,
            DecisionRow.verdict: self.verdict,
            sql.func.coalesce(MeasurementRow.host, DecisionRow.host): self.host,
        }
        where = [column == value for column, value in exact.items() if value is not None]
        if self.device is not None:
            ids = (self.device,) if isinstance(self.device, str) else self.device
            columns = DeviceRow.device_id, MeasurementRow.device_id
            parts = [column.startswith(id_, autoescape=True) for column in columns for id_ in ids if id_.endswith(":")]
            where.append(sql.or_(*(column.in_(ids) for column in columns), *parts))
        if self.since is not None:
            where.append(DecisionRow.created_at_ns >= tables.as_ns(self.since))
        if self.before is not None:
            where.append(DecisionRow.created_at_ns < tables.as_ns(self.before))
        return (
            sql.select(*wanted)
            .select_from(DecisionRow)
            .outerjoin(DeviceRow, DeviceRow.content_hash == DecisionRow.device_hash)
            .outerjoin(MeasurementRow, MeasurementRow.decision_id == DecisionRow.decision_id)
            .where(*where)
        )


class MeasurementStore:
    """The measurement log: every verdict, and what the launched trials cost.

    Opening raises an error if the log cannot be used. After that, no failure of the database reaches the study. A row that cannot
    be written now (database locked, disk full, server down) is kept in a file beside the log, with one :class:`LogWarning`. A
    later record, read or flush writes it, or the next opening of the log. After a slow failure, a study makes no attempt for ten
    times as long, so attempts take at most a tenth of its time. Any success ends that pause. Threads
    and processes may share a store. In a forked child the store has its own connection, and a pickle opens the log when it is
    used. A store in ":memory:" ends with :meth:`close` and pickles as an empty one. It keeps all rows, but of graphs only those
    of the newest decisions and of the runs that may still be learnt.

    What cannot wait raises a LogError while the database is away: all that reads (records, observations, device_ids, weights,
    counts, promoted and export) or changes rows (correct, set_aside, take_back, prune, promote and roll_back). So an empty list
    means that there is nothing. Arguments that cannot be right are a ConfigurationError.

    Example:
        >>> from perfguard.verdict import Verdict
        >>> with MeasurementStore(":memory:") as store:
        ...     verdict = Verdict(action="launch", unjudged="an example")
        ...     decision_id = store.record_decision(
        ...         verdict, graph=None, device=None, study="demo", trial=0, params={"lr": 0.1}
        ...     )
        ...     store.records("demo")[0].params
        {'lr': 0.1}

    Args:
        location: path of an SQLite file, ":memory:", or a SQLAlchemy URL of SQLite or PostgreSQL. A missing file is made, with
            its directory. None: :func:`default_location`.
        busy_timeout_s: how long a call waits for another process's lock, or for the server.

    Raises:
        LogError: the file is damaged, is no measurement log, is of another version of PerfGuard, or cannot be opened or made. A
            file that is there stays as it is.
        ConfigurationError: a URL that cannot be used.
    """

    def __init__(self, location: str | os.PathLike[str] | None = None, *, busy_timeout_s: float = 2.0) -> None:
        self._set_up(parse_url(default_location() if location is None else os.fspath(location)), busy_timeout_s)
        with self._lock:
            try:
                self._database.open()
            except OSError as error:
                raise LogError(unusable(self.location, error)) from error
            except SQLAlchemyError as error:
                self._warn(error)

    def _set_up(self, url: sql.URL, busy_timeout_s: float) -> None:
        self._lock = threading.RLock()
        self._database = Database(url, busy_timeout_s)
        self._rows: list[Row] = []  # rows that neither the database nor the disk could take yet
        self._warned: set[type[Exception]] = set()
        self._last_ns = 0
        self._num_decisions = 0
        # A predictor recognises graphs that it has seen by identity, so those that somebody still holds are found again.
        self._graphs: weakref.WeakValueDictionary[str, OpGraph] = weakref.WeakValueDictionary()
        self._finalizer = weakref.finalize(self, leave, self._rows, self._database)
        _stores.add(self)

    def record_decision(
        self,
        verdict: Verdict,
        *,
        graph: OpGraph | None,
        device: Device | None,
        study: str,
        trial: int | None,
        params: Mapping[str, object],
        trial_id: str | None = None,
    ) -> str:
        """Log one verdict and return its id, which :meth:`record_measurement` takes.

        Args:
            verdict: the action, and the numbers behind it.
            graph: of the trial's workload. None: it could not be traced.
            device: that was decided for.
            study: name of the study.
            trial: number of the trial. None: it has none.
            params: hyperparameters. Values that JSON does not know are logged as text.
            trial_id: the tuner's own name of the trial, where it has one beside the number.
        """
        values: dict[str, Any] = {
            "decision_id": uuid.uuid4().hex, "study": study, "trial": trial, "trial_id": trial_id, "host": platform.node(),
            "graph_hash": None, "device_hash": None,
        }  # fmt: skip
        with self._lock:
            rows = []
            if graph is not None:
                rows.append(tables.graph_row(graph))
                values["graph_hash"] = graph.content_hash
                self._graphs[graph.content_hash] = graph
            if device is not None:
                rows.append(tables.device_row(device))
                values["device_hash"] = rows[-1].values["content_hash"]
            self._deliver(*rows, tables.decision_row(verdict, params, created_at_ns=self._now_ns(), **values))
            self._num_decisions += 1
            if self._database.in_memory and self._num_decisions % 128 == 0:
                self._forget_graphs()
        return str(values["decision_id"])

    def record_measurement(self, decision_id: str, measurement: Measurement) -> None:
        """Log what the trial of that decision cost. Only the first measurement of a decision counts.

        The measurement of an interrupted run is replaced by a later one. So a resumed trial fills the row that it began.
        """
        with self._lock:
            values = {"decision_id": decision_id, "recorded_at_ns": self._now_ns(), "set_aside": None}
            self._deliver(tables.measurement_row(measurement, **values))

    def correct(self, decision_id: str, verdict: Verdict, graph: OpGraph) -> None:
        """Replace the verdict of a decision and its graph: the trial runs another step than the one that was judged."""
        values = tables.decision_row(verdict, {}, graph_hash=graph.content_hash).values
        del values["params"]
        with self._opened() as database:
            database.write([tables.graph_row(graph)])
            with database.transaction() as connection:
                connection.execute(sql.update(DecisionRow).where(DecisionRow.decision_id == decision_id).values(values))

    def records(self, of: str | Selection | None = None, *, newest: int | None = None) -> list[TrialRecord]:
        """Return the newest trials of a study (its name) or of a selection, oldest first. ``of`` or ``newest`` None: all.

        Raises:
            LogError: if the log cannot be read now.
        """
        selection = of if isinstance(of, Selection) else Selection(study=of)
        newest_first = DecisionRow.created_at_ns.desc(), DecisionRow.decision_id.desc()
        query = selection.query(DecisionRow, MeasurementRow, DeviceRow).order_by(*newest_first).limit(newest)
        found = []
        for decision, run, device in reversed(self._read(query)):
            try:
                found.append(tables.record_of(decision, run, device))
            except _DAMAGED as error:  # the others are not
                self._warn(error)
        return found

    def observations(self, device: str | Device, limit: int = 500) -> list[Observation]:
        """The newest ``limit`` runs on that device that ended well or out of memory, and whose graph is known, oldest first.

        For a run with status "oom" the peak memory is a lower bound, and the times are not those of a complete run. Measurements
        that are set aside, or of another device than the one that was decided for, are left out. If ``device`` is no id, runs on
        the very same one (see :attr:`Device.identity`) carry it: the rates of a CPU differ from process to process, and what is
        learnt must be relative to the rates that predictions use.

        A study asks after each of its trials. So an attempt that must fail is not made, and the log has warned.

        Raises:
            LogError: if the log cannot be read now, or could not a moment ago.
        """
        query = (
            sql.select(MeasurementRow, DecisionRow, DeviceRow.data)
            .join(DecisionRow, DecisionRow.decision_id == MeasurementRow.decision_id)
            .join(DeviceRow, DeviceRow.content_hash == DecisionRow.device_hash)
            .join(GraphRow, GraphRow.content_hash == DecisionRow.graph_hash)
            .where(
                MeasurementRow.status.in_(("ok", "oom")),
                MeasurementRow.device_id == (device if isinstance(device, str) else device.id),
                MeasurementRow.device_id == DeviceRow.device_id,
                MeasurementRow.set_aside.is_(None),
            )
            .order_by(MeasurementRow.recorded_at_ns.desc(), MeasurementRow.decision_id.desc())
            .limit(limit)
        )
        with self._opened(in_study=True) as database:
            rows = _found(database, query)
            graphs = self._graphs_of(database, {decision.graph_hash for _, decision, _ in rows})
        devices: dict[str, Device] = {}
        found = []
        for run, decision, data in reversed(rows):
            try:
                if data not in devices:
                    of = tables.device_from_json(data)
                    is_same = not isinstance(device, str) and of.identity == device.identity
                    devices[data] = device if is_same else of  # type: ignore[assignment]
                found.append(tables.observation_of(run, decision, graphs[decision.graph_hash], devices[data]))
            except _DAMAGED as error:
                self._warn(error)
        return found

    def history(self, study: str) -> History:
        """The launched trials of a study, of all processes that share the log. They are what its risk is accounted by.

        Trials that ran on another device than the guarded one took none of its time.
        """
        query = Selection(study=study).query(MeasurementRow, DecisionRow, DeviceRow.device_id)
        is_doubtful = sql.and_(DecisionRow.verdict != "prune", DecisionRow.accepted > EVEN_CHANCE)  # type: ignore[attr-defined]
        rows = self._read(query.where(sql.or_(MeasurementRow.decision_id.is_not(None), is_doubtful)))
        read: defaultdict[str | None, list[int]] = defaultdict(list)
        for run, decision, _ in rows:
            if run is not None and run.status == "ok" and run.peak_memory_bytes and decision.graph_hash:
                read[decision.graph_hash].append(run.peak_memory_bytes)
        usual = {graph_hash: statistics.median(readings) for graph_hash, readings in read.items()}
        ended = []
        running = []
        now_ns = time.time_ns()
        for run, decision, device_id in rows:
            try:
                if run is not None and device_id in (None, run.device_id):
                    ended.append(tables.ended_trial_of(run, decision, usual_bytes=usual.get(decision.graph_hash)))
                elif run is None and (trial := tables.running_trial_of(decision, now_ns=now_ns)) is not None:
                    running.append(trial)
            except _DAMAGED as error:
                self._warn(error)
        return History(ended=tuple(ended), running=tuple(running))

    def device_ids(self) -> list[str]:
        """The devices that runs were measured on."""
        return [row.device_id for row in self._read(sql.select(MeasurementRow.device_id).distinct())]

    def names(self) -> Mapping[str, list[str]]:
        """Return the studies, devices and hosts of the log, by the field of a :class:`Selection` that selects them."""
        host = sql.func.coalesce(MeasurementRow.host, DecisionRow.host)
        columns = {"study": (DecisionRow.study,), "device": (DeviceRow.device_id, MeasurementRow.device_id), "host": (host,)}
        rows = {name: self._read(Selection().query(*wanted).distinct()) for name, wanted in columns.items()}
        return {name: sorted({value for row in found for value in row if value is not None}) for name, found in rows.items()}

    def counts(self) -> dict[str, int]:
        """Number of rows of each table."""
        rows = (DecisionRow, MeasurementRow, GraphRow, DeviceRow, WeightsRow)
        with self._opened() as database, database.engine.connect() as connection:
            return {
                row.__tablename__: connection.execute(sql.select(sql.func.count()).select_from(row)).scalar_one() for row in rows
            }

    def set_aside(self, selection: Selection, reason: str) -> int:
        """Mark the selected measurements, so that nothing is learnt from them any more, and return how many are new.

        They stay in the log with the reason, a sentence. What is set aside already keeps its own.
        """
        if not reason:
            raise ConfigurationError("Say why the measurements are set aside: reason is empty.")
        return self._mark(selection, MeasurementRow.set_aside.is_(None), reason)

    def take_back(self, selection: Selection) -> int:
        """Undo :meth:`set_aside` for the selected measurements, whatever the reason was, and return how many there were."""
        return self._mark(selection, MeasurementRow.set_aside.is_not(None), None)

    def _mark(self, selection: Selection, condition: sql.ColumnElement[bool], set_aside: str | None) -> int:
        if selection.is_everything:
            raise ConfigurationError("Say which measurements: a study, a device, a host, a status, a verdict or a time.")
        chosen = MeasurementRow.decision_id.in_(selection.query(DecisionRow.decision_id))
        with self._opened() as database, database.transaction() as connection:
            return connection.execute(sql.update(MeasurementRow).where(condition, chosen).values(set_aside=set_aside)).rowcount

    def prune(self, selection: Selection) -> int:
        """Remove the selected decisions with their measurements, and the graphs and devices that nothing refers to any more.

        Return how many decisions were removed. SQLite reuses the space, but the file does not shrink. Weights stay.
        """
        if selection.is_everything:
            raise ConfigurationError("Say what to remove: a study, a device, a host, a status, a verdict or a time.")
        with self._opened() as database, database.transaction() as connection:
            ids = connection.execute(selection.query(DecisionRow.decision_id)).scalars().all()
            for row in (MeasurementRow, DecisionRow) if ids else ():
                # One statement for each id: a list of them may be longer than the database takes variables.
                of_id = sql.delete(row).where(row.decision_id == sql.bindparam("id"))
                connection.execute(of_id, [{"id": decision_id} for decision_id in ids])
            for stored, reference in ((GraphRow, DecisionRow.graph_hash), (DeviceRow, DecisionRow.device_hash)):
                used = sql.select(reference).where(reference.is_not(None))
                connection.execute(sql.delete(stored).where(stored.content_hash.not_in(used)))
        return len(ids)

    def export(self, path: str | os.PathLike[str], selection: Selection | None = None) -> int:
        """Write one table with a row for each selected decision (None: all), and return how many there are.

        Columns of the measurement begin with "measured_".

        Args:
            path: ends in ".csv", or in ".parquet", which needs `perfguard[export]`.
            selection: which decisions.

        Raises:
            ConfigurationError: if ``path`` has another ending.
            LogError: if the file cannot be written.
        """
        path = Path(path)
        if path.suffix not in (".csv", ".parquet"):
            raise ConfigurationError(f"The file of an export must end in .csv or .parquet, but got {str(path)!r}.")
        decided = [column for column in DecisionRow.__table__.columns if not column.name.endswith("_hash")]
        measured = [
            column.label(f"measured_{column.name}") for column in MeasurementRow.__table__.columns if column.name != "decision_id"
        ]
        query = (selection or Selection()).query(*decided, DeviceRow.device_id, *measured).order_by(DecisionRow.created_at_ns)
        with self._opened() as database, database.engine.connect() as connection:
            found = connection.execute(query)
            columns = list(found.keys())
            rows = found.all()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            (write_csv if path.suffix == ".csv" else write_parquet)(path, columns, rows)
        except ImportError as error:
            raise LogError(f"An export to Parquet needs more packages: pip install 'perfguard[export]' ({error}).") from error
        except OSError as error:
            raise LogError(f"The log cannot be exported to {path}: {error}.") from error
        return len(rows)

    def promote(self, predictor: str, data: bytes, metrics: Mapping[str, Any] | None = None) -> str:
        """Put a new generation of weights into use and return its id. A promotion does not wait.

        Args:
            predictor: whose, for instance "guardnet".
            data: the bytes of the weights' file.
            metrics: what the generation was judged by.
        """
        values = {
            "weights_id": uuid.uuid4().hex,
            "predictor": predictor,
            "created_at_ns": self._now_ns(),
            "sha256": sha256(data).hexdigest(),
            "metrics": tables.as_json(metrics or {}),
            "data": data,
        }
        with self._opened() as database, database.transaction() as connection:
            connection.execute(sql.insert(WeightsRow), values)
        return str(values["weights_id"])

    def promoted(self, predictor: str) -> tuple[str, bytes] | None:
        """The id and the bytes of the generation of ``predictor``'s weights that is in use. None: the shipped ones are."""
        with self._opened(in_study=True) as database, database.engine.connect() as connection:
            row = connection.execute(_in_use(predictor, WeightsRow.weights_id, WeightsRow.data)).first()
        return None if row is None else (row.weights_id, row.data)

    def roll_back(self, predictor: str) -> str | None:
        """Take the generation of ``predictor``'s weights in use out of use, and return the one before, which is in use now.

        None: the shipped weights are. If they were already, that is a LogError.
        """
        with self._opened() as database, database.transaction() as connection:
            weights_id = connection.execute(_in_use(predictor, WeightsRow.weights_id)).scalar()
            chosen = sql.update(WeightsRow).where(WeightsRow.weights_id == weights_id)  # no row has the id None
            connection.execute(chosen.values(rolled_back_at_ns=self._now_ns()))
            before: str | None = connection.execute(_in_use(predictor, WeightsRow.weights_id)).scalar()
        if weights_id is None:
            raise LogError(f"No fine-tuned weights of {predictor!r} are in use, so there is nothing to roll back.")
        return before

    def weights(self, predictor: str | None = None) -> list[LoggedWeights]:
        """The generations of ``predictor``'s weights, or of all predictors', oldest first."""
        columns = [column for column in WeightsRow.__table__.columns if column.name != "data"]
        query = sql.select(*columns).order_by(WeightsRow.created_at_ns, WeightsRow.weights_id)
        rows = self._read(query if predictor is None else query.where(WeightsRow.predictor == predictor))
        in_use = {row.predictor: row.weights_id for row in rows if row.rolled_back_at_ns is None}.values()  # the newest of each
        return [
            LoggedWeights(
                weights_id=row.weights_id,
                predictor=row.predictor,
                created_at=tables.as_time(row.created_at_ns),
                sha256=row.sha256,
                metrics=json.loads(row.metrics),
                state="rolled back" if row.rolled_back_at_ns else "promoted" if row.weights_id in in_use else "superseded",
                state_changed_at=tables.as_time(row.rolled_back_at_ns or row.created_at_ns),
            )
            for row in rows
        ]

    def flush(self) -> None:
        """Try once more to write what is waiting."""
        with self._lock:
            self._deliver(at_once=True)

    def close(self) -> None:
        """Write what is waiting, or leave it beside the log. A later call opens the log again."""
        with self._lock:
            self._deliver(at_once=True)
            leave(self._rows, self._database)

    def __enter__(self) -> MeasurementStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MeasurementStore({self.location!r})"

    @property
    def location(self) -> str:
        """The path, or the URL without its password; ":memory:" for a log in this process's memory."""
        return self._database.name

    @property
    def url(self) -> str | None:
        """The URL, with its password, by which another process opens the same log. None: it is in this process's memory."""
        return None if self._database.in_memory else self._database.url.render_as_string(hide_password=False)

    def __getstate__(self) -> tuple[sql.URL, float]:
        return self._database.url, self._database.busy_timeout_s

    def __setstate__(self, state: tuple[sql.URL, float]) -> None:
        self._set_up(*state)

    def _after_fork(self) -> None:
        """Begin anew in a forked child. The parent keeps its connections and writes what is waiting."""
        self._lock = threading.RLock()  # a thread of the parent may have held the old one
        if not self._database.in_memory:
            self._finalizer.detach()
            _of_parents.append(self._database.engine)
            self._set_up(*self.__getstate__())

    def _now_ns(self) -> int:
        """The time since 1970. It strictly increases, so that rows keep their order."""
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        return self._last_ns

    def _deliver(self, *rows: Row, at_once: bool = False) -> None:
        """Write ``rows``, or keep them beside the log if that fails, with one warning. The caller holds the lock."""
        self._rows += rows
        if at_once or not self._database.is_away:
            try:
                with self._attempt():
                    pass
            except _TROUBLE as error:
                self._warn(error)
        if self._rows:
            with suppress(OSError):  # the disk is full, perhaps; they wait in memory, and the next call tries again
                self._database.keep(self._rows)

    def _read(self, query: sql.Executable) -> Sequence[Any]:
        """Return the rows that ``query`` finds. A log that cannot be read is a LogError."""
        with self._opened() as database:
            return _found(database, query)

    @contextmanager
    def _opened(self, *, in_study: bool = False) -> Iterator[Database]:
        """Yield the database to whoever needs an answer. Any error of it becomes a LogError.

        A study goes on without an answer. So it makes no attempt during a pause, and each kind of trouble is warned of once.
        """
        with self._lock:
            if in_study and self._database.is_away:
                raise LogError(f"The measurement log {self.location} could not be reached a moment ago. Try again later.")
            try:
                with self._attempt() as database:
                    yield database
            except _TROUBLE as error:
                if in_study:
                    self._warn(error)
                if isinstance(error, LogError):
                    raise
                raise LogError(f"The measurement log {self.location} cannot be used now: {reason_of(error)}.") from error

    @contextmanager
    def _attempt(self) -> Iterator[Database]:
        """Yield the open database, with all rows written that wait in this process. A failure begins a pause, a success ends it.

        The pause is ten times as long as the attempt took, so that a trial waits a tenth of the time at most.
        """
        begun_s = time.monotonic()
        try:
            self._database.write(self._rows)
            self._rows.clear()
            yield self._database
        except _TROUBLE:
            waited_s = time.monotonic() - begun_s
            self._database.is_open = False
            self._database.retry_at_s = time.monotonic() + 10 * waited_s if waited_s > 0.2 else 0.0
            raise
        self._database.retry_at_s = 0.0

    def _forget_graphs(self, *, newest: int = 128, most_runs: int = 500) -> None:
        """Remove graphs that nobody will ask for: a log in memory would grow by 10 to 100 KiB for each structure.

        Kept are those of the ``newest`` decisions, of the ``most_runs`` newest runs, and of launched trials that may still run.
        """
        is_run = DecisionRow.decision_id == MeasurementRow.decision_id
        kept = (
            sql.select(DecisionRow.graph_hash).order_by(DecisionRow.created_at_ns.desc()).limit(newest),
            sql.select(DecisionRow.graph_hash).where(is_run).order_by(MeasurementRow.recorded_at_ns.desc()).limit(most_runs),
            sql.select(DecisionRow.graph_hash).where(DecisionRow.verdict != "prune", ~sql.exists().where(is_run)),
        )
        chosen = [GraphRow.content_hash.not_in(query.where(DecisionRow.graph_hash.is_not(None))) for query in kept]
        with suppress(LogError), self._opened() as database, database.transaction() as connection:
            connection.execute(sql.delete(GraphRow).where(*chosen))

    def _warn(self, error: Exception) -> None:
        """Warn once of each kind of trouble: a log that is damaged now may have been locked before."""
        if type(error) in self._warned:
            return
        self._warned.add(type(error))
        if isinstance(error, LogError):
            message = f"{error} Rows wait in files beside it, and are written when it can be opened again."
        elif isinstance(error, _TROUBLE):
            message = (
                f"The measurement log {self.location} cannot be used now ({reason_of(error)}). Rows are kept and written later, "
                "at the latest when the log is opened again. Close the program that locks it, or fix the cause."
            )
        else:
            message = f"The measurement log {self.location} has damaged rows, which are left out ({reason_of(error)})."
        warn_user(message, LogWarning)

    def _graphs_of(self, database: Database, hashes: set[str]) -> Mapping[str, OpGraph]:
        """Return the graphs with those hashes. One that is damaged is left out, with a warning."""
        from perfguard.graph import OpGraph

        found = {content_hash: graph for content_hash in hashes if (graph := self._graphs.get(content_hash)) is not None}
        missing = hashes - found.keys()
        wanted = sql.select(GraphRow.content_hash, GraphRow.data).where(GraphRow.content_hash.in_(missing))
        for row in _found(database, wanted) if missing else ():
            try:
                found[row.content_hash] = OpGraph.from_bytes(row.data)
            except _DAMAGED as error:
                self._warn(error)
        self._graphs.update(found)
        return found


def _found(database: Database, query: sql.Executable) -> Sequence[Any]:
    """Return the rows that ``query`` finds."""
    with Session(database.engine) as session:
        return session.execute(query).all()


def _in_use(predictor: str, *columns: Any) -> sql.Select[Any]:
    """A query for columns of the generation of weights in use: the newest that was not rolled back."""
    query = sql.select(*columns).where(WeightsRow.predictor == predictor, WeightsRow.rolled_back_at_ns.is_(None))
    return query.order_by(WeightsRow.created_at_ns.desc(), WeightsRow.weights_id.desc()).limit(1)


_stores: weakref.WeakSet[MeasurementStore] = weakref.WeakSet()
_of_parents: list[sql.Engine] = []  # of the parent in a forked child; closing one would end the parent's connections


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
