"""Objective → CapturedTrial: one step of what a trial would run, seen by running it where nothing is computed.

The user's code runs on the stage of `stage.py` for three optimizer steps, one evaluation, and one step of each later epoch. From
the recording of all of it, the second step is cut out. Its graph is that of the same step when it is described by a Workload.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import sys
import traceback
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.modules.module as hooks
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from perfguard.capture.blanks import Blanks
from perfguard.capture.deepspeed_engine import engines_in
from perfguard.capture.loaders import Allowance, Loaders
from perfguard.capture.loop_heads import LoopHeads
from perfguard.capture.loops import Generations
from perfguard.capture.micro_batches import LeftOutError, MicroBatches
from perfguard.capture.own_updates import OwnUpdates
from perfguard.capture.ranks import Ranks
from perfguard.capture.replay import Key, Replay, has_backward_hooks
from perfguard.capture.stage import HostTensors, Placement, put_on_meta, replace_by_meta, staged
from perfguard.capture.stops import Stops, line_of_user
from perfguard.capture.stopwatch import Stopwatch
from perfguard.capture.trainers import join_trainers
from perfguard.exceptions import CaptureError, TooLargeError
from perfguard.graph.kernels import DevicePaths, device_semantics, target_of
from perfguard.graph.libraries import HOST_OPTIMIZER, PAGED_STATES, replacing
from perfguard.graph.op import Life, Op, Phase, Storage, StorageKind
from perfguard.graph.opgraph import OpGraph
from perfguard.graph.recorder import Recorder, kind_by_lifetime, live_bytes, tensors_in
from perfguard.graph.selections import GENERATED, GROUPED_PRODUCTS
from perfguard.graph.trace import DATA_PARALLEL, unmodelled
from perfguard.pytorch import (
    compiled_parts,
    gc_paused,
    has_data_parallel,
    is_compiled,
    module_inside,
    objects_of,
    path_inside,
    random_numbers_kept,
    too_large_named,
)
from perfguard.workload import CapturedTrial, Mode, tf32_options, tf32_switches

if TYPE_CHECKING:
    from types import FrameType

    from perfguard.devices import Device

_HALF = {torch.float16: "fp16", torch.bfloat16: "bf16"}
LBFGS = "LBFGS: its history and most of its closures depend on values, and are not counted"
"""Entry in a graph's ``unmodelled``."""
KEPT = "training keeps outputs on the device: it is taken to go on so to the end of the epoch"
"""Another entry."""
_NO_LOADER = "its batches do not come from a DataLoader, so its steps are not counted"
_MOST_WHOLE_STEPS = 5
"""Steps of inputs that were not seen before, after which a loop that no loader feeds is not worth a replay."""
_MOST_STEPS_ALONE = 20
"""Steps of one optimizer after which another that was made is not waited for: some are never stepped."""


_NO_OPTIMIZER = -1
"""Stands for the number of an optimizer, in steps that the user's own code makes."""


class _Reached(NamedTuple):
    """How much was seen."""

    num_ops: int
    num_copies: int
    """Tensors that were copied to the device."""
    num_batches: int
    """Batches that models have read."""


class _Enough(BaseException):
    """Ends the objective when all has been seen."""


def capture(
    run: Callable[[], object],
    device: Device,
    *,
    most_seconds: float = 5.0,
    spares: bool = True,
    replays: bool = True,
    blanks: Blanks | None = None,
) -> CapturedTrial:
    """Run an objective without computing anything, and return what its trial would run on ``device``.

    It replaces parts of PyTorch while it runs, and leaves behind what the objective leaves behind. So call it in a process of its
    own, as :class:`perfguard.capture.DryRuns` does.

    Args:
        run: the objective, without arguments.
        device: the guarded device.
        most_seconds: how long to look for the end of the trial after its third step.
        spares: give all batches for up to a second, before loaders are cut short.
        replays: count the loop without its model, once its first steps were seen.
        blanks: decides which tensors of the host have no data. None: by its defaults.

    Raises:
        CaptureError: if the objective makes no optimizer step, or raises an error before its second.
        TooLargeError: if a tensor of it has more bytes than PyTorch can count, or than the system has addresses. If ``device`` is
            the CPU, also if what it makes beside the model has more bytes than the memory.
    """
    with watching(device, most_seconds=most_seconds, spares=spares, replays=replays, blanks=blanks) as watch:
        run()
    return watch.captured()


