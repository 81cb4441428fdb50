"""Trees on what a product's tiles and a card's figures have in common: for cards that were never seen.

    t(operator) = floor + (compute + traffic) · exp(f)      t(step) = factor · sum of count · max(launch, t(operator) - floor)

Compute is the least time over candidate tiles, each of whole waves over the card's multiprocessors (as in NeuSight, Lee et al.
2025: "Forecasting GPU Performance for Deep Learning Training and Inference", its tiles and waves); traffic is bytes over
bandwidth. The floor is what launching and timing one operator takes on the host. It says nothing of the card, and a step hides
it: operators are launched while others run. f is the mean of forests that differ in what they see: sizes relative to the card
alone, shapes alone or both; and how a card stands apart: whether its power limits it (watts over peak FLOP/s and process), and
its generation. Which of these carries over best cannot be told from a handful of cards, so none was chosen. The factor is one
constant, from whole transformers on other cards.

Convolutions are not taught: they, and other operators without a forest, are rooflines times one factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.dataset import TARGETS, Run
from perfguard_models.kernel_shapes import CARD, TAUGHT
from perfguard_models.learner import OnEpoch, Predicted, State, labels_of
from perfguard_models.operators import NAMES
from perfguard_models.trees import Forest, forest_of_boosting

if TYPE_CHECKING:
    from typing_extensions import Self

Array = npt.NDArray[np.float64]
_TILES = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32))
_PRODUCTS = ("linear", "bmm")
_SIGHTS = ("relative", "shape", "both")
_APART = ("power", "power and tensor", "power and generation")
"""How a card stands apart, for each member."""
_STANDS_IN = {"linear": "bmm", "bmm": "linear", "softmax": "pointwise", "norm": "pointwise", "pointwise": "softmax"}
_FEWEST_ROWS = 60
_FLOOR_QUANTILE, _FLOOR_SHARE = 0.01, 0.97
_SHORTEST_S = 2e-6
_ENOUGH_POWER = math.log(1.4)
"""Watts per TFLOP/s and nanometre from which a card keeps its clock (P100, V100, A100: 1.5 to 1.8; T4 and P4: 0.7 to 0.9)."""
_VOLTA = 7.0


class _Kernels(NamedTuple):
    """n operators of some runs."""

    run: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]
    name: npt.NDArray[np.int64]
    size: Array  # shape: (n, 4)
    moved: Array
    roofline: Array
    number: Array
    card: Array  # shape: (n, len(CARD))

    def of(self, name: str) -> Array:
        """One of the card's figures. Shape: (n,)."""
        return np.asarray(self.card[:, CARD.index(name)])

    def chosen(self, which: npt.NDArray[Any]) -> _Kernels:
        """Some of them."""
        return _Kernels(*(column[which] for column in self))


