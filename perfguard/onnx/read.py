"""Reads an ONNX file in a child process with limits of memory and time, so that no file can harm the study that asks.

The child (`child.py`) loads the file with the onnx library, checks it and infers all shapes. What it hands back is data of
limited size: operators, names, shapes. A file that makes the library crash, hang or fill the memory ends the child, and is
refused.
"""

from __future__ import annotations

import json
import math
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perfguard.exceptions import ConfigurationError, OnnxError
from perfguard.quantities import format_bytes

DEFAULT_MAX_BYTES = 2 * 2**30
Dims = Mapping[str, "int | Sequence[int]"]

_TYPES = {
    "FLOAT": ("float32", 32), "UINT8": ("uint8", 8), "INT8": ("int8", 8), "UINT16": ("uint16", 16), "INT16": ("int16", 16),
    "INT32": ("int32", 32), "INT64": ("int64", 64), "STRING": ("string", 64), "BOOL": ("bool", 8), "FLOAT16": ("float16", 16),
    "DOUBLE": ("float64", 64), "UINT32": ("uint32", 32), "UINT64": ("uint64", 64), "COMPLEX64": ("complex64", 64),
    "COMPLEX128": ("complex128", 128), "BFLOAT16": ("bfloat16", 16), "FLOAT8E4M3FN": ("float8_e4m3fn", 8),
    "FLOAT8E4M3FNUZ": ("float8_e4m3fnuz", 8), "FLOAT8E5M2": ("float8_e5m2", 8), "FLOAT8E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "FLOAT8E8M0": ("float8_e8m0fnu", 8), "UINT4": ("uint4", 4), "INT4": ("int4", 4), "FLOAT4E2M1": ("float4_e2m1fn", 4),
    "UINT2": ("uint2", 2), "INT2": ("int2", 2),
}  # fmt: skip
"""torch's name and the number of bits of ONNX's element types."""
_TOO_LONG = -getattr(signal, "SIGXCPU", 24)
"""Exit status of a child that has taken too long. Windows has no such signal."""
_BITS = dict(_TYPES.values())


