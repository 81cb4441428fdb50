"""Operators that files spell out and libraries run as one: the linear layer, attention, GELU, SiLU, hard swish.

PyTorch's exporters take their own fused calls apart; without putting them together again, attention would be charged for a
matrix of scores that no GPU stores. Each pattern ends in the operator that takes its place, of the domain "perfguard".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from perfguard.onnx.operators import OWN_DOMAIN
from perfguard.onnx.read import Node, TensorType

_LONGEST_CHAIN = 8
_Match = tuple[Node, set[int]]
"""The replacement of an operator, and the indices of the operators that it replaces."""


class Fuser:
    """Puts each pattern into one piece.

    Args:
        nodes: in order.
        types: of the values, by name.
        constants: names of the values that do not depend on the inputs.
        kept: names of the model's outputs. No pattern may swallow them.
    """

    def __init__(
        self, nodes: Sequence[Node], types: Mapping[str, TensorType], constants: Collection[str], kept: Collection[str]
    ) -> None:
        self._nodes = nodes
        self._types = types
        self._constants = constants
        self._kept = kept
        self._maker = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
        self._readers: dict[str, list[int]] = {}
        for index, node in enumerate(nodes):
            for name in set(node.inputs):
                self._readers.setdefault(name, []).append(index)
        self._gone: set[int] = set()

    def run(self) -> list[Node]:
        """The operators in order, without those that a pattern has swallowed."""
        placed: dict[int, Node] = {}
        patterns: dict[str, tuple[Callable[[int], _Match | None], ...]] = {
            "MatMul": (self._attention,),
            "Add": (self._linear,),
            "Mul": (self._gelu, self._gated),
        }
        for index, node in enumerate(self._nodes):
            for pattern in patterns.get(node.op_type, ()) if node.is_standard else ():
                match = pattern(index)
                if match is not None and self._can_go(match[1], index):
                    placed[index] = match[0]
                    self._gone |= match[1]
                    break
        return [placed.get(index, node) for index, node in enumerate(self._nodes) if index not in self._gone]

    def _can_go(self, indices: set[int], anchor: int) -> bool:
        """Whether only the operators at ``indices`` themselves and ``anchor`` read their outputs."""
        inside = indices | {anchor}
        return not indices & self._gone and all(
            name not in self._kept
            and len(self._readers.get(name, ())) <= len(inside)  # first: a value may have twenty thousand readers
            and inside.issuperset(self._readers.get(name, ()))
            for index in indices
            for name in self._nodes[index].outputs
            if name
        )

    def _made_by(self, name: str, *op_types: str) -> int | None:
        """The index of the operator that makes ``name``, if it is of one of these types."""
        index = self._maker.get(name)
        if index is None or index in self._gone:
            return None
        node = self._nodes[index]
        return index if node.is_standard and node.op_type in op_types and node.inputs else None

    def _pair(self, node: Node, *op_types: str) -> Iterator[tuple[int, str]]:
        """Yield the operator that makes one input of ``node``, if its type fits, and the other input, in both orders.

        An operator that has not two inputs yields nothing.
        """
        if len(node.inputs) == 2:
            for this, other in (node.inputs, node.inputs[::-1]):
                index = self._made_by(this, *op_types)
                if index is not None:
                    yield index, other

    def _own(self, op_type: str, inputs: Sequence[str], anchor: int, **attributes: object) -> Node:
        node = self._nodes[anchor]
        return Node(op_type, OWN_DOMAIN, tuple(inputs), node.outputs, attributes, node.module)

    def _linear(self, anchor: int) -> _Match | None:
        """x W + b, with constants W of rank 2 and b of rank 1."""
        for product, bias in self._pair(self._nodes[anchor], "MatMul"):
            x, *rest = self._nodes[product].inputs
            weight = rest[0] if rest else ""
            if not {weight, bias} <= set(self._constants) or x in self._constants:
                continue
            if self._rank(weight) == 2 and self._rank(bias) == 1 and self._types[bias].shape[0] == self._types[weight].shape[1]:
                return self._own("Linear", (x, weight, bias), anchor), {product}
        return None

    def _rank(self, name: str) -> int:
        return len(self._types[name].shape) if name in self._types else -1

    def _attention(self, anchor: int) -> _Match | None:
        """softmax(q kᵀ · scale + mask) v."""
        node = self._nodes[anchor]
        if len(node.inputs) != 2:
            return None
        swallowed: set[int] = set()
        softmax = self._down_to_softmax(node.inputs[0], swallowed)
        if softmax is None:
            return None
        scores, masks = self._down_to_scores(self._nodes[softmax].inputs[0], swallowed)
        if scores is None:
            return None
        query, key = self._nodes[scores].inputs[:2]
        known = [self._types.get(name) for name in (self._nodes[scores].outputs[0], key, node.outputs[0])]
        if {query, key} & set(self._constants) or None in known:
            return None
        score_shape, key_shape, out_shape = (found.shape for found in known if found is not None)
        if not len(score_shape) == len(out_shape) == len(key_shape) >= 3:
            return None
        flops = 2 * math.prod(score_shape) * (key_shape[-2] + out_shape[-1])
        swallowed |= {softmax, scores}
        bases = [self._unscaled(name, swallowed, scores) for name in (query, key)]
        return self._own("Attention", (*bases, node.inputs[1], *masks), anchor, flops=flops, masked=bool(masks)), swallowed

    def _down_to_softmax(self, name: str, swallowed: set[int]) -> int | None:
        for _ in range(_LONGEST_CHAIN):
            index = self._made_by(name, "Softmax", "Cast", "Dropout", "Identity", "Where")
            if index is None:
                return None
            node = self._nodes[index]
            if node.op_type == "Softmax":
                rank = self._rank(node.outputs[0])
                return index if node.attributes.get("axis", -1) in (-1, rank - 1) else None
            swallowed.add(index)
            if node.op_type == "Where":  # torch guards rows that are masked altogether: where(isnan(p), 0, p)
                guard = self._made_by(node.inputs[0], "IsNaN")
                if guard is None or len(node.inputs) != 3 or self._nodes[guard].inputs[0] != node.inputs[2]:
                    return None
                swallowed.add(guard)
            name = node.inputs[2 if node.op_type == "Where" else 0]
        return None

    def _down_to_scores(self, name: str, swallowed: set[int]) -> tuple[int | None, list[str]]:
        """The product of query and key, and the masks on the way."""
        masks: list[str] = []
        between = ("Mul", "Div", "Add", "Where", "Cast")
        for _ in range(_LONGEST_CHAIN):
            index = self._made_by(name, "MatMul")
            if index is not None:
                return (index if len(self._nodes[index].inputs) == 2 else None), masks
            index = self._made_by(name, *between)
            if index is None:
                break
            swallowed.add(index)
            node = self._nodes[index]
            if node.op_type == "Cast":
                name = node.inputs[0]
                continue
            inputs = node.inputs[1:] if node.op_type == "Where" else node.inputs
            leading = [
                other for other in inputs if other not in self._constants and self._made_by(other, "MatMul", *between) is not None
            ]
            if not leading or len(inputs) != 2:
                break
            scored = (other for other in leading if self._made_by(other, "MatMul", "Mul", "Div") is not None)
            name = next(scored, leading[0])
            masks += [other for other in node.inputs if other != name and self._rank(other) > 0]
        return None, masks

    def _unscaled(self, name: str, swallowed: set[int], reader: int) -> str:
        """Name of a query or key before its scaling and transposition. The operators that do these are added to ``swallowed``."""
        for _ in range(_LONGEST_CHAIN):
            index = self._made_by(name, "Mul", "Div", "Transpose", "Reshape", "Cast")
            if index is None or self._readers.get(name) != [reader] or name in self._kept:
                break
            node = self._nodes[index]
            if node.op_type in ("Mul", "Div") and self._scalar_beside(node) is None:
                break
            swallowed.add(index)
            name = self._scalar_beside(node) or node.inputs[0]
            reader = index
        return name

    def _scalar_beside(self, node: Node) -> str | None:
        """The other factor of a product with a scalar."""
        for this, other in (node.inputs, node.inputs[::-1]) if len(node.inputs) == 2 else ():
            if other in self._types and self._types[other].num_elements == 1 and this not in self._constants:
                return this
        return None

    def _gelu(self, anchor: int) -> _Match | None:
        """x · (1 + erf(x / √2)) / 2, in any order of the products."""
        out = self._nodes[anchor].outputs[0]
        readers = [self._nodes[index] for index in self._readers.get(out, ())]
        if [reader.op_type for reader in readers] == ["Mul"] and self._scalar_beside(readers[0]) == out:
            return None  # the half is still to come
        swallowed: set[int] = set()
        factors = list(self._factors(anchor, swallowed))
        for name in factors:
            shifted = self._made_by(name, "Add")
            error = shifted is not None and next(iter(self._pair(self._nodes[shifted], "Erf")), None)
            if not error or shifted is None:
                continue
            scaled = self._made_by(self._nodes[error[0]].inputs[0], "Div", "Mul")
            x = None if scaled is None else self._scalar_beside(self._nodes[scaled])
            if x in factors and scaled is not None:
                rest = [other for other in factors if other not in (name, x)]
                if all(other in self._types and self._types[other].num_elements == 1 for other in rest):
                    return self._own("Gelu", (str(x),), anchor), swallowed | {shifted, error[0], scaled}
        return None

    def _factors(self, index: int, swallowed: set[int], depth: int = 0) -> Iterator[str]:
        """The factors of a product of products."""
        for name in self._nodes[index].inputs:
            inner = self._made_by(name, "Mul") if depth < 2 else None
            if inner is not None and self._readers.get(name) == [index]:
                swallowed.add(inner)
                yield from self._factors(inner, swallowed, depth + 1)
            else:
                yield name

    def _gated(self, anchor: int) -> _Match | None:
        """x · σ(x): SiLU, or hard swish."""
        names = {"Sigmoid": "Swish", "HardSigmoid": "HardSwish"}
        for gate, x in self._pair(self._nodes[anchor], *names):
            if self._nodes[gate].inputs[0] == x:
                return self._own(names[self._nodes[gate].op_type], (x,), anchor), {gate}
        return None
