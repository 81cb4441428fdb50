"""The interface of GuardNet's weights, for each kind of device: a correction of physics, how unsure it is, and where it ends."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from perfguard.devices import resolve_device
from perfguard.exceptions import PredictorError
from perfguard.graph import GraphBatch, OpGraph, batch_roofline_s
from perfguard_models.calibration import OPERATOR
from perfguard_models.ensemble import GuardEnsemble
from perfguard_models.features.convolutions import CONVOLUTION_KINDS
from perfguard_models.features.graph import FEATURE_VERSION
from perfguard_models.features.kernel_shapes import SUPPORTED_KINDS, kernel_kinds
from perfguard_models.features.step import STEP_FEATURES, step_features
from perfguard_models.graph_network import GuardNetwork, batches_of
from perfguard_models.learner import Ensemble, Example, Learner, Predicted, predict_with_spread, share_of
from perfguard_models.residual import GPInputs, ResidualPrior, as_shipped
from perfguard_models.setting import Setting
from perfguard_models.summary import NOTHING, Summary
from perfguard_models.trained import FittedModel, read_trained, steps_of
from perfguard_models.weight_files import check_hash, version_of

if TYPE_CHECKING:
    from perfguard.devices import Device

Floats = npt.NDArray[np.float64]
TARGETS = ("memory", "time")
_SHARES = ("gpu_util", "sm_active")
"""Measured of perceptrons alone."""
UNTRAINED_LOG_SIGMA = {"memory": 0.2, "time": 0.6}
"""Standard deviation of log(measured / physics) for a run unlike all training rows. The driver's reading is within 10% of replay
and context on average, but convolution workspaces can double it. A step takes one to four times its roofline."""
_REPLAY_LOG_SIGMA, _LOADED_BYTES_SIGMA = 0.055, 100 * 2**20
"""How far the replay is from the memory of a GPU in PyTorch's default settings: a share of it, and bytes that the driver loads
beside it. The first is from xMem's 112 training runs in float32: 10 networks on three cards, benchmark mode off."""
_UNLIKE_PERCEPTRONS = frozenset({*CONVOLUTION_KINDS, "attention", "embedding", "rnn"})
_REPLAYED_OPTIONS = frozenset({"tf32", "no-tf32", "batch-on-device"})
"""With other switches on, the replay was never compared with measurements."""
_CARD_LOG_SIGMA = 0.1
"""Standard deviation of the factor beyond the roofline from the RTX 3090 to the RTX 4090, as a logarithm: 90% lie within 0.17."""
_CARDS_APART = 0.45
"""How far these two are apart by the roofline; the standard deviation grows with the distance."""
_UNTRAINED_TIME_FACTOR = 2.0
_TRAINED_HALF = "amp-fp16"
"""The half precision of the measured runs."""
_BIAS, _LINEAR, _LOCAL, _NOISE = 0.72, 0.25, 0.6, 0.25
"""Shares of a residual's standard deviation: what a machine and a network have in common, a trend, a region, and noise. Their
squares add up to one."""
_KERNELS = 1.0
"""Standard deviation of the factors of single kinds of kernels, in standard deviations of the residual."""
_TRUST, _MOST_TRUST = 3.0, 0.5
"""Standard deviation of the trust in physics over the network, in standard deviations of the residual, and its most."""
_TRUST_IN_MEMBERS, _FARTHEST_MEMBER = 1 / 3, 1.0
"""The same of the networks alone, or the trees alone, in shares of that of physics; and how far from the value they count."""
_SURER = 2.0
"""The correction is reduced for a prediction whose sigma is smaller than that of the measured runs by more than this factor."""
_NUM_MEMBERS = 2
_OF_THE_STEP = 0.9
"""Networks that were measured twice in the tables, under two names, are 0.1 to 2% apart, where the noise is 3 to 11%."""
_FARTHEST = 3.0
_MOST_OF_A_CONSTANT = 4.0
_EMBEDDED = (
    ("log_reserved", 22.5, 2.0), ("log_roofline", -2.0, 2.0),
    ("log_operators", 6.5, 1.0), ("log_batch", 4.0, 2.0), ("log_parameters", 18.0, 2.0), ("share_activation", 0.5, 0.5),
    ("conv_pointwise", 0.25, 0.25), ("conv_depthwise", 0.1, 0.2), ("time_matmul", 0.3, 0.4),
    ("train", 0.5, 0.5), ("half", 0.5, 0.5),
)  # fmt: skip
"""Step features in the embedding of the residual process: name, middle and width."""
_EMBEDDED_INDEX = [STEP_FEATURES.index(name) for name, _, _ in _EMBEDDED]
_TIME_SHARES = (
    *(name for name in STEP_FEATURES if name.startswith(("time_", "name_", "product_"))),
    *(name for name in STEP_FEATURES if name.startswith("conv_") and not name.startswith("conv_log_")),
    "nhwc", "compiled", "launch_share", "traffic_share",
)  # fmt: skip
"""Shares of the roofline, and flags, from which the process computes similarity."""
_TIME_SHARES_INDEX = [STEP_FEATURES.index(name) for name in _TIME_SHARES]
_CONVOLVED = [index for index, name in enumerate(_TIME_SHARES) if name.startswith("conv_")]
_SWITCHES = [_TIME_SHARES.index(name) for name in ("nhwc", "compiled")]
_APART = 0.15
"""Length scale of the shares."""


