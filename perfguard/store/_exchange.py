"""Export and import of the log as a folder with one CSV or Parquet file per table. Both may be repeated.

    manifest.json      schema, format, whether names were stripped, number of rows; written last
    decisions.csv ...  one file a table, with the table's columns

In CSV an empty field is an empty text, and bytes are base64. NULL is `\\N`, as in PostgreSQL's COPY. A text that begins with a
backslash gets one more. Each row has a key, so rows that the log has already are left out.
"""

from __future__ import annotations

import base64
import binascii
import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from sqlalchemy import BigInteger, Double, LargeBinary, Table

from perfguard.exceptions import ConfigurationError, LogError, LogVersionError, PerfGuardError, why_not_imported
from perfguard.log import _schema as schema
from perfguard.measure import Confidence, Status
from perfguard.store._migrations import mend
from perfguard.store._schema import SCHEMA_VERSION, Entry
from perfguard.store._selection import Selection

if TYPE_CHECKING:
    from perfguard.graph import OpGraph
    from perfguard.store._store import MeasurementStore

Format = Literal["csv", "parquet"]

_TABLES = ("graphs", "devices", "decisions", "measurements", "weights")
_MANIFEST = "manifest.json"
_NULL = "\\N"
_ROWS_AT_ONCE = 5000
_MAX_FIELD = 2**31 - 1
_JSON_COLUMNS = {("devices", "data"), ("decisions", "params"), ("weights", "metrics")}
_WORDS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("decisions", "action"): ("launch", "prune", "repair"),
    ("measurements", "status"): get_args(Status),
    ("measurements", "confidence"): get_args(Confidence),
    ("weights", "state"): get_args(schema.WeightsState),
}


def export_log(
    store: MeasurementStore,
    folder: str | Path,
    selection: Selection | None = None,
    *,
    format: Format = "csv",
    anonymize: bool = False,
) -> dict[str, int]:
    """Write the tables of the log into ``folder``. The folder is made, and files of an earlier export are replaced.

    Args:
        store: an open log.
        folder: where to.
        selection: only these decisions, with the rows that belong to them. Weights belong to no decision. None: all.
        format: "csv", or "parquet", which needs pyarrow.
        anonymize: strip all that could identify a person or a project. Stripped are names of studies and hosts, ids of trials,
            hyperparameters, reasons and notes, and metrics of weights. In graphs, module paths and the names of custom operators
            are stripped. What stays is in docs/log.md.

    Returns:
        The number of rows of each table.

    Raises:
        LogError: if the log cannot be read, or a file cannot be written.
        ConfigurationError: for a format that there is not, or without pyarrow.
    """
    if format not in get_args(Format):
        raise ConfigurationError(f"The format must be one of {', '.join(get_args(Format))}, but got {format!r}.")
    if format == "parquet":
        _pyarrow()
    folder = Path(folder)
    anonymizer = _Anonymizer() if anonymize else None
    counts = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MANIFEST).unlink(missing_ok=True)
        for name in _TABLES:
            rows: Iterable[dict[str, Any]] = store.rows(name, selection)
            rows = rows if anonymizer is None else anonymizer.rows(name, rows)
            write = _write_csv if format == "csv" else _write_parquet
            counts[name] = write(folder / f"{name}.{format}", schema.metadata.tables[name], rows)
        manifest = {"schema": SCHEMA_VERSION, "format": format, "anonymized": anonymize, "rows": counts}
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise LogError(f"The log cannot be exported to {folder}: {error}.") from error
    return counts


def import_log(store: MeasurementStore, folder: str | Path) -> dict[str, int]:
    """Add the rows of an export to the log.

    Weights that were in use there are "superseded" here, so the weights in use do not change.

    Returns:
        The number of new rows of each table.

    Raises:
        LogVersionError: if a newer PerfGuard exported it.
        LogError: if the folder is no complete export, or a row is wrong; the message names the file and the row. What was read
            before it stays in the log, and is left out the next time.
    """
    folder = Path(folder)
    version, format = _read_manifest(folder)
    read = _read_csv if format == "csv" else _read_parquet
    counts = {}
    for name in _TABLES:
        path, table = folder / f"{name}.{format}", schema.metadata.tables[name]
        counts[name] = 0
        if not path.exists():
            continue  # a table that came with a later schema
        entries = (Entry(name, mend(version, name, _out_of_use(row))) for row in _checked(path, table, read(path, table)))
        while chunk := list(islice(entries, _ROWS_AT_ONCE)):
            counts[name] += store.insert(chunk)
    return counts


