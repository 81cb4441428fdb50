"""Does pruning teach the sampler to avoid the limit? The best trial needs nine tenths of the memory (optuna issue 2969).

    OMP_NUM_THREADS=1 python benchmarks/beside_limit.py --seeds 0 1 2 3 4

Perceptrons train on this machine's CPU, guarded by a dry run of the objective or not, with Optuna's TPE as it is by default. Four
things are made up, so that the truth is known and the time of the studies is that of an idle machine:

- The loss is a formula: it falls with the width, and depth, batch size and learning rate have a best value.
- What fits is decided by a table. The peak memory of every configuration is measured before the studies, and the budget is such
  that the best that fits needs nine tenths of it. The next width needs more than all of it.
- A trial that does not fit raises PyTorch's error in its first forward pass. In a dry run nothing is allocated, so nothing fails.
- A trial runs three steps, and counts as ten seconds: one of set-up and nine of training. If it fails, it counts as one. A
  guarded one has the guard's processor time besides, and the set-up again, for the dry run. A study ends when its time is over.

"Above the optimum" is the best loss less the loss of the best configuration that fits. "Beside the limit": launched trials that
fit and need more than three quarters of the budget. "At the optimum": trials with its width, depth and batch size.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import optuna
import torch
from _record import parser_of, show
from guard_overhead import processor_s
from torch import nn

import perfguard_optuna
from perfguard import Run, resolve_device
from perfguard.quantities import format_bytes

WIDTHS, DEPTHS, BATCHES = range(512, 1537, 128), (1, 2, 3), (32, 64, 128)
BEST = (1024, 2, 64)
"""Width, depth and batch size of the best configuration that fits."""
Config = tuple[int, int, int]


def loss_of(config: Config, lr: float = 1e-3) -> float:
    """The formula."""
    width, depth, batch = config
    return -math.log2(width) + abs(depth - 2) + 0.5 * abs(math.log2(batch / 64)) + 0.5 * (math.log10(lr) + 3) ** 2


def steps(config: Config, lr: float = 1e-3) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """A forward pass and a step of a perceptron."""
    width, depth, batch = config
    layers = [nn.Linear(256, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    inputs, labels = torch.randn(batch, 256), torch.randint(0, 10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return lambda: model(inputs), step


@dataclass
class Objective:
    """An ordinary objective on a device with a memory of ``budget`` bytes."""

    peaks: Mapping[Config, int]
    """Measured peak memory of each configuration, in bytes."""
    budget: int
    own_s: float = 0.0
    """Processor time of the latest trial's own work."""

    def __call__(self, trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", WIDTHS.start, WIDTHS[-1], step=WIDTHS.step)
        config = width, trial.suggest_categorical("depth", DEPTHS), trial.suggest_categorical("batch", BATCHES)
        lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
        start = time.process_time()
        try:
            forward, step = steps(config, lr)
            if not self.fits(config) and not forward().is_meta:
                raise torch.OutOfMemoryError("out of memory")
            for _ in range(3):
                step()
        finally:
            self.own_s = time.process_time() - start
        return loss_of(config, lr)

    def fits(self, config: Config) -> bool:
        """Whether the device has the memory for it."""
        return self.peaks[config] <= self.budget

    def of(self, trial: optuna.trial.FrozenTrial) -> Config:
        """The configuration of a finished trial."""
        return trial.params["width"], trial.params["depth"], trial.params["batch"]


def measured_peak(config: Config) -> int:
    """Peak memory of two steps, in bytes: the second has the optimizer's states."""
    torch.set_num_threads(1)
    with Run(resolve_device("cpu")) as run:
        _, step = steps(config)
        for _ in range(2):
            step()
    assert run.measurement is not None
    assert run.measurement.peak_memory_bytes is not None
    return run.measurement.peak_memory_bytes


def run_study(objective: Objective, seed: int, is_guarded: bool, seconds: float) -> list[str]:
    """One study in a process of its own, as a row of the table."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    with tempfile.TemporaryDirectory() as folder:
        settings: Any = {"memory_budget": objective.budget, "log": f"{folder}/log.db"}
        run: Any = perfguard_optuna.guarded(objective, gpu="cpu", **settings) if is_guarded else objective
        while seconds > 0:
            objective.own_s, start = 0.0, processor_s()
            study.optimize(run, n_trials=1, catch=torch.OutOfMemoryError)
            trial = study.trials[-1]
            seconds -= 10.0 if trial.value is not None else 1.0 if objective.own_s else 0.0
            seconds -= 1.0 + processor_s() - start - objective.own_s if is_guarded else 0.0
        if is_guarded:
            run.end()
    pruned = [trial for trial in study.trials if perfguard_optuna.record_of(trial).is_pruned]
    launched = [trial for trial in study.trials if trial not in pruned]
    fitting = [trial for trial in launched if objective.fits(objective.of(trial))]
    lost = sum(objective.fits(objective.of(trial)) for trial in pruned)
    beside = sum(objective.peaks[objective.of(trial)] > 0.75 * objective.budget for trial in fitting)
    counts = len(launched), len(launched) - len(fitting), len(pruned), lost, beside
    best = min((trial.value for trial in fitting if trial.value is not None), default=math.inf) - loss_of(BEST)
    reached = sum(objective.of(trial) == BEST for trial in fitting)
    print("guarded" if is_guarded else "no guard", seed, *counts, reached, best, file=sys.stderr)
    return ["guarded" if is_guarded else "no guard", str(seed), *map(str, counts), str(reached), f"{best:.3f}"]


def main() -> None:
    """Measure all configurations, run the studies in pairs, and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--seconds", type=float, default=600.0, help="time of each study")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        configs = list(product(WIDTHS, DEPTHS, BATCHES))
        peaks = dict(zip(configs, pool.map(measured_peak, configs), strict=True))
    objective = Objective(peaks, round(peaks[BEST] / 0.9))
    best = min(filter(objective.fits, configs), key=loss_of)
    assert best == BEST, best
    share = sum(map(objective.fits, configs)) / len(configs)
    print(f"budget {format_bytes(objective.budget)}, {share:.0%} of the configurations fit", file=sys.stderr)
    work = list(product(arguments.seeds, (True, False)))
    with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=1) as pool:
        found = [pool.submit(run_study, objective, *one, arguments.seconds) for one in work]
        rows = [one.result() for one in found]
    counts = ["launched", "out of memory", "pruned", "pruned though fitting", "beside the limit", "at the optimum"]
    show("beside-limit", ["study", "seed", *counts, "above the optimum"], sorted(rows), record=arguments.record)


if __name__ == "__main__":
    main()