class RawPrediction(NamedTuple):
    """The weights' prediction for C graphs with one skeleton on a device, before any run there.

    Targets are "memory" in log bytes and "time" in log seconds of a step.
    """

    log_value: dict[str, Floats]  # shapes: (C,)
    op_time_s: Floats  # shape: (C, N)
    embedding: dict[str, torch.Tensor]  # shapes: (C, d)
    time_shares: torch.Tensor  # shape: (C, f), see `time_shares_of`
    members: dict[str, Floats]
    """Predictions of the networks alone and of the trees alone; NaN where there is none. Shapes: (C, 2), or (C, 0)."""
    alternatives: dict[str, torch.Tensor]
    """Distances of physics and of the members from the value. Shapes: (C, e)"""
    prior: dict[str, ResidualPrior]
    """Prior of the residual on the device, at a scale of 1."""
    prior_scale: dict[str, Floats]
    """Factors on the prior's standard deviations. Shapes: (C,)"""
    shares: dict[str, Floats]
    """"gpu_util" and "sm_active", 0 to 1, NaN where the weights do not predict them. Shapes: (C,)"""
    known: dict[str, npt.NDArray[np.bool_]]
    """Whether the training rows contain similar steps. Where they do not, the value and its prior are those of physics, because a
    network does not extrapolate. Shapes: (C,)"""
    step_features: npt.NDArray[np.float32] | None
    """None: they were not computed. Shape: (C, len(STEP_FEATURES))"""

    def prior_at(self, target: str, row: int) -> ResidualPrior:
        """The prior of one of the graphs."""
        prior, scale = self.prior[target], float(self.prior_scale[target][row])
        terms = {term: scale * getattr(prior, term) for term in ("bias", "linear", "local", "noise", "trust", "kernels", "kind")}
        return dataclasses.replace(prior, **terms | {"trust": min(terms["trust"], _MOST_TRUST)})


class Backend(Protocol):
    """Weights for one kind of device."""

    version: str
    """Version of the weights. It differs for other tensors or another calibration."""

    def trained_on(self, device: Device) -> bool:
        """Whether the training rows include runs on this very device."""

    def predict(self, graphs: GraphBatch, device: Device) -> RawPrediction:
        """The weights' prediction for each of ``graphs``."""

    def knows_compiled(self, graph: OpGraph, device: Device) -> bool:
        """Whether the weights were trained on compiled runs of such graphs, whatever their sizes."""

    def interval_scale(self, target: str) -> float:
        """Factor on the intervals of ``target`` that makes them hold."""

    def summary(self, device: Device, target: str) -> Summary:
        """Steps on the device that the weights' ``target`` was fitted to, a reference for online learning. It may be empty."""


