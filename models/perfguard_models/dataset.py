"""A workload table as rows that a network can learn from: traced once, cached, split by family.

Nothing of a table is kept but features and labels; the cache is a file of tensors, read with `weights_only`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track
from torch_geometric.data import Data

from perfguard.devices import resolve_device
from perfguard.exceptions import PerfGuardError
from perfguard.features import FEATURE_VERSION, GRAPH_FEATURES, NODE_FEATURES, featurize
from perfguard.graph import TraceCache
from perfguard.tables import WorkloadRow, read_table, timm_model, workload_of, workload_row

_STATUSES = ("ok", "oom")
_FIELDS = ("x", "kind", "edge_index", "globals", "roofline", "log_memory", "log_time")


class TableRow(NamedTuple):
    """One measured run, ready for a network.

    ``data`` has, beside the features, ``label_memory`` and ``label_time`` (1,), logarithms of bytes and seconds, NaN where they
    were not measured, and ``bound`` and ``bound_sign`` (1,): log bytes of the card's memory, and +1 if the run needed more, -1 if
    less, 0 if its memory was measured.
    """

    family: str
    gpu: str
    mode: str
    data: Data


def rows_of_table(table: Path, *, jobs: int = 2, cache: Path | None = None) -> list[TableRow]:
    """Every row that ran or ran out of memory and can be traced.

    Args:
        table: a workload table.
        jobs: processes that trace.
        cache: a folder for what was traced; found again by the table's content and the features' version.

    Raises:
        TableError: if the table cannot be read.
    """
    place = None if cache is None else cache / f"{_fingerprint(table)}.pt"
    if place is not None and place.is_file():
        return [_row(stored) for stored in torch.load(place, weights_only=True)]
    rows = [row for row in _readable(read_table(table)[1]) if row.status in _STATUSES]
    rows.sort(key=lambda row: (str(row.structure), row.gpu, row.batch_size))
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.structure)]
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        traced = pool.map(_trace_group, groups, chunksize=2)
        progress = track(traced, total=len(groups), description="tracing", transient=True, disable=not sys.stderr.isatty())
        stored = [_as_tensors(row) for group in progress for row in group]
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        torch.save(stored, place)
    return [_row(item) for item in stored]


def _fingerprint(table: Path) -> str:
    digest = hashlib.sha256(table.read_bytes())
    digest.update(repr((FEATURE_VERSION, NODE_FEATURES, GRAPH_FEATURES)).encode())
    return digest.hexdigest()[:16]


def _readable(raw: Sequence[dict[str, str]]) -> Iterator[WorkloadRow]:
    for row in raw:
        try:
            yield workload_row(row)
        except PerfGuardError:
            continue


def _trace_group(rows: Sequence[WorkloadRow]) -> list[dict[str, Any]]:
    """Rows of one structure: the network is made once, and of its batches only some are traced."""
    stored: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                model = timm_model(rows[0].model, rows[0].img_size)
            traces = TraceCache()
            for row in rows:
                device = resolve_device(row.gpu)
                data = featurize(traces.trace(workload_of(row, model), target=device), device)
                stored.append(_labelled(row, data, device.memory_bytes))
        except PerfGuardError:
            pass
    return [_as_arrays(item) for item in stored]


def _as_arrays(item: dict[str, Any]) -> dict[str, Any]:
    """Tensors would travel between processes as open files, of which there are not enough."""
    return {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in item.items()}


def _as_tensors(item: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in item.items()}


def _labelled(row: WorkloadRow, data: Data, capacity_bytes: int) -> dict[str, Any]:
    fits = row.status == "ok"
    measured = fits and row.peak_memory_bytes is not None
    item: dict[str, Any] = {name: data[name] for name in _FIELDS}
    item["x"] = item["x"].half()
    item["edge_index"] = item["edge_index"].int()
    return item | {
        "family": row.family,
        "gpu": row.gpu,
        "mode": row.mode,
        "label_memory": torch.tensor([math.log(row.peak_memory_bytes) if measured and row.peak_memory_bytes else math.nan]),
        "label_time": torch.tensor([math.log(row.step_time_s) if fits and row.step_time_s else math.nan]),
        "bound": torch.tensor([math.log(capacity_bytes)]),
        "bound_sign": torch.tensor([0.0 if measured else -1.0 if fits else 1.0]),
    }


def _row(stored: dict[str, Any]) -> TableRow:
    tensors = {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}
    data = Data(**tensors, num_nodes=len(stored["x"]))
    return TableRow(stored["family"], stored["gpu"], stored["mode"], data)


def split_by_family(rows: Sequence[TableRow], *, held_out: float, seed: int) -> tuple[list[TableRow], list[TableRow]]:
    """Training rows, and rows of families that share nothing with them."""
    families = sorted({row.family for row in rows})
    random.Random(seed).shuffle(families)
    unseen = set(families[: round(held_out * len(families))])
    return [row for row in rows if row.family not in unseen], [row for row in rows if row.family in unseen]