class OperatorForest:
    """See the module's docstring.

    Args:
        trees: of each forest.
        learning_rate: of the trees.
        seed: the first one.
    """

    name: ClassVar[str] = "operator-forest"
    views: ClassVar[tuple[str, ...]] = ("kernel_shapes",)
    tables: ClassVar[tuple[str, ...]] = ("operator", "transformer")

    def __init__(self, *, trees: int = 100, learning_rate: float = 0.08, seed: int = 0) -> None:
        self.settings: dict[str, Any] = {"trees": trees, "learning_rate": learning_rate, "seed": seed}
        self._forests: dict[str, Forest] = {}
        self._floors: dict[str, float] = {}
        """Seconds, by aten name and GPU; by aten name alone for a GPU that was never seen."""
        self._factors = {"operator": 0.0, "step": 0.0}
        """Logarithms: of an operator without a forest over its roofline, of a step over the sum of its operators."""

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None, checkpoint: Path | None = None) -> None:
        """See :class:`perfguard_models.learner.Learner`. Fitted in half a minute, it keeps no checkpoint."""
        timed = [run for run in runs if "time" in run.labels]
        single, whole = [run for run in timed if _is_single(run)], [run for run in timed if not _is_single(run)]
        if single:
            kernels, seconds = _kernels_of(single), np.exp(labels_of(single, "time"))
            self._floors = _floors_of(kernels, [run.gpu for run in single], seconds)
            measured = np.maximum(seconds - self._floors_s(kernels, single), _SHORTEST_S)
            for at, kind in enumerate(TAUGHT):
                chosen = kernels.kind == at
                if chosen.sum() >= _FEWEST_ROWS:
                    self._fit_kind(kind, kernels.chosen(chosen), measured[chosen], (measured / seconds)[chosen])
                if on_epoch is not None:
                    on_epoch(at + 1, len(TAUGHT), 0.0)
            rest = kernels.kind == len(TAUGHT)
            if rest.any():
                self._factors["operator"] = float(np.median(np.log(seconds[rest] / kernels.roofline[rest])))
        if whole:
            said = self._combined(self.parts(whole))
            self._factors["step"] = float(np.median(labels_of(whole, "time") - said))

    def _fit_kind(self, kind: str, kernels: _Kernels, seconds: Array, weight: Array) -> None:
        """Rows near the floor say little beyond it: they weigh as much as the share of their time that is above it."""
        from sklearn.ensemble import HistGradientBoostingRegressor

        y = np.log(seconds / _base_s(kind, kernels))
        for member, apart in enumerate(_APART):
            for sight in _sights(kind):
                model = HistGradientBoostingRegressor(
                    loss="absolute_error",
                    max_iter=self.settings["trees"],
                    learning_rate=self.settings["learning_rate"],
                    max_leaf_nodes=24,
                    min_samples_leaf=30,
                    max_features=0.5,
                    early_stopping=False,
                    random_state=self.settings["seed"] + member,
                )
                model.fit(_columns(kind, kernels, sight, apart), y, sample_weight=weight)
                self._forests[f"{kind} {sight} {member}"] = forest_of_boosting(model)

    def parts(self, runs: Sequence[Run]) -> list[Predicted]:
        """What each member says."""
        if not runs:
            return [{target: np.zeros(0) for target in TARGETS} for _ in _APART]
        kernels = _kernels_of(runs)
        single = np.array([_is_single(run) for run in runs])
        floor = self._floors_s(kernels, runs) * single[kernels.run]
        found = []
        for member in range(len(_APART)):
            seconds = self._seconds(kernels, member, untaught=np.where(single, self._factors["operator"], 0.0)[kernels.run])
            launched = np.where(single[kernels.run], seconds + floor, np.maximum(seconds, kernels.of("launch")))
            total = np.zeros(len(runs))
            np.add.at(total, kernels.run, kernels.number * launched)
            part: Predicted = {target: np.full(len(runs), np.nan) for target in TARGETS}
            part["time"] = np.log(np.maximum(total, 1e-9)) + np.where(single, 0.0, self._factors["step"])
            found.append(part)
        return found

    def _seconds(self, kernels: _Kernels, member: int, *, untaught: Array) -> Array:
        """Of each operator once, without its floor. ``untaught``: the logarithm of what is made of a bare roofline."""
        seconds = kernels.roofline * np.exp(untaught)
        for at, kind in enumerate(TAUGHT):
            chosen = kernels.kind == at
            taught = next((own for own in (kind, _STANDS_IN[kind]) if f"{own} {_sights(own)[0]} {member}" in self._forests), None)
            if taught is None or not chosen.any():
                continue
            own = kernels.chosen(chosen)
            said = [
                self._forests[f"{taught} {sight} {member}"].predict(_columns(taught, own, sight, _APART[member]))
                for sight in _sights(taught)
            ]
            seconds[chosen] = _base_s(taught, own) * np.exp(np.mean(said, axis=0))
        return seconds

    def _floors_s(self, kernels: _Kernels, runs: Sequence[Run]) -> Array:
        """Shape: (n,). An operator that was never measured has the floor that is usual."""
        usual = float(np.median(list(self._floors.values()))) if self._floors else 0.0
        gpus = [runs[at].gpu for at in kernels.run]
        return np.array(
            [
                self._floors.get(f"{_name(name)} {gpu}", self._floors.get(_name(name), usual)) if at < len(TAUGHT) else 0.0
                for at, name, gpu in zip(kernels.kind, kernels.name, gpus, strict=True)
            ]
        )

    def predict(self, runs: Sequence[Run]) -> Predicted:
        """See :class:`perfguard_models.learner.Learner`."""
        return self.combine(self.parts(runs), runs)

    def combine(self, parts: Sequence[Predicted], runs: Sequence[Run]) -> Predicted:
        """The mean of the logarithms."""
        return {target: np.full(len(runs), np.nan) for target in TARGETS} | {"time": self._combined(parts)}

    @staticmethod
    def _combined(parts: Sequence[Predicted]) -> Array:
        return np.asarray(np.mean([part["time"] for part in parts], axis=0))

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """See :class:`perfguard_models.learner.Learner`."""
        tensors: State = {"factors": torch.tensor(list(self._factors.values()), dtype=torch.float64)}
        for name, forest in self._forests.items():
            tensors |= forest.tensors(name)
        return tensors, self.settings | {"floors": self._floors, "forests": list(self._forests)}

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Self:
        """See :class:`perfguard_models.learner.Learner`."""
        made = cls(**{key: value for key, value in settings.items() if key not in ("floors", "forests")})
        made._floors = {name: float(seconds) for name, seconds in settings["floors"].items()}
        made._factors = dict(zip(made._factors, tensors["factors"].tolist(), strict=True))
        made._forests = {name: Forest.from_tensors(tensors, name) for name in settings["forests"]}
        return made


