"""Tables of measured runs: each kind of table is known by its columns, and each row becomes a `MeasuredRow`.

The kinds are runs of any model ("run"), rows of `perfguard collect` ("collected"), runs of timm models ("workload"), whole
transformers ("transformer"), perceptrons ("perceptron") and single operators ("operator"). docs/tables.md has their columns.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from perfguard.devices import Device, resolve_device
from perfguard.exceptions import ConfigurationError, TableError
from perfguard.graph import OpGraph, TraceCache
from perfguard.measure.step import AUTOCAST
from perfguard.workload import Layout, Mode, Precision, Tf32, Workload, ZeroGrad
from perfguard_research.csv_rows import Row, is_true, json_object, number, one_of, positive, share, text
from perfguard_research.networks import LAYERS, Network, first_output
from perfguard_research.operators import Operator, operator_of

MIB = 2**20
Parser = Callable[[Row], "MeasuredRow"]
MemoryKind = Literal["unknown", "driver", "driver-minus-context", "reserved", "allocated", "resident"]
"""What a memory reading counts: the driver's, without or with its context; PyTorch's allocator's; a process's resident set."""
PRECISIONS: dict[str, tuple[Precision, Tf32]] = {
    "fp32": ("fp32", "off"),
    "tf32": ("fp32", "on"),
    "tf32-conv": ("fp32", "default"),
    **{precision: (precision, "default") for precision in get_args(Precision) if precision != "fp32"},
}
"""A table says of float32 where TF32 was used."""
PARALLEL = ("none", "dp", "ddp", "fsdp-full", "fsdp-grad-op", "zero1", "zero2", "zero3")
OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=1e-4),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=1e-4),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-4),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-4),
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "fused-adam": functools.partial(torch.optim.Adam, fused=True),
    "none": None,
}
"""Optimizers by their names in tables. "none": forward and backward passes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One measured run. None: not measured."""

    table: str
    """Kind of the table that it is from."""
    source: str
    family: str
    """Rows of one family share enough to flatter a predictor that has seen some of them: they are held out together."""
    network: Network | Operator
    mode: Mode
    gpu: str
    batch_size: int
    precision: Precision = "fp32"
    tf32: Tf32 = "default"
    layout: Layout = "nchw"
    compiled: bool = False
    optimizer: str = "none"
    """One of OPTIMIZERS."""
    by_parameter: bool = False
    """Whether the optimizer goes from parameter to parameter, as before PyTorch 2."""
    accumulation: int = 1
    cudnn_benchmark: bool = False
    zero_grad: ZeroGrad = "before-forward"
    keeps_outputs: bool = False
    """Whether the outputs of a step stay alive until the next one replaces them."""
    copies_batch: bool = False
    """Whether the batch is copied to the device in each step."""
    ddp: bool = False
    num_gpus: int = 1
    unmodelled: str = ""
    """The reason why the run cannot be traced; empty: it can."""
    status: str = "ok"
    framework: str = field(default="", compare=False, repr=False)
    """Versions, as the table writes them; runs of one network under different ones do not bracket a card together."""
    host: str = ""
    """Tells the machines of one source and GPU apart, if the table does."""
    step_time_s: float | None = None
    memory_kind: MemoryKind = "driver"
    memory_bytes: float | None = None
    """Measured memory, of that kind."""
    gpu_util: float | None = None
    """Share of the time in which a kernel ran, 0 to 1."""
    sm_active: float | None = None
    """Share of the multiprocessors' time in which they had work, 0 to 1."""
    capacity_bytes: float | None = None
    """Memory limit of the run, if it was below the device's memory."""
    figures: Device | None = field(default=None, hash=False)
    """The device, if the catalog does not have it."""

    @property
    def model(self) -> str:
        """The name of the network, with its prefix."""
        return self.network.name

    @property
    def device(self) -> Device:
        """The device of the run, as it was measured or as the catalog has it.

        Raises:
            ConfigurationError: if the catalog does not have it.
        """
        return resolve_device(self.gpu) if self.figures is None else self.figures

    @property
    def peak_memory_bytes(self) -> float | None:
        """The peak as a prediction has it: the driver's reading with its context, or a process's resident set on a CPU."""
        if self.memory_bytes is None or self.memory_kind not in ("driver", "driver-minus-context", "resident"):
            return None
        return self.memory_bytes + (self.device.context_bytes if self.memory_kind == "driver-minus-context" else 0)

    @property
    def structure(self) -> tuple[Any, ...]:
        """Key that rows share if only their batches and GPUs differ."""
        return (
            *self.network.key, self.mode, self.precision, self.tf32, self.layout, self.compiled, self.optimizer,
            self.by_parameter, self.accumulation, self.cudnn_benchmark, self.zero_grad, self.keeps_outputs, self.copies_batch,
            self.ddp, self.unmodelled,
        )  # fmt: skip

    def make_model(self) -> nn.Module | None:
        """The network, on the meta device; None if the graph needs none.

        Raises:
            TableError: if it cannot be made, or the run is not modelled.
        """
        if self.unmodelled:
            raise TableError(self.unmodelled)
        if isinstance(self.network, Operator):
            return None
        with torch.device("meta"):
            return self.network.make()

    def workload(self, model: nn.Module) -> Workload:
        """Forward, loss, backward and the optimizer's step; without an optimizer; or forward alone."""
        assert isinstance(self.network, Network)
        train = self.mode == "train"
        optimizer = OPTIMIZERS[self.optimizer] if train else None
        if optimizer is not None and self.by_parameter:
            optimizer = functools.partial(optimizer, foreach=False)
        own_step = train and optimizer is None
        inputs, targets, loss = self.network.batch(self.batch_size, train=train, optimizes=not own_step)
        step = functools.partial(_forward_backward, loss=loss, autocast=AUTOCAST.get(self.precision)) if own_step else None
        return Workload(
            model,
            inputs=inputs,
            targets=targets,
            loss=loss if train and not own_step else None,
            optimizer=optimizer,
            step=step,
            mode=self.mode,
            precision=self.precision,
            tf32=self.tf32,
            layout=self.layout,
            accumulation=self.accumulation if train and not own_step else 1,
            zero_grad=self.zero_grad,
            retain="outputs" if self.keeps_outputs else "nothing",
            batch_on="host" if self.copies_batch else "device",
            ddp=train and self.ddp,
            cudnn_benchmark=self.cudnn_benchmark,
            compiled=self.compiled,
        )

    def graph(self, model: nn.Module | None, traces: TraceCache, device: Device) -> OpGraph:
        """The row's graph. Rows of one structure share ``model`` (:meth:`make_model`) and ``traces``."""
        if isinstance(self.network, Operator):
            return self.network.graph(self.mode)
        assert model is not None
        return traces.trace(self.workload(model), target=device)


