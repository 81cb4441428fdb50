"""A guarded Ray Tune run on scikit-learn's digits, on any machine: under two minutes on two cores.

    pip install 'perfguard[ray]'
    python examples/ray_tune.py [--trials 8] [--no-guard]

A quarter of the search space needs more memory than the budget. Three lines are PerfGuard's, and `build`.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "OMP_NUM_THREADS": "1"}

import ray
import torch
from ray import tune
from ray.tune.search import BasicVariantGenerator
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import perfguard_ray
from perfguard import MeasurementStore, TensorSpec, Workload
from perfguard.quantities import format_bytes, parse_bytes
from perfguard_ray import PerfGuardCallback, PerfGuardVariantGenerator

EPOCHS = 3
MEMORY_BUDGET = "160MiB"
SPACE = {
    "batch_size": tune.choice([64, 128, 256, 512]),
    "width": tune.choice([16, 32, 64]),
    "lr": tune.loguniform(1e-3, 1e-1),
}


def make_model(config: Mapping[str, Any]) -> nn.Module:
    """Two convolutions on 16 x 16 images, and a linear layer."""
    width = config["width"]
    return nn.Sequential(
        nn.Upsample(16),
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )


def build(config: Mapping[str, Any]) -> Workload:
    """What a trial with this configuration would run: all that PerfGuard needs to know."""
    batch_size = config["batch_size"]
    return Workload(
        make_model(config),
        inputs=(batch_size, 1, 8, 8),
        targets=TensorSpec((batch_size,), "int64"),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.Adam, lr=config["lr"]),
        steps=EPOCHS * (1797 // batch_size),
    )


def train(config: dict[str, Any]) -> None:
    """An ordinary training function of Ray Tune, but for the line with ``measure``."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    with perfguard_ray.measure():
        torch.manual_seed(0)
        model = make_model(config)
        optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(images)).split(config["batch_size"]):
                if len(batch) == config["batch_size"]:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
                    loss.backward()
                    optimizer.step()
            tune.report({"loss": float(loss.detach())})


def main() -> None:
    """Run the trials; print a line for each one that was proposed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-guard", action="store_true", help="run the same search without PerfGuard")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        plain = BasicVariantGenerator(random_state=arguments.seed)
        log = f"{folder}/log.db"
        search = PerfGuardVariantGenerator(plain, gpu="cpu", build=build, memory_budget=MEMORY_BUDGET, log=log)
        tuner = tune.Tuner(
            train,
            param_space=SPACE,
            tune_config=tune.TuneConfig(
                search_alg=plain if arguments.no_guard else search,
                num_samples=arguments.trials,
                metric="loss",
                mode="min",
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                storage_path=folder, verbose=0, callbacks=[] if arguments.no_guard else [PerfGuardCallback(search)]
            ),
        )
        results = tuner.fit()
        console = Console(width=110)
        if not arguments.no_guard:
            console.print(table_of(MeasurementStore(log)))
        best = results.get_best_result()
    ray.shutdown()
    limit = parse_bytes(MEMORY_BUDGET)
    rows = [results[number].metrics or {} for number in range(len(results))]
    peaks = [row["perfguard/peak_memory_bytes"] for row in rows]
    console.print(
        f"{len(results)} trials ran in {time.perf_counter() - start:.0f} s, {sum(peak > limit for peak in peaks)} of them "
        f"over the budget of {MEMORY_BUDGET}; best loss {(best.metrics or {})['loss']:.4f} with {best.config}",
        highlight=False,
    )


def table_of(log: MeasurementStore) -> Table:
    """What was decided, and what came of it."""
    table = Table()
    for heading in ("verdict", "batch", "width", "predicted memory", "measured", "why"):
        table.add_column(heading)
    for trial in log.records():
        predicted, measured = trial.predicted.get("memory"), trial.measured.get("memory")
        table.add_row(
            trial.in_words,
            str(trial.params["batch_size"]),
            str(trial.params["width"]),
            "-" if predicted is None else format_bytes(predicted.median),
            "-" if measured is None else format_bytes(measured),
            trial.reason if trial.is_pruned else "",
        )
    return table


if __name__ == "__main__":
    main()
