"""What a guard does for a search: simulated studies on measured truth.

    python benchmarks/search_quality.py TABLE... --cache .perfguard-cache --seeds 20 --plot docs/images/search_quality.png

The search spaces are rows of a workload table: networks by family and by rank in it, and batch sizes. Whether a trial fits is as
measured; what the guard believes was predicted by a predictor that has not seen the family (the folds of `perfguard leaderboard`,
made here if the cache lacks them). Optuna, its TPE, the plugins and the account of risk are the real ones; only the training is
not run: a trial takes 2,000 steps of the time that was measured, or where the table has none of the roofline; a trial that fails
costs a tenth of that. The predictor learns nothing from the trials. A configuration that ran is known.

    none       no guard: a trial that does not fit crashes and is told as failed
    fake       pruned where live bytes exceed the limit, as estimators on fake tensors say, and nothing is told of how far
    pruner     PerfGuardPruner
    sampler    PerfGuardSampler around the same TPE
    oracle     the same sampler with a guard that knows the truth
"""

from __future__ import annotations

import hashlib
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from _record import parser_of, show
from rich.progress import track

from perfguard import Estimate, Guard, Observation, Prediction, Workload
from perfguard.measure import Measurement
from perfguard.verdict import Decision, Verdict
from perfguard_models.features.step import STEP_FEATURES
from perfguard_optuna import OptunaGuard, PerfGuardSampler
from perfguard_research.dataset import Run
from perfguard_research.intervals import FoldPredictions, judged
from perfguard_research.leaderboard import predictions

_POLICIES = {
    "none": "none", "fake": "live bytes alone", "pruner": "pruner", "sampler": "sampler", "oracle": "oracle",
}  # fmt: skip
COLUMNS = ("space", "policy", "launched, did not fit", "time wasted", "rejected though fitting", "behind the oracle", "near")
_STEPS = 2000
_CRASH_SHARE = 0.1
_NEARLY_SURE = 0.01
_A100_BUDGET = 16 * 2**30
_BATCHES = (8, 16, 32, 64, 128)
_RANKS = 4
"""Networks of a family, from the smallest to the largest."""
_LIVE, _ROOFLINE = STEP_FEATURES.index("log_live"), STEP_FEATURES.index("log_roofline")


class Point(NamedTuple):
    """One configuration: what is true of it, and what was predicted."""

    fits: bool
    memory_bytes: float
    """As measured; where only known to have fitted or failed, live bytes moved to that side of the limit."""
    live_bytes: float
    trial_s: float
    predicted_bytes: float
    log_sigma: float
    loss: float

    @property
    def lasts_s(self) -> float:
        """Seconds from its launch to its end, or until it fails."""
        return self.trial_s if self.fits else self.trial_s * _CRASH_SHARE

    @property
    def content_hash(self) -> str:
        """What an operator graph is known by."""
        return repr(self)


@dataclass(frozen=True)
class Space:
    """A search space on one GPU: a family, and numbers from 0 up to a size each; and what comes of every point."""

    name: str
    gpu: str
    limit_bytes: int
    families: tuple[str, ...]
    sizes: Mapping[str, int]
    points: Mapping[tuple[Any, ...], Point]

    def at(self, params: Mapping[str, Any]) -> Point:
        """The configuration."""
        return self.points[(params["family"], *(params[name] for name in self.sizes))]

    @property
    def loss_range(self) -> float:
        """From the best to the worst that fits."""
        losses = [point.loss for point in self.points.values() if point.fits]
        return max(losses) - min(losses)


@dataclass
class Outcome:
    """What one study came to."""

    time_s: float = 0.0
    wasted_s: float = 0.0
    launched: int = 0
    crashed: int = 0
    rejected: int = 0
    rejected_though_fitting: int = 0
    near_limit: int = 0
    """Launched trials that need 90 to 100% of the limit."""
    best: list[tuple[float, float]] = field(default_factory=list)
    """Time and loss, at each improvement."""

    def best_by(self, time_s: float) -> float:
        """The best loss after ``time_s``; infinite before the first."""
        return min((loss for at, loss in self.best if at <= time_s), default=math.inf)


