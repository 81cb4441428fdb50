"""The table of measured runs of any kind: one row a run, with all that is needed to build it again (docs/tables.md)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from torch import nn

from perfguard.devices import resolve_device
from perfguard.exceptions import TableError
from perfguard.workload import Layout, Precision, Tf32, Workload, ZeroGrad
from perfguard_research.tables import workloads as _workloads
from perfguard_research.tables.csv import Row, is_true, one_of, positive, scaled, text
from perfguard_research.tables.networks import first_output
from perfguard_research.tables.rows import MIB, MeasuredRow
from perfguard_research.tables.run_models import RunModel

COLUMNS = ("model", "config", "mode", "gpu", "num_gpus", "parallel", "batch_size", "input", "memory_kind")
"""Required columns of a table of runs."""
PRECISIONS: dict[str, tuple[Precision, Tf32]] = {
    "fp32": ("fp32", "off"),
    "tf32": ("fp32", "on"),
    "tf32-conv": ("fp32", "default"),
    **{precision: (precision, "default") for precision in get_args(Precision) if precision != "fp32"},
}
"""A table says of float32 where TF32 was used."""
PARALLEL = ("none", "dp", "ddp", "fsdp-full", "fsdp-grad-op", "zero1", "zero2", "zero3")
MEMORY_KINDS = ("unknown", "driver", "driver-minus-context", "reserved", "allocated")
_COMPARED = ("driver", "driver-minus-context")
OPTIMIZERS: dict[str, Any] = {
    **_workloads.OPTIMIZERS,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "fused-adam": functools.partial(torch.optim.Adam, fused=True),
    "none": None,
}
_AUTOCAST = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}
_BEFORE_TORCH2 = re.compile(r"torch( about )?[01]\.|ngc[- ]2[0-2]\.")
"""NVIDIA's containers have PyTorch 2 since 23.02."""
_RESULTS_FOLDER = re.compile(r"(?:^|; )((?:\w+_)?results(?:/\S*)?)$")
"""A note ends in the folder of the source's results where it has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow(MeasuredRow):
    """One measured run."""

    built: RunModel
    """Builder of its network."""
    precision: Precision
    tf32: Tf32
    layout: Layout
    compiled: bool
    optimizer: str
    """"none": forward and backward passes alone."""
    accumulation: int
    cudnn_benchmark: bool
    parallel: str
    num_gpus: int
    method: str
    """"full", or the method of fine-tuning that the note names: "lora", "qlora", ..."""
    memory_kind: str
    other_memory_bytes: float | None = None
    """Measured memory that is not the driver's reading."""
    zero_grad: ZeroGrad = "before-forward"
    includes: str = ""
    """Parts of the time beside the step."""
    note: str = ""

    @property
    def structure(self) -> tuple[Any, ...]:
        """Key of the row without the batch and the GPU."""
        built = self.built
        return (
            self.model, json.dumps(built.config, sort_keys=True), json.dumps(built.input, sort_keys=True), built.before_torch2,
            built.checkpointing, self.mode, self.precision, self.tf32, self.layout, self.compiled, self.optimizer,
            self.accumulation, self.cudnn_benchmark, self.parallel, self.num_gpus if self.is_sharded else 1, self.method,
        )  # fmt: skip

    @property
    def host(self) -> str:
        """The folder of results that the note ends in. It tells the machines of one source apart. Empty if there is none."""
        found = _RESULTS_FOLDER.search(self.note)
        return found[1] if found else ""

    @property
    def is_sharded(self) -> bool:
        """Whether several GPUs, or one process for several, do what we model on one."""
        return self.num_gpus > 1 and self.parallel not in ("none", "ddp")

    def make_model(self) -> nn.Module:
        """The network."""
        if self.is_sharded:
            raise TableError(f"A step that is sharded over {self.num_gpus} GPUs is not modelled ({self.parallel}).")
        if self.method != "full":
            raise TableError(f"Fine-tuning by {self.method} is not modelled.")
        if self.optimizer not in OPTIMIZERS:
            raise TableError(f"The optimizer {self.optimizer!r} is not modelled. Known are {', '.join(OPTIMIZERS)}.")
        return self.built.make()

    def workload(self, model: nn.Module) -> Workload:
        """Forward, loss, backward and the optimizer's step; without an optimizer; or forward alone."""
        train = self.mode == "train"
        own_step = train and self.optimizer == "none"
        inputs, targets, loss = self.built.batch(self.batch_size, train=train, optimizes=train and not own_step)
        step = functools.partial(_forward_backward, loss=loss, autocast=_AUTOCAST.get(self.precision)) if own_step else None
        return Workload(
            model,
            inputs=inputs,
            targets=targets,
            loss=loss if train and not own_step else None,
            optimizer=self._optimizer() if train else None,
            step=step,
            mode=self.mode,
            precision=self.precision,
            tf32=self.tf32,
            layout=self.layout,
            accumulation=self.accumulation if train and not own_step else 1,
            zero_grad=self.zero_grad,
            batch_on="host" if "h2d" in self.includes else "device",
            ddp=train and self.parallel == "ddp",
            cudnn_benchmark=self.cudnn_benchmark,
            compiled=self.compiled,
        )

    def _optimizer(self) -> Any:
        """Before PyTorch 2 an optimizer went from parameter to parameter, as the course's own does."""
        made = OPTIMIZERS[self.optimizer]
        by_parameter = self.built.before_torch2 or self.model.startswith("cs336:")
        if made is None or not by_parameter or self.optimizer == "fused-adam":
            return made
        return functools.partial(made, foreach=False)


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


