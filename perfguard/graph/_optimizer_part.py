"""The optimizer's part of a step, traced by itself, and put into the gap of a step that was traced without it.

Forward and backward do not depend on the optimizer, and what an optimizer launches depends on nothing but parameters and
gradients: their shapes, and who has a gradient. So a network with m batches and n optimizers takes m + n traces. A step is traced
whole where parameters or gradients share memory, and where the optimizer is not PyTorch's own: it may do anything.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn

from perfguard.graph._device_paths import DevicePaths
from perfguard.graph._meta import META
from perfguard.graph._optimizers import OptimizerOnMeta, make_optimizer
from perfguard.graph._recorder import Elements, Recorder
from perfguard.graph._schema import Op, OpGraph, Phase, Storage, StorageKind
from perfguard.graph._target import Target
from perfguard.workload import Workload

_SEPARABLE = frozenset({
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.Rprop,
})  # fmt: skip
_GAP = Op("optimizer", "other", Phase.OPTIMIZER, 0, 0, 0, (), (), "", (), "", {})
"""In the place of all that the optimizer launches."""


class Layout(NamedTuple):
    """Of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def is_dense(self) -> bool:
        """Whether each element has a place of its own, without gaps."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return expected > 0

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


class Trained(NamedTuple):
    """A parameter as an optimizer finds it."""

    name: str
    layout: Layout
    requires_grad: bool
    gradient: Layout | None
    """None: no loss reaches it."""
    storage: int
    """Its own, in the step."""
    gradient_storage: int | None


class Gap(NamedTuple):
    """Where the optimizer runs in a step, and what it is given."""

    place: int
    """The index of the operator that stands for it."""
    before_state: int
    """How many storages were there before those of its state."""
    before_step: int
    """How many when its step began."""
    parameters: tuple[Trained, ...]


class StepWithGap(NamedTuple):
    """A step traced without its optimizer. An inference has no gap."""

    graph: OpGraph
    gap: Gap | None
    elements: Elements
    reads_dtype: bool
    """Whether code outside of PyTorch's operators looked at a tensor's dtype, or at what depends on it."""


class OptimizerPart(NamedTuple):
    """What fills a gap. Its operators count the storages from zero: parameters, states, gradients, temporaries."""

    ops: tuple[Op, ...]
    states: tuple[Storage, ...]
    temporaries: tuple[Storage, ...]


def is_separable(workload: Workload) -> bool:
    """Whether the optimizer's part can be told from the rest of the step, as far as one can tell from the description."""
    given = workload.optimizer
    if workload.mode != "train" or workload.step is not None or not workload.set_to_none or isinstance(given, Mapping):
        return False
    if isinstance(given, functools.partial) and not given.args:
        given = given.func
    kind = given if isinstance(given, type) else type(given)
    return given is None or kind in _SEPARABLE


def leave_gap(recorder: Recorder, model: nn.Module, reached: Set[int], before_state: int) -> Gap | None:
    """Call where the optimizer would run. None: it cannot be taken out here.

    Args:
        recorder: what writes the step down.
        model: its parameters have their gradients.
        reached: ids of the parameters that got one from a loss.
        before_state: how many storages were there before the optimizer's state would have been made.
    """
    place, before_step = len(recorder.ops), recorder.num_storages
    with torch._C.DisableTorchFunction():  # a look at an attribute is nobody's call
        parameters = tuple(_trained(recorder, name, parameter) for name, parameter in model.named_parameters())
    recorder.leave_gap(_GAP)
    storages = [trained.storage for trained in parameters]
    storages += [trained.gradient_storage for trained in parameters if trained.gradient_storage is not None]
    are_plain = all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters())
    with_gradient = {id(parameter) for parameter in model.parameters() if parameter.grad is not None}
    if not are_plain or len(set(storages)) < len(storages) or recorder.num_storages > before_step or with_gradient != reached:
        return None
    return Gap(place, before_state, before_step, parameters)