class TablePredictor:
    """Says what was predicted of a point when its family was held out; ``knows`` makes it an oracle."""

    def __init__(self, *, knows: bool) -> None:
        self.knows = knows
        self.name = "oracle" if knows else "held-out"

    def predict(self, graph: Any, device: Any, *, steps: int | None = None) -> Prediction:
        """``graph`` is a Point."""
        memory = (
            Estimate(graph.memory_bytes, 1e-4)
            if self.knows
            else Estimate(graph.predicted_bytes, max(graph.log_sigma, _NEARLY_SURE))
        )
        return Prediction(memory, Estimate(1.0, 0.1), None, self.name, device.id, trained_on_device=True)

    def fine_tune(self, observations: Sequence[Any]) -> None:
        """The folds' predictions stay as they are."""


class TableGuard(Guard):
    """A guard whose workloads are points of a table: nothing is traced, nothing is logged."""

    def trace(self, workload: Any) -> Any:
        """The point that ``build`` found."""
        return workload.model

    def judge(self, graph: Any, limits: Any, *, threshold: float, steps: int | None = None, **_: Any) -> Verdict:
        """By the table alone: a point has no operators that physics could bound."""
        prediction = self.predictor.predict(graph, self.device)
        return Verdict.of(prediction, limits(prediction), accepted=threshold)

    def record(self, verdict: Verdict, graph: Any = None, **options: Any) -> Decision:
        """In the log, without the point."""
        return super().record(verdict, None, **options)

    def end(self, decision: Decision, point: Point) -> None:
        """Log how a trial of ``point`` ended, from which the risk is accounted. It is known from now on."""
        measured = Measurement(
            status="ok" if point.fits else "oom",
            device_id=self.device.id,
            device_name=self.device.name,
            peak_memory_bytes=round(point.memory_bytes) if point.fits else None,
            step_time_s=None,
            total_time_s=point.lasts_s,
            num_steps=_STEPS if point.fits else 0,
            method="table",
            framework="",
        )
        self.log.record_measurement(decision.id, measured)
        run: Any = Observation(point, self.device, measured)  # type: ignore[arg-type]
        self._assessment = replace(self._assessment, runs_of={**self._assessment.runs_of, point.content_hash: [run]})


def build(params: Mapping[str, Any], space: Space) -> Workload:
    """A workload whose model is the point itself."""
    return Workload(space.at(params), inputs=(1,))  # type: ignore[arg-type]


def run_study(work: tuple[Space, str, int], trials: int) -> tuple[str, str, int, Outcome]:
    """One study of ``trials`` launched trials."""
    space, policy, seed = work
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    guard: OptunaGuard | None = None
    sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(seed=seed)
    if policy in ("pruner", "sampler", "oracle"):
        guard = OptunaGuard(space.gpu, build=partial(build, space=space), log=False)
        predictor = TablePredictor(knows=policy == "oracle")
        guard.guard = TableGuard(space.gpu, memory_budget=space.limit_bytes, predictor=predictor, log=False)
        if policy != "pruner":
            sampler = PerfGuardSampler(sampler, guard)
    study = optuna.create_study(sampler=sampler)
    outcome = Outcome()
    while outcome.launched < trials:
        _one_trial(study, space, policy, guard, outcome)
    for trial in study.trials:  # what the sampler rejected without asking us
        if trial.user_attrs.get("perfguard:verdict") == "prune" and len(trial.params) == 1 + len(space.sizes):
            outcome.rejected += 1
            outcome.rejected_though_fitting += space.at(trial.params).fits
    return space.name, policy, seed, outcome


