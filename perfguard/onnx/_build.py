"""ONNX file → OpGraph: the operators in order as PyTorch would launch them, and the life of every storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import onnx

from perfguard.exceptions import ConfigurationError, OnnxError
from perfguard.graph import Op, OpGraph, Phase, Storage, StorageKind
from perfguard.graph.costs import bytes_read
from perfguard.graph.kernels import Target, target_of
from perfguard.onnx._file import read_model
from perfguard.onnx._fusions import fused
from perfguard.onnx._nodes import Node, nodes_of
from perfguard.onnx._operators import HOST, IN_PLACE, QUANTISED, VIEWS, Launch, launch_of
from perfguard.onnx._shapes import Dims, Inferred, TensorType, bind, infer, network_inputs
from perfguard.workload import Tf32, tf32_instead, tf32_options

if TYPE_CHECKING:
    import os

    from perfguard.devices import Device

DEFAULT_MAX_BYTES = 2 * 2**30
_HALF = {"fp16": "float16", "bf16": "bfloat16"}
_MOST_TOTAL_BYTES = 2**60
_ARGUMENT_ELEMENTS = 64
"""Integers up to this number are an operator's arguments (axes, shapes), not a tensor on the device."""
_LONGEST_CHAIN = 16
_LONGEST_NAME = 200
_TRIPS = 1000
"""Assumed number of trips of a loop whose number depends on data."""
_MOST_NAMED = 4
_NOT_FOLDED = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial",
     "Gather", "GatherElements", "GatherND"}
)  # fmt: skip
"""Operators that run each time although their inputs are constant: random ones, and lookups, whose table stays on the device."""


def graph_from_onnx(
    path: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    dims: Dims | None = None,
    precision: Literal["fp32", "fp16", "bf16"] | None = None,
    tf32: Tf32 | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    target: Device | Literal["cuda", "cpu"] = "cuda",
) -> OpGraph:
    """One inference of the network in an ONNX file, as PyTorch would launch it.

    Only shapes are read. The values of weights stay on disk, and external data may be missing. Patterns that exporters split
    into parts (attention, GELU, linear layers) are fused again. Unknown operators keep their bytes and are named in
    ``unmodelled``.

    Args:
        path: the file.
        batch_size: the batch, the first dimension of every input. An open or different one is replaced.
        dims: other sizes. Keys are named dimensions (``{"sequence": 128}``) or inputs (``{"x": (8, 3, 224, 224)}``).
        precision: the precision in which float32 tensors run. None: as they are stored.
        tf32: where float32 is computed in TF32, as :class:`perfguard.Workload` takes it. None: "default".
        max_bytes: larger files are refused.
        target: the device, or just its kind ("cuda": a recent GPU). It decides which fused kernels run.

    Raises:
        OnnxError: if the file is damaged, too large, too new, cyclic, reaches outside its folder, or leaves sizes open.
        ConfigurationError: for an argument that cannot be right.
    """
    if precision not in (None, "fp32", *_HALF):
        runs_in = "An ONNX model runs in fp32, fp16 or bf16, or as it is stored (None)"
        raise ConfigurationError(f"{runs_in}, but got {precision!r}.{tf32_instead(precision)}")
    if tf32 not in (None, *get_args(Tf32)):
        raise ConfigurationError(f"tf32 must be one of {', '.join(get_args(Tf32))}, or None, but got {tf32!r}.")
    file, dims = Path(path), dims or {}
    model = read_model(file, max_bytes=max_bytes)
    before = [value.SerializeToString() for value in model.graph.input]
    bind(file, model, batch_size=batch_size, dims=dims)
    rebatched = before != [value.SerializeToString() for value in model.graph.input]
    inferred = infer(file, model, rebatched=rebatched)
    return _Builder(file, model, inferred, target_of(target), _HALF.get(precision or "")).run(tf32)


class _Value(NamedTuple):
    """Storage and layout of a value."""

    storage: int
    num_bytes: int
    """Bytes that a kernel reads of it. An expanded dimension costs nothing."""
    order: tuple[int, ...] | None = None
    """Rank of each dimension in memory, outermost first; None: contiguous."""


