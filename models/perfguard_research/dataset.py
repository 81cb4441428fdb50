"""Data sets from tables of measured runs. Each run is traced once, turned into one or several views, and split into folds.

    table → rows → cached OpGraphs → views (arrays that a predictor reads) → folds

Graphs are kept in a folder. Each network has one archive; its rows differ only in the batch and the GPU. An archive is written
when all rows that are asked for are traced, so an interrupted run continues with the next network, and other rows of the network
are added later. It holds `OpGraph.to_bytes`, or the reason why there is no graph.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import itertools
import math
import os
import random
import shutil
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import track

from perfguard.devices import Device
from perfguard.exceptions import PerfGuardError
from perfguard.graph import OpGraph, TraceCache
from perfguard_models.calibration import Setting
from perfguard_models.features import Arrays, FeatureSet, features_of
from perfguard_research.csv_rows import read_table
from perfguard_research.operators import Operator
from perfguard_research.tables import MeasuredRow, parser_of

STEPS = ("workload", "transformer", "collected", "run")
"""Kinds of table whose rows are steps of whole networks."""
_ERROR = "error"
"""Name, in an archive of graphs, of the reason why there are no more."""
_READS_GRAPHS = frozenset({"roofline.py"})
"""Modules of `perfguard.graph` that read graphs and have no part in tracing: after a change of these, none is traced again."""
ALL_TABLES = (*STEPS, "perceptron", "operator")
"""Kinds of table that a predictor learns from."""


class Run(NamedTuple):
    """One measured run, as a predictor meets it: a :class:`perfguard_models.learner.Example` with what was measured."""

    table: str
    """Kind of the table: "workload", "operator", "transformer", "perceptron", "collected" or "run"."""
    source: str
    family: str
    model: str
    structure: str
    """Key that runs share if only their batches and GPUs differ. Runs under another framework have another key."""
    batch_size: int
    setting: Setting
    labels: dict[str, float]
    """Measured values of TARGETS."""
    capacity_bytes: int
    fits: bool
    view: Arrays
    host: str = ""
    """Tells the hosts of one source and GPU apart, if the table does."""

    @property
    def gpu(self) -> str:
        """The id of the device. A table may have another name of it."""
        return self.setting.device_id

    @property
    def mode(self) -> str:
        """ "train" or "infer"."""
        return self.setting.mode

    @property
    def machine(self) -> tuple[str, str, str]:
        """The source, the GPU and the host: one machine, or several that the table does not distinguish."""
        return self.source, self.gpu, self.host

    @property
    def is_single(self) -> bool:
        """Whether it is one operator, measured alone."""
        return self.setting.is_single


class Dataset(NamedTuple):
    """The runs of one or several tables, and what was left out, each with its reason."""

    runs: list[Run]
    rejected: list[str]
    cpus: frozenset[str] = frozenset()
    """Names of the processors that rows were measured on."""

    def rejections(self) -> str:
        """A sentence for a person: how many rows were left out, and the commonest reasons."""
        if not self.rejected:
            return "No row was left out."
        common = Counter(self.rejected).most_common(3)
        reasons = "; ".join(f"{count} x {reason}" for reason, count in common)
        return f"{len(self.rejected)} rows were left out: {reasons}{'; ...' if len(set(self.rejected)) > 3 else ''}"


def dataset_of(
    tables: Iterable[Path],
    views: Sequence[FeatureSet],
    *,
    cache: Path,
    jobs: int = 2,
    most_operators: int = 60_000,
    most_runs: int | None = None,
    unwanted: Callable[[MeasuredRow], str] | None = None,
) -> Dataset:
    """The runs of ``tables``, seen as ``views``.

    Args:
        tables: tables of runs, of any of ALL_TABLES.
        views: what the predictor reads.
        cache: a folder for graphs.
        jobs: number of processes for traces and views.
        most_operators: the most rows of an operator table. Such tables have many similar rows.
        most_runs: the most rows of each other table; None: all.
        unwanted: why a row is left out before it is traced, which takes most of the time; empty: it is wanted. None: all are.

    Raises:
        TableError: if a table cannot be read or is of no known kind.
    """
    look = functools.partial(_look, views=views, cache=cache / "graphs")
    dataset = Dataset([], [])
    cpus = set[str]()
    for table in tables:
        rows, rejected = usable_rows(table)
        if unwanted is not None:
            reasons = [unwanted(row) for row in rows]
            rejected += filter(None, reasons)
            rows = [row for row, reason in zip(rows, reasons, strict=True) if not reason]
        rows = drawn(rows, most_operators if "operator" in {row.table for row in rows} else most_runs)
        cpus |= {row.device.name for row in rows if row.gpu == "cpu"}
        dataset.rejected.extend(rejected)
        networks = _by_network(rows)
        with ProcessPoolExecutor(jobs, initializer=_prepare_worker) as pool:
            results = pool.map(look, networks, chunksize=4)
            for found in track(results, table.name, len(networks), transient=True, disable=not sys.stderr.isatty()):
                dataset.runs.extend(run for run in found if isinstance(run, Run))
                dataset.rejected.extend(reason for reason in found if isinstance(reason, str))
    return dataset._replace(cpus=frozenset(cpus))


def graphs_of(tables: Iterable[Path], wanted: Callable[[Run], bool], *, cache: Path) -> Iterator[tuple[Run, Device, OpGraph]]:
    """The runs of ``tables`` that are ``wanted``, seen as nothing, each with its device and graph."""
    for table in tables:
        for rows in _by_network(usable_rows(table)[0]):
            for graph, members in _graphs(rows, cache / "graphs"):
                if isinstance(graph, OpGraph):
                    runs = [(_run(row, graph, row.device, {}), row.device) for row in members]
                    yield from ((run, device, graph) for run, device in runs if wanted(run))


def usable_rows(table: Path) -> tuple[list[MeasuredRow], list[str]]:
    """The rows of a table that can be used, and why others cannot."""
    columns, raw = read_table(table)
    parse = parser_of(columns, table)
    rows: list[MeasuredRow] = []
    rejected: list[str] = []
    seen: set[str] = set()
    for item in raw:
        try:
            row = parse(item)
        except PerfGuardError as error:
            rejected.append(str(error))
            continue
        text = repr(row)
        if text in seen:
            rejected.append("the same row twice")
        elif row.status not in ("ok", "oom"):
            rejected.append(f"status {row.status!r}")
        elif row.gpu == "cpu" and row.figures is None:
            rejected.append("a CPU without its figures, which `perfguard collect` writes")
        elif row.status == "ok" and (reason := _absurd(row)):
            rejected.append(reason)
        else:
            seen.add(text)
            rows.append(row)
    return rows, rejected


def drawn(rows: Sequence[MeasuredRow], most: int | None, *, seed: int = 0) -> list[MeasuredRow]:
    """At most ``most`` rows of a table; None: all.

    Of operators any rows are drawn, of steps whole networks: so each is traced once, and its batches stay neighbours.
    """
    if most is None or len(rows) <= most:
        return list(rows)
    if isinstance(rows[0].network, Operator):
        return random.Random(seed).sample(rows, most)
    networks = {str(members[0].structure): members for members in _by_network(rows)}
    chosen: list[MeasuredRow] = []
    for name in random.Random(seed).sample(sorted(networks), len(networks)):
        if len(chosen) + len(networks[name]) <= most:
            chosen += networks[name]
    return chosen


def _absurd(row: MeasuredRow) -> str:
    """The reason why a reading is impossible, for instance a unit that is off by 1,024."""
    least = 0 if row.gpu == "cpu" else 2**20  # a process may have room for a small step
    if row.peak_memory_bytes is not None and not least <= row.peak_memory_bytes <= 2**40:
        return "a peak below a mebibyte or above a tebibyte"
    if row.step_time_s is not None and not 1e-6 <= row.step_time_s <= 3600:
        return "a step below a microsecond or above an hour"
    return ""


# Graphs


def _by_network(rows: Iterable[MeasuredRow]) -> list[tuple[MeasuredRow, ...]]:
    """The rows by network, in an order that does not depend on the table's."""
    ordered = sorted(rows, key=lambda row: (str(row.structure), row.gpu, row.batch_size))
    return [tuple(members) for _, members in itertools.groupby(ordered, key=lambda row: row.structure)]