def _one_trial(study: optuna.Study, space: Space, policy: str, guard: OptunaGuard | None, outcome: Outcome) -> None:
    trial = study.ask()
    params: dict[str, Any] = {"family": trial.suggest_categorical("family", list(space.families))}
    params |= {name: trial.suggest_int(name, 0, size - 1) for name, size in space.sizes.items()}
    point = space.at(params)
    if policy == "fake" and point.live_bytes > space.limit_bytes:
        outcome.rejected += 1
        outcome.rejected_though_fitting += point.fits
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        return
    if guard is not None:
        known = guard.session_of(study, trial)
        decision = known.decision_now or known.judge(guard.build, final=True)
        assert decision is not None
        if decision.verdict.action == "prune":
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        guard.guard.end(decision, point)  # type: ignore[attr-defined]
        guard.search_of(study).num_ended += 1
    outcome.launched += 1
    outcome.time_s += point.lasts_s
    if not point.fits:
        outcome.crashed += 1
        outcome.wasted_s += point.lasts_s
        if guard is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:  # as OptunaGuard does when a trial runs out of memory
            trial.set_constraint("perfguard:memory", 0.01)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        return
    outcome.near_limit += point.memory_bytes > 0.9 * space.limit_bytes
    if point.loss < outcome.best_by(math.inf):
        outcome.best.append((outcome.time_s, point.loss))
    study.tell(trial, point.loss)


def spaces_of(runs: Sequence[Run], found: FoldPredictions) -> list[Space]:
    """The A100's training runs under a budget, and the RTX 3090's up to its memory; each with two losses."""
    lines = judged(runs, "family", found)
    memory = lines[lines["target"] == "memory"]
    predicted = {at: (math.exp(value), sigma) for at, value, sigma in memory[["run", "predicted", "log_sigma"]].to_numpy()}
    spaces = []
    for gpu, variants, limit_bytes in (("a100-pcie-40gb", False, _A100_BUDGET), ("rtx3090", True, None)):
        mine = {
            index: run
            for index, run in enumerate(runs)
            if run.table == "workload" and run.gpu == gpu and run.mode == "train" and index in predicted
        }
        limit = limit_bytes or next(iter(mine.values())).capacity_bytes
        for favours in ("large", "border"):
            points, families, sizes = _points(mine, predicted, limit, favours, by_layout=variants)
            spaces.append(Space(f"{gpu}, favours {favours}", gpu, limit, families, sizes, points))
    return spaces


def _points(
    runs: Mapping[int, Run], predicted: Mapping[int, tuple[float, float]], limit: int, favours: str, *, by_layout: bool
) -> tuple[dict[tuple[Any, ...], Point], tuple[str, ...], dict[str, int]]:
    """The points of families in which enough networks were measured at every setting."""
    settings: defaultdict[tuple[str, str], dict[tuple[int, ...], int]] = defaultdict(dict)
    for index, run in runs.items():
        layout = int("nhwc" in run.setting.variant)
        setting: tuple[int, ...] = (layout, int(not run.fits)) if by_layout else (_BATCHES.index(run.batch_size),)
        settings[run.family, run.model][setting] = index
    wanted: set[tuple[int, ...]] = set(product((0, 1), (0, 1))) if by_layout else {(batch,) for batch in range(len(_BATCHES))}
    networks: defaultdict[str, list[dict[tuple[int, ...], int]]] = defaultdict(list)
    for (family, _), measured in settings.items():
        if measured.keys() == wanted:
            networks[family].append(measured)
    points: dict[tuple[Any, ...], Point] = {}
    families = tuple(sorted(family for family, known in networks.items() if len(known) >= _RANKS))
    for family, offset in zip(families, (hash_share(family) for family in families), strict=True):
        known = sorted(networks[family], key=lambda measured: _live(runs[measured[min(wanted)]]))
        for rank in range(_RANKS):
            measured = known[round(rank * (len(known) - 1) / (_RANKS - 1))]
            for setting, index in measured.items():
                pair = runs[measured[setting[0], 0]] if by_layout else runs[index]
                points[(family, rank, *setting)] = _point(runs[index], pair, predicted[index], limit, favours, offset)
    sizes = {"rank": _RANKS} | ({"layout": 2, "rung": 2} if by_layout else {"batch": len(_BATCHES)})
    return points, families, sizes


