"""Train and judge the edge classifier of `fusion` on labels of real compilers.

    python -m perfguard_research.fusion.labels --out labels.jsonl --minutes 12
    python -m perfguard_research.fusion.train labels.jsonl --out models/perfguard_research/weights

Evaluated in five folds by family of models (no family is in training and test), then fitted to everything. Writes
OUT/fusion.safetensors and OUT/fusion.json, the card with the scores.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from sklearn.model_selection import GroupKFold
from torch import nn
from torch_geometric.data import Batch

from perfguard.graph import OP_KINDS
from perfguard_research.fusion.labels import LabelledGraph, read_labels
from perfguard_research.fusion.network import FORMAT, SIZES, EdgeClassifier, FusionModel, edges_of
from perfguard_research.learners import batches, write_pair

_FOLDS = 5
_HIDDEN = 64
_FEWEST_OCCURRENCES = 30
"""Fewest occurrences of an operator in the corpus for an embedding of its own."""
_EDGES_A_BATCH = 3000
_EPOCHS = 25
_LEARNING_RATE = 5e-3
_LOWEST_CHANCE = 0.5


class Score(NamedTuple):
    """Score over edges with a known label."""

    precision: float
    recall: float
    accuracy: float
    edges: int


def score_of(predicted: npt.NDArray[Any], labels: npt.NDArray[np.int8]) -> Score:
    """Positive: fused. Shapes: (m,); labels of -1 do not count."""
    known = labels >= 0
    positive, true = predicted[known] > _LOWEST_CHANCE, labels[known] == 1
    both = int((positive & true).sum())
    return Score(both / max(int(positive.sum()), 1), both / max(int(true.sum()), 1), float((positive == true).mean()), len(true))


def names_in(rows: Iterable[LabelledGraph]) -> list[str]:
    """Operators that get an embedding of their own, without the mark of running in place."""
    seen = Counter(op.name.rstrip("_") for row in rows for op in row.graph.ops)
    return sorted(name for name, number in seen.items() if number >= _FEWEST_OCCURRENCES)


def fitted(rows: Sequence[LabelledGraph], *, epochs: int = _EPOCHS, seed: int = 0) -> FusionModel:
    """A network that has learnt from ``rows``. Cross-entropy, Adam, one cycle of the learning rate, as in the paper."""
    torch.manual_seed(seed)
    compilers = sorted({row.compiler for row in rows})
    names = names_in(rows)
    parts = [edges_of(row.graph, names, compilers.index(row.compiler)) for row in rows]
    labels = [torch.from_numpy(row.edge_labels()) for row in rows]
    network = EdgeClassifier(len(names) + 1, len(compilers), _HIDDEN)
    optimizer = torch.optim.Adam(network.parameters(), weight_decay=1e-5)
    sizes = [len(own) for own in labels]
    steps = epochs * (len([*batches(sizes, range(len(rows)), _EDGES_A_BATCH)]) + 2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps)
    rng = random.Random(seed)
    for _ in range(epochs):
        order = list(range(len(rows)))
        rng.shuffle(order)
        for chosen in batches(sizes, order, _EDGES_A_BATCH):
            wanted = torch.cat([labels[at] for at in chosen])
            logits = network(Batch.from_data_list([parts[at] for at in chosen]))
            loss = nn.functional.binary_cross_entropy_with_logits(logits[wanted >= 0], wanted[wanted >= 0].float())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return FusionModel(network.eval(), names, compilers)


def cross_validated(rows: Sequence[LabelledGraph]) -> dict[str, Score]:
    """Scores by compiler ("all": all of them), over five folds by family, all edges of all folds together."""
    judged = []
    for learn, judge in GroupKFold(_FOLDS).split(rows, groups=[row.family for row in rows]):
        model = fitted([rows[at] for at in learn])
        for row in (rows[at] for at in judge):
            chances = model.chances(row.graph, row.compiler)
            judged.append(pd.DataFrame({"compiler": row.compiler, "chance": chances, "label": row.edge_labels()}))
    edges = pd.concat(judged)
    groups = {"all": edges, **dict(iter(edges.groupby("compiler")))}
    return {str(name): score_of(own["chance"].to_numpy(), own["label"].to_numpy()) for name, own in groups.items()}


def main() -> None:
    """Cross-validate, fit and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("labels", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for path in arguments.labels for row in read_labels(path) if row.graph.edges.shape[1]]
    scores = cross_validated(rows)
    model = fitted(rows)
    card: dict[str, Any] = {
        "format": FORMAT,
        "version": 1,
        "names": model.names,
        "compilers": model.compilers,
        "hidden": _HIDDEN,
        "sizes": list(SIZES),
        "kinds": list(OP_KINDS),
        "torch": torch.__version__,
        "rows": {
            compiler: {
                "graphs": len(own),
                "families": len({row.family for row in own}),
                "edges": sum(len(row.edge_labels()) for row in own),
                "fused": sum(int((row.edge_labels() == 1).sum()) for row in own),
                "not known": sum(int((row.edge_labels() == -1).sum()) for row in own),
            }
            for compiler in model.compilers
            for own in [[row for row in rows if row.compiler == compiler]]
        },
        "scores": {"GAT-LSTM": {name: score._asdict() for name, score in scores.items()}},
    }
    write_pair(arguments.out / "fusion", model.network.state_dict(), card)
    print(json.dumps(card["scores"], indent=1))


if __name__ == "__main__":
    main()
