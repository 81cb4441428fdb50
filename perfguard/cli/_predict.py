"""``perfguard predict``: what one workload costs on a device."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perfguard.devices import Device, resolve_device
from perfguard.exceptions import BuildError, ConfigurationError
from perfguard.graph import OpGraph, bytes_by_module, cost_by_operator, trace
from perfguard.predictor import Estimate, Prediction, load_predictor
from perfguard.quantities import format_bytes, format_seconds
from perfguard.workload import Build, Workload, asks_for_missing, build_workload

_MOST_KINDS = 6
_MOST_ROWS = 15


def show_prediction(arguments: argparse.Namespace) -> None:
    """Build, trace, predict and print.

    Raises:
        PerfGuardError: for a file, a function, a parameter or a GPU that cannot be right.
    """
    device = resolve_device(arguments.gpu)
    workload = _workload(arguments)
    graph = trace(workload, target=device)
    prediction = load_predictor().predict(graph, device, steps=workload.steps)
    if arguments.json:
        print(json.dumps(_as_json(prediction, device), indent=2))
    else:
        _print(prediction, device, graph)
        if arguments.explain:
            _explain(graph, device)
    if arguments.plot:
        from perfguard.cli._timeline import draw_timeline

        draw_timeline(graph, device, arguments.plot)
        print(f"memory over the step: {arguments.plot}", file=sys.stderr)


def _workload(arguments: argparse.Namespace) -> Workload:
    build = _load_build(arguments.source)
    params = dict(map(_parameter, arguments.set))
    if arguments.batch_size is not None:
        if arguments.batch_size < 1:
            raise ConfigurationError(f"--batch-size must be at least 1, but got {arguments.batch_size}.")
        params["batch_size"] = arguments.batch_size
    try:
        workload = build_workload(build, params)
    except KeyError as error:
        if not asks_for_missing(error, params):
            raise
        raise BuildError(f"build asks for the hyperparameter {error.args[0]!r}: add --set {error.args[0]}=VALUE.") from error
    changes = {name: value for name in ("mode", "precision", "steps") if (value := getattr(arguments, name)) is not None}
    return dataclasses.replace(workload, **changes)


def _load_build(source: str) -> Build:
    path_text, separator, name = source.rpartition(":")
    path = Path(path_text)
    if not separator or path.suffix != ".py":
        raise ConfigurationError(f"Expected FILE.py:BUILD, for instance examples/models.py:resnet, but got {source!r}.")
    if not path.is_file():
        raise ConfigurationError(f"There is no file {path_text!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BuildError(f"{path_text} cannot be imported: {type(error).__name__}: {error}") from error
    build = getattr(module, name, None)
    if not callable(build):
        here = ", ".join(sorted(key for key, value in vars(module).items() if _is_own_function(value, module.__name__))) or "none"
        raise ConfigurationError(f"{path_text} has no function {name!r}. Its functions: {here}.")
    return build  # type: ignore[no-any-return]


def _is_own_function(value: Any, module_name: str) -> bool:
    return callable(value) and not isinstance(value, type) and getattr(value, "__module__", None) == module_name


def _parameter(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigurationError(f"--set must look like NAME=VALUE, but got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a plain word, for instance optimizer=adam


def _as_json(prediction: Prediction, device: Device) -> dict[str, Any]:
    def estimate(value: Estimate | None) -> dict[str, float] | None:
        if value is None:
            return None
        low, high = value.interval()
        return {"median": value.median, "low": low, "high": high}

    return {
        "gpu": device.id,
        "predictor": prediction.predictor,
        "trained_on_device": prediction.trained_on_device,
        "peak_memory_bytes": estimate(prediction.peak_memory),
        "step_time_s": estimate(prediction.step_time),
        "total_time_s": estimate(prediction.total_time),
        "capacity_bytes": device.memory_bytes,
        "p_oom": prediction.p_oom(device.memory_bytes),
        "bytes_at_peak": dict(prediction.bytes_at_peak),
        "time_by_kind_s": dict(prediction.time_by_kind_s),
        "unmodelled": list(prediction.unmodelled),
    }


def _print(prediction: Prediction, device: Device, graph: OpGraph) -> None:
    console = Console()
    memory_low, memory_high = prediction.peak_memory.interval()
    time_low, time_high = prediction.step_time.interval()
    capacity = format_bytes(device.memory_bytes)
    table = Table(title=f"{device.name} ({device.id}), {capacity}", show_header=False)
    table.add_row(
        "peak memory",
        f"{format_bytes(prediction.peak_memory.median)}  (90%: {format_bytes(memory_low)} to {format_bytes(memory_high)})",
    )
    table.add_row("P(out of memory)", f"{prediction.p_oom(device.memory_bytes):.1%}")
    table.add_row(
        "step time",
        f"{format_seconds(prediction.step_time.median)}  (90%: {format_seconds(time_low)} to {format_seconds(time_high)})",
    )
    if prediction.total_time is not None:
        table.add_row("trial time", format_seconds(prediction.total_time.median))
    table.add_row("work", f"{graph.flops / 1e9:,.1f} GFLOP in {len(graph.ops)} operators")
    console.print(table)
    console.print(_shares("alive at the peak", prediction.bytes_at_peak, format_bytes))
    console.print(_shares("time by kind of operator", prediction.time_by_kind_s, format_seconds))
    if not prediction.trained_on_device:
        console.print(f"[yellow]{prediction.predictor} was not trained on {device.name}: its intervals are wider.[/]")
    for text in prediction.unmodelled:
        console.print(f"[yellow]not modelled: {text}[/]")


def _explain(graph: OpGraph, device: Device) -> None:
    console = Console()
    live = format_bytes(graph.peak_live_bytes)
    if device.kind == "cuda":
        reserved = format_bytes(graph.reserved_bytes)
        console.print(f"tensors {live}, reserved by the allocator {reserved}, context {format_bytes(device.context_bytes)}")
    else:
        console.print(f"tensors {live}")
    at = graph.peak_index
    if at >= 0:
        op = graph.ops[at]
        console.print(
            f"the peak is at operator {at + 1} of {len(graph.ops)}: {op.name}, {op.phase.name.lower()}, {op.module or 'model'}"
        )
    modules = {path or "(outside any module)": size for path, size in bytes_by_module(graph).items()}
    console.print(_shares("alive at the peak, by module", modules, format_bytes, most=_MOST_ROWS))
    table = Table(title=f"operators by roofline time on {device.name}")
    for heading in ("operator", "calls", "GFLOP", "traffic", "time"):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    for cost in cost_by_operator(graph, device)[:_MOST_ROWS]:
        gflop, traffic = f"{cost.flops / 1e9:,.2f}", format_bytes(cost.num_bytes)
        table.add_row(cost.name, f"{cost.calls}", gflop, traffic, format_seconds(cost.seconds))
    console.print(table)


def _shares(title: str, parts: Mapping[str, float], text: Any, *, most: int = _MOST_KINDS) -> Table:
    table = Table(title=title, show_header=False)
    total = sum(parts.values()) or 1
    for name, value in sorted(parts.items(), key=lambda item: -item[1])[:most]:
        table.add_row(name.replace("_", " "), text(value), f"{value / total:.0%}")
    return table