def _out_of_use(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"state": "superseded"} if row.get("state") == "promoted" else row


def _read_manifest(folder: Path) -> tuple[int, Format]:
    """The schema and the format of an export."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        version, format = int(manifest["schema"]), manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LogError(f"{folder} is no complete export of a measurement log: {_MANIFEST} cannot be read ({error}).") from error
    if version > SCHEMA_VERSION:
        raise LogVersionError(
            f"{folder} was exported with schema {version}, this PerfGuard reads up to {SCHEMA_VERSION}. Update perfguard."
        )
    if format not in get_args(Format):
        raise LogError(f"{folder / _MANIFEST}: format must be one of {', '.join(get_args(Format))}, but is {format!r}.")
    return version, format


def _checked(path: Path, table: Table, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    (key,) = table.primary_key.columns.keys()
    for number, row in enumerate(rows, 1):
        try:
            if not row.get(key):
                raise ValueError(f"{key} is missing")
            for column, value in row.items():
                _check(table.name, column, value)
        except (ValueError, TypeError, RecursionError, PerfGuardError) as error:
            raise LogError(f"{path}, row {number}: {error}. Mend or remove the row and import again.") from error
        yield row


def _check(table: str, column: str, value: Any) -> None:
    words = _WORDS.get((table, column))
    if words is not None and value is not None and value not in words:
        raise ValueError(f"{column} must be one of {', '.join(words)}, but is {value!r}")
    if (table, column) in _JSON_COLUMNS and not isinstance(json.loads(value), dict):
        raise ValueError(f"{column} must be a JSON object")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{column} must be finite, but is {value!r}")
    if (table, column) == ("graphs", "data"):
        from perfguard.graph import OpGraph

        OpGraph.from_bytes(value)


def _write_csv(path: Path, table: Table, rows: Iterable[Mapping[str, Any]]) -> int:
    columns = table.columns.keys()
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            writer.writerow([_to_field(row[column]) for column in columns])
            count += 1
    return count


def _read_csv(path: Path, table: Table) -> Iterator[dict[str, Any]]:
    with _large_fields(), path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or ()
        _check_columns(path, table, columns)
        for number, fields in enumerate(reader, 1):
            if None in fields or None in fields.values():
                raise LogError(f"{path}, row {number}: it must have {len(columns)} fields, as the first line has.")
            row = {}
            for column, field in fields.items():
                try:
                    row[column] = _from_field(field, table.columns[column].type)
                except (ValueError, binascii.Error) as error:
                    raise LogError(f"{path}, row {number}: {column} cannot be {field[:40]!r} ({error}).") from error
            yield row


@contextmanager
def _large_fields() -> Iterator[None]:
    before = csv.field_size_limit(_MAX_FIELD)  # a graph is longer than 128 KiB
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _to_field(value: Any) -> str:
    if value is None:
        return _NULL
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, str) and value.startswith("\\"):
        return "\\" + value
    return repr(value) if isinstance(value, float) else str(value)


def _from_field(field: str, type_: Any) -> Any:
    if field == _NULL:
        return None
    if isinstance(type_, LargeBinary):
        return base64.b64decode(field, validate=True)
    if isinstance(type_, BigInteger):
        return int(field)
    if isinstance(type_, Double):
        return float(field)
    return field[1:] if field.startswith("\\") else field


def _check_columns(path: Path, table: Table, columns: Iterable[str]) -> None:
    unknown = [column for column in columns if column not in table.columns]
    if unknown:
        raise LogError(f"{path} has columns that the log does not know: {', '.join(unknown)}. Remove them and import again.")


def _write_parquet(path: Path, table: Table, rows: Iterable[Mapping[str, Any]]) -> int:
    pa = _pyarrow()
    import pyarrow.parquet as pq

    columns = pa.schema([(column.name, _arrow_type(pa, column.type)) for column in table.columns])
    count = 0
    iterator = iter(rows)
    with pq.ParquetWriter(path, columns, compression="zstd") as writer:
        while chunk := [dict(row) for row in islice(iterator, _ROWS_AT_ONCE)]:
            writer.write_table(pa.Table.from_pylist(chunk, schema=columns))
            count += len(chunk)
    return count


def _read_parquet(path: Path, table: Table) -> Iterator[dict[str, Any]]:
    pa = _pyarrow()
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, table, file.schema_arrow.names)
            expected = pa.schema([(name, _arrow_type(pa, table.columns[name].type)) for name in file.schema_arrow.names])
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                yield from pa.Table.from_batches([batch]).cast(expected).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise LogError(f"{path} is not what an export of the log writes: {error}.") from error


def _arrow_type(pa: Any, type_: Any) -> Any:
    if isinstance(type_, LargeBinary):
        return pa.binary()
    if isinstance(type_, BigInteger):
        return pa.int64()
    return pa.float64() if isinstance(type_, Double) else pa.string()


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        missing = "Parquet needs pyarrow: pip install 'perfguard[parquet]'. CSV needs nothing."
        raise ConfigurationError(why_not_imported(error, "pyarrow", missing)) from error
    return pyarrow


class _Anonymizer:
    """Replaces names that could identify a person or a project. Within one export, equal names get equal replacements.

    Graphs must come first among the tables: a stripped graph has another hash, by which its decisions then know it. Two graphs
    that differ only in names become one.
    """

    def __init__(self) -> None:
        self._studies: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._graph_hashes: dict[str, str] = {}

    def rows(self, table: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """``rows`` of ``table`` without names."""
        if table == "graphs":
            return self._graphs(rows)
        strip = {"decisions": self._decision, "measurements": self._measurement, "weights": self._weights}.get(table)
        return iter(rows) if strip is None else (row | strip(row) for row in rows)

    def _graphs(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        from perfguard.graph import OpGraph

        written: set[str] = set()
        for row in rows:
            graph = anonymous_graph(OpGraph.from_bytes(row["data"]))
            self._graph_hashes[row["content_hash"]] = graph.content_hash
            if graph.content_hash not in written:
                written.add(graph.content_hash)
                yield {"content_hash": graph.content_hash, "data": graph.to_bytes()}

    def _decision(self, row: Mapping[str, Any]) -> dict[str, Any]:
        study = self._studies.setdefault(row["study"], f"study-{len(self._studies) + 1}") if row["study"] else row["study"]
        graph_hash = self._graph_hashes.get(row["graph_hash"] or "")
        return {
            "study": study,
            "reason": "",
            "params": "{}",
            "graph_hash": graph_hash,
            "trial_id": None,
            "host": self._host(row),
        }

    def _measurement(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"note": "", "host": self._host(row), "set_aside": row["set_aside"] and "set aside"}

    def _host(self, row: Mapping[str, Any]) -> str | None:
        return row["host"] and self._hosts.setdefault(row["host"], f"host-{len(self._hosts) + 1}")

    def _weights(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"metrics": "{}"}


def anonymous_graph(graph: OpGraph) -> OpGraph:
    """``graph`` without the names that its author gave: module paths become numbers, own operators "custom"."""
    import torch

    parts: dict[str, str] = {}

    def path(module: str) -> str:
        return ".".join(parts.setdefault(part, f"m{len(parts)}") for part in module.split(".")) if module else module

    def operator(name: str) -> str:
        return name if hasattr(torch.ops.aten, name) or hasattr(torch.ops.perfguard, name) else "custom"

    return replace(
        graph,
        ops=tuple(op._replace(module=path(op.module), name=operator(op.name)) for op in graph.ops),
        storages=tuple(storage._replace(module=path(storage.module)) for storage in graph.storages),
        unmodelled=("something that was not modelled",) * len(graph.unmodelled),
    )