def least_relative_error(values: Sequence[float]) -> float:
    """The one of ``values`` that is on average the least far from the others, relative to each.

    Example:
        >>> least_relative_error([0.032, 0.033, 0.040, 0.057])
        0.033
    """
    array = np.sort(np.asarray(values, dtype=np.float64))
    return float(array[int(np.argmin([np.abs(value / array - 1).mean() for value in array]))])


def _is_single(run: Run) -> bool:
    return run.table == "operator"


def _name(index: int) -> str:
    return NAMES[index] if index < len(NAMES) else "other"


def _kernels_of(runs: Sequence[Run]) -> _Kernels:
    views = [run.view for run in runs]
    sizes = [len(view["kernel_kind"]) for view in views]
    joined = {
        name: np.concatenate([view[f"kernel_{name}"] for view in views])
        for name in ("kind", "name", "size", "bytes", "roofline", "count")
    }
    return _Kernels(
        run=np.repeat(np.arange(len(runs)), sizes),
        kind=joined["kind"].astype(np.int64),
        name=joined["name"].astype(np.int64),
        size=joined["size"],
        moved=np.maximum(joined["bytes"], 1.0),
        roofline=joined["roofline"],
        number=joined["count"],
        card=np.repeat(np.stack([view["card"] for view in views]), sizes, axis=0),
    )


def _floors_of(kernels: _Kernels, gpus: Sequence[str], seconds: Array) -> dict[str, float]:
    """Of single operators, one in each run: just under the fastest of each name on each GPU, and what fits all GPUs best."""
    own = np.array([f"{_name(name)} {gpu}" for name, gpu in zip(kernels.name, gpus, strict=True)])
    floors: dict[str, float] = {}
    for key in sorted(set(own[kernels.kind < len(TAUGHT)])):
        floors[str(key)] = float(np.quantile(seconds[own == key], _FLOOR_QUANTILE)) * _FLOOR_SHARE
    for name in sorted({key.split(" ")[0] for key in floors}):
        floors[name] = least_relative_error([value for key, value in floors.items() if key.startswith(f"{name} ")])
    return floors


def _sights(kind: str) -> tuple[str, ...]:
    return _SIGHTS if kind in _PRODUCTS else _SIGHTS[:1]