class TensorType(NamedTuple):
    """Shape and type of a value."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return -(-self.num_elements * _BITS.get(self.dtype, 8) // 8)


class Node(NamedTuple):
    """One operator."""

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    """Names of values; empty where an optional input is left out. What a subgraph reads from outside is among them."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    """Numbers, tuples of numbers and texts."""
    module: str
    """Path of the module that it came from, if the exporter records it."""
    most_launches: int = 0
    """Operators that control flow may launch. 0: it is no control flow."""

    @property
    def is_standard(self) -> bool:
        return self.domain in ("", "ai.onnx")


class Network(NamedTuple):
    """What an ONNX file says of its network, once the user has bound its free sizes."""

    nodes: list[Node]
    """In order: each value is made before it is read."""
    types: dict[str, TensorType]
    """Of the values by name. Missing: no tensor, or one whose shape depends on the data."""
    inputs: list[str]
    """Names of what the user feeds."""
    outputs: list[str]
    weights: frozenset[str]
    known: frozenset[str]
    """Names of the values that are known without running the network, such as shapes."""


def read_network(
    path: Path,
    *,
    batch_size: int | None = None,
    dims: Dims | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    most_nodes: int = 20_000,
    memory_bytes: int = 3 * 2**28,
    cpu_s: int = 8,
) -> Network:
    """The network in the file at ``path``. The values of its weights stay on the disk.

    Args:
        path, batch_size, dims, max_bytes: as :func:`perfguard.onnx.graph_from_onnx` takes them, which also lists the errors.
        most_nodes: more operators are refused, those of subgraphs and functions among them. One takes about 0.2 ms.
        memory_bytes: limit of the child's address space, without the map of the file. With what is made of its answer here, the
            whole stays below 1 GiB.
        cpu_s: limit of the child's processor time, in seconds.
    """
    _check_sizes(batch_size, dims or {}, max_bytes)
    _check_file(path, max_bytes)
    request = {
        "path": str(path.absolute()),
        "batch_size": batch_size,
        "dims": {name: value if isinstance(value, int) else list(value) for name, value in (dims or {}).items()},
        "most_nodes": most_nodes,
        "most_elements": 2**40,  # a tensor of a TiB at least: no device holds it, and the arithmetic of 64 bits still does
        "memory_bytes": memory_bytes,
        "cpu_s": cpu_s,
    }
    answer = _ask(path, request)
    if "problem" in answer:
        if answer.get("is_argument"):
            raise ConfigurationError(f"{answer['problem']}. {answer['hint']}")
        raise OnnxError(path, answer["problem"], answer["hint"])
    return Network(
        nodes=[_node(*fields) for fields in answer["nodes"]],
        types={
            name: TensorType(tuple(shape), _TYPES.get(kind, ("unknown", 8))[0])
            for name, (kind, *shape) in answer["types"].items()
        },
        inputs=answer["inputs"],
        outputs=answer["outputs"],
        weights=frozenset(answer["weights"]),
        known=frozenset(answer["known"]),
    )


def _node(op_type: str, domain: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any], *rest: Any) -> Node:
    attributes = {name: tuple(value) if isinstance(value, list) else value for name, value in attributes.items()}
    return Node(op_type, domain, tuple(inputs), tuple(outputs), attributes, *rest)


def _check_sizes(batch_size: int | None, dims: Dims, max_bytes: int) -> None:
    def check(what: str, size: object, least: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= 2**31 - 1:
            raise ConfigurationError(f"{what} must be an integer from {least} to 2^31 - 1, but got {size!r}.")

    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ConfigurationError(f"max_bytes must be a positive number of bytes, but got {max_bytes!r}.")
    if batch_size is not None:
        check("batch_size", batch_size, 1)
    for name, size in dims.items():
        for part in (size,) if isinstance(size, int) else size:
            check(f"dims[{name!r}]", part, 1 if isinstance(size, int) else 0)


def _check_file(path: Path, max_bytes: int) -> None:
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            path.open("rb").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OnnxError(path, f"cannot be read: {reason}", "Check the path and its permissions.") from None
    if not stat.S_ISREG(status.st_mode):
        raise OnnxError(path, "is not a regular file", "Give the path of a file.")
    if status.st_size > max_bytes:
        size = format_bytes(status.st_size)
        most = format_bytes(max_bytes)
        raise OnnxError(path, f"has {size}, more than the limit of {most}", "If you trust it, raise max_bytes.")
    if not status.st_size:
        raise OnnxError(path, "is empty", "Export the network again.")


def _ask(path: Path, request: Mapping[str, Any], *, place_bytes: int = 256, most_bytes: int = 32 * 2**20) -> dict[str, Any]:
    """The child's answer to ``request``. Nothing in it is trusted: it is bounded, and JSON.

    The file of the answer begins with the place at which the child is. Twenty thousand operators take about 10 MiB.
    """
    # The child's own folder must not be among the folders that it imports from: its modules have everyday names.
    start = "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
    folders = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    command = [sys.executable, "-I", "-c", start, folders, str(Path(__file__).with_name("child.py"))]
    # Threads of numpy's libraries would reserve memory for each core.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    wall_s = 60  # for a child that waits, for instance for a network drive; processor time has its own limit
    with tempfile.TemporaryFile() as file:
        try:
            output: dict[str, Any] = {"stdout": file, "stderr": subprocess.DEVNULL}
            text = json.dumps(request).encode()
            code = subprocess.run(command, input=text, env=environment, timeout=wall_s, check=False, **output).returncode
        except subprocess.TimeoutExpired:
            code = _TOO_LONG
        except OSError as error:
            raise OnnxError(path, f"cannot be read: no child process starts ({error})", "Free memory or processes.") from None
        file.seek(0)
        place = file.read(place_bytes).decode(errors="replace").strip(" \0") or "the start of its process"
        text = file.read(most_bytes + 1)
    try:
        answer: dict[str, Any] = json.loads(text) if code == 0 and len(text) <= most_bytes else {}
    except ValueError:
        answer = {}
    if "nodes" in answer or "problem" in answer:
        return answer
    if "is_out_of_memory" in answer:
        ended = f"takes more than {format_bytes(request['memory_bytes'])} of memory"
    elif code == _TOO_LONG:
        ended = f"takes more than {request['cpu_s']} s"
    else:
        ended = f"stops the onnx library (exit status {code})"
    raise OnnxError(path, f"{ended} in {place}", "It is refused: look at the sizes there, or export it again.")
