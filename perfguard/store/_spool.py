"""Rows that outlive the process: undelivered rows wait in a file until the log can be written again.

Each spool is a file of its own, `<log>.<32 hexadecimal digits>.spool.jsonl`, renamed into place when it is complete. So no two
processes ever write the same file. Delivery is idempotent, so two processes may deliver the same one.
"""

from __future__ import annotations

import base64
import glob
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import LargeBinary

from perfguard.exceptions import LogVersionError
from perfguard.store._migrations import mend
from perfguard.store._schema import SCHEMA_VERSION, Entry, metadata


def write_spool(log: Path, entries: Sequence[Entry]) -> Path:
    """Write ``entries`` to a new spool of ``log`` and return its path."""
    path = log.with_name(f"{log.name}.{uuid.uuid4().hex}.spool.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            for table, row in entries:
                document = {"schema": SCHEMA_VERSION, "table": table, "row": row}
                file.write(json.dumps(document, default=lambda data: base64.b64encode(data).decode()) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def find_spools(log: Path) -> list[Path]:
    """The complete spools of ``log``."""
    return sorted(log.parent.glob(f"{glob.escape(log.name)}.{'[0-9a-f]' * 32}.spool.jsonl"))


def read_spool(path: Path) -> list[Entry]:
    """The rows of a spool.

    Raises:
        ValueError: if the file is not what :func:`write_spool` writes.
        LogVersionError: if a newer PerfGuard wrote it.
    """
    try:
        return [_entry(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _entry(line: str) -> Entry:
    document = json.loads(line)
    table, row = document["table"], document["row"]
    if document["schema"] > SCHEMA_VERSION:
        raise LogVersionError(f"it has schema {document['schema']}, this PerfGuard reads up to {SCHEMA_VERSION}")
    columns = metadata.tables[table].columns
    if not set(row) <= set(columns.keys()):  # an older schema has fewer columns; what it lacks is NULL
        raise ValueError(f"a row of table {table!r} has unknown columns")
    encoded = {name: base64.b64decode(row[name]) for name in row if isinstance(columns[name].type, LargeBinary) and row[name]}
    return Entry(table, mend(document["schema"], table, row | encoded))
