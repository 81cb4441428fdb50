"""What to fine-tune on a log: nothing, trees on the sums of a step, the network's last layer, or all of its layers.

    python benchmarks/refiners.py TABLE... --cache .perfguard-cache [--only NAME] [--seeds 3]

For the scenarios of `benchmarks/online.py` whose target is time (the network knows of memory only beside the trees): of rows that
the weights never saw, some are learnt by the residual process, and each kind learns what that leaves over, told as in the product
(leave one out; what a kind says of a run that it learnt from is what it says without it: out of bag, or four folds). Then the
process learns what the kind leaves over. Judged on 300 other rows; processor time of one thread.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from online import (
    MOST_OPERATORS,
    SCENARIOS,
    Row,
    Scenario,
    graph_of,
    key_of,
    measurement_of,
    streamed_of,
    weights_without,
)
from torch import nn

from perfguard.devices import resolve_device
from perfguard.predictor import Observation, Target
from perfguard_models._engines import physics_of
from perfguard_models._residual import learnt
from perfguard_models.ensemble import GuardEnsemble
from perfguard_models.guardnet import _residuals_of
from perfguard_models.operator_network import OperatorNetwork, batches_of
from perfguard_models.refinement import Lesson, refined, rows_of
from perfguard_training.dataset import Run, dataset_of

_FOLDS = 4
_HUBER = 0.1
Values = npt.NDArray[np.float64]


class Case(NamedTuple):
    """A scenario's rows, and the network that knows none of them."""

    target: Target
    rows: Sequence[Row]
    network: OperatorNetwork
    runs: Sequence[Run]
    """The rows' runs as the network sees them."""


Kind = Callable[[Case, Sequence[int], Sequence[int], Values], tuple[Values, Values]]
"""From rows to learn and to judge, and what is left over of the former, to what it says of both; of the former without them."""


def nothing(case: Case, learn: Sequence[int], judge: Sequence[int], left: Values) -> tuple[Values, Values]:
    """The process alone."""
    return np.zeros(len(learn)), np.zeros(len(judge))


def trees(case: Case, learn: Sequence[int], judge: Sequence[int], left: Values) -> tuple[Values, Values]:
    """As shipped."""
    ids = [f"{index:032x}" for index in learn]
    made = refined("", {case.target: Lesson(ids, ["any"], _seen(case, learn), left)})
    assert made is not None
    own = [made.held_out(case.target, one) or 0.0 for one in ids]
    return np.array(own), made.corrections(case.target, "any", _seen(case, judge))


def _seen(case: Case, indices: Sequence[int]) -> npt.NDArray[np.float32]:
    raws = [case.rows[index].raw for index in indices]
    sums = np.concatenate([raw.step_features for raw in raws if raw.step_features is not None])
    values = np.concatenate([raw.log_value[case.target] for raw in raws])
    return rows_of(sums, physics_of(case.target, sums, values), values)


def last_layer(case: Case, learn: Sequence[int], judge: Sequence[int], left: Values) -> tuple[Values, Values]:
    """By gradient, 20 epochs."""
    return _by_gradient(case, learn, judge, left, lambda net: net.slowdown.parameters(), epochs=20, learning_rate=3e-3)


def all_layers(case: Case, learn: Sequence[int], judge: Sequence[int], left: Values) -> tuple[Values, Values]:
    """By gradient, 10 epochs."""
    return _by_gradient(case, learn, judge, left, lambda net: net.parameters(), epochs=10, learning_rate=3e-4)


