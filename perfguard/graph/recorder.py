"""Writes down every operator that is dispatched on meta, and the birth and death of every storage."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perfguard.graph.costs import (
    attributes_of,
    bytes_read,
    bytes_taken,
    cuda_workspace,
    flops_of,
    formula_kind,
    kind_of,
    launches_kernel,
    name_of,
)
from perfguard.graph.op import Life, Op, Phase, Storage, StorageKind
from perfguard.graph.repetition import Place, Repetition, are_alike, forward_bytes
from perfguard.graph.selections import Selections, is_mask
from perfguard.graph.shape_rules import META, is_meta, outputs_of
from perfguard.pytorch import path_inside

aten = torch.ops.aten
_IN_PLACE = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
}
"""How autograd writes the gradient of a selection into fresh zeros, where no mode is on (`areAnyTensorSubclassLike` in
FunctionsManual.cpp)."""
_ZEROS = ("new_zeros", "zeros_like", "zeros")
_WITHOUT_TENSORS = frozenset({
    int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in ``value``, in order. A tensor that occurs twice is listed twice."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if type(value) in _WITHOUT_TENSORS:  # most arguments, and to ask whether they are mappings takes long
        return
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):  # of a DTensor, this process holds a part; of torchao's, codes and scales
            _collect([getattr(value, name) for name in value.__tensor_flatten__()[0]], found)
        else:
            found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)


class _Operator(NamedTuple):
    """Properties of an operator before a call."""

    name: str
    """See :func:`perfguard.graph.costs.name_of`."""
    kind: str
    is_view: bool
    launches: bool
    writes: tuple[tuple[int, str], ...]
    """Position and name of each argument that it writes to."""


@functools.cache
def operator_of(func: torch._ops.OpOverload) -> _Operator:
    """What is known of an operator before a call."""
    name = name_of(func)
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    kind = kind_of(name)
    if func.namespace == "c10d":  # their schemas do not say that they write to their first argument
        writes = ((0, func._schema.arguments[0].name),)
        kind = "copy"
    if func.namespace == "_c10d_functional":
        kind = "copy"
    return _Operator(name, kind, func.is_view, launches_kernel(name), writes)


def kind_by_lifetime(birth_phase: Phase, death: int | None, ops: Sequence[Op]) -> StorageKind:
    """Role of a storage of a step, by when it was born and when it dies."""
    if birth_phase is not Phase.FORWARD:
        return StorageKind.TEMPORARY
    dies_in_forward = death is not None and death >= 0 and ops[min(death, len(ops) - 1)].phase is Phase.FORWARD
    return StorageKind.TEMPORARY if dies_in_forward else StorageKind.ACTIVATION


class _Reference(weakref.ref[torch.UntypedStorage]):
    """Of a storage that was written down."""

    __slots__ = ("address", "index")
    address: int
    index: int


def _references(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Number of references to a tensor, to its storage, and to it in Python. None: this PyTorch does not tell."""
    if not hasattr(tensor, "_use_count"):
        return None
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata), sys.getrefcount(tensor)


