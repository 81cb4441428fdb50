"""What an optimizer launches for many parameters, from what it launches for two.

Most of PyTorch's optimizers do the same to each element of each parameter: operator after operator for one parameter after the
other, or each operator for lists of all. The pattern is read off a trace with two small parameters and must then foretell a
trace with three others, to the byte. Otherwise, and where parameters differ in more than their shapes, it is
traced over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from perfguard.graph._optimizer_part import Layout, OptimizerPart, Trained, trace_part
from perfguard.graph._schema import Op, Storage, StorageKind
from perfguard.graph._target import Target
from perfguard.workload import Workload

_ELEMENTWISE = frozenset({
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.Adadelta, torch.optim.Adamax,
})  # fmt: skip
_FEW = 4
"""Parameters for which a pattern is not worth it."""
_READ_OFF, _CHECKED_AT = (7, 11), (5, 13, 9)
"""Elements of the parameters that are traced."""
_Own = tuple[str, int]
"""What a parameter has: itself, its gradient, its i-th state, its i-th temporary."""


class _Launch(NamedTuple):
    """One operator of a pattern; its numbers are those of one element."""

    op: Op
    inputs: tuple[tuple[_Own, ...], ...]
    """In lists of all parameters: what each list has of every one."""
    outputs: tuple[tuple[_Own, ...], ...]


class _Temporary(NamedTuple):
    """Counted from the first operator for its parameter."""

    element_bytes: int
    birth: int
    death: int
    death_of_last: int
    """For the last parameter, after which no other takes its name."""


class Pattern(NamedTuple):
    """The optimizer's part for any number of parameters."""

    is_loop: bool
    """One parameter after the other."""
    launches: tuple[_Launch, ...]
    state_bytes: tuple[int, ...]
    """Of one element."""
    temporaries: tuple[_Temporary, ...]

    def for_parameters(self, parameters: Sequence[Trained]) -> OptimizerPart:
        """What :func:`trace_part` would return."""
        trained = [at for at, parameter in enumerate(parameters) if parameter.gradient is not None]
        shapes = [parameters[at].layout.shape for at in trained]
        sizes = list(map(math.prod, shapes))
        many, num_states, num_temporaries = len(trained), len(self.state_bytes), len(self.temporaries)
        states_at = len(parameters)
        gradients_at = states_at + many * num_states
        temporaries_at = gradients_at + many

        def index(owner: int, own: _Own) -> int:
            what, which = own
            if what == "parameter":
                return trained[owner]
            if what == "state":
                return states_at + owner * num_states + which
            if what == "gradient":
                return gradients_at + owner
            return temporaries_at + (owner * num_temporaries + which if self.is_loop else which * many + owner)

        ops: list[Op] = []
        temporaries: list[Storage] = []
        if self.is_loop:
            for owner in range(many):
                start = len(ops)
                for launch in self.launches:
                    inputs = tuple([index(owner, own) for owns in launch.inputs for own in owns])
                    outputs = tuple([index(owner, own) for owns in launch.outputs for own in owns])
                    ops.append(_scaled(launch.op, sizes[owner], sizes[owner], shapes[owner], inputs, outputs))
                for element_bytes, birth, death, death_of_last in self.temporaries:
                    lasts = start + (death if owner < many - 1 else death_of_last)
                    temporaries.append(_temporary(element_bytes * sizes[owner], start + birth, lasts))
        else:
            for launch in self.launches:
                inputs = tuple([index(owner, own) for owns in launch.inputs for owner in range(many) for own in owns])
                outputs = tuple([index(owner, own) for owns in launch.outputs for owner in range(many) for own in owns])
                ops.append(_scaled(launch.op, max(sizes), sum(sizes), shapes[0], inputs, outputs))
            for element_bytes, birth, death, _ in self.temporaries:
                temporaries += [_temporary(element_bytes * size, birth, death) for size in sizes]
        states = [
            Storage(element_bytes * size, StorageKind.OPTIMIZER_STATE, -1, len(ops), parameters[at].name)
            for at, size in zip(trained, sizes, strict=True)
            for element_bytes in self.state_bytes
        ]
        return OptimizerPart(tuple(ops), tuple(states), tuple(temporaries))


