"""A picture of the memory over one step, beside the memory of the card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfguard.exceptions import ConfigurationError, why_not_imported
from perfguard.graph import OpGraph, Phase, timeline
from perfguard.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from perfguard.budget import Limit
    from perfguard.devices import Device
    from perfguard.predictor import Prediction

_COLORS = {
    "context": "#5b5b5b",
    "parameters": "#4878a8",
    "buffers": "#9ab4cc",
    "optimizer_states": "#8a6fb0",
    "gradients": "#d98032",
    "inputs": "#b8b8b8",
    "activations": "#5a9a5a",
    "temporaries": "#c95f5f",
    "cache": "#e6dcae",
    "correction": "#f2c6d3",
}
"""Colours of the parts of a prediction, from the bottom to the top."""
_CAPACITY, _BUDGET = "#b00020", "#c77700"
_MOST_EMPTY = 2.5
"""A limit is in the curve's axes if they grow by no more than this factor."""
_LEAST_SHARE = 1e-6
"""A part below this share of the peak is rounding."""
_GIB = 2**30


def draw_timeline(
    path: str,
    graph: OpGraph,
    device: Device,
    prediction: Prediction,
    op_time_s: npt.NDArray[np.float64],
    limits: Sequence[Limit] = (),
) -> None:
    """Write the picture of ``prediction`` to ``path``; its ending decides the format.

    On the left is the memory over the predicted time of the step: the context and the tensors. On the right is the device's
    memory with the parts of the predicted peak.

    Args:
        path: of the picture.
        graph: the step.
        device: what it runs on.
        prediction: of ``graph`` on ``device``.
        op_time_s: seconds that each operator adds to the step; the rest of its time is before the first. Shape: (len(ops),).
        limits: budgets of the memory and the step time.

    Raises:
        ConfigurationError: if Matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        missing = "--plot needs Matplotlib: pip install 'perfguard[plot]'."
        raise ConfigurationError(why_not_imported(error, "matplotlib", missing)) from error
    figure = Figure(figsize=(11, 5), layout="constrained")
    over_time, of_card = figure.subplots(1, 2, width_ratios=(8, 1))
    _draw_step(over_time, graph, device, prediction, op_time_s, limits)
    _draw_card(of_card, device, prediction, limits)
    by_label: dict[Any, Artist] = {}
    for axes in (over_time, of_card):
        handles, labels = axes.get_legend_handles_labels()
        by_label |= dict(zip(labels, handles, strict=True))
    figure.legend(list(by_label.values()), list(by_label), loc="outside right upper", fontsize=8, frameon=False)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The picture cannot be written to {str(Path(path))!r}: {error}") from error


def _draw_step(
    axes: Axes,
    graph: OpGraph,
    device: Device,
    prediction: Prediction,
    op_time_s: npt.NDArray[np.float64],
    limits: Sequence[Limit],
) -> None:
    step_s = prediction.step_time.median
    start_s = max(step_s - float(op_time_s.sum()), 0.0)
    milliseconds = 1e3 * np.concatenate([[0.0, start_s], start_s + np.cumsum(op_time_s)])
    bands = {"context": np.full(len(graph.ops) + 1, device.context_bytes)} | timeline(graph)
    shown = [name for name in _COLORS if name in bands and bands[name].any()]
    axes.stackplot(
        milliseconds,
        [np.concatenate([bands[name][:1], bands[name]]) / _GIB for name in shown],  # before the first operator it is constant
        labels=[name.replace("_", " ") for name in shown],
        colors=[_COLORS[name] for name in shown],
        step="pre",
        linewidth=0,
    )
    low, high = (end / _GIB for end in prediction.peak_memory.interval())
    peak = prediction.peak_memory.median
    axes.axhspan(low, high, color="k", alpha=0.08, linewidth=0)
    axes.axhline(peak / _GIB, color="k", linestyle="--", linewidth=1, label=f"predicted peak, {format_bytes(peak)}\n(band: 90%)")
    top, right = axes.get_ylim()[1], milliseconds[-1]
    for limit, color, text in _limits_of_memory(device, limits):
        if limit / _GIB <= _MOST_EMPTY * top:
            axes.axhline(limit / _GIB, color=color, linewidth=1.5, label=text)
            top = max(top, 1.05 * limit / _GIB)
    for one in limits:
        if one.quantity == "step_time" and one.limit <= _MOST_EMPTY * step_s:
            axes.axvline(one.limit * 1e3, color=_BUDGET, linestyle="-.", linewidth=1.5)
            axes.text(
                one.limit * 1e3, 0.0, f" budget, {format_seconds(one.limit)}", color=_BUDGET, rotation=90, ha="right", fontsize=8
            )
            right = max(right, 1.02 * one.limit * 1e3)
    for index in range(1, len(graph.ops)):
        phase = graph.ops[index].phase
        if phase is not graph.ops[index - 1].phase:
            at = milliseconds[index + 1]
            axes.axvline(at, color="0.4", linewidth=0.6)
            if phase is not Phase.FORWARD:
                name = phase.name.lower()
                axes.annotate(name, (at, 1), (2, 2), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8)
    step = f"step of {format_seconds(step_s)}"
    axes.set(xlabel=f"predicted time in the {step} on {device.name} (ms)", ylabel="memory (GiB)", xlim=(0, right), ylim=(0, top))


def _draw_card(axes: Axes, device: Device, prediction: Prediction, limits: Sequence[Limit]) -> None:
    """One bar: the parts of the peak, within the device's memory."""
    bottom, peak = 0.0, prediction.peak_memory.median / _GIB
    low, high = (end / _GIB for end in prediction.peak_memory.interval())
    for name, color in _COLORS.items():
        size = prediction.memory_parts_bytes.get(name, 0.0) / _GIB
        if size > _LEAST_SHARE * peak:
            label = {"cache": "allocator's cache", "correction": "learnt correction"}.get(name, name.replace("_", " "))
            axes.bar(0, size, bottom=bottom, width=1, color=color, label=label)
            bottom += size
    if bottom > (1 + _LEAST_SHARE) * peak:
        axes.bar(0, bottom - peak, bottom=peak, width=1, fill=False, hatch="////", edgecolor="w", label="taken off by learning")
    axes.errorbar(0, peak, [[peak - low], [high - peak]], color="k", capsize=4)
    top = max(device.memory_bytes / _GIB, high)
    for limit, color, text in _limits_of_memory(device, limits):
        axes.axhline(limit / _GIB, color=color, linewidth=1.5, label=text)
    axes.set(xlim=(-0.75, 0.75), ylim=(0, 1.05 * top), xticks=[], title="at the peak")
    axes.title.set_fontsize(8)


def _limits_of_memory(device: Device, limits: Sequence[Limit]) -> list[tuple[float, str, str]]:
    """Bytes, colour and label of the capacity and of each budget."""
    capacity = device.memory_bytes
    budgets = [one.limit for one in limits if one.quantity == "memory"]
    found = [(float(capacity), _CAPACITY, f"capacity, {format_bytes(capacity)}")]
    return found + [(one, _BUDGET, f"budget, {format_bytes(one)}") for one in budgets]