class CpuBackend:
    """A graph network, trained on processors.

    Raises:
        PredictorError: if the files are damaged, of another version, or do not belong together.
    """

    def __init__(self, data: bytes, card: Any, name: str) -> None:
        if card.get("feature_version") != FEATURE_VERSION:
            raise PredictorError(
                f"The weights {name!r} were made for features of version {card.get('feature_version')}, this PerfGuard has "
                f"version {FEATURE_VERSION}. Train them again with this version."
            )
        check_hash(data, card, name)
        try:
            network = GuardNetwork(**card["network"]).float()
            network.load_state_dict(load_tensors(data))
            self._priors = {target: ResidualPrior(**card["residual"][target]) for target in TARGETS}
            self._scales = {target: float(card["interval_scale"][target]) for target in TARGETS}
            self._devices = frozenset(card["trained_devices"])
            self.version = version_of(card)
        except (RuntimeError, SafetensorError, KeyError, TypeError) as error:
            raise PredictorError(f"The weights {name!r} do not fit the network: {type(error).__name__}: {error}") from error
        self._network = network.eval()

    def trained_on(self, device: Device) -> bool:
        return device.id in self._devices

    def predict(self, graphs: GraphBatch, device: Device) -> RawPrediction:
        with torch.inference_mode():
            parts = [self._network(batch) for batch in batches_of(graphs, device)]
        number = len(graphs)
        log_memory, log_time, op_time_s, *embeddings = (torch.cat(values).double() for values in zip(*parts, strict=True))
        raw = RawPrediction(
            log_value={"memory": log_memory.numpy(), "time": log_time.numpy()},
            op_time_s=op_time_s.numpy().reshape(number, -1),
            embedding=dict(zip(TARGETS, embeddings, strict=True)),
            time_shares=torch.zeros((number, 0), dtype=torch.float64),
            members=dict.fromkeys(TARGETS, np.zeros((number, 0))),
            alternatives=dict.fromkeys(TARGETS, torch.zeros((number, 0), dtype=torch.float64)),
            prior=self._priors,
            prior_scale=dict.fromkeys(TARGETS, np.ones(number)),
            shares={},
            known=dict.fromkeys(TARGETS, np.ones(number, dtype=np.bool_)),
            step_features=None,
        )
        everywhere = np.ones(number, dtype=np.bool_)
        return raw if self.trained_on(device) else by_physics(raw, graphs, device, dict.fromkeys(TARGETS, everywhere))

    def knows_compiled(self, graph: OpGraph, device: Device) -> bool:
        return False

    def interval_scale(self, target: str) -> float:
        return self._scales[target]

    def summary(self, device: Device, target: str) -> Summary:
        return NOTHING