def run_row(row: Row) -> RunRow:
    """One row of a table of runs, checked.

    Raises:
        TableError: naming the column that cannot be right.
    """
    precision, tf32 = PRECISIONS[one_of(row, "precision", tuple(PRECISIONS), "fp32")]
    mode = one_of(row, "mode", ("train", "forward_backward", "infer"))
    framework, memory_kind = row.get("framework") or "", one_of(row, "memory_kind", MEMORY_KINDS, "unknown")
    memory_bytes = scaled(row, "peak_memory_mib", MIB)
    name = text(row, "model")
    family = row.get("family") or name.rpartition(":")[2]
    return RunRow(
        source=row.get("source") or "",
        model=name,
        family=family,
        mode="infer" if mode == "infer" else "train",
        gpu=text(row, "gpu"),
        batch_size=positive(row, "batch_size"),
        status=(row.get("status") or "ok").lower(),
        framework=framework,
        step_time_s=scaled(row, "step_time_ms", 1e-3),
        peak_memory_bytes=_driver_bytes(memory_bytes, memory_kind, text(row, "gpu")),
        built=RunModel(
            name=name,
            config=_object(row, "config"),
            family=family,
            input=_object(row, "input"),
            checkpointing=is_true(row, "checkpointing"),
            before_torch2=_BEFORE_TORCH2.search(framework) is not None,
        ),
        precision=precision,
        tf32=tf32,
        layout=one_of(row, "layout", get_args(Layout), "nchw"),
        compiled=is_true(row, "compiled"),
        optimizer=(row.get("optimizer") or "sgd-momentum") if mode == "train" else "none",
        accumulation=positive(row, "accumulation") if row.get("accumulation") else 1,
        cudnn_benchmark=is_true(row, "cudnn_benchmark"),
        parallel=one_of(row, "parallel", PARALLEL, "none"),
        num_gpus=positive(row, "num_gpus"),
        method=_method(row.get("note") or ""),
        memory_kind=memory_kind,
        other_memory_bytes=None if memory_kind in _COMPARED else memory_bytes,
        zero_grad=one_of(row, "zero_grad", get_args(ZeroGrad), "before-forward"),
        includes=row.get("includes") or "",
        note=row.get("note") or "",
    )


def _driver_bytes(memory_bytes: float | None, kind: str, gpu: str) -> float | None:
    """The driver's reading, plus the catalog's context where the table leaves it out. None: the table does not contain it."""
    if memory_bytes is None or kind not in _COMPARED:
        return None
    return memory_bytes if kind == "driver" else memory_bytes + resolve_device(gpu).context_bytes


def _object(row: Row, column: str) -> Mapping[str, Any]:
    try:
        found = json.loads(row.get(column) or "{}")
    except ValueError as error:
        raise TableError(f"column {column!r} must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise TableError(f"column {column!r} must be a JSON object, but is {row[column]!r}")
    return cast("Mapping[str, Any]", found)


def _method(note: str) -> str:
    """Method of fine-tuning, if the note is JSON that names one."""
    try:
        found = json.loads(note) if note.startswith("{") else {}
    except ValueError:
        found = {}
    return str(found.get("method", "full"))
