"""What the guard adds to a trial of an Optuna study, from its creation to its end.

    OMP_NUM_THREADS=1 python benchmarks/guard_overhead.py --trials 100

Studies of ResNets of five depths for an A100, whose objective does nothing but suggest, so that all that the guarded study takes
more than the same one without a guard is the guard: building and tracing the network, the verdict, what is written into trial and
log, starting and ending the measurement, learning. The same sampler and storage on both sides. Trials of ten seconds are assumed
for the share.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import torch
from _record import parser_of, show
from torch import nn

import perfguard_optuna
from perfguard import TensorSpec, Workload
from perfguard_optuna import PerfGuardPruner, PerfGuardSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from models import Bottleneck

_TRIAL_S = 10.0


def build(params: Mapping[str, Any]) -> Workload:
    """A ResNet of bottleneck blocks, as its hyperparameters say."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(params["depth"]):
            layers.append(Bottleneck(inputs, width, 2 if stage and block == 0 else 1))
            inputs = 4 * width
    batch_size = params["batch_size"]
    return Workload(
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)),
        inputs=(batch_size, 3, 224, 224),
        targets=TensorSpec((batch_size,), "int64"),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=params["lr"], momentum=0.9),
    )


def objective(trial: optuna.Trial) -> float:
    """Suggests, and trains nothing."""
    depth = trial.suggest_int("depth", 1, 5)
    batch_size = trial.suggest_int("batch_size", 8, 512, log=True)
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    if trial.should_prune():
        raise optuna.TrialPruned
    return depth * batch_size * lr


def trial_times_s(study: optuna.Study, trials: int, **options: Any) -> list[float]:
    """Seconds from the end of one trial to the end of the next, for each trial that completed."""
    ends = [time.perf_counter()]
    study.optimize(objective, n_trials=trials, callbacks=[lambda *_: ends.append(time.perf_counter())], **options)
    return [later - earlier for earlier, later in itertools.pairwise(ends)]


def main() -> None:
    """Print the guard's own time a trial: median, 99th percentile, and share of a trial of ten seconds."""
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=200)
    arguments = parser.parse_args()
    trials = arguments.trials
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plain = trial_times_s(optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0)), trials)
        base_s = statistics.median(plain)
        for name in ("pruner", "pruner and sampler"):
            pruner = PerfGuardPruner("a100", build=build, log=f"{folder}/{name}.db")
            sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(seed=0)
            sampler = sampler if name == "pruner" else PerfGuardSampler(sampler, pruner)
            study = perfguard_optuna.create_study(sampler=sampler)
            times = sorted(seconds - base_s for seconds in trial_times_s(study, trials, pruner=pruner, count="proposed"))
            mean, p99 = statistics.fmean(times), times[int(0.99 * (len(times) - 1))]
            columns = (f"{seconds * 1e3:.0f} ms" for seconds in (statistics.median(times), p99, mean))
            rows.append([name, *columns, f"{mean / _TRIAL_S:.2%}"])
    show("overhead", ["study", "median", "99th percentile", "mean", "of a 10 s trial"], rows, record=arguments.record)


if __name__ == "__main__":
    main()