class GpuBackend:
    """Networks and trees (`ensemble`), trained on tables of GPUs. Their memory was measured with cuDNN's benchmark mode on,
    their step time in half precision, or forward alone in float32."""

    def __init__(self, trained: FittedModel, summary: Summary = NOTHING) -> None:
        self._trained = trained
        self._summary = summary
        self.version = version_of(trained.card)

    def trained_on(self, device: Device) -> bool:
        return device.id in self._trained.card["trained_devices"]

    def predict(self, graphs: GraphBatch, device: Device) -> RawPrediction:
        references = self._references(graphs.skeleton, device)
        if references:
            raw = self._carried_over(self._of_weights(graphs, device, ["memory"]), graphs, device, references)
        else:
            raw = self._of_weights(graphs, device, TARGETS)
            if graphs.skeleton.precision == "fp32" and device.id not in _timed_in_float32():
                raw = by_operators(raw, graphs, device)
        assert raw.step_features is not None
        return raw._replace(
            alternatives={
                target: alternatives_of(target, raw.step_features, raw.log_value[target], raw.members[target])
                for target in TARGETS
            }
        )

    def _references(self, skeleton: OpGraph, device: Device) -> list[Device]:
        """The GPUs with training rows for the time of ``skeleton``. Empty: this GPU has such rows, or no GPU has.

        A network's factor over its roofline transfers between cards. It transfers better than predictions of networks and trees
        from a card's data sheet. 1,165 networks were measured on the RTX 3090 and the RTX 4090. From the RTX 3090's factor
        alone, the error of the RTX 4090's inference time is 8.5%. From networks and trees that have not seen that card, it is
        14%.
        """
        if skeleton.precision == "fp32" or self._trained_group(skeleton, device) is not None:
            return []
        known = [resolve_device(name) for name in self._trained.card["trained_devices"]]
        return [other for other in known if other.kind == "cuda" and self._trained_group(skeleton, other) is not None]

    def knows_compiled(self, graph: OpGraph, device: Device) -> bool:
        if graph.precision == "fp32":
            return False
        return self._trained_group(graph, device) is not None or bool(self._references(graph, device))

    def _trained_group(self, skeleton: OpGraph, device: Device) -> str | None:
        """The group of training rows for the time of ``skeleton`` on ``device``. None: there are no such rows.

        The weights treat both half precisions as one. Their training networks with convolutions include transformers. The
        roofline has the rates and casts in which these differ.
        """
        own = Setting.of(skeleton, device)
        candidates = [own]
        if own.precision != "fp32":
            candidates.append(dataclasses.replace(own, precision=_TRAINED_HALF))
            if own.is_perceptron:
                candidates.append(dataclasses.replace(own, precision=_TRAINED_HALF, has_convolutions=True))
        scales = self._trained.calibration.scale
        return next((setting.group for setting in candidates if f"time/{setting.group}" in scales), None)

    def _carried_over(
        self, own: RawPrediction, graphs: GraphBatch, device: Device, references: Sequence[Device]
    ) -> RawPrediction:
        """Complete ``own``, which has the memory, with a time carried over from a reference GPU.

        It is the time on the reference nearest by the roofline, times the ratio of both rooflines.
        """
        roofline = batch_roofline_s(graphs, device)
        totals = np.array([np.maximum(batch_roofline_s(graphs, other).sum(axis=1), 1e-12) for other in references])
        apart = np.abs(np.log(np.maximum(roofline.sum(axis=1), 1e-12) / totals))  # shape: (references, C)
        nearest, number = apart.argmin(axis=0), len(graphs)
        reference_log_s, sigma, members = np.empty(number), np.empty(number), np.empty((number, _NUM_MEMBERS))
        for at in np.unique(nearest).tolist():
            rows = np.flatnonzero(nearest == at)
            found = self._of_weights(_subset(graphs, rows), references[at], ["time"])
            reference_log_s[rows], sigma[rows] = found.log_value["time"], found.prior_scale["time"]
            members[rows] = found.members["time"]
        rows = np.arange(number)
        factor = np.exp(reference_log_s) / totals[nearest, rows]
        sigma = np.hypot(sigma, _CARD_LOG_SIGMA * np.maximum(1.0, apart[nearest, rows] / _CARDS_APART))
        value = np.log(np.maximum(roofline.sum(axis=1) * factor, 1e-12))
        unsure = sigma > UNTRAINED_LOG_SIGMA["time"]
        moved = members + (value - reference_log_s)[:, None]
        raw = own._replace(
            log_value=own.log_value | {"time": value},
            members=own.members | {"time": np.where(unsure[:, None], own.members["time"], moved)},
            op_time_s=roofline * factor[:, None],
            prior_scale=own.prior_scale | {"time": sigma},
            known=own.known | {"time": np.ones(number, dtype=np.bool_)},
        )
        return by_physics(raw, graphs, device, {"time": unsure})

    def _of_weights(self, graphs: GraphBatch, device: Device, targets: Sequence[str]) -> RawPrediction:
        """Prediction of networks and trees for ``targets``. The values of another target are meaningless."""
        skeleton, number = graphs.skeleton, len(graphs)
        setting, known_gpu = Setting.of(skeleton, device), self.trained_on(device)
        trained_group = self._trained_group(skeleton, device)
        unknown = {target: np.full(number, not _covers(target, skeleton)) for target in TARGETS}
        value = {target: np.zeros(number) for target in TARGETS}
        sigma = {target: np.full(number, UNTRAINED_LOG_SIGMA[target]) for target in TARGETS}
        members = dict.fromkeys(TARGETS, np.full((number, _NUM_MEMBERS), np.nan))
        shares: dict[str, Floats] = {}
        if any(_covers(target, skeleton) for target in TARGETS):
            steps = steps_of(self._trained.learner, graphs, device)
            features = np.stack([step.view["sums"] for step in steps])
            requested = [target for target in targets if _covers(target, skeleton)]
            requested += _SHARES if setting.is_perceptron else ()
            predicted, spread, members = _predict_with_members(self._trained.learner, requested, steps)
            calibration, group = self._trained.calibration, trained_group or setting.group
            for target in TARGETS:
                unknown[target] |= ~np.isfinite(predicted[target])
                value[target] = np.where(np.isfinite(predicted[target]), predicted[target], 0.0)
                sigma[target] = np.array(
                    [calibration.log_sigma(target, group, one, known_gpu=known_gpu) for one in spread[target].tolist()]
                )
            if setting.is_perceptron:
                shares = {name: np.array(list(map(share_of, predicted[name].tolist()))) for name in _SHARES}
            # On cards much faster than all training rows, networks and trees predict badly (a B200 slower than a P4), and their
            # sigma is large. Without training rows for the setting, the prediction with the smaller sigma is used.
            if not known_gpu or trained_group is None:
                unknown["time"] |= sigma["time"] > UNTRAINED_LOG_SIGMA["time"]
        else:
            features = step_features(graphs, device)
        roofline = batch_roofline_s(graphs, device)
        raw = RawPrediction(
            log_value=value,
            op_time_s=roofline * (np.exp(value["time"]) / np.maximum(roofline.sum(axis=1), 1e-12))[:, None],
            embedding=dict.fromkeys(TARGETS, embedding_of(features)),
            time_shares=time_shares_of(features),
            members=members,
            alternatives={},
            prior=dict.fromkeys(TARGETS, _GUESSED_PRIOR),
            prior_scale=sigma,
            shares=shares,
            known={target: np.ones(number, dtype=np.bool_) for target in TARGETS},
            step_features=features,
        )
        return by_physics(raw, graphs, device, unknown)

    def interval_scale(self, target: str) -> float:
        return 1.0

    def summary(self, device: Device, target: str) -> Summary:
        return self._summary.of(device.id, target)


