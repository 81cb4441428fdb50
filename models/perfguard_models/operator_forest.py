"""Trees on features of a product's tiles and of a card's figures, for cards that were never seen.

    t(operator) = floor + (compute + traffic) · exp(f)      t(step) = factor · sum of count · max(launch, t(operator) - floor)

Compute is the least time over candidate tiles. Each takes whole waves over the card's multiprocessors. Tiles and waves are as in
NeuSight (Lee et al. 2025: "Forecasting GPU Performance for Deep Learning Training and Inference"). Traffic is bytes over
bandwidth. The floor is the host's time to launch and time one operator. It does not depend on the card, and a step hides it,
because operators are launched while others run.

The function f is the mean of forests with different features. Their sizes are relative to the card alone, shapes alone, or both.
They also differ in the features of the card: whether its power limits it (watts over peak FLOP/s and process), and its
generation. A handful of cards cannot show which of these transfers best, so none was chosen. The factor is one constant, from
whole transformers on other cards.

The forests do not learn convolutions. These and other operators without a forest are rooflines times one factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.features.kernel_shapes import CARD, SUPPORTED_KINDS
from perfguard_models.features.operators import NAMES
from perfguard_models.learner import TARGETS, Example, Predicted, State
from perfguard_models.trees import Forest

if TYPE_CHECKING:
    from typing_extensions import Self

Array = npt.NDArray[np.float64]
_TILES = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32))
_PRODUCTS = ("linear", "bmm")
_FEATURE_SETS = ("relative", "shape", "both")
DEVICE_DESCRIPTORS = ("power", "power and tensor", "power and generation")
"""Descriptors of a device for each member."""
_FALLBACK_KIND = {"linear": "bmm", "bmm": "linear", "softmax": "pointwise", "norm": "pointwise", "pointwise": "softmax"}
_ENOUGH_POWER = math.log(1.4)
"""Watts per TFLOP/s and nanometre from which a card keeps its clock (P100, V100, A100: 1.5 to 1.8; T4 and P4: 0.7 to 0.9)."""
_VOLTA = 7.0


class Kernels(NamedTuple):
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

    def chosen(self, which: npt.NDArray[Any]) -> Kernels:
        """Some of them."""
        return Kernels(*(column[which] for column in self))


class OperatorForest:
    """See the module's docstring.

    Args:
        trees: of each forest.
        learning_rate: of the trees.
        seed: the first one.
    """

    name: ClassVar[str] = "operator-forest"
    views: ClassVar[tuple[str, ...]] = ("kernel_shapes",)

    def __init__(self, *, trees: int = 100, learning_rate: float = 0.08, seed: int = 0) -> None:
        self.settings: dict[str, Any] = {"trees": trees, "learning_rate": learning_rate, "seed": seed}
        self.forests: dict[str, Forest] = {}
        self.floors: dict[str, float] = {}
        """Seconds, by aten name and GPU; by aten name alone for a GPU that was never seen."""
        self.factors = {"operator": 0.0, "step": 0.0}
        """Logarithms: of an operator without a forest over its roofline, of a step over the sum of its operators."""

    def parts(self, runs: Sequence[Example]) -> list[Predicted]:
        """The prediction of each member."""
        if not runs:
            return [{target: np.zeros(0) for target in TARGETS} for _ in DEVICE_DESCRIPTORS]
        kernels = kernels_of(runs)
        single = np.array([run.is_single for run in runs])
        floor = self.floors_s(kernels, runs) * single[kernels.run]
        found = []
        for member in range(len(DEVICE_DESCRIPTORS)):
            seconds = self._seconds(kernels, member, fallback=np.where(single, self.factors["operator"], 0.0)[kernels.run])
            launched = np.where(single[kernels.run], seconds + floor, np.maximum(seconds, kernels.of("launch")))
            total = np.zeros(len(runs))
            np.add.at(total, kernels.run, kernels.number * launched)
            part: Predicted = {target: np.full(len(runs), np.nan) for target in TARGETS}
            part["time"] = np.log(np.maximum(total, 1e-9)) + np.where(single, 0.0, self.factors["step"])
            found.append(part)
        return found

    def _seconds(self, kernels: Kernels, member: int, *, fallback: Array) -> Array:
        """Seconds of each operator once, without its floor. ``fallback``: log factor on the roofline of kinds without a
        forest."""
        seconds = kernels.roofline * np.exp(fallback)
        for at, kind in enumerate(SUPPORTED_KINDS):
            chosen = kernels.kind == at
            fitted_kind = next(
                (own for own in (kind, _FALLBACK_KIND[kind]) if f"{own} {feature_sets_of(own)[0]} {member}" in self.forests), None
            )
            if fitted_kind is None or not chosen.any():
                continue
            own = kernels.chosen(chosen)
            log_factors = [
                self.forests[f"{fitted_kind} {feature_set} {member}"].predict(
                    columns_of(fitted_kind, own, feature_set, DEVICE_DESCRIPTORS[member])
                )
                for feature_set in feature_sets_of(fitted_kind)
            ]
            seconds[chosen] = base_s(fitted_kind, own) * np.exp(np.mean(log_factors, axis=0))
        return seconds

    def floors_s(self, kernels: Kernels, runs: Sequence[Example]) -> Array:
        """Shape: (n,). An operator that was never measured has the floor that is usual."""
        usual = float(np.median(list(self.floors.values()))) if self.floors else 0.0
        gpus = [runs[at].gpu for at in kernels.run]
        return np.array(
            [
                self.floors.get(f"{name_of(name)} {gpu}", self.floors.get(name_of(name), usual))
                if at < len(SUPPORTED_KINDS)
                else 0.0
                for at, name, gpu in zip(kernels.kind, kernels.name, gpus, strict=True)
            ]
        )

    def predict(self, runs: Sequence[Example]) -> Predicted:
        """See :class:`perfguard_models.learner.Learner`."""
        return self.combine(self.parts(runs), runs)

    def combine(self, parts: Sequence[Predicted], runs: Sequence[Example]) -> Predicted:
        """The mean of the logarithms."""
        return {target: np.full(len(runs), np.nan) for target in TARGETS} | {"time": self.combined(parts)}

    @staticmethod
    def combined(parts: Sequence[Predicted]) -> Array:
        """The mean of the members' logarithms of the time. Shape: (runs,)."""
        return np.asarray(np.mean([part["time"] for part in parts], axis=0))

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """See :class:`perfguard_models.learner.Learner`."""
        tensors: State = {"factors": torch.tensor(list(self.factors.values()), dtype=torch.float64)}
        for name, forest in self.forests.items():
            tensors |= forest.tensors(name)
        return tensors, self.settings | {"floors": self.floors, "forests": list(self.forests)}

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Self:
        """See :class:`perfguard_models.learner.Learner`."""
        made = cls(**{key: value for key, value in settings.items() if key not in ("floors", "forests")})
        made.floors = {name: float(seconds) for name, seconds in settings["floors"].items()}
        made.factors = dict(zip(made.factors, tensors["factors"].tolist(), strict=True))
        made.forests = {name: Forest.from_tensors(tensors, name) for name in settings["forests"]}
        return made


