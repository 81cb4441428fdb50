"""PerfGuardVariantGenerator: plain random and grid search, without the points that do not fit."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ray.tune.experiment import Trial
from ray.tune.search import BasicVariantGenerator
from ray.tune.search.search_algorithm import SearchAlgorithm
from ray.tune.search.variant_generator import assign_value, format_vars, generate_variants, parse_spec_vars
from ray.tune.utils.util import _atomic_save, _load_newest_checkpoint

from perfguard.exceptions import ConfigurationError, NothingFeasibleWarning
from perfguard.guard import Guard
from perfguard.workload import Build
from perfguard_ray._ledger import make_ledger, number_of
from perfguard_ray._searcher import DEFAULT_MAX_PROPOSALS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from perfguard.devices import Device
    from perfguard.guard import GuardSettings


class PerfGuardVariantGenerator(SearchAlgorithm):
    """Tune's own random and grid search, with a guard before each trial.

    Three lines that a Tune user adds::

        search = PerfGuardVariantGenerator(gpu="a100", build=build, memory_budget="38GiB")
        Tuner(train, tune_config=TuneConfig(search_alg=search), run_config=RunConfig(callbacks=[PerfGuardCallback(search)]))
        with perfguard_ray.measure():  # in the training function, around its body

    A point that does not fit is logged and replaced by another draw of its random parameters. So ``num_samples`` counts the
    trials that run. A grid point without random parameters is left out. If ``max_proposals`` draws in a row do not fit, and none
    before did, that part of the grid is given up. Without a grid, the whole space is given up. A warning reports it at the end.
    A grid point is judged once, unless the random parameters change the workload.

    Args:
        generator: a BasicVariantGenerator with your settings. None: one with Tune's defaults.
        gpu: as for :class:`perfguard.Guard`. A catalog name such as "a100", "auto" or "cpu".
        build: ``build(config) -> Workload``. The result is what a trial with this configuration would run.
        guard: an existing guard. It replaces ``gpu`` and ``settings``.
        study: name of the run in the measurement log. None: the experiment's name in Tune.
        max_proposals: how many draws in a row may be rejected.
        settings: further arguments of :class:`perfguard.Guard`, as for :class:`PerfGuardSearcher`.

    Raises:
        ConfigurationError: for invalid arguments.
    """

    CKPT_FILE_TMPL = "perfguard-variant-state-{}.pkl"

    def __init__(
        self,
        generator: BasicVariantGenerator | None = None,
        gpu: str | Device = "auto",
        *,
        build: Build,
        guard: Guard | None = None,
        study: str | None = None,
        max_proposals: int = DEFAULT_MAX_PROPOSALS,
        **settings: Unpack[GuardSettings],
    ) -> None:
        if generator is not None and not isinstance(generator, BasicVariantGenerator):
            raise ConfigurationError(
                f"PerfGuardVariantGenerator wraps a BasicVariantGenerator, but got {generator!r}. "
                f"Wrap a Searcher such as OptunaSearch() in PerfGuardSearcher."
            )
        if max_proposals < 1:
            raise ConfigurationError(f"max_proposals must be at least 1, but got {max_proposals!r}.")
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
        self._num_launched = 0

    @property
    def metric(self) -> Any:
        """The metric of the TuneConfig."""
        return self.generator.metric

    @property
    def total_samples(self) -> int:
        """Trials to be made, less those that were left out."""
        return int(self.generator.total_samples) - self._num_left_out

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        done: bool = self.generator.set_search_properties(metric, mode, config, **spec)
        return done

    def add_configurations(self, experiments: Any) -> None:
        self.generator.add_configurations(experiments)
        (experiment,) = experiments if isinstance(experiments, list) else [experiments]
        self._spec = experiment.spec
        if not self._named:
            self.ledger.study = experiment.storage.experiment_dir_name

    def next_trial(self) -> Trial | None:
        """The next point that fits; None: not now, or no more."""
        while (trial := self.generator.next_trial()) is not None:
            if self._fits(trial) or self._redraw(trial):
                self._num_launched += 1
                return trial  # type: ignore[no-any-return]
            self.generator.on_trial_complete(trial.trial_id)
            self._num_left_out += 1
        if self.generator.is_finished():
            self._report_left_out()
        return None

    def _fits(self, trial: Trial) -> bool:
        if self._part_of(trial) in self._hopeless:
            return False
        entry = self.ledger.judge(trial.config, trial=number_of(trial), trial_id=trial.trial_id, once_a_workload=True)
        if entry.rejected:
            return False
        self._feasible.add(self._part_of(trial))
        self.ledger.entries[trial.trial_id] = entry
        if entry.config != trial.config:  # it is repaired
            trial.set_config(dict(entry.config))
        return True

    def _redraw(self, trial: Trial) -> bool:
        """Other values for the random parameters of ``trial``, until it fits; False: it has none, or none fit."""
        part = self._part_of(trial)
        if part in self._hopeless:
            return False
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
        if part not in self._feasible:
            self._hopeless.add(part)
        return False

    def _part_of(self, trial: Trial) -> Hashable:
        """The grid values of ``trial``: what stays when it is drawn again."""
        _, _, grid_vars = parse_spec_vars(self._spec)
        return tuple(repr(_value_at(trial.config, path[1:])) for path, _ in grid_vars)

    def _report_left_out(self) -> None:
        if not self._num_left_out:
            return
        if self._num_launched:
            what = f"{self._num_left_out} of {self.generator.total_samples} points were left out"
        else:
            what = "Nothing in the search space fits, so no trial ran"
        self.ledger.warn_once(
            "infeasible",
            NothingFeasibleWarning,
            f"{what}: they do not fit the budget of {self.ledger.guard.device.name}. Narrow the space or raise the budget. "
            f"The reasons are in the measurement log, under {self.ledger.study!r}.",
        )

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self.generator.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self.generator.on_trial_complete(trial_id, result=result, error=error)

    def is_finished(self) -> bool:
        return bool(self.generator.is_finished())

    def set_finished(self) -> None:
        self.generator.set_finished()

    def get_state(self) -> dict[str, Any]:
        """Everything but the generator, which saves itself, and the guard, which goes with the Tuner."""
        names = ("_spec", "_feasible", "_hopeless", "_num_left_out", "_num_launched")
        return {"ledger": self.ledger.get_state(), **{name: getattr(self, name) for name in names}}

    def set_state(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.ledger.set_state(state.pop("ledger"))
        self.__dict__.update(state)

    def has_checkpoint(self, dirpath: str) -> bool:
        return bool(self.generator.has_checkpoint(dirpath))

    def save_to_dir(self, dirpath: str, *, session_str: str = "", **options: Any) -> None:
        self.generator.save_to_dir(dirpath, session_str)
        name = self.CKPT_FILE_TMPL.format(session_str)
        _atomic_save(state=self.get_state(), checkpoint_dir=dirpath, file_name=name, tmp_file_name=f"tmp-{name}")

    def restore_from_dir(self, dirpath: str) -> None:
        self.generator.restore_from_dir(dirpath)
        state = _load_newest_checkpoint(dirpath, self.CKPT_FILE_TMPL.format("*"))
        if state is not None:
            self.set_state(state)


def _become(trial: Trial, config: dict[str, Any], resolved: dict[tuple[str, ...], Any]) -> None:
    """Give a trial that is not yet Tune's another configuration."""
    trial.set_config(config)
    trial.evaluated_params = {"/".join(map(str, path[1:])): value for path, value in resolved.items()}
    number = str(trial.experiment_tag).partition("_")[0]
    trial.set_experiment_tag(f"{number}_{format_vars(resolved)}")


def _value_at(nested: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        nested = nested[key]
    return nested