def scale_of(log_sigma: float, of_the_process: float) -> float:
    """Share of the process's correction that applies to a step with this sigma, beside the sigma of the measured runs."""
    return min(1.0, _SURER * log_sigma / of_the_process)


def inputs_of_summary(summary: Summary, target: str) -> GPInputs:
    """Inputs of the residual process for the steps of a summary with at least one step, at a scale of 1."""
    sums = summary.sums
    alternatives = alternatives_of(target, sums, summary.log_value[target], summary.members[target])
    return as_shipped(gp_inputs(embedding_of(sums), time_shares_of(sums), alternatives))


def gp_inputs(
    x: torch.Tensor,
    time_shares: torch.Tensor,
    alternatives: torch.Tensor,
    *,
    regime: torch.Tensor | float = 0.0,
    scale: torch.Tensor | float = 1.0,
    setting: torch.Tensor | float = 0.0,
) -> GPInputs:
    """Inputs of the residual process for C steps. A single number holds for all of them."""
    columns = (torch.as_tensor(column, dtype=torch.float64).expand(len(x)) for column in (regime, scale, setting, 0.0))
    return GPInputs(x, time_shares, kernels_of(time_shares), alternatives, *columns)


def _restricted(learner: Learner, targets: Sequence[str]) -> Learner:
    """``learner`` without the forests of other targets, which take most of its time."""
    if not isinstance(learner, GuardEnsemble):
        return learner
    names = {*targets, *(["limit"] if "memory" in targets else [])}
    few = copy.copy(learner)
    few.forests = {name: forests for name, forests in learner.forests.items() if name in names}
    return few


class _CachedEnsemble(NamedTuple):
    """An ensemble with the members' predictions already computed."""

    learner: Ensemble
    predictions: list[Predicted]

    def parts(self, runs: Sequence[Example]) -> list[Predicted]:
        return self.predictions

    def combine(self, parts: Sequence[Predicted], runs: Sequence[Example]) -> Predicted:
        return self.learner.combine(parts, runs)


def _predict_with_members(
    learner: Learner, targets: Sequence[str], runs: Sequence[Example]
) -> tuple[Predicted, Predicted, dict[str, npt.NDArray[np.float64]]]:
    """Predict the requested ``targets`` of ``runs``.

    Returns:
        The ensemble's predictions, the standard deviations between its members, and by target the predictions of networks and
        trees alone, shape (n, 2).
    """
    restricted = _restricted(learner, targets)
    missing = np.full(len(runs), np.nan)
    alone = dict.fromkeys(TARGETS, np.stack([missing] * _NUM_MEMBERS, 1))
    if not isinstance(restricted, GuardEnsemble):
        return *predict_with_spread(restricted, runs), alone
    parts, number = restricted.parts(runs), restricted.settings["networks"]
    of_kind = (parts[:number], parts[number:])
    for target in set(TARGETS).intersection(targets):
        alone[target] = np.stack([np.mean([part[target] for part in some] or [missing], axis=0) for some in of_kind], 1)
    cached: Any = _CachedEnsemble(restricted, parts)  # all of the Learner protocol that is needed here
    return *predict_with_spread(cached, runs), alone


