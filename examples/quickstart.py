"""A real study on this machine's CPU: a convolutional network on scikit-learn's digits, guarded by PerfGuard.

    python examples/quickstart.py                  # guarded
    python examples/quickstart.py --no-guard       # the same study without PerfGuard, for comparison

Of the search space about a third breaks the memory or the time budget. PerfGuard prunes those trials before they start, measures
the others, and gets better from them.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfguard import Measurement, Run, TensorSpec, Workload, resolve_device
from perfguard.quantities import format_bytes, format_seconds, parse_bytes
from perfguard.report import write_report
from perfguard_optuna import PerfGuardPruner, TrialPrinter, create_study, summarize
from perfguard_optuna.visualization.matplotlib import plot_budget, plot_savings

MEMORY_BUDGET = "128MiB"
MIDDLE = {"batch_size": 256, "width": 40, "depth": 4, "kernel": 3, "optimizer": "adam", "lr": 1e-3}
"""A configuration in the middle of the search space. The time budget is MOST_TIMES its time on this machine."""
MOST_TIMES = 3.5
EPOCHS = 3
SIZE = 12
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
}


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training and validation images (n, 1, SIZE, SIZE), and their labels (n,)."""
    images, labels = load_digits(return_X_y=True)
    images_t, images_v, labels_t, labels_v = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return enlarged(images_t), enlarged(images_v), torch.tensor(labels_t), torch.tensor(labels_v)


def enlarged(images: Any) -> torch.Tensor:
    """8 × 8 images with values from 0 to 16, as (n, 1, SIZE, SIZE) with values from 0 to 1."""
    small = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return nn.functional.interpolate(small, size=(SIZE, SIZE), mode="bilinear")


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


def make_optimizer(params: Mapping[str, Any]) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer, still without parameters."""
    return functools.partial(OPTIMIZERS[params["optimizer"]], lr=params["lr"])


def build(params: Mapping[str, Any]) -> Workload:
    """What a trial with ``params`` would run: all that PerfGuard needs to know."""
    batch_size = params["batch_size"]
    return Workload(
        make_model(params),
        inputs=(batch_size, 1, SIZE, SIZE),
        targets=TensorSpec((batch_size,), "int64"),
        loss=nn.functional.cross_entropy,
        optimizer=make_optimizer(params),
        steps=EPOCHS * (1437 // batch_size),
    )


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """The search space."""
    return {
        "batch_size": trial.suggest_int("batch_size", 64, 1024, log=True),
        "width": trial.suggest_int("width", 16, 96, log=True),
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
    optimizer = make_optimizer(params)(model.parameters())
    for _ in range(EPOCHS):
        order = torch.randperm(len(images))
        for batch in order.split(params["batch_size"]):
            if len(batch) < params["batch_size"]:
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        predictions = torch.cat([model(part) for part in images_v.split(64)]).argmax(1)
    return float((predictions == labels_v).float().mean())


def time_budget_s() -> float:
    """The time budget of a trial, in seconds: about a third of the search space takes longer, on a machine of any speed."""
    ends: list[float] = []
    train(MIDDLE)  # the first steps start threads and fill caches
    handle = register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    train(MIDDLE)
    handle.remove()
    steps_s = [end - start for start, end in pairwise(ends)]
    return MOST_TIMES * (build(MIDDLE).steps or 0) * statistics.median(steps_s)


def objective(trial: optuna.Trial) -> float:
    """An ordinary Optuna objective: nothing in it knows of PerfGuard."""
    return train(suggest(trial))


def run_guarded(arguments: argparse.Namespace, console: Console) -> None:
    """The study with PerfGuard: three more lines than without."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.log or arguments.out / f"log-{datetime.datetime.now():%Y%m%d-%H%M%S}.db"
    study = create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=arguments.seed))
    budget_s = arguments.time_budget or time_budget_s()
    pruner = PerfGuardPruner(gpu="cpu", build=build, memory_budget=MEMORY_BUDGET, time_budget=budget_s, log=str(log))
    console.print(f"budgets of a trial: {MEMORY_BUDGET} and {format_seconds(budget_s)}")
    with progress_bar(console, arguments.trials) as advance:
        study.optimize(objective, n_trials=arguments.trials, callbacks=[TrialPrinter(console), advance], pruner=pruner)
    console.print(summarize(study).table())
    pictures = draw(study, arguments.out)
    console.print(f"best accuracy {study.best_value:.4f} with {study.best_params}")
    report = arguments.out / "report.html"
    write_report(study, report)
    console.print(f"predicted against measured, and what was saved: {pictures}")
    console.print(f"verdicts and measurements: {log}")
    console.print(f"the report, for a browser: {report}")
    console.print(f"the same study without PerfGuard: python examples/quickstart.py --no-guard --time-budget {budget_s:.3g}")


