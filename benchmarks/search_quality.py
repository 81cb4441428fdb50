"""What a guard does for a search: simulated studies on measured truth.

    python benchmarks/search_quality.py TABLE... --cache .perfguard-cache --seeds 10 --plot docs/images/search_quality.png

The search spaces are rows of a workload table (`_table_spaces.py`). Whether a trial fits is as measured. Optuna, its samplers,
the plugin and the guard are the real ones (`_table_guard.py`): the guard learns from what each trial shows. Only the training is
not run: a trial takes 2,000 steps of the time that was measured, or where the table has none of the roofline. One that breaks a
budget costs a share of that. All studies of a space have the same time, that of 50 mean trials.

    none       no guard: a trial that breaks a budget is told as failed
    fake       pruned where live bytes exceed the limit, as estimators on fake tensors say, and nothing is told of how far
    guarded    the sampler as it is, with what `perfguard_optuna.create_study` puts around it
    sampler    PerfGuardSampler around the same sampler
    oracle     as `guarded`, by a guard that knows the truth
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import optuna
from _record import parser_of, show
from _table_guard import guard_of, measurement_of
from _table_spaces import ALL_ROWS, Point, Space, spaces_of
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.trial import TrialState
from rich.progress import track

from perfguard.session import HowEnded
from perfguard_optuna import OptunaGuard, PerfGuardSampler
from perfguard_research.leaderboard import predictions

_CALLED = {
    "none": "no guard", "fake": "live bytes alone", "guarded": "guarded", "sampler": "PerfGuardSampler", "oracle": "oracle",
}  # fmt: skip
"""Policies in the tables."""
_SAMPLERS: Mapping[str, type[BaseSampler]] = {
    "TPE": TPESampler, "GP": GPSampler, "NSGA-II": NSGAIISampler, "CMA-ES": CmaEsSampler,
}  # fmt: skip
_USUAL_COST = 0.1
COSTS = (0.5, 0.1, 0.02)
"""What a trial that breaks a budget costs, as a share of what it would have taken."""
_SLOW = {"GP": 3}
"""Samplers that have fewer seeds, because each proposal takes a second."""
_MOST_PROPOSED = 4000
"""Proposals after which a study ends. Only a search that was pruned to death reaches it."""
COLUMNS = (
    "launched", "of them failed", "time lost in failures", "rejected", "of them fitting", "behind the oracle",
    "no worse than no guard", "near",
)  # fmt: skip


@dataclass(frozen=True)
class Study:
    """What one study is made of."""

    space: Space
    policy: str
    seed: int
    cost: float = _USUAL_COST
    """Of a failed trial, as a share of what it would have taken."""
    sampler: str = "TPE"
    has_free_repeats: bool = False
    """Whether a configuration that has run to its end takes no time when it is proposed again."""

    @property
    def group(self) -> tuple[str, str, float, str]:
        """Equal for studies that differ by the seed alone. An oracle's trials do not fail, so they are the same for each cost."""
        return self.space.name, self.policy, _USUAL_COST if self.policy == "oracle" else self.cost, self.sampler


@dataclass
class Outcome:
    """What one study came to."""

    time_s: float = 0.0
    lost_s: float = 0.0
    launched: int = 0
    failed: int = 0
    rejected: int = 0
    rejected_though_fitting: int = 0
    near_limit: int = 0
    """Launched trials that need 90 to 100% of a budget."""
    finished: set[str] = field(default_factory=set)
    """Configurations that have run to their end."""
    best: list[tuple[float, float]] = field(default_factory=list)
    """Time and loss, at each improvement."""

    def best_by(self, time_s: float) -> float:
        """The best loss after ``time_s``; infinite before the first."""
        return min((loss for at, loss in self.best if at <= time_s), default=math.inf)

    def end(self, point: Point, space: Space, lasts_s: float) -> None:
        """Count a launched trial of ``point`` that has ended after ``lasts_s``."""
        self.launched += 1
        self.time_s += lasts_s
        if space.fails_by(point):
            self.failed += 1
            self.lost_s += lasts_s
            return
        self.finished.add(point.name)
        self.near_limit += space.is_near(point)
        if point.loss < self.best_by(math.inf):
            self.best.append((self.time_s, point.loss))


Outcomes = Mapping[tuple[str, str, float, str], Sequence[Outcome]]


