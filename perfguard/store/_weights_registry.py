"""The registry of weights in the measurement log: the generations, the one in use, and the lease to promote."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, delete, select, update

from perfguard.exceptions import LogError
from perfguard.log import _schema as schema
from perfguard.store._log import Log
from perfguard.store._schema import LoggedWeights, WeightsState

T = TypeVar("T")
_PROMOTIONS = "perfguard weights"
"""Whoever changes which weights are in use waits for the one before to commit."""


class WeightsRegistry(ABC):
    """The methods of a :class:`MeasurementStore` for weights. They use no spool: a failed write raises an error."""

    _log: Log

    @abstractmethod
    def _read(self, query: Select[Any], convert: Callable[[Connection, Row[Any]], T]) -> list[T]:
        """The rows that ``query`` finds; none, and a warning, if the log cannot be read."""

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
        now_ns = self._log.now_ns()
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
        with self._log.writing() as transaction, transaction() as connection:
            self._log.put(connection, [entry])
        return weights_id

    def set_weights_state(self, weights_id: str, state: WeightsState) -> None:
        """Promote, reject or roll back a generation, in one transaction. Promoting one supersedes the one that was promoted.

        Raises:
            LogError: if there are no such weights, or the log cannot be written now.
        """
        table, now_ns = schema.weights, self._log.now_ns()
        with self._log.writing() as transaction, transaction() as connection:
            self._log.wait_for_turn(connection, _PROMOTIONS)
            predictor = connection.execute(select(table.c.predictor).where(table.c.weights_id == weights_id)).scalar()
            if predictor is None:
                raise LogError(f"The measurement log {self._log.name} has no weights {weights_id!r}.")
            changed = update(table).values(state_changed_at_ns=now_ns)
            if state == "promoted":
                others = changed.where(table.c.predictor == predictor, table.c.state == "promoted")
                connection.execute(others.values(state="superseded"))
            connection.execute(changed.where(table.c.weights_id == weights_id).values(state=state))

    def promote_candidate(self, weights_id: str) -> bool:
        """Promote a candidate if the generation that it was judged against, its parent, is still in use; else reject it.

        Meanwhile, another learner may have promoted another generation, or a user may have rolled the parent back.

        Returns:
            Whether it is in use now.

        Raises:
            LogError: if there is no such candidate, or the log cannot be written now.
        """
        table, now_ns = schema.weights, self._log.now_ns()
        with self._log.writing() as transaction, transaction() as connection:
            self._log.wait_for_turn(connection, _PROMOTIONS)
            candidate = select(table.c.predictor, table.c.parent_id).where(table.c.weights_id == weights_id)
            row = connection.execute(candidate.where(table.c.state == "candidate")).first()
            if row is None:
                raise LogError(f"The measurement log {self._log.name} has no candidate {weights_id!r}.")
            is_unchanged = bool(connection.execute(schema.select_promoted(row.predictor)).scalar() == row.parent_id)
            changed = update(table).values(state_changed_at_ns=now_ns)
            if is_unchanged:
                in_use = table.c.predictor == row.predictor, table.c.state == "promoted"
                connection.execute(changed.where(*in_use).values(state="superseded"))
            state = "promoted" if is_unchanged else "rejected"
            connection.execute(changed.where(table.c.weights_id == weights_id).values(state=state))
            return is_unchanged

    def roll_back_weights(self, weights_id: str) -> str | None:
        """Take a promoted generation out of use, and put the one that it was fine-tuned from back in, in one transaction.

        Returns:
            The generation that is now in use; None: the shipped weights.

        Raises:
            LogError: if the generation is not in use, or the log cannot be written now.
        """
        table, now_ns = schema.weights, self._log.now_ns()
        with self._log.writing() as transaction, transaction() as connection:
            self._log.wait_for_turn(connection, _PROMOTIONS)
            row = connection.execute(select(table.c.state, table.c.parent_id).where(table.c.weights_id == weights_id)).first()
            if row is None or row.state != "promoted":
                state = "not in the log" if row is None else row.state
                raise LogError(f"Only weights that are in use can be rolled back, but {weights_id!r} is {state}.")
            changed = update(table).values(state_changed_at_ns=now_ns)
            connection.execute(changed.where(table.c.weights_id == weights_id).values(state="rolled back"))
            back = changed.where(table.c.weights_id == row.parent_id, table.c.state == "superseded").values(state="promoted")
            return str(row.parent_id) if row.parent_id and connection.execute(back).rowcount else None

    def weights(self, predictor: str | None = None) -> list[LoggedWeights]:
        """The generations of ``predictor``'s weights, or of all predictors', oldest first."""
        columns = [column for column in schema.weights.c if column.name != "data"]
        query = select(*columns).order_by(schema.weights.c.created_at_ns, schema.weights.c.weights_id)
        if predictor is not None:
            query = query.where(schema.weights.c.predictor == predictor)
        return self._read(query, lambda _, row: schema.weights_from_row(row))

    def weights_since(self, time: datetime) -> list[LoggedWeights]:
        """The weights in use that were made after that time. They may have learnt from a run at that time.

        They come in the order in which to roll them back: each is followed by its predecessor, which is then in use again.
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

    def promoted_weights(self, predictor: str) -> str | None:
        """The id of the generation of ``predictor``'s weights that is in use; None: the shipped ones are.

        Raises:
            LogError: if the log cannot be read now.
        """
        with self._log.lock:
            if self._log.is_away:
                raise LogError(f"The measurement log {self._log.name} could not be reached. Try again.")
            with self._log.writing(), self._log.engine.connect() as connection:
                found = connection.execute(schema.select_promoted(predictor)).scalar()
        return None if found is None else str(found)

    def weights_data(self, weights_id: str) -> bytes | None:
        """The bytes of that generation; None if the log does not have them."""
        query = select(schema.weights.c.data).where(schema.weights.c.weights_id == weights_id)
        return next(iter(self._read(query, lambda _, row: row.data)), None)

    def lease(self, name: str, holder: str, *, seconds: float) -> bool:
        """Take or renew the lease on a task that only one process may do at a time. False: another process holds it.

        The lease of a process that dies ends after ``seconds``. The clocks of two machines may differ by less than that.

        Raises:
            LogError: if the log cannot be written now.
        """
        table, now_ns = schema.leases, time.time_ns()
        row = {"name": name, "holder": holder, "expires_at_ns": now_ns + int(seconds * 1e9)}
        with self._log.writing() as transaction, transaction() as connection:
            taken = self._log.insert_into(table).on_conflict_do_update(
                index_elements=["name"], set_=row, where=(table.c.holder == holder) | (table.c.expires_at_ns < now_ns)
            )
            return connection.execute(taken.returning(table.c.holder), row).first() is not None

    def release(self, name: str, holder: str) -> None:
        """Give a lease back before it ends. Nothing happens if another process holds it.

        Raises:
            LogError: if the log cannot be written now.
        """
        table = schema.leases
        with self._log.writing() as transaction, transaction() as connection:
            connection.execute(delete(table).where(table.c.name == name, table.c.holder == holder))
