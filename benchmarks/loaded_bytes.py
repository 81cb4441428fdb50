"""What a process holds on a GPU beside the allocator's replay and the context: the CUDA modules that it loaded, and workspaces.

    python benchmarks/loaded_bytes.py TABLE --cache .perfguard-cache

TABLE has measured memory (docs/tables.md). Networks without convolutions have no workspaces of cuDNN, so there the rest is what
was loaded: a constant of the machine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
from _record import parser_of, show

from perfguard.quantities import format_bytes
from perfguard_models.features.step import SUMS
from perfguard_research.dataset import dataset_of, graphs_of

_QUANTILES = 0.05, 0.25, 0.5, 0.75, 0.95


def main() -> None:
    """Show one line for each source and GPU, with and without convolutions."""
    parser = parser_of(__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    arguments = parser.parse_args()
    dataset_of([arguments.table], [SUMS], cache=arguments.cache)  # traces what is not in the cache
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for run, device, graph in graphs_of([arguments.table], lambda run: "memory" in run.labels, cache=arguments.cache):
        kind = "with convolutions" if "conv" in graph.kinds else "without convolutions"
        replayed = graph.reserved_bytes(device) + device.context_bytes
        found[f"{run.source} {run.gpu}, {run.mode}, {kind}"].append((math.exp(run.labels["memory"]), replayed))
    lines = []
    for name, runs in sorted(found.items()):
        measured, replayed = np.array(runs).T
        rest = measured - replayed
        errors = [np.abs(physics / measured - 1).mean() for physics in (replayed, replayed + np.median(rest))]
        quantiles = [format_bytes(number) for number in np.quantile(rest, _QUANTILES)]
        lines.append([name, f"{len(runs):,}", *quantiles, *(f"{error:.1%}" for error in errors)])
    columns = [
        "runs of",
        "number",
        *(f"{quantile:.0%}" for quantile in _QUANTILES),
        "error of the replay",
        "with the median added",
    ]
    show("loaded-bytes", columns, lines, record=arguments.record)


if __name__ == "__main__":
    main()
