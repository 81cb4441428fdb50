"""Loads and checks a ModelProto: bounded, of a known version, in order, without functions and without values."""

from __future__ import annotations

import mmap
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, Message
from onnx import inliner

from perfguard.exceptions import ConfigurationError, OnnxError
from perfguard.onnx._wire import WireError, without_values
from perfguard.quantities import format_bytes

MOST_NODES = 20_000
"""Operators that are read, those of subgraphs and of unrolled loops among them: about a millisecond each, to the prediction."""
MOST_COPIED_BYTES = 32 * 2**20
"""Memory limit of copies for calls of functions and trips of loops."""
_DEEPEST_SUBGRAPH = 20
_MOST_ATTRIBUTES = 200
_MOST_LOCATIONS = 4096
_LONGEST_LOCATION = 256
_ONNX_DOMAINS = ("", "ai.onnx")


def read_model(path: Path, *, max_bytes: int) -> onnx.ModelProto:
    """The model at ``path`` without the values of its large weights, its functions inlined, its nodes in order.

    Raises:
        OnnxError: if the file is missing, larger than ``max_bytes``, damaged, too new, cyclic, or points outside its own folder.
    """
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ConfigurationError(f"max_bytes must be a positive number of bytes, but got {max_bytes!r}.")
    model = _parsed(path, _slimmed(path, max_bytes))
    _check_versions(path, model)
    _check_external_data(path, model)
    if model.functions:
        model = _without_functions(path, model)
    if not model.graph.node:
        raise OnnxError(path, "has no operators", "Export the network again.")
    _put_in_order(path, model.graph)
    return model


def _slimmed(path: Path, max_bytes: int) -> bytes:
    try:
        status = path.stat()
    except OSError as error:
        raise OnnxError(path, f"cannot be read: {error.strerror}", "Check the path.") from None
    if not stat.S_ISREG(status.st_mode):
        raise OnnxError(path, "is not a regular file", "Give the path of a file.")
    if status.st_size > max_bytes:
        size, most = format_bytes(status.st_size), format_bytes(max_bytes)
        raise OnnxError(path, f"has {size}, more than the limit of {most}", "If you trust it, raise max_bytes.")
    if not status.st_size:
        raise OnnxError(path, "is empty", "Export the network again.")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)
            try:
                return without_values(view)
            finally:
                view.release()
    except OSError as error:
        raise OnnxError(path, f"cannot be read: {error.strerror}", "Check its permissions.") from None
    except WireError as error:
        raise OnnxError(path, f"is no ONNX model, or damaged: {error}", "Export or download it again.") from None


def _parsed(path: Path, data: bytes) -> onnx.ModelProto:
    try:
        model: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except (DecodeError, ValueError, RecursionError) as error:
        raise OnnxError(path, f"is no ONNX model, or damaged: {error}", "Export or download it again.") from None
    if not model.HasField("graph"):
        raise OnnxError(path, "holds no graph", "Is it an ONNX model? Export it again.")
    _check_number(path, model)  # first: all that follows takes time in proportion
    _check_texts(path, model)
    return model


def _check_number(path: Path, model: onnx.ModelProto) -> None:
    number = num_nodes(path, model.graph)
    if number > MOST_NODES:
        raise OnnxError(path, f"has {number:,} operators", f"At most {MOST_NODES:,} are read.")


