"""PerfGuard at work, in a minute: a study that it guards on this machine's CPU, then the same study without it.

    python examples/quickstart.py

Both train convolutional networks on scikit-learn's digits, for the same time. About a third of the search space breaks the
memory or the time budget. PerfGuard prunes those trials before they start, measures the others, and gets better from them.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard import Run, resolve_device
from perfguard.quantities import Quantity, format_bytes, format_quantity, format_seconds, parse_bytes
from perfguard.report import write_report
from perfguard_optuna import (
    PerfGuardPruner,
    TrialRecord,
    create_study,
    plot_budget,
    plot_savings,
    record_of,
    records_of,
    summarize,
)

MEMORY_BUDGET = "64MiB"
MIDDLE = {"batch_size": 128, "width": 36, "depth": 4, "kernel": 3, "optimizer": "adam", "lr": 1e-3}
"""A configuration in the middle of the search space. The time budget is MOST_TIMES its time on this machine."""
MOST_TIMES = 2
EPOCHS = 4
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
}


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training and validation images (n, 1, 8, 8) with values from 0 to 1, and their labels (n,)."""
    images, labels = load_digits(return_X_y=True)
    images_t, images_v, labels_t, labels_v = (
        torch.tensor(part) for part in train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    )
    return images_t.float().reshape(-1, 1, 8, 8) / 16, images_v.float().reshape(-1, 1, 8, 8) / 16, labels_t, labels_v


def make_model(params: Mapping[str, Any]) -> nn.Module:
    """A plain convolutional network."""
    layers: list[nn.Module] = []
    channels = 1
    for _ in range(params["depth"]):
        layers += [
            nn.Conv2d(channels, params["width"], params["kernel"], padding=params["kernel"] // 2),
            nn.BatchNorm2d(params["width"]),
            nn.ReLU(),
        ]
        channels = params["width"]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10))


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """The search space."""
    return {
        "batch_size": trial.suggest_int("batch_size", 32, 512, log=True),
        "width": trial.suggest_int("width", 16, 80, log=True),
        "depth": trial.suggest_int("depth", 2, 6),
        "kernel": trial.suggest_categorical("kernel", [3, 5]),
        "optimizer": trial.suggest_categorical("optimizer", list(OPTIMIZERS)),
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
    }


def train(params: Mapping[str, Any]) -> float:
    """Train for a few epochs and return the validation accuracy."""
    images, images_v, labels, labels_v = digits()
    torch.manual_seed(0)
    model = make_model(params)
    optimizer = OPTIMIZERS[params["optimizer"]](model.parameters(), lr=params["lr"])
    loader = DataLoader(TensorDataset(images, labels), batch_size=params["batch_size"], shuffle=True, drop_last=True)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        predictions = torch.cat([model(part) for part in images_v.split(64)]).argmax(1)
    return float((predictions == labels_v).float().mean())


def time_budget_s() -> float:
    """The time budget of a trial, in seconds. It follows the speed of this machine."""
    times_s = []
    for _ in range(6):
        start = time.perf_counter()
        train(MIDDLE)
        times_s.append(time.perf_counter() - start)
    return MOST_TIMES * statistics.median(times_s[1:])  # the first starts threads and fills caches


def objective(trial: optuna.Trial) -> float:
    """An ordinary Optuna objective: nothing in it knows of PerfGuard."""
    return train(suggest(trial))


def measured_in_words(record: TrialRecord, quantity: Quantity) -> str:
    """What the trial cost."""
    value = record.measured.get(quantity)
    return "-" if value is None else format_quantity(quantity, value)


