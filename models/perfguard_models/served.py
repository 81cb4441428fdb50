"""A learner behind the core's `Predictor` protocol: weights from files, intervals from its calibration, learning by an offset."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from perfguard.exceptions import PredictorError
from perfguard.graph import OP_KINDS, OpGraph, roofline_s
from perfguard.predictor import Estimate, Observation, Prediction
from perfguard_models.calibration import Calibration
from perfguard_models.dataset import VIEWS, Run
from perfguard_models.learner import Learner, Predicted, predict_with_spread
from perfguard_models.registry import learner_class

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from perfguard.devices import Device

FORMAT = 1
_LARGEST_BYTES = 64 * 2**20
_UNKNOWN_LOG_SIGMA = 1.0
_PRIOR_RUNS = 1.0
_ROBUST = 1.4826


class Trained(NamedTuple):
    """A fitted learner, its card and its calibration."""

    learner: Learner
    card: dict[str, Any]
    calibration: Calibration


def write_trained(out: Path, name: str, learner: Learner, card: dict[str, Any], calibration: Calibration) -> None:
    """OUT.safetensors, and OUT.json: the card, with the hash that binds it to the tensors."""
    tensors, settings = learner.state()
    data = save_tensors({key: value.contiguous() for key, value in tensors.items()})
    document = {
        "format": FORMAT,
        "predictor": name,
        "settings": dict(settings),
        "columns": columns_of(learner),
        "sha256": hashlib.sha256(data).hexdigest(),
        "calibration": {"floor": dict(calibration.floor), "scale": dict(calibration.scale)},
        **card,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".safetensors").write_bytes(data)
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def columns_of(learner: Learner) -> str:
    """A hash of the names of all columns that the learner reads: weights for others would read nonsense."""
    from perfguard_models import layers, operators, sums

    columns: dict[str, Any] = {
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
    try:
        data = tensors_file.read_bytes()
        card = json.loads(card_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PredictorError(
            f"The weights of {name!r} cannot be read: {error}. Reinstall perfguard, or make them with "
            f"`perfguard train TABLE --predictor {name} --out DIR`."
        ) from error
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise PredictorError(f"The card of {name!r} has another format than {FORMAT}. Train it again with this version.")
    if len(data) > _LARGEST_BYTES or card.get("sha256") != hashlib.sha256(data).hexdigest():
        raise PredictorError(f"The weights {name!r} do not match the hash in their card; the file is damaged or exchanged.")
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
        view |= VIEWS[name].see(graph, device)
    return as_setting(graph, device)._replace(view=view)


def as_setting(graph: OpGraph, device: Device) -> Run:
    """``graph`` on ``device`` as a run that nobody has looked at yet."""
    has_convolution = any(op.kind == "conv" for op in graph.ops)
    words = [
        graph.precision,
        *([graph.layout] if has_convolution else []),
        *(["compiled"] if "compiled" in graph.options else []),
    ]
    table = "operator" if len(graph.ops) == 1 else "workload" if has_convolution else "perceptron"
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
        return "operator"
    return f"{run.gpu} {run.mode} {run.variant}{' with convolutions' if run.table == 'workload' else ''}"


class Served:
    """A fitted learner as a predictor. What it cannot say comes from physics, and is said to be unsure."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._offsets: dict[tuple[str, str], tuple[float, float]] = {}
        self._cache: WeakKeyDictionary[OpGraph, dict[str, tuple[Predicted, Predicted]]] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        """Name and version."""
        return f"{self._trained.card['predictor']}-{self._trained.card.get('version', 1)}"

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        """The cost of ``graph`` on ``device``; see :class:`perfguard.predictor.Predictor`."""
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
            unmodelled=graph.unmodelled,
        )

    def fine_tune(self, observations: Sequence[Observation]) -> None:
        """A constant factor for each device: the median of what was measured over what was predicted."""
        residuals: dict[tuple[str, str], list[float]] = {}
        for row in observations:
            for target, value in (("memory", row.measurement.peak_memory_bytes), ("time", row.measurement.step_time_s)):
                if value is not None and math.isfinite(value) and value > 0:
                    residual = math.log(value) - self._raw(target, row.graph, row.device)[0]
                    residuals.setdefault((row.device.id, target), []).append(residual)
        for key, found in residuals.items():
            median = statistics.median(found)
            spread = statistics.median(abs(value - median) for value in found) * _ROBUST
            weight = len(found) / (len(found) + _PRIOR_RUNS)
            self._offsets[key] = weight * median, spread

    def _answers(self, graph: OpGraph, device: Device) -> tuple[Predicted, Predicted]:
        of_graph = self._cache.setdefault(graph, {})
        key = repr(device)
        if key not in of_graph:
            learner = self._trained.learner
            of_graph[key] = predict_with_spread(learner, [as_run(learner, graph, device)])
        return of_graph[key]

    def _raw(self, target: str, graph: OpGraph, device: Device) -> tuple[float, float]:
        """Logarithm of the prediction and its standard deviation."""
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
        offset, _ = self._offsets.get((device.id, target), (0.0, 0.0))
        return Estimate(math.exp(value + offset), log_sigma)

    def _share(self, target: str, graph: OpGraph, device: Device) -> float | None:
        value = float(self._answers(graph, device)[0][target][0])
        return 1 / (1 + math.exp(-value)) if math.isfinite(value) else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_cache": WeakKeyDictionary()})


def load(name: str, path: str | Path | None = None) -> Served:
    """The predictor ``name`` with the shipped weights, or with those at ``path`` (without suffix).

    Raises:
        PredictorError: if the files are refused.
    """
    if path is not None:
        return Served(read_trained(Path(f"{path}.safetensors"), Path(f"{path}.json"), name))
    folder = files("perfguard_models") / "weights"
    return Served(read_trained(folder / f"{name}.safetensors", folder / f"{name}.json", name))


def load_dnnperf() -> Served:
    """DNNPerf with the shipped weights."""
    return load("dnnperf")


def load_dnnabacus() -> Served:
    """DNNAbacus with the shipped weights."""
    return load("dnnabacus")


def load_perfseer() -> Served:
    """PerfSeer with the shipped weights."""
    return load("perfseer")


def load_dippm() -> Served:
    """DIPPM with the shipped weights."""
    return load("dippm")


def load_lilou() -> Served:
    """LILOU's latency head with the shipped weights."""
    return load("lilou")


def load_trees() -> Served:
    """Trees on hand-made sums with the shipped weights."""
    return load("trees")


__all__ = ["Served", "Trained", "load", "read_trained", "write_trained"]
