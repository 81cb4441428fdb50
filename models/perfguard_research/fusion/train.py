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
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from sklearn.metrics import precision_score, recall_score
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


def score_of(predicted: npt.ArrayLike, labels: npt.ArrayLike) -> dict[str, float]:
    """Precision, recall and accuracy of "fused", and the number of edges. Shapes: (m,); labels of -1 do not count."""
    known = np.asarray(labels) >= 0
    positive = np.asarray(predicted)[known] > _LOWEST_CHANCE
    true = np.asarray(labels)[known] == 1
    return {
        "precision": float(precision_score(true, positive, zero_division=0)),
        "recall": float(recall_score(true, positive, zero_division=0)),
        "accuracy": float((positive == true).mean()),
        "edges": len(true),
    }


def fitted(rows: Sequence[LabelledGraph], *, epochs: int = _EPOCHS, seed: int = 0) -> FusionModel:
    """A network that has learnt from ``rows``. Cross-entropy, Adam, one cycle of the learning rate, as in the paper."""
    torch.manual_seed(seed)
    compilers = sorted({row.compiler for row in rows})
    seen = Counter(op.name.rstrip("_") for row in rows for op in row.graph.ops)  # without the mark of running in place
    names = sorted(name for name, number in seen.items() if number >= _FEWEST_OCCURRENCES)
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


def cross_validated(rows: Sequence[LabelledGraph]) -> pd.DataFrame:
    """Each edge with the chance that it is fused, by a network that has not seen its family, over five folds.

    Returns:
        "compiler", "family", "graph" (the index of its row), "chance", and "label" as `edge_labels` has it.
    """
    judged = []
    for learn, judge in GroupKFold(_FOLDS).split(rows, groups=[row.family for row in rows]):
        model = fitted([rows[at] for at in learn])
        for at in judge:
            row = rows[at]
            chances = model.chances(row.graph, row.compiler)
            known = {"compiler": row.compiler, "family": row.family, "graph": at}
            judged.append(pd.DataFrame(known | {"chance": chances, "label": row.edge_labels()}))
    return pd.concat(judged)


def main() -> None:
    """Cross-validate, fit and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("labels", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for path in arguments.labels for row in read_labels(path) if row.graph.edges.shape[1]]
    edges = cross_validated(rows)
    by_compiler = edges.groupby("compiler")
    scores = {str(name): score_of(own["chance"], own["label"]) for name, own in [("all", edges), *by_compiler]}
    counts = by_compiler.agg(graphs=("graph", "nunique"), families=("family", "nunique"), edges=("label", "size"))
    for name, label in (("fused", 1), ("not known", -1)):
        counts[name] = (edges["label"] == label).groupby(edges["compiler"]).sum()
    model = fitted(rows)
    card = {
        "format": FORMAT,
        "version": 1,
        "names": model.names,
        "compilers": model.compilers,
        "hidden": _HIDDEN,
        "sizes": list(SIZES),
        "kinds": list(OP_KINDS),
        "torch": torch.__version__,
        "rows": counts.to_dict("index"),
        "scores": {"GAT-LSTM": scores},
    }
    write_pair(arguments.out / "fusion", model.network.state_dict(), card)
    print(json.dumps(scores, indent=1))


if __name__ == "__main__":
    main()
