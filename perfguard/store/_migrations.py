"""Migrations of an older log to the present schema: one function per version, in Alembic's operations.

The version stays where the first PerfGuard looked for it: in the row "schema_version" of the table `meta`. Alembic's own table
is not used. So an older PerfGuard finds that the log is too new for it.

A step must keep every row and must work on SQLite and on PostgreSQL. It may not use `_schema.py`, which changes over time. All
steps and the new version are one transaction. A process that dies in the middle leaves the log as it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    LargeBinary,
    Text,
    bindparam,
    column,
    delete,
    select,
    table,
    update,
)

if TYPE_CHECKING:
    from alembic.operations import Operations


def migrate(connection: Connection, version: int, to: int) -> None:
    """Bring the tables from schema ``version`` to schema ``to``; the caller holds the transaction and writes the version."""
    from alembic.migration import MigrationContext  # only an old log needs it, and it takes a while to import
    from alembic.operations import Operations

    operations = Operations(MigrationContext.configure(connection))
    for step in range(version + 1, to + 1):
        _STEPS[step](operations)


def _to_2(op: Operations) -> None:
    """Add readings of GPU probes, weights and their lineage, and an index to draw measurements at random."""
    for name in ("allocated_peak_bytes", "reserved_peak_bytes", "oom_retries"):
        op.add_column("measurements", Column(name, BigInteger))
    for name in ("sm_utilisation", "energy_j", "sm_clock_hz", "data_wait_s"):
        op.add_column("measurements", Column(name, Double))
    for name in ("throttled", "driver", "confidence"):
        op.add_column("measurements", Column(name, Text))
    op.create_index("ix_measurements_device_id_decision_id", "measurements", ["device_id", "decision_id"])
    op.create_table(
        "weights",
        Column("weights_id", Text, primary_key=True),
        Column("parent_id", Text),
        Column("predictor", Text, index=True),
        Column("created_at_ns", BigInteger),
        Column("sha256", Text),
        Column("metrics", Text),
        Column("state", Text),
        Column("state_changed_at_ns", BigInteger),
        Column("data", LargeBinary),
    )


def _to_3(op: Operations) -> None:
    """Leases, so that one process at a time learns for all, and by what a decision's intervals had been widened."""
    for name in ("peak_memory_widening", "step_time_widening"):
        op.add_column("decisions", Column(name, Double))
    op.create_table(
        "leases",
        Column("name", Text, primary_key=True),
        Column("holder", Text),
        Column("expires_at_ns", BigInteger),
    )


def _to_4(op: Operations) -> None:
    """Hosts, the tuner's ids of trials, what is set aside; one row for a CPU that had one a process."""
    for name in ("host", "trial_id"):
        op.add_column("decisions", Column(name, Text))
    for name in ("host", "set_aside"):
        op.add_column("measurements", Column(name, Text))
    _set_aside_the_absent(op.get_bind())
    _make_each_cpu_one_device(op.get_bind())


def _set_aside_the_absent(connection: Connection) -> None:
    measured = table("measurements", column("decision_id"), column("method"), column("note"), column("set_aside"))
    query = select(measured.c.decision_id, measured.c.method, measured.c.note).where(measured.c.method == "none")
    found = [{"id": row.decision_id, "reason": reason} for row in connection.execute(query) if (reason := _absent(row._mapping))]
    if found:
        change = update(measured).where(measured.c.decision_id == bindparam("id")).values(set_aside=bindparam("reason"))
        connection.execute(change, found)


def mend(version: int, table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row that was exported or spooled with schema ``version`` to the present schema. Missing values are NULL."""
    if version < 4 and table == "measurements" and (reason := _absent(row)):
        return {**row, "set_aside": reason}
    return dict(row)


def _absent(row: Mapping[Any, Any]) -> str | None:
    """The reason why a reading from before schema 4 does not belong to its device. None: it may belong."""
    note = str(row.get("note") or "")
    if row.get("method") == "none" and any(words in note for words in ("this PyTorch has no CUDA", "did not use CUDA in this")):
        return "the device was not there: the run used no GPU in its process"
    return None


def _make_each_cpu_one_device(connection: Connection) -> None:
    """Before schema 4 each process had a row of its own, because the rates that it measured were part of the key."""
    devices = table("devices", column("content_hash"), column("data"))
    decisions = table("decisions", column("device_hash"))
    seen: set[str] = set()
    for row in connection.execute(select(devices).order_by(devices.c.content_hash)).all():
        identity = _identity_of_cpu(row.data)
        if identity is None:
            continue
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        same = devices.c.content_hash == row.content_hash
        connection.execute(delete(devices).where(same) if key in seen else update(devices).where(same).values(content_hash=key))
        connection.execute(update(decisions).where(decisions.c.device_hash == row.content_hash).values(device_hash=key))
        seen.add(key)


def _identity_of_cpu(data: str) -> dict[str, Any] | None:
    """Identity of a CPU; None: it is another device, or the row is damaged, which its reader reports."""
    try:
        device = json.loads(data)
        identity = {name: device[name] for name in ("id", "name", "kind", "memory_bytes", "num_sms", "architecture")}
    except (ValueError, KeyError, TypeError):
        return None
    return identity if identity["kind"] == "cpu" else None


_STEPS: Mapping[int, Callable[[Operations], None]] = {2: _to_2, 3: _to_3, 4: _to_4}
"""Migration steps by the version that they lead to."""
