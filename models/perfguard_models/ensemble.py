"""GuardNet for GPUs: the operator network and boosted trees on step features, averaged.

Both use the same physics in different ways. The network sums over operators and also knows single operators. The trees use
features of the whole step and the replay's peaks under each of cuDNN's algorithms. Their errors differ, so their mean is better
than either. Where they disagree, the interval is wider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.learner import TARGETS, Example, Predicted, State, column, sums_table
from perfguard_models.operator_network import OperatorNetwork
from perfguard_models.trees import Forest

if TYPE_CHECKING:
    from typing_extensions import Self

_HALF_GPUS = "half_gpus"
LIMIT = "limit"
"""Forests of memory, fitted only to whether a step fitted a card or ran out of memory."""
_WEIGHT = {"time": 2 / 3}
"""Weight of the networks. For time, a sum over operators generalises better to other architectures than trees on features of the
whole step. For memory, the trees generalise better."""


class GuardEnsemble:
    """See the module's docstring.

    Args:
        networks: how many networks. Their seeds differ. 0: trees alone.
        forests: how many forests for each quantity.
        epochs: of each network.
        trees: of each forest.
        learning_rate: of the trees.
        seed: the first one.
    """

    name: ClassVar[str] = "guardnet"
    views: ClassVar[tuple[str, ...]] = ("sums", "operators")

    def __init__(
        self,
        *,
        networks: int = 1,
        forests: int = 2,
        epochs: int = 14,
        trees: int = 400,
        learning_rate: float = 0.05,
        seed: int = 0,
    ) -> None:
        self.settings: dict[str, Any] = {
            "networks": networks, "forests": forests, "epochs": epochs,
            "trees": trees, "learning_rate": learning_rate, "seed": seed,
        }  # fmt: skip
        self.networks: list[OperatorNetwork] = []
        self.forests: dict[str, list[Forest]] = {}
        self.constant = 0.0
        self.half_gpus: list[str] = []
        """GPUs whose steps in half precision were timed."""

    def start(self, runs: Sequence[Example], target: str) -> npt.NDArray[np.float64]:
        """The baseline that the trees correct, as a logarithm."""
        if target == LIMIT:
            return np.log(np.exp(column(runs, "log_live")) + self.constant)
        if target == "memory":
            return np.log(np.exp(column(runs, "log_reserved")) + self.constant)
        return column(runs, "log_roofline") if target == "time" else np.zeros(len(runs))

    def parts(self, runs: Sequence[Example]) -> list[Predicted]:
        """The predictions of each member, networks first."""
        found = [network.predict(runs) for network in self.networks]
        half = column(runs, "half") > 0
        for index in range(self.settings["forests"]):
            part: Predicted = {}
            for target in TARGETS:
                part[target] = self._forest(target, index, runs) + self.start(runs, target)
            limited = self._forest(LIMIT, index, runs) + self.start(runs, LIMIT)
            # Where memory was measured it was in float32; for half precision there are only bounds.
            use = (half & ~np.isnan(limited)) | np.isnan(part["memory"])
            found.append(part | {"memory": np.where(use, limited, part["memory"])})
        return found

    def _forest(self, name: str, index: int, runs: Sequence[Example]) -> npt.NDArray[np.float64]:
        """The correction by one forest; NaN for single operators, because forests are fitted to whole steps. Shape: (n,)"""
        found = np.full(len(runs), np.nan)
        whole = [at for at, run in enumerate(runs) if not run.is_single]
        if name in self.forests and whole:
            found[whole] = self.forests[name][index].predict(sums_table([runs[at] for at in whole]))
        return found

    def predict(self, runs: Sequence[Example]) -> Predicted:
        """See :class:`perfguard_models.learner.Learner`."""
        return self.combine(self.parts(runs), runs)

    def combine(self, parts: Sequence[Predicted], runs: Sequence[Example]) -> Predicted:
        """The weighted mean of networks and forests.

        The networks alone predict the time of single operators and of float32. The forests alone predict it for half precision
        on a GPU that was not timed. From two cards a network learns the cards themselves, not the meaning of their figures.
        """
        number = len(self.networks)
        alone = np.array([run.is_single for run in runs]) | (column(runs, "half") == 0)
        new = ~alone & np.array([run.gpu not in self.half_gpus for run in runs])
        combined: Predicted = {}
        for target in TARGETS:
            combined[target] = np.mean([part[target] for part in parts[number:]], axis=0)
            if target in _WEIGHT and number:
                networks = np.mean([part[target] for part in parts[:number]], axis=0)
                both = _WEIGHT[target] * networks + (1 - _WEIGHT[target]) * combined[target]
                kept = np.where(new & ~np.isnan(combined[target]), combined[target], both)
                combined[target] = np.where(alone | np.isnan(kept), networks, kept)
        return combined

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """See :class:`perfguard_models.learner.Learner`."""
        tensors: State = {"constant": torch.tensor([self.constant], dtype=torch.float64)}
        for index, network in enumerate(self.networks):
            tensors |= {f"network{index}.{name}": value for name, value in network.state()[0].items()}
        for target, forests in self.forests.items():
            for index, forest in enumerate(forests):
                tensors |= forest.tensors(f"{target}{index}")
        return tensors, self.settings | {_HALF_GPUS: self.half_gpus}

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Self:
        """See :class:`perfguard_models.learner.Learner`."""
        made = cls(**{key: value for key, value in settings.items() if key != _HALF_GPUS})
        made.half_gpus = list(settings[_HALF_GPUS])
        made.constant = float(tensors["constant"][0])
        for index in range(settings["networks"]):
            prefix = f"network{index}."
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            made.networks.append(
                OperatorNetwork.from_state(own, {"epochs": settings["epochs"], "seed": settings["seed"] + index})
            )
        for target in (*TARGETS, LIMIT):
            if f"{target}0.roots" in tensors:
                made.forests[target] = [Forest.from_tensors(tensors, f"{target}{index}") for index in range(settings["forests"])]
        return made
