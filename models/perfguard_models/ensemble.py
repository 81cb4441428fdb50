"""GuardNet for GPUs: the operator network and boosted trees on the sums, averaged.

The two see the same physics in different ways. The network adds up operators and knows single operators too; the trees see the
whole and the replay's peaks under each of cuDNN's algorithms. Their errors differ, so their mean is better than either, and
where they part from each other the answer is less sure.

Most GPUs of the tables have no reading of memory: it is only known that a batch fitted and that the next one did not. Such a
pair says between what the true factor on the replay's live bytes must lie (not on its reserved bytes: short of memory, the
allocator gives its cache back before it fails). The trees are fitted to the middle of these intervals first, then to their own
answers moved to the nearest end where they lie outside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.baselines import column, sums_table
from perfguard_models.dataset import ALL_TABLES, TARGETS, Run
from perfguard_models.learner import OnEpoch, Predicted, State, labels_of
from perfguard_models.operator_network import OperatorNetwork
from perfguard_models.trees import Forest, forest_of_boosting

if TYPE_CHECKING:
    from typing_extensions import Self

_FEWEST_ROWS = 50
_HALF_GPUS = "half_gpus"
_ROUNDS = 2
_LIMIT = "limit"
"""Forests of memory that have heard only what fitted a card and what did not."""
_WEIGHT = {"time": 2 / 3}
"""Of the networks. A sum over operators carries over to other networks better than what trees see of the whole; of memory it is
the other way round."""
_QUANTILE = 0.45
"""Of memory: a relative error counts what is too high for more than what is too low."""
_CONSTANTS = np.linspace(0, 3 * 2**30, 97)
_FACTORS = math.log(0.5), math.log(4.0)
"""Ends for intervals that are open on one side."""


class _Interval(NamedTuple):
    """Where the logarithm of measured over computed lies. Shapes: (n,); equal where it was measured."""

    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        return np.asarray(np.isfinite(self.low) | np.isfinite(self.high))


class GuardEnsemble:
    """See the module's docstring.

    Args:
        networks: how many networks, of different seeds; 0: trees alone.
        forests: how many forests for each quantity.
        epochs: of each network.
        trees: of each forest.
        learning_rate: of the trees.
        seed: the first one.
    """

    name: ClassVar[str] = "guardnet"
    views: ClassVar[tuple[str, ...]] = ("sums", "operators")
    tables: ClassVar[tuple[str, ...]] = ALL_TABLES

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
        self._networks: list[OperatorNetwork] = []
        self._forests: dict[str, list[Forest]] = {}
        self._constant = 0.0
        self._half_gpus: list[str] = []
        """GPUs whose steps in half precision were timed."""

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None, checkpoint: Path | None = None) -> None:
        """See :class:`perfguard_models.learner.Learner`."""
        whole = [run for run in runs if not is_single(run)]
        self._constant = _constant_of(whole)
        half = column(whole, "half") > 0 if whole else ()
        self._half_gpus = sorted({run.gpu for run, is_half in zip(whole, half, strict=True) if is_half and "time" in run.labels})
        for target in TARGETS if whole else ():
            measured = labels_of(whole, target) - self._start(whole, target)
            self._fit_forests(target, whole, _Interval(measured, measured))
        self._fit_forests(_LIMIT, whole, self._bounds(whole))
        for index in range(self.settings["networks"]):
            network = OperatorNetwork(epochs=self.settings["epochs"], seed=self.settings["seed"] + index)
            own = None if checkpoint is None else checkpoint.with_name(f"{checkpoint.name}{index}")
            network.fit(runs, on_epoch=on_epoch, checkpoint=own)
            self._networks.append(network)

    def _fit_forests(self, name: str, runs: Sequence[Run], interval: _Interval) -> None:
        if interval.known.sum() >= _FEWEST_ROWS:
            self._forests[name] = self._fitted(sums_table(runs), interval, _QUANTILE if name == "memory" else 0.5)

    def _fitted(self, x: npt.NDArray[np.float32], interval: _Interval, quantile: float) -> list[Forest]:
        known = interval.known
        low = np.where(np.isfinite(interval.low), interval.low, np.minimum(_FACTORS[0], interval.high))[known]
        high = np.where(np.isfinite(interval.high), interval.high, np.maximum(_FACTORS[1], interval.low))[known]
        both = (np.isfinite(interval.low) & np.isfinite(interval.high))[known]
        usual = float(np.median(((low + high) / 2)[both])) if both.any() else 0.0
        y = np.where(both, (low + high) / 2, np.clip(usual, low, high))
        if np.array_equal(low, high):
            return [self._boosted(x[known], y, quantile, seed) for seed in range(self.settings["forests"])]
        for _ in range(_ROUNDS):
            y = np.clip(self._boosted(x[known], y, quantile, 0, trees=150).predict(x[known]), low, high)
        return [self._boosted(x[known], y, quantile, seed) for seed in range(self.settings["forests"])]

    def _boosted(
        self, x: npt.NDArray[Any], y: npt.NDArray[np.float64], quantile: float, seed: int, trees: int | None = None
    ) -> Forest:
        from sklearn.ensemble import HistGradientBoostingRegressor

        model = HistGradientBoostingRegressor(
            loss="quantile",
            quantile=quantile,
            max_iter=trees or self.settings["trees"],
            learning_rate=self.settings["learning_rate"],
            max_leaf_nodes=16,
            max_features=0.3,
            min_samples_leaf=15,
            random_state=self.settings["seed"] + seed,
        )
        return forest_of_boosting(model.fit(x, y))

    def _start(self, runs: Sequence[Run], target: str) -> npt.NDArray[np.float64]:
        """What the trees correct."""
        if target == _LIMIT:
            return np.log(np.exp(column(runs, "log_live")) + self._constant)
        if target == "memory":
            return np.log(np.exp(column(runs, "log_reserved")) + self._constant)
        return column(runs, "log_roofline") if target == "time" else np.zeros(len(runs))

    def _bounds(self, runs: Sequence[Run]) -> _Interval:
        """Of runs whose memory was not measured, but that fitted or did not."""
        start = self._start(runs, _LIMIT)
        low, high = np.full(len(runs), -np.inf), np.full(len(runs), np.inf)
        pairs = bracketed(runs)
        for index, run in enumerate(runs):
            ok, failed = pairs[run.gpu, run.structure]
            if "memory" in run.labels or run.table != "workload" or (ok is not None and "memory" in runs[ok].labels):
                continue
            capacity = math.log(run.capacity_bytes)
            if run.fits or ok is not None:
                high[index] = capacity - start[index if run.fits or ok is None else ok]
            if not run.fits or failed is not None:
                low[index] = capacity - start[index if not run.fits or failed is None else failed]
        return _Interval(np.minimum(low, high), np.maximum(low, high))

    def parts(self, runs: Sequence[Run]) -> list[Predicted]:
        """What each member says, networks first."""
        found = [network.predict(runs) for network in self._networks]
        half = column(runs, "half") > 0
        for index in range(self.settings["forests"]):
            part: Predicted = {}
            for target in TARGETS:
                part[target] = self._forest(target, index, runs) + self._start(runs, target)
            limited = self._forest(_LIMIT, index, runs) + self._start(runs, _LIMIT)
            # Where memory was measured it was in float32; half precision was only ever bracketed.
            use = (half & ~np.isnan(limited)) | np.isnan(part["memory"])
            found.append(part | {"memory": np.where(use, limited, part["memory"])})
        return found

    def _forest(self, name: str, index: int, runs: Sequence[Run]) -> npt.NDArray[np.float64]:
        """NaN for single operators: the forests have seen whole steps alone."""
        said = np.full(len(runs), np.nan)
        whole = [at for at, run in enumerate(runs) if not is_single(run)]
        if name in self._forests and whole:
            said[whole] = self._forests[name][index].predict(sums_table([runs[at] for at in whole]))
        return said

    def predict(self, runs: Sequence[Run]) -> Predicted:
        """See :class:`perfguard_models.learner.Learner`."""
        return self.combine(self.parts(runs), runs)

    def combine(self, parts: Sequence[Predicted], runs: Sequence[Run]) -> Predicted:
        """The weighted mean of networks and forests.

        Of single operators and of float32 only the networks know the time; of half precision on a GPU that was not timed, the
        forests: from two cards a network learns the cards, not what their figures mean.
        """
        number = len(self._networks)
        alone = np.array([is_single(run) for run in runs]) | (column(runs, "half") == 0)
        new = ~alone & np.array([run.gpu not in self._half_gpus for run in runs])
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
        tensors: State = {"constant": torch.tensor([self._constant], dtype=torch.float64)}
        for index, network in enumerate(self._networks):
            tensors |= {f"network{index}.{name}": value for name, value in network.state()[0].items()}
        for target, forests in self._forests.items():
            for index, forest in enumerate(forests):
                tensors |= forest.tensors(f"{target}{index}")
        return tensors, self.settings | {_HALF_GPUS: self._half_gpus}

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Self:
        """See :class:`perfguard_models.learner.Learner`."""
        made = cls(**{key: value for key, value in settings.items() if key != _HALF_GPUS})
        made._half_gpus = list(settings[_HALF_GPUS])
        made._constant = float(tensors["constant"][0])
        for index in range(settings["networks"]):
            prefix = f"network{index}."
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            made._networks.append(
                OperatorNetwork.from_state(own, {"epochs": settings["epochs"], "seed": settings["seed"] + index})
            )
        for target in (*TARGETS, _LIMIT):
            if f"{target}0.roots" in tensors:
                made._forests[target] = [Forest.from_tensors(tensors, f"{target}{index}") for index in range(settings["forests"])]
        return made


def bracketed(runs: Sequence[Run]) -> dict[tuple[str, str], tuple[int | None, int | None]]:
    """For each network on each GPU the largest batch that fitted and the smallest that did not, as indices."""
    found: dict[tuple[str, str], tuple[int | None, int | None]] = {}
    for index, run in enumerate(runs):
        ok, failed = found.get((run.gpu, run.structure), (None, None))
        if run.fits and (ok is None or run.batch_size > runs[ok].batch_size):
            ok = index
        if not run.fits and (failed is None or run.batch_size < runs[failed].batch_size):
            failed = index
        found[run.gpu, run.structure] = ok, failed
    return found


def is_single(run: Run) -> bool:
    """Whether the run is one operator, measured alone."""
    return run.table == "operator"


def _constant_of(runs: Sequence[Run]) -> float:
    """Bytes that a run takes beside the replay's, whatever its size: libraries' kernels and handles."""
    measured = labels_of(runs, "memory")
    known = ~np.isnan(measured)
    if not known.any():
        return 0.0
    computed, measured = np.exp(column(runs, "log_reserved")[known]), measured[known]
    errors = [np.abs(np.log(computed + constant) - measured).mean() for constant in _CONSTANTS]
    return float(_CONSTANTS[int(np.argmin(errors))])