class _Builder:
    def __init__(self, path: Path, model: onnx.ModelProto, inferred: Inferred, target: Target, half: str | None) -> None:
        graph = model.graph
        self._path = path
        self._graph = graph
        self._target = target
        self._values = inferred.values
        self._types: Mapping[str, TensorType] = inferred.types
        if half is not None:
            self._types = {name: _narrowed(found, half) for name, found in inferred.types.items()}
        self._outputs = {value.name for value in graph.output}
        nodes = nodes_of(inferred.nodes)
        self._constants = self._constant_names(nodes, inferred.weights)
        self._nodes = fused(nodes, self._types, self._constants, self._outputs)
        self._constant_maker = {name: node for node in self._nodes for name in node.outputs if name and name in self._constants}
        self._readers_left = Counter(name for node in self._nodes for name in node.inputs if name)
        self._readers_left.update(self._outputs)
        self._ops: list[Op] = []
        self._bytes: list[int] = []
        self._kinds: list[StorageKind] = []
        self._births: list[int] = []
        self._last_uses: list[int | None] = []
        self._names: list[str] = []
        self._readers_of: list[int] = []
        self._where: dict[str, _Value] = {}
        self._opaque: Counter[str] = Counter()
        self._shapeless: list[str] = []
        self._buffers = {
            name for node in self._nodes if node.op_type == "BatchNormalization" for name in node.inputs[3:5] if name
        }

    def _constant_names(self, nodes: list[Node], weights: frozenset[str]) -> set[str]:
        """Weights, and what follows from them alone: runtimes work that out once."""
        constants = set(weights)
        for node in nodes:
            names = [name for name in node.inputs if name]
            follows = node.op_type == "Constant" if not names else constants.issuperset(names)
            if follows and not node.has_subgraphs and node.op_type not in _NOT_FOLDED:
                constants.update(node.outputs)
        return constants

    def run(self, tf32: Tf32 | None) -> OpGraph:
        for value in network_inputs(self._graph):
            if value.name in self._types:
                self._allocate(value.name, StorageKind.INPUT, birth=-1)
        for node in self._nodes:
            for name in filter(None, node.inputs):
                self._readers_left[name] -= 1
                if name in self._where:
                    self._readers_of[self._where[name].storage] -= 1
            self._place(node)
        for name in self._outputs:
            found = self._find(name)
            if found is not None and self._births[found.storage] >= 0:
                self._last_uses[found.storage] = len(self._ops) - 1
        if sum(self._bytes) + sum(op.bytes_read + op.bytes_written for op in self._ops) > _MOST_TOTAL_BYTES:
            raise OnnxError(self._path, "would move more than 2^60 bytes", "Check the sizes that you bound.")
        precision = self._precision()
        return OpGraph(
            ops=tuple(self._ops),
            storages=tuple(self._storages()),
            mode="infer",
            precision=precision,
            layout="nchw",
            options=tf32_options(precision, tf32),
            unmodelled=tuple(self._unmodelled()),
        )

    def _storages(self) -> Iterator[Storage]:
        end = len(self._ops)
        columns = zip(self._bytes, self._kinds, self._births, self._last_uses, self._names, strict=True)
        for num_bytes, kind, birth, last_use, name in columns:
            yield Storage(num_bytes, kind, birth, end if last_use is None else last_use, name[:_LONGEST_NAME])

    def _place(self, node: Node) -> None:
        """Launch it, or find out that nothing is launched."""
        if node.op_type in HOST or self._is_known_beforehand(node):
            return
        if node.op_type in VIEWS and node.is_standard and self._find(node.inputs[0] if node.inputs else "") is not None:
            self._view(node)
        elif self._is_selection(node) or self._is_same_cast(node):
            self._alias(node.outputs[0], node.inputs[0], order=None)
        else:
            self._launch(node)

    def _is_known_beforehand(self, node: Node) -> bool:
        """Weights and what follows from them are there before the step; shapes are worked out on the host."""
        outputs = [name for name in node.outputs if name]
        if all(name in self._constants for name in outputs):
            return True
        known = all(name in self._values for name in outputs)
        return known and not any(name in self._where for name in node.inputs)

    def _is_selection(self, node: Node) -> bool:
        """Gather with one index is a view."""
        if node.op_type != "Gather" or len(node.inputs) != 2 or self._find(node.inputs[0]) is None:
            return False
        return node.inputs[1] in self._types and not self._types[node.inputs[1]].shape

    def _is_same_cast(self, node: Node) -> bool:
        if node.op_type not in ("Cast", "CastLike") or not node.inputs or self._find(node.inputs[0]) is None:
            return False
        before, after = self._types.get(node.inputs[0]), self._types.get(node.outputs[0])
        return before is not None and after is not None and before.dtype == after.dtype

    def _find(self, name: str) -> _Value | None:
        """The value of ``name``. The first look-up of a weight creates its storage. None: on the host, or not known."""
        if name in self._where or name not in self._constants or name not in self._types:
            return self._where.get(name)
        found = self._types[name]
        is_index = found.dtype in ("int64", "int32", "bool")
        if found.num_elements == 1 or (is_index and found.num_elements <= _ARGUMENT_ELEMENTS):
            return None
        source = self._stored_form(name)
        if source != name:
            self._alias(name, source, order=None)
            return self._where.get(name)
        kind = StorageKind.BUFFER if name in self._buffers or is_index else StorageKind.PARAMETER
        return self._allocate(name, kind, birth=-1)

    def _stored_form(self, name: str) -> str:
        """Kernels take quantised weights as they are stored, and views of weights are the weights."""
        for _ in range(_LONGEST_CHAIN):
            node = self._constant_maker.get(name)
            if node is None or not node.inputs or node.op_type not in ("DequantizeLinear", *VIEWS):
                break
            if node.op_type in ("Expand", "Slice", "Split") or node.inputs[0] not in self._types:
                break
            name = node.inputs[0]
        return name

    def _allocate(self, name: str, kind: StorageKind, *, birth: int, num_bytes: int | None = None) -> _Value:
        size = self._num_bytes(name) if num_bytes is None else num_bytes
        self._bytes.append(size)
        self._kinds.append(kind)
        self._births.append(birth)
        self._last_uses.append(None if birth < 0 else birth)
        self._names.append(name)
        self._readers_of.append(self._readers_left[name])
        self._where[name] = _Value(len(self._bytes) - 1, size)
        return self._where[name]

    def _num_bytes(self, name: str) -> int:
        return self._types[name].num_bytes if name in self._types else 0

    def _alias(self, name: str, source: str, *, order: tuple[int, ...] | None) -> None:
        found = self._find(source)
        if found is not None and name:
            size = min(found.num_bytes, self._num_bytes(name)) if name in self._types else found.num_bytes
            self._where[name] = _Value(found.storage, size, order)
            self._readers_of[found.storage] += self._readers_left[name]

    def _view(self, node: Node) -> None:
        source = self._find(node.inputs[0])
        assert source is not None
        if node.op_type in ("Reshape", "Flatten") and source.order is not None:
            self._record(node, Launch("clone", "copy", 0), (node.inputs[0],))  # what is transposed cannot be reshaped in place
            return
        for name in node.outputs:
            if name:
                self._alias(name, node.inputs[0], order=self._order_after(node, source.order))

    def _order_after(self, node: Node, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
        known = self._types.get(node.inputs[0])
        if known is None:
            return None
        if node.op_type == "Transpose":
            rank = len(known.shape)
            permutation = node.attributes.get("perm", tuple(reversed(range(rank))))
            if sorted(permutation) != list(range(rank)):
                return None
            before = order or tuple(range(rank))
            after = tuple(before[axis] for axis in permutation)
            real = [after[at] for at, axis in enumerate(permutation) if known.shape[axis] != 1]
            return None if real == sorted(real) else after
        result = self._types.get(node.outputs[0])
        return order if result is not None and order is not None and len(result.shape) == len(order) else None

    def _launch(self, node: Node) -> None:
        inputs = [self._types.get(name) if name else None for name in node.inputs]
        outputs = [self._types.get(name) if name else None for name in node.outputs]
        launch = launch_of(node, inputs, outputs, self._target)
        if not launch.is_known:
            launch = launch._replace(attributes={"unknown": self._most_operators(node)})
            self._opaque["control flow: " + node.op_type if node.has_subgraphs else node.op_type[:40]] += 1
        if any(name and name not in self._types for name in node.outputs):
            self._shapeless.append(next(name for name in node.outputs if name and name not in self._types))
        self._record(node, launch, node.inputs)

    def _most_operators(self, node: Node) -> int:
        """Most operators that an opaque one may launch: those of its subgraphs, times the trips of a loop."""
        trips = 1
        if node.op_type == "Loop":
            limit = self._values.get(node.inputs[0]) if node.inputs else None
            is_count = limit is not None and limit.size == 1 and limit.dtype.kind in "iu"
            trips = int(limit.reshape(-1)[0]) if is_count and limit is not None else _TRIPS
        elif node.op_type == "Scan":
            scanned = (self._types.get(name) for name in node.inputs[-max(node.attributes.get("num_scan_inputs", 1), 1) :])
            trips = max((max(found.shape, default=1) for found in scanned if found is not None), default=_TRIPS)
        return max(trips, 1) * max(node.num_inner, 1)

    def _record(self, node: Node, launch: Launch, inputs: tuple[str, ...]) -> None:
        index = len(self._ops)
        given = [*map(self._find, inputs)]
        read = [one for one in given if one is not None]
        named = [name for at, name in enumerate(node.outputs) if name and (at == 0 or self._readers_left[name] > 0)]
        name = launch.name
        in_place = name in IN_PLACE and len(named) == 1 and bool(read) and self._dies(read[0], node.inputs[0], named[0])
        if in_place:
            name += "_"
            self._alias(named[0], node.inputs[0], order=read[0].order)
        else:
            for made in named:
                self._allocate(made, StorageKind.TEMPORARY, birth=index)
        if launch.scratch_bytes:
            self._allocate(
                f"{named[0] if named else index}\0scratch", StorageKind.TEMPORARY, birth=index, num_bytes=launch.scratch_bytes
            )
        written = [self._where[made] for made in named]
        for found in (*read, *written):
            if self._births[found.storage] >= 0:
                self._last_uses[found.storage] = index
        if launch.kind == "attention" and named and named[0] in self._types and len(self._types[named[0]].shape) == 4:
            # Fused kernels write (batch, length, heads, width), so that the transposition after them costs nothing.
            self._where[named[0]] = self._where[named[0]]._replace(order=(0, 2, 1, 3))
        first = self._types.get(named[0]) if named else None
        written_bytes = sum(map(self._num_bytes, named))
        self._ops.append(
            Op(
                name=name,
                kind=launch.kind,
                phase=Phase.FORWARD,
                flops=launch.flops,
                bytes_read=bytes_read(launch.name, [0 if one is None else one.num_bytes for one in given], written_bytes),
                bytes_written=written_bytes + launch.scratch_bytes,
                inputs=tuple(dict.fromkeys(found.storage for found in read)),
                outputs=tuple(dict.fromkeys(found.storage for found in written)),
                module=node.module,
                shape=first.shape if first is not None else (),
                dtype=first.dtype if first is not None else "",
                attributes=launch.attributes,
            )
        )

    def _dies(self, found: _Value, name: str, output: str) -> bool:
        """Whether no later operator reads this storage, and the result fits into it."""
        if self._births[found.storage] < 0 or self._types.get(name) != self._types.get(output):
            return False
        return found.num_bytes == self._bytes[found.storage] and not self._readers_of[found.storage]

    def _precision(self) -> str:
        """Precision of most bytes of the weights."""
        sizes: Counter[str] = Counter()
        for num_bytes, kind, name in zip(self._bytes, self._kinds, self._names, strict=True):
            if kind is StorageKind.PARAMETER and name in self._types:
                sizes[self._types[name].dtype] += num_bytes
        most = max(sizes, key=lambda dtype: sizes[dtype], default="float32")
        return {dtype: precision for precision, dtype in _HALF.items()}.get(most, "fp32")

    def _unmodelled(self) -> Iterator[str]:
        if self._opaque:
            named = ", ".join(f"{name} ({number})" for name, number in self._opaque.most_common(_MOST_NAMED))
            more = ", ..." if len(self._opaque) > _MOST_NAMED else ""
            text = "opaque operators: their bytes are counted, their arithmetic is not, and intervals are wider for it"
            yield f"{text}: {named}{more}"
        if self._shapeless:
            named = ", ".join(name[:40] for name in self._shapeless[:_MOST_NAMED])
            yield f"{len(self._shapeless)} operators whose output shape depends on the data, not counted: {named}"
        if any(node.op_type in QUANTISED for node in self._nodes):
            yield "quantised operators: bytes as stored, arithmetic at the rate of float32, each operator on its own"


def _narrowed(found: TensorType, half: str) -> TensorType:
    return found._replace(dtype=half) if found.dtype == "float32" else found
