"""Search spaces whose trials are rows of a table of measured runs: what is true of each configuration, and what was predicted.

A configuration is a family of networks, a network by its rank in it, and what its rows differ by: the batch on the A100, the
layout and the batch (the largest that fits, or the next one) on the RTX 3090. Predictions are those of the folds of `perfguard
leaderboard`, so no predictor has seen the family.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard_models.features.step import STEP_FEATURES
from perfguard_research.dataset import Run
from perfguard_research.intervals import FoldPredictions, judged

Fails = Literal["", "memory", "time"]
_A100, _RTX3090 = "a100-pcie-40gb", "rtx3090"
_A100_BUDGET = 16 * 2**30
_BATCHES = (8, 16, 32, 64, 128)
_RANKS = 4
"""Networks of a family, from the smallest to the largest."""
_STEPS = 2000
"""Steps of a trial."""
_LIVE, _ROOFLINE = STEP_FEATURES.index("log_live"), STEP_FEATURES.index("log_roofline")
ALL_ROWS = "all rows"
"""In the name of the space that has also the rows that cannot be, see :func:`is_impossible`."""
Believed = Mapping[int, tuple[float, float]]
"""Median and standard deviation of the logarithm that were predicted of each run, by its index."""


class Point(NamedTuple):
    """One configuration: what is true of it, and what was predicted."""

    name: str
    """Unique in its space."""
    ran: bool
    """Whether it fitted the card."""
    memory_bytes: float
    """As measured; where only known to have fitted or failed, live bytes moved to that side of the limit."""
    is_read: bool
    """Whether its memory was measured."""
    live_bytes: float
    step_s: float
    sums: npt.NDArray[np.float32]
    """Features of its step."""
    memory: tuple[float, float]
    """Predicted bytes, and the standard deviation of their logarithm."""
    time: tuple[float, float]
    """Predicted seconds of a step, and the standard deviation of their logarithm."""
    loss: float

    @property
    def num_steps(self) -> int:
        """Steps of the trial."""
        return _STEPS

    @property
    def trial_s(self) -> float:
        """Seconds from its launch to its end, if it breaks no budget."""
        return _STEPS * self.step_s


@dataclass(frozen=True)
class Space:
    """A search space on one GPU: a family, and numbers from 0 up to a size each; and what comes of every point."""

    name: str
    gpu: str
    limit_bytes: int
    time_budget_s: float | None
    """None: only memory is limited."""
    families: tuple[str, ...]
    sizes: Mapping[str, int]
    points: Mapping[tuple[Any, ...], Point]

    def at(self, params: Mapping[str, Any]) -> Point:
        """The configuration."""
        return self.points[(params["family"], *(params[name] for name in self.sizes))]

    def fails_by(self, point: Point) -> Fails:
        """The budget that a trial of ``point`` breaks. Empty: none."""
        if not point.ran or point.memory_bytes > self.limit_bytes:
            return "memory"
        if self.time_budget_s is not None and point.trial_s > self.time_budget_s:
            return "time"
        return ""

    def is_near(self, point: Point) -> bool:
        """Whether it fits, and needs more than nine tenths of a budget."""
        if self.fails_by(point):
            return False
        is_near_time = self.time_budget_s is not None and point.trial_s > 0.9 * self.time_budget_s
        return is_near_time or point.memory_bytes > 0.9 * self.limit_bytes

    @property
    def losses(self) -> list[float]:
        """Those of the points that fit."""
        return [point.loss for point in self.points.values() if not self.fails_by(point)]

    @property
    def loss_range(self) -> float:
        """From the best to the worst that fits."""
        return max(self.losses) - min(self.losses)


def spaces_of(runs: Sequence[Run], memory: FoldPredictions, time: FoldPredictions) -> tuple[list[Space], list[Space], list[str]]:
    """The spaces with a budget of memory, those with one of time, and the networks that all but the last of memory leave out.

    The A100's training runs have a budget of memory, and the RTX 3090's the memory of the card. Times were measured on the RTX
    3090 alone. There the budget of time is the median of all trials that fit the card.
    """
    of_memory, of_time = (_believed(runs, found, target) for found, target in ((memory, "memory"), (time, "time")))
    known = {
        index: run
        for index, run in enumerate(runs)
        if run.table == "workload" and run.mode == "train" and index in of_memory and index in of_time
    }
    others = {(run.gpu, run.structure): run.model for run in known.values() if is_impossible(run)}
    mine = {index: run for index, run in known.items() if (run.gpu, run.structure) not in others}
    capacity = next(run.capacity_bytes for run in mine.values() if run.gpu == _RTX3090)
    a100, rtx3090, every = (
        _Table({i: run for i, run in chosen.items() if run.gpu == gpu}, of_memory, of_time, limit, gpu == _RTX3090)
        for chosen, gpu, limit in ((mine, _A100, _A100_BUDGET), (mine, _RTX3090, capacity), (known, _RTX3090, capacity))
    )
    fitting = rtx3090._replace(runs={i: run for i, run in rtx3090.runs.items() if run.fits})
    limited = [
        *(_space(f"{_A100}, favours {favours}", a100, favours) for favours in ("large", "border")),
        *(_space(f"{_RTX3090}, favours {favours}", rtx3090, favours) for favours in ("large", "border")),
        _space(f"{_RTX3090}, favours large, {ALL_ROWS}", every, "large"),
    ]
    timed = [
        _space(f"{_RTX3090}, time", fitting, "long", has_time_budget=True),
        _space(f"{_RTX3090}, memory and time", rtx3090, "large and long", has_time_budget=True),
    ]
    return limited, timed, sorted({f"{model} ({gpu})" for (gpu, _), model in others.items()})


def is_impossible(run: Run) -> bool:
    """Whether the run is said to have fitted in less than the tensors that are alive at once in the traced step.

    No allocator can do that, and a real step has as many alive (`benchmarks/live_bytes.py`). So the run was one of another
    network under this name: the TResNets of the table ran with in-place activated batch norms, which keep half as much, and
    today's timm converts their weights (`timm/models/tresnet.py`). Or its reading is not that of a whole step: on the A100, some
    of these have the very reading of larger batches that are said to have crashed.
    """
    if not run.fits:
        return False
    most = math.exp(run.labels["memory"]) if "memory" in run.labels else run.capacity_bytes
    return _live(run) > most


class _Table(NamedTuple):
    """Runs of one GPU, with what was predicted of them."""

    runs: Mapping[int, Run]
    memory: Believed
    time: Believed
    limit: int
    by_layout: bool
    """Whether rows of a network differ by the layout and by whether they fitted. Else they differ by the batch."""


def _believed(runs: Sequence[Run], found: FoldPredictions, target: str) -> Believed:
    lines = judged(runs, "family", found)
    lines = lines[(lines["target"] == target) & np.isfinite(lines["predicted"]) & np.isfinite(lines["log_sigma"])]
    return {int(at): (math.exp(value), float(sigma)) for at, value, sigma in lines[["run", "predicted", "log_sigma"]].to_numpy()}


def _space(name: str, table: _Table, favours: str, *, has_time_budget: bool = False) -> Space:
    rungs = len({run.fits for run in table.runs.values()})
    sizes = {"rank": _RANKS} | ({"layout": 2, "rung": rungs} if table.by_layout else {"batch": len(_BATCHES)})
    networks = _networks(table, {tuple(setting) for setting in product(*map(range, list(sizes.values())[1:]))})
    points = dict(_points(table, networks, favours))
    gpu = next(iter(table.runs.values())).gpu
    budget_s = statistics.median(point.trial_s for point in points.values() if point.ran) if has_time_budget else None
    return Space(name, gpu, table.limit, budget_s, tuple(sorted(networks)), sizes, points)


def _networks(table: _Table, wanted: set[tuple[int, ...]]) -> dict[str, list[dict[tuple[int, ...], int]]]:
    """Return the run of each setting by family, of the networks that were measured at every one. Small families are left out."""
    settings: defaultdict[tuple[str, str], dict[tuple[int, ...], int]] = defaultdict(dict)
    for index, run in table.runs.items():
        by_layout = int("nhwc" in run.setting.variant), int(not run.fits)
        settings[run.family, run.model][by_layout if table.by_layout else (_BATCHES.index(run.batch_size),)] = index
    networks: defaultdict[str, list[dict[tuple[int, ...], int]]] = defaultdict(list)
    for (family, _), measured in settings.items():
        if measured.keys() == wanted:
            networks[family].append(measured)
    return {family: known for family, known in networks.items() if len(known) >= _RANKS}


def _points(
    table: _Table, networks: Mapping[str, list[dict[tuple[int, ...], int]]], favours: str
) -> Iterator[tuple[tuple[Any, ...], Point]]:
    for family in sorted(networks):
        known = sorted(networks[family], key=lambda measured: _live(table.runs[measured[min(measured)]]))
        for rank in range(_RANKS):
            measured = known[round(rank * (len(known) - 1) / (_RANKS - 1))]
            for setting, index in measured.items():
                fitting = measured[setting[0], 0] if table.by_layout else index
                yield (family, rank, *setting), _point(table, index, table.runs[fitting], favours, f"{family} {rank} {setting}")


def _point(table: _Table, index: int, fitting: Run, favours: str, name: str) -> Point:
    """A configuration. ``fitting`` is the run of the same network whose time was measured."""
    run = table.runs[index]
    live = _live(run)
    is_read = "memory" in run.labels
    if is_read:
        memory = math.exp(run.labels["memory"])
    else:
        memory = min(live, 0.95 * table.limit) if run.fits else max(live, 1.05 * table.limit)
    step_s = math.exp(float(run.view["sums"][_ROOFLINE]))
    if "time" in fitting.labels:
        step_s = math.exp(fitting.labels["time"]) * run.batch_size / fitting.batch_size
    loss = {
        "large": -math.log(live),
        "border": abs(math.log(memory / (0.95 * table.limit))),
        "long": -math.log(step_s),
        "large and long": -(math.log(live) + math.log(step_s)) / 2,
    }[favours]
    return Point(
        name=name,
        ran=run.fits,
        memory_bytes=memory,
        is_read=is_read,
        live_bytes=live,
        step_s=step_s,
        sums=run.view["sums"],
        memory=table.memory[index],
        time=table.time[index],
        loss=loss + _share_of(run.family),
    )


def _live(run: Run) -> float:
    return math.exp(float(run.view["sums"][_LIVE]))


def _share_of(text: str) -> float:
    """0 to 0.5, the same for the same text: some families are better than others."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**33
