"""The real thing, end to end: a search with and without the guard, in which a third of the space does not fit.

    python benchmarks/gpu_study.py [--task images,text] [--trials 40] [--whole-card]
    python benchmarks/gpu_study.py --gpu cpu --trials 6           # the same code on the processor, with a small limit

Two tasks on made-up data: a convolutional network on CIFAR-sized images, and a small transformer on sequences. The limit is
where a third of 60 random configurations does not fit, by our own trace; the process really is limited to it (a fraction of the
card for PyTorch's allocator; RLIMIT_DATA on the processor), so a trial over it fails for real. ``--whole-card`` takes what the
card has and stretches the space until a third does not fit that. Without the guard crashes are caught and told to the sampler as
failed trials, as most people do.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from perfguard import TensorSpec, Workload, trace
from perfguard.devices import Device
from perfguard.exceptions import PerfGuardError
from perfguard.measure import status_of
from perfguard.quantities import format_bytes
from perfguard_optuna import PerfGuardPruner, create_study, summarize
from perfguard_research.collect.loop import collecting_device
from perfguard_research.collect.run import limit_memory

_FITTING = 2 / 3
_SAMPLED = 60
_STEPS = {"cuda": 20, "cpu": 3}
_CLASSES = 10
_SEQUENCE = 128
_VOCABULARY = 512
_CPU_STRETCH = 1 / 8


class Task(NamedTuple):
    """A search space, and what a point of it trains."""

    suggest: Callable[[Any, float], dict[str, Any]]
    """(trial, stretch) → parameters; ``stretch`` multiplies the largest batch; below 1 networks are small too."""
    make_model: Callable[[Mapping[str, Any]], nn.Module]
    batch: Callable[[int, torch.device], tuple[torch.Tensor, torch.Tensor]]
    inputs: Callable[[int], Any]


class Outcome(NamedTuple):
    """One study."""

    task: str
    guard: str
    proposed: int
    launched: int
    crashed: int
    seconds: float
    wasted_s: float
    """In trials that crashed."""
    best: float
    first_error: float | None
    last_error: float | None


def suggest_images(trial: Any, stretch: float) -> dict[str, Any]:
    """Width, depth and batch of a convolutional network."""
    return {
        "batch_size": trial.suggest_int("batch_size", 32, int(2048 * stretch), log=True),
        "width": trial.suggest_int("width", 16, 256 if stretch >= 1 else 32, log=True),
        "depth": trial.suggest_int("depth", 2, 12 if stretch >= 1 else 4),
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
    }


def make_cnn(params: Mapping[str, Any]) -> nn.Module:
    """Convolutions with batch norm at full size, then an average."""
    width = params["width"]
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(params["depth"]):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, _CLASSES))


def _patterns(device: torch.device) -> torch.Tensor:
    return torch.randn(_CLASSES, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)


def image_batch(batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A pattern for each class, under noise twice as strong."""
    labels = torch.randint(_CLASSES, (batch_size,), device=device)
    return _patterns(device)[labels] + 2 * torch.randn(batch_size, 3, 32, 32, device=device), labels


def suggest_text(trial: Any, stretch: float) -> dict[str, Any]:
    """Width, depth and batch of a transformer."""
    return {
        "batch_size": trial.suggest_int("batch_size", 8, int(512 * stretch), log=True),
        "heads": trial.suggest_int("heads", 1, 12 if stretch >= 1 else 2),
        "depth": trial.suggest_int("depth", 1, 8 if stretch >= 1 else 2),
        "lr": trial.suggest_float("lr", 1e-5, 1e-2, log=True),
    }


class Classifier(nn.Module):
    """A transformer encoder whose mean is classified."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.embedding(tokens)).mean(1))
        return out


def make_transformer(params: Mapping[str, Any]) -> nn.Module:
    """With heads of 64."""
    return Classifier(64 * params["heads"], params["heads"], params["depth"])


def text_batch(batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The class is a token that occurs a little more often than others."""
    labels = torch.randint(_CLASSES, (batch_size,), device=device)
    tokens = torch.randint(_VOCABULARY, (batch_size, _SEQUENCE), device=device)
    marked = torch.rand(batch_size, _SEQUENCE, device=device) < 0.05
    return torch.where(marked, labels[:, None], tokens), labels


TASKS = {
    "images": Task(suggest_images, make_cnn, image_batch, lambda batch_size: (batch_size, 3, 32, 32)),
    "text": Task(suggest_text, make_transformer, text_batch, lambda batch_size: TensorSpec((batch_size, _SEQUENCE), "int64")),
}


def build(params: Mapping[str, Any], *, task: str, steps: int) -> Workload:
    """What a trial would run."""
    batch_size = params["batch_size"]
    return Workload(
        TASKS[task].make_model(params),
        inputs=TASKS[task].inputs(batch_size),
        targets=TensorSpec((batch_size,), "int64"),
        loss=F.cross_entropy,
        optimizer=functools.partial(torch.optim.AdamW, lr=params["lr"]),
        steps=steps,
    )


def train(params: Mapping[str, Any], *, task: str, steps: int, device: torch.device) -> float:
    """Train for ``steps`` and return the accuracy on fresh data."""
    torch.manual_seed(0)
    model = TASKS[task].make_model(params).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=params["lr"])
    for _ in range(steps):
        inputs, labels = TASKS[task].batch(params["batch_size"], device)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        inputs, labels = TASKS[task].batch(params["batch_size"], device)
        return float((model(inputs).argmax(1) == labels).float().mean())


