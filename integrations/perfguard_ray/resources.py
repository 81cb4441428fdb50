"""resources: the resource request of a trial, from its prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray.tune import PlacementGroupFactory

from perfguard.devices import mig_profiles, smallest_profile
from perfguard.exceptions import ConfigurationError, UnguardedTrialWarning
from perfguard.predictor import Prediction
from perfguard.risk_budget import SMALL_CHANCE
from perfguard_ray.ledger import InThisProcess, Ledger, ledger_of


def resources(search: object, *, cpus: float = 1, mig: bool = False) -> TrialResources:
    """A function for ``tune.with_resources``. It gives each trial the part of a GPU that its predicted memory needs.

    Example:
        >>> train = tune.with_resources(train, perfguard_ray.resources(search, cpus=2))             # doctest: +SKIP

    A trial stays under the requested memory with a chance of 95%. Small trials share a card, and large ones get a whole
    card. Ray never assigns more than a card. Ray does not limit the memory that a trial takes, but
    ``torch.cuda.set_per_process_memory_fraction`` does.

    - On a GPU: ``{"CPU": cpus, "GPU": 0.37}``.
    - With ``mig``: ``{"CPU": cpus, "mig-2g.10gb": 1}``. The profile is the smallest one that fits, or the largest if none fits.
      Ray does not know MIG. So start each node with its profiles: ``ray start --resources='{"mig-2g.10gb": 3}'``.
    - On a CPU: ``{"CPU": cpus, "memory": 2 ** 31}``. This is Ray's own resource for main memory.

    Args:
        search: the PerfGuardSearcher or PerfGuardVariantGenerator of the run.
        cpus: processors of a trial.
        mig: the GPUs are split by MIG.

    Raises:
        ConfigurationError: for ``mig`` with a GPU that MIG cannot split, and for a ``search`` without a guard.
    """
    ledger = ledger_of(search, who="perfguard_ray.resources")
    device = ledger.guard.device
    if mig and not mig_profiles(device):
        raise ConfigurationError(f"mig=True, but MIG cannot split {device.name}. Leave it out.")
    return TrialResources(ledger, cpus, mig)


class TrialResources:
    """Result of :func:`resources`: a function of the configuration, for the process that made it, the driver.

    It travels to the workers with the trainable, and comes back to the driver as a copy (Tune keeps trainables pickled), but the
    guard stays where it is.
    """

    def __init__(self, ledger: Ledger, cpus: float, mig: bool) -> None:
        self._here: InThisProcess | None = InThisProcess(ledger)
        self._cpus = cpus
        self._mig = mig

    @property
    def _ledger(self) -> Ledger:
        if self._here is None:
            raise ConfigurationError(
                "The resources of a trial were requested outside the process that called perfguard_ray.resources(search). "
                "Call it in the script that calls Tuner.fit() or Tuner.restore()."
            )
        return self._here.ledger

    def __call__(self, config: dict[str, Any]) -> PlacementGroupFactory:
        return PlacementGroupFactory([self.of(config)])

    def of(self, config: Mapping[str, object]) -> dict[str, float]:
        """The resources of a trial with ``config``, as Ray names them. All of a device, if it cannot be predicted."""
        prediction = self._prediction(config)
        guard = self._ledger.guard
        device = guard.device
        needed_bytes = device.memory_bytes if prediction is None else prediction.peak_memory.quantile(1 - SMALL_CHANCE)
        own: dict[str, float] = {"CPU": self._cpus}
        if device.kind == "cpu":
            return own if prediction is None else own | {"memory": math.ceil(needed_bytes)}
        if self._mig:
            profile = smallest_profile(device, needed_bytes) or mig_profiles(device)[-1]
            return own | {f"mig-{profile.name}": 1}
        hundredths = math.ceil(100 * needed_bytes / device.memory_bytes)  # rounded up, so the share is never too small
        return own | {"GPU": min(1.0, hundredths / 100)}

    def _prediction(self, config: Mapping[str, object]) -> Prediction | None:
        """The prediction of the decision on this configuration, if it was just made. Otherwise a new one, which is not logged."""
        ledger = self._ledger
        for entry in reversed(ledger.entries.values()):
            if entry.config == config:
                return entry.verdict.prediction
        try:
            found = ledger.found(config)
            if isinstance(found, Exception):
                raise found
            return ledger.guard.preview(found, study=ledger.study).prediction
        except Exception as error:
            ledger.warn_once(
                "resources",
                UnguardedTrialWarning,
                f"PerfGuard could not predict a trial, which requests a whole device (shown once): "
                f"{type(error).__name__}: {error}",
            )
            return None
