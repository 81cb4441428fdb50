"""PerfGuard beside other predictors, on the same runs or on runs of the same kind.

    python benchmarks/peers.py TABLE... --cache .perfguard-cache

The tables are those of the weights for time (`models/perfguard_models/cards/step-time.md`), in the order of their training.
With the cache of the training it takes a quarter of an hour, else two hours. Errors of peers are what they published, apart from
the cheap fit, which is made here.

The cheap fit is t = (host³ + device³)^(1/3). The host has a cost for each operator by phase, a constant by mode, and the copy of
the batch. The device has a factor on the roofline for three kinds of operators by three kinds of arithmetic.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from _record import parser_of, show
from scipy.optimize import least_squares

from perfguard import load_predictor
from perfguard.graph import KIND_INDEX, Phase
from perfguard_models.features.launches import COLUMNS
from perfguard_models.step_time import StepTime
from perfguard_research.csv_rows import read_table
from perfguard_research.dataset import Run, dataset_of, without_time
from perfguard_research.evaluate import evaluate
from perfguard_research.intervals import FoldPredictions
from perfguard_research.leaderboard import predictions_of

Floats = npt.NDArray[np.float64]
_COLUMNS = ("what", "runs", "PerfGuard: mean / median", "peers")
_XMEM = "Stone-ResearchLife/xMem"
_SMALL_BATCHES = "pytorch-gpu-benchmark"
_TF32 = COLUMNS.index("tf32")
_START = np.log([20e-6, 60e-6, 10e-6, 300e-6, 600e-6, 1.0, *[1.8] * 9])
_BYTES_PER_S = 6e9


def memory_errors(tables: Sequence[Path]) -> dict[str, Floats]:
    """Errors of the memory of xMem's runs, for CNNs and for language models."""
    found: dict[str, list[float]] = {"torchvision": [], "hf": []}
    for table in tables:
        columns, rows = read_table(table)
        own = [row for row in rows if row.get("source") == _XMEM]
        for row, prediction, *_ in evaluate(columns, own, table, load_predictor()) if own else ():
            if row is not None and prediction is not None and row.status == "ok" and row.peak_memory_bytes is not None:
                error = abs(prediction.peak_memory.median / row.peak_memory_bytes - 1)
                found[row.model.partition(":")[0]].append(error)
    return {kind: np.array(errors) for kind, errors in found.items()}


def errors_by_run(runs: Sequence[Run], predicted: FoldPredictions) -> dict[int, float]:
    """Error of each step time that was held out, by its index."""
    return {
        index: abs(np.expm1(float(values["time"][at]) - runs[index].labels["time"]))
        for fold, values in predicted
        for at, index in enumerate(fold.judge)
        if "time" in runs[index].labels
    }


def cheap_columns(run: Run) -> Floats:
    """Work of the host and of the device. Shape: (6 + 9,)."""
    view = run.view
    launched = np.bincount(view["order"], minlength=len(view["name"]))
    kind, phase = view["host"] // len(Phase), view["host"] % len(Phase)
    group = np.where(kind == KIND_INDEX["conv"], 0, np.where(kind == KIND_INDEX["matmul"], 1, 2))
    is_half = run.setting.variant.startswith(("fp16", "bf16", "amp"))
    arithmetic = np.full(len(kind), 2) if is_half else (view["x"][:, _TF32] > 0).astype(np.int64)
    host = [*np.bincount(phase, launched, 3), run.mode == "infer", run.mode == "train", float(view["copied"][0]) / _BYTES_PER_S]
    return np.concatenate([host, np.bincount(3 * group + arithmetic, launched * view["roofline"], 9)])


def cheap_fit(x: Floats, log_s: Floats) -> Floats:
    """Logarithms of the costs. Shapes: (n, 15), (n,) → (15,)."""
    found = least_squares(
        lambda costs: np.concatenate([cheap_log_s(x, costs) - log_s, 0.02 * (costs - _START)]),
        _START,
        loss="soft_l1",
        f_scale=0.2,
    )
    return np.asarray(found.x)


def cheap_log_s(x: Floats, costs: Floats) -> Floats:
    """Log seconds of each step. Shape: (n,)."""
    cost = np.exp(costs)
    host, device = x[:, :6] @ cost[:6], x[:, 6:] @ cost[6:]
    return np.asarray(np.log(host**3 + device**3) / 3)


def in_words(errors: Sequence[float] | Floats) -> str:
    """Mean and median."""
    return f"{np.mean(errors):.1%} / {np.median(errors):.1%}"


def main() -> None:
    """Show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--most-operators", type=int, default=8_000)
    parser.add_argument("--most-runs", type=int)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    tables = arguments.tables
    memory = memory_errors(tables)
    lines = [
        ["memory of CNNs in default settings, training (xMem's runs)", str(len(memory["torchvision"])),
         in_words(memory["torchvision"]), "medians: xMem 2.2%, SchedTune 15%, DNNMem 25%"],
        ["memory of language models in default settings, training (xMem's runs)", str(len(memory["hf"])), in_words(memory["hf"]),
         "medians: xMem 3.8%, DNNMem 19%, SchedTune 50%, LLMem 58%"],
    ]  # fmt: skip
    splits = ["family", "source", "gpu"]
    cache, most = arguments.cache, {"most_operators": arguments.most_operators, "most_runs": arguments.most_runs}
    runs = dataset_of(tables, StepTime.views, cache=cache, **most, unwanted=without_time).runs
    found = predictions_of(StepTime.name, {}, runs, splits, cache=cache, jobs=2)
    small = {at for at, run in enumerate(runs) if _SMALL_BATCHES in run.source and "time" in run.labels}
    by_gpu = errors_by_run(runs, found["gpu", StepTime.name])
    neusight = [error for at, error in by_gpu.items() if runs[at].table == "transformer"]
    published = "NeuSight: mean 9.2%, on other cards: H100, L4 and A100 80 GB"
    lines.append(
        ["step of transformers in float32 (NeuSight's runs), card never seen", str(len(neusight)), in_words(neusight), published]
    )
    for split in splits:
        own = errors_by_run(runs, found[split, StepTime.name])
        cheap: list[float] = []
        for fold, _ in found[split, StepTime.name]:
            learn, judge = (sorted(small.intersection(part)) for part in (fold.learn, fold.judge))
            x, log_s = ([np.array([of(at) for at in part]) for part in (learn, judge)] for of in (
                lambda at: cheap_columns(runs[at]), lambda at: runs[at].labels["time"]))  # fmt: skip
            if judge:
                cheap += np.abs(np.expm1(cheap_log_s(x[1], cheap_fit(x[0], log_s[0])) - log_s[1])).tolist()
        what = f"step at small batches ({_SMALL_BATCHES}), {'card' if split == 'gpu' else split} never seen"
        lines.append([what, str(len(cheap)), in_words([own[at] for at in sorted(small)]), f"cheap fit: {in_words(cheap)}"])
    show("peers", _COLUMNS, lines, record=arguments.record)


if __name__ == "__main__":
    main()
