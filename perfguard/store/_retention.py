"""What leaves the log: which decisions are too old or too many, and what nothing refers to any more."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, delete, select

from perfguard.store import _schema as schema

ROWS_AT_ONCE = 5000
"""So many rows in one transaction: others want to write too."""


def cutoff_ns(connection: Connection, before: datetime | None, keep_newest: int | None) -> int | None:
    """The time before which decisions are to go; None: none is."""
    created = schema.decisions.c.created_at_ns
    cutoffs = [] if before is None else [int(before.timestamp() * 1e9)]
    if keep_newest is not None:
        first_to_go = connection.execute(select(created).order_by(created.desc()).offset(keep_newest).limit(1)).scalar()
        cutoffs += [] if first_to_go is None else [int(first_to_go) + 1]
    return max(cutoffs, default=None)


def remove_decisions(connection: Connection, cutoff_ns: int) -> int:
    """Remove the oldest decisions before ``cutoff_ns``, a limited number at once, with their measurements."""
    table = schema.decisions
    query = select(table.c.decision_id).where(table.c.created_at_ns < cutoff_ns).order_by(table.c.created_at_ns)
    oldest = query.limit(ROWS_AT_ONCE).scalar_subquery()
    connection.execute(delete(schema.measurements).where(schema.measurements.c.decision_id.in_(oldest)))
    return connection.execute(delete(table).where(table.c.decision_id.in_(oldest))).rowcount


def remove_orphans(connection: Connection, cutoff_ns: int) -> None:
    """Remove old measurements whose decision never came, and graphs and devices that no decision refers to."""
    decisions, measurements = schema.decisions, schema.measurements
    old = measurements.c.recorded_at_ns < cutoff_ns
    connection.execute(delete(measurements).where(old, measurements.c.decision_id.not_in(select(decisions.c.decision_id))))
    for table, reference in ((schema.graphs, decisions.c.graph_hash), (schema.devices, decisions.c.device_hash)):
        used = select(reference).where(reference.is_not(None))
        connection.execute(delete(table).where(table.c.content_hash.not_in(used)))