def _tiled(kernels: _Kernels, tile: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Of products: waves over the multiprocessors, whole waves, and how much larger the tiles are than the product."""
    batch, m, n, _ = np.maximum(kernels.size, 1).T
    down, across = np.ceil(m / tile[0]), np.ceil(n / tile[1])
    waves = batch * down * across / kernels.of("sms")
    return waves, np.maximum(np.ceil(waves), 1), down * tile[0] * across * tile[1] / (m * n)


def _compute_s(kernels: _Kernels) -> Array:
    """Of products: the least over candidate tiles. A small tile reads more for each multiplication (8 columns at a time)."""
    k = np.maximum(kernels.size[:, 3], 1)
    rate = kernels.of("flops") / kernels.of("sms")
    best = np.full(len(k), np.inf)
    for tile in _TILES:
        _, whole, _ = _tiled(kernels, tile)
        best = np.minimum(best, whole * 2 * tile[0] * tile[1] * k / rate * (0.75 + 8 / tile[0] + 8 / tile[1]))
    return best


def _base_s(kind: str, kernels: _Kernels) -> Array:
    """What the trees correct."""
    traffic = kernels.moved / kernels.of("bandwidth")
    return np.asarray(traffic + _compute_s(kernels) if kind in _PRODUCTS else traffic)


def _columns(kind: str, kernels: _Kernels, sight: str, apart: str) -> npt.NDArray[np.float32]:
    """What the trees see. Shape: (n, columns)."""
    if kind not in _PRODUCTS:
        return np.stack(_streaming_columns(kernels), axis=1).astype(np.float32)
    columns = [*_shape_columns(kernels)] if sight != "relative" else []
    columns += _relative_columns(kernels) if sight != "shape" else []
    return np.stack([*columns, *_card_columns(kernels, apart)], axis=1).astype(np.float32)


def _streaming_columns(kernels: _Kernels) -> list[Array]:
    rows, width = np.maximum(kernels.size[:, 0], 1), np.maximum(kernels.size[:, 1], 1)
    sms, log = kernels.of("sms"), np.log
    return [
        log(width), log(kernels.moved / kernels.of("l2")), log(rows / sms), log(kernels.moved / sms), 1.0 * (width % 4 == 0),
        1.0 * (width > 1024), log(2 ** np.ceil(np.log2(width)) / width),
    ]  # fmt: skip


def _shape_columns(kernels: _Kernels) -> list[Array]:
    batch, m, n, k = np.maximum(kernels.size, 1).T
    odd = [1.0 * (size % number == 0) for size in (m, n, k) for number in (2, 4)]
    return [np.log(batch), np.log(m), np.log(n), np.log(k), np.log(4 * k * n), *odd]


def _relative_columns(kernels: _Kernels) -> list[Array]:
    batch, m, n, k = np.maximum(kernels.size, 1).T
    sms, l2, log = kernels.of("sms"), kernels.of("l2"), np.log
    columns = [
        log(k), log(kernels.moved / l2), log(4 * k * n / l2), log(n / sms / 64), log(m / 64), np.minimum(log(batch / sms), 3.0),
    ]  # fmt: skip
    for tile in ((128, 128), (64, 64), (32, 32)):
        waves, whole, padding = _tiled(kernels, tile)
        columns += [log(waves), log(whole / waves), log(padding)]
    return [*columns, log(_compute_s(kernels) * kernels.of("flops") / (2 * batch * m * n * k))]


def _card_columns(kernels: _Kernels, apart: str) -> list[Array]:
    power = np.log(kernels.of("watts") / (kernels.of("flops") / 1e12) / kernels.of("nanometres"))
    columns = [np.minimum(power, _ENOUGH_POWER)]
    if apart == "power and tensor":
        columns.append(1.0 * (kernels.of("generation") >= _VOLTA))
    if apart == "power and generation":
        columns.append(kernels.of("generation"))
    return columns
