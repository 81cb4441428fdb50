"""What a guard that costs more than it saves gains by fewer dry runs: a TPE search of tiny trials, with them and without.

    OMP_NUM_THREADS=1 python benchmarks/alike.py --trials 60

Each trial trains one of the demo's networks for about a second, and no budget binds. So the guard saves nothing, and makes no dry
run of a trial alike from its eighth trial on (perfguard/capture/alike.py). Both searches have the same seed and the same losses,
so they propose the same. The clock shows what else runs on the machine, so compare the rows of one run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import optuna
import torch
from _record import parser_of, show
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import perfguard_optuna
from perfguard.guard import Guard
from perfguard.verdict import ALIKE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import quickstart


class Thorough(Guard):
    """A guard that makes a dry run of each trial, whatever it costs."""

    def stand_ins(self, study: str) -> None:
        return None


def objective(trial: optuna.Trial) -> float:
    """Train a network of the demo for two epochs."""
    params: dict[str, Any] = {
        "width": trial.suggest_int("width", 16, 64, log=True),
        "depth": trial.suggest_int("depth", 2, 4),
        "batch_size": trial.suggest_int("batch_size", 32, 256, log=True),
        "kernel": 3,
        "lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True),
    }
    torch.manual_seed(0)
    images, _, labels, _ = quickstart.digits()
    model = quickstart.make_model(params)
    optimizer = torch.optim.Adam(model.parameters(), lr=params["lr"])
    for _ in range(2):
        for inputs, targets in DataLoader(TensorDataset(images[:640], labels[:640]), params["batch_size"]):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
    return loss.item()


def row(name: str, guard: type[Guard], num_trials: int) -> list[str]:
    """Run one search, and return its row of the table."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    guarded = perfguard_optuna.guarded(objective, gpu="cpu", memory_budget="8GiB", log=False)
    guarded.guard.guard.__class__ = guard
    study.optimize(guarded, n_trials=num_trials)
    guarded.end()
    summary = perfguard_optuna.summarize(study)
    assert summary.cost is not None
    assert summary.launched_s is not None
    alike = summary.sources.get(ALIKE, 0)
    seconds = (f"{value:.1f} s" for value in (summary.launched_s, summary.cost.guard_s))
    return [name, str(num_trials), str(alike), *seconds, f"{summary.cost.share:.0%}", str(summary.memory_errors)]


def main() -> None:
    """Print a row for each of both guards."""
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=60)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    columns = ["guard", "trials", "not dry-run", "time of the trials", "time of the guard", "of the study", "error of memory"]
    kinds = {"dry-runs each trial": Thorough, "dry-runs no trial alike": Guard}
    show("alike", columns, [row(name, guard, arguments.trials) for name, guard in kinds.items()], record=arguments.record)


if __name__ == "__main__":
    main()
