"""What the guard adds to the trials of an ordinary Optuna study, whose objective it dry-runs.

    OMP_NUM_THREADS=1 python benchmarks/guard_overhead.py --trials 50 --seconds 0.5

Each configuration trains twice, without a guard and with it, in turns. "Around the objective" is what a guarded trial takes
before and after the user's own code: the dry run, the verdict, what is written into trial and log, starting and ending the
measurement, learning. It does not depend on how long a trial trains, so its share of ten seconds follows from shorter trials. "At
its steps" is what training takes more: the pace is looked at after each of the first hundred steps, and then ever less often. A
trial is dry-run if its width, depth and batch size are new. All is processor time, because the clock shows what else runs on the
machine: nothing of it happens at the same time, so on an idle machine both are the same.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import psutil
import torch
from _record import parser_of, show
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import perfguard_optuna

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import quickstart

_MIDDLE = {"width": 48, "depth": 3, "batch_size": 128, "kernel": 3, "lr": 1e-3}
_EPOCHS = 10
_TRIAL_S = 10.0


class Training:
    """An ordinary objective: the demo's networks, trained for as long as one wants.

    Args:
        seconds: about how long the configuration in the middle of the search space trains.
    """

    def __init__(self, seconds: float) -> None:
        self.own_s = 0.0
        """Processor time of the latest training."""
        self._num_images = 1280
        self.train(_MIDDLE)
        self.train(_MIDDLE)  # the first starts threads and fills caches
        self._num_images = round(self._num_images * seconds / self.own_s)

    def __call__(self, trial: optuna.Trial) -> float:
        return self.train({
            "width": trial.suggest_categorical("width", [32, 48, 64]),
            "depth": trial.suggest_int("depth", 2, 4),
            "batch_size": trial.suggest_categorical("batch_size", [64, 128, 256]),
            "kernel": 3,
            "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        })  # fmt: skip

    def train(self, params: dict[str, Any]) -> float:
        """Train for some epochs, and return the last loss."""
        start = time.process_time()
        torch.manual_seed(0)
        images, _, labels, _ = quickstart.digits()
        chosen = torch.arange(self._num_images) % len(images)
        model = quickstart.make_model(params)
        optimizer = torch.optim.Adam(model.parameters(), lr=params["lr"])
        loader = DataLoader(TensorDataset(images[chosen], labels[chosen]), params["batch_size"], shuffle=True)
        for _ in range(_EPOCHS):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
        self.own_s = time.process_time() - start
        return loss.item()


def processor_s() -> float:
    """Processor time of this process and of its dry runs, in seconds."""
    return time.process_time() + sum(sum(child.cpu_times()[:4]) for child in psutil.Process().children())


class Pair(NamedTuple):
    """A trial with the guard and without."""

    is_new: bool
    around_s: float
    """What the guarded trial takes outside of the objective."""
    guarded_s: float
    """What the objective takes, guarded: it has what the guard does at each step."""
    plain_s: float


def row(kind: str, pairs: Sequence[Pair]) -> list[str]:
    """A row of the table."""
    around = [pair.around_s for pair in pairs]
    at_steps = [pair.guarded_s - pair.plain_s for pair in pairs]
    quartiles = [f"{1e3 * seconds:.0f} ms" for seconds in statistics.quantiles(at_steps, n=4)]
    times = (f"{seconds * 1e3:.0f} ms" for seconds in (statistics.fmean(around), statistics.median(around), max(around)))
    share = (statistics.fmean(around) + statistics.median(at_steps)) / _TRIAL_S
    return [kind, str(len(pairs)), *times, *quartiles, f"{share:.2%}"]


def main() -> None:
    """Print what the guard takes of a trial, by whether the trial is dry-run."""
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=0.5, help="about how long a trial trains")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    training = Training(arguments.seconds)
    plain, guarded = (optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)) for _ in range(2))
    structures: list[tuple[Any, ...]] = []
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        objective = perfguard_optuna.guarded(training, gpu="cpu", memory_budget="8GiB", time_budget="1h", log=f"{folder}/log.db")
        for _ in range(arguments.trials):
            plain.optimize(training, n_trials=1)
            plain_s, start = training.own_s, processor_s()
            guarded.optimize(objective, n_trials=1)
            around_s = processor_s() - start - training.own_s
            params = guarded.trials[-1].params
            assert params == plain.trials[-1].params
            structures.append((params["width"], params["depth"], params["batch_size"]))
            pairs.append(Pair(structures[-1] not in structures[:-1], around_s, training.own_s, plain_s))
            print(len(pairs), pairs[-1], file=sys.stderr)
        objective.end()
    kinds = {"all": pairs, "new structure": [pair for pair in pairs if pair.is_new]}
    kinds["known structure"] = [pair for pair in pairs if not pair.is_new]
    times = ["around the objective, mean", "median", "most"]
    columns = ["trials", "number", *times, "at its steps, lower quartile", "median", "upper quartile", "of a 10 s trial"]
    show("overhead", columns, [row(*kind) for kind in kinds.items()], record=arguments.record)


if __name__ == "__main__":
    main()
