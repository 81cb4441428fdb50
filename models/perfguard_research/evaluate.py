"""A predictor held against a table of measured runs: a prediction for each row, and scores by source, mode and GPU."""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import nn

from perfguard.devices import Device
from perfguard.exceptions import PerfGuardError
from perfguard.graph import OpGraph, TraceCache
from perfguard.predictor import Estimate, Prediction, Predictor
from perfguard_research.tables import MIB, MeasuredRow, MemoryKind, parser_of

PREDICTED = (
    "pred_peak_memory_mib", "pred_memory_low_mib", "pred_memory_high_mib", "p_oom",
    "pred_step_time_ms", "pred_time_low_ms", "pred_time_high_ms", "error",
)  # fmt: skip
"""The columns that an evaluation adds to a table."""


class Evaluated(NamedTuple):
    """One row with its prediction. Without one, ``error`` says why."""

    row: MeasuredRow | None = None
    prediction: Prediction | None = None
    memory: Estimate | None = None
    """The predicted peak of the row's own kind of memory."""
    device: Device | None = None
    error: str = ""

    def columns(self) -> dict[str, str]:
        """The row's PREDICTED; of a row without a prediction the error alone."""
        if self.prediction is None or self.device is None or self.memory is None:
            return {"error": self.error}
        memory = self.memory
        time = self.prediction.step_time
        values = [bound / MIB for bound in (memory.median, *memory.interval())]
        values.append(self.prediction.p_oom(self.device.memory_bytes))
        values += [bound * 1e3 for bound in (time.median, *time.interval())]
        return dict(zip(PREDICTED, (*(f"{value:.6g}" for value in values), ""), strict=True))


def evaluate(
    columns: Sequence[str], rows: Sequence[Mapping[str, str]], path: str | Path, predictor: Predictor
) -> list[Evaluated]:
    """Predict every row of a table, in the order of the table. A row that cannot be predicted has an ``error``.

    Args:
        columns: of the table.
        rows: as `read_table` gives them.
        path: the file of the table. Files that belong to it lie beside it.
        predictor: the predictor to compare with the rows.

    Raises:
        TableError: if the table is of no known kind.
    """
    parse = parser_of(columns, path)
    results: dict[int, Evaluated] = {}
    readable: list[tuple[int, MeasuredRow]] = []
    for index, raw in enumerate(rows):
        try:
            readable.append((index, parse(raw)))
        except PerfGuardError as error:
            results[index] = Evaluated(error=str(error))
    # Rows of one network follow each other: it is made once, and of equal structures only one is traced.
    readable.sort(key=lambda item: (str(item[1].structure), item[1].gpu, item[1].batch_size))
    networks = [list(members) for _, members in itertools.groupby(readable, key=lambda item: item[1].structure)]
    for members in track(networks, description="networks", transient=True, disable=not sys.stderr.isatty()):
        make_model = functools.cache(members[0][1].make_model)
        traces = TraceCache()
        for index, row in members:
            results[index] = _evaluated(row, make_model, traces, predictor)
    return [results[index] for index in range(len(rows))]


def _evaluated(
    row: MeasuredRow, make_model: Callable[[], nn.Module | None], traces: TraceCache, predictor: Predictor
) -> Evaluated:
    try:
        device = row.device if row.capacity_bytes is None else row.device.with_memory(int(row.capacity_bytes))
        graph = row.graph(make_model(), traces, device)
        prediction = predictor.predict(graph, device)
        return Evaluated(row, prediction, memory_of_kind(row.memory_kind, prediction, graph, device), device)
    except Exception as error:  # a row that cannot be done is a row with an error
        text = str(error) if isinstance(error, PerfGuardError) else f"{type(error).__name__}: {error}"
        return Evaluated(row, error=" ".join(text.split()))


def memory_of_kind(kind: MemoryKind, prediction: Prediction, graph: OpGraph, device: Device) -> Estimate:
    """The predicted peak as a reading of this kind would be.

    A prediction is the driver's reading. PyTorch's allocator reserves that without the context. Less is allocated: the bytes of
    tensors that are alive, which the replay knows.
    """
    if kind in ("driver", "resident", "unknown"):
        return prediction.peak_memory
    if kind == "allocated":
        return Estimate(float(max(graph.peak_live_bytes, 1)), prediction.peak_memory.log_sigma)
    driver = prediction.peak_memory
    median = max(driver.median - device.context_bytes, float(graph.peak_live_bytes), 1.0)
    # The context is known, so the rest is as uncertain in bytes as the sum.
    return Estimate(median, driver.log_sigma * max(driver.median / median, 1.0))


