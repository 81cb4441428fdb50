"""Whether the messages of the shipped network of step times are alive, on the steps of the tables that ship with it.

    python benchmarks/messages.py

At the bound an operator's message has no gradient to speak of. The served time is compared with that of the same network whose
messages are all their mean, and with that of shuffled edges. Messages that are a constant change neither.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from _record import parser_of, show
from torch import nn

from perfguard_models import guardnet
from perfguard_models.learner import Floats
from perfguard_models.step_time import StepTime

_USUAL = torch.zeros(2)


def with_mean(learner: StepTime, mean: float) -> StepTime:
    """The same learner with messages that are all ``mean``."""
    changed = copy.copy(learner)
    changed.network = copy.deepcopy(learner.network)
    share = mean / changed.network.bound
    nn.init.zeros_(changed.network.out.weight)
    nn.init.constant_(changed.network.out.bias, share / math.sqrt(1 - share**2))  # of which the bound makes the mean
    return changed


def change(before: Floats, after: Floats) -> str:
    """Median and largest relative change of the times with these logarithms."""
    changes = np.abs(np.expm1(after - before))
    return f"{np.median(changes):.1%}; {changes.max():.1%}"


def main() -> None:
    """Show the table."""
    parser = parser_of(__doc__)
    arguments = parser.parse_args()
    learner = guardnet.read_weights(guardnet.WEIGHTS / "step-time").learner
    assert isinstance(learner, StepTime)
    steps = learner.reference
    network, packed = learner.network, learner.pack(steps)
    with torch.inference_mode():
        found = network.of_neighbours(network.encode(packed)[1])
        source, sink = packed.edge_index
        order = torch.randperm(len(source), generator=torch.manual_seed(0))
        shuffled = packed._replace(edge_index=torch.stack([source[order], sink]))
        straight, mixed = (network(one).log_step_s(_USUAL).double().numpy() for one in (packed, shuffled))
    served = learner.predict(steps)["time"]
    without = with_mean(learner, float(found.mean())).predict(steps)["time"]
    rows = [
        ["steps; different operators", f"{len(steps)}; {len(found):,}"],
        ["operators beyond 0.95 of the bound", f"{(found.abs() > 0.95 * network.bound).float().mean():.1%}"],
        ["standard deviation of the log factor of neighbours", f"{found.std():.2f}"],
        ["time served, with messages that are their mean: median and largest change", change(served, without)],
        ["time by the network alone, with shuffled edges: median and largest change", change(straight, mixed)],
    ]
    show("messages", ["of the shipped messages", "found"], rows, record=arguments.record)


if __name__ == "__main__":
    main()
