"""``perfguard.predict``: one call from a network to what it costs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfguard.exceptions import ConfigurationError
from perfguard.graph import OpGraph, trace
from perfguard.predictor import DEFAULT_PREDICTOR, Estimate, Prediction, Predictor, load_predictor
from perfguard.workload import Mode, Precision, Tf32, Workload

if TYPE_CHECKING:
    from torch import nn

    from perfguard.devices import Device

    Network = str | os.PathLike[str] | Workload | OpGraph | nn.Module


def predict(
    model: Network,
    *,
    gpu: str | Device = "auto",
    mode: Mode | None = None,
    inputs: Any = None,
    batch_size: int | None = None,
    dims: Mapping[str, int | Sequence[int]] | None = None,
    precision: Precision | None = None,
    tf32: Tf32 | None = None,
    predictor: str | Predictor = DEFAULT_PREDICTOR,
) -> Prediction:
    """Return the predicted cost of one inference or training step of ``model``: time, peak memory, and other known quantities.

    Example:
        >>> import torch
        >>> prediction = predict(torch.nn.Linear(64, 10), inputs=(32, 64), gpu="a100")
        >>> prediction.device_id
        'a100-pcie-40gb'

    Args:
        model: the path of an ONNX file, a Workload, a graph, or an ``nn.Module`` (with ``inputs``).
        gpu: the device. A catalog name such as "a100", "auto", "cpu", or a Device, for instance from
            `perfguard.devices.mig_instance`.
        mode: "infer" or "train". None: a Workload's own, else "infer".
        inputs: one batch for a module. The form is that of :class:`Workload`.
        batch_size: the batch of an ONNX file, as :func:`perfguard.onnx.graph_from_onnx` takes it. A fixed batch is replaced.
        dims: other sizes of an ONNX file, as :func:`perfguard.onnx.graph_from_onnx` takes them. None: the file's own.
        precision: another precision than that of the workload or of the ONNX file. None: the same.
        tf32: "default", "on" or "off", as :class:`Workload` takes it. None: a Workload's own, PyTorch's switches for a module,
            and "default" for an ONNX file.
        predictor: its name, or the object itself.

    Raises:
        OnnxError, WorkloadError: if the network cannot be read or traced.
        ConfigurationError: for arguments that do not go together.
    """
    from perfguard.devices import resolve_device

    device = resolve_device(gpu)
    graph = graph_of(model, device, mode=mode, inputs=inputs, batch_size=batch_size, dims=dims, precision=precision, tf32=tf32)
    chosen = load_predictor(predictor) if isinstance(predictor, str) else predictor
    steps = model.steps if isinstance(model, Workload) else None
    return chosen.predict(graph, device, steps=steps)


def graph_of(
    model: Network,
    device: Device,
    *,
    mode: Mode | None = None,
    inputs: Any = None,
    batch_size: int | None = None,
    dims: Mapping[str, int | Sequence[int]] | None = None,
    precision: Precision | None = None,
    tf32: Tf32 | None = None,
) -> OpGraph:
    """The graph of whatever :func:`predict` takes."""
    if isinstance(model, OpGraph):
        if tf32 is not None:
            raise ConfigurationError(
                "A graph has its arithmetic already. Give tf32 to the Workload that is traced, or to the file."
            )
        return model
    if isinstance(model, (str, os.PathLike)):
        return _graph_of_file(Path(model), device, mode=mode, batch_size=batch_size, dims=dims, precision=precision, tf32=tf32)
    if batch_size is not None or dims:
        raise ConfigurationError("batch_size and dims are for ONNX files. The inputs of a module or a workload have the batch.")
    if not isinstance(model, Workload):
        if inputs is None:
            raise ConfigurationError("A module needs its inputs, for instance predict(model, inputs=(32, 3, 224, 224)).")
        model = Workload(model, inputs, mode="infer")
    stated: dict[str, Any] = {"mode": mode, "precision": precision, "tf32": tf32}
    changes = {name: value for name, value in stated.items() if value is not None}
    return trace(dataclasses.replace(model, **changes), target=device)


def _graph_of_file(
    path: Path,
    device: Device,
    *,
    mode: Mode | None,
    batch_size: int | None,
    dims: Mapping[str, int | Sequence[int]] | None,
    precision: Precision | None,
    tf32: Tf32 | None,
) -> OpGraph:
    if path.suffix.lower() != ".onnx":
        raise ConfigurationError(f"Expected the path of an .onnx file, a Workload or a module, but got {str(path)!r}.")
    if mode == "train":
        raise ConfigurationError("An ONNX file has only the forward pass. Give mode='infer', or the network in PyTorch.")
    from perfguard.onnx import graph_from_onnx  # only here: the package onnx is slow to import

    return graph_from_onnx(
        path, batch_size=batch_size, dims=dims, tf32=tf32, target=device,
        precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip


def most_energy(prediction: Prediction, device: Device) -> Estimate | None:
    """Joules of one step: what the predictor says, else the most that it can be, the card's power limit (TDP) for all the time.

    None on a device whose power limit is not known, such as a CPU.
    """
    if prediction.energy is not None or device.tdp_w <= 0:
        return prediction.energy
    return prediction.step_time.scaled(device.tdp_w)
