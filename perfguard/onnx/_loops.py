"""Control flow whose course is known, written out: the branch that is taken, and a copy of a loop's body for each of its trips.

A loop's cost is then that of operators which are known one by one, sizes that grow from trip to trip included. What depends on
the data stays one operator, and is opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from perfguard.exceptions import OnnxError
from perfguard.onnx._file import MOST_COPIED_BYTES, graphs_in, label, num_nodes
from perfguard.quantities import format_bytes

_MEND = "The file contradicts the ONNX specification. Export it again."
_INLINE_AXES = 13
"""Since this opset the axes of Unsqueeze are an input."""
_MOST_WRITTEN_OUT = 10_000
"""Operators in all copies, each trip counting as one more."""
_LONGEST_NAME = 40


@dataclass(frozen=True)
class Trip:
    """A loop before one of its trips."""

    node: onnx.NodeProto
    body: onnx.GraphProto
    mapping: Mapping[str, str]
    """Names outside the loop of the body's own weights."""
    limit: int | None
    """Most trips; None: as long as the condition holds."""
    condition: str
    """Name of the condition for another trip; empty: always true."""
    carried: tuple[str, ...]
    """Names of the values that go from trip to trip."""
    number: int = 0
    scanned: tuple[tuple[str, ...], ...] = field(default=())
    """For each collecting output, the values that the trips have added."""


