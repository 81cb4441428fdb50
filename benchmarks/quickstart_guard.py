"""How good is the guard in the demo's own study? Launched trials are measured anyway; the pruned ones are run too, to know.

    python benchmarks/quickstart_guard.py --seeds 0 1 2 3 4

A pruned trial is stopped as soon as it has broken its time budget; its memory peak is reached in the first steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import torch
from _record import parser_of, show
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfguard import Run, resolve_device
from perfguard.quantities import parse_bytes
from perfguard_optuna import PerfGuardPruner, create_study, record_of, summarize
from perfguard_optuna.session import OptunaSession

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import quickstart

COLUMNS = ("seed", "launched", "over budget", "pruned rightly", "wrongly", "caught", "feasible lost", "error, first 5", "last 10",
           "study, s", "decision, ms")  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One seed's study, with the truth about its pruned trials."""

    seed: int
    launched: int
    violations: int
    rightly_pruned: int
    wrongly_pruned: int
    first_error: float
    last_error: float
    study_s: float
    decision_s: float
    """Median time from a trial's last suggestion to its verdict."""

    @property
    def infeasible(self) -> int:
        return self.violations + self.rightly_pruned

    @property
    def feasible(self) -> int:
        return self.launched - self.violations + self.wrongly_pruned


class _OverTime(Exception):
    pass


def breaks_budget(params: Mapping[str, Any], budget_s: float) -> bool:
    """Run a configuration and see; stopped when its time budget is over."""
    with Run(resolve_device("cpu")) as run, _stopped_after(budget_s):
        quickstart.train(params)
    measurement = run.measurement
    assert measurement is not None
    assert measurement.peak_memory_bytes is not None
    return measurement.peak_memory_bytes > parse_bytes(quickstart.MEMORY_BUDGET) or measurement.total_time_s > budget_s


@contextmanager
def _stopped_after(seconds: float) -> Iterator[None]:
    end = time.perf_counter() + seconds

    def check(*_: object) -> None:
        if time.perf_counter() > end:
            raise _OverTime

    handle = register_optimizer_step_post_hook(check)
    try:
        yield
    except _OverTime:
        pass
    finally:
        handle.remove()


def study_of(seed: int, trials: int) -> Outcome:
    """Run the demo's study with ``seed``, then its pruned trials."""
    study = create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    budget_s = quickstart.time_budget_s()
    pruner = PerfGuardPruner(gpu="cpu", memory_budget=quickstart.MEMORY_BUDGET, time_budget=budget_s, log=False)
    decisions: list[float] = []
    judge = OptunaSession.judge

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        decision = judge(*args, **kwargs)
        if decision is not None:
            decisions.append(time.perf_counter() - start)
        return decision

    start = time.perf_counter()
    with mock.patch.object(OptunaSession, "judge", timed):
        study.optimize(quickstart.objective, n_trials=trials, pruner=pruner, count="proposed")
    study_s = time.perf_counter() - start
    summary = summarize(study)
    records = [record_of(trial) for trial in study.trials if trial.state.is_finished()]
    pruned = [trial for trial in study.get_trials() if record_of(trial).is_pruned]
    truths = [breaks_budget(trial.params, budget_s) for trial in pruned]
    return Outcome(
        seed=seed,
        launched=summary.num_launched,
        violations=sum(record.violates for record in records),
        rightly_pruned=sum(truths),
        wrongly_pruned=len(truths) - sum(truths),
        first_error=0.0 if summary.time_errors is None else summary.time_errors.first,
        last_error=0.0 if summary.time_errors is None else summary.time_errors.last,
        study_s=study_s,
        decision_s=statistics.median(decisions),
    )


def main() -> None:
    """Run the seeds and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--trials", type=int, default=40)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)  # as the demo does
    outcomes = []
    for seed in arguments.seeds:
        outcomes.append(study_of(seed, arguments.trials))
        print(outcomes[-1], file=sys.stderr)
    rightly, infeasible, wrongly, feasible = (
        sum(getattr(outcome, name) for outcome in outcomes)
        for name in ("rightly_pruned", "infeasible", "wrongly_pruned", "feasible")
    )
    shares = f"{rightly / max(infeasible, 1):.1%}", f"{wrongly / max(feasible, 1):.1%}"
    together = ["all", "", "", f"{rightly} of {infeasible}", f"{wrongly} of {feasible}", *shares, *[""] * 4]
    show("demo", COLUMNS, [*map(_cells, outcomes), together], record=arguments.record)


def _cells(outcome: Outcome) -> list[str]:
    counts = outcome.seed, outcome.launched, outcome.violations, outcome.rightly_pruned, outcome.wrongly_pruned
    return [
        *map(str, counts),
        f"{outcome.rightly_pruned / max(outcome.infeasible, 1):.0%}",
        f"{outcome.wrongly_pruned / max(outcome.feasible, 1):.1%}",
        f"{outcome.first_error:.1%}",
        f"{outcome.last_error:.1%}",
        f"{outcome.study_s:.0f}",
        f"{outcome.decision_s * 1e3:.0f}",
    ]


if __name__ == "__main__":
    main()
