"""ONNX file → OpGraph: the operators in order as PyTorch would launch them, and the life of every storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from perfguard.exceptions import ConfigurationError, OnnxError
from perfguard.graph import Op, OpGraph, Phase, Storage, StorageKind
from perfguard.graph.costs import bytes_read
from perfguard.graph.kernels import Target, target_of
from perfguard.onnx.fusions import Fuser
from perfguard.onnx.operators import HOST, IN_PLACE, QUANTISED, VIEWS, Launch, launch_of
from perfguard.onnx.read import DEFAULT_MAX_BYTES, Dims, Network, Node, read_network
from perfguard.unmodelled import ONNX_OPAQUE, ONNX_QUANTISED, ONNX_UNKNOWN_SHAPES, Unmodelled
from perfguard.workload import Tf32, tf32_instead, tf32_options

if TYPE_CHECKING:
    import os

    from perfguard.devices import Device

_HALF = {"fp16": "float16", "bf16": "bfloat16"}


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
        OnnxError: if the file is missing, damaged, too large, too new, contradicts the specification, leaves sizes open, or takes
            more memory or time than the limits.
        ConfigurationError: for an argument that cannot be right.
    """
    if precision not in (None, "fp32", *_HALF):
        runs_in = "An ONNX model runs in fp32, fp16 or bf16, or as it is stored (None)"
        raise ConfigurationError(f"{runs_in}, but got {precision!r}.{tf32_instead(precision)}")
    if tf32 not in (None, *get_args(Tf32)):
        raise ConfigurationError(f"tf32 must be one of {', '.join(get_args(Tf32))}, or None, but got {tf32!r}.")
    network = read_network(Path(path), batch_size=batch_size, dims=dims, max_bytes=max_bytes)
    return _Builder(Path(path), network, target_of(target), _HALF.get(precision or "")).run(tf32)


@dataclass(slots=True)
class _Storage:
    """Memory of one or more values."""

    name: str
    num_bytes: int
    kind: StorageKind
    birth: int
    last_use: int | None
    """None: it lives to the end."""
    readers_left: int
    """Operators that still read one of its values."""


class _Value(NamedTuple):
    """Storage and layout of a value."""

    storage: int
    num_bytes: int
    """Bytes that a kernel reads of it. An expanded dimension costs nothing."""
    order: tuple[int, ...] | None = None
    """Rank of each dimension in memory, outermost first; None: contiguous."""


