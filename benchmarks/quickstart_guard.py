"""How good is the guard in the demo's own study? Launched trials are measured anyway; the pruned ones are run too, to know.

    python benchmarks/quickstart_guard.py --seeds 0 1 2 3 4

A pruned trial is stopped as soon as it has broken its time budget; its memory peak is reached in the first steps.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console
from rich.table import Table
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfguard import Run, resolve_device
from perfguard.quantities import parse_bytes, parse_seconds
from perfguard.summary import mean_error
from perfguard_optuna import PerfGuardPruner, create_study, record_of, summarize

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import quickstart


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
    rank_trend: float
    """Spearman correlation of the trial's order with its error; negative: the errors fall."""
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


def breaks_budget(params: Mapping[str, Any]) -> bool:
    """Run a configuration and see; stopped when its time budget is over."""
    budget_s = parse_seconds(quickstart.TIME_BUDGET)
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
    pruner = PerfGuardPruner(
        gpu="cpu", build=quickstart.build, memory_budget=quickstart.MEMORY_BUDGET, time_budget=quickstart.TIME_BUDGET, log=False
    )
    decisions: list[float] = []
    judge = pruner.guard.judge

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        decision = judge(*args, **kwargs)
        if decision is not None:
            decisions.append(time.perf_counter() - start)
        return decision

    pruner.guard.judge = timed  # type: ignore[method-assign]
    start = time.perf_counter()
    study.optimize(quickstart.objective, n_trials=trials, pruner=pruner, count="proposed")
    study_s = time.perf_counter() - start
    summary = summarize(study)
    records = [record_of(trial) for trial in study.trials if trial.state.is_finished()]
    errors = [error for record in records if (error := mean_error(record)) is not None]
    pruned = [trial for trial in study.get_trials() if record_of(trial).verdict == "prune"]
    truths = [breaks_budget(trial.params) for trial in pruned]
    return Outcome(
        seed=seed,
        launched=summary.num_launched,
        violations=sum(record.violates for record in records),
        rightly_pruned=sum(truths),
        wrongly_pruned=len(truths) - sum(truths),
        first_error=summary.first_error or 0.0,
        last_error=summary.last_error or 0.0,
        rank_trend=_spearman(errors),
        study_s=study_s,
        decision_s=statistics.median(decisions),
    )


def _spearman(errors: list[float]) -> float:
    ranks = [sorted(errors).index(error) for error in errors]
    return statistics.correlation(range(len(ranks)), ranks) if len(set(ranks)) > 1 else 0.0


def main() -> None:
    """Run the seeds and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--trials", type=int, default=40)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    quickstart.digits()
    console = Console(width=130)
    table = Table(title=f"{datetime.date.today()}, {resolve_device('cpu').name}, Python {platform.python_version()}")
    for heading in ("seed", "launched", "over budget", "pruned rightly", "wrongly", "caught", "feasible lost", "first 5",
                    "last 10", "trend", "study s", "decision ms"):  # fmt: skip
        table.add_column(heading, justify="right")
    outcomes = []
    for seed in arguments.seeds:
        outcome = study_of(seed, arguments.trials)
        outcomes.append(outcome)
        table.add_row(str(seed), *_cells(outcome), f"{outcome.study_s:.0f}", f"{outcome.decision_s * 1e3:.0f}")
        console.print(table)
    caught = sum(o.rightly_pruned for o in outcomes) / max(sum(o.infeasible for o in outcomes), 1)
    lost = sum(o.wrongly_pruned for o in outcomes) / max(sum(o.feasible for o in outcomes), 1)
    console.print(f"all seeds: {caught:.1%} of the infeasible trials pruned, {lost:.1%} of the feasible ones")


def _cells(outcome: Outcome) -> list[str]:
    return [
        str(outcome.launched),
        str(outcome.violations),
        str(outcome.rightly_pruned),
        str(outcome.wrongly_pruned),
        f"{outcome.rightly_pruned / max(outcome.infeasible, 1):.0%}",
        f"{outcome.wrongly_pruned / max(outcome.feasible, 1):.1%}",
        f"{outcome.first_error:.1%}",
        f"{outcome.last_error:.1%}",
        f"{outcome.rank_trend:+.2f}",
    ]


if __name__ == "__main__":
    main()
