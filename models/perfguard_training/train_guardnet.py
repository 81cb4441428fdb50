r"""Train GuardNet's shipped weights on a corpus of measured runs.

    python -m perfguard_training.train_guardnet corpus_1.jsonl.gz corpus_2.jsonl.gz studies.jsonl.gz \
        --out models/perfguard_models/weights/guardnet_cpu

A quarter of the rows, and all rows of studies, are held out; the network is trained on the rest. How much and how smoothly a new
study differs (the residual process), and the scale of the intervals, are fitted on the studies.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from perfguard.predictor import SIGMA_OF_MAD, Observation
from perfguard_models.features.graph import FEATURE_VERSION, featurize
from perfguard_models.graph_network import GuardNetwork
from perfguard_models.residual import ResidualPrior, condition, under_equal_conditions
from perfguard_models.weight_files import write_pair
from perfguard_training.calibration import quantile_scale
from perfguard_training.cpu_corpus import STUDY, read_corpus

VERSION = 1
_NETWORK: dict[str, Any] = {"hidden": 48, "layers": 2, "width": 12, "dropout": 0.15}
_HELD_OUT = 0.25
_EPOCHS = 60
_BATCH_SIZE = 32
_LEARNING_RATE = 3e-3
_WEIGHT_DECAY = 3e-2
_HUBER = 0.15
_PRIOR_STEPS = 150
_NEW_MACHINE = {"memory": 0.05, "time": 0.2}
"""Least standard deviation of a constant factor: a corpus from one machine cannot show how machines differ."""
_FEW_RUNS = 20


class Row(NamedTuple):
    """One measured run, ready for the network."""

    family: str
    data: Data


class Residuals(NamedTuple):
    """Residuals of a trained network on one family's held-out rows."""

    family: str
    embedding: dict[str, torch.Tensor]  # shape: (n, width) for each target
    error: dict[str, torch.Tensor]  # shape: (n,) log(measured / predicted) for each target


def rows_of(corpus: Sequence[Path]) -> list[Row]:
    """Features and labels of every row that has both measurements."""
    rows: list[Row] = []
    observations = [item for path in corpus for item in read_corpus(path)]
    for family, observation in track(observations, description="features", transient=True, disable=not sys.stderr.isatty()):
        if (data := _labelled(observation)) is not None:
            rows.append(Row(family, data))
    return rows


def _labelled(observation: Observation) -> Data | None:
    measurement = observation.measurement
    if measurement.status != "ok" or not measurement.peak_memory_bytes or not measurement.step_time_s:
        return None
    data = featurize(observation.graph, observation.device)
    data.label_memory = torch.tensor([math.log(measurement.peak_memory_bytes)])
    data.label_time = torch.tensor([math.log(measurement.step_time_s)])
    return data


