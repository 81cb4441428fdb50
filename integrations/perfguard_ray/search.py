"""The guarded searches of Ray Tune: any searcher, and random and grid search.

All of them ask one :class:`perfguard_ray.ledger.Ledger`, which judges, logs and remembers.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.tune.experiment import Trial
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Searcher
from ray.tune.search.search_algorithm import SearchAlgorithm
from ray.tune.search.search_generator import SearchGenerator
from ray.tune.search.util import _set_search_properties_backwards_compatible
from ray.tune.search.variant_generator import assign_value, format_vars, generate_variants, parse_spec_vars
from ray.tune.utils import merge_dicts
from ray.tune.utils.util import _atomic_save, _load_newest_checkpoint

from perfguard.exceptions import ConfigurationError, NothingFeasibleWarning
from perfguard.guard import Guard
from perfguard.workload import AnyBuild
from perfguard_ray.ledger import REPAIR_KEY, Entry, Ledger, make_ledger, number_of
from perfguard_ray.worker import Facts, asked_for

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from perfguard.devices import Device
    from perfguard.guard import GuardSettings


class _Guarded:
    """The state of a guarded search, less what the search inside saves by itself, and the guard, which goes with the Tuner."""

    ledger: Ledger
    _KEPT: tuple[str, ...]
    """The attributes that outlive a restart of the driver, beside the ledger."""

    def get_state(self) -> dict[str, Any]:
        return {"ledger": self.ledger.get_state(), **{name: copy.copy(getattr(self, name)) for name in self._KEPT}}

    def set_state(self, state: dict[str, Any]) -> None:
        self.ledger.set_state(state["ledger"])
        self.__dict__.update({name: state[name] for name in self._KEPT})


class PerfGuardSearcher(_Guarded, Searcher):
    """Wraps a searcher. A configuration that would break a budget is logged and reported to the searcher, but never runs.

    Three lines that a Tune user adds::

        search = PerfGuardSearcher(OptunaSearch(), gpu="a100", build=build, memory_budget="38GiB")
        Tuner(train, tune_config=TuneConfig(search_alg=search), run_config=RunConfig(callbacks=[PerfGuardCallback(search)]))
        with perfguard_ray.measure():  # in the training function, around its body

    ``num_samples`` counts the trials that run. After ``max_proposals`` configurations in a row that do not fit, the searcher
    proposes again when a running trial has ended. If none is running, the search ends with a warning. Each workload is judged
    once, and again when a trial has ended since. Until then it is rejected from memory. Before the search ends without a trial,
    the least doubtful configuration runs.

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

    _KEPT = ("_constants", "_inner_ids", "_least_doubtful_id", "_num_launched", "_worst", "_untold")

    def __init__(
        self,
        searcher: Searcher,
        gpu: str | Device = "auto",
        *,
        build: AnyBuild,
        guard: Guard | None = None,
        study: str | None = None,
        max_proposals: int = 100,
        **settings: Unpack[GuardSettings],
    ) -> None:
        if not isinstance(searcher, Searcher):
            raise ConfigurationError(
                f"PerfGuardSearcher wraps a ray.tune.search.Searcher such as OptunaSearch(), but got {searcher!r}. For random "
                f"and grid search use PerfGuardVariantGenerator(gpu=..., build=...) instead."
            )
        _check_at_least_one("max_proposals", max_proposals)
        self.searcher: Any = searcher
        self.ledger = make_ledger(build, guard, gpu, study, settings)
        self.max_proposals = max_proposals
        self._constants: dict[str, Any] = {}
        self._inner_ids: dict[str, str | None] = {}
        """The wrapped searcher's id of each trial that runs. None: the searcher was told that it is rejected, and it is tried."""
        self._num_launched = 0
        self._untold: list[str] = []
        """Its ids of rejected configurations that have no result yet."""
        self._least_doubtful_id = ""
        """Its id of the least doubtful configuration since the last launch. Empty: there is none."""
        self._worst: dict[str, float] = {}
        self._is_waiting = False
        """Whether all proposals were in vain, and no trial has ended since."""
        super().__init__(metric=searcher.metric, mode=searcher.mode)

    @property
    def metric(self) -> Any:
        """The wrapped searcher's."""
        return self.searcher.metric

    @property
    def mode(self) -> Any:
        """The wrapped searcher's."""
        return self.searcher.mode

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: object) -> bool:
        """Forward the call, and remember the constants of the space: suggestions lack them, but ``build`` may need them."""
        self._constants = copy.deepcopy(config)
        set_properties = self.searcher.set_search_properties
        return bool(_set_search_properties_backwards_compatible(set_properties, metric, mode, config, **spec))

    def suggest(self, trial_id: str) -> Any:
        """The wrapped searcher's next configuration that fits; None: not now; FINISHED: no more."""
        if self._is_waiting and self._inner_ids:
            return None
        what = ""
        counted = self.ledger.search
        for attempt in range(self.max_proposals):
            inner_id = trial_id if attempt == 0 else f"{trial_id}-{attempt}"
            suggestion = self.searcher.suggest(inner_id)
            if suggestion is None and counted.num_rejected and not self._inner_ids:  # it waits for a result, and nothing runs
                if (tried := self._try_least_doubtful(trial_id)) is not None:
                    return tried
                self._complete_rejected({"error": True})
                what = "waits for the results of proposals none of which fits"
                continue
            if suggestion == Searcher.FINISHED and counted.num_rejected and not counted.num_launched:
                return self._give_up(trial_id, f"has no more proposals: none of {counted.num_rejected} fits")
            if suggestion is None or suggestion == Searcher.FINISHED:
                return suggestion
            entry = self._judge(trial_id, suggestion)
            _set_constraints(self.searcher, inner_id, entry.verdict.margins)
            if not entry.rejected:
                return self._launch(trial_id, inner_id, suggestion, entry)
            if counted.least_doubtful is not None and counted.least_doubtful.params is suggestion:
                self._least_doubtful_id = inner_id
            self._turn_down(inner_id)
            what = f"proposed {counted.num_rejected} configurations in a row that do not fit"
        return self._give_up(trial_id, what)

    def _judge(self, trial_id: str, suggestion: Mapping[str, object]) -> Entry:
        number = self._num_launched + 1  # as Tune's SearchGenerator counts
        name = f"{getattr(self.ledger.build, 'trainable_name', 'trial')}_{trial_id}"  # as Tune makes it
        config = merge_dicts(self._constants, dict(suggestion))
        with asked_for(Facts(trial_id=trial_id, trial_name=name)):
            return self.ledger.judge(config, trial=number, trial_id=trial_id, proposed=suggestion)

    def _launch(self, trial_id: str, inner_id: str | None, suggestion: Mapping[str, object], entry: Entry) -> dict[str, Any]:
        self._num_launched += 1
        self._inner_ids[trial_id] = inner_id
        self.ledger.entries[trial_id] = entry
        return {**suggestion, **{key: value for key, value in entry.config.items() if key == REPAIR_KEY}}

    def _give_up(self, trial_id: str, what: str) -> str | dict[str, Any] | None:
        if self._inner_ids:
            self._is_waiting = True
            return None
        if (tried := self._try_least_doubtful(trial_id)) is not None:
            return tried
        self.ledger.warn_once(
            "infeasible",
            NothingFeasibleWarning,
            f"{type(self.searcher).__name__} {what} the budget of {self.ledger.guard.device.name}, so the search ends. "
            f"Narrow the search space, raise the budget, or raise max_proposals. The reasons are in the measurement log, under "
            f"{self.ledger.study!r}.",
        )
        return str(Searcher.FINISHED)

    def _try_least_doubtful(self, trial_id: str) -> dict[str, Any] | None:
        """Launch the least doubtful configuration before the search ends with nothing. None: there is none, or it was tried."""
        tried = self.ledger.search.last_try(self.ledger.guard)
        if tried is None:
            return None
        entry = self._judge(trial_id, tried)
        inner_id = self._least_doubtful_id
        if entry.rejected:
            return None
        if inner_id not in self._untold:
            return self._launch(trial_id, None, tried, entry)
        self._untold.remove(inner_id)
        for limiter in _limiters(self.searcher):
            limiter.live_trials.add(inner_id)
            limiter.num_unfinished_live_trials += 1
        return self._launch(trial_id, inner_id, tried, entry)

    def _turn_down(self, inner_id: str) -> None:
        if _optuna_trial(self.searcher, inner_id) is not None:
            self.searcher.on_trial_complete(inner_id)  # neither result nor error: OptunaSearch reports PRUNED to its study
            return
        # A limiter counts its proposals until it is notified of their end, which may be hours away (public since Ray 1.4).
        for limiter in _limiters(self.searcher):
            if inner_id in limiter.live_trials:
                limiter.live_trials.remove(inner_id)
                limiter.num_unfinished_live_trials -= 1
        self._untold.append(inner_id)
        self._score_rejected()

    def _score_rejected(self) -> None:
        if self._worst:
            self._complete_rejected({"result": {"training_iteration": 1, **self._worst}})

    def _complete_rejected(self, end: dict[str, Any]) -> None:
        """Complete the rejected proposals in the wrapped searcher. Its limiters have released them already."""
        limiters = _limiters(self.searcher)
        searcher = limiters[-1].searcher if limiters else self.searcher
        for inner_id in self._untold:
            searcher.on_trial_complete(inner_id, **copy.deepcopy(end))
        self._untold.clear()

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        inner_id = self._inner_ids.get(trial_id, trial_id)
        if inner_id is not None:
            self.searcher.on_trial_result(inner_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self._is_waiting = False
        inner_id = self._inner_ids.pop(trial_id, trial_id)
        entry = self.ledger.entries.get(trial_id)
        if inner_id is not None and entry is not None:  # it may have been judged after its start
            _set_constraints(self.searcher, inner_id, entry.verdict.margins)
        if inner_id is not None and entry is not None and entry.has_no_result:
            self._turn_down(inner_id)
            return
        if result and not error:
            self._remember_worst(result)
        if inner_id is not None:
            self.searcher.on_trial_complete(inner_id, result=result, error=error)
        self._score_rejected()

    def _remember_worst(self, result: Mapping[str, object]) -> None:
        """Record the worst value of each metric. Infeasible configurations get it as their score."""
        metrics, modes = ([given] if isinstance(given, str) else given or [] for given in (self.metric, self.mode))
        for metric, mode in zip(metrics, modes, strict=False):
            value = result.get(metric)
            if isinstance(value, (int, float)) and value == value:
                worse = max if mode == "min" else min
                self._worst[metric] = worse(value, self._worst.get(metric, value))

    def add_evaluated_point(self, parameters: dict[str, Any], value: float, *arguments: object, **options: object) -> Any:
        return self.searcher.add_evaluated_point(parameters, value, *arguments, **options)

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        return bool(self.searcher.set_max_concurrency(max_concurrent))

    def save(self, checkpoint_path: str) -> None:
        self.searcher.save(checkpoint_path)

    def restore(self, checkpoint_path: str) -> None:
        self.searcher.restore(checkpoint_path)

    def on_pause(self, trial_id: str) -> None:
        """Forward the call, which BOHB needs."""
        inner_id = self._inner_ids.get(trial_id, trial_id)
        if inner_id is not None:
            self.searcher.on_pause(inner_id)

    def on_unpause(self, trial_id: str) -> None:
        """Forward the call, which BOHB needs."""
        inner_id = self._inner_ids.get(trial_id, trial_id)
        if inner_id is not None:
            self.searcher.on_unpause(inner_id)


class PerfGuardVariantGenerator(_Guarded, SearchAlgorithm):
    """Tune's own random and grid search, with a guard before each trial. It is used as a :class:`PerfGuardSearcher` is.

    A point that does not fit is logged and replaced by another draw of its random parameters. So ``num_samples`` counts the
    trials that run. A grid point without random parameters is left out. If ``max_proposals`` draws in a row do not fit, and none
    before did, that part of the grid is given up. Without a grid, the whole space is given up. A warning reports it at the end.
    A grid point is judged once, unless the random parameters change the workload.

    Args:
        generator: a BasicVariantGenerator with your settings. None: one with Tune's defaults.
        gpu, build, guard, settings: as for :class:`PerfGuardSearcher`.
        study: name of the run in the measurement log. None: the experiment's name in Tune.
        max_proposals: how many draws in a row may be rejected.

    Raises:
        ConfigurationError: for invalid arguments.
    """

    CKPT_FILE_TMPL = "perfguard-variant-state-{}.pkl"
    _KEPT = ("_spec", "_feasible", "_hopeless", "_num_left_out")

    def __init__(
        self,
        generator: BasicVariantGenerator | None = None,
        gpu: str | Device = "auto",
        *,
        build: AnyBuild,
        guard: Guard | None = None,
        study: str | None = None,
        max_proposals: int = 100,
        **settings: Unpack[GuardSettings],
    ) -> None:
        if generator is not None and not isinstance(generator, BasicVariantGenerator):
            raise ConfigurationError(
                f"PerfGuardVariantGenerator wraps a BasicVariantGenerator, but got {generator!r}. "
                f"Wrap a Searcher such as OptunaSearch() in PerfGuardSearcher."
            )
        _check_at_least_one("max_proposals", max_proposals)
        self.generator = generator or BasicVariantGenerator()
        self.ledger = make_ledger(build, guard, gpu, study, settings)
        self.max_proposals = max_proposals
        self._named = study is not None
        self._spec: dict[str, Any] = {}
        self._feasible: set[Hashable] = set()
        """Parts of the grid of which a trial was launched."""
        self._hopeless: set[Hashable] = set()
        """Parts of the grid that are given up."""
        self._num_left_out = 0

    @property
    def metric(self) -> Any:
        """The metric of the TuneConfig."""
        return self.generator.metric

    @property
    def total_samples(self) -> int:
        """Trials to be made, less those that were left out."""
        return int(self.generator.total_samples) - self._num_left_out

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: object) -> bool:
        return bool(self.generator.set_search_properties(metric, mode, config, **spec))

    def add_configurations(self, experiments: Any) -> None:
        self.generator.add_configurations(experiments)
        (experiment,) = experiments if isinstance(experiments, list) else [experiments]
        self._spec = experiment.spec
        if not self._named:
            self.ledger.study = experiment.storage.experiment_dir_name

    def next_trial(self) -> Trial | None:
        """The next point that fits; None: not now, or no more."""
        left_out: Trial | None = None
        while (trial := self.generator.next_trial()) is not None:
            if self._part_of(trial) not in self._hopeless and (self._fits(trial) or self._redraw(trial)):
                return trial  # type: ignore[no-any-return]
            self.generator.on_trial_complete(trial.trial_id)
            self._num_left_out += 1
            left_out = trial
        if left_out is not None and self.generator.is_finished() and not self._feasible:
            tried = self.ledger.search.last_try(self.ledger.guard)
            if tried is not None:
                _become(left_out, dict(tried), {("config", name): value for name, value in tried.items()})
                if self._fits(left_out):
                    self._num_left_out -= 1
                    return left_out
        if self.generator.is_finished() and self._num_left_out:
            what = f"{self._num_left_out} of {self.generator.total_samples} points were left out"
            if not self._feasible:
                what = "Nothing in the search space fits, so no trial ran"
            self.ledger.warn_once(
                "infeasible",
                NothingFeasibleWarning,
                f"{what}: they do not fit the budget of {self.ledger.guard.device.name}. Narrow the space or raise the budget. "
                f"The reasons are in the measurement log, under {self.ledger.study!r}.",
            )
        return None

    def _fits(self, trial: Trial) -> bool:
        with asked_for(Facts.of(trial)):
            entry = self.ledger.judge(trial.config, trial=number_of(trial), trial_id=trial.trial_id)
        if entry.rejected:
            return False
        self._feasible.add(self._part_of(trial))
        self.ledger.entries[trial.trial_id] = entry
        if entry.config != trial.config:  # it is repaired
            trial.set_config(dict(entry.config))
        return True

    def _redraw(self, trial: Trial) -> bool:
        """Other values for the random parameters of ``trial``, until it fits; False: it has none, or none fit."""
        _, random_vars, grid_vars = parse_spec_vars(self._spec)
        if random_vars:
            fixed = copy.deepcopy(self._spec)
            for path, _ in grid_vars:
                assign_value(fixed, path, _value_at(trial.config, path[1:]))
            for _ in range(self.max_proposals - 1):
                # The generator's own stream of random numbers (private since Ray 1.9), so that a seed still fixes the run.
                random_state = getattr(self.generator, "_random_state", None)
                ((drawn, spec),) = generate_variants(fixed, random_state=random_state)
                _become(trial, spec["config"], drawn | {path: _value_at(spec, path) for path, _ in grid_vars})
                if self._fits(trial):
                    return True
        if (part := self._part_of(trial)) not in self._feasible:
            self._hopeless.add(part)
        return False

    def _part_of(self, trial: Trial) -> Hashable:
        """The grid values of ``trial``: what stays when it is drawn again."""
        _, _, grid_vars = parse_spec_vars(self._spec)
        return tuple(repr(_value_at(trial.config, path[1:])) for path, _ in grid_vars)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self.generator.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self.generator.on_trial_complete(trial_id, result=result, error=error)

    def is_finished(self) -> bool:
        return bool(self.generator.is_finished())

    def set_finished(self) -> None:
        self.generator.set_finished()

    def has_checkpoint(self, dirpath: str) -> bool:
        return bool(self.generator.has_checkpoint(dirpath))

    def save_to_dir(self, dirpath: str, *, session_str: str = "", **options: object) -> None:
        self.generator.save_to_dir(dirpath, session_str)
        name = self.CKPT_FILE_TMPL.format(session_str)
        _atomic_save(state=self.get_state(), checkpoint_dir=dirpath, file_name=name, tmp_file_name=f"tmp-{name}")

    def restore_from_dir(self, dirpath: str) -> None:
        self.generator.restore_from_dir(dirpath)
        state = _load_newest_checkpoint(dirpath, self.CKPT_FILE_TMPL.format("*"))
        if state is not None:
            self.set_state(state)


