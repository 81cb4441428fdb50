"""Single modules of Transformers and PyTorch: allocated memory and time, predicted and as Liger-Kernel's benchmarks read them.

    pip download liger-kernel==0.7.0 liger-kernel==0.8.0 --no-deps --no-binary :all:     # and unpack both
    python benchmarks/liger.py liger.csv.gz --liger liger_kernel-0.7.0 liger_kernel-0.8.0

Each row is a dry run of Liger's own script, the first that knows the module, with three rounds where the script has ten or more.
Its clock does not see the host where launches are ahead of the GPU, and a prediction does. So times below 2 ms are left out.
Needs liger-kernel and triton.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import liger_kernel.chunked_loss  # type: ignore[import-untyped]
import liger_kernel.transformers  # type: ignore[import-untyped]  # before the dry runs fork
import liger_kernel.utils  # type: ignore[import-untyped]
import optuna
import pandas as pd
import torch
import triton.testing  # type: ignore[import-untyped]
from _record import parser_of, show
from optuna.study import StudyDirection

from perfguard import load_predictor, resolve_device
from perfguard.exceptions import PerfGuardError
from perfguard.graph.allocator import cublas_workspace_bytes
from perfguard_optuna.capture import ObjectiveBuild
from perfguard_research.tables import MIB

GPUS = {"h100-sxm": "h100-sxm-80gb", "h100-pcie": "h100-pcie-80gb"}
LEFT_OUT = {
    "embedding": "The process held 12 GiB of something else, as rows of its other providers show.",
    "fused_linear_cpo_loss fused_linear_orpo_loss fused_linear_simpo_loss kto_loss distill_jsd_loss": (
        "The scripts are of 0.4 and 0.5. With those of 0.7, the readings differ by whole weights."
    ),
    "fused_neighborhood_attention": "A loop in Python over all positions: a dry run takes up to a minute.",
    "megatron_cross_entropy megatron_rms_norm megatron_swiglu": "No archive has a script.",
    "rope llama4_rope": "Their classes in Transformers have changed since.",
    "relu_squared": "Its script has other settings in 0.8, and 0.7 has none.",
}
"""Why modules are not rebuilt."""
LEAST_MS = 2.0


def rounds(call: Callable[[], object], *_args: Any, **_kwargs: Any) -> tuple[float, float, float]:
    """In place of a clock or a reading of memory: three rounds. A step of an optimizer tells the dry run where each ends."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cuda"))])
    for _ in range(3):
        call()
        optimizer.step()
    return 1.0, 1.0, 1.0


def script_of(kernel: str, folders: Sequence[Path]) -> ModuleType:
    """Liger's script for a module, loaded."""
    found = ((path, top) for top in folders for path in sorted(top.glob("benchmark/scripts/benchmark_*.py")))
    path, top = next((path, top) for path, top in found if f'"{kernel}"' in path.read_text(encoding="utf-8"))
    for name in ("utils", "test", *(name for name in sys.modules if name.startswith("test."))):  # Python has a `test`, too
        sys.modules.pop(name, None)
    sys.path[:0] = [str(path.parent), str(top), *map(str, folders)]
    liger_kernel.utils.infer_device = lambda: "cuda"
    triton.testing.do_bench = rounds
    spec = importlib.util.spec_from_file_location("script", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    vars(importlib.import_module("utils"))["_test_memory"] = rounds
    spec.loader.exec_module(script)
    return script


def run(row: Any, folders: Sequence[Path]) -> None:
    """What the script does for a row."""
    script = script_of(row.kernel, folders)
    config = {
        name: getattr(torch, value.removeprefix("torch.")) if str(value).startswith("torch.") else value
        for name, value in json.loads(row.config).items()
    }
    bench = next(value for name, value in vars(script).items() if name.startswith(f"bench_{row.metric}"))
    bench(script.SingleBenchmarkRunInput(row.x, row.provider, row.mode, config))


def line(name: Sequence[str], errors: Sequence[tuple[str, float]]) -> list[str]:
    """A line of the table."""
    memory, time = ([error for metric, error in errors if metric == wanted] for wanted in ("memory", "speed"))
    cells = [*name, str(len(memory))]
    cells += [f"{statistics.fmean(map(abs, memory)):.1%}", f"{max(memory, key=abs):+.1%}"] if memory else ["-", "-"]
    cells += [str(len(time))]
    return cells + ([f"{statistics.fmean(map(abs, time)):.1%}", f"{1 + statistics.median(time):.2f}"] if time else ["-", "-"])


def main() -> None:
    """Show the errors by module and card."""
    parser = parser_of(__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--liger", type=Path, nargs="+", required=True, help="unpacked source archives")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = pd.read_csv(arguments.table)
    rows = rows[(rows["provider"] != "torch_compile") & ~rows["kernel"].isin(" ".join(LEFT_OUT).split())]
    rows = rows[(rows["metric"] == "memory") | (rows["median"] >= LEAST_MS)]
    predictor = load_predictor()
    errors: defaultdict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for (kernel, gpu), group in rows.groupby(["kernel", "gpu"]):
        own, device = list(group.itertuples()), resolve_device(GPUS.get(gpu, gpu))

        def objective(trial: optuna.Trial, own: Sequence[Any] = own) -> float:
            run(own[trial.suggest_int("row", 0, 999)], arguments.liger)
            return 0.0

        build = ObjectiveBuild(objective, device, [StudyDirection.MINIMIZE])
        for at, row in enumerate(own):
            try:
                graph = build({"row": at}).graph
            except PerfGuardError as error:
                print(f"{kernel} {row.x}: {error}")
                continue
            if row.metric == "memory":
                has_products = any(op.kind == "matmul" for op in graph.ops)  # both threads of the process have made some
                found = (graph.peak_live_bytes + 2 * cublas_workspace_bytes(device) * has_products) / MIB
            else:
                found = predictor.predict(graph, device).step_time.median * 1e3
            errors[kernel, device.id].append((row.metric, found / row.median - 1))
        build.close()
    columns = ["module", "card", "memory: rows", "mean error", "worst", "time: rows", "mean error", "predicted over measured"]
    lines = [line(name, own) for name, own in sorted(errors.items())]
    for names, why in LEFT_OUT.items():
        print(f"{names}: {why}")
    show("modules", columns, [*lines, line(("all", ""), [*itertools.chain(*errors.values())])], record=arguments.record)


if __name__ == "__main__":
    main()
