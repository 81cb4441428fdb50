r"""Train GuardNet's weights for GPUs on workload tables.

    python -m perfguard_models.train_guardnet_gpu TABLE.csv.gz --out models/perfguard_models/weights/guardnet_gpu

Families are held out whole. Memory is learnt from what the driver read, and from what fitted a card or did not; time from the
step times. The scale of the intervals is conformal on the held-out families.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn
from torch_geometric.data import Batch, Data

from perfguard.features import GRAPH_FEATURES, NODE_FEATURES
from perfguard_models._network import GuardNetwork
from perfguard_models._residual import ResidualPrior
from perfguard_models.dataset import TableRow, rows_of_table, split_by_family
from perfguard_models.guardnet import UNTRAINED_LOG_SIGMA
from perfguard_models.train_guardnet import Residuals, conformal_factor, fit_prior, write_weights

_NETWORK: dict[str, Any] = {
    "hidden": 48,
    "layers": 2,
    "width": 12,
    "dropout": 0.1,
    "num_node_features": len(NODE_FEATURES),
    "num_graph_features": len(GRAPH_FEATURES),
}
_HELD_OUT = 0.15
_EPOCHS = 12
_NODES_A_BATCH = 12_000
_LEARNING_RATE = 3e-3
_WEIGHT_DECAY = 1e-2
_HUBER = 0.1
_BOUND_WEIGHT = 0.3
_FEWEST_ROWS = 20
_CHECKPOINT_SUFFIX = ".checkpoint.pt"


def batches(rows: Sequence[TableRow], *, shuffle: bool, seed: int = 0) -> Iterator[Batch]:
    """Batches of about as many operators each, whatever the sizes of the graphs."""
    order = list(range(len(rows)))
    if shuffle:
        random.Random(seed).shuffle(order)
    chosen: list[Data] = []
    num_nodes = 0
    for index in order:
        data = rows[index].data.clone()
        data.x, data.edge_index = data.x.float(), data.edge_index.long()
        chosen.append(data)
        num_nodes += int(data.num_nodes or 0)
        if num_nodes >= _NODES_A_BATCH:
            yield Batch.from_data_list(chosen)
            chosen, num_nodes = [], 0
    if chosen:
        yield Batch.from_data_list(chosen)


def loss_of(network: GuardNetwork, batch: Batch) -> torch.Tensor:
    """Huber on what was measured, a hinge on what only fitted or did not fit."""
    correction = network(batch)
    loss = torch.zeros(())
    for predicted, label in ((correction.log_memory, batch.label_memory), (correction.log_time, batch.label_time)):
        known = ~label.isnan()
        if known.any():
            loss = loss + nn.functional.huber_loss(predicted[known], label[known], delta=_HUBER) / _HUBER
    wrong = torch.relu(batch.bound_sign * (batch.bound - correction.log_memory))
    return loss + _BOUND_WEIGHT * wrong.mean()


def train(rows: Sequence[TableRow], *, epochs: int, seed: int, checkpoint: Path) -> GuardNetwork:
    """A fitted network; a killed training goes on from ``checkpoint``."""
    torch.manual_seed(seed)
    network = GuardNetwork(**_NETWORK)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    total = epochs * math.ceil(sum(int(row.data.num_nodes or 0) for row in rows) / _NODES_A_BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=total + epochs)
    first = 0
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["epoch"]
    for epoch in track(range(first, epochs), description="epochs", transient=True, disable=not sys.stderr.isatty()):
        start, losses = time.perf_counter(), []
        network.train()
        for batch in batches(rows, shuffle=True, seed=seed + epoch):
            loss = loss_of(network, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {statistics.fmean(losses):.4f}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
        state = {
            "network": network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "epoch": epoch + 1,
        }
        torch.save(state, checkpoint)
    return network.eval()


def residuals_of(network: GuardNetwork, rows: Sequence[TableRow]) -> list[Residuals]:
    """Errors and embeddings, family by family, in the order of the rows."""
    by_family: dict[str, list[TableRow]] = {}
    for row in rows:
        by_family.setdefault(row.family, []).append(row)
    residuals = []
    with torch.inference_mode():
        for family, group in sorted(by_family.items()):
            parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("memory", "time", "e_memory", "e_time")}
            for batch in batches(group, shuffle=False):
                correction = network(batch)
                parts["memory"].append((batch.label_memory - correction.log_memory).double())
                parts["time"].append((batch.label_time - correction.log_time).double())
                parts["e_memory"].append(correction.memory_embedding.double())
                parts["e_time"].append(correction.time_embedding.double())
            joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
            known = {target: ~joined[target].isnan() for target in ("memory", "time")}
            residuals.append(
                Residuals(
                    family,
                    {target: joined[f"e_{target}"][known[target]] for target in known},
                    {target: joined[target][known[target]] for target in known},
                )
            )
    return residuals


def prior_of(residuals: Sequence[Residuals], target: str) -> ResidualPrior:
    """The residual process over families, each an independent draw; a family counts with at most sixty rows.

    Too few held-out rows cannot say how wrong the network is: then it is taken to be as uncertain as physics.
    """
    some = [
        Residuals(r.family, {target: r.embedding[target][:60]}, {target: r.error[target][:60]})
        for r in residuals
        if len(r.error[target]) > 1
    ]
    if sum(len(r.error[target]) for r in some) < _FEWEST_ROWS:
        return ResidualPrior(UNTRAINED_LOG_SIGMA[target], linear=0.1, local=0.1, length=0.3, noise=0.1)
    return fit_prior(some, target)


def conformal_scale(residuals: Sequence[Residuals], target: str, prior: ResidualPrior) -> float:
    """The factor that makes 90% intervals hold on families that the network has not seen, before it has learnt of them."""
    scores = [
        float(score)
        for r in residuals
        for score in (r.error[target].abs() / prior.variance(r.embedding[target]).sqrt() if len(r.error[target]) else [])
    ]
    if len(scores) < _FEWEST_ROWS:
        return 1.0
    return conformal_factor(scores)


def report(network: GuardNetwork, rows: Sequence[TableRow]) -> dict[str, Any]:
    """Mean and median relative error of memory and of time, by GPU and mode, and what fits told apart from what does not."""
    groups: dict[str, list[TableRow]] = {}
    for row in rows:
        groups.setdefault(f"{row.gpu} {row.mode}", []).append(row)
    table: dict[str, Any] = {}
    with torch.inference_mode():
        for name, group in sorted(groups.items()):
            errors: dict[str, list[float]] = {"memory": [], "time": []}
            right: dict[str, list[bool]] = {"oom_caught": [], "fitting_kept": []}
            for batch in batches(group, shuffle=False):
                correction = network(batch)
                for target, predicted in (("memory", correction.log_memory), ("time", correction.log_time)):
                    difference = predicted - batch[f"label_{target}"]
                    errors[target] += (difference[~difference.isnan()].exp() - 1).abs().tolist()
                over = correction.log_memory > batch.bound
                right["oom_caught"] += over[batch.bound_sign > 0].tolist()
                right["fitting_kept"] += (~over)[batch.bound_sign < 0].tolist()
            table[name] = {
                **{
                    target: {"rows": len(e), "mean": round(statistics.fmean(e), 4), "median": round(statistics.median(e), 4)}
                    for target, e in errors.items()
                    if e
                },
                **{key: round(sum(flags) / len(flags), 4) for key, flags in right.items() if flags},
            }
    return table


def main() -> None:
    """Trace, train, fit, write PATH.safetensors and PATH.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    parser.add_argument("--epochs", type=int, default=_EPOCHS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="folder for traced rows")
    arguments = parser.parse_args()

    rows = rows_of_table(arguments.table, jobs=arguments.jobs, cache=arguments.cache)
    training, held_out = split_by_family(rows, held_out=_HELD_OUT, seed=arguments.seed)
    print(f"{len(training)} rows to train on, {len(held_out)} of families held out", file=sys.stderr)
    checkpoint = arguments.out.with_suffix(_CHECKPOINT_SUFFIX)
    network = train(training, epochs=arguments.epochs, seed=arguments.seed, checkpoint=checkpoint)
    unseen = residuals_of(network, held_out)
    priors = {target: prior_of(unseen, target) for target in ("memory", "time")}
    card = {
        "network": _NETWORK,
        "device_kind": "cuda",
        "trained_devices": sorted({row.gpu for row in training}),
        "rows": {"training": len(training), "held_out": len(held_out)},
        "residual": {target: asdict(prior) for target, prior in priors.items()},
        "interval_scale": {target: conformal_scale(unseen, target, prior) for target, prior in priors.items()},
        "held_out_error": report(network, held_out),
    }
    write_weights(arguments.out, network, card)
    checkpoint.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
