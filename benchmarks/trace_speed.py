"""PerfGuard's trace against what people use today to know a training step's memory without a GPU: time, own memory, estimate.

    python benchmarks/trace_speed.py                        # ten models, three batch sizes
    python benchmarks/trace_speed.py --table TABLE.csv.gz   # also what an A100 really took, where the table has it

Tools: `perfguard.trace` with the allocator's replay; PyTorch's MemTracker under FakeTensorMode; the package torch-kitsune (where
it is installed). Each tool and model has a process of its own, with a limit on its memory, and does the three batches in turn.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _record import parser_of, show
from rich.progress import track
from torch import nn

from perfguard import TensorSpec, Workload, resolve_device, trace
from perfguard.measure import CpuProbe
from perfguard_research.dataset import usable_rows
from perfguard_research.networks import timm_model

MODELS = (
    "resnet50", "mobilenetv3_large_100", "efficientnet_b0", "densenet121", "regnety_032", "convnext_tiny",
    "vit_base_patch16_224", "deit_small_patch16_224", "swin_tiny_patch4_window7_224", "mixer_b16_224",
)  # fmt: skip
BATCHES = (8, 32, 128)
SIZE = 224
TOOLS = ("PerfGuard", "MemTracker", "torch-kitsune")
_LIMIT_BYTES = 12 * 2**30
_TIMEOUT_S = 300


def by_perfguard(model: nn.Module, batch: int) -> int:
    """Reserved bytes of the traced step."""
    workload = Workload(
        model,
        inputs=(batch, 3, SIZE, SIZE),
        targets=TensorSpec((batch,), "int64"),
        loss=F.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    )
    return trace(workload).reserved_bytes(resolve_device("a100"))


def by_mem_tracker(model: nn.Module, batch: int) -> int:
    """Peak of PyTorch's MemTracker over two steps on fake tensors, the model's own turned into fake ones."""
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = FakeTensorMode()
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    peak = 0
    with mode:
        optimizer = torch.optim.SGD(fake.parameters(), lr=0.1, momentum=0.9)
        images, labels = torch.empty(batch, 3, SIZE, SIZE), torch.zeros(batch, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(fake, optimizer, images, labels)
        with tracker:
            for _ in range(2):
                F.cross_entropy(fake(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                snapshot = tracker.get_tracker_snapshot("peak")
                peak = max(peak, *(size for sizes in snapshot.values() for kind, size in sizes.items() if "Total" in str(kind)))
                tracker.reset_mod_stats()
    return peak


def by_kitsune(model: nn.Module, batch: int) -> int:
    """torch-kitsune's prediction, without the overhead that it adds: the table adds one context to all."""
    from kitsune.predict import predict_memory

    result = predict_memory(model, input_shape=(3, SIZE, SIZE), batch_size=batch, optimizer="sgd")
    return int(result.total_bytes - result.overhead_bytes)


ESTIMATORS = {"PerfGuard": by_perfguard, "MemTracker": by_mem_tracker, "torch-kitsune": by_kitsune}


def run_one(tool: str, name: str) -> None:
    """In a process of its own: print one JSON line a batch."""
    resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
    model = timm_model(name)
    ESTIMATORS[tool](timm_model("resnet10t"), 2)  # imports are not counted
    for batch in BATCHES:
        memory = CpuProbe()
        memory.start()
        start = time.perf_counter()
        estimate = ESTIMATORS[tool](model, batch)
        seconds = time.perf_counter() - start
        print(
            json.dumps({"batch": batch, "seconds": seconds, "own": memory.finish().peak_memory_bytes, "estimate": estimate}),
            flush=True,
        )


def measured(table: Path | None) -> dict[tuple[str, int], float]:
    """(model, batch) → bytes that the driver of an A100 read."""
    if table is None:
        return {}
    return {
        (row.model.removeprefix("timm:"), row.batch_size): row.peak_memory_bytes
        for row in usable_rows(table)[0]
        if (row.gpu, row.mode, row.status) == ("a100-pcie-40gb", "train", "ok") and row.peak_memory_bytes
    }


def main() -> None:
    """Run every tool on every model and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--one", nargs=2, metavar=("TOOL", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run_one(*arguments.one)
        return
    truth = measured(arguments.table)
    tools = [tool for tool in TOOLS if tool != "torch-kitsune" or importlib.util.find_spec("kitsune")]
    context = resolve_device("a100").context_bytes
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    rows = []
    for name in track(arguments.models, transient=True, disable=not sys.stderr.isatty()):
        row = [name]
        for tool in tools:
            found = measure_one(tool, name)
            for result in found:
                key = name, result["batch"]
                result["error"] = abs((result["estimate"] + context) / truth[key] - 1) if key in truth else None
            results[tool] += found
            row += cells(found)
        rows.append(row)
    rows.append(["median", *(cell for tool in tools for cell in cells(results[tool]))])
    columns = [f"{tool}, {heading}" for tool in tools for heading in ("ms", "own MiB", "error")]
    show("trace", ["model", *columns], rows, record=arguments.record)


def measure_one(tool: str, name: str) -> list[dict[str, Any]]:
    """The lines that the process printed before it ended or was ended."""
    command = [sys.executable, __file__, "--one", tool, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        output = done.stdout
        if done.returncode:
            print(f"{tool} on {name}: {(done.stderr.strip().splitlines() or [''])[-1][:160]}", file=sys.stderr)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        print(f"{tool} on {name}: more than {_TIMEOUT_S} s", file=sys.stderr)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def cells(found: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of the first batch and of the others, own memory, and the median error."""
    first = [result["seconds"] for result in found if result["batch"] == BATCHES[0]]
    later = [result["seconds"] for result in found if result["batch"] != BATCHES[0]]
    errors = [result["error"] for result in found if result["error"] is not None]
    return [
        ", ".join(f"{statistics.median(seconds) * 1e3:,.0f}" if seconds else "-" for seconds in (first, later)),
        f"{max(result['own'] for result in found) / 2**20:,.0f}" if found else "-",
        f"{statistics.median(errors):.0%}" if errors else "-",
    ]


if __name__ == "__main__":
    main()
