"""The stage of a dry run: the user's own code runs on it unchanged, and nothing reaches the device.

What belongs on the device is on meta, and the rest of the program is real:

    parameters and buffers      on meta from their making on; those of a model made earlier, at its first forward pass
    `.to("cuda")`, `.cuda()`    on meta
    a batch from a loader       real, read by the process itself; a twin on meta stands for it where an operator meets it
    `.cpu()`, `.numpy()`        zeros; of labels, lengths and masks, and of what follows from them, their values (`values.py`)
    `.item()`, `if loss > 0`    next to 0, and what holds for that, likewise

So the same modes that trace a described workload (:class:`DevicePaths`, :class:`Recorder`) see the user's step.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.utils.checkpoint
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from perfguard.capture.blanks import Blanks, on_meta, written_by, zeros_on_host
from perfguard.capture.collated import Batches
from perfguard.capture.cuda import missing_functions, pretend_cuda
from perfguard.capture.deepspeed_engine import deepspeed_on_meta
from perfguard.capture.descriptions import describing
from perfguard.capture.fastai_learner import follow_fastai
from perfguard.capture.few_samples import FewSamples
from perfguard.capture.host import HostUse
from perfguard.capture.places import answers_of, asked_by, cuda_type_named, cuda_types
from perfguard.capture.ranks import is_collective, run_collective, run_foreach
from perfguard.capture.replay import Replay
from perfguard.capture.stops import place_of_user
from perfguard.capture.trainers import follow_trainers
from perfguard.capture.values import Values
from perfguard.exceptions import CaptureError, TooLargeError
from perfguard.graph.arguments import argument_of
from perfguard.graph.kernels import without_overrides
from perfguard.graph.libraries import libraries_on_meta, replacing, trl_on_meta
from perfguard.graph.op import Phase, StorageKind
from perfguard.graph.recorder import Recorder, operator_of, tensors_in
from perfguard.graph.shape_rules import META, empty_twin
from perfguard.quantities import format_bytes

if TYPE_CHECKING:
    from perfguard.capture.loaders import Loaders
    from perfguard.capture.loops import Generations
    from perfguard.devices import Device

LoaderEvent = Literal["begins", "asked", "gave", "ended"]
aten = torch.ops.aten


class HostTensors(TorchDispatchMode):
    """Stands between the user's code and the recorder where tensors of the host meet those of the device.

    Args:
        device: the guarded device.
        recorder: gets the twins of what is copied to the device, as inputs of the step.
        blanks: decides which tensors of the host have no data. None: by its defaults.
    """

    def __init__(self, device: Device, recorder: Recorder, blanks: Blanks | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_cpu = device.kind == "cpu"
        self._most_kept_bytes = device.memory_bytes if self._is_cpu else None
        """The most bytes that tensors of the host may have. None: nobody knows, because the host of a GPU may be another."""
        self.recorder = recorder
        self._twins: weakref.WeakKeyDictionary[Any, dict[Any, torch.Tensor]] = weakref.WeakKeyDictionary()
        """Of tensors of the host that operators of the device have read: by their storage, and by their place in it."""
        self.num_copies = 0
        """Tensors that were copied to the device."""
        self.left_at: list[int] = []
        """Numbers of operators at which a model has left the device."""
        self.in_forward = False
        """Whether a model computes. What it reads of a batch are the inputs."""
        self.awaits_batch = False
        """Whether the model that computes has read nothing of a batch yet."""
        self.batches: list[tuple[int, int]] = []
        """Samples and tokens of what each pass of a model has read first of a batch. 0 tokens: it is no text."""
        self._unread: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        """Storages of a batch that no model has read yet."""
        self.values = Values()
        self.use = HostUse()
        self.blanks = Blanks() if blanks is None else blanks
        self.on_copied: Callable[[torch.Tensor, torch.Tensor], object] = lambda *_: None
        """Called with a tensor of the device and its copy there, if neither a model nor an optimizer makes it."""

    def restored(self, source: torch.Tensor) -> torch.Tensor:
        """Return the twin on the device of a tensor of a file."""
        twin = empty_twin(source)
        if not source.is_meta:
            self.values.remember(twin, source)
        self.recorder.index_of(twin, name="torch.load")
        self.recorder.record(aten._to_copy.default, (torch.empty(0, device="cpu"),), {}, twin)  # at which it is alive
        return twin

    def __torch_dispatch__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types_ and any(hasattr(kind, "__tensor_flatten__") for kind in types_):
            # Otherwise a DTensor calls back with the part of this process, and a quantized tensor with its codes.
            return run_foreach(func, args, kwargs or {})
        with torch._C.DisableTorchFunction():  # what is asked of a tensor here is not the user's, as in the recorder
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _is_composite(func):  # autograd takes these apart before, but not for tensors of inference mode
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        given = tensors_in((args, kwargs))
        if _is_meta_device(kwargs.get("device")):
            _refuse_sparse(kwargs.get("layout"))
        if kwargs.get("pin_memory"):  # there may be no GPU for it, and a process that was forked may not use one
            kwargs = {**kwargs, "pin_memory": False}
        if any(tensor.is_cuda for tensor in given):  # it was on the device before the dry run began
            args = self._with_twins(args)
            kwargs = self._with_twins(kwargs)
            given = tensors_in((args, kwargs))
        if not any(tensor.is_meta for tensor in given):
            found = self._run_beside(func, args, kwargs, given)
            if found is not _GO_ON:
                return found
        if is_collective(func):
            return run_collective(self.recorder, func, args, kwargs)
        rule = _OPERATOR_RULES.get(func)
        if rule is not None and (found := rule(self, func, args, kwargs)) is not _GO_ON:
            return found
        func, args, kwargs = self._as_on_device(func, args, kwargs)
        writes_to_host = bool(operator_of(func).writes) and isinstance(args[0], torch.Tensor) and not args[0].is_meta
        if writes_to_host and all(self.values.are_known(tensor) for tensor in given if tensor.is_meta):
            return func(*tree_map_only(torch.Tensor, self.values.read, args), **kwargs)  # a permutation, for instance
        if any(not tensor.is_meta and tensor.dim() for tensor in given) and func not in _READING_LENGTHS:
            args = self._with_twins(args)
            kwargs = self._with_twins(kwargs)
        if self.in_forward and self._unread:
            self._note_inputs(tensors_in((args, kwargs)))
        return self.values.run(func, args, kwargs, self.recorder.record)

    def _run_beside(self, func: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor]) -> Any:
        """Run an operator that reads nothing of the device, unless it is work of the guarded CPU."""
        makes_on_device = _is_meta_device(kwargs.get("device"))
        if func is aten._to_copy.default and makes_on_device:
            return self._copied(args[0], kwargs)
        computes = func.namespace == "aten" and not func.is_view and func is not aten._local_scalar_dense.default
        if computes and self.use.has_offloaded(given):
            return self._of_offloaded(func, args, kwargs)
        if not given and makes_on_device:
            return self.values.run(func, args, kwargs, self.recorder.record)
        is_work = self._is_cpu and self.in_forward and any(x.dim() and x.is_floating_point() for x in given)
        return _GO_ON if is_work else self._on_host(func, args, kwargs, given)

    def read_number(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the value of `x.item()`."""
        return self.values.read(args[0]).item() or self.recorder.selections.are_some(args[0])

    def compare(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compare two tensors, which are equal if their values are known and are."""
        return all(map(self.values.are_known, args[:2])) and func(*map(self.values.read, args[:2]), *args[2:], **kwargs)

    def copy_back(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what the host gets of a tensor of the device."""
        if not args[0].is_meta or getattr(kwargs.get("device"), "type", "meta") == "meta":
            return _GO_ON
        found = self._come_back(args[0], kwargs.get("dtype") or args[0].dtype)
        return self.use.keep(found, is_pinned=kwargs.get("non_blocking", False))  # PyTorch pins where it need not wait

    def embed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Look up rows of a table whose gradient is dense. How many rows a sparse one has is a value."""
        if argument_of(func, args, kwargs, "sparse") and args[0].is_meta and args[0].requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                f"The embedding at {place_of_user()} has sparse gradients, whose size is a value that no dry run knows: make it "
                "with sparse=False and another optimizer than SparseAdam, or describe what trials run: build=..."
            )
        return _GO_ON

    def copy_beside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a copy on the device."""
        if not args[0].is_meta:
            return _GO_ON
        copied = self.values.run(func, args, kwargs, self.recorder.record)
        if not self.in_forward and self.recorder.phase is None:
            self.on_copied(args[0], copied)
        return copied

    def copy_into(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy to the host, or to its place on the device at once, as the weights of a file."""
        if not args[0].is_meta:
            return self.use.keep(args[0])
        return _GO_ON if args[1].is_meta else self.values.run(func, args, kwargs, self.recorder.record)

    def _as_on_device(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Return the operator and its arguments as kernels of the device get them."""
        if func is aten.index.Tensor:
            return func, (args[0], [part for index in args[1] for part in self._positions(index)]), kwargs
        if func is aten._ctc_loss.Tensor:  # its kernel reads the lengths
            lengths = (self.values.read(x).tolist() for x in args[2:4])
            return aten._ctc_loss.default, (*args[:2], *lengths, *args[4:]), kwargs
        if func._schema.name.startswith("aten::_fused_") and type(args[0]) is list:  # an optimizer; it refuses meta
            parameters, gradients, *state = (list(item) for item in args if type(item) in (list, tuple))
            return torch.ops.perfguard.fused_optimizer_.default, (parameters, gradients, [*itertools.chain(*state)]), {}
        return func, args, kwargs

    def _note_inputs(self, given: Sequence[torch.Tensor]) -> None:
        """Note which tensors of a batch a model reads, and how many samples and tokens the first of them has."""
        for tensor in given:
            if not tensor.is_meta or tensor.untyped_storage() not in self._unread:
                continue
            del self._unread[tensor.untyped_storage()]
            self.recorder.mark([("inputs", tensor)], StorageKind.INPUT, anew=True)
            if self.awaits_batch and tensor.dim() > 1:  # DDP reads a list of its parameters
                self.awaits_batch = False
                is_text = tensor.dim() == 2 and not tensor.is_floating_point()
                self.batches.append((len(tensor), tensor.numel() if is_text else 0))

    def _on_host(self, func: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor]) -> Any:
        """Run an operator on the host. What is too large for it is blank."""
        if func is aten._local_scalar_dense.default and self.blanks.has(given):
            self.values.on_unknown()
        out, filled = self.blanks.run(func, args, kwargs, given)
        for tensor in filled:
            self._keep_blank(tensor)
        return out

    def blank(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the host without data in the shape and layout of one on meta."""
        made = self.blanks.make(like)
        self._keep_blank(made)
        return made

    def _keep_blank(self, tensor: torch.Tensor) -> None:
        self.use.keep(tensor)
        kept = self.use.kept_bytes
        if self._most_kept_bytes is not None and kept > self._most_kept_bytes:
            raise TooLargeError(f"Tensors of the trial do not fit into the memory: they have {format_bytes(kept)}.", kept)

    def _come_back(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what the host gets of a tensor of the device. It is blank if it is too large."""
        with _disable_current_modes():
            like = torch.empty_like(source, dtype=dtype, device=META)
        if self.values.are_known(source) or self.blanks.has_room_for(like.nbytes):
            return self.values.read(source).to(dtype)
        self.values.on_unknown()
        return self.blanks.make(like)

    def _of_offloaded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on the host, such as one of an optimizer. Nothing is computed and no memory taken."""
        try:
            out = on_meta(func, args, kwargs)
        except NotImplementedError:  # its result is a value
            return func(*args, **kwargs)
        if not operator_of(func).writes:
            return tree_map_only(torch.Tensor, self.use.offload, out)
        return None if out is None else written_by(func, args, kwargs)

    def _positions(self, index: Any) -> Sequence[Any]:
        """A mask with values selects as many as it says."""
        if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
            return (index,)
        if not index.is_meta:
            return index.nonzero().unbind(1)
        if not self.values.are_known(index):
            return (index,)
        positions = self._run(aten.nonzero.default, (index,), {})
        with _disable_current_modes():
            return positions.unbind(1)  # type: ignore[no-any-return]

    def _arrived(self, twin: torch.Tensor) -> torch.Tensor:
        self.recorder.mark([("targets", twin)], StorageKind.INPUT)
        self._unread[twin.untyped_storage()] = None
        return twin

    def _copied(self, source: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """A batch on its way to the device: where the trace of a workload begins, it is there already."""
        _refuse_sparse(source.layout)
        dtype = kwargs.get("dtype") or source.dtype
        layout = kwargs.get("memory_format") or torch.preserve_format
        twin = torch.empty_like(source, dtype=dtype, device=META, memory_format=layout)
        if not self.blanks.has([source]):
            self.values.remember(twin, source)
        if self.recorder.phase is Phase.BACKWARD or self.use.has_offloaded(source):  # an activation, or a shard
            self.recorder.index_of(twin)
            return twin
        self.num_copies += 1
        return self._arrived(twin)

    def _with_twins(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.is_meta or not (value.dim() or value.is_cuda) else self._twin(value)
        if type(value) in (tuple, list):
            return type(value)(map(self._with_twins, value))
        return {key: self._with_twins(item) for key, item in value.items()} if type(value) is dict else value

    def move(self, tensor: torch.Tensor) -> None:
        """Put a tensor of the host on the device. It stays the same object, unless something else holds on to it."""
        if tensor.is_meta or not tensor.is_floating_point() or not tensor.is_leaf or self.use.has_offloaded(tensor):
            return
        with _disable_current_modes(), torch._C.DisableTorchFunction(), suppress(RuntimeError):
            _set_data(tensor, self._twin(tensor))

    def with_gradients_on_device(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a backward pass with twins of gradients of the host, such as `torch.ones(4, 1)`."""

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.is_meta or tensor.requires_grad or not tensor.dim() else self._twin(tensor)

        if not any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            return args, kwargs
        return tree_map_only(torch.Tensor, twin, args), tree_map_only(torch.Tensor, twin, kwargs)

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        _refuse_sparse(tensor.layout)
        views = self._twins.setdefault(tensor.untyped_storage(), {})
        place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if place not in views:
            twin = views[place] = self._arrived(empty_twin(tensor))
            if tensor.numel() <= self.values.most_elements and not (tensor.is_cuda or self.blanks.has([tensor])):
                self.values.remember(twin, tensor.clone())  # a clone does not keep what the twin lives as long as
        return views[place]


_GO_ON = object()
"""What a rule returns that leaves the rest to the others."""
_OPERATOR_RULES: dict[Any, Callable[[HostTensors, Any, Any, Any], Any]] = {
    **dict.fromkeys((aten.embedding.default, aten._embedding_bag.default), HostTensors.embed),
    aten._local_scalar_dense.default: HostTensors.read_number,
    aten.equal.default: HostTensors.compare,
    aten.allclose.default: HostTensors.compare,
    aten._to_copy.default: HostTensors.copy_back,
    aten.clone.default: HostTensors.copy_beside,
    aten.copy_.default: HostTensors.copy_into,
}
"""What is answered in the place of an operator that reads something of the device."""


@functools.cache
def _is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether every device runs an operator as a series of others. `silu_backward`, for instance, has kernels of its own too."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), "CompositeImplicitAutograd") and not any(has(func.name(), key) for key in ("CPU", "CUDA"))


def _refuse_sparse(layout: torch.layout | None) -> None:
    if layout not in (None, torch.strided):
        raise CaptureError(
            f"A tensor of layout {layout} cannot be dry-run: PyTorch has no kernels of it without data. Add up over its indices "
            "(`index_add`, or an edge_index in PyTorch Geometric), or make it dense."
        )


_READING_LENGTHS = (aten._pack_padded_sequence.default, aten._pad_packed_sequence.default)


def _is_meta_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _is_gpu(value: Any) -> bool:
    """Whether it is or names a device of CUDA."""
    if type(value) is torch.device:
        return value.type == "cuda"
    return type(value) is str and (value == "cuda" or value.startswith("cuda:"))


def _is_named_by_user(device: Any) -> bool:
    """Whether it is meta and not ours, which is one object."""
    return device is not META and (device == "meta" if type(device) is str else getattr(device, "type", "") == "meta")


def _is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the device. The modes, which each question passes otherwise, do not see that one."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


@dataclass(slots=True)
class _Call:
    """A call of a function of PyTorch, which rules may change."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_read: bool
    """Whether a loader makes a batch. What it runs is no work of the device."""
    source: Any = field(init=False)
    """The first argument, if it is a tensor."""
    on_meta: bool = field(init=False)
    """Whether that is on the device."""

    def __post_init__(self) -> None:
        self.source = self.args[0] if self.args and isinstance(self.args[0], torch.Tensor) else None
        self.on_meta = self.source is not None and _is_meta(self.source)

    @property
    def needs_gradient(self) -> bool:
        """Whether it makes a tensor that needs a gradient."""
        is_asked = self.func is torch.Tensor.requires_grad_ and (*self.args, True)[1]
        return self.kwargs.get("requires_grad") is True or bool(is_asked)


class Placement(TorchFunctionMode):
    """Puts on meta what the user's code puts on the guarded device.

    Args:
        device: the guarded device.
        recorder: learns when a backward pass runs.
        host: knows the values of what was copied to the device.
        replay: says which backward passes are left out.
    """

    def __init__(self, device: Device, recorder: Recorder, host: HostTensors, replay: Replay) -> None:
        super().__init__()
        self._replay = replay
        self._recorder = recorder
        self._host = host
        self._is_cpu = device.kind == "cpu"
        self._said = torch.device("cpu") if self._is_cpu else torch.device("cuda", 0)
        self._answers = answers_of(self._said)
        self.on_backward: Callable[[Sequence[torch.Tensor], bool], object] = lambda *_: None
        """Called with the outputs from which a backward pass begins, and whether it adds to gradients that are there."""
        self.on_assigned: Callable[[torch.Tensor], object] = lambda _: None
        """Called with a tensor whose data are another tensor now."""
        self.has_shared = False
        """Whether the user's code has put a tensor of the device into shared memory."""
        self._names_gpu = False
        """Whether the user's code names a GPU. If not, it computes on the CPU, as on a machine without one: what needs a gradient
        there is on the guarded device."""
        self.in_forward = False
        """Whether a model computes. There, a tensor that is made on the CPU is on the guarded device, if that is the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types_: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = self._answers.get(asked_by(func))
        if answer is not None and len(args) == 1 and _is_meta(args[0]) and not self._recorder.is_forgotten(args[0]):
            return answer(args[0])
        if type(func) is types.MethodWrapperType:  # a property of a tensor, most of all calls
            return func(*args) if func.__name__ != "__set__" else self._set(func, *args)
        call = _Call(func, args, dict(kwargs or {}), is_read=not torch._C._len_torch_dispatch_stack())
        rule = _RULES.get(func)
        if rule is not None and (found := rule(self, call)) is not _GO_ON:
            return found
        names_meta = _is_named_by_user(call.kwargs.get("device"))
        self._read_where_mixed(call)
        self._place_call(call)
        self._place_what_is_made(call, sys._getframe(1))
        out = call.func(*call.args, **call.kwargs)
        if names_meta and out is not call.source and isinstance(out, torch.Tensor):
            self._recorder.forget(out)
        self._remember(call, out)
        return out

    def backward(self, call: _Call) -> Any:
        """Run a backward pass, unless it is left out."""
        returns = call.func is torch.autograd.grad
        if self._replay.skips_backward(returns=returns):
            return self._replay.backward(call.args, call.kwargs, returns=returns)
        if self._recorder.phase is not Phase.BACKWARD:
            self.on_backward(tensors_in(call.args[:1] or call.kwargs.get("outputs")), not returns)
        args, kwargs = self._host.with_gradients_on_device(call.args, call.kwargs)
        with self, self._recorder.in_phase(Phase.BACKWARD):  # checkpointing runs the user's forward pass again, FSDP gathers
            return _BACKWARD[call.func](*args, **kwargs)

    def value(self, call: _Call) -> Any:
        """Let a tensor of the device be read on the host."""
        if call.on_meta and (call.func in _VALUES or call.is_read):
            call.args = (self._host.values.read(call.source.detach()), *call.args[1:])
        return _GO_ON

    def device_named(self, call: _Call) -> Any:
        """Make `torch.device(0)`, which is a GPU also where PyTorch sees none."""
        names_gpu = not self._is_cpu and call.args and type(call.args[0]) is int
        return call.func("cuda", call.args[0]) if names_gpu else call.func(*call.args, **call.kwargs)

    def move_to_gpu(self, call: _Call) -> Any:
        """Let `x.cuda()` move it to the stage."""
        self._names_gpu = True
        call.func = torch.Tensor.to
        call.args = (call.source, META)
        call.kwargs = {}
        return _GO_ON

    def change_type(self, call: _Call) -> Any:
        """Let `x.type(torch.cuda.FloatTensor)` move it to the stage."""
        dtype = cuda_type_named(call.args[1] if call.args[1:] else call.kwargs.get("dtype"))
        if dtype is not None:
            call.func = torch.Tensor.to
            call.args = (call.source, META, dtype)
            call.kwargs = {}
        return _GO_ON

    def move_to_host(self, call: _Call) -> Any:
        """Leave a tensor where it is, if the host is the device."""
        return call.source if call.on_meta and self._is_cpu else _GO_ON

    def share(self, call: _Call) -> Any:
        """Leave a tensor without data where it is. On a GPU, all is shared."""
        self.has_shared |= call.on_meta
        return call.source if call.on_meta or self._host.blanks.has([call.source]) else _GO_ON

    def of_blank(self, call: _Call) -> Any:
        """Copy a tensor of the host that may have no data."""
        return _OF_BLANKS[call.func](*call.args) if self._host.blanks.has([call.source]) else _GO_ON

    def _read_where_mixed(self, call: _Call) -> None:
        """Let a loader read tensors of the device, such as buffers of a transform, where it works with those of the host too."""
        given = tensors_in((call.args, call.kwargs)) if call.is_read else ()
        if len(given) < 2:
            return
        with torch._C.DisableTorchFunction():
            places = {tensor.is_meta for tensor in given if tensor.dim()}
        if len(places) > 1:
            call.args = tree_map_only(torch.Tensor, self._host.values.read, call.args)
            call.kwargs = {**tree_map_only(torch.Tensor, self._host.values.read, call.kwargs)}

    def _place_call(self, call: _Call) -> None:
        """Put meta in the place of the guarded device, wherever it is named."""
        place = self._place_of_source if call.on_meta else self._place
        counts_gpus = call.func in _MOVES
        call.args = tuple([META if counts_gpus and type(item) is int else place(item) for item in call.args])
        if "device" in call.kwargs:
            device = call.kwargs["device"]
            call.kwargs["device"] = META if type(device) is int else place(device)

    def _place_what_is_made(self, call: _Call, caller: types.FrameType) -> None:
        """Put on meta what a ``caller`` makes on the guarded CPU, or with a gradient where nobody names a GPU."""
        makes = not call.is_read and call.func in _device_constructors()
        if makes and self._is_cpu and self._is_for_device(call.kwargs.get("device"), caller):
            call.kwargs["device"] = META
        if call.is_read or self._names_gpu or not call.needs_gradient:
            return
        if makes:
            call.kwargs["device"] = META
        elif call.source is not None:
            self._host.move(call.source)  # it is `requires_grad_`

    def _remember(self, call: _Call, out: Any) -> None:
        """Remember the values of a tensor of the device that is made of numbers, or of a tensor of the host in a loader."""
        if call.func in _FROM_DATA and out.is_meta and not tensors_in(call.args):  # sizes that several processes agree on
            with _disable_current_modes():
                self._host.values.remember(out, torch.tensor(*call.args, **{**call.kwargs, "device": "cpu"}))
        elif call.is_read and call.func is torch.Tensor.to and out.is_meta and not call.on_meta:  # a collate function moves it
            self._host.values.remember(out, call.source)

    def place_inputs(self, args: Any) -> None:
        """Put inputs of a model that need a gradient on the device, such as `Variable(x, requires_grad=True)`."""
        for tensor in () if self._names_gpu else tensors_in(args):
            if tensor.requires_grad:
                self._host.move(tensor)

    def placing_inputs(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Let the inputs of what `torch.func` transforms be on the device, where nobody names a GPU: they need gradients."""

        @functools.wraps(own)
        def transform(*args: Any, **kwargs: Any) -> Any:
            if not self._names_gpu:
                with temporarily_clear_interpreter_stack():  # or what is made is an input of the transform
                    for tensor in tensors_in((args, kwargs)):
                        self._host.move(tensor)
            return own(*args, **kwargs)

        return transform

    def _is_for_device(self, device: Any, caller: types.FrameType) -> bool:
        """Whether a tensor that ``caller`` makes on ``device`` is on the guarded CPU. None: none is named."""
        if caller.f_globals.get("__name__") in _ABOUT_RANKS:
            return False
        if self._recorder.phase is Phase.OPTIMIZER:  # it makes its states where a parameter is, and counts its steps on "cpu"
            return type(device) is torch.device and device.type == "cpu"
        return self.in_forward if device is None else torch.device(device).type == "cpu"

    def _set(self, func: Callable[..., Any], tensor: torch.Tensor, value: Any) -> Any:
        """Assign an attribute of a tensor."""
        if func == _SET_DATA:
            _set_data(tensor, value) if tensor.is_meta is not value.is_meta else func(tensor, value)
            self.on_assigned(tensor)
            return None
        if func == _SET_REQUIRES_GRAD and value and not self._names_gpu:
            self._host.move(tensor)
        return func(tensor, value)

    def _place(self, value: Any) -> Any:
        is_gpu = _is_gpu(value)
        self._names_gpu |= is_gpu and value is not self._said
        return META if is_gpu else value

    def _place_of_source(self, value: Any) -> Any:
        if self._is_cpu and (value == "cpu" if type(value) is str else type(value) is torch.device and value.type == "cpu"):
            return META
        return self._place(value)


_STARTING: tuple[Any, ...] = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_BACKWARD = {func: inner for func in _STARTING if (inner := without_overrides(func)) is not None}
"""What starts a backward pass, and the same without its check for overrides, which runs with this mode on."""
_MOVES = {torch.Tensor.to, torch._C._nn._parse_to}  # an integer is the number of a GPU


def _copy_without_data(source: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return a deep copy of a tensor without data. PyTorch would copy its storage."""
    copied: torch.Tensor = memo.setdefault(id(source), source.detach().clone().requires_grad_(source.requires_grad))
    return copied


_OF_BLANKS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.Tensor.__deepcopy__: _copy_without_data,
}
"""What functions do to a tensor that has no data."""
_VALUES = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__format__}
_FROM_DATA = {torch.tensor, torch.as_tensor}
_CONDITIONS = {torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__}
_RULES: dict[Any, Callable[[Placement, _Call], Any]] = {
    torch.device: Placement.device_named,
    **dict.fromkeys(_BACKWARD, Placement.backward),
    **dict.fromkeys((*_VALUES, *_CONDITIONS), Placement.value),
    torch.Tensor.cuda: Placement.move_to_gpu,
    torch.Tensor.type: Placement.change_type,
    torch.Tensor.cpu: Placement.move_to_host,
    torch.Tensor.pin_memory: lambda _, call: call.source,
    torch.Tensor.is_pinned: lambda _, call: _GO_ON if call.on_meta else True,
    **dict.fromkeys(_OF_BLANKS, Placement.of_blank),
    torch.Tensor.share_memory_: Placement.share,
    # Accelerate finds the optimizer's parameters again by it
    torch.Tensor.data_ptr: lambda _, call: call.source.untyped_storage()._cdata if call.on_meta else _GO_ON,
}
"""What is done to a call of a function, by the function: it is answered, or changed and goes on."""
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_ABOUT_RANKS = ("torch.distributed.device_mesh", "torch.distributed._mesh_layout")
"""Modules that make tensors of the numbers of ranks. These have values."""


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Assign `tensor.data` across devices, which PyTorch does not do to meta and back. What is on the stage stays there."""
    if tensor.is_meta:
        tensor.data = empty_twin(data)
        return
    kind = type(tensor)
    attributes = dict(vars(tensor))
    requires_grad = tensor.requires_grad
    torch.utils.swap_tensors(tensor, data.detach())
    tensor.__class__ = kind
    vars(tensor).update(attributes)
    tensor.requires_grad_(requires_grad)


def put_on_meta(tensors: Iterable[torch.Tensor]) -> None:
    """Replace parameters and buffers by tensors on meta. Each stays the same object, so its optimizer still has it."""
    for tensor in tensors:
        if not tensor.is_meta and not nn.parameter.is_lazy(tensor):
            replace_by_meta(tensor)


def replace_by_meta(tensor: torch.Tensor) -> None:
    """Replace ``tensor`` by one on meta that is the same object.

    Raises:
        CaptureError: if something else holds on to it.
    """
    if hasattr(tensor, "_local_tensor"):
        raise CaptureError("A model that was sharded before the trial cannot be dry-run. Make and shard it in the objective.")
    _refuse_quantized(tensor)
    twin = empty_twin(tensor)
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
    if tensor.grad is not None:
        twin.grad = empty_twin(tensor.grad)
    try:
        torch.utils.swap_tensors(tensor, twin)
    except RuntimeError as error:
        raise CaptureError(
            f"A parameter that was there before the dry run cannot be part of it ({error}). Make the model in the objective."
        ) from error


def _refuse_quantized(tensor: torch.Tensor) -> None:
    # The constants of bitsandbytes are not in the model, so they would stay behind. Others hold their codes within a tensor.
    if type(tensor).__module__.startswith("bitsandbytes") or hasattr(tensor, "__tensor_flatten__"):
        raise CaptureError("A model that was quantized before the trial cannot be dry-run. Load it in the objective.")


@contextmanager
def staged(device: Device, loaders: Loaders, host: HostTensors, generations: Generations) -> Iterator[None]:
    """Replace, for a dry run, what PyTorch would do on the host or ask of the device. In a process of its own: it is global.

    Args:
        device: the guarded device.
        loaders: follow each DataLoader as it begins, is asked for a batch, gave it, or has ended.
        host: learns what `torch.load` puts on the device, and when a model leaves it.
        generations: follows how text is generated.
    """
    with ExitStack() as stack:
        replace = replacing(stack)

        def follow_libraries() -> None:
            libraries_on_meta(replace)
            _refuse_flex_attention(replace)
            generations.follow(replace)
            if device.kind == "cuda":
                trl_on_meta(replace)
            follow_trainers(replace, loaders)
            follow_fastai(replace, loaders, host.recorder, _read_alone)

        follow_libraries()
        describing(replace)
        replace(DeviceContext, "__torch_function__", lambda _: _by_default_on_meta)
        replace(nn.Parameter, "__new__", _making_on_meta)
        for lazy in (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer):
            replace(lazy, "__new__", _making_lazy_on_meta)
        replace(nn.Module, "register_buffer", lambda own: _registering_on_meta(own, host.values))
        replace(nn.Module, "_apply", lambda own: _staying_on_meta(own, host))
        for owner in (nn.Module, torch.optim.Optimizer):  # libraries may be imported in the objective
            replace(owner, "__init__", lambda own: _following(own, follow_libraries))
        batches = Batches(host.blank)
        loaders.make_batch = batches.make
        few = FewSamples(loaders, batches, host.use.note_held)
        replace(DataLoader, "__iter__", lambda _: _single_process_iterator(loaders, few.follow))
        replace(_BaseDataLoaderIter, "__next__", lambda own: _reading_really(own, loaders, host.use))
        replace(RandomSampler, "__iter__", _drawing_of_many)
        replace(torch, "load", lambda own: _loading(own, host.restored, device.kind))
        replace(torch, "Generator", _of_the_host)
        replace(torch.distributions.Distribution, "_validate_args", lambda _: False)  # of values, all of which would be 0
        replace(torch.amp.GradScaler, "_maybe_opt_step", lambda _: _stepping_always)
        replace(torch.utils.checkpoint._CheckpointFrame, "check_recomputed_tensors_match", _within_pytorch)
        for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):  # as the device picks them
            module = __import__(name, fromlist=[""])
            for form in ("foreach", "fused") if device.kind == "cuda" else ("fused",):
                replace(module, f"_get_{form}_kernels_supported_devices", lambda own: lambda: [*own(), "meta"])
        if device.kind == "cuda":
            stack.enter_context(missing_functions())
            pretend_cuda(replace, device, lambda graph: loaders.state_steps(graph, None))
            cuda_types(replace)
            replace(torch.UntypedStorage, "data_ptr", _telling_apart)
            for name in ("to", "cuda"):
                replace(nn.Module, name, lambda own: _noting_moves(own, host.use))
        deepspeed_on_meta(replace, device.kind)
        yield


def _refuse_flex_attention(replace: Callable[..., None]) -> None:
    """Refuse it with a sentence. PyTorch compiles it as it is called, and that would end the process."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is not None and module._validate_device is not _refusing_flex_attention:
        replace(module, "_validate_device", lambda _: _refusing_flex_attention)


def _refusing_flex_attention(*_: Any) -> None:
    raise CaptureError(
        "flex_attention cannot be dry-run: PyTorch compiles it as it is called. Let the dry run take another attention, "
        "such as scaled_dot_product_attention with the same mask, or describe what trials run: build=..."
    )


def _by_default_on_meta(self: DeviceContext, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
    """After `torch.set_default_device("cuda")`, what names no device is on it; what a loader makes is real all the same."""
    kwargs = dict(kwargs or {})
    if func in _device_constructors() and kwargs.get("device") is None:
        is_read = not torch._C._len_torch_dispatch_stack()
        kwargs["device"] = self.device if self.device.type != "cuda" else torch.device("cpu") if is_read else META
    return func(*args, **kwargs)


def _making_on_meta(own: Any) -> Any:
    make = getattr(own, "__func__", own)

    def __new__(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) in (torch.Tensor, nn.Parameter) and not data.is_meta:
            with _disable_current_modes(), torch.no_grad():
                data = empty_twin(data)
        return make(cls, data, requires_grad)

    return staticmethod(__new__)


def _making_lazy_on_meta(own: Any) -> Any:
    make = getattr(own, "__func__", own)

    def __new__(cls: Any, requires_grad: bool = True, device: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
        return make(cls, requires_grad, META, dtype, **kwargs)

    return staticmethod(__new__)


def _registering_on_meta(own: Any, values: Values) -> Any:
    def register_buffer(self: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        if tensor is not None and not tensor.is_meta and type(tensor) is torch.Tensor:
            real = tensor
            tensor = empty_twin(tensor)
            if not real.is_floating_point() and real.numel() <= values.most_elements:  # a counter, or positions
                values.remember(tensor, real)
        own(self, name, tensor, persistent)

    return register_buffer


def _staying_on_meta(own: Any, host: HostTensors) -> Any:
    """A model that is moved to the host at the end of training has no values there, either."""

    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_meta and getattr(tensor, "bnb_quantized", False):
                _refuse_quantized(tensor)
            found = fn(tensor)
            if not tensor.is_meta or found.is_meta:
                return found
            if host.recorder.is_forgotten(tensor):  # it was made on "meta" by name; what `to_empty` makes takes memory
                return empty_twin(found)
            host.left_at.append(len(host.recorder.ops))
            return tensor.to(found.dtype)

        return own(self, moved, *args, **kwargs)

    return _apply


def _within_pytorch(own: Any) -> Any:
    """Run as a part of PyTorch. It compares places with those that its hooks saw, and these run within an operator."""

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return own(*args, **kwargs)

    return run


def _telling_apart(own: Any) -> Any:
    return lambda self: own(self) or self._cdata  # storages on meta have no address


def _noting_moves(own: Any, use: HostUse) -> Any:
    @functools.wraps(own)
    def moving(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if own.__name__ == "cuda" or any(str(where).startswith("cuda") for where in (*args, *kwargs.values())):
            use.move(self)
        return own(self, *args, **kwargs)

    return moving


def _following(own: Any, follow: Callable[[], object]) -> Any:
    @functools.wraps(own)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        follow()
        own(self, *args, **kwargs)

    return __init__


def _single_process_iterator(loaders: Loaders, follow: Callable[[Any, Any], object]) -> Any:
    def __iter__(self: Any) -> Any:
        loaders.load(self, "begins")
        iterator = _read_alone(self)
        iterator._loader = self
        loaders.begin(self, iterator)
        follow(self, iterator)
        return iterator

    return __iter__


def _read_alone(loader: Any) -> Any:
    """A dry run reads few batches, so no worker is started for them."""
    changed = {"num_workers": 0, "timeout": 0, "pin_memory": False}
    before = {name: getattr(loader, name) for name in changed}
    try:
        for name, value in changed.items():
            setattr(loader, name, value)
        with _disable_current_modes():
            return _SingleProcessDataLoaderIter(loader)
    finally:
        for name, value in before.items():
            setattr(loader, name, value)


def _reading_really(own: Any, loaders: Loaders, use: HostUse) -> Any:
    loaded: Callable[[Any, LoaderEvent], Any] = loaders.load
    stopwatch = loaders.stopwatch

    def __next__(self: Any) -> Any:
        loader = getattr(self, "_loader", None)
        if loader is None:
            raise CaptureError(
                "The objective reads from a DataLoader that was begun before the trial. Begin it in the objective."
            )
        instead = loaded(loader, "asked")
        try:
            with _disable_current_modes(), stopwatch.within("batches"):
                batch = own(self) if instead is None else instead
        except StopIteration:
            loaded(loader, "ended")
            raise
        loaded(loader, "gave")
        use.give(loader, batch)
        return batch

    return __next__


def _drawing_of_many(own: Any, *, most_listed: int = 2**22) -> Any:
    """The order of a large data set is a list of its numbers, which takes 40 bytes for each. A dry run needs few of them."""

    def __iter__(self: Any) -> Iterator[int]:
        number = len(self.data_source)
        if number <= most_listed:
            return own(self)  # type: ignore[no-any-return]
        return (random.randrange(number) for _ in range(self.num_samples))

    return __iter__


def _loading(own: Any, restored: Callable[[torch.Tensor], torch.Tensor], device_kind: str) -> Any:
    """Load a file on the host. What belongs on the device is on meta then, and is there a second time."""

    def load(f: Any, map_location: Any = None, *_: Any, **kwargs: Any) -> Any:
        found: set[int] = set()

        def is_on_device(location: str) -> bool:
            to = map_location.get(location, location) if isinstance(map_location, dict) else map_location or location
            return device_kind == "cuda" and str(to).startswith("cuda")  # a function mostly says: on the host

        def note(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
            if is_on_device(location):
                found.add(storage.data_ptr())
            return storage

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:  # it was saved in the dry run
                return restored(tensor) if device_kind == "cpu" or is_on_device("cuda:0") else zeros_on_host(tensor)
            return restored(tensor) if tensor.untyped_storage().data_ptr() in found else tensor

        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return tree_map_only(torch.Tensor, place, own(f, **{**kwargs, "map_location": note}))

    return load


def _of_the_host(own: Any) -> Any:
    """A generator of random numbers is one of the host: there are none on meta."""

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, own)

    class Generator(metaclass=Kind):
        def __new__(cls, device: Any = "cpu") -> Any:
            return own()

    return Generator


def _stepping_always(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Whether gradients overflow is a value; they seldom do."""
    return optimizer.step(*args, **kwargs)
