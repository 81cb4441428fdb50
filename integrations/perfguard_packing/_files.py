"""Devices and jobs as people write them: "a100:2,t4:4", and a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from perfguard.devices import resolve_device
from perfguard.exceptions import ConfigurationError
from perfguard.quantities import parse_bytes, parse_seconds
from perfguard_packing._plan import Job, Slot


def parse_slots(text: str) -> list[Slot]:
    """The devices that a text such as "a100:2,t4:4" means; the kinds are the names as they are written.

    Raises:
        ConfigurationError: for a text that cannot be read, or a GPU that is not in the catalog.
    """
    slots: list[Slot] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, count = part.partition(":")
        if count and not count.isdecimal():
            raise ConfigurationError(f'The GPUs must look like "a100:2,t4:4", but got {part!r}.')
        memory_bytes = resolve_device(kind).memory_bytes
        slots += [Slot(f"{kind}-{number}", kind, memory_bytes) for number in range(int(count or 1))]
    if not slots:
        raise ConfigurationError(f'The GPUs must look like "a100:2,t4:4", but got {text!r}.')
    return slots


def read_jobs(path: str | Path, kinds: Iterable[str]) -> list[Job]:
    """The jobs of a CSV file with the columns ``name``, ``memory`` ("12GiB", or bytes) and ``time_<gpu>`` ("90s", or seconds).

    An empty time means that the job cannot run on that kind. A column ``time`` stands for the kinds that have none of their
    own. Only the times on ``kinds`` are read.

    Raises:
        ConfigurationError: for a file or a line that cannot be used; names both.
    """
    wanted = tuple(dict.fromkeys(kinds))
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            missing = {"name", "memory"} - set(columns)
            if missing or not any(column == "time" or column.startswith("time_") for column in columns):
                raise ConfigurationError(
                    f"{path} must have the columns name, memory and time_<gpu> (for instance time_a100), but has "
                    f"{', '.join(columns) or 'none'}."
                )
            return [_job_of(row, wanted, f"{path}, line {reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"The jobs cannot be read from {path}: {error}") from error


def _job_of(row: Mapping[str, str | None], kinds: Iterable[str], place: str) -> Job:
    def text(column: str) -> str:
        return (row.get(column) or "").strip()

    try:
        times = {kind: (column, text(column)) for kind in kinds for column in ("time", f"time_{kind}") if text(column)}
        time_s = {kind: parse_seconds(given, what=column) for kind, (column, given) in times.items()}
        return Job(text("name") or place, parse_bytes(text("memory"), what="memory"), time_s)
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from error
