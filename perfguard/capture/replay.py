"""Replay: once the steps that are judged were seen, the user's loop goes on without its model, to be counted to its end.

    the forward pass of a model     returns what it has returned for inputs of the same shapes, while the model was as it is
    a backward pass                 leaves the gradients that are there
    `zero_grad`                     is put off
    the step of an optimizer        calls its hooks and its closure

A forward pass that was not seen before runs as it is. If it has gradients, its whole step does, so larger inputs are seen. Where
the model has changed, two passes do: the second one has beside it what the first has left. The rest of the loop runs as it always
does, and so do loops whose backward passes have hooks of their own. A loop that looks at what only a model does, such as the
gradient of an input, raises an error. Then :class:`perfguard.capture.DryRuns` begins once more.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from perfguard.capture.few_samples import look_at
from perfguard.graph.shape_rules import empty_twin

Key = tuple[Any, ...]
_LEAST_RUNS = 2
"""Forward passes of a model that has changed in a replay, after which these are replayed, too."""
_PLAIN = int, float, complex, str, bool, type(None)


def key_of(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    place: Any,
    *,
    counters: Collection[tuple[type, str]] = (),
) -> Key | None:
    """Return what a forward pass depends on: its module and the state of it, and the shapes of its inputs. None: nobody can tell.

    Args:
        module: the model.
        args: its inputs.
        kwargs: its inputs by name.
        place: where in the loop it is. An evaluation of other data is another.
        counters: attributes of the model that its forward passes change, by their classes and names. They are left out.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # `vmap` and `grad` need what depends on their inputs
        return None
    with torch._C.DisableTorchFunction():
        inputs = look_at((args, dict(kwargs)))
    if inputs is None:
        return None
    numbers = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, (int, str)))
    modes = module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    state = tuple(each for each in _state_of(module) if each[:2] not in counters)
    return id(module), state, modes, inputs.form, numbers, place


def _state_of(module: nn.Module) -> tuple[tuple[Any, ...], ...]:
    """Return what decides what a module computes, beside its inputs, in each part of it.

    A user may unfreeze layers in a later epoch, add some, train at another resolution, or ask for another output. It is found in
    the names of the parts, their numbers, texts and switches, and in the shapes of their parameters. Each entry begins with the
    class of its part and a name. One of a number, a text or a switch has three items.
    """
    with torch._C.DisableTorchFunction():
        return tuple(_entries_of(module))


def _entries_of(module: nn.Module) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    seen: set[int] = set()
    parts = [module]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        kind = type(part)
        attributes = vars(part)
        found += [(kind, name, value) for name, value in attributes.items() if _is_plain(value)]
        parameters = attributes["_parameters"].items()
        found += [(kind, name, _shape_of(each), each.requires_grad) for name, each in parameters if each is not None]
        found += [(kind, name) for name in attributes["_modules"]]
        parts += [each for each in attributes["_modules"].values() if each is not None]
    return found


