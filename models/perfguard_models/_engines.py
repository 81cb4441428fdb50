"""What GuardNet asks of its weights, for each kind of device: a correction of physics, how unsure it is, and where it ends."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from perfguard.devices import resolve_device
from perfguard.exceptions import PredictorError
from perfguard.features import FEATURE_VERSION, featurize
from perfguard.graph import OpGraph, SizedGraphs, roofline_of_all, roofline_s
from perfguard.sized_features import featurize_all
from perfguard_models._network import Correction, GuardNetwork, batches_of
from perfguard_models._residual import Place, ResidualPrior, as_shipped
from perfguard_models.calibration import OPERATOR
from perfguard_models.ensemble import GuardEnsemble
from perfguard_models.kernel_shapes import TAUGHT
from perfguard_models.kernel_shapes import _kind_of as kind_of
from perfguard_models.learner import Ensemble, Example, Learner, Predicted, Step, predict_with_spread, share_of
from perfguard_models.quick_views import quick_sums_of
from perfguard_models.setting import Setting
from perfguard_models.sized_operators import operators_of_all
from perfguard_models.sized_sums import sums_of_all
from perfguard_models.summary import NOTHING, Summary
from perfguard_models.sums import SUMS
from perfguard_models.trained import Trained, read_trained, step_of
from perfguard_models.weight_files import check_hash, version_of

if TYPE_CHECKING:
    from perfguard.devices import Device

TARGETS = ("memory", "time")
_SHARES = ("gpu_util", "sm_active")
"""Measured of perceptrons alone."""
UNTRAINED_LOG_SIGMA = {"memory": 0.2, "time": 0.6}
"""How far bare physics is from a run that is unlike all that was learnt: the driver's reading is within 10% of replay and
context on average, but convolution workspaces can double it; a step takes one to four times its roofline."""
_CARD_LOG_SIGMA = 0.1
"""Standard deviation of the factor beyond the roofline from the RTX 3090 to the RTX 4090, as a logarithm: 90% lie within 0.17."""
_CARDS_APART = 0.45
"""How far these two are apart by the roofline; the standard deviation grows with the distance."""
_UNTRAINED_TIME_FACTOR = 2.0
_LEARNT_HALF = "amp-fp16"
"""The half precision that measured runs had."""
_CONVOLUTIONS = ("conv", "conv_backward")
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
"""So many times surer than of the runs that were measured, a prediction is moved less by what these teach."""
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
"""Sums that the residual process sees: name, middle and width."""
_EMBEDDED_INDEX = [SUMS.index(name) for name, _, _ in _EMBEDDED]
_SPENT = (
    *(name for name in SUMS if name.startswith(("time_", "name_", "product_"))),
    *(name for name in SUMS if name.startswith("conv_") and not name.startswith("conv_log_")),
    "nhwc", "compiled", "launch_share", "traffic_share",
)  # fmt: skip
"""Shares of the roofline, and flags, by which the process tells neighbours."""
_SPENT_INDEX = [SUMS.index(name) for name in _SPENT]
_CONVOLVED = [index for index, name in enumerate(_SPENT) if name.startswith("conv_")]
_SWITCHES = [_SPENT.index(name) for name in ("nhwc", "compiled")]
_APART = 0.15
"""How far two shares are apart that make a difference."""


class Answer(NamedTuple):
    """What weights say of a graph on a device. By target: "memory" in log bytes, "time" in log seconds of a step."""

    log_value: dict[str, float]
    op_time_s: torch.Tensor  # shape: (num_ops,)
    embedding: dict[str, torch.Tensor]  # shapes: (1, d)
    spent: torch.Tensor  # shape: (1, f)
    members: dict[str, npt.NDArray[np.float64]]
    """What the networks alone and the trees alone say; NaN where they say nothing. Shapes: (2,), or (0,) where there are none."""
    experts: dict[str, torch.Tensor]
    """How far physics and the members are from the value. Shapes: (1, e)"""
    prior: dict[str, ResidualPrior]
    """What is left unexplained before anything was measured on the device."""
    shares: dict[str, float]
    """"gpu_util" and "sm_active", 0 to 1, where the weights can say."""
    known: dict[str, bool]
    """Whether the like was learnt from. Where it was not, the value and its prior are those of physics: far outside its data a
    network invents."""
    sums: npt.NDArray[np.float32] | None
    """What :func:`perfguard_models.sums.sums_of` sees of the graph; None: nobody looked."""


class Answers(NamedTuple):
    """An :class:`Answer` for each of C graphs of one form."""

    log_value: dict[str, npt.NDArray[np.float64]]  # shapes: (C,)
    op_time_s: npt.NDArray[np.float64]  # shape: (C, num_ops)
    embedding: dict[str, torch.Tensor]  # shapes: (C, d)
    spent: torch.Tensor  # shape: (C, f)
    experts: dict[str, torch.Tensor]  # shapes: (C, e)
    prior: dict[str, ResidualPrior]
    prior_scale: dict[str, npt.NDArray[np.float64]]
    """What the standard deviations of ``prior`` are multiplied by. Shapes: (C,)"""
    shares: dict[str, npt.NDArray[np.float64]]  # shapes: (C,)
    known: dict[str, npt.NDArray[np.bool_]]  # shapes: (C,)
    sums: npt.NDArray[np.float32] | None  # shape: (C, len(SUMS))


class Engine(Protocol):
    """Weights for one kind of device."""

    version: str
    """Of the weights: another one for any other tensors or calibration."""

    def trained_on(self, device: Device) -> bool:
        """Whether runs on this very device were learnt from."""

    def answer(self, graph: OpGraph, device: Device) -> Answer:
        """What they say."""

    def answer_all(self, graphs: SizedGraphs, device: Device) -> Answers | None:
        """What they say of each; None: ask one by one."""

    def knows_compiled(self, graph: OpGraph, device: Device) -> bool:
        """Whether the weights have learnt from measured runs what compiling saves of such a graph."""

    def interval_scale(self, target: str) -> float:
        """By how much intervals are widened so that they hold."""

    def summary(self, device: Device, target: str) -> Summary:
        """Steps on the device of which the weights know the ``target``, for them that learn more; empty: there is none."""


class CpuEngine:
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

    def answer(self, graph: OpGraph, device: Device) -> Answer:
        with torch.inference_mode():
            correction: Correction = self._network(featurize(graph, device))
        answer = Answer(
            {"memory": float(correction.log_memory), "time": float(correction.log_time)},
            correction.op_time_s,
            {"memory": correction.memory_embedding.double(), "time": correction.time_embedding.double()},
            torch.zeros((1, 0), dtype=torch.float64),
            dict.fromkeys(TARGETS, np.zeros(0)),
            dict.fromkeys(TARGETS, torch.zeros((1, 0), dtype=torch.float64)),
            self._priors,
            {},
            dict.fromkeys(TARGETS, True),
            None,
        )
        return answer if self.trained_on(device) else by_physics(answer, graph, device, TARGETS)

    def answer_all(self, graphs: SizedGraphs, device: Device) -> Answers | None:
        features = featurize_all(graphs, device)
        with torch.inference_mode():
            parts = [self._network(batch) for batch in batches_of(features, graphs.form)]
        found = [torch.cat(values) for values in zip(*parts, strict=True)]
        log_memory, log_time, op_time_s, memory_embedding, time_embedding = found
        number = len(graphs)
        answers = Answers(
            {"memory": log_memory.double().numpy(), "time": log_time.double().numpy()},
            op_time_s.double().numpy().reshape(number, -1),
            {"memory": memory_embedding.double(), "time": time_embedding.double()},
            torch.zeros((number, 0), dtype=torch.float64),
            dict.fromkeys(TARGETS, torch.zeros((number, 0), dtype=torch.float64)),
            self._priors,
            dict.fromkeys(TARGETS, np.ones(number)),
            {},
            dict.fromkeys(TARGETS, np.ones(number, dtype=bool)),
            None,
        )
        if self.trained_on(device):
            return answers
        everywhere = np.ones(number, dtype=bool)
        return by_physics_of_all(answers, graphs, device, dict.fromkeys(TARGETS, everywhere))

    def knows_compiled(self, graph: OpGraph, device: Device) -> bool:
        return False

    def interval_scale(self, target: str) -> float:
        return self._scales[target]

    def summary(self, device: Device, target: str) -> Summary:
        return NOTHING


class GpuEngine:
    """Networks and trees (`ensemble`), trained on tables of GPUs. Their memory was measured with cuDNN's benchmark mode on,
    their step time in half precision, or forward alone in float32."""

    def __init__(self, trained: Trained, summary: Summary = NOTHING) -> None:
        self._trained = trained
        self._summary = summary
        self.version = version_of(trained.card)

    def trained_on(self, device: Device) -> bool:
        return device.id in self._trained.card["trained_devices"]

    def answer(self, graph: OpGraph, device: Device) -> Answer:
        reference = self._reference(graph, device)
        if reference is not None:
            answer = self._carried_over(self._answer(graph, device, ["memory"]), graph, device, reference)
        else:
            answer = self._answer(graph, device, TARGETS)
            if graph.precision == "fp32" and device.id not in _timed_in_float32():
                answer = by_operators(answer, graph, device)
        assert answer.sums is not None
        experts = {
            target: experts_of(target, answer.sums[None], np.array([answer.log_value[target]]), answer.members[target][None])
            for target in TARGETS
        }
        return answer._replace(experts=experts)

    def answer_all(self, graphs: SizedGraphs, device: Device) -> Answers | None:
        form = graphs.form
        learnt_as = self._learnt_as(form, device)
        if form.precision != "fp32" and learnt_as is None:
            return None  # each may be carried over from another card
        if form.precision == "fp32" and device.id not in _timed_in_float32() and not _are_untaught(graphs, device):
            return None  # and each may be answered by its operators
        number = len(graphs)
        roofline = roofline_of_all(graphs, device).astype(np.float32).astype(np.float64)
        unknown = {target: np.full(number, not _knows(target, form)) for target in TARGETS}
        value = {target: np.zeros(number) for target in TARGETS}
        sigma = {target: np.full(number, UNTRAINED_LOG_SIGMA[target]) for target in TARGETS}
        shares: dict[str, npt.NDArray[np.float64]] = {}
        sums = sums_of_all(graphs, device)
        members = dict.fromkeys(TARGETS, np.full((number, _NUM_MEMBERS), np.nan))
        if not all(rows.all() for rows in unknown.values()):
            setting, known_gpu = Setting.of(form, device), self.trained_on(device)
            views = operators_of_all(graphs, device)
            runs = [Step(device.id, setting.is_single, view | {"sums": row}) for view, row in zip(views, sums, strict=True)]
            wanted = [target for target in TARGETS if not unknown[target].all()]
            wanted += _SHARES if setting.is_perceptron else ()
            predicted, spread, members = _ask(self._trained.learner, wanted, runs)
            for target in TARGETS:
                unknown[target] |= ~np.isfinite(predicted[target])
                value[target] = np.where(np.isfinite(predicted[target]), predicted[target], 0)
                calibration, group = self._trained.calibration, learnt_as or setting.group
                spreads = spread[target].tolist()
                sigma[target] = np.array([calibration.log_sigma(target, group, s, known_gpu=known_gpu) for s in spreads])
            if setting.is_perceptron:
                shares = {name: predicted[name] for name in _SHARES if np.isfinite(predicted[name]).all()}
                shares = {name: np.array([share_of(logit) for logit in logits]) for name, logits in shares.items()}
            if not known_gpu or learnt_as is None:
                unknown["time"] |= sigma["time"] > UNTRAINED_LOG_SIGMA["time"]
        total_s = np.maximum(roofline.sum(axis=1), 1e-12)
        answers = Answers(
            value,
            roofline * (np.exp(value["time"]) / total_s)[:, None],
            dict.fromkeys(TARGETS, embedding_of(sums)),
            spent_of(sums),
            {},
            dict.fromkeys(TARGETS, prior_of(1.0)),
            sigma,
            shares,
            {target: np.ones(number, dtype=bool) for target in TARGETS},
            sums,
        )
        answers = by_physics_of_all(answers, graphs, device, unknown)
        experts = {target: experts_of(target, sums, answers.log_value[target], members[target]) for target in TARGETS}
        return answers._replace(experts=experts)

    def _reference(self, graph: OpGraph, device: Device) -> Device | None:
        """The GPU whose time for ``graph`` was learnt in this setting and is nearest by the roofline.

        None: this GPU's was, or none's. What a network takes beyond its roofline carries over from card to card better than
        what networks and trees make of a card's data sheet: of 1,165 networks that were measured on both, the RTX 3090's factor
        alone gives the RTX 4090's inference to 8.5%; not having seen that card, they give it to 14%.
        """
        if graph.precision == "fp32" or self._learnt_as(graph, device) is not None:
            return None
        known = [resolve_device(name) for name in self._trained.card["trained_devices"]]
        able = [other for other in known if other.kind == "cuda" and self._learnt_as(graph, other) is not None]
        return min(able, key=lambda other: _apart(graph, device, other), default=None)

    def knows_compiled(self, graph: OpGraph, device: Device) -> bool:
        is_half = graph.precision != "fp32"
        return is_half and (self._learnt_as(graph, device) is not None or self._reference(graph, device) is not None)

    def _learnt_as(self, graph: OpGraph, device: Device) -> str | None:
        """As which group of runs the time of ``graph`` on ``device`` was learnt; None: as none.

        Half precisions are one to the weights, and the networks with convolutions that they learnt from have transformers among
        them; the roofline knows of the rates and casts in which they differ.
        """
        own = Setting.of(graph, device)
        alike = [own]
        if own.precision != "fp32":
            alike.append(replace(own, precision=_LEARNT_HALF))
            if own.is_perceptron:
                alike.append(replace(own, precision=_LEARNT_HALF, has_convolutions=True))
        scales = self._trained.calibration.scale
        return next((setting.group for setting in alike if f"time/{setting.group}" in scales), None)

    def _carried_over(self, own: Answer, graph: OpGraph, device: Device, reference: Device) -> Answer:
        """``own``, which knows memory, with the time that ``reference`` takes, times what the roofline says of both."""
        theirs = self._answer(graph, reference, ["time"])
        roofline = torch.from_numpy(roofline_s(graph, device)).float()
        factor = math.exp(theirs.log_value["time"]) / max(float(roofline_s(graph, reference).sum()), 1e-12)
        apart = max(1.0, _apart(graph, device, reference) / _CARDS_APART)
        sigma = math.hypot(theirs.prior["time"].bias / _BIAS, _CARD_LOG_SIGMA * apart)
        if sigma > UNTRAINED_LOG_SIGMA["time"]:
            return by_physics(own, graph, device, ["time"])
        value = math.log(max(float(roofline.sum()) * factor, 1e-12))
        return own._replace(
            log_value=own.log_value | {"time": value},
            members=own.members | {"time": theirs.members["time"] + value - theirs.log_value["time"]},
            op_time_s=roofline * factor,
            prior=own.prior | {"time": prior_of(sigma)},
            known=own.known | {"time": True},
        )

    def _answer(self, graph: OpGraph, device: Device, wanted: Sequence[str]) -> Answer:
        """Of ``wanted`` targets; what is said of the other one is worth nothing."""
        roofline = torch.from_numpy(roofline_s(graph, device)).float()
        unknown = [target for target in TARGETS if not _knows(target, graph)]
        if len(unknown) == len(TARGETS):  # nothing to ask
            sums = quick_sums_of(graph, device)
            sigma = UNTRAINED_LOG_SIGMA
            value = dict.fromkeys(TARGETS, 0.0)
            members = dict.fromkeys(TARGETS, np.full(_NUM_MEMBERS, np.nan))
            shares: dict[str, float] = {}
        else:
            setting, run = Setting.of(graph, device), step_of(self._trained.learner, graph, device)
            asked = [*(target for target in wanted if target not in unknown), *(_SHARES if setting.is_perceptron else ())]
            predicted, spread, members_of_all = _ask(self._trained.learner, asked, [run])
            members = {target: members_of_all[target][0] for target in TARGETS}
            value = {target: float(predicted[target][0]) for target in TARGETS}
            unknown = [target for target in TARGETS if target in unknown or not math.isfinite(value[target])]
            value = {target: found if math.isfinite(found) else 0.0 for target, found in value.items()}
            sums = run.view["sums"]
            logits = {name: float(predicted[name][0]) for name in _SHARES} if setting.is_perceptron else {}
            shares = {name: share_of(logit) for name, logit in logits.items() if math.isfinite(logit)}
            known_gpu, learnt_as = self.trained_on(device), self._learnt_as(graph, device)
            group = learnt_as or setting.group
            sigma = {
                target: self._trained.calibration.log_sigma(target, group, float(spread[target][0]), known_gpu=known_gpu)
                for target in TARGETS
            }
            # On a card much faster than any that was learnt from, networks and trees took a B200 for slower than a P4, and said
            # that they were not sure. In a setting that they never saw, physics answers where it is surer.
            if (not known_gpu or learnt_as is None) and sigma["time"] > UNTRAINED_LOG_SIGMA["time"]:
                unknown = list({*unknown, "time"})
        answer = Answer(
            value,
            roofline * (math.exp(value["time"]) / max(float(roofline.sum()), 1e-12)),
            dict.fromkeys(TARGETS, embedding_of(sums[None])),
            spent_of(sums[None]),
            members,
            {},
            {target: prior_of(sigma[target]) for target in TARGETS},
            shares,
            dict.fromkeys(TARGETS, True),
            sums,
        )
        return by_physics(answer, graph, device, unknown)

    def interval_scale(self, target: str) -> float:
        return 1.0

    def summary(self, device: Device, target: str) -> Summary:
        return self._summary.of(device.id, target)


def scale_of(log_sigma: float, of_the_process: float) -> float:
    """By how much what is learnt from runs moves a step whose prediction is so sure beside theirs."""
    return min(1.0, _SURER * log_sigma / of_the_process)


def place_of(summary: Summary, target: str) -> Place:
    """Where the residual process sees the steps of a summary, of which there is at least one; all at a scale of 1."""
    sums = summary.sums
    experts = experts_of(target, sums, summary.log_value[target], summary.members[target])
    return as_shipped(placed(embedding_of(sums), spent_of(sums), experts))


def placed(
    x: torch.Tensor,
    spent: torch.Tensor,
    experts: torch.Tensor,
    *,
    regime: torch.Tensor | float = 0.0,
    scale: torch.Tensor | float = 1.0,
    setting: torch.Tensor | float = 0.0,
) -> Place:
    """Where the residual process sees C steps; what is one number is the same for all of them."""
    columns = (torch.as_tensor(column, dtype=torch.float64).expand(len(x)) for column in (regime, scale, setting, 0.0))
    return Place(x, spent, kernels_of(spent), experts, *columns)


def _asked_for(learner: Learner, targets: Sequence[str]) -> Learner:
    """``learner`` without the forests that would answer for other targets than ``targets``: they are most of its time."""
    if not isinstance(learner, GuardEnsemble):
        return learner
    names = {*targets, *(["limit"] if "memory" in targets else [])}
    few = copy.copy(learner)
    few.forests = {name: forests for name, forests in learner.forests.items() if name in names}
    return few


class _Heard(NamedTuple):
    """An ensemble whose members have spoken."""

    learner: Ensemble
    members: list[Predicted]

    def parts(self, runs: Sequence[Example]) -> list[Predicted]:
        return self.members

    def combine(self, parts: Sequence[Predicted], runs: Sequence[Example]) -> Predicted:
        return self.learner.combine(parts, runs)


def _ask(
    learner: Learner, targets: Sequence[str], runs: Sequence[Example]
) -> tuple[Predicted, Predicted, dict[str, npt.NDArray[np.float64]]]:
    """What ``runs`` cost, how far members are apart, and what networks and trees alone say of ``targets``, shapes (n, 2)."""
    asked = _asked_for(learner, targets)
    silent = np.full(len(runs), np.nan)
    alone = dict.fromkeys(TARGETS, np.stack([silent] * _NUM_MEMBERS, 1))
    if not isinstance(asked, GuardEnsemble):
        return *predict_with_spread(asked, runs), alone
    parts, number = asked.parts(runs), asked.settings["networks"]
    of_kind = (parts[:number], parts[number:])
    for target in set(TARGETS).intersection(targets):
        alone[target] = np.stack([np.mean([part[target] for part in some] or [silent], axis=0) for some in of_kind], 1)
    heard: Any = _Heard(asked, parts)  # as much of a learner as is asked for
    return *predict_with_spread(heard, runs), alone


def _apart(graph: OpGraph, device: Device, other: Device) -> float:
    """How far apart the rooflines of two GPUs are for ``graph``, as a logarithm."""
    return abs(math.log(max(float(roofline_s(graph, device).sum()), 1e-12) / max(float(roofline_s(graph, other).sum()), 1e-12)))


def by_physics(answer: Answer, graph: OpGraph, device: Device, targets: Sequence[str]) -> Answer:
    """``answer`` with the values of ``targets`` from replay and roofline, and as unsure as those are."""
    for target in targets:
        if target == "memory":
            num_bytes = graph.peak_live_bytes if device.kind == "cpu" else graph.reserved_bytes
            value, op_time_s = math.log(max(num_bytes, 1) + device.context_bytes), answer.op_time_s
        else:
            op_time_s = torch.from_numpy(roofline_s(graph, device)).float() * _UNTRAINED_TIME_FACTOR
            value = math.log(max(float(op_time_s.sum()), 1e-12))
        answer = answer._replace(
            log_value=answer.log_value | {target: value},
            op_time_s=op_time_s,
            prior=answer.prior | {target: prior_of(UNTRAINED_LOG_SIGMA[target])},
            known=answer.known | {target: False},
        )
    return answer


def by_physics_of_all(
    answers: Answers, graphs: SizedGraphs, device: Device, rows: Mapping[str, npt.NDArray[np.bool_]]
) -> Answers:
    """:func:`by_physics` where ``rows`` (C,) of a target says so: everywhere, or the priors must be multiples of `prior_of`."""
    for target, chosen in rows.items():
        if not chosen.any():
            continue
        op_time_s = answers.op_time_s
        if target == "memory":
            num_bytes = graphs.peak_live_bytes if device.kind == "cpu" else graphs.reserved_bytes
            value = np.log(np.maximum(num_bytes, 1) + device.context_bytes)
        else:
            bare = (roofline_of_all(graphs, device) * _UNTRAINED_TIME_FACTOR).astype(np.float32).astype(np.float64)
            value = np.log(np.maximum(bare.sum(axis=1), 1e-12))
            op_time_s = np.where(chosen[:, None], bare, op_time_s)
        sigma = np.where(chosen, UNTRAINED_LOG_SIGMA[target], answers.prior_scale[target])
        answers = answers._replace(
            log_value=answers.log_value | {target: np.where(chosen, value, answers.log_value[target])},
            op_time_s=op_time_s,
            prior=answers.prior | {target: prior_of(1.0)},
            prior_scale=answers.prior_scale | {target: sigma},
            known=answers.known | {target: answers.known[target] & ~chosen},
        )
    return answers


def by_operators(answer: Answer, graph: OpGraph, device: Device) -> Answer:
    """``answer`` with the time from trees on single operators, which cross to GPUs without a measured float32 step of their own.

    Where most of the roofline is in operators that nobody taught them (convolutions, recurrent cells), the answer stays. The
    interval is the one of single operators on a GPU that was left out: too few whole steps were measured to calibrate on, and
    the errors of a sum are smaller.
    """
    forest = _operator_forest()
    run = step_of(forest.learner, graph, device)
    seconds = run.view["kernel_count"] * run.view["kernel_roofline"]
    if 2 * seconds[run.view["kernel_kind"] == len(TAUGHT)].sum() >= seconds.sum():
        return answer
    predicted, spread = predict_with_spread(forest.learner, [run])
    value = float(predicted["time"][0])
    sigma = forest.calibration.log_sigma("time", OPERATOR, float(spread["time"][0]), known_gpu=False)
    sigma = min(sigma, UNTRAINED_LOG_SIGMA["time"])  # members apart do not make it less sure than bare physics is
    roofline = torch.from_numpy(roofline_s(graph, device)).float()
    return answer._replace(
        log_value=answer.log_value | {"time": value},
        op_time_s=roofline * (math.exp(value) / max(float(roofline.sum()), 1e-12)),
        prior=answer.prior | {"time": prior_of(sigma)},
        known=answer.known | {"time": True},
    )


def _are_untaught(graphs: SizedGraphs, device: Device) -> bool:
    """Whether :func:`by_operators` would leave the answer for each of ``graphs`` as it is."""
    kinds = [kind_of(op.name, op.kind, op.attributes.get("product")) for op in graphs.form.ops]
    seconds = roofline_of_all(graphs, device)
    untaught_s = seconds[:, np.array(kinds, dtype=np.int64) == len(TAUGHT)].sum(axis=1)
    return bool((2 * untaught_s >= seconds.sum(axis=1)).all())


@functools.cache
def _operator_forest() -> Trained:
    """The weights that come with the package."""
    folder = files("perfguard_models") / "weights"
    return read_trained(folder / "operator-forest.safetensors", folder / "operator-forest.json", "operator-forest")


@functools.cache
def _timed_in_float32() -> frozenset[str]:
    """GPUs whose float32 operators were measured. Of others in the tables there are convolutions or half precision alone."""
    floors = _operator_forest().learner.state()[1]["floors"]
    return frozenset(gpu for key in floors if (gpu := key.partition(" ")[2]))


def _knows(target: str, graph: OpGraph) -> bool:
    if graph.kinds.isdisjoint(_CONVOLUTIONS):
        return True
    if target == "memory":
        return "cudnn_benchmark" in graph.options
    return graph.precision != "fp32" or graph.mode == "infer"


def prior_of(sigma: float) -> ResidualPrior:
    """A residual of standard deviation ``sigma``, most of which runs on one machine have in common."""
    return ResidualPrior(
        bias=_BIAS * sigma,
        linear=_LINEAR * sigma,
        local=_LOCAL * sigma,
        length=1.0,
        noise=_NOISE * sigma,
        trust=min(_TRUST * sigma, _MOST_TRUST),
        kernels=_KERNELS * sigma,
        of_the_step=_OF_THE_STEP,
        guessed=True,
    )


def embedding_of(sums: npt.NDArray[np.float32]) -> torch.Tensor:
    """What a study varies, each roughly within ±1, of C steps' ``sums`` (C, len(SUMS)). Shape: (C, len(_EMBEDDED))."""
    middles, widths = (np.array([row[part] for row in _EMBEDDED]) for part in (1, 2))
    return torch.from_numpy((sums[:, _EMBEDDED_INDEX].astype(np.float64) - middles) / widths)


