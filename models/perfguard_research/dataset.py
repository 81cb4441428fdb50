"""Data sets from tables of measured runs. Each run is traced once, turned into one or several views, and split into folds.

    table → rows → cached OpGraphs (graphs.py) → views (arrays that a predictor reads) → folds

A view is cached beside the graphs, by the table's content and by the source code that made it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from perfguard.devices import Device
from perfguard.exceptions import PerfGuardError
from perfguard.graph import KIND_INDEX, OpGraph, Phase
from perfguard.workload import Layout
from perfguard_models.features.step import STEP_FEATURES
from perfguard_models.learner import Arrays
from perfguard_models.setting import Setting, arithmetic_of
from perfguard_models.trained import FeatureSet
from perfguard_research.csv_rows import read_table
from perfguard_research.graphs import Group, groups_of, mapped, read_group, trace_groups
from perfguard_research.operators import Operator
from perfguard_research.tables import MeasuredRow, parser_of

STEPS = ("workload", "transformer", "collected", "run")
"""Kinds of table whose rows are steps of whole networks."""
ALL_TABLES = ("workload", "transformer", "perceptron", "operator", "collected", "run")
"""Kinds of table that a predictor learns from."""
_STATUSES = ("ok", "oom")


class Run(NamedTuple):
    """One measured run, as a predictor meets it: a :class:`perfguard_models.learner.Example` with what was measured."""

    table: str
    """Kind of the table: "workload", "operator", "transformer", "perceptron", "collected" or "run"."""
    source: str
    family: str
    model: str
    gpu: str
    """The id of the device. A table may have another name of it."""
    mode: str
    variant: str
    """Precision, layout and "compiled", for reports by group."""
    structure: str
    """Key that runs share if only their batches and GPUs differ. Runs under another framework have another key."""
    batch_size: int
    labels: dict[str, float]
    """Measured values of TARGETS."""
    capacity_bytes: int
    fits: bool
    view: Arrays
    host: str = ""
    """Tells the hosts of one source and GPU apart, if the table does."""

    @property
    def machine(self) -> tuple[str, str, str]:
        """The source, the GPU and the host: one machine, or several that the table does not distinguish."""
        return self.source, self.gpu, self.host

    @property
    def is_single(self) -> bool:
        """Whether it is one operator, measured alone."""
        return self.table == "operator"

    @property
    def setting(self) -> Setting:
        """The setting of the step, as :meth:`Setting.of` finds it for a graph."""
        arithmetic, *others = self.variant.split(" ")
        return Setting(
            device_id=self.gpu,
            mode=self.mode,
            precision="fp32" if arithmetic in _ARITHMETIC_OF_FP32 else arithmetic,
            arithmetic=arithmetic,
            layout=next((word for word in others if word in get_args(Layout)), "nchw"),
            compiled="compiled" in others,
            has_convolutions=self.has_convolutions,
            has_recurrent_layers=self.has_recurrent_layers,
            is_single=self.is_single,
        )

    @property
    def timed_as(self) -> str:
        """See :attr:`perfguard_models.setting.Setting.timed_as`."""
        return self.setting.timed_as

    @property
    def group(self) -> str:
        """The group that it is calibrated with; see :attr:`perfguard_models.setting.Setting.group`."""
        return self.setting.group

    @property
    def has_convolutions(self) -> bool:
        """Whether the step has convolutions. Rows of tables other than workloads need launches or sums in their view."""
        return self.table == "workload" or self._has("conv")

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether the step has operators whose time steps wait for one another. Rows need launches or sums in their view."""
        return self._has("rnn")

    def _has(self, kind: str) -> bool:
        """Whether the step has operators of the kind."""
        if "host" in self.view:
            return bool((self.view["host"] // len(Phase) == KIND_INDEX[kind]).any())
        return bool("sums" in self.view and self.view["sums"][STEP_FEATURES.index(f"time_{kind}")] > 0)


_KERNELS_A_STEP = 1_000_000
"""A step counts as much as so many kernels when folds are balanced."""
_ARITHMETIC_OF_FP32 = ("tf32", "no-tf32")
_FEATURES_OF_PAPERS = "perfguard_research.papers.served"
"""Imported by name, because the papers' package imports this one."""
_SHARED_BY_FEATURES = tuple(f"perfguard_models.features.{name}" for name in ("convolutions", "operators"))


def feature_sets() -> Mapping[str, FeatureSet]:
    """Feature sets by name."""
    found: Mapping[str, FeatureSet] = importlib.import_module(_FEATURES_OF_PAPERS).FEATURE_SETS
    return found


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
    tables: Iterable[Path], view: str | Sequence[str], *, cache: Path, jobs: int = 2, most_operators: int = 60_000, seed: int = 0
) -> Dataset:
    """The runs of ``tables``, seen as ``view`` (the name of one of `feature_sets`, or several).

    Args:
        tables: tables of runs, of any of ALL_TABLES.
        view: what the predictor reads.
        cache: a folder for graphs and views.
        jobs: number of processes for traces and views.
        most_operators: the most rows of an operator table, drawn with ``seed``. Such tables have many similar rows.
        seed: of that draw.

    Raises:
        TableError: if a table cannot be read or is of no known kind.
    """
    runs: list[Run] = []
    rejected: list[str] = []
    cpus = set[str]()
    names = (view,) if isinstance(view, str) else tuple(view)
    for table in tables:
        read = _read(table, most_operators, seed)
        cpus |= {row.device.name for row in read.rows if row.gpu == "cpu"}
        found = _seen(read.rows, names, cache, jobs)
        runs += [run for run in found if isinstance(run, Run)]
        rejected += [*read.rejected, *(reason for reason in found if isinstance(reason, str))]
    return Dataset(runs, rejected, frozenset(cpus))


def graphs_of(tables: Iterable[Path], wanted: Callable[[Run], bool], *, cache: Path) -> Iterator[tuple[Run, Device, OpGraph]]:
    """The runs of ``tables`` that are ``wanted``, seen as nothing, each with its device and graph.

    The graphs must be in the ``cache``.
    """
    for table in tables:
        for group in groups_of(_read(table, 0, 0).rows, cache / "graphs"):
            runs = [_run(row, []) for row in group.rows]
            if any(isinstance(run, Run) and wanted(run) for run in runs):
                for run, (_, device, graph) in zip(runs, read_group(group), strict=True):
                    if isinstance(run, Run) and isinstance(graph, OpGraph) and wanted(run):
                        yield run, device, graph


class _Read(NamedTuple):
    rows: list[MeasuredRow]
    rejected: list[str]


def _read(table: Path, most_operators: int, seed: int) -> _Read:
    """The rows of a table that can be used."""
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
        elif row.status not in _STATUSES:
            rejected.append(f"status {row.status!r}")
        elif row.gpu == "cpu" and row.figures is None:
            rejected.append("a CPU without its figures, which `perfguard collect` writes")
        elif row.status == "ok" and (reason := _absurd(row)):
            rejected.append(reason)
        else:
            seen.add(text)
            rows.append(row)
    if "op" in columns and len(rows) > most_operators:
        rows = random.Random(seed).sample(rows, most_operators)
    return _Read(rows, rejected)


def _absurd(row: MeasuredRow) -> str:
    """The reason why a reading is impossible, for instance a unit that is off by 1,024."""
    least = 0 if row.gpu == "cpu" else 2**20  # a process may have room for a small step
    if row.peak_memory_bytes is not None and not least <= row.peak_memory_bytes <= 2**40:
        return "a peak below a mebibyte or above a tebibyte"
    if row.step_time_s is not None and not 1e-6 <= row.step_time_s <= 3600:
        return "a step below a microsecond or above an hour"
    return ""


def _seen(rows: Sequence[MeasuredRow], names: Sequence[str], cache: Path, jobs: int) -> list[Run | str]:
    groups = groups_of(rows, cache / "graphs")
    places = {name: cache / f"{name}-{_fingerprint(groups, name)}.pt" for name in names}
    missing = tuple(name for name in names if not places[name].is_file())
    if missing:
        trace_groups(groups, jobs=jobs)
        look = functools.partial(_look, names=missing)
        made: dict[str, list[Any]] = {name: [] for name in missing}
        for found in mapped(look, groups, jobs=jobs, description="looking"):
            for item in found:
                for name in missing:
                    made[name].append(item if isinstance(item, str) else _as_tensors(item[name]))
        cache.mkdir(parents=True, exist_ok=True)
        for name in missing:
            torch.save(made[name], places[name])
    ordered = [row for group in groups for row in group.rows]
    stored = zip(*(torch.load(places[name], weights_only=True) for name in names), strict=True)
    return [_run(row, views) for row, views in zip(ordered, stored, strict=True)]


def _fingerprint(groups: Sequence[Group], name: str) -> str:
    rows = [(group.archive.name, [_step_of(row) for row in group.rows]) for group in groups]
    modules = (feature_sets()[name].module, *_SHARED_BY_FEATURES, Operator.__module__)
    source = [inspect.getsource(importlib.import_module(module)) for module in modules]
    return hashlib.sha256(repr((source, rows)).encode()).hexdigest()[:16]


def _step_of(row: MeasuredRow) -> tuple[Any, ...]:
    return row.device, row.batch_size, row.network.sizes if isinstance(row.network, Operator) else ()


def _look(group: Group, names: tuple[str, ...]) -> list[dict[str, Arrays] | str]:
    found: list[dict[str, Arrays] | str] = []
    previous: tuple[OpGraph, Device, dict[str, Arrays]] | None = None
    for _, device, graph in read_group(group):
        if isinstance(graph, str):
            found.append(graph)
            continue
        if previous is None or previous[0] is not graph or previous[1] != device:
            known = feature_sets()
            previous = graph, device, {name: known[name].compute(graph, device) for name in names}
        found.append(previous[2])
    return found


def _as_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}


