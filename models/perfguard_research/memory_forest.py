"""Training of GuardNet's forests for memory.

Most GPUs of the tables have no reading of memory. It is only known that a batch fitted and that the next one did not. Such a
pair gives an interval for the true factor on the replay's live bytes. It gives none for the reserved bytes, because the
allocator returns its cache before it runs out of memory. The trees are first fitted to the middle of these intervals. Then they
are fitted to their own predictions, moved to the nearest end where they are outside of the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from perfguard_models.learner import State, column, sums_table
from perfguard_models.trees import LIMIT, PREDICTED, Forest, MemoryForest
from perfguard_research.dataset import Run
from perfguard_research.learners import OnEpoch, labels_of
from perfguard_research.trees import forest_of_boosting, tensors_of

Values = npt.NDArray[np.float64]
_FEWEST_ROWS = 50
_ROUNDS = 2
_QUANTILE = 0.45
"""Quantile for memory. It is below the median, because a relative error punishes too high values more."""
_CONSTANTS = np.linspace(0, 3 * 2**30, 97)
_FACTORS = math.log(0.5), math.log(4.0)
"""Ends for intervals that are open on one side."""


class TrainableMemory(MemoryForest):
    """GuardNet's forests for memory, with `fit`.

    Args:
        forests: how many forests for each quantity.
        trees: of each forest.
        learning_rate: of the trees.
        seed: the first one.
    """

    tables: ClassVar[tuple[str, ...]] = ("workload", "perceptron", "collected")

    def __init__(self, *, forests: int = 2, trees: int = 400, learning_rate: float = 0.05, seed: int = 0) -> None:
        super().__init__(forests=forests, trees=trees, learning_rate=learning_rate, seed=seed)

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """See :class:`perfguard_research.learners.Trainable`."""
        constant = torch.tensor([self.constant], dtype=torch.float64)
        return {"constant": constant} | tensors_of(self.forests), self.settings

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None) -> None:
        whole = [run for run in runs if not run.is_single]
        self.constant = 0.0 if {run.gpu for run in whole} == {"cpu"} else _constant_of(whole)
        for target in PREDICTED if whole else ():
            measured = labels_of(whole, target) - self.start(whole, target)
            self._fit_forests(target, whole, measured, measured)
        self._fit_forests(LIMIT, whole, *self._bounds(whole))

    def _fit_forests(self, name: str, runs: Sequence[Run], low: Values, high: Values) -> None:
        """Fit to bounds on log(measured / computed). Shapes: (n,). They are equal where it was measured; NaN: unknown."""
        known = np.isfinite(low) | np.isfinite(high)
        if known.sum() < _FEWEST_ROWS:
            return
        x = sums_table(runs)[known]
        low = low[known]
        high = high[known]
        both = np.isfinite(low) & np.isfinite(high)
        quantile = _QUANTILE if name == "memory" else 0.5
        low, high = (
            np.where(np.isfinite(low), low, np.minimum(_FACTORS[0], high)),
            np.where(np.isfinite(high), high, np.maximum(_FACTORS[1], low)),
        )
        usual = float(np.median(((low + high) / 2)[both])) if both.any() else 0.0
        y = np.where(both, (low + high) / 2, np.clip(usual, low, high))
        if not np.array_equal(low, high):
            for _ in range(_ROUNDS):
                y = np.clip(self._boosted(x, y, quantile, 0, trees=150).predict(x), low, high)
        self.forests |= {f"{name}{at}": self._boosted(x, y, quantile, at) for at in range(self.settings["forests"])}

    def _boosted(self, x: npt.NDArray[Any], y: Values, quantile: float, seed: int, trees: int | None = None) -> Forest:
        model = HistGradientBoostingRegressor(
            loss="quantile",
            quantile=quantile,
            max_iter=trees or self.settings["trees"],
            learning_rate=self.settings["learning_rate"],
            max_leaf_nodes=16,
            max_features=0.3,
            min_samples_leaf=15,
            early_stopping=False,  # the default depends on the number of rows
            random_state=self.settings["seed"] + seed,
        )
        return forest_of_boosting(model.fit(x, y))

    def _bounds(self, runs: Sequence[Run]) -> tuple[Values, Values]:
        """Bounds for runs without measured memory that fitted or did not."""
        start = self.start(runs, LIMIT)
        low = np.full(len(runs), -np.inf)
        high = np.full(len(runs), np.inf)
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
        return np.minimum(low, high), np.maximum(low, high)


def bracketed(runs: Sequence[Run]) -> dict[tuple[str, str], tuple[int | None, int | None]]:
    """Indices of the largest batch that fitted and the smallest that did not, for each network on each GPU."""
    found: dict[tuple[str, str], tuple[int | None, int | None]] = {}
    for index, run in enumerate(runs):
        ok, failed = found.get((run.gpu, run.structure), (None, None))
        if run.fits and (ok is None or run.batch_size > runs[ok].batch_size):
            ok = index
        if not run.fits and (failed is None or run.batch_size < runs[failed].batch_size):
            failed = index
        found[run.gpu, run.structure] = ok, failed
    return found


def _constant_of(runs: Sequence[Run]) -> float:
    """Bytes that a run takes beside the replay's, whatever its size: libraries' kernels and handles."""
    measured = labels_of(runs, "memory")
    known = ~np.isnan(measured)
    if not known.any():
        return 0.0
    computed = np.exp(column(runs, "log_reserved")[known])
    measured = measured[known]
    errors = [np.abs(np.log(computed + constant) - measured).mean() for constant in _CONSTANTS]
    return float(_CONSTANTS[int(np.argmin(errors))])
