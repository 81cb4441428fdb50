"""A learner behind the core's `Predictor` protocol: weights from files, intervals from its calibration, learning by an offset."""

from __future__ import annotations

import functools
import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from perfguard.exceptions import PredictorError
from perfguard.graph import OP_KINDS, OpGraph, roofline_s, unknown_operators, unknown_span
from perfguard.predictor import HALF_INTERVAL, TARGETS, Estimate, Observation, Prediction
from perfguard_models._surroundings import undisturbed
from perfguard_models.calibration import OPERATOR, Calibration
from perfguard_models.dataset import VIEWS, Arrays, Run, share_of
from perfguard_models.fusion import Compiled, as_compiled
from perfguard_models.learner import Learner, Predicted, predict_with_spread
from perfguard_models.quick_views import quick_operators_of, quick_sums_of
from perfguard_models.registry import learner_class
from perfguard_models.weight_files import check_hash, read_pair, write_pair

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from perfguard.devices import Device

FORMAT = 1
_QUICK: Mapping[str, Callable[[OpGraph, Device], Arrays]] = {
    "operators": quick_operators_of,
    "sums": lambda graph, device: {"sums": quick_sums_of(graph, device)},
}
"""In the place of VIEWS, with the same numbers."""
_UNKNOWN_LOG_SIGMA = 1.0
_PRIOR_RUNS = 1.0


class Trained(NamedTuple):
    """A fitted learner, its card and its calibration."""

    learner: Learner
    card: dict[str, Any]
    calibration: Calibration


def write_trained(out: Path, name: str, learner: Learner, card: dict[str, Any], calibration: Calibration) -> None:
    """OUT.safetensors, and OUT.json: the card, with the hash that binds it to the tensors."""
    tensors, settings = learner.state()
    document = {
        "format": FORMAT,
        "predictor": name,
        "settings": dict(settings),
        "columns": columns_of(learner),
        "calibration": {"floor": dict(calibration.floor), "scale": dict(calibration.scale)},
        **card,
    }
    write_pair(out, tensors, document)


def columns_of(learner: Learner) -> str:
    """A hash of the names of all columns that the learner reads: weights for others would read nonsense."""
    from perfguard_models import kernel_shapes, layers, operators, sums

    columns: dict[str, Any] = {
        "kernel_shapes": (kernel_shapes.TAUGHT, kernel_shapes.CARD, operators.NAMES),
        "layers": (layers.NODE_COLUMNS, layers.EDGE_COLUMNS, layers.GLOBAL_COLUMNS),
        "operators": (operators.COLUMNS, operators.NAMES, operators.DEVICE_COLUMNS),
        "sums": sums.SUMS,
    }
    read = [columns[view] for view in learner.views], OP_KINDS
    return hashlib.sha256(repr(read).encode()).hexdigest()[:16]


def read_trained(tensors_file: Traversable, card_file: Traversable, name: str) -> Trained:
    """What :func:`write_trained` wrote.

    Raises:
        PredictorError: if a file is missing, damaged, of another version, or they do not belong together.
    """
    mend = f"make them with `perfguard train TABLE --predictor {name} --out DIR`"
    return trained_of(*read_pair(tensors_file, card_file, f"The weights of {name!r}", mend), name)


def trained_of(data: bytes, card: Any, name: str) -> Trained:
    """What the two files hold.

    Raises:
        PredictorError: if they are damaged, of another version, or do not belong together.
    """
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise PredictorError(f"The card of {name!r} has another format than {FORMAT}. Train it again with this version.")
    check_hash(data, card, name)
    try:
        learner = learner_class(card["predictor"]).from_state(load_tensors(data), card["settings"])
        calibration = Calibration(card["calibration"]["floor"], card["calibration"]["scale"])
    except (RuntimeError, SafetensorError, KeyError, TypeError, ValueError, IndexError) as error:
        raise PredictorError(f"The weights {name!r} do not fit the predictor: {type(error).__name__}: {error}") from error
    if card.get("columns") != columns_of(learner):
        raise PredictorError(f"The weights {name!r} were made for other features than this PerfGuard has. Train them again.")
    return Trained(learner, card, calibration)


def as_run(learner: Learner, graph: OpGraph, device: Device) -> Run:
    """``graph`` on ``device`` as the learner sees it."""
    view: dict[str, Any] = {}
    for name in learner.views:
        view |= _QUICK[name](graph, device) if name in _QUICK else VIEWS[name].see(graph, device)
    return as_setting(graph, device)._replace(view=view)


def as_setting(graph: OpGraph, device: Device) -> Run:
    """``graph`` on ``device`` as a run that nobody has looked at yet."""
    has_convolution = "conv" in graph.kinds
    words = [
        graph.precision,
        *([graph.layout] if has_convolution else []),
        *(["compiled"] if "compiled" in graph.options else []),
    ]
    table = "operator" if len(graph.op_starts) == 2 else "workload" if has_convolution else "perceptron"
    return Run(
        table=table,
        source="",
        family="",
        model="",
        gpu=device.id,
        mode=graph.mode,
        variant=" ".join(words),
        structure="",
        batch_size=1,
        labels={},
        capacity_bytes=device.memory_bytes,
        fits=True,
        view={},
    )


def group_of(run: Run) -> str:
    """The group that a run is calibrated with: what can be told from its graph and its device."""
    if run.table == "operator":
        return OPERATOR
    return f"{run.gpu} {run.mode} {run.variant}{' with convolutions' if run.table == 'workload' else ''}"