def _subset(graphs: GraphBatch, rows: npt.NDArray[np.int64]) -> GraphBatch:
    """The graphs of ``rows``; the batch itself if these are all, because it caches intermediate results."""
    return graphs if len(rows) == len(graphs) else graphs[rows]


def by_physics(
    raw: RawPrediction, graphs: GraphBatch, device: Device, rows: Mapping[str, npt.NDArray[np.bool_]]
) -> RawPrediction:
    """Replace the values of some ``rows`` (C,) of each target by replay and roofline, with their sigma.

    The prior of a target changes for all rows, so it must be the guessed one or all rows must be chosen.
    """
    for target, chosen in rows.items():
        if not chosen.any():
            continue
        op_time_s = raw.op_time_s
        if target == "memory":
            num_bytes = graphs.peak_live_bytes if device.kind == "cpu" else graphs.reserved_bytes
            value = np.log((np.maximum(num_bytes, 1) + device.context_bytes).astype(np.float64))
        else:
            bare = batch_roofline_s(graphs, device) * _UNTRAINED_TIME_FACTOR
            value = np.log(np.maximum(bare.sum(axis=1), 1e-12))
            op_time_s = np.where(chosen[:, None], bare, op_time_s)
        on_gpu = target == "memory" and device.kind == "cuda"
        unsure = _replay_log_sigma(graphs, np.exp(value)) if on_gpu else UNTRAINED_LOG_SIGMA[target]
        scale = np.where(chosen, unsure, raw.prior_scale[target])
        raw = raw._replace(
            log_value=raw.log_value | {target: np.where(chosen, value, raw.log_value[target])},
            op_time_s=op_time_s,
            prior=raw.prior | {target: _GUESSED_PRIOR},
            prior_scale=raw.prior_scale | {target: scale},
            known=raw.known | {target: raw.known[target] & ~chosen},
        )
    return raw