def _check_texts(path: Path, message: Message) -> None:
    """Refuse text that is not UTF-8. The parser returns it as bytes, which other code does not expect."""
    for field, value in message.ListFields():
        if field.type not in (field.TYPE_MESSAGE, field.TYPE_STRING):
            continue
        for part in (value,) if isinstance(value, (str, bytes, Message)) else value:
            if isinstance(part, Message):
                _check_texts(path, part)
            elif not isinstance(part, str):
                raise OnnxError(path, f"is damaged: {field.full_name} is {part[:40]!r}, not text", "Export it again.")


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard operators; 1 for models from before versions were written down."""
    return max((entry.version for entry in model.opset_import if entry.domain in _ONNX_DOMAINS), default=1)


def _check_versions(path: Path, model: onnx.ModelProto) -> None:
    known_ir, known_opset = onnx.IR_VERSION, onnx.defs.onnx_opset_version()
    mend = f"Update onnx (installed: {onnx.__version__}), or export with opset_version={known_opset} or lower."
    if model.ir_version > known_ir:
        raise OnnxError(path, f"has IR version {model.ir_version}, the installed onnx knows up to {known_ir}", mend)
    opset = opset_of(model)
    if not 1 <= opset <= known_opset:
        raise OnnxError(path, f"has opset {opset}, the installed onnx knows 1 to {known_opset}", mend)


def graphs_in(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The subgraphs of a control-flow operator."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def num_nodes(path: Path, graph: onnx.GraphProto, depth: int = 0) -> int:
    """Operators of ``graph``, those of its subgraphs among them."""
    if depth > _DEEPEST_SUBGRAPH:
        raise OnnxError(path, f"nests subgraphs more than {_DEEPEST_SUBGRAPH} deep", "Simplify its control flow.")
    number = len(graph.node)
    for index, node in enumerate(graph.node):
        if len(node.attribute) > _MOST_ATTRIBUTES:
            raise OnnxError(path, f"gives {label(node, index)} {len(node.attribute):,} attributes", "Export it again.")
        number += sum(num_nodes(path, part, depth + 1) for part in graphs_in(node))
    return number


def _check_external_data(path: Path, model: onnx.ModelProto) -> None:
    """External values must lie in the model's own folder. They are not read, so they need not be there."""
    folder = path.resolve().parent
    checked: set[str] = set()
    for tensor in _tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if location not in checked:
            _check_location(path, folder, location, tensor.name[:80])
            checked.add(location)
            if len(checked) > _MOST_LOCATIONS:
                raise OnnxError(path, f"has its values in more than {_MOST_LOCATIONS:,} files", "Save them in one file.")


def _check_location(path: Path, folder: Path, location: str, name: str) -> None:
    mend = "It is refused: values must lie in the model's own folder. Save the model again with onnx.save_model."
    if not location or "\0" in location or len(location) > _LONGEST_LOCATION:
        raise OnnxError(path, f"says of the values of {name!r} that they are elsewhere, but not where", mend)
    try:
        target = (folder / location).resolve()
    except (OSError, RuntimeError):  # too long, or a loop of links
        target = None
    if target is None or Path(location).is_absolute() or not target.is_relative_to(folder) or "\\" in location:
        raise OnnxError(path, f"stores the values of {name!r} in {location[:80]!r}, outside its folder", mend)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    def of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
            for graph in graphs_in(node):
                yield from graph.initializer
                yield from of_nodes(graph.node)

    yield from model.graph.initializer
    yield from of_nodes(model.graph.node)
    for function in model.functions:
        yield from of_nodes(function.node)


