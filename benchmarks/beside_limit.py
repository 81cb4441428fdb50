"""Does a guarded search find more beside a memory limit in the same time? The best trial needs nine tenths of the memory.

    OMP_NUM_THREADS=1 python benchmarks/beside_limit.py

Perceptrons train on this machine's CPU with Optuna's TPE as it is by default: without a guard, guarded by a dry run of the
objective, or by an oracle. The oracle knows what fits, tells the sampler so, and costs nothing. Four things are made up, so that
the truth is known and the time of the studies is that of an idle machine:

- The loss is a formula: it falls with the width, and depth, batch size and learning rate have a best value.
- What fits is decided by a table. The peak memory of every configuration is measured before the studies: the median of five runs
  in random order, since equal runs scatter (`benchmarks/resident_set.py`). The budget is such that the best that fits needs nine
  tenths of it. The next width needs more than all of it.
- A trial that does not fit raises PyTorch's error in its first forward pass. In a dry run nothing is allocated, so nothing fails.
- The clock. A trial takes ten seconds: one of set-up and nine of training, of whose steps three run. One that fails takes half
  of that, a tenth or a fiftieth: this is what a failure costs where it shows late (an evaluation), or at once. The guard is not
  told. A guarded trial takes the guard's processor time besides, and the set-up again for each dry run, also if it is pruned. A
  study ends when its time is over.

"Above the optimum" is the best loss less the loss of the best configuration that fits.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import optuna
import torch
from _record import parser_of, show
from guard_overhead import processor_s
from torch import nn

import perfguard_optuna
from perfguard import Run, resolve_device
from perfguard.capture import DryRuns
from perfguard.quantities import format_bytes

WIDTHS, DEPTHS, BATCHES = range(512, 1537, 128), (1, 2, 3), (32, 64, 128)
BEST = (1024, 2, 64)
"""Width, depth and batch size of the best configuration that fits."""
Config = tuple[int, int, int]
Arm = Literal["no guard", "guarded", "oracle"]
ARMS: tuple[Arm, ...] = ("no guard", "guarded", "oracle")
TRIAL_S, SET_UP_S, STEP_S = 10.0, 1.0, 0.03
MOST_TRIALS = 3000


class Clock:
    """The machine's clock, and what is made up of it. The guard measures trials by it."""

    def __init__(self) -> None:
        self.read = time.perf_counter
        self.made_up_s = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.read() + self.made_up_s