def _shape_of(parameter: nn.Parameter) -> torch.Size | None:
    return None if nn.parameter.is_lazy(parameter) else parameter.shape


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is a number, a text or a switch, or a tuple of such."""
    kind = type(value)
    return kind in _PLAIN or (kind is tuple and all(type(each) in _PLAIN for each in value))


class Replay:
    """Whether the loop is replayed, and what forward passes have returned.

    Args:
        most_kept: forward passes that are remembered.
    """

    def __init__(self, *, most_kept: int = 64) -> None:
        self._most_kept = most_kept
        self.follow: Callable[[], object] = lambda: None
        """Lets the calls of models come here."""
        self._is_on = False
        self.has_begun = False
        """Whether the loop was ever replayed."""
        self._is_whole = False
        """Whether this step runs as it is."""
        self.num_whole = 0
        """Steps that ran as they are, because their inputs were not seen before."""
        self.leaves_out = False
        """Whether a micro-batch is left out (`micro_batches.py`), in a loop that is not replayed."""
        self.num_backward = 0
        """Backward passes that have begun."""
        self._outputs: dict[Key, tuple[weakref.ref[nn.Module], Any]] = {}
        self._counters: set[tuple[type, str]] = set()
        """Attributes of models that their forward passes change."""
        self._num_runs: Counter[Key] = Counter()
        """Forward passes that have run, by the beginnings of their keys: the model, its state and its mode."""
        self._put_off: list[Callable[[], object]] = []
        """The latest `zero_grad`."""
        self._gradients: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[torch.Tensor]]]
        self._gradients = weakref.WeakKeyDictionary()
        """Parameters of each optimizer that have gradients in its steps."""
        self._steps: list[tuple[weakref.ref[torch.optim.Optimizer], Any]] = []
        """Optimizers whose steps are left out, and what they had in the place of their own ``step``."""

    @property
    def is_on(self) -> bool:
        """Whether the loop is replayed."""
        return self._is_on

    @property
    def skips(self) -> bool:
        """Whether what would run now is left out."""
        return self._is_on and not self._is_whole

    def follow_calls(self) -> None:
        """Let the calls of models come here, from the first time on that this is asked for."""
        self.follow()
        self.follow = lambda: None

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Replay from now on, after a step of these ``optimizers``."""
        self._is_on = True
        self.has_begun = True
        self._is_whole = False
        self._leave_out_steps(optimizers)

    def end(self) -> None:
        """Run all as it is from now on."""
        if self._is_on:
            self._run_whole()
            self._is_on = False

    def key_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: Any) -> Key | None:
        """:func:`key_of` without what forward passes change."""
        return key_of(module, args, kwargs, place, counters=self._counters)

    def run(self, key: Key | None, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """Run a ``forward`` pass of a model, and remember it. What it counts is noted: no pass would be like the one before."""
        if key is None:
            return forward()
        before = _state_of(module)
        output = forward()
        changed = {each[:2] for each in {*before} ^ {*_state_of(module)} if len(each) == 3}
        self._counters |= changed
        identity, state, *others = key
        key = identity, tuple(each for each in state if each[:2] not in changed), *others
        self._num_runs[key[:3]] += 1 if self._is_on else _LEAST_RUNS
        self.remember(key, module, output)
        return output

    def remember(self, key: Key | None, module: nn.Module, output: Any) -> None:
        """Remember what a forward pass has returned, if it consists of tensors of the device."""
        if key is None or (key in self._outputs and self._outputs[key][0]() is module):
            return
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            seen = look_at(output)
            if seen is None or not all(type(tensor) is torch.Tensor and tensor.is_meta for tensor in seen.tensors):
                return
            if key in self._outputs or len(self._outputs) < self._most_kept:
                with suppress(Exception):  # what cannot be copied is not remembered
                    twins = copy.deepcopy(output, {id(tensor): _twin_of(tensor) for tensor in seen.tensors})
                    self._outputs[key] = weakref.ref(module), twins

    def forget(self) -> None:
        """Forget all forward passes, so that the next steps run as they are."""
        self._outputs.clear()
        self._num_runs.clear()

    def is_new(self, key: Key | None, module: nn.Module) -> bool:
        """Whether the loop is replayed, and the forward pass is one that could be known and is not."""
        return self._is_on and key is not None and self._known(key, module) is None

    def _known(self, key: Key, module: nn.Module) -> tuple[Any] | None:
        found = self._outputs.get(key)
        if found is None or found[0]() is not module or self._num_runs.get(key[:3], _LEAST_RUNS) < _LEAST_RUNS:
            return None
        return (found[1],)

    def output_of(self, key: Key | None, module: nn.Module) -> tuple[Any] | None:
        """Return anew what the forward pass has returned before. None: it is to run, and its step too, if it has gradients."""
        if not self.skips:
            return None
        found = self.known_output(key, module)
        if found is None and torch.is_grad_enabled():
            self._run_whole()
        return found

    def knows(self, key: Key, module: nn.Module) -> bool:
        """Whether it is known what the forward pass returns."""
        return self._known(key, module) is not None

    def known_output(self, key: Key | None, module: nn.Module) -> tuple[Any] | None:
        """Return anew what the forward pass has returned before. None: it is not known."""
        found = None if key is None else self._known(key, module)
        if found is None:
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            seen = look_at(found[0])
            assert seen is not None
            anew = {id(tensor): _anew(tensor) for tensor in seen.tensors}
            return (copy.deepcopy(found[0], anew),)

    def put_off(self, zero_grad: Callable[[], object]) -> None:
        """Note a `zero_grad` that a step which runs as it is begins with."""
        self._put_off = [zero_grad]

    def note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which parameters of an ``optimizer`` have gradients in a step that runs as it is."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._gradients[optimizer] = [weakref.ref(parameter) for parameter in parameters if parameter.grad is not None]

    def skips_backward(self, *, returns: bool) -> bool:
        """Whether a backward pass is left out. Of a micro-batch that is, it runs up to the model, and frees what it has read."""
        self.num_backward += 1
        return self.skips or (self.leaves_out and returns)

    def backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, returns: bool) -> Any:
        """Return gradients of inputs, if a backward pass ``returns`` them. Otherwise parameters have theirs after it."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if returns:
                inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
                makes_graph = bool(kwargs.get("create_graph"))
                inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
                return tuple(empty_twin(each).requires_grad_(makes_graph) for each in inputs)
            for reference in itertools.chain(*self._gradients.values()):
                parameter = reference()
                if parameter is not None and parameter.grad is None:
                    parameter.grad = empty_twin(parameter)
        return None

    def end_step(self) -> None:
        """Go on to replay after a step that ran as it is."""
        if self._is_on and self._is_whole:
            self.num_whole += 1
            self.begin([optimizer for reference, _ in self._steps if (optimizer := reference()) is not None])

    def _leave_out_steps(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._steps = []
        for optimizer in optimizers:
            self._steps.append((weakref.ref(optimizer), vars(optimizer).get("step")))
            vars(optimizer)["step"] = _hooks_alone(weakref.ref(optimizer))

    def _run_whole(self) -> None:
        """Run this step as it is."""
        if self._is_whole:
            return
        self._is_whole = True
        for reference, before in self._steps:
            optimizer = reference()
            if optimizer is not None and before is None:
                del vars(optimizer)["step"]
            elif optimizer is not None:
                vars(optimizer)["step"] = before
        for zero_grad in self._put_off:
            zero_grad()
        self._put_off = []


def has_backward_hooks(models: Iterable[nn.Module]) -> bool:
    """Whether a backward pass through ``models`` calls what the user has registered, such as an optimizer."""
    for model in models:
        for module in model.modules():
            if module._backward_hooks or module._backward_pre_hooks:
                return True
        for parameter in model.parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                return True
    return False


def _twin_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on meta that is like ``tensor``, and that no recorder has seen."""
    return empty_twin(tensor.detach()).requires_grad_(tensor.requires_grad)


class _Output(torch.autograd.Function):
    """A copy of a tensor, at which a backward pass ends."""

    @staticmethod
    def forward(_: Any, begins: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_: Any, *__: Any) -> tuple[None, None]:
        return None, None


def _anew(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on meta. It has a gradient if ``tensor`` has, and is no leaf, which could not be changed in place."""
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor.detach().clone()
    found: torch.Tensor = _Output.apply(torch.empty((), device="cpu", requires_grad=True), tensor.detach())  # type: ignore[no-untyped-call]
    return found


def _hooks_alone(reference: weakref.ref[torch.optim.Optimizer]) -> Callable[..., Any]:
    """A step that calls its hooks and its closure. The optimizer that has it is not kept alive by it.

    A learning rate scheduler that is made meanwhile finds it wrapped as by another scheduler. It wraps bound methods alone.
    """

    def step(self: Any, closure: Any = None, *_: Any, **__: Any) -> Any:
        self._opt_called = True
        return closure() if callable(closure) else None

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    alone: Any = lambda *args, **kwargs: hooked(reference(), *args, **kwargs)  # noqa: E731
    alone._wrapped_by_lr_sched = True  # as `_opt_called` above, private to torch.optim.lr_scheduler
    return alone  # type: ignore[no-any-return]