def _point(run: Run, pair: Run, predicted: tuple[float, float], limit: int, favours: str, offset: float) -> Point:
    live = _live(run)
    if "memory" in run.labels:
        memory = math.exp(run.labels["memory"])
    else:
        memory = min(live, 0.95 * limit) if run.fits else max(live, 1.05 * limit)
    roofline_s = math.exp(float(run.view["sums"][_ROOFLINE]))
    step_s = math.exp(pair.labels["time"]) * run.batch_size / pair.batch_size if "time" in pair.labels else roofline_s
    loss = -math.log(live) if favours == "large" else abs(math.log(memory / (0.95 * limit)))
    return Point(run.fits and memory <= limit, memory, live, _STEPS * step_s, *predicted, loss + offset)


def _live(run: Run) -> float:
    return math.exp(float(run.view["sums"][_LIVE]))


def hash_share(text: str) -> float:
    """0 to 0.5, the same for the same text: some families are better than others."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**33


def main() -> None:
    """Run the studies, show the table, draw the best loss against GPU time."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--predictor", default="memory-forest")
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--most-operators", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    runs, found = predictions(
        arguments.tables, {arguments.predictor: {}}, ["family"], cache=arguments.cache, jobs=arguments.jobs,
        most_operators=arguments.most_operators,
    )  # fmt: skip
    spaces = spaces_of(runs, found["family", arguments.predictor])
    work = list(product(spaces, _POLICIES, range(arguments.seeds)))
    outcomes: defaultdict[tuple[str, str], list[Outcome]] = defaultdict(list)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for name, policy, _, outcome in track(
            pool.map(partial(run_study, trials=arguments.trials), work, chunksize=4), total=len(work)
        ):
            outcomes[name, policy].append(outcome)
    show("search", COLUMNS, [row for space in spaces for row in _rows(space, outcomes)], record=arguments.record)
    if arguments.plot is not None:
        _draw(spaces, outcomes, arguments.plot)


def _rows(space: Space, outcomes: Mapping[tuple[str, str], Sequence[Outcome]]) -> Iterator[list[str]]:
    oracle = outcomes[space.name, "oracle"]
    for policy, called in _POLICIES.items():
        mine = outcomes[space.name, policy]
        wasted = statistics.fmean(outcome.wasted_s for outcome in mine)
        rejected = sum(outcome.rejected for outcome in mine)
        behind = [
            (min(own.best_by(best.time_s), _worst(space)) - best.best_by(best.time_s)) / space.loss_range
            for own, best in zip(mine, oracle, strict=True)
        ]
        launched = sum(outcome.launched - outcome.crashed for outcome in mine)
        yield [
            space.name,
            called,
            f"{sum(outcome.crashed for outcome in mine) / sum(outcome.launched for outcome in mine):.1%}",
            f"{wasted / 3600:.2f} h",
            f"{sum(outcome.rejected_though_fitting for outcome in mine) / rejected:.1%} of {rejected:,}" if rejected else "-",
            f"{statistics.fmean(behind):.1%}",
            f"{sum(outcome.near_limit for outcome in mine) / launched:.1%}",
        ]


def _worst(space: Space) -> float:
    return max(point.loss for point in space.points.values() if point.fits)


def _draw(spaces: Sequence[Space], outcomes: Mapping[tuple[str, str], Sequence[Outcome]], path: Path) -> None:
    from matplotlib.figure import Figure

    colors = {"none": "tab:red", "fake": "tab:orange", "pruner": "tab:blue", "sampler": "tab:green", "oracle": "0.3"}
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    for axes, space in zip(figure.subplots(2, 2).flat, spaces, strict=True):
        end = statistics.median(outcome.time_s for outcome in outcomes[space.name, "oracle"])
        times = [end * share / 60 for share in range(1, 61)]
        for policy in _POLICIES:
            means = [
                statistics.fmean(min(outcome.best_by(at), _worst(space)) for outcome in outcomes[space.name, policy])
                for at in times
            ]
            axes.plot(
                [at / 3600 for at in times],
                means,
                color=colors[policy],
                label=policy,
                linestyle="--" if policy == "oracle" else "-",
            )
        axes.set(title=space.name, xlabel="GPU time (h)", ylabel="best loss, mean over seeds")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
