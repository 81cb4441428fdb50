"""The way of an older log to the present schema: one function a version, in Alembic's operations.

The version is kept where the first PerfGuard looked for it, in the row "schema_version" of the table `meta`, and not in a
table of Alembic's own: an older PerfGuard must find that the log is too new for it.

A step must keep every row, must be right on SQLite and on PostgreSQL, and may not use `_schema.py`, which goes on changing. All
steps run in one transaction together with the new version; a process that dies on the way leaves the log as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, Connection, Double, LargeBinary, Text

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
    """What a GPU's probes see, weights and their lineage, and an index to draw measurements at random."""
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


_STEPS: Mapping[int, Callable[[Operations], None]] = {2: _to_2, 3: _to_3}
"""By the version that a step leads to."""
