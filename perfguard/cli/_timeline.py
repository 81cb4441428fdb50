"""A picture of the memory over one step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perfguard._optional import why_not_imported
from perfguard.exceptions import ConfigurationError
from perfguard.graph import OpGraph, Phase, StorageKind, roofline_s, timeline

if TYPE_CHECKING:
    from perfguard.devices import Device

_COLORS = {
    StorageKind.PARAMETER: "#4878a8",
    StorageKind.BUFFER: "#9ab4cc",
    StorageKind.OPTIMIZER_STATE: "#8a6fb0",
    StorageKind.GRADIENT: "#d98032",
    StorageKind.INPUT: "#b8b8b8",
    StorageKind.ACTIVATION: "#5a9a5a",
    StorageKind.TEMPORARY: "#c95f5f",
}
_GIB = 2**30


def draw_timeline(graph: OpGraph, device: Device, path: str) -> None:
    """Write the picture to ``path``; its ending decides the format.

    Raises:
        ConfigurationError: if Matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        missing = "--plot needs Matplotlib: pip install 'perfguard[plot]'."
        raise ConfigurationError(why_not_imported(error, "matplotlib", missing)) from error
    milliseconds = np.concatenate([[0.0], np.cumsum(roofline_s(graph, device))]) * 1e3
    by_kind = timeline(graph)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    kinds = [kind for kind in _COLORS if by_kind[kind].any()]
    axes.stackplot(
        milliseconds,
        [by_kind[kind] / _GIB for kind in kinds],
        labels=[kind.name.lower().replace("_", " ") for kind in kinds],
        colors=[_COLORS[kind] for kind in kinds],
        step="pre",
        linewidth=0,
    )
    peak = graph.peak_index + 1
    axes.plot(milliseconds[peak], graph.live_bytes[peak] / _GIB, "k^", label=f"live peak, {graph.peak_live_bytes / _GIB:.3g} GiB")
    if device.kind == "cuda":
        reserved = graph.reserved_bytes
        axes.axhline(reserved / _GIB, color="k", linestyle=":", linewidth=1, label=f"reserved, {reserved / _GIB:.3g} GiB")
    for index in range(1, len(graph.ops)):
        if graph.ops[index].phase is not graph.ops[index - 1].phase:
            axes.axvline(milliseconds[index], color="0.4", linewidth=0.6)
            if graph.ops[index].phase is not Phase.FORWARD:
                axes.text(
                    milliseconds[index], axes.get_ylim()[1], f" {graph.ops[index].phase.name.lower()}", va="bottom", fontsize=8
                )
    axes.set(xlabel=f"roofline time on {device.name} (ms)", ylabel="memory (GiB)", xlim=(0, milliseconds[-1]))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The picture cannot be written to {str(Path(path))!r}: {error}") from error