def split(rows: Sequence[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, neither of them from a study."""
    shuffled = [row for row in rows if not row.family.startswith(STUDY)]
    random.Random(seed).shuffle(shuffled)
    cut = round(len(shuffled) * (1 - _HELD_OUT))
    return shuffled[:cut], shuffled[cut:]


def train(rows: Sequence[Row], *, epochs: int, seed: int) -> GuardNetwork:
    """A network fitted to ``rows`` with a Huber loss on log(measured / predicted), memory and time alike."""
    torch.manual_seed(seed)
    network = GuardNetwork(**_NETWORK)
    loader = DataLoader([row.data for row in rows], batch_size=_BATCH_SIZE, shuffle=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=epochs * len(loader))
    for _ in track(range(epochs), description="epochs", transient=True, disable=not sys.stderr.isatty()):
        for batch in loader:
            correction = network(batch)
            loss = nn.functional.huber_loss(correction.log_memory, batch.label_memory, delta=_HUBER)
            loss = loss + nn.functional.huber_loss(correction.log_time, batch.label_time, delta=_HUBER)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return network.eval()


def residuals_of(network: GuardNetwork, rows: Sequence[Row]) -> list[Residuals]:
    """The network's errors and embeddings, family by family."""
    by_family: dict[str, list[Data]] = {}
    for row in rows:
        by_family.setdefault(row.family, []).append(row.data)
    residuals = []
    with torch.inference_mode():
        for family, datas in sorted(by_family.items()):
            batch = Batch.from_data_list(datas)
            correction = network(batch)
            residuals.append(
                Residuals(
                    family,
                    {"memory": correction.memory_embedding.double(), "time": correction.time_embedding.double()},
                    {
                        "memory": (batch.label_memory - correction.log_memory).double(),
                        "time": (batch.label_time - correction.log_time).double(),
                    },
                )
            )
    return residuals


def fit_prior(residuals: Sequence[Residuals], target: str) -> ResidualPrior:
    """Type-II maximum likelihood (Rasmussen and Williams 2006, 5.4) over the studies, each an independent draw.

    Errors are clipped at four robust standard deviations, because the process itself discounts outliers with a Student-t
    likelihood and must not be made vague by them.
    """
    everything = torch.cat([family.error[target] for family in residuals])
    spread = SIGMA_OF_MAD * float((everything - everything.median()).abs().median())
    log_scales = (
        torch.tensor([0.3, 0.3, 0.5, 1.0, 0.5], dtype=torch.float64)
        .mul(torch.tensor([spread, spread, spread, 1.0, spread], dtype=torch.float64))
        .log()
        .requires_grad_()
    )
    optimizer = torch.optim.Adam([log_scales], lr=0.05)
    for _ in range(_PRIOR_STEPS):
        bias, linear, local, length, noise = log_scales.exp()
        loss = torch.zeros((), dtype=torch.float64)
        for family in residuals:
            x, y = family.embedding[target], family.error[target].clamp(-4 * spread, 4 * spread)
            distance = torch.cdist(x, x).square() / x.shape[1]
            covariance = bias**2 + linear**2 * (x @ x.T) / x.shape[1] + local**2 * torch.exp(-distance / (2 * length**2))
            covariance = covariance + (noise**2 + 1e-8) * torch.eye(len(x), dtype=torch.float64)
            loss = loss - torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    bias, *others = log_scales.detach().exp().tolist()
    return ResidualPrior(max(bias, _NEW_MACHINE[target]), *others)


def interval_scale(residuals: Sequence[Residuals], target: str, prior: ResidualPrior) -> float:
    """The factor that makes the central 90% intervals hold on held-out rows, each predicted from the rows before it.

    Split-conformal in spirit: the score is |error| / predicted standard deviation, in the order of the rows, with at most the
    last few before each, as in a study.
    """
    scores = []
    for family in residuals:
        x, y = family.embedding[target], family.error[target]
        for index in range(len(y)):
            mean, deviation = 0.0, float(prior.before(x[index : index + 1]).sqrt())
            if index:
                start = max(0, index - _FEW_RUNS)
                posterior = condition(prior, under_equal_conditions(x[start:index]), y[start:index])
                means, deviations = posterior.at(under_equal_conditions(x[index : index + 1]))
                mean, deviation = float(means), float(deviations)
            scores.append(abs(float(y[index]) - mean) / deviation)
    return quantile_scale(scores)


def report(residuals: Sequence[Residuals]) -> dict[str, Any]:
    """Mean and median relative error by target and family."""

    def errors(values: torch.Tensor) -> dict[str, float]:
        relative = (torch.exp(-values) - 1).abs().tolist()
        return {
            "rows": len(relative),
            "mean": round(statistics.fmean(relative), 4),
            "median": round(statistics.median(relative), 4),
        }

    table: dict[str, Any] = {}
    for target in ("memory", "time"):
        table[target] = {family.family: errors(family.error[target]) for family in residuals}
        table[target]["all"] = errors(torch.cat([family.error[target] for family in residuals]))
    return table


def main() -> None:
    """Train, fit, write PATH.safetensors and PATH.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    parser.add_argument("--epochs", type=int, default=_EPOCHS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    rows = rows_of(arguments.corpus)
    training, held_out = split(rows, arguments.seed)
    network = train(training, epochs=arguments.epochs, seed=arguments.seed)
    studies = residuals_of(network, [row for row in rows if row.family.startswith(STUDY)])
    priors = {target: fit_prior(studies, target) for target in ("memory", "time")}
    card = {
        "network": _NETWORK,
        "device_kind": "cpu",
        "trained_devices": ["cpu"],
        "rows": {"training": len(training), "held_out": len(held_out), "studies": sum(len(s.error["time"]) for s in studies)},
        "residual": {target: asdict(prior) for target, prior in priors.items()},
        "interval_scale": {target: interval_scale(studies, target, prior) for target, prior in priors.items()},
        "held_out_error": report(residuals_of(network, held_out)),
        "study_error": report(studies),
    }
    versions = {"version": VERSION, "feature_version": FEATURE_VERSION}
    print(write_pair(arguments.out, network.state_dict(), versions | card), end="")


if __name__ == "__main__":
    main()