def _forward_backward(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    optimizer: Any,
    *,
    loss: Callable[..., torch.Tensor] | None,
    autocast: torch.dtype | None,
) -> None:
    """A training step without the optimizer's."""
    with nullcontext() if autocast is None else torch.autocast("cuda", autocast):
        output = model(**inputs) if isinstance(inputs, dict) else model(*(inputs if isinstance(inputs, list) else [inputs]))
        make: Callable[..., torch.Tensor] = loss or first_output  # Transformers put the loss first
        value = make(output) if targets is None else make(output, targets)
    value.backward()
    model.zero_grad(set_to_none=True)


# Kinds of table


def run_row(row: Row, kind: str) -> MeasuredRow:
    """A row of a table of runs. Other tables of whole steps are first translated into its columns."""
    precision, tf32 = PRECISIONS[one_of(row, "precision", tuple(PRECISIONS), "fp32")]
    mode = one_of(row, "mode", ("train", "forward_backward", "infer"))
    name = text(row, "model")
    note = row.get("note") or ""
    framework = row.get("framework") or ""
    family = row.get("family") or name.rpartition(":")[2]
    parallel = one_of(row, "parallel", PARALLEL, "none")
    num_gpus = positive(row, "num_gpus")
    optimizer = (row.get("optimizer") or "sgd-momentum") if mode == "train" else "none"
    before_torch2 = bool(re.search(r"torch( about )?[01]\.|ngc[- ]2[0-2]\.", framework))  # NVIDIA's containers: 2 since 23.02
    method = found[1] if (found := re.match(r'\{.*?"method": "([^"]+)"', note)) else "full"
    unmodelled = ""
    if num_gpus > 1 and parallel not in ("none", "ddp"):
        unmodelled = f"A step that is sharded over {num_gpus} GPUs is not modelled ({parallel})."
    elif method != "full":
        unmodelled = f"Fine-tuning by {method} is not modelled."
    elif optimizer not in OPTIMIZERS:
        unmodelled = f"The optimizer {optimizer!r} is not modelled. Known are {', '.join(OPTIMIZERS)}."
    folder = re.search(r"(?:^|; )((?:\w+_)?results(?:/\S*)?)$", note)  # of the source's results, where it has several
    return MeasuredRow(
        table=kind,
        source=row.get("source") or "",
        family=family,
        network=Network(
            name=name,
            config=json_object(row, "config"),
            input=json_object(row, "input"),
            family=family,
            checkpointing=is_true(row, "checkpointing"),
            before_torch2=before_torch2,
        ),
        mode="infer" if mode == "infer" else "train",
        gpu=text(row, "gpu"),
        batch_size=positive(row, "batch_size"),
        precision=precision,
        tf32=tf32,
        layout=one_of(row, "layout", get_args(Layout), "nchw"),
        compiled=is_true(row, "compiled"),
        optimizer=optimizer,
        # The course's own optimizer does so, too. A fused one cannot.
        by_parameter=(before_torch2 or name.startswith("cs336:")) and optimizer not in ("fused-adam", "none"),
        accumulation=positive(row, "accumulation") if row.get("accumulation") else 1,
        cudnn_benchmark=is_true(row, "cudnn_benchmark"),
        zero_grad=one_of(row, "zero_grad", get_args(ZeroGrad), "before-forward"),
        keeps_outputs=kind == "run",
        copies_batch="h2d" in (row.get("includes") or ""),
        ddp=parallel == "ddp",
        num_gpus=num_gpus,
        unmodelled=unmodelled,
        status=(row.get("status") or "ok").lower(),
        framework=framework,
        host=folder[1] if folder else "",
        step_time_s=number(row, "step_time_ms", 1e-3),
        memory_kind=one_of(row, "memory_kind", get_args(MemoryKind), "unknown"),
        memory_bytes=number(row, "peak_memory_mib", MIB),
        gpu_util=share(row, "gpu_util", 100),
        sm_active=share(row, "sm_active"),
        capacity_bytes=number(row, "memory_limit_mib", MIB),
        figures=_figures(row),
    )


