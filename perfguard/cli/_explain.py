"""The account of a prediction: tables of its memory and time whose rows add up to the predicted numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from perfguard.predictor import OperatorTimes, Prediction, Predictor
from perfguard.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.console import Console
    from rich.table import Table

    from perfguard.devices import Device
    from perfguard.graph import OpGraph

_MOST_KINDS = 6
_MOST_ROWS = 15
_WORDS = {
    "cache": "allocator's cache",
    "correction": "learnt correction",
    "start": "before the first launch",
    "batch_copy": "copy of the batch",
}
"""Names of parts that are clearer than those in the data."""
_BESIDE_TENSORS = "(beside tensors: cache, context, correction)"
_BEFORE_OPERATORS = "(before the first launch, and copy of the batch)"


def operator_times_s(predictor: Predictor, prediction: Prediction, graph: OpGraph, device: Device) -> npt.NDArray[np.float64]:
    """Return the predicted seconds that each operator adds to the step; the rest is before the first. Shape: (len(ops),).

    They are in proportion to the roofline if the predictor knows no operators.
    """
    if isinstance(predictor, OperatorTimes):
        shares = predictor.op_time_shares(graph, device)
    else:
        from perfguard.graph import roofline_s

        shares = roofline_s(graph, device)
        shares = shares / max(float(shares.sum()), 1e-12)
    return shares * prediction.step_time.median


def print_account(console: Console, prediction: Prediction) -> None:
    """Print the parts of the peak memory and of the step time."""
    if prediction.memory_parts_bytes:
        console.print(_parts_table("peak memory", _in_words(prediction.memory_parts_bytes), format_bytes))
    if sum(seconds > 0 for seconds in prediction.time_parts_s.values()) > 1:
        console.print(_parts_table("step time", _in_words(prediction.time_parts_s), format_seconds))
    if prediction.time_by_kind_s:
        by_kind = _in_words(prediction.time_by_kind_s)
        console.print(_parts_table("step time by kind of operator", by_kind, format_seconds, most=_MOST_KINDS))


def print_details(
    console: Console, prediction: Prediction, op_time_s: npt.NDArray[np.float64], graph: OpGraph, device: Device
) -> None:
    """Print the peak memory by module, and the step time by operator."""
    from rich.table import Table

    from perfguard.graph import cost_by_operator

    at = graph.peak_index
    if at >= 0:
        op = graph.ops[at]
        console.print(
            f"the peak is at operator {at + 1} of {len(graph.ops)}: {op.name}, {op.phase.name.lower()}, {op.module or 'model'}"
        )
    console.print(_parts_table("peak memory by module", memory_by_module(prediction, graph), format_bytes, most=_MOST_ROWS))
    table = Table(title=f"step time by operator on {device.name}")
    for heading in ("operator", "calls", "GFLOP", "traffic", "time", "share"):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    step_s = prediction.step_time.median

    def add(name: str, calls: int | str, flops: float, num_bytes: float, seconds: float) -> None:
        numbers = f"{flops / 1e9:,.2f}", format_bytes(num_bytes), format_seconds(seconds), f"{seconds / step_s:.0%}"
        table.add_row(name, f"{calls}", *numbers)

    costs = cost_by_operator(graph, device, op_time_s=op_time_s)
    shown, rest = costs[:_MOST_ROWS], costs[_MOST_ROWS:]
    for cost in shown:
        add(*cost)
    if rest:
        _, *columns = zip(*rest, strict=True)
        calls, flops, num_bytes, seconds = map(sum, columns)
        add(f"({len(rest)} others)", calls, flops, num_bytes, seconds)
    before_s = step_s - float(op_time_s.sum())
    if before_s > 1e-6 * step_s:
        table.add_row(_BEFORE_OPERATORS, "", "", "", format_seconds(before_s), f"{before_s / step_s:.0%}")
    table.add_section()
    add("together", len(graph.ops), graph.flops, sum(cost.num_bytes for cost in costs), step_s)
    console.print(table)


def memory_by_module(prediction: Prediction, graph: OpGraph) -> dict[str, float]:
    """Bytes of the predicted peak by path of module, largest first, and what is beside the tensors."""
    from perfguard.graph import bytes_by_module

    parts: dict[str, float] = {path or "(outside any module)": size for path, size in bytes_by_module(graph).items()}
    return parts | {_BESIDE_TENSORS: prediction.peak_memory.median - sum(parts.values())}


def as_json(
    prediction: Prediction, op_time_s: npt.NDArray[np.float64], graph: OpGraph, device: Device
) -> dict[str, list[dict[str, Any]] | dict[str, float]]:
    """The data of :func:`print_details`, without limits on the rows."""
    from perfguard.graph import cost_by_operator

    before_s = prediction.step_time.median - float(op_time_s.sum())
    costs = [cost._asdict() for cost in cost_by_operator(graph, device, op_time_s=op_time_s)]
    before = {"name": _BEFORE_OPERATORS, "calls": 0, "flops": 0, "num_bytes": 0, "seconds": before_s}
    return {"memory_by_module_bytes": memory_by_module(prediction, graph), "operators": [*costs, before]}


def _in_words(parts: Mapping[str, float]) -> dict[str, float]:
    return {_WORDS.get(name, name.replace("_", " ")): value for name, value in parts.items()}


def _parts_table(title: str, parts: Mapping[str, float], text: Callable[[float], str], *, most: int | None = None) -> Table:
    """A table of ``parts`` that are not 0, largest first, with their sum. All but the ``most`` largest are one row."""
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for _ in range(3):
        table.add_column(justify="right" if table.columns else "left")
    total = sum(parts.values())
    rows = sorted(((name, value) for name, value in parts.items() if abs(value) > 1e-6 * total), key=lambda row: -abs(row[1]))
    shown, rest = rows[:most], rows[most:] if most is not None else []
    if rest:
        shown.append((f"({len(rest)} others)", sum(value for _, value in rest)))
    for name, value in shown:
        table.add_row(name, text(value), f"{value / total:.0%}")
    table.add_section()
    table.add_row("together", text(total), "100%")
    return table