def run_study(work: Study, trials: int) -> tuple[Study, Outcome]:
    """One study, with the time of so many mean ``trials`` that fit."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    space = work.space
    sampler = _SAMPLERS[work.sampler](seed=work.seed)  # type: ignore[call-arg]
    guard = guard_of(space, knows=work.policy == "oracle") if work.policy in ("guarded", "sampler", "oracle") else None
    if guard is not None:
        assert guard.build is not None
        if work.policy == "sampler":
            sampler = PerfGuardSampler(sampler, guard)
        else:
            sampler = PerfGuardSampler.against_repeats(sampler, guard, guard.build)
    study = optuna.create_study(sampler=sampler)
    outcome = Outcome()
    ends_s = time_of(space, trials)
    while outcome.time_s < ends_s and len(study.get_trials(deepcopy=False)) < _MOST_PROPOSED:
        _one_trial(study, work, guard, outcome)
    for trial in study.get_trials(deepcopy=False):
        is_whole = len(trial.params) == 1 + len(space.sizes)
        if trial.user_attrs.get("perfguard:verdict") == "prune" and is_whole:
            outcome.rejected += 1
            outcome.rejected_though_fitting += not space.fails_by(space.at(trial.params))
    return work, outcome


def time_of(space: Space, trials: int) -> float:
    """The seconds of so many mean trials of ``space`` that fit."""
    return trials * statistics.fmean(point.trial_s for point in space.points.values() if not space.fails_by(point))


def _one_trial(study: optuna.Study, work: Study, guard: OptunaGuard | None, outcome: Outcome) -> None:
    space = work.space
    trial = study.ask()
    params: dict[str, Any] = {"family": trial.suggest_categorical("family", list(space.families))}
    params |= {name: trial.suggest_int(name, 0, size - 1) for name, size in space.sizes.items()}
    point = space.at(params)
    fails_by = space.fails_by(point)
    lasts_s = point.trial_s * (work.cost if fails_by else 1.0)
    takes_s = 0.0 if work.has_free_repeats and point.name in outcome.finished else lasts_s
    if guard is None:
        if work.policy == "fake" and point.live_bytes > space.limit_bytes:
            outcome.rejected += 1
            outcome.rejected_though_fitting += not fails_by
            study.tell(trial, state=TrialState.PRUNED)
            return
        outcome.end(point, space, takes_s)
        study.tell(trial, **({"state": TrialState.FAIL} if fails_by else {"values": point.loss}))
        return
    session = guard.session_of(study, trial)
    decision = session.decision_now or session.judge(guard.build, final=True)
    assert decision is not None
    if decision.verdict.action == "prune":
        study.tell(trial, state=TrialState.PRUNED)
        return
    measurement = measurement_of(space, point, lasts_s=lasts_s)
    if fails_by == "time":
        session.core.stopped = "its pace"
    session.end_with(measurement, HowEnded(measurement.status, cut_short=measurement.cut_short))
    outcome.end(point, space, takes_s)
    study.tell(trial, **({"state": TrialState.PRUNED} if fails_by else {"values": point.loss}))


def main() -> None:
    """Run the studies, show the tables, draw the best loss against GPU time."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--memory", default="memory-forest", help="predictor of memory")
    parser.add_argument("--time", default="trees", help="predictor of step times; step-time takes an hour to fit")
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--most-operators", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=50, help="mean trials whose time a study has")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="TABLE", help="search, search-budgets or search-samplers. All by default")
    parser.add_argument("--costs", nargs="+", type=float, default=COSTS, help="of a failure, in trials, for search-budgets")
    parser.add_argument("--plot", type=Path, help="needs the table search")
    arguments = parser.parse_args()
    runs, found = predictions(
        arguments.tables, {arguments.memory: {}, arguments.time: {}}, ["family"], cache=arguments.cache, jobs=arguments.jobs,
        most_operators=arguments.most_operators,
    )  # fmt: skip
    of_memory, of_time, left_out = spaces_of(runs, found["family", arguments.memory], found["family", arguments.time])
    print(f"Left out but for {ALL_ROWS!r}, because they are said to fit in less than a step has alive: {', '.join(left_out)}.")
    large = [space for space in of_memory if space.name.endswith("large")]
    policies = ("none", "guarded", "oracle")
    tables: dict[str, tuple[tuple[str, ...], list[tuple[Study, tuple[str, ...]]]]] = {
        "search": (("policy",), [(Study(space, policy, 0), (_CALLED[policy],)) for space, policy in product(of_memory, _CALLED)]),
        "search-budgets": (
            ("a failure costs", "policy"),
            [
                (Study(space, policy, 0, cost), (f"{cost:g} of a trial", _CALLED[policy]))
                for space, cost, policy in product([*large, *of_time], arguments.costs, policies)
            ],
        ),
        "search-samplers": (
            ("sampler", "policy"),
            [
                (Study(space, policy, 0, sampler=sampler), (sampler, _CALLED[policy]))
                for space, sampler, policy in product(large, _SAMPLERS, policies)
            ],
        ),
    }
    chosen = {name: table for name, table in tables.items() if name in (arguments.only or tables)}
    works = [
        replace(study, seed=seed)
        for _, rows in chosen.values()
        for study, _ in rows
        for seed in range(min(arguments.seeds, _SLOW.get(study.sampler, arguments.seeds)))
    ]
    outcomes = outcomes_of(works, trials=arguments.trials, jobs=arguments.jobs)
    for name, (columns, rows) in chosen.items():
        lines = [[study.space.name, *named, *cells(study, outcomes)] for study, named in rows]
        show(name, ("space", *columns, *COLUMNS), lines, record=arguments.record)
    if arguments.plot is not None:
        _draw(of_memory[:4], outcomes, arguments.plot, trials=arguments.trials)