def has_pattern(workload: Workload, parameters: Sequence[Trained]) -> bool:
    """Whether an elementwise optimizer makes of ``parameters`` one list without differences but in shape."""
    given = getattr(workload.optimizer, "func", workload.optimizer)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return (
        (given is None or (isinstance(given, type) and given in _ELEMENTWISE))
        and len(trained) > _FEW
        and len({parameter.layout.dtype for parameter in trained}) == 1
        and all(parameter.gradient == parameter.layout for parameter in trained)
        and all(parameter.layout.shape and parameter.layout.is_dense for parameter in trained)
        and all(parameter.gradient is None for parameter in parameters if not parameter.requires_grad)
    )


def find_pattern(workload: Workload, target: Target, dtype: torch.dtype) -> Pattern | None:
    """The pattern of the workload's optimizer over parameters of ``dtype``; None if it has none."""
    few = _parameters(_READ_OFF, dtype)
    part = trace_part(workload, target, few)
    pattern = _pattern_of(part)
    if pattern is None or pattern.for_parameters(few) != part:
        return None
    others = _parameters(_CHECKED_AT, dtype)
    return pattern if pattern.for_parameters(others) == trace_part(workload, target, others) else None


def _parameters(sizes: Sequence[int], dtype: torch.dtype) -> list[Trained]:
    layouts = [Layout((size,), (1,), dtype) for size in sizes]
    return [Trained(str(at), layout, True, layout, 2 * at, 2 * at + 1) for at, layout in enumerate(layouts)]


def _pattern_of(part: OptimizerPart) -> Pattern | None:
    """As it looks in a trace of two parameters; whether it is true is for others to check."""
    ops, states, temporaries = part
    first, many = _READ_OFF[0], len(_READ_OFF)
    num_states = len(states) // many
    owned: list[tuple[int, _Own]] = [(owner, ("parameter", 0)) for owner in range(many)]
    owned += [(owner, ("state", which)) for owner in range(many) for which in range(num_states)]
    owned += [(owner, ("gradient", 0)) for owner in range(many)]
    num_temporaries = len(temporaries) // many
    if not ops or many * num_states != len(states) or many * num_temporaries != len(temporaries):
        return None
    is_loop = all(owned[index][0] == 0 for index in ops[0].inputs if index < len(owned))
    if is_loop:
        owned += [(owner, ("temporary", which)) for owner in range(many) for which in range(num_temporaries)]
        length = len(ops) // many
        of_first, of_last = temporaries[:num_temporaries], temporaries[-num_temporaries:] if num_temporaries else ()
        last = len(ops) - length
        launches = [
            _Launch(
                _scaled_down(op, first, first),
                tuple([(owned[index][1],) for index in op.inputs]),
                tuple([(owned[index][1],) for index in op.outputs]),
            )
            for op in ops[:length]
        ]
        found = [
            _Temporary(mine.num_bytes // first, mine.birth, mine.death, its.death - last)
            for mine, its in zip(of_first, of_last, strict=True)
        ]
    else:
        owned += [(owner, ("temporary", which)) for which in range(num_temporaries) for owner in range(many)]
        launches = [
            _Launch(
                _scaled_down(op, max(_READ_OFF), sum(_READ_OFF)),
                _lists([owned[index] for index in op.inputs]),
                _lists([owned[index] for index in op.outputs]),
            )
            for op in ops
        ]
        found = [_Temporary(mine.num_bytes // first, mine.birth, mine.death, mine.death) for mine in temporaries[::many]]
    return Pattern(is_loop, tuple(launches), tuple(state.num_bytes // first for state in states[:num_states]), tuple(found))


def _lists(owned: Sequence[tuple[int, _Own]]) -> tuple[tuple[_Own, ...], ...]:
    """The lists that ``owned`` is made of; in each comes what the first of two parameters has, then what the second has."""
    lists: list[tuple[_Own, ...]] = []
    at = 0
    while at < len(owned):
        half = next((n for n in range(1, len(owned) - at) if owned[at + n][0] > 0), len(owned))
        lists.append(tuple(own for _, own in owned[at : at + half]))
        at += 2 * half
    return tuple(lists)


def _scaled_down(op: Op, largest: int, total: int) -> Op:
    return op._replace(flops=op.flops // largest, bytes_read=op.bytes_read // total, bytes_written=op.bytes_written // total)


def _scaled(op: Op, largest: int, total: int, shape: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Op:
    name, kind, phase, flops, read, written, _, _, module, shape_before, dtype, attributes = op
    return Op(
        name, kind, phase, flops * largest, read * total, written * total, inputs, outputs, module,
        shape if shape_before else (), dtype, attributes,
    )  # fmt: skip


def _temporary(num_bytes: int, birth: int, death: int) -> Storage:
    return Storage(num_bytes, StorageKind.TEMPORARY, birth, death, "")