CLOCK = Clock()


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
    failure: float
    """What a failure costs, in trials."""
    own_s: float = 0.0
    """Processor time of the latest trial's own work."""
    arm: Arm = "guarded"

    @property
    def set_up_s(self) -> float:
        """Seconds before the first step, or before the failure."""
        return min(SET_UP_S, self.failure * TRIAL_S)

    def __call__(self, trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", WIDTHS.start, WIDTHS[-1], step=WIDTHS.step)
        config = width, trial.suggest_categorical("depth", DEPTHS), trial.suggest_categorical("batch", BATCHES)
        lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
        if self.arm == "oracle":
            trial.set_constraint("memory", math.log(self.peaks[config] / self.budget))
            if not self.fits(config):
                raise optuna.TrialPruned
        if self.arm != "guarded":  # nobody looks at its steps
            if not self.fits(config):
                raise torch.OutOfMemoryError("out of memory")
            return loss_of(config, lr)
        start = time.process_time()
        try:
            forward, step = steps(config, lr)
            if not self.fits(config) and not forward().is_meta:
                CLOCK.made_up_s += self.failure * TRIAL_S
                raise torch.OutOfMemoryError("out of memory")
            CLOCK.made_up_s += SET_UP_S
            for _ in range(3):
                CLOCK.made_up_s += STEP_S
                step()
            CLOCK.made_up_s += TRIAL_S - SET_UP_S - 3 * STEP_S
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


def measured_peaks(num_readings: int = 5) -> dict[Config, int]:
    """Peak memory of each configuration, in bytes: the median of some runs in random order."""
    work = [config for config in product(WIDTHS, DEPTHS, BATCHES) for _ in range(num_readings)]
    random.Random(0).shuffle(work)
    read: defaultdict[Config, list[int]] = defaultdict(list)
    for config in work:
        read[config].append(measured_peak(config))
    return {config: round(statistics.median(peaks)) for config, peaks in read.items()}


class DryRunCount:
    """Counts the dry runs of this process."""

    def __init__(self) -> None:
        self.number = 0
        run = DryRuns._run

        def counted(*arguments: Any, **options: Any) -> Any:
            self.number += 1
            return run(*arguments, **options)

        DryRuns._run = counted  # type: ignore[method-assign]


class Outcome(NamedTuple):
    """One study."""

    arm: Arm
    failure: float
    seed: int
    above: float
    """The best loss less that of the best configuration that fits."""
    launched: int
    failed: int
    lost: float
    """Share of the study's time that failed trials took."""
    guard: float
    """Share of it that the guard took."""
    pruned: int
    pruned_though_fitting: int


def run_study(objective: Objective, arm: Arm, seed: int, seconds: float) -> Outcome:
    """One study. A guarded one is in a process of its own, whose clock it sets."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    objective.arm = arm
    is_guarded = arm == "guarded"
    if is_guarded:
        time.perf_counter = CLOCK
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    run_s = lost_s = guard_s = 0.0
    dry_runs = DryRunCount()
    with tempfile.TemporaryDirectory() as folder:
        settings: Any = {"memory_budget": objective.budget, "log": f"{folder}/log.db"}
        run: Any = perfguard_optuna.guarded(objective, gpu="cpu", **settings) if is_guarded else objective
        while run_s + lost_s + guard_s < seconds and len(study.trials) < MOST_TRIALS:
            objective.own_s = 0.0
            before = dry_runs.number
            start = processor_s()
            study.optimize(run, n_trials=1, catch=torch.OutOfMemoryError)
            trial = study.trials[-1]
            if trial.value is not None:
                run_s += TRIAL_S
            elif trial.state == optuna.trial.TrialState.FAIL or objective.own_s:
                lost_s += objective.failure * TRIAL_S
            if is_guarded:
                guard_s += (dry_runs.number - before) * objective.set_up_s + processor_s() - start - objective.own_s
        if is_guarded:
            run.end()
    pruned = [trial for trial in study.trials if is_guarded and perfguard_optuna.record_of(trial).is_pruned]
    finished = [trial for trial in study.trials if trial.value is not None]
    total_s = run_s + lost_s + guard_s
    outcome = Outcome(
        arm=arm,
        failure=objective.failure,
        seed=seed,
        above=min((trial.value for trial in finished if trial.value is not None), default=math.inf) - loss_of(BEST),
        launched=len(finished) + round(lost_s / (objective.failure * TRIAL_S)),
        failed=round(lost_s / (objective.failure * TRIAL_S)),
        lost=lost_s / total_s,
        guard=guard_s / total_s,
        pruned=len(pruned),
        pruned_though_fitting=sum(objective.fits(objective.of(trial)) for trial in pruned),
    )
    print(outcome, file=sys.stderr, flush=True)
    return outcome


def row_of(outcomes: list[Outcome], unguarded: list[Outcome]) -> list[str]:
    """The studies of one arm and one cost of a failure, beside those without a guard, as a row of the table."""
    above = [one.above for one in outcomes]
    wins = sum(one.above <= other.above + 1e-9 for one, other in zip(outcomes, unguarded, strict=True))
    num_pruned = sum(one.pruned for one in outcomes)
    wrong = sum(one.pruned_though_fitting for one in outcomes)
    return [
        f"{outcomes[0].failure:g} of a trial",
        outcomes[0].arm,
        f"{statistics.fmean(above):.3f}",
        f"{max(above):.3f}",
        f"{wins} of {len(outcomes)}",
        f"{statistics.fmean(one.launched for one in outcomes):.0f}",
        f"{statistics.fmean(one.failed for one in outcomes):.1f}",
        f"{statistics.fmean(one.lost for one in outcomes):.1%}",
        f"{statistics.fmean(one.guard for one in outcomes):.1%}",
        f"{num_pruned / len(outcomes):.0f}",
        f"{wrong / num_pruned:.0%}" if num_pruned else "-",
    ]


def main() -> None:
    """Measure all configurations, run the studies, and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--failures", type=float, nargs="+", default=[0.5, 0.1, 0.02], help="what a failure costs, in trials")
    parser.add_argument("--seconds", type=float, default=600.0, help="time of each study")
    parser.add_argument("--jobs", type=int, default=1, help="studies at once")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        peaks = pool.submit(measured_peaks).result()
    budget = round(peaks[BEST] / 0.9)
    known = Objective(peaks, budget, failure=0.1)
    best = min(filter(known.fits, peaks), key=loss_of)
    assert best == BEST, best
    share = sum(map(known.fits, peaks)) / len(peaks)
    print(f"budget {format_bytes(budget)}, {share:.0%} of the configurations fit", file=sys.stderr)
    work = list(product(arguments.seeds, arguments.failures))
    with ProcessPoolExecutor(arguments.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        found = [
            pool.submit(run_study, Objective(peaks, budget, failure), "guarded", seed, arguments.seconds)
            for seed, failure in work
        ]
        outcomes = [
            run_study(Objective(peaks, budget, failure), arm, seed, arguments.seconds)
            for seed, failure in work
            for arm in ARMS
            if arm != "guarded"
        ]
        outcomes += [one.result() for one in found]
    rows = []
    for failure in arguments.failures:
        of = {arm: [one for one in outcomes if (one.failure, one.arm) == (failure, arm)] for arm in ARMS}
        rows += [row_of(of[arm], of["no guard"]) for arm in ARMS]
    columns = [
        "a failure costs", "study", "above the optimum, mean", "worst", "no worse than no guard", "launched", "failed",
        "time lost in failures", "time of the guard", "pruned", "of them fitting",
    ]  # fmt: skip
    show("beside-limit", columns, rows, record=arguments.record)


if __name__ == "__main__":
    main()
