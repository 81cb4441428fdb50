"""Measures the network in an ONNX file on this machine's CPU with ONNX Runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.helper import tensor_dtype_to_np_dtype

from perfguard.devices import cpu
from perfguard.exceptions import ConfigurationError, OnnxError, why_not_imported
from perfguard.measure import Measurement, Run
from perfguard.onnx._build import DEFAULT_MAX_BYTES
from perfguard.onnx._file import read_model
from perfguard.onnx._shapes import bind, network_inputs

if TYPE_CHECKING:
    import os

_WARM_UP = 3
_RUNS = 5, 200
_TIMED_S = 2.0


def measure_onnx(
    path: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    dims: Mapping[str, int | Sequence[int]] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Measurement:
    """Run the network on random inputs, with as many threads as PyTorch has, for about two seconds after a warm-up.

    Its ``step_time_s`` is the median latency of a batch, its peak memory what the process held beyond its start.

    Args:
        path, batch_size, dims, max_bytes: as :func:`graph_from_onnx` takes them.

    Raises:
        OnnxError: if the file is damaged or leaves sizes open, or ONNX Runtime does not run it.
        ConfigurationError: if ONNX Runtime is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        missing = "To measure an ONNX file takes ONNX Runtime: pip install 'perfguard[onnx]'."
        raise ConfigurationError(why_not_imported(error, "onnxruntime", missing)) from error
    file = Path(path)
    model = read_model(file, max_bytes=max_bytes)
    bind(file, model, batch_size=batch_size, dims=dims or {})
    run = Run(cpu())
    try:
        batch = {value.name: _random(file, value) for value in network_inputs(model.graph)}
        with run:
            session = onnxruntime.InferenceSession(str(file), _options(onnxruntime), providers=["CPUExecutionProvider"])
            _repeat(lambda: session.run(None, batch), run.step)
    except OnnxError:
        raise
    except Exception as error:  # ONNX Runtime has a class for each of its errors, and no common one; memory may run out
        first_line = str(error).strip().partition("\n")[0][:200]
        raise OnnxError(
            file,
            f"cannot be run by ONNX Runtime: {type(error).__name__}: {first_line}",
            "Its weights must be there, and the batch must be one that it was exported for.",
        ) from error
    assert run.measurement is not None
    return run.measurement


def _options(onnxruntime: Any) -> Any:
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # what fails is raised
    return options


def _repeat(call: Callable[[], object], mark: Callable[[], None]) -> None:
    for _ in range(_WARM_UP):
        call()
    start = time.perf_counter()
    mark()
    fewest, most = _RUNS
    for number in range(most):
        if number >= fewest and time.perf_counter() - start > _TIMED_S:
            break
        call()
        mark()


def _random(file: Path, value: onnx.ValueInfoProto) -> npt.NDArray[Any]:
    """Something that fits: numbers around zero; of integers, which may be indices, zeros and ones."""
    tensor = value.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]
    dtype = tensor_dtype_to_np_dtype(tensor.elem_type) if tensor.elem_type else None
    if dtype is None or dtype.kind not in "fiub":
        raise OnnxError(file, f"takes an input {value.name!r} that is not numeric", "Such a network cannot be measured here.")
    generator = np.random.default_rng(0)
    return (
        generator.standard_normal(shape).astype(dtype) if dtype.kind == "f" else generator.integers(2, size=shape).astype(dtype)
    )
