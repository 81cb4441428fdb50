"""Selection: which rows of the log to use. All code that shows, exports, removes or sets aside a part of the log takes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Select, false, func, or_, select

from perfguard.exceptions import ConfigurationError
from perfguard.log import _schema as schema
from perfguard.measure import Status

if TYPE_CHECKING:
    from perfguard.verdict import Action


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
        return all(getattr(self, field.name) is None for field in fields(self))


def select_ids(selection: Selection) -> Select[Any]:
    """The ids of the decisions."""
    decisions, measurements, devices = schema.decisions, schema.measurements, schema.devices
    conditions: list[ColumnElement[bool]] = []
    if selection.study is not None:
        conditions.append(decisions.c.study == selection.study)
    if selection.device is not None:
        ids = (selection.device,) if isinstance(selection.device, str) else selection.device
        conditions.append(or_(*(_is_one_of(ids, table.c.device_id) for table in (devices, measurements))))
    if selection.status is not None:
        conditions.append(measurements.c.status == selection.status)
    if selection.verdict is not None:
        conditions.append(decisions.c.action == selection.verdict)
    if selection.host is not None:
        conditions.append(func.coalesce(measurements.c.host, decisions.c.host) == selection.host)
    if selection.since is not None:
        conditions.append(decisions.c.created_at_ns >= schema.as_ns(selection.since))
    if selection.before is not None:
        conditions.append(decisions.c.created_at_ns < schema.as_ns(selection.before))
    query = select(decisions.c.decision_id)
    if selection.device is not None:
        query = query.outerjoin(devices, devices.c.content_hash == decisions.c.device_hash)
    if (selection.device, selection.status, selection.host) != (None, None, None):
        query = query.outerjoin(measurements, measurements.c.decision_id == decisions.c.decision_id)
    return query.where(*conditions)


def _is_one_of(ids: Sequence[str], device_id: ColumnElement[str]) -> ColumnElement[bool]:
    parts = [device_id.startswith(id_, autoescape=True) for id_ in ids if id_.endswith(":")]
    return or_(device_id.in_(ids), *parts)


def select_rows(table: str, selection: Selection) -> Select[Any]:
    """The rows of one of the log's tables that belong to the selected decisions, in the order of the table's key.

    Weights belong to no decision: they are there only if everything is selected.
    """
    rows = schema.metadata.tables[table]
    query = select(rows).order_by(*rows.primary_key.columns)
    if selection.is_everything:
        return query
    ids = select_ids(selection)
    if table in ("decisions", "measurements"):
        return query.where(rows.c.decision_id.in_(ids))
    references = {"graphs": schema.decisions.c.graph_hash, "devices": schema.decisions.c.device_hash}
    if table not in references:
        return query.where(false())
    return query.where(rows.c.content_hash.in_(select(references[table]).where(schema.decisions.c.decision_id.in_(ids))))