class Recorder(TorchDispatchMode):
    """Enter it around the step; afterwards ``ops`` and :meth:`storages` hold what happened.

    Args:
        modules: the stack of paths of the modules that are running, kept by the caller.
        is_cpu: whether the step is for a CPU.
    """

    _birth_of_unseen: int | None = None
    """Of a storage that an operator reads and none has made. None: it is made now."""

    def __init__(self, modules: Sequence[str], *, is_cpu: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_cpu = is_cpu
        self._is_calibrating = False
        self._alone: tuple[int, int, int] | None = None
        """References to a gradient that only autograd's buffer holds. None: not known."""
        self.phase: Phase | None = None
        """None: it follows from whether autograd is running."""
        self.ops: list[Op] = []
        self._views = 0
        self._attributes: dict[str, Any] = {}
        self._modules = modules
        self._module_of_node: dict[int, str] = {}
        self._index_by_address: dict[int, int] = {}
        self._references: dict[int, _Reference] = {}
        self._dead: list[_Reference] = []
        """Storages that died since the last burial. ``append`` notes them: Ctrl-C within a callback in Python would be lost."""
        self._lives: list[Life] = []
        self._freed_after: int | None = None
        self._paused: Repetition | None = None
        """What is written down in the place of what runs. None: what runs is."""
        self._made_in_pause: dict[int, int] = {}
        """Storages that were made in a pause, and the number of operators within which one that dies has stood for a copy."""
        self._foreseen_deaths: dict[int, int] = {}
        """When storages die whose own death falls into a pause."""
        self._since_copy: list[int] = []
        """Storages that operators have made since the latest copy was written down."""
        self.selections = Selections(self.index_of)
        self.on_write: Callable[[Sequence[torch.Tensor]], object] = lambda _: None
        """Called with what an operator has written to, if it is in no backward pass."""

    def calibrate(self) -> None:
        """Learn how autograd's sums of gradients look from here. Call it once all modes are on."""
        self._is_calibrating = True
        try:
            with torch.inference_mode(False):  # gradients are on, too: an evaluation may be running
                x = torch.empty(1, device=META, requires_grad=True).neg()
                (x.neg() + x.neg()).backward()
        finally:
            self._is_calibrating = False

    def adopt(self, named_tensors: Iterable[tuple[str, Any]], kind: StorageKind) -> None:
        """Register what is there before the step."""
        for name, tensor in named_tensors:
            if self._own(tensor):
                self.index_of(tensor, name=name, kind=kind, birth=-1)

    def mark(self, named_tensors: Iterable[tuple[str, Any]], kind: StorageKind, *, anew: bool = False) -> None:
        """Name the role of what was made while recording, unless it has one, or ``anew``."""
        with torch._C.DisableTorchFunction():  # reading an attribute is not recorded
            for name, value in named_tensors:
                for tensor in self._own(value):
                    index = self.index_of(tensor)
                    if anew or self._lives[index].kind is None:
                        self._lives[index] = self._lives[index]._replace(kind=kind, name=name)

    def mark_gradients(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Call after the backward pass: what the parameters hold now are their gradients."""
        with torch._C.DisableTorchFunction():
            self.mark([(name, parameter.grad) for name, parameter in named_parameters], StorageKind.GRADIENT)

    @contextmanager
    def in_phase(self, phase: Phase | None) -> Iterator[None]:
        """Everything inside is of ``phase``."""
        before = self.phase
        self.phase = phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def with_attributes(self, **attributes: Any) -> Iterator[None]:
        """Every operator inside has these ``attributes``."""
        before = self._attributes
        self._attributes = self._attributes | attributes
        try:
            yield
        finally:
            self._attributes = before

    @contextmanager
    def freeing_in_next_step(self, after: int) -> Iterator[None]:
        """Record storages that are freed inside as freed after operator ``after`` of the next step."""
        self._bury()
        self._freed_after = after
        try:
            yield
        finally:
            self._bury()
            self._freed_after = None

    def forget(self, tensor: Any) -> None:
        """Count no bytes for a tensor that turned out not to exist."""
        self._bury()
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            index = self._index_by_address.get(tensor.untyped_storage()._cdata)
            if index is not None:
                self._lives[index] = self._lives[index]._replace(num_bytes=0)

    def is_forgotten(self, tensor: torch.Tensor) -> bool:
        """Whether no bytes are counted for a tensor that has some."""
        if is_functorch_wrapped_tensor(tensor):
            return False
        with torch._C.DisableTorchFunction():  # a parameter of a lazy module answers nothing
            storage = tensor.untyped_storage()
        index = self._index_by_address.get(storage._cdata)
        return index is not None and self._lives[index].num_bytes < storage.nbytes()

    def release(self, storage: torch.UntypedStorage) -> None:
        """Note that ``storage`` gives its bytes back while it is alive. What it holds later is another storage."""
        self._bury()
        index = self._index_by_address.pop(storage._cdata, None)
        if index is not None:
            self._lives[index] = self._lives[index]._replace(death=len(self.ops) - 1)
            del self._references[index]

    def storages(self) -> tuple[Storage, ...]:
        """Recorded storages. Those that are still alive outlive the step."""
        end = len(self.ops)
        return tuple(
            Storage(
                life.num_bytes,
                kind_by_lifetime(life.birth_phase, life.death, self.ops) if life.kind is None else life.kind,
                min(life.birth, end),
                end if life.death is None else life.death,
                path_inside(life.name),
            )
            for life in self.lives()
        )

    def lives(self) -> list[Life]:
        """What was written down of each storage, in the order of the indices that operators have."""
        self._bury()
        found = [*self._lives]
        last = len(self.ops) - 1
        for index, death in self._foreseen_deaths.items():
            found[index] = found[index]._replace(death=min(death, last))
        for index, number in self._made_in_pause.items():
            life = found[index]
            if life.death is not None and life.death <= life.birth + number:
                found[index] = life._replace(num_bytes=0)
        return found

    @property
    def place(self) -> Place:
        """Where the recording stands."""
        self._bury()
        return Place(len(self.ops), len(self._lives))

    def are_dead(self, indices: Iterable[int]) -> bool:
        """Whether no storage of these indices is alive."""
        self._bury()
        return self._references.keys().isdisjoint(indices)

    def repetition(self, start: Place, middle: Place) -> Repetition | None:
        """Return the repetition of what ran since ``middle``, if that is like what ran from ``start`` on."""
        end = self.place
        if not are_alike(self.ops, self._lives, start, middle, end):
            return None
        return Repetition(self.ops, self._lives, start, middle, end)

    def pause(self, repetition: Repetition) -> None:
        """Write down a copy of ``repetition``, and nothing that runs, until :meth:`go_on`.

        What runs meanwhile is like it. So a storage that is made then and soon dies is one of the copy. One that lasts is not.
        """
        self._bury()
        self._paused = repetition
        self._foreseen_deaths |= repetition.append()
        self._since_copy.clear()

    @property
    def num_bytes_in_pause(self) -> int:
        """What forward work has made since the latest copy was written down, but for inputs."""
        return forward_bytes(self._lives[index] for index in self._since_copy)

    def go_on(self) -> None:
        """Write down what runs. What is there takes the place of what the copy has left."""
        self._bury()
        assert self._paused is not None
        candidates: dict[int, list[int]] = {}
        for index in self._references:
            if index in self._made_in_pause and index >= self._paused.latest.stop:
                candidates.setdefault(self._lives[index].num_bytes, []).append(index)
        there: dict[int, int] = {}
        for index in self._paused.latest:
            alike = candidates.get(self._lives[index].num_bytes)
            if alike and self._foreseen_deaths.get(index, -1) >= len(self.ops):
                there[index] = alike.pop(0)
                del self._foreseen_deaths[index], self._made_in_pause[there[index]]
        self._paused.end(there)
        self._paused = None

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # PyTorch's meta kernels are partly Python; what they call is not the user's and must not pass the modes above.
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_calibrating:
            if func is aten.add.Tensor:
                self._is_accumulated(*args)
            return func(*args, **kwargs)
        if func in _IN_PLACE and self._is_fresh(args[0]):
            func = _IN_PLACE[func]
        elif func is aten.add.Tensor and not kwargs and self._is_accumulated(*args):
            func = aten.add_.Tensor
        operator = operator_of(func)
        if operator.name == "_local_scalar_dense" and self.phase is Phase.OPTIMIZER and args[0].is_meta:
            return 1.0  # Adafactor reads a norm; which kernels it launches does not depend on it
        if func is torch.ops.aten.index.Tensor and any(map(is_mask, args[1])):
            args = args[0], self._without_masks(*args)
        out = self.selections.outputs_of(func, args)
        if out is NotImplemented:
            out = outputs_of(func, args, kwargs)
        self._note(func, operator, args, kwargs, out)
        return out

    def _is_accumulated(self, gradient: Any, other: Any) -> bool:
        """Whether autograd adds ``other`` to a ``gradient`` that it alone holds: in place, where no mode is on
        (`can_accumulate_inplace` in input_buffer.cpp)."""
        if torch._C._current_autograd_node() is None or torch.is_grad_enabled() or not (is_meta(gradient) and is_meta(other)):
            return False
        references = _references(gradient)
        if self._is_calibrating:  # here, because Python counts its references by the calls that hold them
            self._alone = references
        is_alone = references is not None and references == self._alone
        return is_alone and gradient.shape == other.shape and bool(aten.is_non_overlapping_and_dense.default(gradient))

    def _is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether a node of autograd has just made the zeros in ``tensor``."""
        if torch._C._current_autograd_node() is None or not self.ops or self.ops[-1].name not in _ZEROS:
            return False
        return self.ops[-1].outputs == (self.index_of(tensor),)

    def record(self, func: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Write down an operator whose result ``out`` others have made."""
        self._note(func, operator_of(func), args, kwargs, out)

    def _note(
        self, func: torch._ops.OpOverload, operator: _Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if operator.is_view:
            self._views += 1
            return
        inputs = self._own((args, kwargs))
        outputs = self._own(out)
        if not inputs and not outputs:
            return
        if self._paused is not None:
            known = len(self._lives)
            for tensor in (*inputs, *outputs):
                self.index_of(tensor)
            self._since_copy += range(known, len(self._lives))
            self._views = 0
            return
        read = tuple(dict.fromkeys(self.index_of(tensor, birth=self._birth_of_unseen) for tensor in inputs))
        written = tuple(dict.fromkeys(map(self.index_of, outputs)))
        workspace = None if self._is_cpu else cuda_workspace(func, operator.name, args, kwargs)
        if workspace is not None:
            self.index_of(workspace)  # it lives until the operator is written down
        self.selections.note(func, operator.name, args, kwargs, out)
        mutated = self._own([args[at] if at < len(args) else kwargs.get(name) for at, name in operator.writes])
        if not operator.launches or (written and not mutated and set(written) <= set(read)):
            return
        phase, module = self._where()
        first = outputs[0] if outputs else mutated[0] if mutated else None
        written_bytes = sum(map(_moved_bytes, outputs or mutated))
        loaded = inputs if operator.name != "triton_kernel" else self._own(args[0])  # it does not load all that it writes to
        kind = formula_kind(func, operator.name) or operator.kind  # here, because a formula may be registered at any time
        op = Op(
            name=operator.name,
            kind=kind,
            phase=phase,
            flops=flops_of(func, operator.name, kind, args, kwargs, out),
            bytes_read=bytes_read(operator.name, [*map(_moved_bytes, loaded)], bytes_taken(operator.name, inputs, written_bytes)),
            bytes_written=written_bytes,
            inputs=read,
            outputs=tuple(dict.fromkeys((*written, *map(self.index_of, mutated)))),
            module=module,
            shape=tuple(outputs[0].shape) if outputs else (),
            dtype=str(first.dtype).removeprefix("torch.") if first is not None else "",
            attributes=attributes_of(operator.name, kind, args)
            | self._attributes
            | ({"views": self._views} if self._views else {}),
        )
        self._bury()
        self.ops.append(op)
        self._views = 0
        if mutated and phase is not Phase.BACKWARD:
            self.on_write(mutated)

    def _own(self, value: Any) -> list[torch.Tensor]:
        """The tensors in ``value`` that are recorded."""
        return [tensor for tensor in tensors_in(value) if tensor.is_meta]

    def _without_masks(self, source: torch.Tensor, indices: Sequence[Any]) -> list[Any]:
        """Masks become positions, as in the kernel of the target, which calls `nonzero`."""
        found: list[Any] = []
        self.selections.are_read = False
        self.selections.are_few = source.numel() < 100
        for index in indices:
            found += self._run(torch.ops.aten.nonzero.default, (index,), {}).unbind(1) if is_mask(index) else [index]
        self.selections.are_read = True
        self.selections.are_few = False
        return found

    def _where(self) -> tuple[Phase, str]:
        """The phase, and the path of the module: in the backward pass, of the one whose forward made autograd's node."""
        phase = self.phase
        node = torch._C._current_autograd_node() if phase is not Phase.OPTIMIZER else None
        if phase is None:
            phase = Phase.FORWARD if node is None else Phase.BACKWARD
        running = self._modules[-1] if self._modules else ""
        if phase is Phase.FORWARD:
            self._module_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, running)
        elif node is not None and not self._modules:
            return phase, self._module_of_node.get(node._sequence_nr(), "")
        return phase, running

    def index_of(self, tensor: torch.Tensor, *, name: str = "", kind: StorageKind | None = None, birth: int | None = None) -> int:
        """Return the index of the storage of ``tensor``; one that was not met before is written down."""
        self._bury()  # its address may be that of a dead one
        storage = tensor.untyped_storage()
        address = storage._cdata
        index = self._index_by_address.get(address)
        if index is not None:
            return index
        index = self._index_by_address[address] = len(self._lives)
        phase, module = self._where()
        born = len(self.ops) if birth is None else birth
        self._lives.append(Life(storage.nbytes(), kind, born, None, name or module, phase))
        reference = self._references[index] = _Reference(storage, self._dead.append)
        reference.address = address
        reference.index = index
        if self._paused is not None:
            self._made_in_pause[index] = self._paused.num_ops
        return index

    def _bury(self) -> None:
        """Note the deaths since the last call. Called before an operator is added and before an address is looked up."""
        if not self._dead:
            return
        death = len(self.ops) - 1 if self._freed_after is None else len(self.ops) + 1 + self._freed_after
        while self._dead:
            reference = self._dead.pop()
            self._lives[reference.index] = self._lives[reference.index]._replace(death=death)
            if self._index_by_address.get(reference.address) == reference.index:
                del self._index_by_address[reference.address]
            self._references.pop(reference.index, None)


def live_bytes(lives: Iterable[Life], number: int) -> npt.NDArray[np.float64]:
    """Return the bytes of ``lives`` that are alive while each of ``number`` operators runs. Shape: (number,)."""
    change = np.zeros(number + 2)
    for life in lives:
        change[life.birth] += life.num_bytes
        change[1 + (number if life.death is None else life.death)] -= life.num_bytes
    return change.cumsum()[:number]


def _moved_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a kernel reads or writes of ``tensor``; an expanded dimension costs nothing."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.element_size()