def _without_functions(path: Path, model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the calls of its own functions replaced by their bodies, after a look at how large that gets."""
    bodies = {(function.domain, function.name): function.node for function in model.functions}
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    open_calls: set[tuple[str, str]] = set()

    def size_of(nodes: Iterable[onnx.NodeProto], depth: int) -> tuple[int, int]:
        """Operators, and their bytes."""
        if depth > _DEEPEST_SUBGRAPH:
            raise OnnxError(path, f"nests functions more than {_DEEPEST_SUBGRAPH} deep", "Inline them (onnx.inliner).")
        number = num_bytes = 0
        for node in nodes:
            parts = [(1, node.ByteSize()), *(size_of(graph.node, depth + 1) for graph in graphs_in(node))]
            key = node.domain, node.op_type
            if key in bodies:
                if key in open_calls:
                    raise OnnxError(path, f"has a function {node.op_type!r} that calls itself", "ONNX forbids that.")
                if key not in sizes:
                    open_calls.add(key)
                    sizes[key] = size_of(bodies[key], depth + 1)
                    open_calls.discard(key)
                parts.append(sizes[key])
            number += sum(part[0] for part in parts)
            num_bytes += sum(part[1] for part in parts)
        return number, num_bytes

    number, num_bytes = size_of(model.graph.node, 0)
    if number > MOST_NODES:
        raise OnnxError(path, f"has more than {MOST_NODES:,} operators once its functions are inlined", "It is refused.")
    if num_bytes > MOST_COPIED_BYTES + model.ByteSize():
        most = format_bytes(MOST_COPIED_BYTES)
        raise OnnxError(path, f"has functions that take more than {most} once they are inlined", "It is refused.")
    try:
        return inliner.inline_local_functions(model)
    except Exception as error:  # the binding raises whatever C++ raised
        reason = f"has functions that cannot be inlined: {str(error)[:160]}"
        raise OnnxError(path, reason, "Export it without functions.") from error


def names_read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Inputs of ``node``, and what its subgraphs read from outside."""
    yield from filter(None, node.input)
    for graph in graphs_in(node):
        made = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        for inner in graph.node:
            yield from (name for name in names_read_by(inner) if name not in made)
            made.update(inner.output)
        yield from (value.name for value in graph.output if value.name not in made)


def _put_in_order(path: Path, graph: onnx.GraphProto) -> None:
    """Sort ``graph.node`` so that each value is made before it is read (most files are so already).

    Raises:
        OnnxError: if a value is made twice, or read and never made, or there is a cycle.
    """
    given = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    given |= {sparse.values.name for sparse in graph.sparse_initializer}
    maker: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in maker or name in given:
                raise OnnxError(path, f"makes {name[:80]!r} twice, the second time by {label(node, index)}", "Export it again.")
            maker[name] = index
    needs = [_makers_of(path, node, index, maker, given) for index, node in enumerate(graph.node)]
    unmade = [value.name for value in graph.output if value.name not in maker and value.name not in given]
    if unmade:
        raise OnnxError(path, f"never makes its output {unmade[0][:80]!r}", "Export it again.")
    if all(needed < index for index, makers in enumerate(needs) for needed in makers):
        return
    order = _sorted(needs)
    if len(order) < len(needs):
        stuck = min(set(range(len(needs))) - set(order))
        raise OnnxError(path, f"is cyclic: {label(graph.node[stuck], stuck)} needs its own output", "Export it again.")
    nodes = [onnx.NodeProto.FromString(graph.node[index].SerializeToString()) for index in order]
    del graph.node[:]
    graph.node.extend(nodes)


def _makers_of(path: Path, node: onnx.NodeProto, index: int, maker: Mapping[str, int], given: set[str]) -> set[int]:
    """The operators whose outputs ``node`` reads."""
    names = set(names_read_by(node)) - given
    for name in names:
        if name not in maker:
            raise OnnxError(path, f"lacks {name[:80]!r}, which {label(node, index)} reads", "Export it again.")
    return {maker[name] for name in names}


def _sorted(needs: Sequence[set[int]]) -> list[int]:
    """Indices so that each comes after those that it needs; those in or behind a cycle are left out."""
    waiting = [len(needed) for needed in needs]
    readers: dict[int, list[int]] = {}
    for index, needed in enumerate(needs):
        for other in needed:
            readers.setdefault(other, []).append(index)
    order = [index for index, number in enumerate(waiting) if not number]
    for index in order:  # grows
        for reader in readers.get(index, ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                order.append(reader)
    return order


def label(node: onnx.NodeProto, index: int) -> str:
    """Name of an operator in messages."""
    return f"operator {index} ({node.op_type[:40]}{f' {node.name[:80]!r}' if node.name else ''})"