def _run(row: MeasuredRow, views: Sequence[dict[str, torch.Tensor] | str]) -> Run | str:
    arrays: Arrays = {}
    for view in views:
        if isinstance(view, str):
            return view
        arrays |= {name: value.numpy() for name, value in view.items()}
    fits = row.status == "ok"
    alone = row.num_gpus == 1  # communication between GPUs is not modelled
    labels = {
        "memory": _log(row.peak_memory_bytes),
        "time": _log(row.step_time_s) if alone else None,
        "gpu_util": _logit(row.gpu_util),
        "sm_active": _logit(row.sm_active),
    }
    device = row.device
    return Run(
        table=row.table,
        source=row.source,
        family=row.family,
        model=row.model,
        gpu=device.id,
        mode=row.mode,
        variant=_variant(row),
        structure=f"{row.structure} {row.framework}",
        batch_size=row.batch_size,
        labels={name: value for name, value in labels.items() if value is not None} if fits else {},
        capacity_bytes=int(row.capacity_bytes or device.memory_bytes),
        fits=fits,
        view=arrays,
        host=row.host,
    )


def _variant(row: MeasuredRow) -> str:
    option = {"on": "tf32", "off": "no-tf32", "default": ""}[row.tf32]
    arithmetic = arithmetic_of(row.precision, [option], row.device)
    return " ".join([arithmetic, row.layout, *(["compiled"] if row.compiled else [])])


