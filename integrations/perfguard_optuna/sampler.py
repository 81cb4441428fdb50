"""PerfGuardSampler: proposes what is predicted to fit, and passes constraints on to the inner sampler.

Drawing again is not enough, because the inner sampler would not learn why its proposal was rejected. So each rejected proposal
becomes a PRUNED trial of the study with its constraints. TPE learns from it without a change. Then the inner sampler proposes
again. Each parameter that ``build`` reads is drawn. So a joint limit is judged on joint proposals, and a conditional space is
followed branch by branch.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, _get_single_value
from optuna.samplers import BaseSampler, BruteForceSampler, GPSampler, GridSampler, PartialFixedSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from perfguard.exceptions import ConfigurationError, UnguardedTrialError, UnguardedTrialWarning
from perfguard.verdict import Verdict
from perfguard.workload import AnyBuild, AnyWorkload, WatchedParams, is_missing_parameter
from perfguard_optuna.attributes import PREFIX, attributes_of, write
from perfguard_optuna.facts import asked_for
from perfguard_optuna.guard import OptunaGuard
from perfguard_optuna.pruner import PerfGuardPruner


class PerfGuardSampler(BaseSampler):
    """Wraps any Optuna sampler so that the study spends its trials on what is predicted to fit.

    Example:
        >>> pruner = PerfGuardPruner(gpu="a100", build=build)                                          # doctest: +SKIP
        >>> sampler = PerfGuardSampler(TPESampler(), pruner)                                           # doctest: +SKIP
        >>> study = optuna.create_study(sampler=sampler, pruner=pruner)                                # doctest: +SKIP

    What does not fit is in the study as a PRUNED trial, with the reason, but does not count for ``n_trials``. The first trial of
    a fresh study is the exception: the parameters' distributions are known only after it has suggested them.

    When nothing has fitted for ``max_proposals`` proposals or ``max_seconds``, the trial gets the least bad of them, and the
    pruner prunes it. A study that has launched nothing goes on to 300 proposals in a row, and ends with a NothingFeasibleWarning.

    Args:
        inner: the sampler that proposes.
        guard: the OptunaGuard that judges, or the PerfGuardPruner that has one.
        max_proposals: proposals for one trial.
        max_seconds: time for one trial's proposals.

    Raises:
        ConfigurationError: if a bound is not positive.
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
        if max_proposals < 1 or not max_seconds > 0:
            raise ConfigurationError(
                f"max_proposals and max_seconds must be positive, but got {max_proposals} and {max_seconds}."
            )
        self.inner = inner
        self.guard = guard
        self.judges = True
        """Whether new proposals are judged before they become trials."""
        self._given_build: AnyBuild | None = None
        self._max_proposals = max_proposals
        self._max_seconds = max_seconds
        # A sampler that repeats itself is replaced by a random one for a while. Its seed is fixed, so a study can be repeated.
        random = RandomSampler(seed=0)
        self._random: BaseSampler = random
        base = inner
        if isinstance(inner, PartialFixedSampler):
            self._random = PartialFixedSampler(inner._fixed_params, random)
            base = inner._base_sampler
        self._is_grid = isinstance(base, GridSampler)
        self._ticks_off = isinstance(base, (GridSampler, BruteForceSampler))
        """Whether the inner sampler goes through the points of its space, and must be shown each that it has proposed."""
        self._is_gp = isinstance(base, GPSampler)

    @classmethod
    def against_repeats(cls, inner: BaseSampler, guard: OptunaGuard, build: AnyBuild) -> PerfGuardSampler:
        """Return a sampler that draws again only while ``inner`` repeats a rejected proposal.

        A GuardedStudy uses it. A new proposal becomes a trial whatever the verdict, as without this sampler.
        """
        sampler = cls(inner, guard, max_proposals=300)
        sampler.judges = False
        sampler._given_build = build
        return sampler

    @property
    def _build(self) -> AnyBuild | None:
        """What proposals are judged by. While a GuardedStudy runs without a ``build``, its guard has one by capture."""
        return self._given_build or self.guard.build

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
        """Same as for the inner sampler. A trial that nobody has judged is counted, and the first is warned of."""
        self.inner.after_trial(study, trial, state, values)
        self.guard.session_of(study, trial).report_ended(state)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Same as for the inner sampler, because a single parameter cannot be judged."""
        return self.inner.sample_independent(self._view(study, trial), trial, param_name, param_distribution)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The inner sampler's space and every other parameter of earlier trials, because ``build`` may read it."""
        known = {name: distribution for name, distribution in _distributions(study).items() if not distribution.single()}
        return known | self.inner.infer_relative_search_space(self._view(study, trial), trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A joint proposal that is predicted to fit; see the class. If the guard fails, the inner sampler's own proposal."""
        try:
            if self._build is not None:  # else it is a plain study, whose objective nobody knows
                return self._search(study, trial, search_space)
        except UnguardedTrialError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            if self.guard.guard.strict:
                raise UnguardedTrialError(f"PerfGuardSampler could not guide the search: {cause}") from error
            message = f"PerfGuardSampler could not guide the search (shown once): {cause}"
            self.guard.guard.warn_once(UnguardedTrialWarning, message, about="sampler")
        return self.inner.sample_relative(study, trial, self.inner.infer_relative_search_space(study, trial))

    def _search(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """Propose until something fits, or until the bounds of the class. Return the parameters of the trial."""
        search = self.guard.search_of(study)
        ends_at = time.monotonic() + self._max_seconds
        num_rejected = num_repeats = 0
        least_bad: tuple[tuple[float, float], dict[str, Any]] = ((1.0, float("inf")), {})
        """Chance of breaking a limit and largest margin, with the parameters."""
        while True:
            # Five repeats in a row, and the sampler is stuck: then chance proposes.
            proposal = self._propose(study, trial, search_space, at_random=num_repeats >= 5)
            verdict = proposal.rejection or self._rejection_of(study, proposal)
            if verdict is None:
                if self.judges and proposal.workload is not None:
                    self.guard.session_of(study, trial).decide(proposal.params, proposal.workload)
                return proposal.drawn
            if proposal.rejection is None:
                search.remember(proposal.key, verdict, params=proposal.params.given)
            num_repeats = 0 if proposal.rejection is None or self._ticks_off else num_repeats + 1
            if num_repeats == 0:
                self._reject(study, trial, proposal, verdict)
            search.count(verdict)
            num_rejected += 1
            badness = verdict.p_violation, max(verdict.margins.values(), default=0.0)
            least_bad = min(least_bad, (badness, proposal.drawn), key=lambda known: known[0])
            is_stopping = bool(study._thread_local.in_optimize_loop and study._stop_flag)  # as an exhausted grid does
            if is_stopping or search.is_over:
                tried = self._end(study, is_stopping=is_stopping)
                return least_bad[1] if tried is None else {name: tried[name] for name in tried if name in search_space}
            is_asked_for = "fixed_params" in trial.system_attrs  # an enqueued point, which is no evidence about the space
            if time.monotonic() > ends_at or (num_rejected >= self._max_proposals and (search.num_launched or is_asked_for)):
                return least_bad[1]

    def _end(self, study: optuna.Study, *, is_stopping: bool) -> Mapping[str, Any] | None:
        """Return the parameters of the one rejected configuration that is still worth a trial. None: there is none, so it ends.

        Args:
            study: the study. Its loop stops.
            is_stopping: whether the sampler or the user has stopped it already.
        """
        search = self.guard.search_of(study)
        tried = search.last_try(self.guard.guard)
        if tried is not None:
            return tried
        if not is_stopping or not search.num_launched:
            search.warn_that_nothing_fits()
        if study._thread_local.in_optimize_loop:
            study.stop()
        return None

    def _rejection_of(self, study: optuna.Study, proposal: _Proposal) -> Verdict | None:
        """The verdict on a new proposal that does not fit. None: it fits, is not to be judged, or cannot be, and is launched."""
        if not self.judges or proposal.workload is None or proposal.is_fixed:
            return None
        try:
            verdict = self.guard.guard.preview(proposal.workload, study=study.study_name)
        except Exception:  # the guard warns when it decides on the trial
            return None
        return verdict if verdict.action == "prune" else None

    def _view(self, study: optuna.Study, trial: FrozenTrial) -> optuna.Study:
        return _StudyWithRejected(study, trial) if self._is_gp else study

    def _propose(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution], *, at_random: bool
    ) -> _Proposal:
        """One joint proposal of the inner sampler, or of a random one, with the parameters that ``build`` reads."""
        inner = self._random if at_random else self.inner
        view = self._view(study, trial)
        inner_names = inner.infer_relative_search_space(view, trial).keys()
        drawn = inner.sample_relative(view, trial, {n: d for n, d in search_space.items() if n in inner_names})
        single = {name: _get_single_value(d) for name, d in _distributions(study).items() if d.single()}
        fixed: dict[str, Any] = single | trial.system_attrs.get("fixed_params", {}) | trial.params
        drawn = {name: value for name, value in drawn.items() if name not in fixed}

        def draw(name: str) -> None:
            draft = copy.copy(trial)  # as it would be after the others were suggested
            known = {} if self._is_grid else drawn | fixed
            draft.params = {name: known[name] for name in search_space if name in known}
            draft.distributions = {name: search_space[name] for name in draft.params}
            draft.system_attrs = study._storage.get_trial_system_attrs(trial._trial_id)
            drawn[name] = inner.sample_independent(view, draft, name, search_space[name])

        if self._is_grid and not at_random:  # its points are whole ones
            for name in search_space.keys() - fixed.keys():
                draw(name)
        build = self._build
        assert build is not None
        while True:
            params = WatchedParams(drawn | fixed)
            with asked_for(study, trial):
                found = self.guard.guard.describe(build, params)
                workload = None
            if not isinstance(found, Exception):
                workload = found
                missing = params.missing
            elif is_missing_parameter(found, params.given):
                missing = {found.args[0]}
            else:  # it may mean a missing parameter, too; if it does not, the guard warns when it judges the trial
                missing = search_space.keys() - drawn.keys() - fixed.keys()
            names = [name for name in search_space if name not in drawn and name not in fixed]
            needed = [name for name in names if name in missing]
            if not needed:
                key = self.guard.guard.key_of(found, params.used)
                is_fixed = params.used.keys() <= fixed.keys()
                known = None if is_fixed else self.guard.search_of(study).recall(key)
                return _Proposal(drawn, params, search_space, key, workload, is_fixed, None if known is None else known.verdict)
            # A brute-force search expects its parameters in the order in which the objective suggests them.
            for name in names[: names.index(needed[0]) + 1] if self._ticks_off and not at_random else needed[:1]:
                draw(name)

    def _reject(self, study: optuna.Study, trial: FrozenTrial, proposal: _Proposal, verdict: Verdict) -> None:
        """Record a proposal as a pruned trial, and report it to the inner sampler as one of its own."""
        guard = self.guard
        storage = study._storage
        attributes = storage.get_trial_system_attrs(trial._trial_id)
        # A GridSampler knows by these system attributes which points it has visited (Optuna 5.0).
        grid: dict[str, Any] = {key: attributes[key] for key in ("grid_id", "search_space") if key in attributes}
        params = {name: proposal.params.given[name] for name in proposal.space if name in proposal.params.given}
        written = attributes_of(verdict, guard.device) | {"proposed_for": trial.number}
        rejected = create_trial(
            state=TrialState.RUNNING,
            params=params,
            distributions={name: proposal.space[name] for name in params},
            user_attrs={f"{PREFIX}{name}": value for name, value in written.items()},
            system_attrs=grid,
        )
        trial_id = storage.create_new_trial(study._study_id, template_trial=rejected)
        rejected = storage.get_trial(trial_id)
        try:
            write(study, rejected, {}, guard.constraints_of(study, verdict.margins))
            graph = None if proposal.workload is None else guard.guard.trace(proposal.workload)
            decision = guard.guard.record(verdict, graph, study=study.study_name, trial=rejected.number, params=params)
            write(study, rejected, {"guard_s": decision.verdict.guard_s})
            self.inner.after_trial(study, rejected, TrialState.PRUNED, None)
        finally:
            storage.set_trial_state_values(trial_id, TrialState.PRUNED)
        again = copy.copy(trial)
        again.number = rejected.number
        again.system_attrs = {key: value for key, value in attributes.items() if key not in grid}
        self.inner.before_trial(study, again)


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A joint proposal and what it would run."""

    drawn: dict[str, Any]
    """Parameters for the trial, as the inner sampler drew them."""
    params: WatchedParams
    """Drawn and fixed parameters, as ``build`` read them."""
    space: Mapping[str, BaseDistribution]
    key: Hashable
    """By which a rejection of it is remembered."""
    workload: AnyWorkload | None = None
    """None: ``build`` failed, or reads a parameter that no trial has had."""
    is_fixed: bool = False
    """Whether the user fixed all parameters that ``build`` read. Such a proposal is not changed."""
    rejection: Verdict | None = None
    """Earlier verdict on the same workload, which is then not judged again."""


class _StudyWithRejected(optuna.Study):
    """A view of a study for the GP sampler. Rejected proposals appear as completed trials, so that it learns the constraints.

    The GP reads completed trials only (Optuna 5.0). A rejected proposal has no value, so it gets the median of the completed
    ones, from which the model of the objective learns least. A study without constraints has no other way to mark infeasible
    trials, so there it gets the worst value instead. The trial that is being sampled is left out of the running ones. Otherwise
    the GP would treat its last, rejected proposal as a running trial.
    """

    def __init__(self, study: optuna.Study, sampled: FrozenTrial) -> None:
        self.__dict__.update(study.__dict__)
        self._sampled = sampled.number

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        trials = super()._get_trials(deepcopy=deepcopy, states=states, use_cache=use_cache)
        trials = [trial for trial in trials if trial.number != self._sampled]
        completed = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        if not completed or states is None or TrialState.COMPLETE not in states:
            return trials
        first = completed[0]
        values = list(zip(*(trial.values for trial in completed), strict=True))
        if first.constraints:
            stand_in = [statistics.median(of_one) for of_one in values]
        else:
            is_minimized = [direction == optuna.study.StudyDirection.MINIMIZE for direction in self.directions]
            stand_in = [(max if low else min)(of_one) for low, of_one in zip(is_minimized, values, strict=True)]
        pruned = super()._get_trials(deepcopy=False, states=(TrialState.PRUNED,))
        rejected = [trial for trial in pruned if trial.user_attrs.get(f"{PREFIX}verdict") == "prune"]
        for trial in rejected[-100:]:  # the cost of a GP grows with the cube of the trials
            if trial.constraints.keys() == first.constraints.keys() and trial.params.keys() >= first.params.keys():
                twin = copy.copy(trial)
                twin.state = TrialState.COMPLETE
                twin.values = stand_in
                trials.append(twin)
        return trials


def _distributions(study: optuna.Study) -> dict[str, BaseDistribution]:
    """The newest distribution of every parameter that a trial of ``study`` has had."""
    known: dict[str, BaseDistribution] = {}
    for trial in study.get_trials(deepcopy=False):
        known |= trial.distributions
    return known
