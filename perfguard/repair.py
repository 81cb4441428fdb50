"""Repair: the least change that lets a workload fit, and the largest batch that does.

A trial that needs too much memory is often worth running in another way. Smaller batches with accumulated gradients show the
optimizer the same batch. Half precision is another way, and so are activations that are computed again instead of kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from perfguard.exceptions import ConfigurationError, TraceError, WorkloadError
from perfguard.workload import Precision, TensorSpec, Workload, mapped, shape_of, shapes_in

if TYPE_CHECKING:
    from perfguard.devices import Device

Remedy = Literal["accumulation", "precision", "checkpointing"]
_MOST_PASSES = 32
"""Most micro-batches in one optimizer step after a repair. More would take too long to trace and to run."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Changes that the objective has to apply. Without any change, every field has its default."""

    micro_batch_size: int | None = None
    """Samples of one forward and backward pass. None: the batch as proposed."""
    accumulation: int = 1
    """Forward and backward passes for one optimizer step, so that the optimizer sees the proposed batch."""
    precision: Precision | None = None
    """None: as proposed."""
    checkpointing: bool = False
    """Whether to switch on the model's own activation checkpointing."""

    def __str__(self) -> str:
        parts = []
        if self.micro_batch_size is not None:
            parts.append(f"micro-batch {self.micro_batch_size} accumulated {self.accumulation} times")
        if self.precision is not None:
            parts.append(self.precision)
        if self.checkpointing:
            parts.append("activation checkpointing")
        return ", ".join(parts) or "as proposed"


AS_PROPOSED = Repair()
"""The repair that changes nothing."""


def check_remedies(remedies: Sequence[str]) -> tuple[Remedy, ...]:
    """``remedies``, if they are known and there is one.

    Raises:
        ConfigurationError: otherwise.
    """
    if isinstance(remedies, str) or not remedies or any(remedy not in get_args(Remedy) for remedy in remedies):
        raise ConfigurationError(f"remedies must name some of {', '.join(get_args(Remedy))}, but got {remedies!r}.")
    return tuple(remedies)  # type: ignore[arg-type]


def batch_size_of(workload: Workload) -> int:
    """The first dimension that all inputs and targets share.

    Raises:
        WorkloadError: if they share none, so that the batch size is unknown.
    """
    leading = {shape[0] for shape in shapes_in((workload.inputs, workload.targets)) if shape}
    if len(leading) != 1:
        sizes = ", ".join(map(str, sorted(leading))) or "none"
        raise WorkloadError(
            f"The batch size is the first dimension that all inputs and targets share, but theirs are {sizes}. "
            f"Describe them so that they start with the batch dimension."
        )
    return leading.pop()


def with_batch_size(workload: Workload, batch_size: int) -> Workload:
    """``workload`` on another number of samples. Tensors become specifications; nothing is allocated."""
    batch_size_of(workload)

    def resize(leaf: Any) -> Any:
        shape = shape_of(leaf)
        return TensorSpec((batch_size, *shape[1:]), str(leaf.dtype).removeprefix("torch.")) if shape else leaf

    return replace(workload, inputs=mapped(workload.inputs, resize), targets=mapped(workload.targets, resize))


def largest_batch(fits: Callable[[Workload], bool], workload: Workload, *, at_most: int = 2**20) -> int:
    """The largest batch that fits while the next one does not; 0 if none does, ``at_most`` if that does.

    Each batch that is tried is traced: some 20, which takes one to two seconds for a ResNet-50. A batch of one is tried last,
    because it takes other paths (batch normalisation cannot train on it).
    """
    if at_most < 2 or not fits(with_batch_size(workload, 2)):
        return int(_can_run(fits, with_batch_size(workload, 1)))
    low = 2
    high = 16
    while high < at_most and fits(with_batch_size(workload, high)):
        low = high
        high = 8 * high
    if high >= at_most:
        if fits(with_batch_size(workload, at_most)):
            return at_most
        high = at_most
    while high - low > 1:
        middle = (low + high) // 2
        if fits(with_batch_size(workload, middle)):
            low = middle
        else:
            high = middle
    return low