def spent_of(sums: npt.NDArray[np.float32]) -> torch.Tensor:
    """What each of C steps spends its time on, in steps that make a difference. Shape: (C, len(_SPENT))."""
    return torch.from_numpy(sums[:, _SPENT_INDEX].astype(np.float64)) / _APART


def kernels_of(spent: torch.Tensor) -> torch.Tensor:
    """Of :func:`spent_of`, the shares of each kind of convolution, in columns of their own for each layout and for compiled
    steps. Shape: (C, 4 * len(_CONVOLVED)); (C, 0) where nothing is known."""
    if not spent.shape[1]:
        return spent
    shares, flags = _APART * spent[:, _CONVOLVED], spent[:, _SWITCHES] > 0
    return torch.cat(
        [shares * (flags == torch.tensor(both)).all(1, keepdim=True) for both in itertools.product((False, True), repeat=2)], 1
    )


def experts_of(
    target: str, sums: npt.NDArray[np.float32], log_value: npt.NDArray[np.float64], members: npt.NDArray[np.float64]
) -> torch.Tensor:
    """How far physics and the ``members`` (C, 2) are from ``log_value`` (C,). Shape: (C, e)."""
    apart = np.clip(np.nan_to_num(members - log_value[:, None]), -_FARTHEST_MEMBER, _FARTHEST_MEMBER) * _TRUST_IN_MEMBERS
    return torch.from_numpy(np.concatenate([physics_of(target, sums, log_value), apart], axis=1))


def physics_of(target: str, sums: npt.NDArray[np.float32], log_value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What physics says less ``log_value`` (C,); of memory also what a constant gibibyte would add. Shape: (C, 3) or (C, 1)."""
    by_name = ("log_reserved", "log_live") if target == "memory" else ("log_roofline",)
    said = sums[:, [SUMS.index(name) for name in by_name]].astype(np.float64)
    columns = [np.clip(said - log_value[:, None], -_FARTHEST, _FARTHEST)]
    if target == "memory":
        columns.append(np.minimum(2**30 / np.exp(said[:, :1]), _MOST_OF_A_CONSTANT))
    return np.concatenate(columns, axis=1)