def saved_ledger(folder: Path) -> Mapping[str, Any] | None:
    """Return the state of the ledger that Tune has saved last in the ``folder`` of a run. None: this machine has none."""
    for template in (PerfGuardVariantGenerator.CKPT_FILE_TMPL, SearchGenerator.CKPT_FILE_TMPL):
        saved = _load_newest_checkpoint(str(folder), template.format("*"))
        if saved is not None:
            search = saved.get(f"name:{PerfGuardSearcher.__name__}", saved)
            return search.get("ledger")  # type: ignore[no-any-return]
    return None


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(f"{name} must be at least 1, but got {value!r}.")


def _limiters(searcher: object) -> list[Any]:
    """The ConcurrencyLimiters around a searcher, the outermost first."""
    limiters = []
    while isinstance(searcher, ConcurrencyLimiter):
        limiters.append(searcher)
        searcher = searcher.searcher
    return limiters


def _optuna_trial(searcher: object, inner_id: str) -> Any:
    """The Optuna trial behind a suggestion; None if the searcher at the core is not Optuna's. Private since Ray 1.4."""
    while hasattr(searcher, "searcher"):
        searcher = searcher.searcher
    return getattr(searcher, "_ot_trials", {}).get(inner_id)


def _set_constraints(searcher: object, inner_id: str, margins: Mapping[Any, float]) -> None:
    """Report constraints to samplers that model them (Optuna 5): the distance from feasibility, negative where it fits."""
    trial = _optuna_trial(searcher, inner_id)
    if not getattr(trial, "constraints", True):  # each is set once
        for quantity, margin in margins.items():
            trial.set_constraint(f"perfguard:{quantity}", margin)


def _become(trial: Trial, config: dict[str, Any], resolved: dict[tuple[str, ...], Any]) -> None:
    """Give a trial that is not yet Tune's another configuration."""
    trial.set_config(config)
    trial.evaluated_params = {"/".join(map(str, path[1:])): value for path, value in resolved.items()}
    trial.set_experiment_tag(f"{number_of(trial)}_{format_vars(resolved)}")


def _value_at(nested: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(operator.getitem, path, nested)