def score(pairs: Sequence[tuple[float, Estimate]]) -> dict[str, float] | None:
    """The score of pairs of measured and predicted; None if there are none.

    An error is |predicted / measured - 1|. The coverage is the share of the measurements that the 90% intervals hold.
    """
    if not pairs:
        return None
    errors = [abs(estimate.median / measured - 1) for measured, estimate in pairs]
    inside = [low <= measured <= high for measured, estimate in pairs for low, high in [estimate.interval()]]
    p90 = float(np.quantile(errors, 0.9, method="inverted_cdf"))
    return {
        "rows": len(pairs),
        "mean": statistics.fmean(errors),
        "median": statistics.median(errors),
        "p90": p90,
        "coverage": statistics.fmean(inside),
    }


def report(results: Sequence[Evaluated]) -> list[dict[str, Any]]:
    """Return the scores of memory and of time by source, mode and GPU.

    They include the fractions of failed and of fitting runs that would be pruned at P(out of memory) above one half.
    """
    groups: defaultdict[tuple[str, str, str], list[Evaluated]] = defaultdict(list)
    for result in results:
        if result.row is not None:
            groups[result.row.source, result.row.mode, result.row.gpu].append(result)
    return [_group_report(*key, group) for key, group in sorted(groups.items())]


def _group_report(source: str, mode: str, gpu: str, group: Sequence[Evaluated]) -> dict[str, Any]:
    memory: list[tuple[float, Estimate]] = []
    time: list[tuple[float, Estimate]] = []
    pruned: dict[str, list[bool]] = {"ok": [], "oom": []}
    for row, prediction, own_memory, device, _ in group:
        if row is None or prediction is None or device is None or own_memory is None:
            continue
        if row.status in pruned:
            pruned[row.status].append(prediction.p_oom(device.memory_bytes) > 0.5)
        if row.status == "ok" and row.memory_bytes is not None and row.memory_kind != "unknown":
            memory.append((row.memory_bytes, own_memory))
        if row.status == "ok" and row.step_time_s is not None:
            time.append((row.step_time_s, prediction.step_time))
    return {
        "source": source,
        "mode": mode,
        "gpu": gpu,
        "rows": len(group),
        "errors": sum(bool(result.error) for result in group),
        "memory": score(memory),
        "time": score(time),
        "oom_rows": len(pruned["oom"]),
        "oom_caught": statistics.fmean(pruned["oom"]) if pruned["oom"] else None,
        "fitting_pruned": statistics.fmean(pruned["ok"]) if pruned["ok"] else None,
    }


def with_predictions(columns: Sequence[str], rows: Sequence[Mapping[str, str]], results: Sequence[Evaluated]) -> str:
    """The table as CSV, with the predicted columns after its own."""
    predicted = pd.DataFrame([result.columns() for result in results], columns=PREDICTED)
    own = pd.DataFrame(rows, columns=columns).drop(columns=[*PREDICTED], errors="ignore")
    return str(own.join(predicted).to_csv(index=False))


def as_table(predictor: str, groups: Sequence[Mapping[str, Any]]) -> Table:
    """The report for people."""

    def score(score: Mapping[str, float] | None) -> str:
        if score is None:
            return "-"
        return f"{score['mean']:.1%} / {score['median']:.1%} / {score['p90']:.1%}, {score['coverage']:.0%}"

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    table = Table(title=f"{predictor}: mean / median / 90th percentile of the relative error, coverage of the 90% interval")
    for heading in ("source", "mode", "gpu", "rows", "memory", "time", "OOM caught", "fitting pruned"):
        table.add_column(heading, justify="left" if heading in ("source", "mode", "gpu") else "right")
    for group in groups:
        named = (escape(group[name]) for name in ("source", "mode", "gpu"))
        cells = score(group["memory"]), score(group["time"]), share(group["oom_caught"]), share(group["fitting_pruned"])
        table.add_row(*named, str(group["rows"]), *cells)
    return table