def _log(value: float | None) -> float | None:
    return None if value is None else math.log(value)


def _logit(share: float | None) -> float | None:
    if share is None:
        return None
    inside = min(max(share, 1e-3), 1 - 1e-3)
    return math.log(inside / (1 - inside))


class Fold(NamedTuple):
    """A named split: indices of the training rows and of the test rows."""

    name: str
    learn: list[int]
    judge: list[int]


def folds(runs: Sequence[Run], split: str, *, number: int = 5, seed: int = 0) -> list[Fold]:
    """Splits of ``runs`` by the name of a split.

    With "family", each family is the test set once, for a predictor without it. With "source" and "gpu", the same holds for
    each source and each GPU. More than ``number`` of them are split into ``number`` parts. With "random", one part of
    ``number`` is the test set. This one is only for comparison.

    Raises:
        ValueError: for another name.
    """
    if split in ("gpu", "source"):
        names = [getattr(run, split) for run in runs]
        # Steps count, else a few cards with many kernels would fill the folds. Kernels count where there is nothing else.
        sizes = Counter[str]()
        for name, run in zip(names, runs, strict=True):
            sizes[name] += 1 if run.is_single else _KERNELS_A_STEP
        parts = _parts_of(sizes, number, seed)
        held_out = [{name for name in parts if parts[name] == part} for part in sorted(set(parts.values()))]
        made = [_fold(f"without {', '.join(sorted(some))}", [name in some for name in names]) for some in held_out]
        return [fold for fold in made if fold.learn]
    if split == "random":
        order = list(range(len(runs)))
        random.Random(seed).shuffle(order)
        tested = set(order[::number])
        return [_fold("random 1", [index in tested for index in range(len(runs))])]
    if split == "family":
        part_of = _parts_of_families(runs, number, seed)
        made = [_fold(f"families {k + 1}", [part_of[run.table, run.family] == k for run in runs]) for k in range(number)]
        return [fold for fold in made if fold.learn and fold.judge]
    raise ValueError(f"A split is 'family', 'source', 'gpu' or 'random', not {split!r}.")


def _parts_of_families(runs: Sequence[Run], number: int, seed: int) -> dict[tuple[str, str], int]:
    """The part, out of ``number``, of each family of each table."""
    part_of: dict[tuple[str, str], int] = {}
    for table in sorted({run.table for run in runs}):
        parts = _parts_of(Counter(run.family for run in runs if run.table == table), number, seed)
        part_of |= {(table, family): part for family, part in parts.items()}
    return part_of


def _parts_of(sizes: Mapping[str, int], number: int, seed: int) -> dict[str, int]:
    """The part, out of ``number``, of each name. Names go from the largest on, each to the part with the fewest runs.

    Scikit-learn's GroupKFold does the same, but sorts equal sizes by NumPy's unstable sort, which depends on the processor.
    Published folds must be the same everywhere.
    """
    names = sorted(sizes)
    random.Random(seed).shuffle(names)
    load, part_of = [0] * number, {}
    for name in sorted(names, key=lambda name: -sizes[name]):
        part_of[name] = load.index(min(load))
        load[part_of[name]] += sizes[name]
    return part_of


def _fold(name: str, tested: Sequence[bool]) -> Fold:
    return Fold(name, [i for i, held in enumerate(tested) if not held], [i for i, held in enumerate(tested) if held])