@contextlib.contextmanager
def limited(device: Device, limit: int) -> Iterator[None]:
    """Inside, this process gets no more. On a processor only inside, because the guard lives of the same memory."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit_memory(device, limit)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def limit_for(task: str, device: Device, *, stretch: float, steps: int) -> int:
    """Bytes in which two thirds of random configurations fit, by our trace and the catalog's context."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    peaks = []
    for _ in range(_SAMPLED):
        params = TASKS[task].suggest(study.ask(), stretch)
        with torch.device("meta"):
            workload = build(params, task=task, steps=steps)
        peaks.append(trace(workload, target=device).peak_live_bytes + device.context_bytes)
    return int(statistics.quantiles(peaks, n=60)[int(60 * _FITTING) - 1])


def stretch_for(task: str, device: Device, capacity: int, steps: int) -> float:
    """How much larger batches must become for a third not to fit ``capacity``."""
    stretch = 1.0
    while limit_for(task, device, stretch=stretch, steps=steps) < capacity and stretch < 2**10:
        stretch *= 1.25
    return stretch


def run_study(task: str, device: Device, limit: int, stretch: float, trials: int, *, guarded: bool) -> Outcome:
    """One study with Optuna, in this process."""
    steps = _STEPS[device.kind]
    wasted: list[float] = []

    def objective(trial: optuna.Trial) -> float:
        params = TASKS[task].suggest(trial, stretch)
        gc.collect()
        if device.kind != "cpu":
            torch.cuda.empty_cache()
        start = time.perf_counter()
        try:
            with limited(device, limit):
                return train(params, task=task, steps=steps, device=torch.device(device.kind))
        except RuntimeError as error:
            if status_of(error) == "oom":
                wasted.append(time.perf_counter() - start)
            raise

    sampler = optuna.samplers.TPESampler(seed=0)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if guarded:
            study = create_study(direction="maximize", sampler=sampler)
            pruner = PerfGuardPruner(gpu=device, memory_budget=limit, log=f"{folder}/log.db")
            study.optimize(objective, n_trials=trials, pruner=pruner, count="proposed", catch=(RuntimeError,))
            summary = summarize(study)
            launched, known = summary.num_launched, summary.time_errors
            errors: tuple[float | None, float | None] = (None, None) if known is None else (known.first, known.last)
            trials_of = study.trials
        else:
            bare = optuna.create_study(direction="maximize", sampler=sampler)
            bare.optimize(objective, n_trials=trials, catch=(RuntimeError,))
            launched, errors, trials_of = trials, (None, None), bare.trials
    seconds = time.perf_counter() - start
    best = max((trial.value for trial in trials_of if trial.value is not None), default=float("nan"))
    return Outcome(task, "with" if guarded else "without", trials, launched, len(wasted), seconds, sum(wasted), best, *errors)


def as_table(outcomes: list[Outcome], title: str) -> Table:
    """One line a study."""
    table = Table(title=title)
    columns = "task", "guard", "proposed", "launched", "crashed", "seconds", "wasted s", "best", "error first 5", "last 10"
    for heading in columns:
        table.add_column(heading, justify="left" if heading in ("task", "guard") else "right")
    for o in outcomes:
        errors = ("-" if error is None else f"{error:.1%}" for error in (o.first_error, o.last_error))
        counts = map(str, (o.proposed, o.launched, o.crashed))
        table.add_row(o.task, o.guard, *counts, f"{o.seconds:.0f}", f"{o.wasted_s:.1f}", f"{o.best:.3f}", *errors)
    return table


def main() -> int:
    """Run the studies and print the table; 2 where there is nothing to run on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="auto", help='"auto" or "cpu"')
    parser.add_argument("--task", default="images,text")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--whole-card", action="store_true", help="no limit but the card's own; larger batches instead")
    parser.add_argument("--out", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a crash is not worth a page each
    console = Console(width=None if sys.stdout.isatty() else 130, record=True)
    try:
        device = collecting_device(arguments.gpu)
    except PerfGuardError as error:
        print(error, file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    for task in arguments.task.split(","):
        steps = _STEPS[device.kind]
        stretch = 1.0 if device.kind != "cpu" else _CPU_STRETCH
        if arguments.whole_card and device.kind != "cpu":
            limit = device.memory_bytes
            stretch = stretch_for(task, device, limit, steps)
        else:
            limit = limit_for(task, device, stretch=stretch, steps=steps)
        console.print(f"{task}: {format_bytes(limit)}, largest batch x {stretch:.2f}", highlight=False)
        for guarded in (False, True):
            outcomes.append(run_study(task, device, limit, stretch, arguments.trials, guarded=guarded))
            console.print(f"  {outcomes[-1]}", highlight=False)
            if arguments.out is not None:  # a lease may end before the last study does
                arguments.out.write_text(console.export_text(clear=False), encoding="utf-8")
    console.print(
        as_table(outcomes, f"{datetime.date.today()}, {device.name}, torch {torch.__version__}, {arguments.trials} trials")
    )
    if arguments.out is not None:
        arguments.out.write_text(console.export_text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
