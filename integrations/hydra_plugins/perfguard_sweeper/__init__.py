"""The sweeper ``hydra/sweeper: perfguard``, where Hydra looks for plugins.

Hydra imports this file at the start of every application, so it imports Hydra alone. What it does is in :mod:`perfguard_hydra`.
"""

# No `from __future__ import annotations`: Hydra runs this file before it is in `sys.modules`, where dataclasses would look the
# names of types up (Hydra 1.3).

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from omegaconf import MISSING, DictConfig, OmegaConf

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction

    from perfguard_hydra import GuardedSweep

SAMPLERS = {
    "tpe": {"_target_": "optuna.samplers.TPESampler", "seed": None},
    "random": {"_target_": "optuna.samplers.RandomSampler", "seed": None},
    "gp": {"_target_": "optuna.samplers.GPSampler", "seed": None},
    "cmaes": {"_target_": "optuna.samplers.CmaEsSampler", "seed": None},
    "nsgaii": {"_target_": "optuna.samplers.NSGAIISampler", "seed": None},
    "grid": {"_target_": "optuna.samplers.GridSampler", "_partial_": True},
}
"""``hydra/sweeper/sampler``, by the names of Hydra's Optuna sweeper."""


@dataclass
class PerfGuardSweeperConf:
    """The configuration ``hydra.sweeper``. The fields are those of Hydra's Optuna sweeper, and two of the guard."""

    _target_: str = "hydra_plugins.perfguard_sweeper.PerfGuardSweeper"
    defaults: list[Any] = field(default_factory=lambda: [{"sampler": "tpe"}])
    sampler: Any = MISSING  # another value would take the place of the one in the defaults list
    direction: Any = "minimize"
    """"minimize" or "maximize", or a list of these."""
    storage: Any = None
    study_name: Any = None
    n_trials: int = 20
    n_jobs: int = 2
    max_failure_rate: float = 0.0
    params: Any = None
    """The search space, by key, as text: ``{lr: "interval(1e-5, 1e-2)"}``."""
    custom_search_space: Any = None
    gpu: str = "auto"
    """The guarded device."""
    guard: dict[str, Any] = field(default_factory=dict)
    """The other arguments of ``perfguard.Guard``, such as ``{memory_budget: 38GiB, time_budget: 2h}``."""


class PerfGuardSweeper(Sweeper):
    """A sweeper over Optuna that launches no job which cannot run. The arguments are the fields of the configuration."""

    def __init__(self, **settings: object) -> None:
        self._settings = settings
        self._sweep: GuardedSweep | None = None

    def setup(self, *, hydra_context: "HydraContext", task_function: "TaskFunction", config: DictConfig) -> None:
        from perfguard_hydra import GuardedSweep, SweepSettings  # loads Optuna

        plain: dict[str, Any] = {
            name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for name, value in self._settings.items()
        }
        directions = plain.pop("direction")
        plain["directions"] = [directions] if isinstance(directions, str) else directions
        plain["params"] = plain["params"] or {}
        settings = SweepSettings(**plain)
        self._sweep = GuardedSweep(settings, config=config, context=hydra_context, task=task_function)

    def sweep(self, arguments: Sequence[str]) -> None:
        assert self._sweep is not None, "Hydra calls setup first"
        self._sweep.run(arguments)


def _register() -> None:
    store = ConfigStore.instance()
    store.store(group="hydra/sweeper", name="perfguard", node=PerfGuardSweeperConf, provider="perfguard")
    known = store.repo.get("hydra", {}).get("sweeper", {}).get("sampler", {})
    for name, node in SAMPLERS.items():
        if f"{name}.yaml" not in known:  # else Hydra's Optuna sweeper is installed, too, and its own stay
            store.store(group="hydra/sweeper/sampler", name=name, node=node, provider="perfguard")


_register()
