"""Workload → OpGraph, by running one step on the meta device and writing down what it launches.

Nothing is computed and nothing is allocated: meta tensors have shapes, dtypes and strides but no data. Autograd runs for real,
so the storages are born and die exactly as they would on the device; a weak reference to each says when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from perfguard.exceptions import PerfGuardError, TraceError
from perfguard.graph._attention import FusedAttention
from perfguard.graph._costs import attributes_of, flops_of, kind_of, launches_kernel
from perfguard.graph._meta import META, batch_on_meta, model_on_meta, optimizer_on_meta
from perfguard.graph._schema import Op, OpGraph, Phase, Storage, StorageKind
from perfguard.workload import Workload

_HELP = {
    "Tensor.item": "The forward pass reads a value from a tensor (`.item()`, `bool(tensor)`, `if tensor > 0`), so what it runs "
    "depends on the data. Move that out of the model, or describe a fixed case.",
    "aten::_local_scalar_dense": "The forward pass reads a value from a tensor (`.item()`, `bool(tensor)`), so what it runs "
    "depends on the data. Move that out of the model, or describe a fixed case.",
    "data-dependent": "What the forward pass runs depends on the data. Describe a fixed case.",
    "nonzero": "The forward pass selects by a mask, so shapes depend on the data. Describe a fixed case.",
    "Cannot copy out of meta tensor": "The forward pass copies a tensor to another device. Create tensors on `x.device`.",
    "numpy": "The forward pass leaves torch for numpy, which cannot be traced. Use torch operators.",
    "Expected all tensors to be on the same device": "A tensor was created on a fixed device inside the model. Create it on "
    "`x.device`, or register it as a buffer.",
    "is not on the expected device meta": "A tensor was created on a fixed device inside the model. Create it on "
    "`x.device`, or register it as a buffer.",
}


def trace(workload: Workload, *, target: str = "cuda") -> OpGraph:
    """Run one step of ``workload`` on the meta device and return what it would launch.

    The step that is traced is one in the middle of training: the optimizer's state exists, the gradients were set to None.
    The model must not be used by another thread meanwhile if its parameters are on meta; otherwise a copy is traced.

    Args:
        workload: what to trace.
        target: "cuda" or "cpu": which fused attention and which form of optimizer to assume.

    Raises:
        TraceError: if the step cannot be traced; the message names the module and what to do.
        WorkloadError: if the description itself is wrong.
    """
    # A guard must not move the user's random numbers, and a tensor that forward makes without a device belongs on meta.
    with torch.random.fork_rng(devices=[]), META:
        return _Tracer(workload, target).run()


class _Tracer:
    def __init__(self, workload: Workload, target: str) -> None:
        self._workload = workload
        self._target = target
        self._modules: list[str] = []

    def run(self) -> OpGraph:
        model = model_on_meta(self._workload)
        modes = {module: module.training for module in model.modules()}
        try:
            return self._step(model.train(self._workload.mode == "train"))
        finally:  # it may be the user's own
            model.zero_grad(set_to_none=True)
            for module, training in modes.items():
                module.training = training

    def _step(self, model: nn.Module) -> OpGraph:
        workload = self._workload
        inputs = batch_on_meta(workload.inputs, workload)
        targets = batch_on_meta(workload.targets, workload)
        optimizer = optimizer_on_meta(workload, model, target=self._target) if workload.mode == "train" else None

        recorder = _Recorder(self._modules)
        recorder.adopt(model.named_parameters(), StorageKind.PARAMETER)
        recorder.adopt(model.named_buffers(), StorageKind.BUFFER)
        recorder.adopt((("inputs", tensor) for tensor in _tensors(inputs)), StorageKind.INPUT)
        recorder.adopt((("targets", tensor) for tensor in _tensors(targets)), StorageKind.INPUT)
        if optimizer is not None:
            state = ((str(key), tensor) for per_parameter in optimizer.state.values() for key, tensor in per_parameter.items())
            recorder.adopt(state, StorageKind.OPTIMIZER_STATE)

        with self._tracked(model), FusedAttention(self._target), recorder:
            if optimizer is None:
                with torch.no_grad():
                    self._forward(model, inputs)
            else:
                for _ in range(workload.accumulation):
                    recorder.phase = Phase.FORWARD
                    loss = self._loss(self._forward(model, inputs), targets)
                    recorder.phase = Phase.BACKWARD
                    self._guarded(loss.backward)
                    del loss
                recorder.mark_gradients(model.named_parameters())
                recorder.phase = Phase.OPTIMIZER
                optimizer.step()
        return recorder.graph(workload)

    def _forward(self, model: nn.Module, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return self._guarded(lambda: model(**inputs))
        if isinstance(inputs, (tuple, list)):
            return self._guarded(lambda: model(*inputs))
        return self._guarded(lambda: model(inputs))

    def _loss(self, output: Any, targets: Any) -> torch.Tensor:
        if self._workload.loss is not None:
            make = self._workload.loss
            loss = self._guarded(lambda: make(output) if targets is None else make(output, targets))
        elif isinstance(output, Mapping):
            loss = output.get("loss")
        else:
            loss = getattr(output, "loss", output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TraceError(
                f"The loss must be a scalar tensor, but got {got}. Give Workload(loss=..., targets=...), "
                f"for instance loss=torch.nn.functional.cross_entropy."
            )
        if not loss.requires_grad:
            raise TraceError("The loss does not depend on any parameter that requires a gradient; there is nothing to train.")
        return loss

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PerfGuardError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            advice = next(
                (help_ for sign, help_ in _HELP.items() if sign in text), "Check the shapes given to Workload(inputs=...)."
            )
            where = f"in module {self._modules[-1]!r}" if self._modules and self._modules[-1] else "in the model"
            raise TraceError(f"The step cannot be traced, {where}: {text.splitlines()[0]}. {advice}") from error

    @contextmanager
    def _tracked(self, model: nn.Module) -> Iterator[None]:
        """Keep the path of the running module; after an error it stays where the error came from."""

        def leave_module(*_: Any) -> None:
            self._modules.pop()

        with ExitStack() as stack:
            for name, module in model.named_modules():
                enter = module.register_forward_pre_hook(lambda _m, _a, name=name: self._modules.append(name))
                leave = module.register_forward_hook(leave_module)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield


class _Recorder(TorchDispatchMode):
    """Writes down every operator, and the birth and death of every storage."""

    def __init__(self, modules: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = Phase.FORWARD
        self._modules = modules
        self._ops: list[Op] = []
        self._index_by_address: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes: list[int] = []
        self._kinds: list[StorageKind | None] = []
        self._births: list[int] = []
        self._deaths: list[int | None] = []
        self._names: list[str] = []
        self._birth_phases: list[Phase] = []
        self._unmodelled: dict[str, None] = {}

    def adopt(self, named_tensors: Any, kind: StorageKind) -> None:
        """Register what is there before the step."""
        for name, tensor in named_tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._storage_index(tensor, name=name, kind=kind, birth=-1)

    def mark_gradients(self, named_parameters: Any) -> None:
        """Call after the backward pass: what the parameters hold now are their gradients."""
        for name, parameter in named_parameters:
            if parameter.grad is not None:
                index = self._storage_index(parameter.grad)
                if self._kinds[index] is None:
                    self._kinds[index], self._names[index] = StorageKind.GRADIENT, name

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        inputs = [t for t in _tensors((args, tuple(kwargs.values()))) if t.is_meta]
        outputs = [t for t in _tensors(out) if t.is_meta]
        if func.is_view or not (inputs or outputs):
            return out
        read = tuple(dict.fromkeys(map(self._storage_index, inputs)))
        written = tuple(dict.fromkeys(map(self._storage_index, outputs)))
        mutated = tuple(self._storage_index(t) for t in _mutated(func, args, kwargs) if t.is_meta)
        aliases_only = bool(written) and not mutated and set(written) <= set(read)
        if aliases_only or not launches_kernel(name):
            return out
        kind = kind_of(name)
        self._ops.append(
            Op(
                name=name,
                kind=kind,
                phase=self.phase,
                flops=flops_of(func, name, kind, args, kwargs, out),
                bytes_read=sum(map(_num_bytes, inputs)),
                bytes_written=sum(map(_num_bytes, outputs)) or sum(map(_num_bytes, _mutated(func, args, kwargs))),
                inputs=read,
                outputs=tuple(dict.fromkeys(written + mutated)),
                module=self._modules[-1] if self._modules and self.phase is Phase.FORWARD else "",
                shape=tuple(outputs[0].shape) if outputs else (),
                dtype=str(outputs[0].dtype).removeprefix("torch.") if outputs else "",
                attributes=attributes_of(kind, args),
            )
        )
        return out

    def _storage_index(
        self, tensor: torch.Tensor, *, name: str = "", kind: StorageKind | None = None, birth: int | None = None
    ) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        index = self._index_by_address.get(address)
        if index is not None:
            return index
        index = len(self._bytes)
        self._index_by_address[address] = index
        self._bytes.append(storage.nbytes())
        self._kinds.append(kind)
        self._births.append(len(self._ops) if birth is None else birth)
        self._deaths.append(None)
        self._names.append(name or (self._modules[-1] if self._modules else ""))
        self._birth_phases.append(self.phase)
        self._references[index] = weakref.ref(storage, lambda _reference: self._bury(address, index))
        return index

    def _bury(self, address: int, index: int) -> None:
        self._deaths[index] = len(self._ops) - 1
        if self._index_by_address.get(address) == index:
            del self._index_by_address[address]
        self._references.pop(index, None)

    def graph(self, workload: Workload) -> OpGraph:
        """What was recorded; storages that are still alive outlive the step."""
        end = len(self._ops)
        storages = []
        for index, num_bytes in enumerate(self._bytes):
            death = self._deaths[index]
            known = self._kinds[index]
            kind = self._kind_by_lifetime(index, death) if known is None else known
            storages.append(
                Storage(num_bytes, kind, min(self._births[index], end), end if death is None else death, self._names[index])
            )
        if workload.precision.startswith("amp"):
            self._unmodelled["autocast: traced as fp32"] = None
        return OpGraph(
            ops=tuple(self._ops),
            storages=tuple(storages),
            mode=workload.mode,
            precision=workload.precision,
            layout=workload.layout,
            unmodelled=tuple(self._unmodelled),
        )

    def _kind_by_lifetime(self, index: int, death: int | None) -> StorageKind:
        if self._birth_phases[index] is not Phase.FORWARD:
            return StorageKind.TEMPORARY
        dies_in_forward = death is not None and death >= 0 and self._ops[min(death, len(self._ops) - 1)].phase is Phase.FORWARD
        return StorageKind.TEMPORARY if dies_in_forward else StorageKind.ACTIVATION


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a nest of tuples, lists, dicts and dataclass-like mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


def _mutated(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an in-place or out= operator writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[position] if position < len(args) else kwargs.get(argument.name))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
