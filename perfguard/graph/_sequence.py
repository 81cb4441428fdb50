"""The inference of a `nn.Sequential` from traces of its parts, each distinct part traced once.

Candidates of a search are stacks of blocks, most of them equal to one another and to blocks of earlier candidates. What happens
in a block does not depend on its neighbours: only the storage that it is given is somebody else's output. Views that end a block
are not counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import nn

from perfguard.graph._meta import META
from perfguard.graph._schema import Op, OpGraph, Storage, StorageKind
from perfguard.graph._structure import structure_of
from perfguard.graph._target import target_of
from perfguard.graph._trace import trace
from perfguard.pytorch import compiled_parts, is_compiled
from perfguard.workload import TensorSpec, Workload

if TYPE_CHECKING:
    from perfguard.devices import Device

_MOST_PARTS = 4096
_MOST_STACKS = 256


class _Part(NamedTuple):
    """One block by itself."""

    graph: OpGraph
    given: int | None
    """The storage of its input; None if the trace has none."""
    made: int | None
    """The storage of its output; None: it is the input's."""
    output: TensorSpec


class SequenceTracer:
    """Traces stacks of blocks; remembers the blocks."""

    def __init__(self) -> None:
        self._parts: OrderedDict[Hashable, _Part | None] = OrderedDict()
        self._stacks: OrderedDict[Hashable, tuple[OpGraph, list[tuple[str, _Part]]]] = OrderedDict()
        """Stacks by the names and ids of their parts, which are kept alive beside them."""

    def trace(
        self, model: nn.Sequential, inputs: tuple[int, ...] | TensorSpec, *, target: Device | Literal["cuda", "cpu"]
    ) -> OpGraph | None:
        """Trace one inference in float32 as :func:`perfguard.graph.trace` does.

        None: the model is no plain sequence of independent parts, and must be traced as a whole.
        """
        if type(model) is not nn.Sequential or is_compiled(model) or _has_hooks(model) or _shares_parameters(model):
            return None
        output = inputs if isinstance(inputs, TensorSpec) else TensorSpec(inputs)
        stack = _Stack(output)
        parts: list[tuple[str, _Part]] = []
        for name, child in model._modules.items():
            assert child is not None
            part = self._part(child, output, target)
            if part is None:
                return None
            parts.append((name, part))
            output = part.output
        key = tuple((name, id(part)) for name, part in parts)
        if key not in self._stacks:
            for name, part in parts:
                stack.add(name, part)
            self._stacks[key] = stack.graph(), parts
            if len(self._stacks) > _MOST_STACKS:
                self._stacks.popitem(last=False)
        return self._stacks[key][0]

    def _part(self, module: nn.Module, given: TensorSpec, target: Device | Literal["cuda", "cpu"]) -> _Part | None:
        workload = Workload(module, given, mode="infer")
        structure = structure_of(workload, target_of(target))
        if structure is None:
            return None
        key = structure
        if key not in self._parts:
            self._parts[key] = _traced(module, given, target)
            if len(self._parts) > _MOST_PARTS:
                self._parts.popitem(last=False)
        return self._parts[key]


def _has_hooks(model: nn.Module) -> bool:
    return bool(model._forward_hooks or model._forward_pre_hooks)


def _shares_parameters(model: nn.Sequential) -> bool:
    """Whether two blocks have a tensor in common, which would be counted twice."""
    seen: set[int] = set()
    for block in model:
        tensors = {id(tensor) for tensor in (*block.parameters(), *block.buffers())}
        if tensors & seen:
            return True
        seen |= tensors
    return False


class _Keeper(nn.Module):
    """Holds on to what a block returns, so that its storage is the one that outlives the trace."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.kept: list[object] = []

    def forward(self, x: torch.Tensor) -> object:
        out = self.block(x)
        self.kept.append(out)
        return out


def _traced(module: nn.Module, given: TensorSpec, target: Device | Literal["cuda", "cpu"]) -> _Part | None:
    """Trace one part. None: its output is not one new tensor, or torch.compile wraps some of it."""
    if any(compiled_parts(module)):
        return None
    keeper = _Keeper(module)
    graph = trace(Workload(keeper, given, mode="infer", retain="nothing"), target=target)
    out = keeper.kept[0] if len(keeper.kept) == 1 else None
    lasting = [index for index, storage in enumerate(graph.storages) if storage.birth >= 0 and storage.death == len(graph.ops)]
    inputs = [index for index, storage in enumerate(graph.storages) if storage.kind is StorageKind.INPUT]
    if not isinstance(out, torch.Tensor) or not out.is_contiguous() or not out.is_meta or len(lasting) > 1 or len(inputs) > 1:
        return None
    output = TensorSpec(tuple(out.shape), str(out.dtype).removeprefix("torch."))
    return _Part(graph, inputs[0] if inputs else None, lasting[0] if lasting else None, output)


def _inside(name: str, path: str) -> str:
    """The path in the stack of what the trace of a kept block calls ``path``."""
    rest = path.removeprefix("block").removeprefix(".")
    return f"{name}.{rest}" if rest else name


class _Stack:
    """Parts on top of each other."""

    def __init__(self, inputs: TensorSpec) -> None:
        itemsize = torch.empty((), dtype=getattr(torch, inputs.dtype), device=META).element_size()
        num_bytes = itemsize * torch.Size(inputs.shape).numel()
        self._storages = [Storage(num_bytes, StorageKind.INPUT, -1, 0, "inputs")]
        self._ops: list[Op] = []
        self._unmodelled: list[str] = []
        self._value = 0
        """The storage that the next part is given."""

    def add(self, name: str, part: _Part) -> None:
        """Run ``part`` on the output so far."""
        offset, end = len(self._ops), len(part.graph.ops)
        places = self._places(name, part, offset)
        for op in part.graph.ops:
            inputs, outputs = _mapped(places, op.inputs), _mapped(places, op.outputs)
            self._ops.append(op._replace(inputs=inputs, outputs=outputs, module=_inside(name, op.module)))
        before = self._storages[self._value]
        if before.kind is StorageKind.TEMPORARY:  # the name of the input is bound until the part returns
            self._storages[self._value] = before._replace(death=max(before.death, offset + end - 1))
        if part.made is not None:
            self._value = places[part.made]
        self._unmodelled += [text for text in part.graph.unmodelled if text not in self._unmodelled]

    def _places(self, name: str, part: _Part, offset: int) -> list[int]:
        """Index in the stack of each storage of ``part``."""
        end = len(part.graph.ops)
        places = []
        for index, (num_bytes, kind, birth, death, module) in enumerate(part.graph.storages):
            if index == part.given:
                places.append(self._value)
                continue
            places.append(len(self._storages))
            here = _inside(name, module)
            if index == part.made:
                kind = StorageKind.TEMPORARY  # noqa: PLW2901
            lasts = 0 if birth < 0 else offset + min(death, end - 1)
            self._storages.append(Storage(num_bytes, kind, birth if birth < 0 else birth + offset, lasts, here))
        return places

    def graph(self) -> OpGraph:
        """The graph of the whole stack."""
        end = len(self._ops)
        storages = [storage._replace(death=end) if storage.birth < 0 else storage for storage in self._storages]
        if storages[self._value].birth >= 0:  # the output is kept until the next forward pass returns
            storages[self._value] = storages[self._value]._replace(death=2 * end)
        return OpGraph(tuple(self._ops), tuple(storages), "infer", "fp32", "nchw", (), tuple(self._unmodelled))


def _mapped(places: Sequence[int], indices: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([places[index] for index in indices])
