"""Objective → CapturedTrial: one step of what a trial would run, seen by running it where nothing is computed.

The user's code runs on the stage of `stage.py` for three optimizer steps, one evaluation, and one step of each later epoch. From
the recording of all of it, the second step is cut out. Its graph is that of the same step when it is described by a Workload.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import multiprocessing.process
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.nn.modules.module as hooks
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from perfguard.capture.blanks import Blanks
from perfguard.capture.deepspeed_engine import engines_in
from perfguard.capture.errors import LeftOutError
from perfguard.capture.kept_copies import KeptCopies
from perfguard.capture.loaders import Allowance, Loaders
from perfguard.capture.loop_heads import LoopHeads
from perfguard.capture.loops import Generations
from perfguard.capture.micro_batches import MicroBatches
from perfguard.capture.optimizers import Optimizers
from perfguard.capture.own_updates import OwnUpdates
from perfguard.capture.ranks import Ranks
from perfguard.capture.recording import Events, Recording, Span, dtype_of_most_arithmetic, num_later_steps, step_of
from perfguard.capture.replay import Key, Replay, has_backward_hooks
from perfguard.capture.stage import HostTensors, Placement, put_on_meta, replace_by_meta, staged
from perfguard.capture.stops import Stops, line_of_user, place_of_user
from perfguard.capture.stopwatch import Stopwatch
from perfguard.capture.trainers import join_trainers
from perfguard.exceptions import CaptureError, TooLargeError
from perfguard.graph.kernels import DevicePaths, device_semantics, target_of
from perfguard.graph.libraries import replacing
from perfguard.graph.op import Phase, StorageKind
from perfguard.graph.opgraph import OpGraph
from perfguard.graph.recorder import Recorder, tensors_in
from perfguard.graph.trace import unmodelled
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
from perfguard.unmodelled import DATA_PARALLEL, GENERATED, GROUPED_PRODUCTS, HOST_OPTIMIZER, KEPT, LBFGS, PAGED_STATES, Unmodelled
from perfguard.workload import CapturedTrial, Mode, tf32_options, tf32_switches

if TYPE_CHECKING:
    from types import FrameType

    from perfguard.devices import Device

_HALF = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_NO_LOADER = "its batches do not come from a DataLoader, so its steps are not counted"
_MOST_WHOLE_STEPS = 5
"""Steps of inputs that were not seen before, after which a loop that no loader feeds is not worth a replay."""
_MOST_STEPS_ALONE = 20
"""Steps of one optimizer after which another that was made is not waited for: some are never stepped."""


_TRANSFORMING = (torch._functorch.vmap, "_create_batched_inputs"), (torch._functorch.eager_transforms, "_wrap_all_tensors")
"""What `vmap`, and `grad` and those made of it, do to their inputs (PyTorch 2.13)."""
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
            if len(watch.events.steps) < 2 and watch.leaves_out:
                raise LeftOutError(f"{type(error).__name__}: {error}") from error
            if len(watch.events.steps) < 2 or isinstance(error, TooLargeError):
                raise
            watch.fail(error)


@dataclass(slots=True)
class _Traits:
    """What was seen of the models and optimizers, beside their operators."""

    precision: str = "fp32"
    is_channels_last: bool = False
    is_compiled: bool = False
    compiled_parts: list[str] = field(default_factory=list)
    unmodelled: set[Unmodelled] = field(default_factory=set)
    """What the graph does not account for of the optimizers and of DataParallel."""
    has_engine: bool = False
    """Whether DeepSpeed trains."""


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
        self._recorder.on_write = lambda written: None if self._optimizers.numbers else self._updates.note_written(written)
        self._placement.on_assigned = lambda tensor: None if self._optimizers.numbers else self._updates.note_assigned(tensor)
        self.loaders = Loaders(lambda: len(self._recorder.ops), self._stopwatch, seconds_spared=1.0 if spares else 0.0)
        self._kept_copies = KeptCopies(self._recorder)
        self.host.on_copied = self._kept_copies.note
        self.loaders.on_begun = self._begin_anew
        self.generations = Generations(lambda: len(self._recorder.ops))
        self._ranks = Ranks(self._recorder, self.host.use, device.kind)
        self._most_seconds = most_seconds
        self._allowance: Allowance | None = None
        """For the steps after the third, and again for those that are replayed. None: these have not begun."""
        self.unseen = ""
        """Why the objective's end was not seen."""
        self._may_be_lost = False
        self.events = Events()
        self._largest_input = 0
        """Elements of the largest input of a model so far."""
        self._num_changes = 0
        """Forward passes, in a loop that is replayed, which nothing before was like."""
        self._optimizers = Optimizers()
        self._roots: dict[int, nn.Module] = {}
        """The models: outermost modules with parameters."""
        self._paths_of: dict[int, str] = {}
        self._depth = 0
        self._traits = _Traits()
        self._open_steps: list[tuple[FrameType, torch.optim.Optimizer]] = []
        """Optimizers that step, and where. One may call its base class, or an optimizer within it."""

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
        replace(threading.Thread, "start", self._starting)
        replace(multiprocessing.process.BaseProcess, "start", self._starting_process)
        for module, name in _TRANSFORMING:
            replace(module, name, self._placement.placing_inputs)
        self._ranks.enter(stack, replace)
        self._enter_modes(stack)
        self._recorder.calibrate()
        self._placement.on_backward = self._begin_backward
        self.loaders.on_asked = self._updates.begin_batch

    def _enter_modes(self, stack: ExitStack) -> None:
        for mode in (self._recorder, self.host, self._paths, self._placement):
            stack.enter_context(mode)

    def _starting(self, own: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        """Let the threads of the objective be on the stage, too: it may train in one and wait for it."""

        @functools.wraps(own)
        def start(thread: threading.Thread) -> None:
            run = thread.run

            def run_on_stage() -> None:
                with ExitStack() as stack, suppress(_Enough):
                    stack.enter_context(device_semantics(self._device.kind))
                    self._enter_modes(stack)
                    run()

            thread.run = run_on_stage  # type: ignore[method-assign]
            own(thread)

        return start

    def _starting_process(self, own: Callable[[Any], None]) -> Callable[[Any], None]:
        """Refuse a process that trains a model which the objective shares with it, as in Hogwild. Others may start."""

        @functools.wraps(own)
        def start(process: Any) -> None:
            if self._placement.has_shared:
                raise CaptureError(
                    f"{place_of_user()} starts a process with a model in shared memory, and a dry run sees the steps of one "
                    "process alone: train in the process of the objective, or describe what one of them runs: build=..."
                )
            own(process)

        return start

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
            self._traits.precision = f"amp-{_HALF.get(torch.get_autocast_dtype(kind), 'bf16')}"
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
            self._begin_anew()
        if self._optimizers.numbers and not self._replay.is_on:
            self._micro_batches.begin_forward(id(module), evaluates=evaluates)
            if self._micro_batches.are_many:
                self._replay.follow_calls()
        self._look_for_more(evaluates, sum(tensor.numel() for tensor in tensors_in(args)))
        self.events.forwards.append((len(self._recorder.ops), evaluates))
        self.loaders.begin_forward(is_first=not self._roots, evaluates=evaluates)
        if id(module) not in self._roots and not self._paths_of[id(module)]:  # checkpointing runs parts of models
            self._roots[id(module)] = module_inside(module)
            self._traits.has_engine = bool(engines_in(self._roots.values()))
            self._traits.is_compiled |= is_compiled(module)
            self._traits.compiled_parts += compiled_parts(module)
            self._traits.unmodelled |= {DATA_PARALLEL} if has_data_parallel(module) else set()
        images = [tensor for tensor in tensors_in(args) if tensor.dim() == 4]
        last = torch.channels_last
        self._traits.is_channels_last |= any(x.is_contiguous(memory_format=last) and not x.is_contiguous() for x in images)

    def _look_for_more(self, evaluates: bool, size: int, *, most_evaluations: int = 3) -> None:
        """Collect garbage where an evaluation begins, or a step of a larger input: more may be alive there than before."""
        events = self.events
        was_training = bool(events.forwards) and not events.forwards[-1][1]
        is_larger = size > 1.25 * self._largest_input
        if len(events.steps) >= 5 and (is_larger or (evaluates and was_training and len(events.clean) < most_evaluations)):
            gc.collect()
            events.clean.append(len(self._recorder.ops))
        if is_larger or len(events.steps) < 5:
            self._largest_input = max(self._largest_input, size)

    def _look_at_change(self, *, most: int = 16) -> None:
        """Collect garbage where a replayed loop has changed: a model has another layer, trains more of them, or computes more."""
        if self._num_changes < most:  # a model may count its own steps, and each is a change then
            gc.collect()
            self.events.clean.append(len(self._recorder.ops))
            self._num_changes += 1

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._placement.in_forward = self.host.in_forward = False
                if self._optimizers.numbers and not self._replay.is_on:
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
            self.events.forwards.append((len(self._recorder.ops), evaluates))
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

    def _begin_anew(self) -> None:
        """Make copies again that a loop keeps, where it may begin anew: with a pass over a loader, or a step."""
        steps = self.events.steps
        if len(steps) >= 3 and not self._replay.leaves_out and self._recorder.phase is None:
            self._kept_copies.make_again(steps[-2])

    def _fail_unseen(self, why: str) -> None:
        self._may_be_lost = True
        self._end(why)

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [named for root in self._roots.values() for named in root.named_parameters()]

    # --- Steps ------------------------------------------------------------------------------------------------------------------

    def _as_optimizer(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            self._begin_anew()
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
            number = self._optimizers.number_new(optimizer, line_of_user())
            if self.events.steps and number < 8:  # it may train another model, and the last one is gone
                self._forget_models(but={id(p) for group in optimizer.param_groups for p in group["params"]})

        return __init__

    def _noting_groups(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def add_param_group(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            own(optimizer, *args, **kwargs)
            if self._replay.is_on:  # the next step makes states for more parameters, and the one after it has them
                self._replay.forget()

        return add_param_group

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, depth: int = 1) -> Any:
        """Note that a step begins, ``depth`` frames above. Return the arguments that it gets, or None for its own."""
        hooked = sys._getframe(depth)
        running = {frame for frame, _ in traceback.walk_stack(hooked)}  # a step that has raised an error runs no longer
        self._open_steps = [*(step for step in self._open_steps if step[0] in running), (hooked, optimizer)]
        if self._replay.is_on and not self._optimizers.has_stepped(optimizer):
            self._end_replay()
        if self._replay.skips:
            return None
        if self.host.use.has_offloaded([group["params"] for group in optimizer.param_groups]):
            self._traits.unmodelled.add(HOST_OPTIMIZER)
        for parameter, state in optimizer.state.items():
            is_on_host = isinstance(parameter, torch.Tensor) and not parameter.is_meta
            if is_on_host and self._traits.has_engine:
                self._traits.unmodelled.add(HOST_OPTIMIZER)
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
        if not is_seen and len(self.events.steps) < 5:  # later ones are not judged
            self._fail_unseen("a step has fewer micro-batches than the one before")
        if len(self.events.steps) >= 2:
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
                self._optimizers.numbers.pop(optimizer, None)  # nobody waits for its steps
            return
        if self._traits.has_engine and self._is_same_step():
            self.events.steps[-1] = len(self._recorder.ops)
            return
        self._end_step(self._optimizers.number(optimizer), self._reached())

    def _begin_backward(self, outputs: Sequence[torch.Tensor], accumulates: bool) -> None:
        if not self._optimizers.numbers:
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
        if number not in self._optimizers.steps:
            self._begin_stage()
        self._optimizers.steps[number] = self._optimizers.steps.get(number, 0) + 1
        if list(self._optimizers.steps)[-1] != number:  # a step ends with the optimizer that begins last
            return
        events = self.events
        if len(events.steps) < 5 or 0 < self._num_later_steps < 3:  # what others leave behind is in no step that is looked at
            gc.collect()
        if len(events.steps) < 3:
            self._stops.note_step()
            self._loop_heads.note_step()
        events.steps.append(reached.num_ops)
        if len(events.steps) >= 2:
            self._replay.follow_calls()
        events.copies.append(reached.num_copies)
        events.batches.append(reached.num_batches)
        self.loaders.must_spare = bool(self._optimizers.waited_for) and max(self._optimizers.steps.values()) < _MOST_STEPS_ALONE
        self.loaders.end_step(self._optimizers.steps[number])
        self._replay.end_step()
        if self.loaders.must_spare:
            return
        if len(events.steps) >= 3:
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
        num_steps = len(self.events.steps)
        can_replay = (is_fed or self.loaders.spares) and self._can_replay()
        if can_replay and num_steps >= (5 if is_fed else 3):
            self._allowance = Allowance(self._most_seconds)
            self.loaders.is_replayed = True
            self._stopwatch.enter("counting")
            self._replay.begin(self._optimizers.with_steps())
        elif not can_replay and not is_fed and num_steps >= 3 + self._makes_buckets_anew:  # which looks through all models
            self._end(_NO_LOADER)

    def _end_replay(self) -> None:
        if self._replay.is_on:
            self._stopwatch.enter("steps")
        self._replay.end()
        self.loaders.is_replayed = False

    def _can_replay(self) -> bool:
        """Whether a loop without its model makes the steps that it makes with it."""
        if not self._replays or self._ranks.are_many or self._traits.has_engine or self.events.stages or self._traits.is_compiled:
            return False
        if _NO_OPTIMIZER in self._optimizers.steps:
            return False
        known = self._optimizers.numbers
        are_of_pytorch = all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in known)  # not fastai's
        return are_of_pytorch and not has_backward_hooks(self._roots.values())

    def _note_states(self, optimizer: Any) -> None:
        self._recorder.phase = None
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        state = [(names.get(id(p), ""), value) for p, values in optimizer.state.items() for value in values.values()]
        if self._traits.has_engine:  # whose master weights are not the model's parameters
            state += [("", p) for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
        self._recorder.mark(state, StorageKind.OPTIMIZER_STATE)
        if any(hasattr(value, "is_paged") for _, value in state):
            self._traits.unmodelled.add(PAGED_STATES)
        if isinstance(optimizer, torch.optim.LBFGS):
            self._traits.unmodelled.add(LBFGS)

    @property
    def _makes_buckets_anew(self) -> bool:
        """Whether the second step is another than those after it, as that of DDP."""
        return self._ranks.are_many and "fsdp" not in self._ranks.options(self._roots.values())

    def _is_same_step(self) -> bool:
        """Whether DeepSpeed steps another group of parameters: no backward pass has run since the last."""
        steps = self.events.steps
        ops = self._recorder.ops
        return bool(steps) and all(op.phase is not Phase.BACKWARD for op in ops[steps[-1] :])

    @property
    def _num_later_steps(self) -> int:
        """Steps after the first epoch."""
        return num_later_steps(self.events.steps, self.loaders.first_ended_at)

    def _forget_models(self, *, but: Set[int] = frozenset()) -> None:
        """Let go of the models so far, but for those with parameters of these ids. They must not be kept alive.

        One that runs again is a model again.
        """
        forgotten = [key for key, root in self._roots.items() if not any(id(p) in but for p in root.parameters())]
        if forgotten:
            self._paths_of.clear()
        for key in forgotten:
            del self._roots[key]
        gc.collect()

    def _begin_stage(self) -> None:
        """Another optimizer belongs to a step, or trains a model of its own: a second stage, another fold."""
        if len(self.events.steps) > 1 and not self.loaders.must_spare:
            self.events.stages.append(step_of(self.events.steps, 0))
        if self._optimizers.steps:
            self._forget_models()
        self.events.steps = []
        self.events.copies = []
        self.events.batches = []
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
        events = self.events
        if events.steps and not self._recorder.ops:
            raise CaptureError("Nothing of a step was seen on the device. Describe what the objective runs: build=...")
        if not events.steps and self.leaves_out:
            raise LeftOutError(f"The objective made no step: {self.unseen or 'micro-batches of it were left out'}.")
        if not events.steps:
            learns = any(op.phase is Phase.BACKWARD for op in self._recorder.ops)
            why = " Values are 0 in a dry run, so a step that depends on one, as in `if norm > 0`, is left out." if learns else ""
            raise CaptureError(f"The objective made no step of a torch optimizer.{why} Describe what it runs: build=...")
        self._stopwatch.enter("graphs")
        recording = self._recording()
        phases = {f"a step of stage {1 + at}": self._graph(recording, "train", span) for at, span in enumerate(events.stages)}
        number = recording.usual_step(1 if self._makes_buckets_anew and len(events.steps) > 3 else 0)
        judged = [recording.step(number)]
        copies = events.copies[1] - events.copies[0] if len(events.copies) > 1 else events.copies[0]
        on_device = not copies and self._device.kind == "cuda"
        training = self._graph(recording, "train", judged[0], on_device=on_device)
        if evaluation := recording.evaluation:
            phases["the evaluation"] = self._graph(recording, "infer", evaluation)
            judged.append(evaluation)
        if self.loaders.longest and len(events.steps) > 3:  # a trainer that fetches ahead runs it one step later
            spans = [Span(*ends) for ends in zip(events.steps[2:4], events.steps[3:5], strict=False)]
            after_third = [self._graph(recording, "train", span) for span in spans]
            phases[self.loaders.longest] = max(after_third, key=lambda graph: graph.peak_live_bytes)
            judged += spans
        if beside := recording.largest_beside(judged):
            name, mode, span = beside
            phases[name] = self._graph(recording, mode, span)
        stop = self._stops.where()
        unseen = f"a value that no dry run knows ends its loop at {stop}" if stop else self.unseen
        per_epoch, in_all = self.loaders.steps(is_over=not unseen, are_counted=not unseen and self._stops.counts_steps())
        if events.stages and not self.loaders.feed_steps:
            in_all = None  # the optimizer of the last stage has counted its own steps alone
        if in_all is None and not stop and not events.stages and not self.loaders.may_stop_early:
            in_all = self._loop_heads.steps(per_epoch if self.loaders.feed_steps else None)
        size = self._samples_and_tokens(number)
        ranks = self._ranks.number
        host_memory = self.host.use.memory()
        was_whole = len(events.steps) > 1 or not self.leaves_out  # the last micro-batch of the first step is not
        may_be_lost = (self._may_be_lost and not stop) or not was_whole
        num_optimizers = len(self._optimizers.steps)
        found = CapturedTrial(
            training, phases, per_epoch, in_all, unseen, num_optimizers, *size, ranks, host_memory, may_be_lost=may_be_lost
        )
        return replace(found, seconds=self._stopwatch.seconds)

    def fail(self, error: Exception) -> None:
        """Note an error that has ended the objective after its second step."""
        self._may_be_lost = (self._replay.has_begun or self.leaves_out) and not self.unseen
        self.unseen = self.unseen or f"{type(error).__name__}: {error}"
        self._loop_heads = LoopHeads()  # the trial ends with the error, too

    @property
    def leaves_out(self) -> bool:
        """Whether a micro-batch was left out."""
        return self._micro_batches.are_left_out

    def _samples_and_tokens(self, number: int) -> tuple[int | None, int | None]:
        """What a step is made of. The loader knows best how many samples; models may read a part of a batch, or a batch twice."""
        ends = [0, *self.events.batches] if len(self.events.batches) < 2 else self.events.batches
        read = self.host.batches[ends[number] : ends[number + 1]]
        read_samples = sum(samples for samples, _ in read)
        tokens = sum(tokens for _, tokens in read)
        samples = self.loaders.samples_per_step or read_samples
        return samples or None, (samples * tokens // read_samples or None) if read_samples else None

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

    def _recording(self) -> Recording:
        """What was recorded, with what loops that were cut short would hold besides."""
        lasting = self._lasting()
        ops = self._recorder.ops
        lives = self._recorder.lives()
        looked_until = self.events.steps[:5][-1]
        kept = [loop.missing(ops, lives, looked_until) for loop in self.loaders.loops]
        grows = (
            loop.trains and math.isinf(loop.most_held) and found for loop, found in zip(self.loaders.loops, kept, strict=True)
        )
        if any(grows):
            self._traits.unmodelled.add(KEPT)
        kept += [loop.missing(ops, lives, 0) for loop in self.generations.loops]
        lives += itertools.chain(*kept)
        return Recording(ops, lives, lasting, self.events, self.host.left_at, self.loaders.first_ended_at)

    def _graph(self, recording: Recording, mode: Mode, span: Span, *, on_device: bool = False) -> OpGraph:
        ops, storages = recording.cut(span)
        precision = self._traits.precision
        if precision == "fp32":  # adapters, norms and the head may be in it, beside a model in half precision or quantized
            precision = _HALF.get(getattr(torch, dtype_of_most_arithmetic(ops) or "float32", torch.float32), "fp32")
        options = tuple(
            name
            for name, is_on in (
                ("cudnn_benchmark", torch.backends.cudnn.benchmark),
                ("compiled", self._traits.is_compiled),
                ("batch-on-device", on_device),
            )
            if is_on
        )
        return OpGraph(
            ops=ops,
            storages=storages,
            mode=mode,
            precision=precision,
            layout="nhwc" if self._traits.is_channels_last else "nchw",
            options=options + self._ranks.options(self._roots.values()) + tf32_options(precision, tf32_switches()),
            unmodelled=(
                *unmodelled(
                    target_of(self._device),
                    {op.name for op in ops},
                    precision=precision,
                    compiled=self._traits.is_compiled,
                    compiled_parts=self._traits.compiled_parts,
                ),
                *self._ranks.unmodelled(self._roots.values()),
                *self._recorder.selections.assumed,
                *((GROUPED_PRODUCTS,) if self._paths.has_grouped_products else ()),
                *((GENERATED,) if mode == "train" and self.generations.are_cut(span.begin, span.end) else ()),
                *(gap for gap in (PAGED_STATES, HOST_OPTIMIZER, LBFGS, KEPT, DATA_PARALLEL) if gap in self._traits.unmodelled),
            ),
        )
