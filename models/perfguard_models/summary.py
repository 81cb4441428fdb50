r"""A summary of what GuardNet's weights for GPUs were fitted to, so that what is learnt online does not cost what was known.

python -m perfguard_models.summary TABLE... --cache .perfguard-cache --out models/perfguard_models/weights

Some steps of each setting, drawn at random, and what the weights say of them. The residual process and the refinement take them
for runs of which the weights were right: pseudorehearsal (Robins 1995), "learning without forgetting" (Li and Hoiem 2016). No
measurement is in it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from perfguard.devices import resolve_device
from perfguard.exceptions import PredictorError
from perfguard.predictor import TARGETS
from perfguard_models.dataset import Run, dataset_of, graphs_of
from perfguard_models.served import group_of, read_trained
from perfguard_models.sums import SUMS
from perfguard_models.weight_files import check_hash, read_pair, write_pair

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from perfguard_models._engines import Answer

NAME = "guardnet-summary"
STEPS_A_SETTING = 32
_MOST_OPERATORS = 30_000


class Summary(NamedTuple):
    """N steps on GPUs, and what weights say of them."""

    device_ids: npt.NDArray[np.str_]  # shape: (N,)
    sums: npt.NDArray[np.float32]  # shape: (N, len(SUMS))
    log_value: Mapping[str, npt.NDArray[np.float64]]
    """By target; NaN where they do not know the like. Shapes: (N,)"""
    members: Mapping[str, npt.NDArray[np.float64]]
    """What networks alone and trees alone say. Shapes: (N, 2)"""
    log_sigma: Mapping[str, npt.NDArray[np.float64]]
    """How unsure they are, as the standard deviation of a logarithm. Shapes: (N,)"""

    def of(self, device_id: str, target: str) -> Summary:
        """Of the steps on one GPU whose ``target`` is known."""
        chosen = (self.device_ids == device_id) & np.isfinite(self.log_value[target])
        by_target = (self.log_value, self.members, self.log_sigma)
        chosen_of = ({name: values[chosen] for name, values in of.items()} for of in by_target)
        return Summary(self.device_ids[chosen], self.sums[chosen], *chosen_of)


NOTHING = Summary(
    np.zeros(0, dtype=np.str_),
    np.zeros((0, len(SUMS)), dtype=np.float32),
    {target: np.zeros(0) for target in TARGETS},
    {target: np.zeros((0, 2)) for target in TARGETS},
    {target: np.zeros(0) for target in TARGETS},
)


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


def read_summary(tensors: Traversable, card: Traversable, weights: str) -> Summary:
    """What :func:`main` wrote; nothing if it was made for other weights than those of this hash.

    Raises:
        PredictorError: if the files are missing or damaged.
    """
    data, document = read_pair(tensors, card, "GuardNet's summary", "make it again")
    check_hash(data, document, NAME)
    try:
        if document["weights"] != weights or document["sums"] != list(SUMS):
            return NOTHING
        found = {name: tensor.numpy() for name, tensor in load_tensors(data).items()}
        return Summary(
            np.array(document["device_ids"])[found["device"]],
            found["sums"],
            {target: found[f"{target}.value"].astype(np.float64) for target in TARGETS},
            {target: found[f"{target}.members"].astype(np.float64) for target in TARGETS},
            {target: found[f"{target}.log_sigma"].astype(np.float64) for target in TARGETS},
        )
    except (SafetensorError, KeyError, TypeError, ValueError, IndexError) as error:
        raise PredictorError(f"GuardNet's summary cannot be used: {type(error).__name__}: {error}") from error


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
        if run.table != "operator" and run.labels:
            by_setting.setdefault(group_of(run), []).append(index)
    generator = random.Random(seed)
    return {
        index
        for _, indices in sorted(by_setting.items())
        for index in generator.sample(indices, min(len(indices), STEPS_A_SETTING))
    }


def main() -> None:
    """Draw, ask the shipped weights, write."""
    from perfguard_models._engines import GpuEngine

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
    command = f"python -m perfguard_models.summary {' '.join(['TABLE'] * len(arguments.tables))} --out DIR"
    print(write_summary(arguments.out / NAME, summary_of(answers.values()), trained.card["sha256"], command), end="")


def _key_of(run: Run) -> tuple[object, ...]:
    """Tells steps apart, whatever was measured of them."""
    return run.table, run.gpu, run.mode, run.variant, run.structure, run.batch_size


if __name__ == "__main__":
    main()