def _figures(row: Row) -> Device | None:
    if not (written := row.get("device")):
        return None
    try:
        device = Device(**json.loads(written))
    except (ValueError, TypeError, AttributeError, ConfigurationError) as error:
        raise TableError(f"column 'device' must be a device as `perfguard collect` writes it: {error}") from error
    if device.id != row.get("gpu") or device.kind not in ("cpu", "cuda"):
        raise TableError(f"column 'device' has the figures of {device.id!r} ({device.kind}), but column 'gpu' has {row['gpu']!r}")
    return device


def _as_run(row: Row, *, family: str, **columns: Any) -> Row:
    """``row`` with ``columns`` of a table of runs: on one GPU, read by the driver, PyTorch's default of TF32."""
    precision = one_of(row, "precision", get_args(Precision), "fp32")
    common = {
        "num_gpus": "1",
        "memory_kind": "driver",
        "family": row.get("family") or family,
        "precision": "tf32-conv" if precision == "fp32" else precision,
    }
    written = {name: value if isinstance(value, str) else json.dumps(value) for name, value in columns.items()}
    return {**row, **common, **written}


def _workload(row: Row) -> Row:
    """A run of a timm model in cuDNN's benchmark mode."""
    name = text(row, "model")
    image = {"image": positive(row, "img_size")}
    return _as_run(row, model=f"timm:{name}", family=name.partition("_")[0], input=image, cudnn_benchmark="True")


def _transformer(row: Row, configurations: Mapping[str, Any]) -> Row:
    """Forward, and for training backward too, of a Hugging Face model with attention as it was before PyTorch 2."""
    name = text(row, "model")
    length = positive(row, "seq_len")
    if name not in configurations:
        raise TableError(f"{name!r} is not in {CONFIGURATIONS}, which has {', '.join(sorted(configurations)) or 'nothing'}")
    config = {key: value for key, value in configurations[name].items() if key not in ("model_type", "architectures")}
    return _as_run(
        row,
        model=f"hf:{configurations[name]['architectures'][0]}",
        family=name.partition("_")[0],
        config=config | {"use_cache": False, "attn_implementation": "eager"},
        input={"seq_len": length} | ({"target_len": length} if config.get("is_encoder_decoder") else {}),
        mode="forward_backward" if one_of(row, "mode", get_args(Mode)) == "train" else "infer",
    )