def _trained(recorder: Recorder, name: str, parameter: nn.Parameter) -> Trained:
    gradient = parameter.grad
    return Trained(
        name,
        Layout.of(parameter),
        parameter.requires_grad,
        None if gradient is None else Layout.of(gradient),
        recorder.storage_of(parameter),
        None if gradient is None else recorder.storage_of(gradient),
    )


def trace_part(workload: Workload, target: Target, parameters: Sequence[Trained]) -> OptimizerPart:
    """What the optimizer of ``workload`` launches, given ``parameters``.

    Raises:
        TraceError, WorkloadError: as from :func:`perfguard.graph.trace`.
    """
    twins = nn.ParameterList(nn.Parameter(p.layout.empty(), requires_grad=p.requires_grad) for p in parameters)
    trained_as = {id(twin): trained for twin, trained in zip(twins, parameters, strict=True)}
    recorder = Recorder([])
    recorder.phase = Phase.OPTIMIZER
    optimizer = OptimizerOnMeta(make_optimizer(workload.optimizer, workload.model, twins), target, nullcontext)
    recorder.adopt(((trained_as[id(twin)].name, twin) for twin in twins), StorageKind.PARAMETER)
    num_parameters = recorder.num_storages
    recorder.adopt(((trained_as[id(twin)].name, value) for twin, value in optimizer.state_tensors()), StorageKind.OPTIMIZER_STATE)
    num_with_states = recorder.num_storages
    for twin, trained in zip(twins, parameters, strict=True):
        twin.grad = trained.gradient and trained.gradient.empty()
    recorder.adopt((("", twin.grad) for twin in twins), StorageKind.GRADIENT)
    num_given = recorder.num_storages
    with DevicePaths(target), recorder:
        optimizer.step()
    for twin, value in optimizer.state_tensors():
        if twin.grad is None:
            recorder.forget(value)
    storages = recorder.storages()
    return OptimizerPart(tuple(recorder.ops), storages[num_parameters:num_with_states], storages[num_given:])


def joined(step: StepWithGap, part: OptimizerPart) -> OpGraph:
    """The step with ``part`` in its gap, as if both had been traced in one."""
    graph, gap = step.graph, step.gap
    assert gap is not None
    place, added = gap.place, len(part.ops) - 1
    num_states, num_temporaries, num_ops = len(part.states), len(part.temporaries), len(graph.ops) + added
    moved = [*range(gap.before_state), *range(gap.before_state + num_states, gap.before_step + num_states)]
    moved += range(gap.before_step + num_states + num_temporaries, len(graph.storages) + num_states + num_temporaries)
    of_part = [moved[trained.storage] for trained in gap.parameters]
    of_part += range(gap.before_state, gap.before_state + num_states)
    of_part += [moved[trained.gradient_storage] for trained in gap.parameters if trained.gradient_storage is not None]
    of_part += range(gap.before_step + num_states, gap.before_step + num_states + num_temporaries)

    def around(storage: Storage) -> Storage:
        num_bytes, kind, birth, death, module = storage
        if death < place:
            return storage
        return Storage(num_bytes, kind, birth + added if birth > place else birth, death + added, module)

    def inside(storage: Storage) -> Storage:
        num_bytes, kind, birth, death, module = storage
        lasts = num_ops if death == len(part.ops) else place + death
        return Storage(num_bytes, kind, birth if birth < 0 else place + birth, lasts, module)

    around_gap = [around(storage) for storage in graph.storages]
    storages = around_gap[: gap.before_state] + [inside(storage) for storage in part.states]
    storages += around_gap[gap.before_state : gap.before_step] + [inside(storage) for storage in part.temporaries]
    storages += around_gap[gap.before_step :]
    ops = [_moved(op, moved) for op in graph.ops[:place]] + [_moved(op, of_part) for op in part.ops]
    ops += [_moved(op, moved) for op in graph.ops[place + 1 :]]
    return OpGraph(tuple(ops), tuple(storages), graph.mode, graph.precision, graph.layout, graph.options, graph.unmodelled)


def _moved(op: Op, places: Sequence[int]) -> Op:
    inputs, outputs = tuple([places[index] for index in op.inputs]), tuple([places[index] for index in op.outputs])
    return Op(*op[:6], inputs, outputs, *op[8:])
