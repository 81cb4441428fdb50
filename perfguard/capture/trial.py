"""Objective → CapturedTrial: one step of what a trial would run, seen by running it where nothing is computed.

The user's code runs on the stage of `stage.py` for three optimizer steps, one evaluation, and one step of each later epoch. From
the recording of all of it, the second step is cut out. Its graph is that of the same step when it is described by a Workload.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import math
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.modules.module as hooks
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from perfguard.capture import stage
from perfguard.capture.stage import HostTensors, LoaderEvent, Placement, longest_batch, put_on_meta, replace_by_meta, staged
from perfguard.exceptions import CaptureError
from perfguard.graph.kernels import DevicePaths, target_of
from perfguard.graph.op import Op, Phase, Storage, StorageKind
from perfguard.graph.opgraph import OpGraph
from perfguard.graph.recorder import Life, Recorder, kind_by_lifetime, tensors_in
from perfguard.graph.selections import GROUPED_PRODUCTS
from perfguard.graph.trace import tracing, unmodelled
from perfguard.pytorch import compiled_parts, is_compiled, module_inside, path_inside, random_numbers_kept
from perfguard.workload import CapturedTrial, Mode, tf32_options, tf32_switches

if TYPE_CHECKING:
    from perfguard.devices import Device

_HALF = {torch.float16: "fp16", torch.bfloat16: "bf16"}


_OF_LOADERS = (Path(__file__), Path(stage.__file__), Path(dataloader.__file__))
_MOST_SECONDS_SPARED = 1.0
"""For how long batches that show nothing new are given all the same, before the first step, and after the third."""
_MOST_STEPS_ALONE = 20
"""Steps of one optimizer after which another that was made is not waited for: some are never stepped."""


class _Enough(BaseException):
    """Ends the objective when all has been seen."""


def capture(run: Callable[[], object], device: Device, *, most_seconds: float = 5.0) -> CapturedTrial:
    """Run an objective without computing anything, and return what its trial would run on ``device``.

    It replaces parts of PyTorch while it runs, and leaves behind what the objective leaves behind. So call it in a process of its
    own, as :class:`perfguard.capture.DryRuns` does.

    Args:
        run: the objective, without arguments.
        device: the guarded device.
        most_seconds: how long to look for the end of the trial after its first evaluation.

    Raises:
        CaptureError: if the objective makes no optimizer step, or raises an error before its second.
        TooLargeError: if a tensor of it has more bytes than PyTorch can count.
    """
    target = target_of(device)
    watch = _Watch(device, DevicePaths(target), most_seconds)
    with ExitStack() as stack:
        stack.enter_context(random_numbers_kept(beside_threads=True))
        stack.enter_context(tracing(target, makes_on=None))
        stack.enter_context(staged(device, watch.load))
        watch.enter(stack)
        try:
            run()
        except _Enough:
            pass
        except Exception as error:
            if len(watch.marks) < 2:
                raise
            watch.unseen = watch.unseen or f"{type(error).__name__}: {error}"
    return watch.captured()


@dataclass(slots=True, eq=False)
class _Pass:
    """One pass over a loader."""

    begins_at: int = 0
    """Number of operators before it."""
    num_batches: int = 0
    num_used: int = 0
    """Batches that the steps so far have used."""
    feeds: bool = False
    """Whether a step was made with its batches."""
    evaluates: bool = False
    """Whether a model has read its batches without gradients."""


def _gives_without_end() -> bool:
    """Whether a loader begins again because it ended, in `except StopIteration`, or in a loop of a generator."""
    if isinstance(sys.exc_info()[1], StopIteration):
        return True
    frame: Any = sys._getframe(1)
    while frame is not None and Path(frame.f_code.co_filename) in _OF_LOADERS:
        frame = frame.f_back
    if frame is None or not frame.f_code.co_flags & inspect.CO_GENERATOR:
        return False
    jumps = (item for item in dis.get_instructions(frame.f_code) if item.opname.startswith("JUMP_BACKWARD"))
    return any(jump.argval <= frame.f_lasti < jump.offset for jump in jumps)


class _Watch:
    """Follows an objective: where its steps end, which loader feeds them, and what its model is."""

    def __init__(self, device: Device, paths: DevicePaths, most_seconds: float) -> None:
        self._device = device
        self._paths = paths
        self._modules: list[str] = []
        self._recorder = Recorder(self._modules)
        self._host = HostTensors(device, self._recorder)
        self._placement = Placement(device, self._recorder, self._host)
        self._most_seconds = most_seconds
        self._ends_at = math.inf
        self.unseen = ""
        """Why the objective's end was not seen."""
        self.marks: list[int] = []
        """Number of operators at the end of each step."""
        self._copies: list[int] = []
        """Number of tensors copied to the device, likewise."""
        self._used: list[int] = []
        """Batches that each step has used."""
        self._made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """The optimizers."""
        self._stepped: dict[int, int] = {}
        """Steps of each optimizer, by its id, in the order of their first steps."""
        self._roots: dict[int, nn.Module] = {}
        """The models: outermost modules with parameters."""
        self._paths_of: dict[int, str] = {}
        self._depth = 0
        self._passes: dict[int, _Pass] = {}
        """The latest pass over each loader, by its id."""
        self._giving: list[Any] = []
        """Loaders that have given a batch since the last step, and have not ended."""
        self._trainer: Any = None
        """The loader that feeds the steps."""
        self._epochs = 0
        """Passes that have fed a step."""
        self._num_unfed = 0
        """Steps since a loader has given a batch."""
        self._counts_steps = False
        """Whether the objective ends after a number of steps, and begins its loader again as often as it must."""
        self._spared_until = math.inf
        """Until when batches that show nothing new are given all the same."""
        self._was_cut = False
        """Whether the first epoch was cut short."""
        self._steps_of_first: int | None = None
        """Steps of the first epoch, if it came to its own end."""
        self._evaluation: tuple[int, int] | None = None
        """First and last operator of the evaluation after the first epoch."""
        self._evaluates = False
        self._longest = ""
        """Name of the longest batch. Empty: all are alike, as far as one can see."""
        self._longest_batches: list[Any] = []
        """Batches of the step of the longest one, that are still to be given."""
        self._precision = "fp32"
        self._channels_last = False
        self._compiled = False
        self._parts: list[str] = []

    def enter(self, stack: ExitStack) -> None:
        """Register what follows the objective, and enter the modes."""
        stack.callback(hooks.register_module_forward_pre_hook(self._enter_module).remove)
        stack.callback(hooks.register_module_forward_hook(self._leave_module, always_call=True).remove)
        stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        for owner, name, change in (
            (torch.optim.Optimizer, "zero_grad", self._as_optimizer),
            (nn.Module, "zero_grad", self._as_optimizer),
            (torch.optim.Optimizer, "__init__", self._noting_optimizers),
        ):
            own = getattr(owner, name)
            stack.callback(setattr, owner, name, own)
            setattr(owner, name, change(own))
        stack.enter_context(self._recorder)
        stack.enter_context(self._host)
        stack.enter_context(self._paths)
        stack.enter_context(self._placement)

    # --- Modules ----------------------------------------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0 and id(module) not in self._paths_of:
            put_on_meta(module)
            for name, part in (*module.named_modules(), *module_inside(module).named_modules()):
                self._paths_of[id(part)] = path_inside(name)
        self._modules.append(self._paths_of.get(id(module), ""))
        is_model = any(True for _ in module.parameters(recurse=not self._depth))
        if self._depth or is_model:
            self._depth += 1
        kind = "cpu" if self._device.kind == "cpu" else "cuda"
        if torch.is_autocast_enabled(kind) and torch.is_grad_enabled():
            self._precision = f"amp-{_HALF.get(torch.get_autocast_dtype(kind), 'bf16')}"
        if self._depth == 1:
            self._begin_forward(module, args)

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        self._placement.in_forward = self._host.in_forward = True
        self._evaluates = not torch.is_grad_enabled()
        if not self._roots:
            self._spared_until = time.monotonic() + _MOST_SECONDS_SPARED
        if self._evaluates:
            for loader in self._giving:
                self._passes[id(loader)].evaluates = True
        if id(module) not in self._roots and not self._paths_of[id(module)]:  # checkpointing runs parts of models
            self._roots[id(module)] = module_inside(module)
            self._compiled |= is_compiled(module)
            self._parts += compiled_parts(module)
        images = [tensor for tensor in tensors_in(args) if tensor.dim() == 4]
        last = torch.channels_last
        self._channels_last |= any(x.is_contiguous(memory_format=last) and not x.is_contiguous() for x in images)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._placement.in_forward = self._host.in_forward = False

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [named for root in self._roots.values() for named in root.named_parameters()]

    # --- Steps ------------------------------------------------------------------------------------------------------------------

    def _as_optimizer(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            with self._recorder.in_phase(Phase.OPTIMIZER):
                return own(*args, **kwargs)

        return zero_grad

    def _noting_optimizers(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            own(optimizer, *args, **kwargs)
            self._made.add(optimizer)

        return __init__

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.dim() and not value.is_meta:
                    replace_by_meta(value)
        closure = kwargs.pop("closure", None) or next((item for item in args if callable(item)), None)
        if closure is None:
            self._begin_update()
            return None

        def closed() -> Any:
            self._recorder.phase = None
            try:
                return closure()
            finally:
                self._begin_update()

        return (optimizer, closed), kwargs

    def _begin_update(self) -> None:
        self._recorder.mark_gradients(self._named_parameters())
        self._recorder.phase = Phase.OPTIMIZER

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._recorder.phase = None
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        state = [(names.get(id(p), ""), value) for p, values in optimizer.state.items() for value in values.values()]
        self._recorder.mark(state, StorageKind.OPTIMIZER_STATE)
        if id(optimizer) not in self._stepped:
            self.marks, self._copies, self._used = [], [], []
        self._stepped[id(optimizer)] = self._stepped.get(id(optimizer), 0) + 1
        awaits = any(id(made) not in self._stepped for made in self._made) and max(self._stepped.values()) < _MOST_STEPS_ALONE
        if awaits or list(self._stepped)[-1] != id(optimizer):  # a step ends with the optimizer that begins last
            return
        if len(self.marks) < 4:  # what is left behind later is in no step that is looked at
            gc.collect()
        self.marks.append(len(self._recorder.ops))
        self._copies.append(self._host.num_copies)
        self._note_batches()
        if len(self.marks) == 3:
            self._spared_until = time.monotonic() + _MOST_SECONDS_SPARED
            self._ends_at = time.monotonic() + self._most_seconds
        if self._trainer is None and time.monotonic() > self._spared_until:
            self._end("its batches do not come from a DataLoader, so its steps are not counted")
        if time.monotonic() > self._ends_at:
            self._end(f"its epochs take more than {self._most_seconds:g} s to dry-run, so they are not counted")

    def _end(self, why: str) -> None:
        self.unseen = why  # the objective may catch what ends it
        raise _Enough(why)

    # --- Loaders ----------------------------------------------------------------------------------------------------------------

    def load(self, loader: Any, event: LoaderEvent) -> Any:
        """Follow a loader that begins, is asked for a batch, has given it, or has ended. Cut short what shows nothing new.

        Returns:
            A batch in the place of the loader's own. None: it gives its own.
        """
        if event == "begins":
            before = self._passes.get(id(loader))
            self._counts_steps |= before is not None and before.feeds and _gives_without_end()
            self._passes[id(loader)] = _Pass(len(self._recorder.ops))
            self._evaluates = False
        latest = self._passes.setdefault(id(loader), _Pass())
        if event == "gave":
            latest.num_batches += 1
            if loader not in self._giving:
                self._giving.append(loader)
        elif event == "asked" and latest.feeds and self._epochs == 1 and (batch := self._longest_batch(loader)) is not None:
            return batch
        elif event != "asked" or self._shows_nothing_new(latest):
            self._giving = [other for other in self._giving if other is not loader]
            if event == "asked":
                raise StopIteration
        return None

    def _longest_batch(self, loader: Any) -> Any:
        """After three steps, one more is made of the longest batch, unless all are alike. None: that is over."""
        if len(self.marks) == 3 and not self._longest_batches:
            self._longest, batch = longest_batch(loader)
            self._longest_batches = [] if batch is None else [batch] * self._batches_per_step
        return self._longest_batches.pop() if self._longest_batches and len(self.marks) == 3 else None

    def _shows_nothing_new(self, latest: _Pass) -> bool:
        """Whether the next batch of a pass is not needed. For a while all are given: a metric may ask for all outputs."""
        if latest.feeds and self._epochs > 1:
            return len(self.marks) >= 3 and latest.num_batches >= self._batches_per_step
        if latest.feeds:
            cuts = len(self.marks) >= 3 and time.monotonic() > self._spared_until
            self._was_cut |= cuts
            return cuts
        return self._evaluates and latest.num_batches >= 2 and time.monotonic() > self._spared_until

    def _note_batches(self) -> None:
        """A step has ended. Of several loaders, the one that was asked first feeds it: it is that of the loop."""
        likely = sorted(self._giving, key=lambda loader: (not self._passes[id(loader)].feeds, self._passes[id(loader)].evaluates))
        loader = likely[0] if likely else self._trainer
        self._giving.clear()
        self._num_unfed = 0 if likely else self._num_unfed + 1
        self._trainer = loader if self._trainer is None else self._trainer
        if loader is None:
            return
        latest = self._passes[id(loader)]
        self._used.append(latest.num_batches - latest.num_used)
        # itertools.cycle keeps what it was given. So do those who fetch ahead, for a few steps.
        self._counts_steps |= self._num_unfed > 5 and 0 not in self._used[:3]
        latest.num_used = latest.num_batches
        if not latest.feeds:
            latest.feeds = True
            if self._epochs == 1:
                self._end_first_epoch(latest.begins_at, self._num_steps - 1)
            self._epochs += 1

    @property
    def _num_steps(self) -> int:
        """Steps so far, those among them that were not taken for whole ones."""
        return next(reversed(self._stepped.values()), 0)

    @property
    def _batches_per_step(self) -> int:
        return max(1, statistics.median_high(self._used[:3]))  # the first or the last step of an epoch may be another

    def _end_first_epoch(self, at: int, num_steps: int) -> None:
        """Note the steps of the first epoch, and what was computed after the last of them, up to the operator ``at``."""
        self._steps_of_first = None if self._was_cut else num_steps - bool(self._longest)
        ops = self._recorder.ops
        begin = 1 + max((index for index, op in enumerate(ops[:at]) if op.phase is not Phase.FORWARD), default=-1)
        if any(op.module for op in ops[begin:at]):
            self._evaluation = begin, at

    # --- The result -------------------------------------------------------------------------------------------------------------

    def captured(self) -> CapturedTrial:
        """Return what was seen.

        Raises:
            CaptureError: if there was no step.
        """
        if not self.marks:
            raise CaptureError("The objective made no step of a torch optimizer. Describe what it runs: build=...")
        begin, end = (self.marks[0], self.marks[1]) if len(self.marks) > 1 else (self._first_forward(), self.marks[0])
        after = self.marks[2] if len(self.marks) > 2 else None
        copies = self._copies[1] - self._copies[0] if len(self._copies) > 1 else self._copies[0]
        training = self._graph("train", begin, end, after, on_device=not copies and self._device.kind == "cuda")
        if self._epochs < 2:
            self._was_cut |= bool(self.unseen)
            self._end_first_epoch(len(self._recorder.ops), self._num_steps)
        phases: dict[str, OpGraph] = {}
        if self._evaluation is not None:
            phases["the evaluation"] = self._graph("infer", *self._evaluation)
        if self._longest and len(self.marks) > 3:
            phases[self._longest] = self._graph("train", self.marks[2], self.marks[3])
        per_epoch = self._steps_per_epoch()
        steps = None
        if not self.unseen:
            steps = self._num_steps
            if steps >= 3 and self._trainer is not None and not self._counts_steps:
                steps = None if per_epoch is None else per_epoch * self._epochs
        return CapturedTrial(training, phases, per_epoch, steps, self.unseen)

    def _steps_per_epoch(self) -> int | None:
        if 0 in self._used[:3]:  # several steps for a batch
            return None
        if self._trainer is not None and self._steps_of_first and not self._counts_steps:
            return self._steps_of_first
        try:
            return max(1, math.ceil(len(self._trainer) / self._batches_per_step))
        except (TypeError, NotImplementedError):  # there is no loader, or it streams
            return None

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
            for name, tensor in named:
                if tensor.is_meta:
                    found.setdefault(self._recorder.index_of(tensor), (kind, name))
        return found

    def _graph(self, mode: Mode, begin: int, end: int, after: int | None = None, *, on_device: bool = False) -> OpGraph:
        ops, storages = _cut(self._recorder.ops, self._recorder.lives(), self._lasting(), begin, end, after)
        precision = self._precision
        dtypes = [p.dtype for _, p in self._named_parameters()]
        if precision == "fp32" and dtypes and all(dtype in _HALF for dtype in dtypes):
            precision = _HALF[dtypes[0]]
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
            options=options + tf32_options(precision, tf32_switches()),
            unmodelled=(
                *unmodelled(
                    target_of(self._device),
                    {op.name for op in ops},
                    precision=precision,
                    compiled=self._compiled,
                    compiled_parts=self._parts,
                ),
                *self._recorder.selections.assumed,
                *((GROUPED_PRODUCTS,) if self._paths.has_grouped_products else ()),
            ),
        )


def _cut(
    ops: list[Op], lives: list[Life], lasting: Mapping[int, tuple[StorageKind, str]], begin: int, end: int, after: int | None
) -> tuple[tuple[Op, ...], tuple[Storage, ...]]:
    """Cut operators ``begin`` to ``end`` out of a recording as one step of a loop, with indices of their own.

    What the step before has left is not cut out: it is the same as what this step leaves to the next one, which ends at
    ``after``.
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
        if index in place:
            rows.append(((0, place[index]), index, Storage(life.num_bytes, lasting[index][0], -1, number, name)))
        elif birth >= number or death < 0 or (birth < 0 and death < number):
            continue
        elif kind is StorageKind.INPUT and (birth >= 0 or death >= number):
            same, until = latest.get((name, life.num_bytes), (index, -1))
            latest[name, life.num_bytes] = same, death
            if same != index and until < birth:  # the next micro-batch takes the place of the last
                alias[index] = same
                continue
            rows.append(((1, index), index, Storage(life.num_bytes, kind, -1, number - 1, name)))
        elif birth < 0:  # it outlives steps
            kind = StorageKind.BUFFER if kind is None else kind
            rows.append(((order.get(kind, 5), index), index, Storage(life.num_bytes, kind, -1, number, path_inside(name))))
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
