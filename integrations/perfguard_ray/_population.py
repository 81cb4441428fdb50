"""PerfGuardPopulationBasedTraining: population based training whose changes of running trials fit."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining

from perfguard.exceptions import ConfigurationError, UnguardedTrialWarning
from perfguard_ray._ledger import REPAIR_KEY, ledger_of, number_of

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController

_MAX_PERTURBATIONS = 100


class PerfGuardPopulationBasedTraining(PopulationBasedTraining):
    """Tune's population based training, with a guard on the configurations that it changes.

    Three lines that a Tune user adds::

        search = PerfGuardVariantGenerator(gpu="a100", build=build, memory_budget="38GiB")
        scheduler = PerfGuardPopulationBasedTraining(search, hyperparam_mutations={"batch_size": [64, 128, 256]})
        with perfguard_ray.measure():  # in the training function, around its body

    A trial that takes over the state of another trial also gets its configuration, with changes that no search sees. Here a
    change that does not fit is logged, and the same configuration is changed again. If ``max_perturbations`` changes do not fit,
    the trial continues with the unchanged configuration, which runs already. Your ``custom_explore_fn`` is still called.

    A trial keeps the resources that it had at its start. If a hyperparameter that changes the memory is mutated, give each trial
    a whole device instead of :func:`perfguard_ray.resources`. PB2 is not guarded, and its changes are only logged.

    Args:
        search: the PerfGuardVariantGenerator of the run. Tune allows no searcher with population based training.
        max_perturbations: how many changes in a row may be rejected.
        settings: the arguments of :class:`ray.tune.schedulers.PopulationBasedTraining`.

    Raises:
        ConfigurationError: for a ``search`` without a guard.
    """

    def __init__(self, search: Any, *, max_perturbations: int = _MAX_PERTURBATIONS, **settings: Any) -> None:
        if max_perturbations < 1:
            raise ConfigurationError(f"max_perturbations must be at least 1, but got {max_perturbations!r}.")
        super().__init__(**settings)
        self.ledger = ledger_of(search, who="PerfGuardPopulationBasedTraining")
        self.max_perturbations = max_perturbations

    def on_trial_add(self, tune_controller: TuneController, trial: Trial) -> None:
        missing = sorted(set(self._hyperparam_mutations) - set(trial.config))
        if missing:
            self.ledger.warn_once(
                "mutations",
                UnguardedTrialWarning,
                f"{', '.join(missing)} of hyperparam_mutations is missing in param_space, so its first value is chosen after the "
                f"guard has judged the trial. Put it in param_space too, for instance as tune.choice([...]).",
            )
        super().on_trial_add(tune_controller, trial)

    def _get_new_config(self, trial: Trial, trial_to_clone: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
        """Overrides what Tune's PB2 overrides, too (Ray 2.3 to 2.60)."""
        for _ in range(self.max_perturbations):
            config, operations = super()._get_new_config(trial, trial_to_clone)
            config.pop(REPAIR_KEY, None)  # that of the other configuration
            entry = self.ledger.judge(config, trial=number_of(trial), trial_id=trial.trial_id)
            if not entry.rejected:
                self.ledger.changes[trial.trial_id] = entry
                return dict(entry.config), operations
        return copy.deepcopy(trial_to_clone.config), {}
