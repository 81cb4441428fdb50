"""The graphs of a table's rows, traced once and kept in a folder.

Each network has one archive. Its rows differ only in the batch and the GPU. The archive is written when all rows are traced, so
an interrupted run continues with the next network. An archive holds `OpGraph.to_bytes`, or the reason why there is no graph.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from rich.progress import track

from perfguard.devices import Device
from perfguard.exceptions import PerfGuardError
from perfguard.graph import OpGraph, TraceCache
from perfguard_research.operators import Operator
from perfguard_research.tables import MeasuredRow

T = TypeVar("T")
_FORMAT = "3"
_ERROR = "error"


class Group(NamedTuple):
    """Rows of one network, and the archive of their graphs."""

    archive: Path
    rows: tuple[MeasuredRow, ...]


def groups_of(rows: Iterable[MeasuredRow], cache: Path) -> list[Group]:
    """The rows by network, in an order that does not depend on the table's."""
    ordered = sorted(rows, key=lambda row: (str(row.structure), row.gpu, row.batch_size))
    groups = []
    for _, members in itertools.groupby(ordered, key=lambda row: row.structure):
        group = tuple(members)
        groups.append(Group(cache / f"{_fingerprint(group)}.zip", group))
    return groups


def trace_groups(groups: Sequence[Group], *, jobs: int = 2) -> None:
    """Trace what no archive holds yet, ``jobs`` networks at once."""
    missing = [group for group in groups if not isinstance(group.rows[0].network, Operator) and not group.archive.is_file()]
    for group in missing[:1]:
        group.archive.parent.mkdir(parents=True, exist_ok=True)
    for _ in mapped(_trace, missing, jobs=jobs, description="tracing"):
        pass


def mapped(function: Callable[[Group], T], groups: Sequence[Group], *, jobs: int, description: str) -> Iterator[T]:
    """``function`` of each group, in processes, in order, with a progress bar."""
    if not groups:
        return
    with ProcessPoolExecutor(jobs, initializer=_prepare_worker) as pool:
        results = pool.map(function, groups, chunksize=4)
        yield from track(results, total=len(groups), description=description, transient=True, disable=not sys.stderr.isatty())


def read_group(group: Group) -> Iterator[tuple[MeasuredRow, Device, OpGraph | str]]:
    """Yield each row with its device and its graph, or with the reason why it has no graph."""
    previous: tuple[str, OpGraph | str] = ("", "")
    if isinstance(group.rows[0].network, Operator):  # written down, not traced
        for row in group.rows:
            device = row.device
            yield row, device, row.graph(None, TraceCache(), device)
        return
    with zipfile.ZipFile(group.archive) as archive:
        names = set(archive.namelist())
        for row in group.rows:
            name = _member(row)
            if name != previous[0]:
                if name in names:
                    previous = name, OpGraph.from_bytes(archive.read(name))
                else:
                    previous = name, archive.read(_ERROR).decode() if _ERROR in names else "not traced"
            yield row, row.device, previous[1]


def _member(row: MeasuredRow) -> str:
    return f"{row.gpu}/{row.batch_size}"


def _fingerprint(rows: Sequence[MeasuredRow]) -> str:
    what = _FORMAT, rows[0].structure, sorted({_member(row) for row in rows})
    return hashlib.sha256(repr(what).encode()).hexdigest()[:24]


def _prepare_worker() -> None:
    """Graphs are many small objects: looking through them for cycles takes a third of the time."""
    gc.disable()
    gc.freeze()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _trace(group: Group) -> None:
    partial = group.archive.with_suffix(f".{os.getpid()}")
    with zipfile.ZipFile(partial, "w") as archive:
        try:
            model = group.rows[0].make_model()
            traces, written = TraceCache(), set[str]()
            for row in group.rows:
                if _member(row) not in written:
                    written.add(_member(row))
                    graph = row.graph(model, traces, row.device)
                    archive.writestr(_member(row), graph.to_bytes())
        except PerfGuardError as error:
            archive.writestr(_ERROR, str(error))
    partial.replace(group.archive)
    gc.collect()


__all__: list[str] = ["Group", "groups_of", "mapped", "read_group", "trace_groups"]