CONFIGURATIONS = "transformers_configs.json"
"""Lies beside a table of transformers."""


def _read_configurations(table: Path) -> Mapping[str, Any]:
    """The configurations of Transformers beside ``table``; none if there is no such file."""
    path = table.with_name(CONFIGURATIONS)
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise TableError(f"{path} cannot be read: {error}") from error


def _perceptron(row: Row) -> Row:
    """A training run of a perceptron in cuDNN's benchmark mode."""
    try:
        layers = [(str(kind), int(features)) for kind, features, *_ in json.loads(text(row, "layers"))]
    except (ValueError, TypeError) as error:
        raise TableError(f"column 'layers' must be a JSON list of [kind, features, parameters]: {error}") from error
    unknown = sorted({kind for kind, _ in layers} - set(LAYERS))
    if unknown or not layers:
        raise TableError(f"column 'layers' holds {', '.join(unknown) or 'nothing'}; known are {', '.join(LAYERS)}")
    return _as_run(
        row,
        model="perfguard:perceptron",
        family=row.get("activation") or "mlp",
        config={"inputs": positive(row, "input_size"), "layers": layers},
        mode="train",
        optimizer=row.get("optimizer") or "adam",
        cudnn_benchmark="True",
    )


def _operator(row: Row) -> MeasuredRow:
    operator = operator_of(row)
    return MeasuredRow(
        table="operator",
        source=row.get("source") or "operators",
        family=row.get("model") or operator.name,
        network=operator,
        mode="infer" if operator.direction == "forward" else "train",
        gpu=text(row, "gpu"),
        batch_size=operator.sizes[0],
        precision=operator.precision,
        status=(row.get("status") or "ok").lower(),
        step_time_s=number(row, "latency_ms", 1e-3),
    )


_RUN_COLUMNS = ("model", "config", "mode", "gpu", "num_gpus", "parallel", "batch_size", "input", "memory_kind")
NEEDED: dict[str, tuple[str, ...]] = {  # the first whose columns are all there
    "collected": (*_RUN_COLUMNS, "space", "memory_share"),
    "run": _RUN_COLUMNS,
    "workload": ("model", "mode", "gpu", "batch_size", "img_size"),
    "operator": ("op", "gpu", "b"),
    "transformer": ("model", "mode", "gpu", "batch_size", "seq_len"),
    "perceptron": ("gpu", "batch_size", "input_size", "output_size", "layers"),
}
"""Columns that each kind of table must have."""


def kind_of_table(columns: Sequence[str]) -> str:
    """ "collected", "run", "workload", "operator", "transformer" or "perceptron".

    Raises:
        TableError: if it is none of them, with what the nearest one lacks.
    """
    lacking = {kind: [column for column in needed if column not in columns] for kind, needed in NEEDED.items()}
    for kind, missing in lacking.items():
        if not missing:
            return kind
    nearest = min(lacking, key=lambda kind: len(lacking[kind]) / len(NEEDED[kind]))
    raise TableError(
        f"PerfGuard does not know this kind of table. To be one of the kind {nearest!r} it lacks the columns "
        f"{', '.join(lacking[nearest])}. It has {', '.join(columns)}."
    )


def parser_of(columns: Sequence[str], path: str | Path) -> Parser:
    """Parser of a row of the table at ``path``. It raises TableError for an invalid row, and names the column.

    Raises:
        TableError: if the table is of no known kind.
    """
    kind = kind_of_table(columns)
    if kind == "operator":
        return _operator
    configurations = _read_configurations(Path(path)) if kind == "transformer" else {}
    translations: dict[str, Callable[[Row], Row]] = {
        "workload": _workload,
        "transformer": functools.partial(_transformer, configurations=configurations),
        "perceptron": _perceptron,
    }
    translate = translations.get(kind)
    return lambda row: run_row(row if translate is None else translate(row), kind)