def _replay_log_sigma(graphs: GraphBatch, num_bytes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | float:
    """Standard deviation of the replay's memory, as a logarithm: a relative and a constant part. Shape: (C,) → (C,)."""
    skeleton = graphs.skeleton
    settings = skeleton.mode, skeleton.precision, skeleton.layout
    switches = _REPLAYED_OPTIONS.issuperset(skeleton.options)
    if settings != ("train", "fp32", "nchw") or not switches or skeleton.unmodelled or "rnn" in skeleton.kinds:
        return UNTRAINED_LOG_SIGMA["memory"]
    return np.hypot(_REPLAY_LOG_SIGMA, _LOADED_BYTES_SIGMA / num_bytes)


def by_operators(raw: RawPrediction, graphs: GraphBatch, device: Device) -> RawPrediction:
    """``raw`` with the time from trees on single operators, for GPUs without a measured float32 step.

    Where most of the roofline is in operators without training rows (convolutions, recurrent cells), the time stays.
    The interval is that of single operators on a left-out GPU, because too few whole steps were measured for a calibration. The
    errors of a sum are smaller than that.
    """
    roofline = batch_roofline_s(graphs, device)
    total_s = roofline.sum(axis=1)
    rows = np.flatnonzero(2 * np.where(kernel_kinds(graphs) == len(SUPPORTED_KINDS), roofline, 0).sum(axis=1) < total_s)
    if not len(rows):
        return raw
    forest = _operator_forest()
    predicted, spread = predict_with_spread(forest.learner, steps_of(forest.learner, _subset(graphs, rows), device))
    sigma = [forest.calibration.log_sigma("time", OPERATOR, one, known_gpu=False) for one in spread["time"].tolist()]
    value, scale, op_time_s = raw.log_value["time"].copy(), raw.prior_scale["time"].copy(), raw.op_time_s.copy()
    value[rows] = predicted["time"]
    scale[rows] = np.minimum(sigma, UNTRAINED_LOG_SIGMA["time"])  # no larger than the sigma of bare physics
    op_time_s[rows] = roofline[rows] * (np.exp(value[rows]) / np.maximum(total_s[rows], 1e-12))[:, None]
    known = raw.known["time"].copy()
    known[rows] = True
    return raw._replace(
        log_value=raw.log_value | {"time": value},
        op_time_s=op_time_s,
        prior_scale=raw.prior_scale | {"time": scale},
        known=raw.known | {"time": known},
    )


@functools.cache
def _operator_forest() -> FittedModel:
    """The shipped weights for single operators."""
    folder = files("perfguard_models") / "weights"
    return read_trained(folder / "operator-forest.safetensors", folder / "operator-forest.json", "operator-forest")


@functools.cache
def _timed_in_float32() -> frozenset[str]:
    """GPUs whose float32 operators were measured. For others, the tables have only convolutions or half precision."""
    floors = _operator_forest().learner.state()[1]["floors"]
    return frozenset(gpu for key in floors if (gpu := key.partition(" ")[2]))


def _covers(target: str, graph: OpGraph) -> bool:
    """Whether training rows cover ``target`` of such steps: memory of perceptrons, and of others in benchmark mode."""
    if target == "memory":
        unlike = _UNLIKE_PERCEPTRONS if graph.mode == "train" else CONVOLUTION_KINDS
        return "cudnn_benchmark" in graph.options or graph.kinds.isdisjoint(unlike)
    if graph.kinds.isdisjoint(CONVOLUTION_KINDS):
        return True
    return graph.precision != "fp32" or graph.mode == "infer"


_GUESSED_PRIOR = ResidualPrior(
    bias=_BIAS,
    linear=_LINEAR,
    local=_LOCAL,
    length=1.0,
    noise=_NOISE,
    trust=_TRUST,
    kernels=_KERNELS,
    of_the_step=_OF_THE_STEP,
    guessed=True,
)
"""A residual of standard deviation 1. Most of it is common to the runs of one machine."""


def embedding_of(sums: npt.NDArray[np.float32]) -> torch.Tensor:
    """Embedding of C steps from their step features ``sums``, each number roughly within ±1. Shape: (C, len(_EMBEDDED))."""
    middles, widths = (np.array([row[part] for row in _EMBEDDED]) for part in (1, 2))
    return torch.from_numpy((sums[:, _EMBEDDED_INDEX].astype(np.float64) - middles) / widths)


def time_shares_of(sums: npt.NDArray[np.float32]) -> torch.Tensor:
    """Shares of time of each of C steps, in units of the length scale. Shape: (C, len(_TIME_SHARES))."""
    return torch.from_numpy(sums[:, _TIME_SHARES_INDEX].astype(np.float64)) / _APART


def kernels_of(time_shares: torch.Tensor) -> torch.Tensor:
    """The shares of each kind of convolution, in separate columns for each layout and for compiled steps.

    ``time_shares`` is from :func:`time_shares_of`. Shape: (C, 4 * len(_CONVOLVED)); (C, 0) without shares.
    """
    if not time_shares.shape[1]:
        return time_shares
    shares, flags = _APART * time_shares[:, _CONVOLVED], time_shares[:, _SWITCHES] > 0
    return torch.cat(
        [shares * (flags == torch.tensor(both)).all(1, keepdim=True) for both in itertools.product((False, True), repeat=2)], 1
    )


def alternatives_of(
    target: str, sums: npt.NDArray[np.float32], log_value: npt.NDArray[np.float64], members: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Distances of physics and of the ``members`` (C, 2) from ``log_value`` (C,). Shape: (C, e)."""
    apart = np.clip(np.nan_to_num(members - log_value[:, None]), -_FARTHEST_MEMBER, _FARTHEST_MEMBER) * _TRUST_IN_MEMBERS
    return torch.from_numpy(np.concatenate([physics_of(target, sums, log_value), apart], axis=1))


def physics_of(target: str, sums: npt.NDArray[np.float32], log_value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Physics minus ``log_value`` (C,), and for memory the share of a constant gibibyte. Shape: (C, 3) or (C, 1)."""
    by_name = ("log_reserved", "log_live") if target == "memory" else ("log_roofline",)
    physics = sums[:, [STEP_FEATURES.index(name) for name in by_name]].astype(np.float64)
    columns = [np.clip(physics - log_value[:, None], -_FARTHEST, _FARTHEST)]
    if target == "memory":
        columns.append(np.minimum(2**30 / np.exp(physics[:, :1]), _MOST_OF_A_CONSTANT))
    return np.concatenate(columns, axis=1)