def outcomes_of(works: Iterable[Study], *, trials: int, jobs: int) -> Outcomes:
    """The outcomes of studies by their group, in the order of the seeds. Equal studies run once."""
    once = {(work.group, work.seed): work for work in works}
    outcomes: defaultdict[tuple[str, str, float, str], list[Outcome]] = defaultdict(list)
    with ProcessPoolExecutor(jobs) as pool:
        done = pool.map(partial(run_study, trials=trials), once.values(), chunksize=4)
        for work, outcome in track(done, total=len(once)):
            outcomes[work.group].append(outcome)
    return outcomes


def cells(study: Study, outcomes: Outcomes) -> list[str]:
    """What studies like ``study`` came to, beside the oracle and no guard. The columns are COLUMNS."""
    mine, oracle, none = (
        outcomes[Study(study.space, policy, 0, study.cost, study.sampler).group] for policy in (study.policy, "oracle", "none")
    )
    worst = max(study.space.losses)
    best, of_oracle, of_none = ([min(own.best_by(math.inf), worst) for own in studies] for studies in (mine, oracle, none))
    behind = [(own - known) / study.space.loss_range for own, known in zip(best, of_oracle, strict=True)]
    is_no_worse = [own <= other + 1e-9 for own, other in zip(best, of_none, strict=True)]
    launched = sum(outcome.launched for outcome in mine)
    failed = sum(outcome.failed for outcome in mine)
    rejected = sum(outcome.rejected for outcome in mine)
    fitting = sum(outcome.rejected_though_fitting for outcome in mine)
    return [
        f"{launched / len(mine):.0f}",
        f"{failed / launched:.1%}",
        f"{sum(outcome.lost_s for outcome in mine) / sum(outcome.time_s for outcome in mine):.1%}",
        f"{rejected / len(mine):.0f}",
        f"{fitting / rejected:.1%}" if rejected else "-",
        f"{statistics.fmean(behind):.1%}",
        f"{sum(is_no_worse)} of {len(mine)}",
        f"{sum(outcome.near_limit for outcome in mine) / max(1, launched - failed):.1%}",
    ]


def _draw(spaces: Sequence[Space], outcomes: Outcomes, path: Path, *, trials: int) -> None:
    from matplotlib.figure import Figure

    colors = {"none": "tab:red", "fake": "tab:orange", "guarded": "tab:blue", "sampler": "tab:green", "oracle": "0.3"}
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    for axes, space in zip(figure.subplots(2, 2).flat, spaces, strict=True):
        worst = max(space.losses)
        times = [time_of(space, trials) * share / 60 for share in range(1, 61)]
        for policy, called in _CALLED.items():
            own = outcomes[Study(space, policy, 0).group]
            means = [statistics.fmean(min(outcome.best_by(at), worst) for outcome in own) for at in times]
            style = "--" if policy == "oracle" else "-"
            axes.plot([at / 3600 for at in times], means, color=colors[policy], label=called, linestyle=style)
        axes.set(title=space.name, xlabel="GPU time (h)", ylabel="best loss, mean over seeds")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
