"""A guarded run that test_ray_interrupted.py interrupts and resumes: python ray_interrupted.py (start|resume) FOLDER."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from torch import nn

import perfguard_ray
from perfguard import Workload
from perfguard_ray import PerfGuardCallback, PerfGuardVariantGenerator
from tests.doubles import ReplayPredictor

NUM_STEPS = 12
WIDTHS = [8, 4096, 16, 24]
"""The second needs 2.5 MiB, the others a few KiB."""


def build(config: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, config["width"]), inputs=(32, 64), loss=torch.mean, steps=NUM_STEPS)


def train(config: dict[str, Any]) -> None:
    """Trials do not get beyond their sixth step before the file "go" is there, nor is that of width 24 started before."""
    folder = Path(config["folder"])
    with perfguard_ray.measure():
        model = nn.Linear(64, config["width"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(NUM_STEPS):
            model(torch.ones(32, 64)).mean().backward()
            optimizer.step()
            if config["width"] == 8 and step < 6:  # the trial of width 16 has no report yet when it is interrupted
                tune.report({"loss": 1.0})
            if step == 6:
                (folder / f"half-{config['width']}").touch()
                while not (folder / "go").exists():
                    time.sleep(0.05)
        tune.report({"loss": 1 / config["width"]})


def main(what: str, folder: Path) -> None:
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    if what == "start":
        log = str(folder / "log.db")
        search = PerfGuardVariantGenerator(
            gpu="cpu", build=build, predictor=ReplayPredictor(), log=log, memory_budget="1MiB", refine=False
        )
        tuner = tune.Tuner(
            train,
            param_space={"width": tune.grid_search(WIDTHS), "folder": str(folder)},
            tune_config=tune.TuneConfig(search_alg=search, metric="loss", mode="min", reuse_actors=True),
            run_config=tune.RunConfig(
                storage_path=str(folder), name="run", verbose=1, callbacks=[PerfGuardCallback(search)], log_to_file=False
            ),
        )
    else:
        tuner = tune.Tuner.restore(str(folder / "run"), trainable=train)
    results: Any = tuner.fit()
    for result in map(results.__getitem__, range(len(results))):
        print("result", result.config["width"], result.metrics.get("perfguard/num_steps"), result.metrics.get("trial_id"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
