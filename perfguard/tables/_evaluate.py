"""A predictor held against a table of measured runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from perfguard.devices import Device, resolve_device
from perfguard.exceptions import PerfGuardError, TableError
from perfguard.graph import TraceCache
from perfguard.predictor import Prediction, Predictor
from perfguard.tables._workloads import COLUMNS, WorkloadRow, workload_of, workload_row
from perfguard.tables._zoo import timm_model

PREDICTED = (
    "pred_peak_memory_mib", "pred_memory_low_mib", "pred_memory_high_mib", "p_oom",
    "pred_step_time_ms", "pred_time_low_ms", "pred_time_high_ms", "error",
)  # fmt: skip
"""The columns that an evaluation adds."""
_MIB = 2**20


class Evaluated(NamedTuple):
    """One row with its prediction; one of the two, or the row, is None where ``error`` says why."""

    row: WorkloadRow | None
    prediction: Prediction | None
    device: Device | None
    error: str = ""

    def columns(self) -> dict[str, str]:
        """What is added to the row."""
        if self.prediction is None or self.device is None:
            return dict.fromkeys(PREDICTED, "") | {"error": self.error}
        memory, time = self.prediction.peak_memory, self.prediction.step_time
        values = (
            memory.median / _MIB,
            *(bound / _MIB for bound in memory.interval()),
            self.prediction.p_oom(self.device.memory_bytes),
            time.median * 1e3,
            *(bound * 1e3 for bound in time.interval()),
        )
        return dict(zip(PREDICTED, (*(f"{value:.6g}" for value in values), ""), strict=True))


def evaluate(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    predictor: Predictor,
    *,
    on_row: Callable[[], None] = lambda: None,
) -> list[Evaluated]:
    """Predict every row of a workload table, in the order of the table. A row that cannot be done has its ``error``.

    Args:
        columns: of the table.
        rows: as `read_table` gives them.
        predictor: what to hold against them.
        on_row: called after each row, for a progress bar.

    Raises:
        TableError: if the table is of no known kind.
    """
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        raise TableError(f"This is no workload table: it lacks the columns {', '.join(missing)}. It has {', '.join(columns)}.")
    results: list[Evaluated | None] = [None] * len(rows)
    readable: list[tuple[int, WorkloadRow]] = []
    for index, raw in enumerate(rows):
        try:
            readable.append((index, workload_row(raw)))
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
        self._traces = TraceCache()

    def evaluate(self, row: WorkloadRow, predictor: Predictor) -> Evaluated:
        try:
            device = resolve_device(row.gpu)
            if row.structure != self._structure:
                self._structure, self._model, self._traces = row.structure, None, TraceCache()
                with torch.device("meta"):
                    self._model = timm_model(row.model, row.img_size)
            if self._model is None:
                raise TableError(f"timm cannot make the model {row.model!r}")
            graph = self._traces.trace(workload_of(row, self._model), target=device)
            return Evaluated(row, predictor.predict(graph, device), device)
        except Exception as error:  # a row that cannot be done is a row with an error
            text = str(error) if isinstance(error, PerfGuardError) else f"{type(error).__name__}: {error}"
            return Evaluated(row, None, None, " ".join(text.split()))


class Score(NamedTuple):
    """How good the predictions of one quantity are. Errors are |predicted / measured - 1|."""

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
    """By source, mode and GPU: scores of memory and of time, and for runs that did not fit the share that was caught, beside
    the share of fitting runs that would have been pruned, at P(out of memory) above ``threshold``."""
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
    scores = {"memory": score(memory), "time": score(time)}
    return {
        **dict(zip(("source", "mode", "gpu"), key, strict=True)),
        "rows": len(group),
        "errors": sum(bool(result.error) for result in group),
        **{name: None if value is None else value._asdict() for name, value in scores.items()},
        "oom_rows": len(pruned["oom"]),
        "oom_caught": caught,
        "fitting_pruned": lost,
    }