def _prepare_worker() -> None:
    """Graphs are many small objects: looking through them for cycles takes a third of the time."""
    gc.disable()
    gc.freeze()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


@functools.cache
def code_of(*packages: str, without: frozenset[str] = frozenset()) -> bytes:
    """A digest of the code of ``packages``. What they made is kept under it, so that no other code's work is read.

    Args:
        packages: names of packages. All of their modules count, also those in folders below.
        without: names of files that had no part in what was made.
    """
    digest = hashlib.sha256()
    for package in packages:
        folder = Path(str(importlib.import_module(package).__file__)).parent
        files = [path for path in sorted(folder.rglob("*.py")) if path.name not in without]
        digest.update(b"".join(path.read_bytes() for path in files))
    return digest.digest()


def _graphs(rows: Sequence[MeasuredRow], cache: Path) -> Iterator[tuple[OpGraph | str, list[MeasuredRow]]]:
    """Yield each graph of one network, or the reason why there is none, with its rows. They are traced once."""
    if isinstance(rows[0].network, Operator):  # written down, not traced
        yield from ((row.graph(None, TraceCache(), row.device), [row]) for row in rows)
        return
    what = code_of("perfguard.graph", without=_READS_GRAPHS), rows[0].structure
    path = cache / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}.zip"
    names = _names_in(path)
    missing = [row for row in rows if _member(row) not in names]
    if missing and _ERROR not in names:
        _trace(missing, path)
        names = _names_in(path)
    with zipfile.ZipFile(path) as archive:
        for name, members in itertools.groupby(rows, key=_member):
            yield OpGraph.from_bytes(archive.read(name)) if name in names else archive.read(_ERROR).decode(), list(members)