def _by_gradient(
    case: Case,
    learn: Sequence[int],
    judge: Sequence[int],
    left: Values,
    chosen: Callable[[Any], Iterable[nn.Parameter]],
    *,
    epochs: int,
    learning_rate: float,
) -> tuple[Values, Values]:
    runs, others = [case.runs[index] for index in learn], [case.runs[index] for index in judge]

    def tuned(indices: Sequence[int]) -> nn.Module:
        net = copy.deepcopy(case.network.network).eval()
        parameters = list(chosen(net))
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
        own = [runs[index] for index in indices]
        batches = [(part, case.network.pack([own[index] for index in part])) for part in batches_of(own, range(len(own)))]
        wanted = torch.from_numpy(left[list(indices)]).float()
        with torch.no_grad():
            before = [case.network.network(packed)[1] for _, packed in batches]
        for _ in range(epochs):
            for (part, packed), said in zip(batches, before, strict=True):
                loss = nn.functional.huber_loss(net(packed)[1] - said, wanted[part], delta=_HUBER) / _HUBER
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
        return net

    def moved(net: nn.Module, asked: Sequence[Run]) -> Values:
        found = np.zeros(len(asked))
        with torch.no_grad():
            for part in batches_of(asked, range(len(asked))):
                packed = case.network.pack([asked[index] for index in part])
                found[part] = (net(packed)[1] - case.network.network(packed)[1]).double().numpy()
        return found

    own, order = np.zeros(len(learn)), np.random.default_rng(0).permutation(len(learn))
    for fold in range(_FOLDS):
        out = order[fold::_FOLDS].tolist()
        own[out] = moved(tuned(sorted({*range(len(learn))} - {*out})), [runs[index] for index in out])
    return own, moved(tuned(range(len(learn))), others)


KINDS: dict[str, Kind] = {
    "process alone": nothing, "trees": trees, "last layer": last_layer, "all layers": all_layers,
}  # fmt: skip


def error_and_time(case: Case, kind: Kind, learn: Sequence[int], judge: Sequence[int]) -> tuple[float, float]:
    """Mean relative error on the judged rows, and seconds that the kind took."""
    device = resolve_device(case.rows[0].run.gpu)
    seen = [Observation(graph_of(index), device, measurement_of(case.rows[index].run, device, None)) for index in learn]
    asked = [Observation(graph_of(index), device, measurement_of(case.rows[index].run, device, None)) for index in judge]
    own_raws, others = ([case.rows[index].raw for index in indices] for indices in (learn, judge))
    alone, wanted = _residuals_of(seen, own_raws, case.target), _residuals_of(asked, others, case.target)
    left = learnt(alone.prior, alone.at, alone.y).left_out().numpy()
    begun = time.process_time()
    own, said = kind(case, learn, judge, left)
    seconds = time.process_time() - begun
    means, _ = learnt(alone.prior, alone.at, alone.y - torch.from_numpy(own)).at(wanted.at)
    return float((torch.exp(means + torch.from_numpy(said) - wanted.y) - 1).abs().mean()), seconds


def case_of(scenario: Scenario, tables: Sequence[Path], runs: Sequence[Run], cache: Path) -> Case:
    """With the views that the network needs."""
    learner = weights_without(scenario, runs, cache).learner
    assert isinstance(learner, GuardEnsemble)
    by_key = {key_of(run): run for run in runs}
    rows = streamed_of(scenario, tables, runs, {}, cache).rows
    return Case(scenario.target, rows, learner.networks[0], [by_key[key_of(row.run)] for row in rows])


def main() -> None:
    """Print a table for each scenario."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = dataset_of(arguments.tables, GuardEnsemble.views, cache=arguments.cache, most_operators=MOST_OPERATORS).runs
    print(f"{datetime.date.today()}, mean of {arguments.seeds} orders: error on 300 others, processor time")
    for scenario in SCENARIOS:
        if scenario.target != "time" or arguments.only not in scenario.name:
            continue
        case = case_of(scenario, arguments.tables, runs, arguments.cache)
        print(f"\n{scenario.name}")
        for number in (100, 400):
            cells = []
            for name, kind in KINDS.items():
                found = []
                for seed in range(arguments.seeds):
                    order = np.random.default_rng(seed).permutation(len(case.rows)).tolist()
                    found.append(error_and_time(case, kind, order[300 : 300 + number], order[:300]))
                errors, seconds = zip(*found, strict=True)
                cells.append(f"{name} {statistics.fmean(errors):.1%} ({statistics.fmean(seconds):.1f} s)")
            print(f"  {number} rows: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
