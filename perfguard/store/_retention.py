"""Retention: removes decisions that are too old or too many, and rows that nothing refers to any more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from sqlalchemy import Connection, delete, select

from perfguard.log import _schema as schema
from perfguard.store._selection import Selection, select_ids

ROWS_AT_ONCE = 5000
"""Rows in one transaction. It is small so that other processes can write in between."""


def prune(transaction: Callable[[], AbstractContextManager[Connection]], selection: Selection, keep_newest: int | None) -> int:
    """Remove rows as in :meth:`MeasurementStore.prune`, in small transactions, and return how many decisions were removed."""
    with transaction() as connection:
        cutoff_ns = _cutoff_ns(connection, selection, keep_newest)
    num_removed = 0
    while cutoff_ns is not None:
        with transaction() as connection:  # a small one, so that other processes can write in between
            removed = _remove_decisions(connection, selection, cutoff_ns)
        num_removed += removed
        if removed < ROWS_AT_ONCE:
            break
    if cutoff_ns is not None:
        with transaction() as connection:
            _remove_orphans(connection, cutoff_ns if replace(selection, before=None).is_everything else 0)
    return num_removed


def _cutoff_ns(connection: Connection, selection: Selection, keep_newest: int | None) -> int | None:
    """The time before which the selected decisions are to go; None: none is."""
    created = schema.decisions.c.created_at_ns
    cutoffs = [] if selection.before is None else [schema.as_ns(selection.before)]
    if keep_newest is not None:
        of_any_age = select_ids(replace(selection, before=None)).with_only_columns(created, maintain_column_froms=True)
        first_to_go = connection.execute(of_any_age.order_by(created.desc()).offset(keep_newest).limit(1)).scalar()
        cutoffs += [] if first_to_go is None else [int(first_to_go) + 1]
    elif selection.before is None:
        newest = connection.execute(select(created).order_by(created.desc()).limit(1)).scalar()
        cutoffs += [] if newest is None else [int(newest) + 1]
    return max(cutoffs, default=None)


def _remove_decisions(connection: Connection, selection: Selection, cutoff_ns: int) -> int:
    """Remove the oldest selected decisions before ``cutoff_ns``, a limited number at once, with their measurements."""
    table = schema.decisions
    query = select_ids(replace(selection, before=None)).where(table.c.created_at_ns < cutoff_ns)
    # Read first: the statements below would otherwise select by measurements that the first of them has removed.
    ids = list(connection.execute(query.order_by(table.c.created_at_ns).limit(ROWS_AT_ONCE)).scalars())
    num_removed = 0
    for some in schema.in_lists(ids):
        connection.execute(delete(schema.measurements).where(schema.measurements.c.decision_id.in_(some)))
        num_removed += connection.execute(delete(table).where(table.c.decision_id.in_(some))).rowcount
    return num_removed


def _remove_orphans(connection: Connection, cutoff_ns: int) -> None:
    """Remove measurements from before that time whose decision never came, and graphs and devices that no decision refers to."""
    decisions, measurements = schema.decisions, schema.measurements
    old = measurements.c.recorded_at_ns < cutoff_ns
    connection.execute(delete(measurements).where(old, measurements.c.decision_id.not_in(select(decisions.c.decision_id))))
    for table, reference in ((schema.graphs, decisions.c.graph_hash), (schema.devices, decisions.c.device_hash)):
        used = select(reference).where(reference.is_not(None))
        connection.execute(delete(table).where(table.c.content_hash.not_in(used)))
