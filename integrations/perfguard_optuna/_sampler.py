"""PerfGuardSampler: proposes what is predicted to fit, and passes constraints on to the inner sampler.

Drawing again is not enough, because the inner sampler would not learn why its proposal was rejected. So each rejected proposal
becomes a PRUNED trial of the study with its constraints. TPE learns from it without a change. Then the inner sampler proposes
again. Each parameter that ``build`` reads is drawn. So a joint limit is judged on joint proposals, and a conditional space is
followed branch by branch.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, _get_single_value
from optuna.samplers import BaseSampler, BruteForceSampler, GPSampler, GridSampler, PartialFixedSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from perfguard.exceptions import ConfigurationError, UnguardedTrialError, UnguardedTrialWarning
from perfguard.verdict import Verdict
from perfguard.workload import Build, Workload, is_missing_parameter
from perfguard_optuna._attributes import PREFIX, attributes_of
from perfguard_optuna._guard import MOST_REJECTIONS_IN_A_ROW, OptunaGuard, Search, WatchedParams, build_watched
from perfguard_optuna._pruner import PerfGuardPruner

_GRID_KEYS = ("grid_id", "search_space")
"""System attributes by which a GridSampler knows which points it has visited (Optuna 5.0)."""
_BISECTIONS = 6
_GOALS = 5
_MOST_REJECTED_FOR_GP = 100
"""Most rejected proposals for the GP, whose cost grows with the cube of the trials."""
_MOST_REPEATS = 5
"""Proposals in a row that were rejected before, after which the next ones are drawn at random."""


class PerfGuardSampler(BaseSampler):
    """Wraps any Optuna sampler so that the study spends its trials on what is predicted to fit.

    Example:
        >>> pruner = PerfGuardPruner(gpu="a100", build=build)                                          # doctest: +SKIP
        >>> sampler = PerfGuardSampler(TPESampler(), pruner)                                           # doctest: +SKIP
        >>> study = optuna.create_study(sampler=sampler, pruner=pruner)                                # doctest: +SKIP

    What does not fit is in the study as a PRUNED trial, with the reason, but does not count for ``n_trials``. The first trial of
    a fresh study is the exception: the parameters' distributions are known only after it has suggested them.

    When nothing has fitted for ``max_proposals`` proposals or ``max_seconds``, the last proposal is moved towards the nearest
    trial that was launched until it fits. Where none was launched yet the trial is PRUNED, and after 300 proposals in a row the
    study ends with a NothingFeasibleWarning.

    Args:
        inner: the sampler that proposes.
        guard: the OptunaGuard that judges, or the PerfGuardPruner that has one. It needs a ``build``.
        max_proposals: proposals for one trial before the last of them is moved.
        max_seconds: time for one trial's proposals before that.

    Raises:
        ConfigurationError: if ``guard`` has no ``build``, or a bound is not positive.
    """

    def __init__(
        self,
        inner: BaseSampler,
        guard: OptunaGuard | PerfGuardPruner,
        *,
        max_proposals: int = 50,
        max_seconds: float = 20.0,
    ) -> None:
        if not isinstance(inner, BaseSampler):
            raise ConfigurationError(f"inner must be an Optuna sampler, for instance TPESampler(), but got {inner!r}.")
        guard = guard.guard if isinstance(guard, PerfGuardPruner) else guard
        if not isinstance(guard, OptunaGuard):
            raise ConfigurationError(f"guard must be an OptunaGuard or a PerfGuardPruner, but got {guard!r}.")
        if guard.build is None:
            raise ConfigurationError(
                "PerfGuardSampler must know what a proposal would run. Give its guard `build=lambda params: Workload(...)`."
            )
        if max_proposals < 1 or not max_seconds > 0:
            raise ConfigurationError(
                f"max_proposals and max_seconds must be positive, but got {max_proposals} and {max_seconds}."
            )
        self.inner = inner
        self.guard = guard
        self._max_proposals = max_proposals
        self._max_seconds = max_seconds
        self._build: Build = guard.build
        self._search = Search(guard)
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"PerfGuardSampler({self.inner})"

    def reseed_rng(self) -> None:
        """Same as for the inner sampler."""
        self.inner.reseed_rng()
        self._random.reseed_rng()

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Same as for the inner sampler."""
        self.inner.before_trial(study, trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Same as for the inner sampler."""
        self.inner.after_trial(study, trial, state, values)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Same as for the inner sampler, because a single parameter cannot be judged."""
        return self.inner.sample_independent(self._view(study, trial), trial, param_name, param_distribution)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The inner sampler's space and every other parameter of earlier trials, because ``build`` may read it."""
        return _known_distributions(study) | self.inner.infer_relative_search_space(self._view(study, trial), trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A joint proposal that is predicted to fit; see the class. If the guard fails, the inner sampler's own proposal."""
        try:
            return self._sample_feasible(study, trial, search_space)
        except (optuna.TrialPruned, UnguardedTrialError):
            raise
        except Exception as error:
            if self.guard.strict:
                raise UnguardedTrialError(
                    f"PerfGuardSampler could not guide the search: {type(error).__name__}: {error}"
                ) from error
            self.guard._warn_once(
                UnguardedTrialWarning,
                f"PerfGuardSampler could not guide the search (shown once): {type(error).__name__}: {error}",
            )
            inner_space = self.inner.infer_relative_search_space(study, trial)
            return self.inner.sample_relative(study, trial, inner_space)

    def _sample_feasible(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        started_at = time.monotonic()
        num_rejected = num_repeats = 0
        while True:
            proposal = self._propose(study, trial, search_space, at_random=num_repeats >= _MOST_REPEATS)
            verdict = proposal.rejection
            if verdict is not None and not self._counts_its_points:  # no new trial, or a small space would fill with copies
                num_repeats += 1
                with self._lock:
                    self._search.rejected(verdict)
            else:
                if verdict is None:
                    if proposal.workload is None:
                        return proposal.params
                    verdict = self._check(proposal.workload)
                    if verdict is None or verdict.action != "prune" or proposal.is_fixed:
                        return self._accept(study, trial, proposal)
                    self.guard.remember(study, proposal.watched, verdict)
                num_repeats = 0
                self._reject(study, trial, proposal, verdict)
            num_rejected += 1
            if num_rejected >= self._max_proposals or time.monotonic() - started_at > self._max_seconds:
                moved = self._moved_to_fit(study, proposal)
                if moved is not None:
                    return self._accept(study, trial, moved)
                if "fixed_params" in trial.system_attrs:  # an enqueued point, which is no evidence about the space
                    raise self._pruned(study, trial, verdict)
            if _is_stopping(study) or self._search.is_over:
                self._give_up(study, trial, verdict)
            if time.monotonic() - started_at > self._max_seconds:
                raise self._pruned(study, trial, verdict)

    @property
    def _base(self) -> BaseSampler:
        return self.inner._base_sampler if isinstance(self.inner, PartialFixedSampler) else self.inner

    @property
    def _counts_its_points(self) -> bool:
        """Whether the inner sampler goes through the points of its space, and must be shown each that it has proposed."""
        return isinstance(self._base, (GridSampler, BruteForceSampler))

    def _view(self, study: optuna.Study, trial: FrozenTrial) -> optuna.Study:
        return _StudyWithRejected(study, trial) if isinstance(self._base, GPSampler) else study

    def _propose(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution], *, at_random: bool = False
    ) -> _Proposal:
        """One joint proposal of the inner sampler, or of a random one, with the parameters that ``build`` reads.

        A point that was rejected before is not built again.
        """
        inner = self._random if at_random else self.inner
        view = self._view(study, trial)
        inner_names = inner.infer_relative_search_space(view, trial).keys()
        drawn = inner.sample_relative(view, trial, {n: d for n, d in search_space.items() if n in inner_names})
        single = {name: _get_single_value(d) for name, d in _all_distributions(study).items() if d.single()}
        fixed: dict[str, Any] = single | trial.system_attrs.get("fixed_params", {}) | trial.params
        drawn = {name: value for name, value in drawn.items() if name not in fixed}
        if isinstance(self._base, GridSampler) and not at_random:  # its points are whole ones
            for name in search_space.keys() - fixed.keys():
                draft = _with_params(trial, study, {}, search_space)
                drawn[name] = inner.sample_independent(view, draft, name, search_space[name])
        while True:
            params = WatchedParams(drawn | fixed)
            workload: Workload | None = None
            rejected = self.guard.remembered(study, params, self._search.threshold)
            if rejected is not None and not fixed.keys() >= set(rejected.names):
                for used in rejected.names:
                    params[used]  # recorded as read, as build would
                return _Proposal(drawn, params, search_space, None, False, rejected.verdict)
            try:
                workload = build_watched(self._build, params)
                missing = params.missing
            except Exception as error:
                if is_missing_parameter(error, drawn | fixed):
                    missing = {error.args[0]}
                else:  # a parameter may be missing; otherwise the guard warns when it judges the trial
                    missing = set(search_space) - set(drawn) - set(fixed)
            required = next((name for name in search_space if name in missing), None)
            if required is None:
                break
            draft = _with_params(trial, study, drawn | fixed, search_space)
            drawn[required] = inner.sample_independent(view, draft, required, search_space[required])
        return _Proposal(drawn, params, search_space, workload, set(params.used()) <= set(fixed))

    @functools.cached_property
    def _random(self) -> BaseSampler:
        """Random fallback for a sampler that repeats itself. Its seed is fixed."""
        sampler = RandomSampler(seed=0)
        return PartialFixedSampler(self.inner._fixed_params, sampler) if isinstance(self.inner, PartialFixedSampler) else sampler

    def _check(self, workload: Workload) -> Verdict | None:
        """The verdict on ``workload``; None: it cannot be judged. It is launched then, and the guard warns at that point."""
        try:
            return self.guard.preview(workload, threshold=self._search.threshold)
        except Exception:
            return None

    def _accept(self, study: optuna.Study, trial: FrozenTrial, proposal: _Proposal) -> dict[str, Any]:
        workload = proposal.workload
        assert workload is not None
        decision = self.guard.settle(study, trial, proposal.watched, lambda: workload, self._search.threshold)
        with self._lock:
            self._search.launched(decision.verdict)
        return proposal.params

    def _reject(self, study: optuna.Study, trial: FrozenTrial, proposal: _Proposal, verdict: Verdict) -> None:
        """Record a proposal as a pruned trial, and report it to the inner sampler as one of its own."""
        with self._lock:
            self._search.rejected(verdict)
        storage, attributes = study._storage, study._storage.get_trial_system_attrs(trial._trial_id)
        params = {name: value for name, value in proposal.watched.all().items() if name in proposal.space}
        rejected = create_trial(
            state=TrialState.RUNNING,
            params=params,
            distributions={name: proposal.space[name] for name in params},
            user_attrs=attributes_of(verdict, self.guard.device.memory_bytes, self.guard.num_learnt)
            | {f"{PREFIX}:proposed_for": trial.number},
            system_attrs={key: attributes[key] for key in _GRID_KEYS if key in attributes},
        )
        trial_id = storage.create_new_trial(study._study_id, template_trial=rejected)
        rejected = storage.get_trial(trial_id)
        try:
            self.guard.write(study, rejected, {}, lambda: self.guard.constraints_of(study, verdict))
            self.guard.record(
                verdict,
                self.guard.trace(proposal.workload) if proposal.workload is not None else None,
                study=study.study_name,
                trial=rejected.number,
                params=params,
            )
            self.inner.after_trial(study, rejected, TrialState.PRUNED, None)
        finally:
            storage.set_trial_state_values(trial_id, TrialState.PRUNED)
        again = copy.copy(trial)
        again.number = rejected.number
        again.system_attrs = {key: value for key, value in attributes.items() if key not in _GRID_KEYS}
        self.inner.before_trial(study, again)

    def _moved_to_fit(self, study: optuna.Study, proposal: _Proposal) -> _Proposal | None:
        """The point nearest to the proposal on the way to the nearest launched trial that fits. None: none was launched."""
        names = proposal.watched.used().keys()
        drawn, launched = proposal.watched.all(), []
        for known in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.RUNNING)):
            ran = known.state == TrialState.COMPLETE or known.user_attrs.get(f"{PREFIX}:verdict") in ("launch", "repair")
            if ran and names <= known.params.keys():
                launched.append(known.params)
        space = {name: proposal.space[name] for name in names if name in proposal.space}
        launched.sort(key=lambda params: _distance(params, drawn, space))
        candidates = (self._between(proposal, goal, space) for goal in launched[:_GOALS])
        return next((moved for moved in candidates if moved is not None), None)

    def _between(self, proposal: _Proposal, goal: Mapping[str, Any], space: Mapping[str, BaseDistribution]) -> _Proposal | None:
        """The first point that fits on the way from a proposal to ``goal``; None if that does not fit itself."""
        best: _Proposal | None = None
        low, share, high = 0.0, 1.0, 1.0
        for _ in range(1 + _BISECTIONS):
            moved = proposal.moved(goal, share, space, self._build)
            verdict = None if moved.workload is None else self._check(moved.workload)
            if verdict is not None and verdict.action != "prune":
                best, high = moved, share
            elif best is None:
                return None
            else:
                low = share
            share = (low + high) / 2
        return best

    def _give_up(self, study: optuna.Study, trial: FrozenTrial, verdict: Verdict) -> None:
        if not _is_stopping(study) or not self._search.has_launched:
            self._search.warn_that_nothing_fits()
        if study._thread_local.in_optimize_loop:
            study.stop()
        raise self._pruned(study, trial, verdict)

    def _pruned(self, study: optuna.Study, trial: FrozenTrial, verdict: Verdict) -> optuna.TrialPruned:
        self.guard.reject(study, trial, verdict)
        return optuna.TrialPruned(f"nothing that was proposed fits: {verdict.reason}")

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A joint proposal and what it would run."""

    params: dict[str, Any]
    """Parameters for the trial, as the inner sampler drew them."""
    watched: WatchedParams
    """Drawn and fixed parameters, as ``build`` read them."""
    space: Mapping[str, BaseDistribution]
    workload: Workload | None
    """None: ``build`` failed, or reads a parameter that no trial has had."""
    is_fixed: bool
    """Whether the user fixed all parameters that ``build`` read. Such a proposal is not changed."""
    rejection: Verdict | None = None
    """Earlier verdict on the same point, which is then not built again."""

    def moved(self, goal: Mapping[str, Any], share: float, space: Mapping[str, BaseDistribution], build: Any) -> _Proposal:
        """The proposal with its drawn parameters moved by ``share`` of the way to ``goal``."""
        params = self.params | {
            name: _between(self.params[name], goal[name], share, space[name]) for name in space if name in self.params
        }
        watched = WatchedParams(self.watched.all() | params)
        try:
            workload = build_watched(build, watched)
        except Exception:
            workload = None
        return _Proposal(params, watched, self.space, workload, self.is_fixed)


class NewProposals(PerfGuardSampler):
    """Wraps the sampler of a GuardedStudy and draws again while it repeats a rejected proposal.

    Nothing else changes. The proposal is judged when the trial has suggested it, and becomes a trial whatever the verdict.
    """

    def __init__(self, inner: BaseSampler, guard: OptunaGuard, build: Build, search: Search) -> None:
        self.inner, self.guard = inner, guard
        self._build, self._search = build, search
        self._lock = threading.Lock()

    def _sample_feasible(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        num_repeats = 0
        while True:
            proposal = self._propose(study, trial, search_space, at_random=num_repeats >= _MOST_REPEATS)
            if proposal.rejection is None or isinstance(self._base, BruteForceSampler):
                return proposal.params
            if isinstance(self._base, GridSampler):
                self._reject(study, trial, proposal, proposal.rejection)
            else:
                with self._lock:
                    self._search.rejected(proposal.rejection)
                num_repeats += 1
            if num_repeats >= MOST_REJECTIONS_IN_A_ROW or self._search.is_over or _is_stopping(study):
                self._give_up(study, trial, proposal.rejection)


class _StudyWithRejected(optuna.Study):
    """A view of a study for the GP sampler. Rejected proposals appear as completed trials, so that it learns the constraints.

    The GP reads completed trials only (Optuna 5.0). A rejected proposal has no value, so it gets that of the nearest completed
    trial. Then the model of the objective learns nothing from it, and does not avoid the limit. A study without constraints
    has no other way to mark infeasible trials, so there it gets the worst value instead. The trial that is being sampled is
    left out of the running ones. Otherwise the GP would treat its last, rejected proposal as a running trial.
    """

    def __init__(self, study: optuna.Study, sampled: FrozenTrial) -> None:
        self.__dict__.update(study.__dict__)
        self._sampled = sampled.number

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        trials = super()._get_trials(deepcopy=deepcopy, states=states, use_cache=use_cache)
        trials = [trial for trial in trials if trial.number != self._sampled]
        if states is None or TrialState.COMPLETE not in states:
            return trials
        completed = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        pruned = super()._get_trials(deepcopy=False, states=(TrialState.PRUNED,))
        rejected = [trial for trial in pruned if trial.user_attrs.get(f"{PREFIX}:verdict") == "prune"]
        if completed:
            first = completed[0]
            trials += [
                _as_completed(trial, completed, self.directions)
                for trial in rejected[-_MOST_REJECTED_FOR_GP:]
                if trial.constraints.keys() == first.constraints.keys() and trial.params.keys() >= first.params.keys()
            ]
        return trials


def _as_completed(
    rejected: FrozenTrial, completed: Sequence[FrozenTrial], directions: Sequence[optuna.study.StudyDirection]
) -> FrozenTrial:
    twin = copy.copy(rejected)
    twin.state = TrialState.COMPLETE
    if rejected.constraints:
        twin.values = min(completed, key=lambda trial: _distance(trial.params, rejected.params, rejected.distributions)).values
    else:
        worst = (max if direction == optuna.study.StudyDirection.MINIMIZE else min for direction in directions)
        twin.values = [
            of(values) for of, values in zip(worst, zip(*(trial.values for trial in completed), strict=True), strict=True)
        ]
    return twin


def _is_stopping(study: optuna.Study) -> bool:
    """Whether ``study.stop()`` was called, as an exhausted grid does. Outside of ``optimize`` that has no effect."""
    return bool(study._thread_local.in_optimize_loop and study._stop_flag)


def _known_distributions(study: optuna.Study) -> dict[str, BaseDistribution]:
    """The newest distribution of every parameter that a trial of ``study`` has had, and that has more than one value."""
    return {name: distribution for name, distribution in _all_distributions(study).items() if not distribution.single()}


def _all_distributions(study: optuna.Study) -> dict[str, BaseDistribution]:
    known: dict[str, BaseDistribution] = {}
    for trial in study.get_trials(deepcopy=False):
        known |= trial.distributions
    return known


def _with_params(
    trial: FrozenTrial, study: optuna.Study, params: Mapping[str, Any], space: Mapping[str, BaseDistribution]
) -> FrozenTrial:
    """``trial`` as it would be after ``params`` were suggested."""
    draft = copy.copy(trial)
    draft.params = {name: value for name, value in params.items() if name in space}
    draft.distributions = {name: space[name] for name in draft.params}
    draft.system_attrs = study._storage.get_trial_system_attrs(trial._trial_id)
    return draft


def _unit(value: Any, distribution: BaseDistribution) -> float:
    """Position of a number in its range, 0 to 1. The scale is logarithmic if the number is drawn so."""
    low, high = float(distribution.low), float(distribution.high)  # type: ignore[attr-defined]
    if distribution.log:  # type: ignore[attr-defined]
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low) if high > low else 0.0


def _distance(a: Mapping[str, Any], b: Mapping[str, Any], space: Mapping[str, BaseDistribution]) -> float:
    """Sum of squared differences in units of each range; 1 for another category."""
    total = 0.0
    for name, distribution in space.items():
        if name not in a or name not in b:
            total += 1.0
        elif isinstance(distribution, CategoricalDistribution):
            total += float(a[name] != b[name])
        else:
            total += (_unit(a[name], distribution) - _unit(b[name], distribution)) ** 2
    return total


def _between(start: Any, goal: Any, share: float, distribution: BaseDistribution) -> Any:
    """The value at ``share`` of the way; a category changes at half of it, a step is rounded towards the goal."""
    if isinstance(distribution, CategoricalDistribution):
        return goal if share >= 0.5 else start
    log = bool(distribution.log)  # type: ignore[attr-defined]
    low, step = distribution.low, distribution.step  # type: ignore[attr-defined]
    value = math.exp(math.log(start) + share * math.log(goal / start)) if log else start + share * (goal - start)
    if step is not None:
        toward = math.ceil if goal > start else math.floor
        value = low + step * toward(round((value - low) / step, 9))
        value = min(value, max(start, goal)) if goal > start else max(value, min(start, goal))
    return int(value) if isinstance(goal, int) else float(value)