def run_guarded(seed: int, seconds: float, budget_s: float, log: Path, console: Console) -> optuna.Study:
    """The study with PerfGuard."""

    def print_line(_: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        record = record_of(trial)
        cells = f"{measured_in_words(record, 'memory'):>21s}   {measured_in_words(record, 'time'):>18s}   {trial.value or 0:.4g}"
        words = record.reason if record.is_pruned else cells
        console.print(f"{trial.number:5d}  {record.in_words:9s} {words}{'  over' if record.violates else ''}", highlight=False)

    study = create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    pruner = PerfGuardPruner(gpu="cpu", memory_budget=MEMORY_BUDGET, time_budget=budget_s, log=str(log))
    study.optimize(objective, timeout=seconds, callbacks=[print_line], pruner=pruner)
    return study


def run_unguarded(seed: int, seconds: float, budget_s: float, console: Console) -> optuna.Study:
    """The same study without PerfGuard. Its trials are measured, and nothing is prevented."""
    device = resolve_device("cpu")

    def measured_objective(trial: optuna.Trial) -> float:
        with Run(device) as run:
            value = objective(trial)
        assert run.measurement is not None
        assert run.measurement.peak_memory_bytes is not None
        memory_bytes, time_s = run.measurement.peak_memory_bytes, run.measurement.total_time_s
        over = memory_bytes > parse_bytes(MEMORY_BUDGET) or time_s > budget_s
        trial.set_user_attr("time_s", time_s)
        trial.set_user_attr("over", over)
        cells = f"{format_bytes(memory_bytes):>21s}   {format_seconds(time_s):>18s}"
        console.print(f"{trial.number:5d}  unguarded {cells}   {value:.4g}{'  over' if over else ''}", highlight=False)
        return value

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(measured_objective, timeout=seconds)
    return study


@dataclass(frozen=True)
class Outcome:
    """What a study came to."""

    times_s: list[float]
    """Of the trials that ran."""
    wasted_s: list[float]
    """Of those that broke a budget."""
    num_pruned: int
    best: float

    @classmethod
    def of_guarded(cls, study: optuna.Study) -> Outcome:
        """From what PerfGuard wrote into the trials."""
        records = records_of(study)
        ran = [record for record in records if "time" in record.measured]
        wasted_s = [record.measured["time"] for record in ran if record.violates]
        num_pruned = sum(record.is_pruned for record in records)
        return cls([record.measured["time"] for record in ran], wasted_s, num_pruned, best_of(study))

    @classmethod
    def of_unguarded(cls, study: optuna.Study) -> Outcome:
        """From what ``measured_objective`` wrote into them."""
        ran = [trial.user_attrs for trial in study.trials]
        return cls([of["time_s"] for of in ran], [of["time_s"] for of in ran if of["over"]], 0, best_of(study))

    def cells(self) -> list[str]:
        """A column of the table."""
        spent_s, wasted_s = sum(self.times_s), sum(self.wasted_s)
        wasted = f"{format_seconds(wasted_s)}, {wasted_s / spent_s:.0%}" if wasted_s else "none"
        counts = len(self.times_s), len(self.wasted_s), self.num_pruned
        return [*map(str, counts), format_seconds(spent_s), wasted, f"{self.best:.3f}"]


def best_of(study: optuna.Study) -> float:
    """The best accuracy; NaN where no trial has completed."""
    return max((trial.value for trial in study.trials if trial.value is not None), default=math.nan)


def comparison(guarded: optuna.Study, unguarded: optuna.Study) -> Table:
    """Both studies side by side."""
    rows = ("trials that ran", "over the memory or time budget", "pruned before launch", "time of the trials",
            "wasted in trials over a budget", "best accuracy")  # fmt: skip
    table = Table("", "with PerfGuard", "without", title="The same search for the same time")
    for row in zip(rows, Outcome.of_guarded(guarded).cells(), Outcome.of_unguarded(unguarded).cells(), strict=True):
        table.add_row(*row)
    return table


def draw(study: optuna.Study, folder: Path) -> str:
    """Three pictures of the study in ``folder``, as pages for a browser; returns their paths, as text."""
    figures = {
        "memory.html": plot_budget(study),
        "time.html": plot_budget(study, quantity="time"),
        "savings.html": plot_savings(study),
    }
    for name, figure in figures.items():
        figure.write_html(folder / name, include_plotlyjs="directory")  # one plotly.min.js beside them
    return ", ".join(str(folder / name) for name in figures)


def main() -> None:
    """Run both studies, print a line a trial and a table, save the pictures and the report."""
    parser = argparse.ArgumentParser(description="A study on scikit-learn's digits, with PerfGuard and without.")
    parser.add_argument("--seconds", type=float, default=24, help="time of each of the two studies")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures, the report and the log")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)  # networks so small gain little from more, which disturb each other on a busy machine
    console = Console()
    start = time.perf_counter()
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.out / f"log-{datetime.datetime.now():%Y%m%d-%H%M%S}.db"
    budget_s = time_budget_s()
    console.print(f"budgets of a trial: {MEMORY_BUDGET}, and {format_seconds(budget_s)} on this machine")
    console.rule("with PerfGuard")
    guarded = run_guarded(arguments.seed, arguments.seconds, budget_s, log, console)
    console.rule("without")
    unguarded = run_unguarded(arguments.seed, arguments.seconds, budget_s, console)
    report = arguments.out / "report.html"
    write_report(guarded, report)
    pictures = draw(guarded, arguments.out)
    console.print(comparison(guarded, unguarded))
    console.print(summarize(guarded).table())
    for what, where in {
        "best parameters": guarded.best_params if math.isfinite(best_of(guarded)) else "no trial has completed",
        "predicted against measured, and what was saved": pictures,
        "verdicts and measurements": log,
        "the report, for a browser": report,
    }.items():
        console.print(f"{what}: {where}", soft_wrap=True)
    console.print(f"{format_seconds(time.perf_counter() - start)} from start to end")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