def _compiled(graph: OpGraph, device: Device) -> Compiled | None:
    """What is launched for a compiled graph; None: it is not, or in half precision, of which compiled runs were learnt."""
    return None if device.kind == "cuda" and graph.precision != "fp32" else as_compiled(graph, device)


class Served:
    """A fitted learner as a predictor. What it cannot say comes from physics, and is said to be unsure."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._offsets: dict[tuple[str, str], float] = {}
        self._cache: WeakKeyDictionary[OpGraph, dict[str, tuple[Predicted, Predicted]]] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        """Name and version."""
        return f"{self._trained.card['predictor']}-{self._trained.card.get('version', 1)}"

    @undisturbed
    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        """The cost of ``graph`` on ``device``; see :class:`perfguard.predictor.Predictor`."""
        compiled = _compiled(graph, device)
        memory = self._estimate("memory", graph, device)
        step_time = self._estimate("time", graph, device)
        return Prediction(
            peak_memory=memory,
            step_time=step_time,
            total_time=None if steps is None else step_time.scaled(steps),
            predictor=self.name,
            device_id=device.id,
            trained_on_device=device.id in self._trained.card["trained_devices"],
            bytes_at_peak={kind.name.lower(): num_bytes for kind, num_bytes in graph.bytes_by_kind().items() if num_bytes},
            gpu_util=self._share("gpu_util", graph, device),
            sm_active=self._share("sm_active", graph, device),
            unmodelled=graph.unmodelled if compiled is None else compiled.graph.unmodelled,
        )

    @undisturbed
    def fine_tune(self, observations: Sequence[Observation]) -> None:
        """A constant factor for each device: the median of what was measured over what was predicted."""
        residuals: dict[tuple[str, str], list[float]] = {}
        for row in observations:
            if row.measurement.status != "ok":
                continue  # out of memory: a lower bound, no measurement of either
            for target in TARGETS:
                if value := row.measured(target):
                    residual = math.log(value) - self._raw(target, row.graph, row.device)[0]
                    residuals.setdefault((row.device.id, target), []).append(residual)
        for key, found in residuals.items():
            self._offsets[key] = statistics.median(found) * len(found) / (len(found) + _PRIOR_RUNS)

    def _answers(self, graph: OpGraph, device: Device) -> tuple[Predicted, Predicted]:
        of_graph = self._cache.setdefault(graph, {})
        key = repr(device)
        if key not in of_graph:
            learner = self._trained.learner
            of_graph[key] = predict_with_spread(learner, [as_run(learner, graph, device)])
        return of_graph[key]

    def _raw(self, target: str, graph: OpGraph, device: Device) -> tuple[float, float]:
        """Logarithm of the prediction and its standard deviation."""
        compiled = _compiled(graph, device)
        if compiled is not None:
            value, log_sigma = self._raw(target, compiled.eager, device)
            kernels_s, eager_s = (float(roofline_s(seen, device).sum()) for seen in (compiled.graph, compiled.eager))
            share = compiled.memory_share(device) if target == "memory" else kernels_s / max(eager_s, 1e-12)
            return value + math.log(share), log_sigma
        predicted, spreads = self._answers(graph, device)
        value = float(predicted[target][0])
        if not math.isfinite(value):
            if target == "memory":
                value = math.log(graph.peak_live_bytes + device.context_bytes)
            else:
                value = math.log(max(float(roofline_s(graph, device).sum()), 1e-9))
            return value, _UNKNOWN_LOG_SIGMA
        known = device.id in self._trained.card["trained_devices"]
        group = group_of(as_setting(graph, device))
        return value, self._trained.calibration.log_sigma(target, group, float(spreads[target][0]), known_gpu=known)

    def _estimate(self, target: str, graph: OpGraph, device: Device) -> Estimate:
        value, log_sigma = self._raw(target, graph, device)
        if unknown_operators(graph):
            memory_bytes = math.exp(self._raw("memory", graph, device)[0])
            half = unknown_span(graph, roofline_s(graph, device).tolist(), memory_bytes)[target] / 2
            value, log_sigma = value + half, math.hypot(log_sigma, half / HALF_INTERVAL)
        return Estimate(math.exp(value + self._offsets.get((device.id, target), 0.0)), log_sigma)

    def _share(self, target: str, graph: OpGraph, device: Device) -> float | None:
        value = float(self._answers(graph, device)[0][target][0])
        return share_of(value) if math.isfinite(value) else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_cache": WeakKeyDictionary()})


@undisturbed
def load(name: str, path: str | Path | None = None) -> Served:
    """The predictor ``name`` with the shipped weights, or with those at ``path`` (without suffix).

    Raises:
        PredictorError: if the files are refused.
    """
    if path is not None:
        return Served(read_trained(Path(f"{path}.safetensors"), Path(f"{path}.json"), name))
    folder = files("perfguard_models") / "weights"
    return Served(read_trained(folder / f"{name}.safetensors", folder / f"{name}.json", name))


# With the shipped weights, for the entry points of `perfguard.predictors`.
load_dnnperf = functools.partial(load, "dnnperf")
load_dnnabacus = functools.partial(load, "dnnabacus")
load_perfseer = functools.partial(load, "perfseer")
load_dippm = functools.partial(load, "dippm")
load_lilou = functools.partial(load, "lilou")
load_trees = functools.partial(load, "trees")

__all__ = ["Served", "Trained", "load", "read_trained", "write_trained"]
