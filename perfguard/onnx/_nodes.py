"""A model's operators as plain tuples, which the passes rewrite without touching the file's own messages."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import onnx

from perfguard.onnx._file import graphs_in, names_read_by

OWN_DOMAIN = "perfguard"
"""Domain of operators that replace several in the file; see `_fusions`."""
_SCOPES = "pkg.torch.onnx.name_scopes"
_LONGEST_SCOPES = 2000


class Node(NamedTuple):
    """One operator."""

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    """Names of values; empty where an optional input is left out."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    module: str
    """Path of the module that it came from, if the exporter records it."""
    has_subgraphs: bool = False
    num_inner: int = 0
    """Operators in its subgraphs."""

    @property
    def is_standard(self) -> bool:
        return self.domain in ("", "ai.onnx")


def nodes_of(protos: Iterable[onnx.NodeProto]) -> list[Node]:
    """Operators; what a subgraph reads from outside counts as inputs of its operator."""
    return [_node(proto) for proto in protos]


def _node(node: onnx.NodeProto) -> Node:
    has_subgraphs = any(True for _ in graphs_in(node))
    given = tuple(node.input[:1]) if node.op_type == "CastLike" else tuple(node.input)  # of the second, only the type matters
    known = set(node.input)
    captured = [name for name in dict.fromkeys(names_read_by(node)) if name not in known] if has_subgraphs else []
    return Node(
        node.op_type,
        node.domain,
        (*given, *captured),
        tuple(node.output),
        _attributes(node),
        _module(node),
        has_subgraphs,
        _num_inner(node) if has_subgraphs else 0,
    )


def _num_inner(node: onnx.NodeProto) -> int:
    return sum(1 + _num_inner(inner) for graph in graphs_in(node) for inner in graph.node)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Numbers, lists of numbers and texts; tensors and graphs are read elsewhere."""
    values: dict[str, Any] = {}
    for attribute in node.attribute:
        kind = onnx.AttributeProto
        if attribute.type == kind.INT:
            values[attribute.name] = attribute.i
        elif attribute.type == kind.INTS:
            values[attribute.name] = tuple(attribute.ints)
        elif attribute.type == kind.FLOAT:
            values[attribute.name] = attribute.f
        elif attribute.type == kind.STRING:
            values[attribute.name] = attribute.s.decode(errors="replace")
    return values


def _module(node: onnx.NodeProto) -> str:
    """Module path of a node: from the metadata of torch's dynamo exporter, else from the name, as in
    "/layer1/layer1.0/conv1/Conv"."""
    for entry in node.metadata_props:
        if entry.key == _SCOPES and len(entry.value) <= _LONGEST_SCOPES:
            try:
                scopes = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(scopes, list) and len(scopes) > 1 and isinstance(scopes[-2], str):
                return scopes[-2]
    path = ""
    for part in node.name.strip("/").split("/")[:-1]:
        path = part if not path or part.startswith(f"{path}.") else f"{path}.{part}"
    return path[:200]
