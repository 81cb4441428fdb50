"""PerfGuardSearcher: wraps any searcher of Ray Tune and draws until a proposal fits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray.tune.search import ConcurrencyLimiter, Searcher
from ray.tune.search.util import _set_search_properties_backwards_compatible
from ray.tune.utils import merge_dicts

from perfguard.exceptions import ConfigurationError, NothingFeasibleWarning
from perfguard.guard import Guard
from perfguard.workload import Build
from perfguard_ray._ledger import REPAIR_KEY, Entry, make_ledger

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from perfguard.devices import Device
    from perfguard.guard import GuardSettings

DEFAULT_MAX_PROPOSALS = 100


class PerfGuardSearcher(Searcher):
    """Wraps a searcher. A configuration that would break a budget is logged and reported to the searcher, but never runs.

    Three lines that a Tune user adds::

        search = PerfGuardSearcher(OptunaSearch(), gpu="a100", build=build, memory_budget="38GiB")
        Tuner(train, tune_config=TuneConfig(search_alg=search), run_config=RunConfig(callbacks=[PerfGuardCallback(search)]))
        with perfguard_ray.measure():  # in the training function, around its body

    ``num_samples`` counts the trials that run. After ``max_proposals`` configurations in a row that do not fit, the searcher
    proposes again when a running trial has ended. If none is running, the search ends with a warning. Each configuration is
    judged once, and once more if a trial has ended since. Then it is rejected from memory.

    For a configuration that does not fit, Optuna gets a pruned trial with signed constraints, which its samplers model. The other
    searchers get the worst result so far, once there is one. They would ignore an error, or wait for its result.

    Args:
        searcher: any ``ray.tune.search.Searcher``, such as OptunaSearch or HyperOptSearch. A ConcurrencyLimiter of one is
            allowed.
        gpu: as for :class:`perfguard.Guard`. A catalog name such as "a100", "auto" or "cpu". With "auto" it is the GPU of the
            machine that runs the search. Name it if the workers have another.
        build: ``build(config) -> Workload``. The result is what a trial with this configuration would run.
        guard: an existing guard. It replaces ``gpu`` and ``settings``. Several runs may share it.
        study: name of the run in the measurement log. None: a new one.
        max_proposals: the most configurations in a row that may be rejected. After that the search waits for a trial to end.
        settings: further arguments of :class:`perfguard.Guard`: memory_budget, time_budget, risk, log and so on. With
            ``on_violation="repair"`` the training function finds what it has to change with :func:`perfguard_ray.repair_of`.

    Raises:
        ConfigurationError: for invalid arguments, and for a SearchAlgorithm, which is no Searcher.
    """

    def __init__(
        self,
        searcher: Searcher,
        gpu: str | Device = "auto",
        *,
        build: Build,
        guard: Guard | None = None,
        study: str | None = None,
        max_proposals: int = DEFAULT_MAX_PROPOSALS,
        **settings: Unpack[GuardSettings],
    ) -> None:
        if not isinstance(searcher, Searcher):
            raise ConfigurationError(
                f"PerfGuardSearcher wraps a ray.tune.search.Searcher such as OptunaSearch(), but got {searcher!r}. For random "
                f"and grid search use PerfGuardVariantGenerator(gpu=..., build=...) instead."
            )
        if max_proposals < 1:
            raise ConfigurationError(f"max_proposals must be at least 1, but got {max_proposals!r}.")
        self.searcher: Any = searcher
        self.ledger = make_ledger(build, guard, gpu, study, settings)
        self.max_proposals = max_proposals
        self._constants: dict[str, Any] = {}
        self._inner_ids: dict[str, str] = {}
        self._worst: dict[str, float] = {}
        self._untold: list[str] = []
        self._num_completed = 0
        self._num_launched = 0
        self._num_in_vain = 0
        self._gave_up_at: int | None = None
        super().__init__(metric=searcher.metric, mode=searcher.mode)

    @property
    def metric(self) -> Any:
        """The wrapped searcher's."""
        return self.searcher.metric

    @property
    def mode(self) -> Any:
        """The wrapped searcher's."""
        return self.searcher.mode

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Forward the call, and remember the constants of the space: suggestions lack them, but ``build`` may need them."""
        self._constants = copy.deepcopy(config)
        done: bool = _set_search_properties_backwards_compatible(
            self.searcher.set_search_properties, metric, mode, config, **spec
        )
        return done

    def suggest(self, trial_id: str) -> Any:
        """The wrapped searcher's next configuration that fits; None: not now; FINISHED: no more."""
        if self._gave_up_at == self._num_completed and self._inner_ids:
            return None  # nothing has changed since the last attempt
        what = ""
        for attempt in range(self.max_proposals):
            inner_id = trial_id if attempt == 0 else f"{trial_id}-{attempt}"
            suggestion = self.searcher.suggest(inner_id)
            if suggestion is None and self._num_in_vain and not self._inner_ids:  # it waits, and nothing runs
                self._complete_rejected({"error": True})
                what = "waits for the results of proposals none of which fits"
                continue
            if suggestion is None or suggestion == Searcher.FINISHED:
                return self._end(suggestion)
            number = self._num_launched + 1  # as Tune's SearchGenerator counts
            entry = self.ledger.judge(merge_dicts(self._constants, suggestion), trial=number, trial_id=trial_id)
            _tell_constraints(self.searcher, inner_id, entry.decision.verdict.margins)
            if not entry.rejected:
                return self._launch(trial_id, inner_id, suggestion, entry)
            self._turn_down(inner_id)
            what = f"proposed {self._num_in_vain} configurations in a row that do not fit"
        return self._give_up(what)

    def _launch(self, trial_id: str, inner_id: str, suggestion: Any, entry: Entry) -> Any:
        self._gave_up_at = None
        self._num_in_vain = 0
        self._num_launched += 1
        self._inner_ids[trial_id] = inner_id
        self.ledger.entries[trial_id] = entry
        repair = {key: value for key, value in entry.config.items() if key == REPAIR_KEY}
        return {**suggestion, **repair} if repair else suggestion

    def _end(self, suggestion: str | None) -> str | None:
        """The searcher has nothing now, or nothing more."""
        if suggestion is not None and self._num_in_vain and not self._num_launched:
            return self._give_up(f"has no more proposals: none of {self._num_in_vain} fits")
        return suggestion

    def _give_up(self, what: str) -> str | None:
        self._gave_up_at = self._num_completed
        if self._inner_ids:
            return None
        self.ledger.warn_once(
            "infeasible",
            NothingFeasibleWarning,
            f"{type(self.searcher).__name__} {what} the budget of {self.ledger.guard.device.name}, so the search ends. "
            f"Narrow the search space, raise the budget, or raise max_proposals. The reasons are in the measurement log, under "
            f"{self.ledger.study!r}.",
        )
        return str(Searcher.FINISHED)

    def _turn_down(self, inner_id: str) -> None:
        self._num_in_vain += 1
        if _optuna_trial(self.searcher, inner_id) is not None:
            self.searcher.on_trial_complete(inner_id)  # neither result nor error: OptunaSearch reports PRUNED to its study
            return
        _free_place(self.searcher, inner_id)
        self._untold.append(inner_id)
        if self._worst:
            self._complete_rejected({"result": {"training_iteration": 1, **self._worst}})

    def _complete_rejected(self, end: dict[str, Any]) -> None:
        """Complete the rejected proposals in the wrapped searcher. Its limiters have released them already."""
        searcher = _without_limiters(self.searcher)
        for inner_id in self._untold:
            searcher.on_trial_complete(inner_id, **copy.deepcopy(end))
        self._untold.clear()

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self.searcher.on_trial_result(self._inner_ids.get(trial_id, trial_id), result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self._num_completed += 1
        if result and not error:
            self._remember_worst(result)
        self.searcher.on_trial_complete(self._inner_ids.pop(trial_id, trial_id), result=result, error=error)
        if self._worst:
            self._complete_rejected({"result": {"training_iteration": 1, **self._worst}})

    def _remember_worst(self, result: Mapping[str, Any]) -> None:
        """Record the worst value of each metric. Infeasible configurations get it as their score."""
        metrics, modes = ([given] if isinstance(given, str) else given or [] for given in (self.metric, self.mode))
        for metric, mode in zip(metrics, modes, strict=False):
            value = result.get(metric)
            if isinstance(value, (int, float)) and value == value:
                worse = max if mode == "min" else min
                self._worst[metric] = worse(value, self._worst.get(metric, value))

    def add_evaluated_point(self, parameters: dict[str, Any], value: float, *arguments: Any, **options: Any) -> Any:
        return self.searcher.add_evaluated_point(parameters, value, *arguments, **options)

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        handled: bool = self.searcher.set_max_concurrency(max_concurrent)
        return handled

    def get_state(self) -> dict[str, Any]:
        """Everything but the wrapped searcher, which Tune saves by itself, and the guard, which goes with the Tuner."""
        names = ("_constants", "_inner_ids", "_worst", "_untold", "_num_completed", "_num_launched", "_num_in_vain")
        return {"ledger": self.ledger.get_state(), **{name: copy.deepcopy(getattr(self, name)) for name in names}}

    def set_state(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.ledger.set_state(state.pop("ledger"))
        self.__dict__.update(state)

    def save(self, checkpoint_path: str) -> None:
        self.searcher.save(checkpoint_path)

    def restore(self, checkpoint_path: str) -> None:
        self.searcher.restore(checkpoint_path)

    def on_pause(self, trial_id: str) -> None:
        """Forward the call, which BOHB needs."""
        self.searcher.on_pause(self._inner_ids.get(trial_id, trial_id))

    def on_unpause(self, trial_id: str) -> None:
        """Forward the call, which BOHB needs."""
        self.searcher.on_unpause(self._inner_ids.get(trial_id, trial_id))


def _without_limiters(searcher: Any) -> Any:
    while isinstance(searcher, ConcurrencyLimiter):
        searcher = searcher.searcher
    return searcher


def _free_place(searcher: Any, inner_id: str) -> None:
    """A limiter counts its proposals until it is notified of their end, which may be hours away (public since Ray 1.4)."""
    while isinstance(searcher, ConcurrencyLimiter):
        if inner_id in searcher.live_trials:
            searcher.live_trials.remove(inner_id)
            searcher.num_unfinished_live_trials -= 1
        searcher = searcher.searcher


def _optuna_trial(searcher: Any, inner_id: str) -> Any:
    """The Optuna trial behind a suggestion; None if the searcher at the core is not Optuna's. Private since Ray 1.4."""
    while hasattr(searcher, "searcher"):
        searcher = searcher.searcher
    return getattr(searcher, "_ot_trials", {}).get(inner_id)


def _tell_constraints(searcher: Any, inner_id: str, margins: Mapping[str, float]) -> None:
    """Report constraints to samplers that model them (Optuna 5): the distance from feasibility, negative where it fits."""
    set_constraint = getattr(_optuna_trial(searcher, inner_id), "set_constraint", None)
    if set_constraint is not None:
        for quantity, margin in margins.items():
            set_constraint(f"perfguard:{quantity}", margin)