def draw(study: optuna.Study, folder: Path) -> str:
    """Two pictures of the study in ``folder``; returns their paths, as text."""
    predictions = Figure(figsize=(12, 5.4), layout="constrained")
    left, right = predictions.subplots(1, 2)
    plot_budget(study, quantity="memory", ax=left)
    plot_budget(study, quantity="time", ax=right)
    savings = Figure(figsize=(9, 5), layout="constrained")
    plot_savings(study, ax=savings.subplots())
    paths = folder / "quickstart.png", folder / "savings.png"
    for figure, path in zip((predictions, savings), paths, strict=True):
        figure.savefig(path, dpi=110)
    return ", ".join(map(str, paths))


def run_unguarded(arguments: argparse.Namespace, console: Console) -> None:
    """The same study without PerfGuard; what it costs is measured, nothing is prevented."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=arguments.seed))
    device = resolve_device("cpu")
    limits = parse_bytes(MEMORY_BUDGET), arguments.time_budget or time_budget_s()
    broken: list[Measurement] = []
    spent_s = 0.0

    def measured_objective(trial: optuna.Trial) -> float:
        nonlocal spent_s
        with Run(device) as run:
            value = objective(trial)
        measurement = run.measurement
        assert measurement is not None
        assert measurement.peak_memory_bytes is not None
        spent_s += measurement.total_time_s
        over = measurement.peak_memory_bytes > limits[0] or measurement.total_time_s > limits[1]
        if over:
            broken.append(measurement)
        console.print(
            f"trial {trial.number:3d}  unguarded  memory {format_bytes(measurement.peak_memory_bytes):>8s}  "
            f"time {format_seconds(measurement.total_time_s):>7s}  value {value:.4g}{'  over budget' if over else ''}",
            highlight=False,
        )
        return value

    with progress_bar(console, arguments.trials) as advance:
        study.optimize(measured_objective, n_trials=arguments.trials, callbacks=[advance])
    wasted_s = sum(measurement.total_time_s for measurement in broken)
    console.print(
        f"{arguments.trials} trials, {len(broken)} over budget; {format_seconds(spent_s)} in all, of which "
        f"{format_seconds(wasted_s)} in trials over budget; best accuracy {study.best_value:.4f}"
    )


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[optuna.Study, optuna.trial.FrozenTrial], None]]:
    """A bar below the lines; yields the study callback that advances it."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("trials", total=total)
        yield lambda _study, _trial: progress.advance(task)


def main() -> None:
    """Run the study, print a line a trial and a summary, save the picture."""
    parser = argparse.ArgumentParser(description="A guarded study on scikit-learn's digits.")
    parser.add_argument("--no-guard", action="store_true", help="run the same study without PerfGuard")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-budget", type=float, metavar="SECONDS", help="of a trial; default: by the speed of this machine")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture and the log")
    parser.add_argument("--log", default=None, help="measurement log to use and extend; default: a new one in the folder")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    digits()
    console = Console()
    start = time.perf_counter()
    (run_unguarded if arguments.no_guard else run_guarded)(arguments, console)
    console.print(f"{format_seconds(time.perf_counter() - start)} from start to end")


if __name__ == "__main__":
    main()