class _Builder:
    """Places one operator after the other: nothing, a view, or a launch with new storages.

    ``half`` is the type in place of float32; None: float32 stays.
    """

    def __init__(self, path: Path, network: Network, target: Target, half: str | None) -> None:
        self._path = path
        self._network = network
        self._target = target
        self._types = network.types
        if half is not None:
            is_single = {"float32": half}
            self._types = {name: one._replace(dtype=is_single.get(one.dtype, one.dtype)) for name, one in network.types.items()}
        self._outputs = set(network.outputs)
        self._constants = self._constant_names()
        self._nodes = Fuser(network.nodes, self._types, self._constants, self._outputs).run()
        self._constant_maker = {name: node for node in self._nodes for name in node.outputs if name in self._constants}
        self._readers_left = Counter(name for node in self._nodes for name in node.inputs if name)
        self._readers_left.update(self._outputs)
        norms = (node for node in self._nodes if node.op_type == "BatchNormalization")
        self._buffers = {name for node in norms for name in node.inputs[3:5]}
        self._ops: list[Op] = []
        self._storages: list[_Storage] = []
        self._where: dict[str, _Value] = {}
        self._opaque: Counter[str] = Counter()
        self._shapeless: list[str] = []

    def _constant_names(self) -> set[str]:
        """Weights, and what follows from them alone: runtimes work that out once."""
        # These run each time although their inputs are constant: random ones, and lookups, whose table stays on the device.
        not_folded = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial",
                      "Gather", "GatherElements", "GatherND"}  # fmt: skip
        constants = set(self._network.weights)
        for node in self._network.nodes:
            names = [name for name in node.inputs if name]
            follows = node.op_type == "Constant" if not names else constants.issuperset(names)
            if follows and not node.most_launches and node.op_type not in not_folded:
                constants.update(name for name in node.outputs if name)
        return constants

    def run(self, tf32: Tf32 | None) -> OpGraph:
        for name in self._network.inputs:
            self._allocate(name, StorageKind.INPUT, birth=-1)
        for node in self._nodes:
            for name in filter(None, node.inputs):
                self._readers_left[name] -= 1
                if name in self._where:
                    self._storages[self._where[name].storage].readers_left -= 1
            self._place(node)
        for name in self._outputs:
            found = self._find(name)
            if found is not None:
                self._use(found, at=len(self._ops) - 1)
        # Above it the arithmetic of 64 bits ends, and so do all devices.
        if sum(one.num_bytes for one in self._storages) + sum(op.bytes_read + op.bytes_written for op in self._ops) > 2**60:
            raise OnnxError(self._path, "would move more than 2^60 bytes", "Check the sizes that you bound.")
        precision = self._precision()
        end = len(self._ops)
        return OpGraph(
            ops=tuple(self._ops),
            storages=tuple(
                Storage(one.num_bytes, one.kind, one.birth, end if one.last_use is None else one.last_use, one.name)
                for one in self._storages
            ),
            mode="infer",
            precision=precision,
            layout="nchw",
            options=tf32_options(precision, tf32),
            unmodelled=tuple(self._unmodelled()),
        )

    def _place(self, node: Node) -> None:
        """Launch it, or find out that nothing is launched."""
        outputs = {name for name in node.outputs if name}
        if node.op_type in HOST or self._constants >= outputs:
            return
        if self._network.known >= outputs and not any(name in self._where for name in node.inputs):
            return  # a shape, worked out on the host
        source = self._find(node.inputs[0]) if node.inputs else None
        if source is None:
            self._launch(node)
        elif node.op_type in VIEWS and node.is_standard:
            self._view(node, source)
        elif self._is_alias(node):
            self._alias(node.outputs[0], node.inputs[0])
        else:
            self._launch(node)

    def _is_alias(self, node: Node) -> bool:
        """Gather with one index is a view, and a cast to the same type does nothing."""
        first, last, out = (self._types.get(name) for name in (node.inputs[0], node.inputs[-1], node.outputs[0]))
        if node.op_type == "Gather":
            return len(node.inputs) == 2 and last is not None and not last.shape
        return node.op_type in ("Cast", "CastLike") and first is not None and out is not None and first.dtype == out.dtype

    def _find(self, name: str) -> _Value | None:
        """The value of ``name``. The first look-up of a weight creates its storage. None: on the host, or not known."""
        if name in self._where or name not in self._constants or name not in self._types:
            return self._where.get(name)
        found = self._types[name]
        is_index = found.dtype in ("int64", "int32", "bool")
        if found.num_elements == 1 or (is_index and found.num_elements <= 64):  # an operator's arguments, such as axes
            return None
        source = self._stored_form(name)
        if source != name:
            self._alias(name, source)
            return self._where.get(name)
        kind = StorageKind.BUFFER if name in self._buffers or is_index else StorageKind.PARAMETER
        return self._allocate(name, kind, birth=-1)

    def _stored_form(self, name: str) -> str:
        """Kernels take quantised weights as they are stored, and views of weights are the weights."""
        for _ in range(16):
            node = self._constant_maker.get(name)
            if node is None or not node.inputs or node.op_type not in ("DequantizeLinear", *VIEWS):
                break
            if node.op_type in ("Expand", "Slice", "Split") or node.inputs[0] not in self._types:
                break
            name = node.inputs[0]
        return name

    def _allocate(self, name: str, kind: StorageKind, *, birth: int, num_bytes: int | None = None) -> _Value:
        size = self._num_bytes(name) if num_bytes is None else num_bytes
        self._storages.append(_Storage(name, size, kind, birth, None if birth < 0 else birth, self._readers_left[name]))
        self._where[name] = _Value(len(self._storages) - 1, size)
        return self._where[name]

    def _num_bytes(self, name: str) -> int:
        return self._types[name].num_bytes if name in self._types else 0

    def _use(self, found: _Value, *, at: int) -> None:
        storage = self._storages[found.storage]
        if storage.birth >= 0:
            storage.last_use = at

    def _alias(self, name: str, source: str, *, order: tuple[int, ...] | None = None) -> None:
        found = self._find(source)
        if found is not None and name:
            size = min(found.num_bytes, self._num_bytes(name)) if name in self._types else found.num_bytes
            self._where[name] = _Value(found.storage, size, order)
            self._storages[found.storage].readers_left += self._readers_left[name]

    def _view(self, node: Node, source: _Value) -> None:
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
            launch = launch._replace(attributes={"unknown": max(node.most_launches, 1)})
            self._opaque["control flow: " + node.op_type if node.most_launches else node.op_type[:40]] += 1
        self._shapeless += [name for name in node.outputs if name and name not in self._types][:1]
        self._record(node, launch, node.inputs)

    def _record(self, node: Node, launch: Launch, inputs: tuple[str, ...]) -> None:
        index = len(self._ops)
        given = [*map(self._find, inputs)]
        read = [one for one in given if one is not None]
        named = [name for at, name in enumerate(node.outputs) if name and (at == 0 or self._readers_left[name] > 0)]
        name = launch.name
        if name in IN_PLACE and len(named) == 1 and read and self._dies(read[0], node.inputs[0], named[0]):
            name += "_"
            self._alias(named[0], node.inputs[0], order=read[0].order)
        else:
            for made in named:
                self._allocate(made, StorageKind.TEMPORARY, birth=index)
        if launch.scratch_bytes:
            scratch = f"{named[0] if named else index}\0scratch"
            self._allocate(scratch, StorageKind.TEMPORARY, birth=index, num_bytes=launch.scratch_bytes)
        written = [self._where[made] for made in named]
        for found in (*read, *written):
            self._use(found, at=index)
        first = self._types.get(named[0]) if named else None
        if launch.kind == "attention" and first is not None and len(first.shape) == 4:
            # Fused kernels write (batch, length, heads, width), so that the transposition after them costs nothing.
            self._where[named[0]] = self._where[named[0]]._replace(order=(0, 2, 1, 3))
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
        storage = self._storages[found.storage]
        if storage.birth < 0 or self._types.get(name) != self._types.get(output):
            return False
        return found.num_bytes == storage.num_bytes and not storage.readers_left

    def _precision(self) -> str:
        """Precision of most bytes of the weights."""
        sizes: Counter[str] = Counter()
        for one in self._storages:
            if one.kind is StorageKind.PARAMETER and one.name in self._types:
                sizes[self._types[one.name].dtype] += one.num_bytes
        most = max(sizes, key=lambda dtype: sizes[dtype], default="float32")
        return {dtype: precision for precision, dtype in _HALF.items()}.get(most, "fp32")

    def _unmodelled(self) -> Iterator[Unmodelled]:
        if self._opaque:
            named = ", ".join(f"{name} ({number})" for name, number in self._opaque.most_common(4))
            more = ", ..." if len(self._opaque) > 4 else ""
            yield ONNX_OPAQUE.of(named + more)
        if self._shapeless:
            named = ", ".join(name[:40] for name in self._shapeless[:4])
            yield ONNX_UNKNOWN_SHAPES.of(len(self._shapeless), named)
        if any(node.op_type in QUANTISED for node in self._nodes):
            yield ONNX_QUANTISED
