"""A predictor held against a table of measured runs."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.markup import escape
from rich.table import Table

from perfguard.devices import Device
from perfguard.exceptions import ConfigurationError, PerfGuardError
from perfguard.graph import TraceCache
from perfguard.predictor import Prediction, Predictor
from perfguard_research.tables.kinds import kind_of_table, parser_of
from perfguard_research.tables.rows import MIB, MeasuredRow, model_on_meta

_MEMORY = ("pred_peak_memory_mib", "pred_memory_low_mib", "pred_memory_high_mib", "p_oom")
_TIME = ("pred_step_time_ms", "pred_time_low_ms", "pred_time_high_ms")
_UTILISATION = ("pred_gpu_util", "pred_sm_active")
_LATENCY = ("pred_latency_ms", "pred_latency_low_ms", "pred_latency_high_ms")
_PREDICTED = {
    "run": (*_MEMORY, *_TIME, "error"),
    "workload": (*_MEMORY, *_TIME, "error"),
    "collected": (*_MEMORY, *_TIME, *_UTILISATION, "error"),
    "transformer": (*_MEMORY, *_TIME, "error"),
    "perceptron": (*_MEMORY, *_TIME, *_UTILISATION, "error"),
    "operator": (*_LATENCY, "error"),
}
PREDICTED = _PREDICTED["workload"]


def predicted_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """The columns that an evaluation adds to a table that has ``columns``."""
    return _PREDICTED[kind_of_table(columns)]


class Evaluated(NamedTuple):
    """One row with its prediction; one of the two, or the row, is None where ``error`` says why."""

    row: MeasuredRow | None
    prediction: Prediction | None
    device: Device | None
    error: str = ""

    def columns(self) -> dict[str, str]:
        """Columns that can be added to a row of any table."""
        if self.prediction is None or self.device is None:
            return {"error": self.error}
        memory, time = self.prediction.peak_memory, self.prediction.step_time
        times = [bound * 1e3 for bound in (time.median, *time.interval())]
        values = [
            *(bound / MIB for bound in (memory.median, *memory.interval())),
            self.prediction.p_oom(self.device.memory_bytes),
            *times,
            *times,
            None if self.prediction.gpu_util is None else self.prediction.gpu_util * 100,
            self.prediction.sm_active,
        ]
        names = (*_MEMORY, *_TIME, *_LATENCY, *_UTILISATION)
        return {name: "" if value is None else f"{value:.6g}" for name, value in zip(names, values, strict=True)} | {"error": ""}


def evaluate(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    path: str | Path,
    predictor: Predictor,
    *,
    on_row: Callable[[], None] = lambda: None,
) -> list[Evaluated]:
    """Predict every row of a table, in the order of the table. A row that cannot be predicted has an ``error``.

    Args:
        columns: of the table.
        rows: as `read_table` gives them.
        path: the file of the table. Files that belong to it lie beside it.
        predictor: the predictor to compare with the rows.
        on_row: called after each row, for a progress bar.

    Raises:
        TableError: if the table is of no known kind.
    """
    parse = parser_of(columns, path)
    results: list[Evaluated | None] = [None] * len(rows)
    readable: list[tuple[int, MeasuredRow]] = []
    for index, raw in enumerate(rows):
        try:
            readable.append((index, parse(raw)))
        except PerfGuardError as error:
            results[index] = Evaluated(None, None, None, str(error))
            on_row()
    # Rows of one network follow each other: it is made once, and of its batches only some are traced.
    readable.sort(key=lambda item: (str(item[1].structure), item[1].gpu, item[1].batch_size))
    maker = _Maker()
    for index, row in readable:
        results[index] = maker.evaluate(row, predictor)
        on_row()
    return [result for result in results if result is not None]


class _Maker:
    """Makes the workloads of rows that come sorted by their structure."""

    def __init__(self) -> None:
        self._structure: tuple[Any, ...] | None = None
        self._model: torch.nn.Module | None = None
        self._failure: PerfGuardError | None = None
        self._traces = TraceCache()

    def evaluate(self, row: MeasuredRow, predictor: Predictor) -> Evaluated:
        try:
            device = row.device
            if row.capacity_bytes is not None:
                device = device.with_memory(int(row.capacity_bytes))
            if row.structure != self._structure:
                self._structure, self._traces, self._failure = row.structure, TraceCache(), None
                try:
                    self._model = model_on_meta(row)
                except PerfGuardError as failure:
                    self._failure = failure
            if self._failure is not None:
                raise self._failure
            graph = row.graph(self._model, self._traces, device)
            return Evaluated(row, predictor.predict(graph, device), device)
        except Exception as error:  # a row that cannot be done is a row with an error
            text = str(error) if isinstance(error, PerfGuardError) else f"{type(error).__name__}: {error}"
            return Evaluated(row, None, None, " ".join(text.split()))


class Score(NamedTuple):
    """Errors of the predictions of one quantity. An error is |predicted / measured - 1|."""

    rows: int
    mean: float
    median: float
    p90: float
    coverage: float
    """Share of the measurements that the 90% intervals hold."""


def score(pairs: Iterable[tuple[float, Any]]) -> Score | None:
    """The score of (measured, Estimate) pairs; None if there are none."""
    pairs = list(pairs)
    if not pairs:
        return None
    errors = sorted(abs(estimate.median / measured - 1) for measured, estimate in pairs)
    inside = [low <= measured <= high for measured, estimate in pairs for low, high in [estimate.interval()]]
    return Score(
        len(pairs),
        statistics.fmean(errors),
        statistics.median(errors),
        errors[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)],
        sum(inside) / len(inside),
    )


def report(results: Sequence[Evaluated], *, threshold: float = 0.5) -> list[dict[str, Any]]:
    """Return the scores of memory and of time by source, mode and GPU.

    They include the fractions of failed and of fitting runs that would be pruned at P(out of memory) above ``threshold``.
    """
    groups: dict[tuple[str, str, str], list[Evaluated]] = {}
    for result in results:
        if result.row is not None:
            groups.setdefault((result.row.source, result.row.mode, result.row.gpu), []).append(result)
    return [_group_report(key, group, threshold) for key, group in sorted(groups.items())]


def _group_report(key: tuple[str, str, str], group: Sequence[Evaluated], threshold: float) -> dict[str, Any]:
    memory: list[tuple[float, Any]] = []
    time: list[tuple[float, Any]] = []
    pruned: dict[str, list[bool]] = {"ok": [], "oom": []}
    for row, prediction, device, _ in group:
        if row is None or prediction is None or device is None:
            continue
        if row.status in pruned:
            pruned[row.status].append(prediction.p_oom(device.memory_bytes) > threshold)
        if row.status == "ok" and row.peak_memory_bytes is not None:
            memory.append((row.peak_memory_bytes, prediction.peak_memory))
        if row.status == "ok" and row.step_time_s is not None:
            time.append((row.step_time_s, prediction.step_time))
    caught, lost = (sum(flags) / len(flags) if flags else None for flags in (pruned["oom"], pruned["ok"]))
    utilisation = [
        (row.gpu_util, prediction.gpu_util)
        for row, prediction, _, _ in group
        if row is not None and prediction is not None and row.gpu_util and prediction.gpu_util is not None
    ]
    errors = [abs(predicted / measured - 1) for measured, predicted in utilisation]
    scores = {"memory": score(memory), "time": score(time)}
    return {
        **dict(zip(("source", "mode", "gpu"), key, strict=True)),
        "rows": len(group),
        "errors": sum(bool(result.error) for result in group),
        **{name: None if value is None else value._asdict() for name, value in scores.items()},
        "gpu_util": {"rows": len(errors), "mean": statistics.fmean(errors), "median": statistics.median(errors)}
        if errors
        else None,
        "oom_rows": len(pruned["oom"]),
        "oom_caught": caught,
        "fitting_pruned": lost,
    }


def write_predictions(path: str, columns: Sequence[str], rows: Sequence[Mapping[str, str]], results: Sequence[Evaluated]) -> None:
    added = predicted_columns(columns)
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*(column for column in columns if column not in added), *added], extrasaction="ignore")
            writer.writeheader()
            writer.writerows({**row, **result.columns()} for row, result in zip(rows, results, strict=True))
    except OSError as error:
        raise ConfigurationError(f"The predictions cannot be written to {path!r}: {error}") from error


def write_text(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"The result cannot be written to {path!r}: {error}") from error


def as_table(predictor: str, groups: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"{predictor}: mean / median / 90th percentile of the relative error, coverage of the 90% interval")
    for heading in ("source", "mode", "gpu", "rows", "memory", "time", "GPU utilisation", "OOM caught", "fitting pruned"):
        table.add_column(heading, justify="left" if heading in ("source", "mode", "gpu") else "right")
    for group in groups:
        table.add_row(
            *(escape(group[name]) for name in ("source", "mode", "gpu")),
            str(group["rows"]),
            _score(group["memory"]),
            _score(group["time"]),
            _score(group["gpu_util"]),
            _share(group["oom_caught"]),
            _share(group["fitting_pruned"]),
        )
    return table


def _score(score: Mapping[str, float] | None) -> str:
    if score is None:
        return "-"
    text = f"{score['mean']:.1%} / {score['median']:.1%}"
    return text if "p90" not in score else f"{text} / {score['p90']:.1%}, {score['coverage']:.0%}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
