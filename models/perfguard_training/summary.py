r"""Makes the summary of what GuardNet's weights for GPUs were fitted to; see `perfguard_models.summary`.

python -m perfguard_training.summary TABLE... --cache .perfguard-cache --out models/perfguard_models/weights
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from perfguard.devices import resolve_device
from perfguard.predictor import TARGETS
from perfguard_models._engines import Answer, GpuEngine
from perfguard_models.summary import NAME, Summary
from perfguard_models.sums import SUMS
from perfguard_models.trained import read_trained
from perfguard_models.weight_files import write_pair
from perfguard_training.dataset import Run, dataset_of, graphs_of

STEPS_A_SETTING = 32
_MOST_OPERATORS = 30_000


def summary_of(answers: Iterable[tuple[str, Answer]]) -> Summary:
    """Of answers on the GPUs of these names."""
    found = [(device_id, answer) for device_id, answer in answers if answer.sums is not None]
    return Summary(
        np.array([device_id for device_id, _ in found], dtype=np.str_),
        np.stack([answer.sums for _, answer in found if answer.sums is not None]),
        {
            target: np.array([answer.log_value[target] if answer.known[target] else np.nan for _, answer in found])
            for target in TARGETS
        },
        {target: np.stack([answer.members[target] for _, answer in found]) for target in TARGETS},
        {target: np.array([answer.prior[target].total for _, answer in found]) for target in TARGETS},
    )


def write_summary(out: Path, summary: Summary, weights: str, command: str) -> str:
    """OUT.safetensors and OUT.json; returns the card's text."""
    device_ids = sorted(set(summary.device_ids.tolist()))
    tensors = {
        "device": torch.tensor([device_ids.index(device_id) for device_id in summary.device_ids], dtype=torch.int64),
        "sums": torch.from_numpy(summary.sums),
    }
    for target in TARGETS:
        tensors[f"{target}.value"] = torch.from_numpy(summary.log_value[target]).float()
        tensors[f"{target}.members"] = torch.from_numpy(summary.members[target]).float()
        tensors[f"{target}.log_sigma"] = torch.from_numpy(summary.log_sigma[target]).float()
    card = {"weights": weights, "device_ids": device_ids, "sums": list(SUMS), "steps": len(summary.sums), "command": command}
    return write_pair(out, tensors, card)


def drawn(runs: Iterable[Run], *, seed: int = 0) -> set[int]:
    """Indices of at most STEPS_A_SETTING runs of each setting; whole steps alone."""
    by_setting: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        if not run.is_single and run.labels:
            by_setting.setdefault(run.group, []).append(index)
    generator = random.Random(seed)
    return {
        index
        for _, indices in sorted(by_setting.items())
        for index in generator.sample(indices, min(len(indices), STEPS_A_SETTING))
    }


def main() -> None:
    """Draw, ask the shipped weights, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    arguments = parser.parse_args()
    folder = files("perfguard_models") / "weights"
    trained = read_trained(folder / "guardnet.safetensors", folder / "guardnet.json", "guardnet")
    engine = GpuEngine(trained)
    runs = dataset_of(arguments.tables, ("sums",), cache=arguments.cache, most_operators=_MOST_OPERATORS).runs
    chosen = drawn(runs)
    wanted = {_key_of(runs[index]) for index in chosen}
    answers: dict[tuple[object, ...], tuple[str, Answer]] = {}
    for run, graph in graphs_of(arguments.tables, lambda run: _key_of(run) in wanted, cache=arguments.cache):
        answers[_key_of(run)] = run.gpu, engine.answer(graph, resolve_device(run.gpu))
    command = f"python -m perfguard_training.summary {' '.join(['TABLE'] * len(arguments.tables))} --out DIR"
    print(write_summary(arguments.out / NAME, summary_of(answers.values()), trained.card["sha256"], command), end="")


def _key_of(run: Run) -> tuple[object, ...]:
    """Tells steps apart, whatever was measured of them."""
    return run.table, run.gpu, run.mode, run.variant, run.structure, run.batch_size


if __name__ == "__main__":
    main()
