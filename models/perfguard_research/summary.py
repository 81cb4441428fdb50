r"""Makes the summary of what GuardNet's weights were fitted to; see `perfguard_models.summary`.

python -m perfguard_research.summary TABLE... --cache .perfguard-cache --out models/perfguard_models/weights
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from perfguard_models.features.step import STEP_FEATURES
from perfguard_models.memory_forest import MemoryForest
from perfguard_models.raw_prediction import PRIOR, RawPrediction, Weights
from perfguard_models.summary import NAME, Summary
from perfguard_models.trained import read_trained
from perfguard_models.two_clocks import TwoClocks
from perfguard_models.weight_files import write_pair
from perfguard_research.dataset import Run, dataset_of, graphs_of

STEPS_A_SETTING = 32
_MOST_OPERATORS = 30_000


def summary_of(raws: Iterable[tuple[str, RawPrediction]]) -> Summary:
    """The summary of raw predictions on the GPUs of these names."""
    found = [(device_id, raw, raw.step_features) for device_id, raw in raws]
    known = np.concatenate([raw.known["memory"] for _, raw, _ in found])
    columns = (
        np.array([device_id for device_id, _, features in found for _ in features], dtype=np.str_),
        np.concatenate([features for _, _, features in found]),
        np.concatenate([raw.log_value["memory"] for _, raw, _ in found]),
        np.concatenate([PRIOR.total * raw.prior_scale["memory"] for _, raw, _ in found]),
    )
    return Summary(*(column[known] for column in columns))


def write_summary(out: Path, summary: Summary, weights: str, command: str) -> str:
    """OUT.safetensors and OUT.json; returns the card's text."""
    device_ids = sorted(set(summary.device_ids.tolist()))
    tensors = {
        "device": torch.tensor([device_ids.index(device_id) for device_id in summary.device_ids], dtype=torch.int64),
        "sums": torch.from_numpy(summary.sums),
        "value": torch.from_numpy(summary.log_value).float(),
        "log_sigma": torch.from_numpy(summary.log_sigma).float(),
    }
    card = {
        "weights": weights,
        "device_ids": device_ids,
        "sums": list(STEP_FEATURES),
        "steps": len(summary.sums),
        "command": command,
    }
    return write_pair(out, tensors, card)


def drawn(runs: Iterable[Run], *, seed: int = 0) -> set[int]:
    """Indices of at most STEPS_A_SETTING runs of each setting; whole steps alone."""
    by_setting: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        if not run.is_single and "memory" in run.labels:
            by_setting.setdefault(run.group, []).append(index)
    generator = random.Random(seed)
    return {
        index
        for _, indices in sorted(by_setting.items())
        for index in generator.sample(indices, min(len(indices), STEPS_A_SETTING))
    }


def main() -> None:
    """Draw steps, predict them with the shipped weights, and write the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    arguments = parser.parse_args()
    folder = files("perfguard_models") / "weights"
    names = MemoryForest.name, TwoClocks.name
    memory, time = (read_trained(folder / f"{name}.safetensors", folder / f"{name}.json", name) for name in names)
    weights = Weights(memory, time)
    runs = dataset_of(arguments.tables, ("sums",), cache=arguments.cache, most_operators=_MOST_OPERATORS).runs
    chosen = drawn(runs)
    wanted = {_key_of(runs[index]) for index in chosen}
    raws: dict[tuple[object, ...], tuple[str, RawPrediction]] = {}
    for run, device, graph in graphs_of(arguments.tables, lambda run: _key_of(run) in wanted, cache=arguments.cache):
        raws[_key_of(run)] = run.gpu, weights.predict(graph, device)
    command = f"python -m perfguard_research.summary {' '.join(['TABLE'] * len(arguments.tables))} --out DIR"
    print(write_summary(arguments.out / NAME, summary_of(raws.values()), memory.card["sha256"], command), end="")


def _key_of(run: Run) -> tuple[object, ...]:
    """Identifies steps, whatever was measured of them."""
    return run.table, run.gpu, run.mode, run.variant, run.structure, run.batch_size


if __name__ == "__main__":
    main()