@contextmanager
def watching(
    device: Device, *, most_seconds: float = 5.0, spares: bool = True, replays: bool = True, blanks: Blanks | None = None
) -> Iterator[Watch]:
    """Run the block on the stage. The arguments are those of :func:`capture`. An error after the second step ends the block."""
    target = target_of(device)
    watch = Watch(device, DevicePaths(target), most_seconds, spares=spares, replays=replays, blanks=blanks)
    with ExitStack() as stack:
        stack.enter_context(random_numbers_kept(beside_threads=True))
        stack.enter_context(gc_paused())
        stack.enter_context(device_semantics(device.kind))
        stack.enter_context(too_large_named())
        stack.enter_context(staged(device, watch.loaders, watch.host, watch.generations))
        watch.enter(stack)
        try:
            yield watch
        except _Enough:
            pass
        except Exception as error:
            if len(watch.marks) < 2 and watch.leaves_out:
                raise LeftOutError(f"{type(error).__name__}: {error}") from error
            if len(watch.marks) < 2 or isinstance(error, TooLargeError):
                raise
            watch.fail(error)


class Watch:
    """Follows an objective: where its steps end, which loader feeds them, and what its model is."""

    def __init__(
        self,
        device: Device,
        paths: DevicePaths,
        most_seconds: float,
        *,
        spares: bool,
        replays: bool = True,
        blanks: Blanks | None = None,
    ) -> None:
        self._stopwatch = Stopwatch()
        self._device = device
        self._paths = paths
        self._modules: list[str] = []
        self._recorder = Recorder(self._modules, is_cpu=device.kind == "cpu")
        self.host = HostTensors(device, self._recorder, blanks)
        self._stops = Stops()
        self._loop_heads = LoopHeads()
        self.host.values.on_unknown = self._stops.note_value
        self._replays = replays
        self._replay = Replay()
        self._micro_batches = MicroBatches(self._recorder, self._replay, self.host.batches)
        self._placement = Placement(device, self._recorder, self.host, self._replay)
        self._updates = OwnUpdates(self._reached, self._end_own_step)
        self._recorder.on_write = lambda written: None if self._numbers else self._updates.note_written(written)
        self._placement.on_assigned = lambda tensor: None if self._numbers else self._updates.note_assigned(tensor)
        self.loaders = Loaders(lambda: len(self._recorder.ops), self._stopwatch, seconds_spared=1.0 if spares else 0.0)
        self.generations = Generations(lambda: len(self._recorder.ops))
        self._ranks = Ranks(self._recorder, self.host.use, device.kind)
        self._most_seconds = most_seconds
        self._allowance: Allowance | None = None
        """For the steps after the third, and again for those that are replayed. None: these have not begun."""
        self.unseen = ""
        """Why the objective's end was not seen."""
        self._may_be_lost = False
        self.marks: list[int] = []
        """Number of operators at the end of each step."""
        self._copies: list[int] = []
        """Number of tensors copied to the device, likewise."""
        self._batches: list[int] = []
        """Number of batches that models have read, likewise."""
        self._stages: list[tuple[int, int, int | None]] = []
        """A step of each earlier optimizer."""
        self._forwards: list[tuple[int, bool]] = []
        """Number of operators where a model began to compute, and whether it did so without gradients."""
        self._largest_input = 0
        """Elements of the largest input of a model so far."""
        self._clean_from: list[int] = []
        """Numbers of operators, after the first steps, where there was no garbage."""
        self._num_changes = 0
        """Forward passes, in a loop that is replayed, which nothing before was like."""
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """The optimizers that were made, numbered. The id of one that is gone may be that of the next."""
        self._num_made = itertools.count()
        self._stepped: dict[int, int] = {}
        """Steps of each optimizer, by its number, in the order of their first steps."""
        self._roots: dict[int, nn.Module] = {}
        """The models: outermost modules with parameters."""
        self._paths_of: dict[int, str] = {}
        self._depth = 0
        self._precision = "fp32"
        self._channels_last = False
        self._compiled = False
        self._unmodelled: set[str] = set()
        """What the graph does not account for of the optimizers and of DataParallel."""
        self._has_engine = False
        """Whether DeepSpeed trains."""
        self._open_steps: list[tuple[FrameType, torch.optim.Optimizer]] = []
        """Optimizers that step, and where. One may call its base class, or an optimizer within it."""
        self._parts: list[str] = []
        self._lives: list[Life] = []
        """What was recorded of each storage, and what loops that were cut short would hold besides."""
        self._held: Mapping[int, tuple[StorageKind, str]] = {}

    def enter(self, stack: ExitStack) -> None:
        """Register what follows the objective, and enter the modes."""
        stack.callback(hooks.register_module_forward_pre_hook(self.enter_module).remove)
        stack.callback(hooks.register_module_forward_hook(self._leave_module, always_call=True).remove)
        stack.callback(register_optimizer_step_pre_hook(self.before_step).remove)
        stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        replace = replacing(stack)
        self._replay.follow = functools.partial(replace, nn.Module, "__call__", self._calling)
        stack.callback(self._replay.end)
        replace(torch.optim.Optimizer, "zero_grad", self._as_optimizer)
        replace(nn.Module, "zero_grad", self._as_optimizer)
        replace(torch.optim.Optimizer, "__init__", self._noting_optimizers)
        replace(torch.optim.Optimizer, "add_param_group", self._noting_groups)
        self._ranks.enter(stack, replace)
        stack.enter_context(self._recorder)
        stack.enter_context(self.host)
        stack.enter_context(self._paths)
        stack.enter_context(self._placement)
        self._recorder.calibrate()
        self._placement.on_backward = self._begin_backward
        self.loaders.on_asked = self._updates.begin_batch

    def join(self, begun: Mapping[Any, int], made_before: frozenset[int]) -> None:
        """Begin in the middle of an objective.

        Args:
            begun: see :meth:`Loaders.join`.
            made_before: ids of the parameters that were there before the trial. Those of the trial belong on the stage, even if
                they are in no model that runs: copies of weights, an image that is optimized.
        """
        self.loaders.join(begun)
        for each in objects_of(nn.Parameter):
            if id(each) not in made_before:
                with suppress(CaptureError):
                    put_on_meta([each])
        join_trainers(self.loaders)

    # --- Modules ----------------------------------------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Note that a forward pass of ``module`` begins."""
        if self._depth == 0 and id(module) not in self._paths_of:
            put_on_meta(one for one in (*module.parameters(), *module.buffers()) if not self.host.use.has_offloaded(one))
            for name, part in (*module.named_modules(), *module_inside(module).named_modules()):
                self._paths_of[id(part)] = path_inside(name)
        self._modules.append(self._paths_of.get(id(module), ""))
        is_model = any(True for _ in module.parameters(recurse=not self._depth))
        if self._depth or is_model:
            self._depth += 1
        kind = self._device.kind
        if torch.is_autocast_enabled(kind) and torch.is_grad_enabled():
            self._precision = f"amp-{_HALF.get(torch.get_autocast_dtype(kind), 'bf16')}"
        if self._depth == 1:
            self._begin_forward(module, args)

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if not self._roots:
            self._stopwatch.enter("steps")
        self._placement.in_forward = self.host.in_forward = self.host.awaits_batch = True
        self._placement.place_inputs(args)
        evaluates = not torch.is_grad_enabled()
        if not evaluates:
            self._updates.begin_forward()
        if self._numbers and not self._replay.is_on:
            self._micro_batches.begin_forward()
        if self._numbers and not evaluates and not self._replay.is_on:
            self._micro_batches.begin(id(module))
            if self._micro_batches.are_many:
                self._replay.follow_calls()
        self._look_for_more(evaluates, sum(tensor.numel() for tensor in tensors_in(args)))
        self._forwards.append((len(self._recorder.ops), evaluates))
        self.loaders.begin_forward(is_first=not self._roots, evaluates=evaluates)
        if id(module) not in self._roots and not self._paths_of[id(module)]:  # checkpointing runs parts of models
            self._roots[id(module)] = module_inside(module)
            self._has_engine = bool(engines_in(self._roots.values()))
            self._compiled |= is_compiled(module)
            self._parts += compiled_parts(module)
            self._unmodelled |= {DATA_PARALLEL} if has_data_parallel(module) else set()
        images = [tensor for tensor in tensors_in(args) if tensor.dim() == 4]
        last = torch.channels_last
        self._channels_last |= any(x.is_contiguous(memory_format=last) and not x.is_contiguous() for x in images)

    def _look_for_more(self, evaluates: bool, size: int, *, most_evaluations: int = 3) -> None:
        """Collect garbage where an evaluation begins, or a step of a larger input: more may be alive there than before."""
        was_training = bool(self._forwards) and not self._forwards[-1][1]
        is_larger = size > 1.25 * self._largest_input
        if len(self.marks) >= 5 and (is_larger or (evaluates and was_training and len(self._clean_from) < most_evaluations)):
            gc.collect()
            self._clean_from.append(len(self._recorder.ops))
        if is_larger or len(self.marks) < 5:
            self._largest_input = max(self._largest_input, size)

    def _look_at_change(self, *, most: int = 16) -> None:
        """Collect garbage where a replayed loop has changed: a model has another layer, trains more of them, or computes more."""
        if self._num_changes < most:  # a model may count its own steps, and each is a change then
            gc.collect()
            self._clean_from.append(len(self._recorder.ops))
            self._num_changes += 1

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._placement.in_forward = self.host.in_forward = False
                if self._numbers and not self._replay.is_on:
                    self._micro_batches.end_forward(output)

    def _calling(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Remember what models return, and leave out the forward passes that are replayed."""

        @functools.wraps(own)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_outermost = not self._depth and self._recorder.phase is None and any(True for _ in module.parameters())
            if not is_outermost:
                return own(module, *args, **kwargs)
            evaluates = not torch.is_grad_enabled()
            key = self._replay.key_of(module, args, kwargs, self.loaders.evaluated_data if evaluates else None)
            if self._replay.is_on:
                found = self._replay.output_of(key, module)
            else:
                leads_on = any(
                    tensor.requires_grad for tensor in tensors_in((args, kwargs))
                )  # a backward pass, to what it came from
                found = self._left_out(None if leads_on else key, module, evaluates)
            if found is None:
                if self._replay.is_new(key, module):
                    self._look_at_change()
                return self._replay.run(key, module, lambda: own(module, *args, **kwargs))
            self._look_for_more(evaluates, 0)
            self._forwards.append((len(self._recorder.ops), evaluates))
            self.loaders.begin_forward(is_first=False, evaluates=evaluates)
            return found[0]

        return __call__

    def _left_out(self, key: Key | None, module: nn.Module, evaluates: bool) -> tuple[Any] | None:
        """Return what a forward pass returns that is a part of a micro-batch which is left out. None: it is to run."""
        micro_batches = self._micro_batches
        if micro_batches.is_within() or (self._replay.leaves_out and evaluates):
            found = micro_batches.output_of(key, module)
            if found is None:
                self._fail_unseen("a micro-batch is another than those before it")
            return found
        if micro_batches.makes_more():
            self._fail_unseen("a micro-batch makes more than those before it")
        if not evaluates and not self._open_steps and micro_batches.may_leave_out(key, module) and self._can_replay():
            micro_batches.leave_out()
            return micro_batches.output_of(key, module)
        micro_batches.key = key
        if self._replay.leaves_out:
            micro_batches.go_on()
        return None

    def _fail_unseen(self, why: str) -> None:
        self._may_be_lost = True
        self._end(why)

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [named for root in self._roots.values() for named in root.named_parameters()]

    # --- Steps ------------------------------------------------------------------------------------------------------------------

    def _as_optimizer(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            if self._replay.skips:
                return self._replay.put_off(functools.partial(zero_grad, *args, **kwargs))
            with self._recorder.in_phase(Phase.OPTIMIZER):
                return own(*args, **kwargs)

        return zero_grad

    def _noting_optimizers(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._end_replay()
            own(optimizer, *args, **kwargs)
            self._number(optimizer)
            if self.marks and self._numbers[optimizer] < 8:  # it may train another model, and the last one is gone
                self._forget_models(only_dead=True)

        return __init__

    def _noting_groups(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def add_param_group(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            own(optimizer, *args, **kwargs)
            if self._replay.is_on:  # the next step makes states for more parameters, and the one after it has them
                self._replay.forget()

        return add_param_group

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._num_made)
        return self._numbers[optimizer]

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, depth: int = 1) -> Any:
        """Note that a step begins, ``depth`` frames above. Return the arguments that it gets, or None for its own."""
        hooked = sys._getframe(depth)
        running = {frame for frame, _ in traceback.walk_stack(hooked)}  # a step that has raised an error runs no longer
        self._open_steps = [*(step for step in self._open_steps if step[0] in running), (hooked, optimizer)]
        if self._replay.is_on and self._numbers.get(optimizer) not in self._stepped:
            self._end_replay()
        if self._replay.skips:
            return None
        if self.host.use.has_offloaded([group["params"] for group in optimizer.param_groups]):
            self._unmodelled.add(HOST_OPTIMIZER)
        for parameter, state in optimizer.state.items():
            is_on_host = isinstance(parameter, torch.Tensor) and not parameter.is_meta
            if is_on_host and self._has_engine:
                self._unmodelled.add(HOST_OPTIMIZER)
            for value in () if is_on_host else state.values():
                if isinstance(value, torch.Tensor) and value.dim() and not value.is_meta:
                    replace_by_meta(value)
        closure = kwargs.pop("closure", None) or next((item for item in args if callable(item)), None)
        if closure is None:
            self._begin_update(optimizer)
            return None

        def closed() -> Any:
            self._recorder.phase = None
            try:
                return closure()
            finally:
                self._begin_update(optimizer)

        return (optimizer, closed), kwargs

    def _begin_update(self, optimizer: Any) -> None:
        is_seen = self._replay.is_on or self._micro_batches.end_step()
        if not is_seen and len(self.marks) < 5:  # later ones are not judged
            self._fail_unseen("a step has fewer micro-batches than the one before")
        if len(self.marks) >= 2:
            self._replay.note_gradients(optimizer)
        self._recorder.mark_gradients(self._named_parameters())
        self._recorder.phase = Phase.OPTIMIZER

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._replay.skips:
            self._note_states(optimizer)
        hooked = sys._getframe(1)
        self._open_steps = [*itertools.takewhile(lambda step: step[0] is not hooked, self._open_steps)]
        if self._open_steps:
            self._recorder.phase = Phase.OPTIMIZER
            if optimizer is not self._open_steps[-1][1]:
                self._numbers.pop(optimizer, None)  # nobody waits for its steps
            return
        if self._has_engine and self._is_same_step():
            self.marks[-1] = len(self._recorder.ops)
            return
        self._end_step(self._number(optimizer), self._reached())

    def _begin_backward(self, outputs: Sequence[torch.Tensor], accumulates: bool) -> None:
        if not self._numbers:
            self._updates.begin_backward(outputs, line_of_user(), accumulates=accumulates)

    def _reached(self) -> _Reached:
        return _Reached(len(self._recorder.ops), self.host.num_copies, len(self.host.batches))

    def _end_own_step(self, reached: _Reached) -> None:
        """Note a step that no optimizer makes: what comes after its last backward pass is its update."""
        ops = self._recorder.ops
        self._recorder.mark_gradients(self._named_parameters())
        for at in range(reached.num_ops - 1, -1, -1):
            if ops[at].phase is Phase.BACKWARD:
                break
            ops[at] = ops[at]._replace(phase=Phase.OPTIMIZER)
        self._end_step(_NO_OPTIMIZER, reached)

    def _end_step(self, number: int, reached: _Reached) -> None:
        if number not in self._stepped:
            self._begin_stage()
        self._stepped[number] = self._stepped.get(number, 0) + 1
        if list(self._stepped)[-1] != number:  # a step ends with the optimizer that begins last
            return
        if len(self.marks) < 5 or 0 < self._num_later_steps < 3:  # what others leave behind is in no step that is looked at
            gc.collect()
        if len(self.marks) < 3:
            self._stops.note_step()
            self._loop_heads.note_step()
        self.marks.append(reached.num_ops)
        if len(self.marks) >= 2:
            self._replay.follow_calls()
        self._copies.append(reached.num_copies)
        self._batches.append(reached.num_batches)
        not_stepped = set(self._numbers.values()) - self._stepped.keys()
        self.loaders.must_spare = bool(not_stepped) and max(self._stepped.values()) < _MOST_STEPS_ALONE
        self.loaders.end_step(self._stepped[number])
        self._replay.end_step()
        if self.loaders.must_spare:
            return
        if len(self.marks) >= 3:
            self._allowance = self._allowance or Allowance(self._most_seconds)
        is_fed = self.loaders.feed_steps or self.loaders.may_spare
        if not self._replay.is_on and (not is_fed or self._num_later_steps >= 3):
            self._begin_replay_or_end(is_fed=is_fed)
        if not self.loaders.feed_steps and self._replay.num_whole > _MOST_WHOLE_STEPS:
            self._end(_NO_LOADER)
        if self._allowance is None or not self._allowance.is_spent:
            return
        if not self.loaders.feed_steps:
            self._end(_NO_LOADER)
        self._end(f"its epochs take more than {self._most_seconds:g} s to dry-run, so they are not counted")

    def _begin_replay_or_end(self, *, is_fed: bool) -> None:
        """Replay the loop, if it can be, once its first steps were seen. One that no loader feeds ends otherwise."""
        can_replay = (is_fed or self.loaders.spares) and self._can_replay()
        if can_replay and len(self.marks) >= (5 if is_fed else 3):
            self._allowance = Allowance(self._most_seconds)
            self.loaders.is_replayed = True
            self._stopwatch.enter("counting")
            self._replay.begin(optimizer for optimizer, number in self._numbers.items() if number in self._stepped)
        elif not can_replay and not is_fed and len(self.marks) >= 3 + self._makes_buckets_anew:  # which looks through all models
            self._end(_NO_LOADER)

    def _end_replay(self) -> None:
        if self._replay.is_on:
            self._stopwatch.enter("steps")
        self._replay.end()
        self.loaders.is_replayed = False

    def _can_replay(self) -> bool:
        """Whether a loop without its model makes the steps that it makes with it."""
        if not self._replays or self._ranks.are_many or self._has_engine or self._stages or self._compiled:
            return False
        if _NO_OPTIMIZER in self._stepped:
            return False
        are_of_pytorch = all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in self._numbers)  # not fastai's
        return are_of_pytorch and not has_backward_hooks(self._roots.values())

    def _note_states(self, optimizer: Any) -> None:
        self._recorder.phase = None
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        state = [(names.get(id(p), ""), value) for p, values in optimizer.state.items() for value in values.values()]
        if self._has_engine:  # whose master weights are not the model's parameters
            state += [("", p) for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
        self._recorder.mark(state, StorageKind.OPTIMIZER_STATE)
        if any(hasattr(value, "is_paged") for _, value in state):
            self._unmodelled.add(PAGED_STATES)
        if isinstance(optimizer, torch.optim.LBFGS):
            self._unmodelled.add(LBFGS)

    @property
    def _makes_buckets_anew(self) -> bool:
        """Whether the second step is another than those after it, as that of DDP."""
        return self._ranks.are_many and "fsdp" not in self._ranks.options(self._roots.values())

    def _is_same_step(self) -> bool:
        """Whether DeepSpeed steps another group of parameters: no backward pass has run since the last."""
        return bool(self.marks) and all(op.phase is not Phase.BACKWARD for op in self._recorder.ops[self.marks[-1] :])

    @property
    def _num_later_steps(self) -> int:
        """Steps after the first epoch."""
        begin = self.loaders.first_ended_at
        return 0 if begin is None else sum(mark > begin for mark in self.marks)

    def _forget_models(self, *, only_dead: bool = False) -> None:
        """Let go of the models so far. Those that have had their time must not be kept alive."""
        held = {key: weakref.ref(root) for key, root in self._roots.items()}
        self._roots.clear()
        if only_dead:
            gc.collect()
            self._roots.update({key: root for key, ref in held.items() if (root := ref()) is not None})
        if len(self._roots) < len(held):
            self._paths_of.clear()

    def _begin_stage(self) -> None:
        """Another optimizer belongs to a step, or trains a model of its own: a second stage, another fold."""
        if len(self.marks) > 1 and not self.loaders.must_spare:
            self._stages.append(self._step(0))
        if self._stepped:
            self._forget_models()
        self.marks, self._copies, self._batches = [], [], []
        self._loop_heads = LoopHeads()
        self.loaders.begin_anew()

    def _end(self, why: str) -> None:
        self.unseen = why  # the objective may catch what ends it
        raise _Enough(why)

    # --- The result -------------------------------------------------------------------------------------------------------------

    def captured(self) -> CapturedTrial:
        """Return what was seen.

        Raises:
            CaptureError: if there was no step.
        """
        if self.marks and not self._recorder.ops:
            raise CaptureError("Nothing of a step was seen on the device. Describe what the objective runs: build=...")
        if not self.marks and self.leaves_out:
            raise LeftOutError(f"The objective made no step: {self.unseen or 'micro-batches of it were left out'}.")
        if not self.marks:
            learns = any(op.phase is Phase.BACKWARD for op in self._recorder.ops)
            why = " Values are 0 in a dry run, so a step that depends on one, as in `if norm > 0`, is left out." if learns else ""
            raise CaptureError(f"The objective made no step of a torch optimizer.{why} Describe what it runs: build=...")
        self._stopwatch.enter("graphs")
        self._held = self._lasting()
        self._lives = self._recorder.lives()
        kept = [loop.missing(self._recorder.ops, self._lives, self.marks[:5][-1]) for loop in self.loaders.loops]
        if any(loop.trains and found for loop, found in zip(self.loaders.loops, kept, strict=True)):
            self._unmodelled.add(KEPT)
        kept += [loop.missing(self._recorder.ops, self._lives, 0) for loop in self.generations.loops]
        self._lives += itertools.chain(*kept)
        phases = {f"a step of stage {1 + at}": self._graph("train", *stage) for at, stage in enumerate(self._stages)}
        number = 1 if self._makes_buckets_anew and len(self.marks) > 3 else 0
        candidates = range(number, min(number + 2, len(self.marks) - 1))
        number = min(candidates, key=self._is_unusual, default=number)
        begin, end, after = self._step(number)
        judged = [(begin, end)]
        copies = self._copies[1] - self._copies[0] if len(self._copies) > 1 else self._copies[0]
        training = self._graph("train", begin, end, after, on_device=not copies and self._device.kind == "cuda")
        if evaluation := self._evaluation():
            phases["the evaluation"] = self._graph("infer", *evaluation)
            judged.append(evaluation)
        if self.loaders.longest and len(self.marks) > 3:  # a trainer that fetches ahead runs it one step later
            spans = [*zip(self.marks[2:4], self.marks[3:5], strict=False)]
            steps_after = [self._graph("train", begin, end) for begin, end in spans]
            phases[self.loaders.longest] = max(steps_after, key=lambda graph: graph.peak_live_bytes)
            judged += spans
        phases |= self._largest_beside(judged)
        stop = self._stops.where()
        unseen = f"a value that no dry run knows ends its loop at {stop}" if stop else self.unseen
        per_epoch, steps = self.loaders.steps(is_over=not unseen, are_counted=not unseen and self._stops.counts_steps())
        if steps is None and not stop and not self._stages:
            steps = self._loop_heads.steps(per_epoch if self.loaders.feed_steps else None)
        size = self._samples_and_tokens(number)
        ranks, host_memory = self._ranks.number, self.host.use.memory()
        was_whole = len(self.marks) > 1 or not self.leaves_out  # the last micro-batch of the first step is not
        may_be_lost = (self._may_be_lost and not stop) or not was_whole
        found = CapturedTrial(
            training, phases, per_epoch, steps, unseen, len(self._stepped), *size, ranks, host_memory, may_be_lost=may_be_lost
        )
        return replace(found, seconds=self._stopwatch.seconds)

    def fail(self, error: Exception) -> None:
        """Note an error that has ended the objective after its second step."""
        self._may_be_lost = (self._replay.has_begun or self.leaves_out) and not self.unseen
        self.unseen = self.unseen or f"{type(error).__name__}: {error}"

    @property
    def leaves_out(self) -> bool:
        """Whether a micro-batch was left out."""
        return self._micro_batches.are_left_out

    def _samples_and_tokens(self, number: int) -> tuple[int | None, int | None]:
        """What a step is made of. The loader knows best how many samples; models may read a part of a batch, or a batch twice."""
        ends = [0, *self._batches] if len(self._batches) < 2 else self._batches
        read = self.host.batches[ends[number] : ends[number + 1]]
        read_samples, tokens = sum(samples for samples, _ in read), sum(tokens for _, tokens in read)
        samples = self.loaders.samples_per_step or read_samples
        return samples or None, (samples * tokens // read_samples or None) if read_samples else None

    def _largest_beside(self, judged: Sequence[tuple[int, int]], *, share: float = 0.01) -> Mapping[str, OpGraph]:
        """Return what runs where more is alive than in all that is ``judged``, by a ``share`` at least. Empty: nothing does.

        What comes before the first forward pass does not count: the host may have made it. Nor do steps after which no garbage is
        collected: of the first epoch, all but five, and after it, all but three. Evaluations and larger inputs do.
        """
        ops, marks = self._recorder.ops, self.marks
        live, counts, is_judged = live_bytes(self._lives, len(ops)), np.zeros(len(ops), np.bool_), np.zeros(len(ops), np.bool_)
        counts[marks[0] if self._stages else self._first_forward() : marks[:5][-1]] = True
        counts[self._end_of_first_epoch() : marks[: len(marks) - self._num_later_steps + 3][-1]] = True
        for at in self._clean_from:
            counts[at : next((mark for mark in marks if mark > at), len(ops))] = True
        counts[marks[-1] : min([len(ops), *(at for at in self.host.left_at if at >= marks[-1])])] = True
        for begin, end in judged:
            is_judged[begin:end] = True
        live_beside = np.where(counts & ~is_judged, live, 0.0)
        if live_beside.max(initial=0.0) <= (1 + share) * live[is_judged].max(initial=0.0):
            return {}
        at = int(live_beside.argmax())
        forward, evaluates = max((seen for seen in self._forwards if seen[0] <= at), default=(0, False))
        step = bisect_right(marks, at)
        begin, end = marks[step - 1] if step else self._first_forward(), marks[step] if step < len(marks) else len(ops)
        if evaluates and all(op.phase is Phase.FORWARD for op in ops[forward : at + 1]):
            trains = (where for where, evaluates in self._forwards if where > at and not evaluates)
            return {"an evaluation": self._graph("infer", begin, min(end, next(trains, end)))}
        if step and forward < begin:
            return {"work between two steps, such as a checkpoint": self._graph("infer", begin, end)}
        return {"a later step" if step else "the first step": self._graph("train", begin, end)}

    def _step(self, number: int) -> tuple[int, int, int | None]:
        """Where a step begins and ends, and where the next one ends, which frees what the loop keeps of it."""
        marks = self.marks
        if len(marks) < 2:
            return self._first_forward(), marks[0], None
        return marks[number], marks[number + 1], marks[number + 2] if len(marks) > number + 2 else None

    def _is_unusual(self, number: int) -> tuple[bool, bool]:
        """Whether a step has an evaluation, and whether the next one is another: an average of weights begins with a copy."""
        begin, end = self.marks[number : number + 2]
        evaluates = any(evaluates and begin <= at < end for at, evaluates in self._forwards)
        lengths = [end - begin for begin, end in itertools.pairwise(self.marks[number : number + 3])]
        return evaluates, len(set(lengths)) != 1 or len(lengths) < 2

    def _evaluation(self) -> tuple[int, int] | None:
        """First and last operator of what was computed between the last step of the first epoch and the second epoch."""
        ops, at, begin = self._recorder.ops, self.loaders.first_ended_at, self._end_of_first_epoch()
        end = len(ops) if at is None else at
        return (begin, end) if any(op.module for op in ops[begin:end]) else None

    def _end_of_first_epoch(self) -> int:
        ops = self._recorder.ops[: self.loaders.first_ended_at]
        return 1 + max((index for index, op in enumerate(ops) if op.phase is not Phase.FORWARD), default=-1)

    def _first_forward(self) -> int:
        found = (index for index, op in enumerate(self._recorder.ops) if op.module and op.phase is Phase.FORWARD)
        return next(found, 0)

    def _lasting(self) -> Mapping[int, tuple[StorageKind, str]]:
        """Kind and name of what models hold, by the index of the storage, in the order of a described workload."""
        found: dict[int, tuple[StorageKind, str]] = {}
        for kind, named in (
            (StorageKind.PARAMETER, self._named_parameters()),
            (StorageKind.BUFFER, [named for root in self._roots.values() for named in root.named_buffers()]),
        ):
            for name, whole in named:
                for tensor in tensors_in((whole, getattr(whole, "ds_tensor", None))):  # DeepSpeed's shard of a parameter
                    if tensor.is_meta:
                        found.setdefault(self._recorder.index_of(tensor), (kind, name))
        return found

    def _graph(self, mode: Mode, begin: int, end: int, after: int | None = None, *, on_device: bool = False) -> OpGraph:
        ops, storages = cut_step(self._recorder.ops, self._lives, self._held, begin, end, after)
        precision = self._precision
        if precision == "fp32":  # adapters, norms and the head may be in it, beside a model in half precision or quantized
            precision = _precision_of(ops)
        options = tuple(
            name
            for name, is_on in (
                ("cudnn_benchmark", torch.backends.cudnn.benchmark),
                ("compiled", self._compiled),
                ("batch-on-device", on_device),
            )
            if is_on
        )
        return OpGraph(
            ops=ops,
            storages=storages,
            mode=mode,
            precision=precision,
            layout="nhwc" if self._channels_last else "nchw",
            options=options + self._ranks.options(self._roots.values()) + tf32_options(precision, tf32_switches()),
            unmodelled=(
                *unmodelled(
                    target_of(self._device),
                    {op.name for op in ops},
                    precision=precision,
                    compiled=self._compiled,
                    compiled_parts=self._parts,
                ),
                *self._ranks.unmodelled(self._roots.values()),
                *self._recorder.selections.assumed,
                *((GROUPED_PRODUCTS,) if self._paths.has_grouped_products else ()),
                *((GENERATED,) if mode == "train" and self.generations.are_cut(begin, end) else ()),
                *(text for text in (PAGED_STATES, HOST_OPTIMIZER, LBFGS, KEPT, DATA_PARALLEL) if text in self._unmodelled),
            ),
        )


def _precision_of(ops: Sequence[Op]) -> str:
    """The precision of most of the arithmetic."""
    flops: Counter[str] = Counter()
    for op in ops:
        flops[op.dtype] += op.flops
    most = max(flops, key=lambda dtype: flops[dtype], default="")
    return _HALF.get(getattr(torch, most, torch.float32), "fp32")


def cut_step(
    ops: list[Op], lives: list[Life], lasting: Mapping[int, tuple[StorageKind, str]], begin: int, end: int, after: int | None
) -> tuple[tuple[Op, ...], tuple[Storage, ...]]:
    """Cut operators ``begin`` to ``end`` out of a recording as one step of a loop, with indices of their own.

    What the step before has left is not cut out: it is the same as what this step leaves to the next one, which ends at
    ``after``. None: what is cut out is no step of a loop, and has before it what came before.
    """
    number = end - begin
    window = ops[begin:end]
    rows: list[tuple[tuple[int, int], int, Storage]] = []
    place = {index: rank for rank, index in enumerate(lasting)}
    alias: dict[int, int] = {}
    latest: dict[tuple[str, int], tuple[int, float]] = {}
    order = {StorageKind.INPUT: 1, StorageKind.OPTIMIZER_STATE: 2, StorageKind.BUFFER: 3, StorageKind.GRADIENT: 4}
    for index, life in enumerate(lives):
        kind, name = lasting.get(index, (life.kind, life.name))
        birth, death = life.birth - begin, math.inf if life.death is None else life.death - begin
        if death < birth:  # a batch that was copied in a replayed part of the loop, and that no operator has read
            continue
        if index in place and birth <= 0:  # one that is assigned later, as by `parameter.data = ...`, is not there before
            rows.append(((0, place[index]), index, Storage(life.num_bytes, lasting[index][0], -1, number, name)))
        elif birth >= number or death < 0 or (birth < 0 and death < number and after is not None):
            continue
        elif kind is StorageKind.INPUT and (birth >= 0 or death >= number):
            same, until = latest.get((name, life.num_bytes), (index, -1))
            latest[name, life.num_bytes] = same, death
            if same != index and until < birth:  # the next micro-batch takes the place of the last
                alias[index] = same
                continue
            rows.append(((1, index), index, Storage(life.num_bytes, kind, -1, number - 1, name)))
        elif birth < 0:  # it outlives steps, or was left behind by what came before
            kind = StorageKind.TEMPORARY if death < number else StorageKind.BUFFER if kind is None else kind
            storage = Storage(life.num_bytes, kind, -1, int(min(death, number)), path_inside(name))
            rows.append(((order.get(kind, 5), index), index, storage))
        else:
            final = int(death) if death < number else number
            if after is not None and life.death is not None and number <= death < after - begin:
                final = number + 1 + min(life.death - end, number - 1)  # in the next step
            kind = kind_by_lifetime(life.birth_phase, None if final == number else final, window) if kind is None else kind
            rows.append(((6, index), index, Storage(life.num_bytes, kind, birth, final, path_inside(name))))
    rows.sort(key=lambda row: row[0])
    new = {index: position for position, (_, index, _) in enumerate(rows)}
    new |= {index: new[same] for index, same in alias.items()}
    renumbered = tuple(
        op._replace(inputs=tuple(new[i] for i in op.inputs if i in new), outputs=tuple(new[i] for i in op.outputs if i in new))
        for op in window
    )
    return renumbered, tuple(storage for _, _, storage in rows)