def find_repair(
    fits: Callable[[Workload], bool], workload: Workload, remedies: Sequence[Remedy], device: Device
) -> tuple[Repair, Workload] | None:
    """The first repair that fits: each remedy alone in the order given, then together. None: none does."""
    for count in range(1, len(remedies) + 1):
        for chosen in itertools.combinations(remedies, count):
            try:
                found = _apply(fits, workload, chosen, device)
            except Exception:  # a switch that refuses, a step that cannot be traced in half precision: no remedy
                continue
            if found is not None:
                return found
    return None


def _apply(
    fits: Callable[[Workload], bool], workload: Workload, remedies: Sequence[Remedy], device: Device
) -> tuple[Repair, Workload] | None:
    repair = AS_PROPOSED
    if "precision" in remedies:
        if workload.precision != "fp32":
            return None
        precision: Precision = "amp-bf16" if device.kind == "cpu" or "bf16" in device.peak_flops else "amp-fp16"
        repair = replace(repair, precision=precision)
        workload = replace(workload, precision=precision)
    if "checkpointing" in remedies:
        if not can_checkpoint(workload.model):
            return None
        repair = replace(repair, checkpointing=True)
    with checkpointing(workload.model, on=repair.checkpointing):
        if "accumulation" not in remedies:
            return (repair, workload) if fits(workload) else None
        return _accumulate(fits, workload, repair)


def _accumulate(fits: Callable[[Workload], bool], workload: Workload, repair: Repair) -> tuple[Repair, Workload] | None:
    """The largest divisor of the batch that fits.

    It is sought with two passes, because from the second pass on each needs the same memory. A prediction for all passes may say
    otherwise, so the next smaller divisors are tried then.
    """
    if workload.mode == "infer" or workload.step is not None:
        return None
    try:
        batch = batch_size_of(workload)
    except WorkloadError:
        return None

    def micro(size: int, *, most_passes: int = _MOST_PASSES) -> Workload:
        passes = workload.accumulation * (batch // size)
        return replace(with_batch_size(workload, size), accumulation=min(passes, most_passes))

    most = _MOST_PASSES // workload.accumulation
    sizes = [batch // passes for passes in range(most, 1, -1) if batch % passes == 0]
    num_fitting = 0
    num_sizes = len(sizes)
    while num_fitting < num_sizes:
        middle = (num_fitting + num_sizes) // 2
        if _can_run(fits, micro(sizes[middle], most_passes=2)):
            num_fitting = middle + 1
        else:
            num_sizes = middle
    for size in reversed(sizes[:num_fitting]):
        repaired = micro(size)
        if fits(repaired):
            return replace(repair, micro_batch_size=size, accumulation=repaired.accumulation), repaired
    return None


def _can_run(fits: Callable[[Workload], bool], workload: Workload) -> bool:
    try:
        return fits(workload)
    except TraceError:  # batch normalisation cannot train on one value a channel
        return False


def can_checkpoint(model: object) -> bool:
    """Whether ``model`` has a switch for activation checkpointing, as those of transformers and timm have, and it is off."""
    states = ("is_activation_checkpointing", "is_gradient_checkpointing", "grad_checkpointing")
    is_on = next((bool(getattr(model, state)) for state in states if hasattr(type(model), state) or state in vars(model)), False)
    return _switch_of(model) is not None and not is_on


@contextmanager
def checkpointing(model: object, *, on: bool) -> Iterator[None]:
    """The model's activation checkpointing switched on inside the block, and off after it."""
    switch = _switch_of(model) if on else None
    if switch is None:
        yield
        return
    switch(True)
    try:
        yield
    finally:
        switch(False)


def _switch_of(model: object) -> Callable[[bool], object] | None:
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # transformers since 5.23, and before
        enable = getattr(model, f"{name}_enable", None)
        disable = getattr(model, f"{name}_disable", None)
        if callable(enable) and callable(disable):
            return lambda on: enable() if on else disable()
    switch = getattr(model, "set_grad_checkpointing", None)  # timm
    return switch if callable(switch) else None
