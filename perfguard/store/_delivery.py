"""Delivery of rows to the database. Rows wait in memory and in spool files until the database has them."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import DataError, IntegrityError

from perfguard.exceptions import LogVersionError, LogWarning, warn_user
from perfguard.log import _schema as schema
from perfguard.store._database import savepoint
from perfguard.store._log import TROUBLE, Log, reason_of
from perfguard.store._schema import Entry
from perfguard.store._spool import find_spools, read_spool, write_spool

if TYPE_CHECKING:
    from perfguard.graph import OpGraph

_MAX_OWN_SPOOLS = 64
_NEVER_WRITABLE = (DataError, IntegrityError, OverflowError, ValueError)


class Delivery:
    """Brings rows to the log, once and in order. What cannot be written now is kept, and a spool file outlives the process.

    The caller holds the log's lock. A forked child keeps no waiting rows: the parent delivers them.

    Args:
        log: where the rows go.
        graphs: graphs at hand by content hash, to bring one once more that another process has pruned.
    """

    def __init__(self, log: Log, graphs: Mapping[str, OpGraph]) -> None:
        self._log = log
        self._graphs = graphs
        self._queue: list[Entry] = []  # waits, and is nowhere else
        self._kept: list[Entry] = []  # waits, and is in _own_spools too
        self._own_spools: list[Path] = []
        self._spool_delivered = log.spool_base is None
        self._finalizer = weakref.finalize(self, _leave, self._queue, log.spool_base, log.engine)
        _deliveries.add(self)

    @property
    def is_waiting(self) -> bool:
        """Whether there are rows that the database does not have yet."""
        return bool(self._queue or self._kept)

    def add(self, entry: Entry) -> None:
        """Let ``entry`` wait for the next :meth:`deliver`."""
        self._queue.append(entry)

    def deliver(self, *, at_once: bool = False) -> None:
        """Bring all waiting rows to the database. The caller holds the lock. If it fails, the rows are kept, with one warning.

        After a slow attempt, later calls only keep their rows for a while, unless ``at_once``.
        """
        begun_s = time.monotonic()
        if not at_once and self._log.is_away:
            self._keep()
            return
        try:
            self._log.prepare()
            if not self._spool_delivered:
                self._deliver_spools()
            self._write(self._kept)
            self._write(self._queue)
        except TROUBLE as error:
            self._log.reopen_later()
            self._log.pause_after(begun_s)
            self._log.sent_graphs = {entry.row["content_hash"] for entry in self._kept + self._queue if entry.table == "graphs"}
            self._keep()
            self._log.warn(error)
        else:
            self._remove_own_spools()

    def close(self) -> None:
        """Deliver what is waiting, or leave it in a spool file."""
        self.deliver(at_once=True)
        self._log.reopen_later()
        self._merge_own_spools()
        self._kept.clear()
        self._own_spools.clear()
        _leave(self._queue, self._log.spool_base, self._log.engine)

    def after_fork(self) -> None:
        """Discard the waiting rows in a forked child."""
        self._log.after_fork()
        self._queue.clear()
        self._kept.clear()
        self._own_spools.clear()
        if not self._log.in_memory:
            self._finalizer.detach()
            self._finalizer = weakref.finalize(self, _leave, self._queue, self._log.spool_base, self._log.engine)

    def _keep(self) -> None:
        """Write what waits to a spool now: this process may be killed before the database is back."""
        if self._log.spool_base is None or not self._queue:
            return
        try:
            self._own_spools.append(write_spool(self._log.spool_base, self._queue))
        except OSError:
            return  # the disk is full, perhaps; they wait in memory, and the next call tries again
        self._kept += self._queue
        self._queue.clear()
        if len(self._own_spools) > _MAX_OWN_SPOOLS:
            self._merge_own_spools()

    def _merge_own_spools(self) -> None:
        """Merge the spool files of this store into one.

        If the process dies in between, old and new files are delivered, each row once.
        """
        if self._log.spool_base is None or len(self._own_spools) < 2:
            return
        with suppress(OSError):
            merged = write_spool(self._log.spool_base, self._kept)
            self._remove_own_spools()
            self._own_spools.append(merged)

    def _remove_own_spools(self) -> None:
        for path in self._own_spools:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # another process that opened the log has delivered it
        self._own_spools.clear()

    def _deliver_spools(self) -> None:
        assert self._log.spool_base is not None
        for path in find_spools(self._log.spool_base):
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
            with self._log.transaction() as connection:
                self._log.put(connection, entries)
                self._put_pruned_graphs(connection, entries)
        except _NEVER_WRITABLE:
            self._write_one_by_one(entries)
        entries.clear()

    def _write_one_by_one(self, entries: Sequence[Entry]) -> None:
        with self._log.transaction() as connection:
            for entry in entries:
                try:
                    with savepoint(connection):
                        self._log.put(connection, [entry])
                except _NEVER_WRITABLE as error:
                    message = f"A row of {entry.table} cannot be written to {self._log.name} and is dropped ({reason_of(error)})."
                    warn_user(message, LogWarning)

    def _put_pruned_graphs(self, connection: Connection, entries: Sequence[Entry]) -> None:
        """Bring a graph once more that another process has pruned since this one sent it."""
        for graph_hash in {entry.row.get("graph_hash") for entry in entries if entry.table == "decisions"}:
            graph = self._graphs.get(graph_hash or "")
            if graph is None:
                continue
            known = select(schema.graphs.c.content_hash).where(schema.graphs.c.content_hash == graph_hash)
            if connection.execute(known).first() is None:
                self._log.put(connection, [schema.graph_entry(graph)])


_deliveries: weakref.WeakSet[Delivery] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for delivery in list(_deliveries):
        delivery.after_fork()


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
