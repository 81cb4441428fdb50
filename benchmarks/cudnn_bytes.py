"""What cuDNN takes for recurrent layers: kept for the backward pass, and its workspace. Measured, and as a trace has it.

python benchmarks/cudnn_bytes.py benchmarks/data/h100_recurrent.csv [--record docs/results/data]
python benchmarks/cudnn_bytes.py out/mine.csv --measure     # on a machine with a GPU: write the table first
"""

from __future__ import annotations

import csv
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _record import parser_of, show
from torch import nn

from perfguard import Workload, resolve_device, trace
from perfguard.graph import StorageKind

_LAYERS = 90
_MOST_BYTES = 3e9
_PRECISION: Any = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_COLUMNS = ("cell", "dtype", "batch", "length", "inputs", "width", "layers", "bidirectional", "kept_bytes", "workspace_bytes")
_CELLS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def drawn() -> dict[str, Any]:
    """A layer, and a batch of it."""
    return {
        "cell": random.choice([*_CELLS]),
        "dtype": random.choice(("float32", "float16", "bfloat16")),
        "batch": random.choice((2, 16, 64, 128, 512, 742, 2048)),
        "length": random.choice((15, 47, 64, 128, 256)),
        "inputs": random.choice((64, 128, 453, 512)),
        "width": random.choice((53, 128, 256, 317, 512, 1024)),
        "layers": random.choice((1, 2, 3)),
        "bidirectional": random.choice((0, 1)),
    }


def made(of: dict[str, Any], device: str) -> nn.RNNBase:
    sizes, both = (int(of[name]) for name in ("inputs", "width", "layers")), bool(int(of["bidirectional"]))
    return _CELLS[of["cell"]](*sizes, batch_first=True, bidirectional=both, device=device, dtype=getattr(torch, of["dtype"]))


def taken(function: Callable[[], Any]) -> tuple[Any, int, int]:
    """Its result, the most bytes that it took at once, and those that it left."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def measured(of: dict[str, Any]) -> dict[str, Any]:
    """The same with the bytes beside the outputs: kept, and of the workspace in a forward pass without gradients."""
    layer = made(of, "cuda")
    inputs = torch.randn(of["batch"], of["length"], of["inputs"], device="cuda", dtype=getattr(torch, of["dtype"]))
    layer(inputs[:1, :2])  # loads the kernels
    (output, state), _, kept = taken(lambda: layer(inputs))
    outputs = sum(one.nbytes for one in (output, *(state if isinstance(state, tuple) else (state,))))
    del output, state
    with torch.no_grad():
        _, peak, _ = taken(lambda: layer(inputs))
    return of | {"kept_bytes": kept - outputs, "workspace_bytes": peak - outputs}


def traced(of: dict[str, Any]) -> tuple[int, int]:
    """What a trace keeps, and its workspace."""
    sizes = int(of["batch"]), int(of["length"]), int(of["inputs"])
    workload = Workload(made(of, "meta"), inputs=sizes, loss=lambda output: output[0].mean(), precision=_PRECISION[of["dtype"]])
    graph = trace(workload, target=resolve_device("h100"))
    at = next(index for index, op in enumerate(graph.ops) if op.name == "fused_rnn")
    kept = max(graph.storages[index].num_bytes for index in graph.ops[at].outputs[3:])
    alone = [one.num_bytes for one in graph.storages if one.birth == at and one.death == at and one.kind is StorageKind.TEMPORARY]
    return kept, max(alone, default=0)


def main() -> None:
    """Measure, or show a line for each kind of layer."""
    parser = parser_of(__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--measure", action="store_true", help="write the table, on this machine's GPU")
    arguments = parser.parse_args()
    if arguments.measure:
        random.seed(0)
        with arguments.table.open("w", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS)
            writer.writeheader()
            for _ in range(_LAYERS):
                of = drawn()
                if of["batch"] * of["length"] * of["width"] * of["layers"] * (1 + of["bidirectional"]) * 32 < _MOST_BYTES:
                    writer.writerow(measured(of))
        return
    ratios = defaultdict[str, list[tuple[float, float]]](list)
    with arguments.table.open(newline="") as file:
        for of in csv.DictReader(file):
            kept, workspace = traced(of)
            directions = "both directions" if int(of["bidirectional"]) else "one direction"
            found = kept / float(of["kept_bytes"]), workspace / float(of["workspace_bytes"])
            ratios[f"{of['cell']}, {directions}"].append(found)
    lines = []
    for name, found_of in sorted(ratios.items()):
        columns = [f"{min(of):.2f} / {statistics.median(of):.2f} / {max(of):.2f}" for of in zip(*found_of, strict=True)]
        lines.append([name, str(len(found_of)), *columns])
    show("cudnn-bytes", ["layer", "number", "kept: traced over measured", "workspace"], lines, record=arguments.record)


if __name__ == "__main__":
    main()
