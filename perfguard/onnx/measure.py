"""Measures the network in an ONNX file on this machine's CPU with ONNX Runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfguard.devices import cpu
from perfguard.exceptions import ConfigurationError, OnnxError, why_not_imported
from perfguard.measure import Measurement, Run
from perfguard.onnx.read import DEFAULT_MAX_BYTES, TensorType, read_network

if TYPE_CHECKING:
    import os


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
    network = read_network(file, batch_size=batch_size, dims=dims, max_bytes=max_bytes)
    run = Run(cpu())
    try:
        batch = {name: _random(file, name, network.types[name]) for name in network.inputs}
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


def _repeat(
    call: Callable[[], object], mark: Callable[[], None], *, least: int = 5, most: int = 200, timed_s: float = 2.0
) -> None:
    """Call and mark until ``timed_s`` have passed, but at least and at most so many times, after three calls that warm up."""
    for _ in range(3):
        call()
    start = time.perf_counter()
    mark()
    for number in range(most):
        if number >= least and time.perf_counter() - start > timed_s:
            break
        call()
        mark()


def _random(file: Path, name: str, kind: TensorType) -> npt.NDArray[Any]:
    """Something that fits: numbers around zero; of integers, which may be indices, zeros and ones."""
    generator = np.random.default_rng(0)
    if kind.dtype in ("float16", "float32", "float64"):
        return generator.standard_normal(kind.shape).astype(kind.dtype)
    if not kind.dtype.startswith(("int", "uint", "bool")) or kind.dtype in ("int4", "uint4", "int2", "uint2"):
        raise OnnxError(file, f"takes an input {name!r} that is not numeric", "Such a network cannot be measured here.")
    return generator.integers(2, size=kind.shape).astype(kind.dtype)