class Unroller:
    """Writes out the control flow of one model.

    Args:
        path: for messages.
        opset: version of the standard operators.
        values: the known values of the model. More become known while the model is followed.
        add_constant: gives the model another weight.
    """

    def __init__(
        self, path: Path, opset: int, values: Mapping[str, Any], add_constant: Callable[[onnx.TensorProto], None]
    ) -> None:
        self._path = path
        self._opset = opset
        self._values = values
        self._add_constant = add_constant
        self._numbers = count()
        self._nodes_left = _MOST_WRITTEN_OUT
        self._bytes_left = MOST_COPIED_BYTES

    def written_out(self, node: onnx.NodeProto | Trip, index: int) -> list[onnx.NodeProto | Trip] | None:
        """The replacement of ``node``, in order; None: it stays as it is.

        Raises:
            OnnxError: if its body does not fit it, or there would be too many operators.
        """
        if isinstance(node, Trip):
            return self._next(node, index)
        if node.domain not in ("", "ai.onnx") or node.op_type not in ("If", "Loop"):
            return None
        graphs = {attribute.name: attribute.g for attribute in node.attribute if attribute.HasField("g")}
        return self._branch(node, index, graphs) if node.op_type == "If" else self._first(node, index, graphs)

    def _branch(
        self, node: onnx.NodeProto, index: int, graphs: Mapping[str, onnx.GraphProto]
    ) -> list[onnx.NodeProto | Trip] | None:
        condition = self._known(node.input[0]) if node.input else None
        if condition is None:
            return None
        branch = graphs.get("then_branch" if condition else "else_branch")
        if branch is None or len(branch.output) != len(node.output):
            raise OnnxError(self._path, f"has no branch for {label(node, index)} that makes its outputs", _MEND)
        self._charge(branch, node, index, 0)
        nodes, mapping = self._copied(branch, self._weights_of(branch))
        pairs = zip(branch.output, node.output, strict=True)
        return [*nodes, *(_same(mapping.get(value.name, value.name), name) for value, name in pairs if name)]

    def _first(
        self, node: onnx.NodeProto, index: int, graphs: Mapping[str, onnx.GraphProto]
    ) -> list[onnx.NodeProto | Trip] | None:
        limit_name, condition, *carried = (*node.input, "", "")[: max(len(node.input), 2)]
        body = graphs.get("body")
        if (
            body is None
            or len(body.input) != 2 + len(carried)
            or not 1 + len(carried) <= len(body.output) == 1 + len(node.output)
        ):
            raise OnnxError(self._path, f"has a body of {label(node, index)} that does not fit its inputs and outputs", _MEND)
        limit = self._known(limit_name) if limit_name else None
        if (limit_name and limit is None) or (condition and self._known(condition) is None):
            return None
        scanned: tuple[tuple[str, ...], ...] = ((),) * (len(node.output) - len(carried))
        return [Trip(node, body, self._weights_of(body), limit, condition, tuple(carried), scanned=scanned)]

    def _next(self, trip: Trip, index: int) -> list[onnx.NodeProto | Trip]:
        goes_on = self._known(trip.condition) if trip.condition else 1
        if goes_on is None:  # from here on it depends on the data
            rest = onnx.NodeProto()
            rest.CopyFrom(trip.node)
            rest.input[:] = [*trip.node.input[:1], trip.condition, *trip.carried]
            return [rest]
        if not goes_on or (trip.limit is not None and trip.number >= trip.limit):
            return list(self._after(trip))
        self._charge(trip.body, trip.node, index, trip.number)
        iteration, condition, *carried = [value.name for value in trip.body.input]
        given = {iteration: self._constant(trip.number, np.int64), **dict(zip(carried, trip.carried, strict=True))}
        given[condition] = trip.condition or self._constant(True, np.bool_)
        nodes, mapping = self._copied(trip.body, {**trip.mapping, **given})
        goes_on_name, *made = [mapping.get(value.name, value.name) for value in trip.body.output]
        added = made[len(carried) :]
        scanned = tuple([(*before, name) for before, name in zip(trip.scanned, added, strict=True)])
        following = replace(
            trip, number=trip.number + 1, condition=goes_on_name, carried=tuple(made[: len(carried)]), scanned=scanned
        )
        return [*nodes, following]

    def _after(self, trip: Trip) -> Iterable[onnx.NodeProto]:
        """The loop's outputs."""
        outputs = list(trip.node.output)
        for name, output in zip(trip.carried, outputs, strict=False):
            if output:
                yield _same(name, output)
        for names, output in zip(trip.scanned, outputs[len(trip.carried) :], strict=True):
            if not names or not output:
                continue  # no trip: an output without elements, of which nothing is known
            rows = [self._new(name) for name in names]
            axis = [self._constant([0], np.int64)] if self._opset >= _INLINE_AXES else []
            for name, row in zip(names, rows, strict=True):
                node = helper.make_node("Unsqueeze", [name, *axis], [row])
                if not axis:
                    node.attribute.append(helper.make_attribute("axes", [0]))
                yield node
            yield helper.make_node("Concat", rows, [output], axis=0)

    def _charge(self, body: onnx.GraphProto, node: onnx.NodeProto, index: int, trips: int) -> None:
        """One copy more of ``body``; a trip costs something even where it has no operators."""
        self._nodes_left -= 1 + num_nodes(self._path, body)
        self._bytes_left -= body.ByteSize()
        if self._nodes_left < 0 or self._bytes_left < 0:
            most = f"{_MOST_WRITTEN_OUT:,} operators or {format_bytes(MOST_COPIED_BYTES)}"
            after = f", and goes on after {trips:,} trips" if trips else ""
            raise OnnxError(
                self._path,
                f"takes more than {most} once {label(node, index)} is written out{after}",
                "Export the loop's body alone, predict that, and multiply by the number of trips.",
            )

    def _weights_of(self, graph: onnx.GraphProto) -> dict[str, str]:
        """Give the weights of a subgraph to the model, under other names."""
        mapping: dict[str, str] = {}
        for tensor in graph.initializer:
            mapping[tensor.name] = self._new(tensor.name)
            renamed = onnx.TensorProto()
            renamed.CopyFrom(tensor)
            renamed.name = mapping[tensor.name]
            self._add_constant(renamed)
        return mapping

    def _copied(self, graph: onnx.GraphProto, mapping: Mapping[str, str]) -> tuple[list[onnx.NodeProto], dict[str, str]]:
        """The operators of a subgraph under names that are used once, and the new names."""
        names = dict(mapping)
        nodes = []
        for node in graph.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            _rename(copy, names)
            names.update({name: self._new(name) for name in node.output if name})
            copy.output[:] = [names.get(name, "") for name in node.output]
            nodes.append(copy)
        return nodes, names

    def _constant(self, value: object, dtype: Any) -> str:
        name = self._new("constant")
        self._add_constant(numpy_helper.from_array(np.array(value, dtype=dtype), name))
        return name

    def _known(self, name: str) -> int | None:
        """A number or truth value; None: it depends on the data."""
        value = self._values.get(name)
        return int(value.reshape(-1)[0]) if value is not None and value.size == 1 and value.dtype.kind in "iub" else None

    def _new(self, name: str) -> str:
        return f"{name[:_LONGEST_NAME]}@{next(self._numbers)}"


def _same(source: str, name: str) -> onnx.NodeProto:
    return helper.make_node("Identity", [source], [name])


def _rename(node: onnx.NodeProto, names: Mapping[str, str], hidden: frozenset[str] = frozenset()) -> None:
    """Replace what ``node`` reads, in its subgraphs too, where it is not made there (``hidden``)."""
    node.input[:] = [name if name in hidden else names.get(name, name) for name in node.input]
    for graph in graphs_in(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer} | hidden
        own.update(name for inner in graph.node for name in inner.output)
        for inner in graph.node:
            _rename(inner, names, frozenset(own))
        for value in graph.output:
            if value.name not in own:
                value.name = names.get(value.name, value.name)