def name_of(index: int) -> str:
    """The aten name of an operator, or "other"."""
    return NAMES[index] if index < len(NAMES) else "other"


def kernels_of(runs: Sequence[Example]) -> Kernels:
    """The operators of all ``runs``."""
    views = [run.view for run in runs]
    sizes = [len(view["kernel_kind"]) for view in views]
    joined = {
        name: np.concatenate([view[f"kernel_{name}"] for view in views])
        for name in ("kind", "name", "size", "bytes", "roofline", "count")
    }
    return Kernels(
        run=np.repeat(np.arange(len(runs)), sizes),
        kind=joined["kind"].astype(np.int64),
        name=joined["name"].astype(np.int64),
        size=joined["size"],
        moved=np.maximum(joined["bytes"], 1.0),
        roofline=joined["roofline"],
        number=joined["count"],
        card=np.repeat(np.stack([view["card"] for view in views]), sizes, axis=0),
    )


def feature_sets_of(kind: str) -> tuple[str, ...]:
    """Feature sets of the forests of a kind of operator."""
    return _FEATURE_SETS if kind in _PRODUCTS else _FEATURE_SETS[:1]


def _tiled(kernels: Kernels, tile: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Waves of tiles over the multiprocessors, whole waves, and the ratio of the tiles to the product."""
    batch, m, n, _ = np.maximum(kernels.size, 1).T
    down, across = np.ceil(m / tile[0]), np.ceil(n / tile[1])
    waves = batch * down * across / kernels.of("sms")
    return waves, np.maximum(np.ceil(waves), 1), down * tile[0] * across * tile[1] / (m * n)


def _compute_s(kernels: Kernels) -> Array:
    """Compute time of products, the least over candidate tiles. A small tile reads more for each multiplication (8 columns at
    a time)."""
    k = np.maximum(kernels.size[:, 3], 1)
    rate = kernels.of("flops") / kernels.of("sms")
    best = np.full(len(k), np.inf)
    for tile in _TILES:
        _, whole, _ = _tiled(kernels, tile)
        best = np.minimum(best, whole * 2 * tile[0] * tile[1] * k / rate * (0.75 + 8 / tile[0] + 8 / tile[1]))
    return best


def base_s(kind: str, kernels: Kernels) -> Array:
    """Baseline that the trees correct, in seconds."""
    traffic = kernels.moved / kernels.of("bandwidth")
    return np.asarray(traffic + _compute_s(kernels) if kind in _PRODUCTS else traffic)


def columns_of(kind: str, kernels: Kernels, feature_set: str, apart: str) -> npt.NDArray[np.float32]:
    """Input of the trees. Shape: (n, columns)."""
    if kind not in _PRODUCTS:
        return np.stack(_streaming_columns(kernels), axis=1).astype(np.float32)
    columns = [*_shape_columns(kernels)] if feature_set != "relative" else []
    columns += _relative_columns(kernels) if feature_set != "shape" else []
    return np.stack([*columns, *_card_columns(kernels, apart)], axis=1).astype(np.float32)


def _streaming_columns(kernels: Kernels) -> list[Array]:
    rows, width = np.maximum(kernels.size[:, 0], 1), np.maximum(kernels.size[:, 1], 1)
    sms, log = kernels.of("sms"), np.log
    return [
        log(width), log(kernels.moved / kernels.of("l2")), log(rows / sms), log(kernels.moved / sms), 1.0 * (width % 4 == 0),
        1.0 * (width > 1024), log(2 ** np.ceil(np.log2(width)) / width),
    ]  # fmt: skip


def _shape_columns(kernels: Kernels) -> list[Array]:
    batch, m, n, k = np.maximum(kernels.size, 1).T
    odd = [1.0 * (size % number == 0) for size in (m, n, k) for number in (2, 4)]
    return [np.log(batch), np.log(m), np.log(n), np.log(k), np.log(4 * k * n), *odd]


def _relative_columns(kernels: Kernels) -> list[Array]:
    batch, m, n, k = np.maximum(kernels.size, 1).T
    sms, l2, log = kernels.of("sms"), kernels.of("l2"), np.log
    columns = [
        log(k), log(kernels.moved / l2), log(4 * k * n / l2), log(n / sms / 64), log(m / 64), np.minimum(log(batch / sms), 3.0),
    ]  # fmt: skip
    for tile in ((128, 128), (64, 64), (32, 32)):
        waves, whole, padding = _tiled(kernels, tile)
        columns += [log(waves), log(whole / waves), log(padding)]
    return [*columns, log(_compute_s(kernels) * kernels.of("flops") / (2 * batch * m * n * k))]


def _card_columns(kernels: Kernels, apart: str) -> list[Array]:
    power = np.log(kernels.of("watts") / (kernels.of("flops") / 1e12) / kernels.of("nanometres"))
    columns = [np.minimum(power, _ENOUGH_POWER)]
    if apart == "power and tensor":
        columns.append(1.0 * (kernels.of("generation") >= _VOLTA))
    if apart == "power and generation":
        columns.append(kernels.of("generation"))
    return columns