def _member(row: MeasuredRow) -> str:
    return f"{row.gpu}/{row.batch_size}"


def _names_in(archive: Path) -> frozenset[str]:
    if not archive.is_file():
        return frozenset()
    with zipfile.ZipFile(archive) as opened:
        return frozenset(opened.namelist())


def _trace(rows: Sequence[MeasuredRow], path: Path) -> None:
    """Add the graphs of ``rows``, all of one network, to its archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    if path.is_file():
        shutil.copyfile(path, partial)
    with zipfile.ZipFile(partial, "a") as archive:
        try:
            model = rows[0].make_model()
            traces = TraceCache()
            for name, row in {_member(row): row for row in rows}.items():
                archive.writestr(name, row.graph(model, traces, row.device).to_bytes())
        except PerfGuardError as error:
            archive.writestr(_ERROR, str(error))
    partial.replace(path)
    gc.collect()


def _look(rows: Sequence[MeasuredRow], views: Sequence[FeatureSet], cache: Path) -> list[Run | str]:
    """The runs of a network, or the reasons why there are none."""
    found: list[Run | str] = []
    for graph, members in _graphs(rows, cache):
        if isinstance(graph, str):
            found += [graph] * len(members)
            continue
        on_device: dict[str, Arrays] = {}  # by its figures
        for row in members:
            device = row.device
            if repr(device) not in on_device:
                on_device[repr(device)] = features_of(views, graph, device)
            found.append(_run(row, graph, device, on_device[repr(device)]))
    return found


def without_time(row: MeasuredRow) -> str:
    """The reason why a row has no time to learn; empty: it has one. Communication between GPUs is not modelled."""
    is_timed = row.status == "ok" and row.step_time_s is not None and row.num_gpus == 1
    return "" if is_timed else "no time of one device"


def _run(row: MeasuredRow, graph: OpGraph, device: Device, view: Arrays) -> Run:
    fits = row.status == "ok"
    labels: dict[str, float] = {}
    if fits and row.peak_memory_bytes is not None:
        labels["memory"] = math.log(row.peak_memory_bytes)
    if row.step_time_s is not None and not without_time(row):
        labels["time"] = math.log(row.step_time_s)
    for name, share in (("gpu_util", row.gpu_util), ("sm_active", row.sm_active)):
        if fits and share is not None:
            inside = min(max(share, 1e-3), 1 - 1e-3)
            labels[name] = math.log(inside / (1 - inside))
    return Run(
        table=row.table,
        source=row.source,
        family=row.family,
        model=row.model,
        structure=f"{row.structure} {row.framework}",
        batch_size=row.batch_size,
        setting=Setting.of(graph, device),
        labels=labels,
        capacity_bytes=int(row.capacity_bytes or device.memory_bytes),
        fits=fits,
        view=view,
        host=row.host,
    )


# Folds


class Fold(NamedTuple):
    """A named split: indices of the training rows and of the test rows."""

    name: str
    learn: list[int]
    judge: list[int]


def folds(runs: Sequence[Run], split: str, *, number: int = 5, seed: int = 0) -> list[Fold]:
    """Splits of ``runs`` by the name of a split.

    With "family", each family is the test set once, for a predictor without it. With "source" and "gpu", the same holds for
    each source and each GPU. More than ``number`` of them are split into ``number`` parts. CPUs stay in the training set of these
    two, if there are GPUs: no GPU is like them. With "random", one part of ``number`` is the test set. This one is only for
    comparison.

    Raises:
        ValueError: for another name.
    """
    if split == "random":
        order = list(range(len(runs)))
        random.Random(seed).shuffle(order)
        tested = set(order[::number])
        return [_fold("random 1", [index in tested for index in range(len(runs))])]
    if split == "family":
        part_of: dict[tuple[str, str], int] = {}
        for table in sorted({run.table for run in runs}):
            parts = _parts_of(Counter(run.family for run in runs if run.table == table), Counter(), number, seed)
            part_of |= {(table, family): part for family, part in parts.items()}
        made = [_fold(f"families {k + 1}", [part_of[run.table, run.family] == k for run in runs]) for k in range(number)]
        return [fold for fold in made if fold.learn and fold.judge]
    if split not in ("gpu", "source"):
        raise ValueError(f"A split is 'family', 'source', 'gpu' or 'random', not {split!r}.")
    only_cpus = all(run.gpu == "cpu" for run in runs)
    names = [None if run.gpu == "cpu" and not only_cpus else getattr(run, split) for run in runs]
    steps = Counter[str]()
    kernels = Counter[str]()
    for name, run in zip(names, runs, strict=True):
        if name is not None:
            (kernels if run.is_single else steps)[name] += 1
    parts = _parts_of(steps, kernels, number, seed)
    made = []
    for part in sorted(set(parts.values())):
        held_out = sorted(name for name in parts if parts[name] == part)
        made.append(_fold(f"without {', '.join(held_out)}", [name in held_out for name in names]))
    return [fold for fold in made if fold.learn]


def _parts_of(runs: Counter[str], kernels: Counter[str], number: int, seed: int) -> dict[str, int]:
    """The part, out of ``number``, of each name. Names go from the largest on, each to the part with the fewest runs.

    Those with ``kernels`` go to the part with the fewest kernels. Few cards have them: in different parts, each is predicted from
    the others.

    Scikit-learn's GroupKFold does the same, but sorts equal sizes by NumPy's unstable sort, which depends on the processor.
    Published folds must be the same everywhere.
    """
    names = sorted({*runs, *kernels})
    random.Random(seed).shuffle(names)
    loads = [(0, 0)] * number
    part_of = {}
    for name in sorted(names, key=lambda name: (-runs[name], -kernels[name])):
        part = min(range(number), key=lambda part: loads[part] if kernels[name] else loads[part][1])
        part_of[name] = part
        loads[part] = (loads[part][0] + kernels[name], loads[part][1] + runs[name])
    return part_of


def _fold(name: str, tested: Sequence[bool]) -> Fold:
    return Fold(name, [i for i, held in enumerate(tested) if not held], [i for i, held in enumerate(tested) if held])
