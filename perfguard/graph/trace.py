"""Workload → OpGraph, by running one step on the meta device and writing down what it launches.

Nothing is computed and nothing is allocated: meta tensors have shapes, dtypes and strides but no data. Autograd runs for real,
so the storages are born and die exactly as they would on the device; a weak reference to each says when.
"""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.rnn import PackedSequence

from perfguard.exceptions import PerfGuardError, TraceError, WorkloadError
from perfguard.graph.kernels import DevicePaths, Target, device_semantics, target_of
from perfguard.graph.libraries import constants_of_4bit, unquantized_layers
from perfguard.graph.op import Phase, StorageKind
from perfguard.graph.opgraph import OpGraph
from perfguard.graph.optimizers import OptimizerOnMeta, optimizers_on_meta
from perfguard.graph.recorder import Recorder, tensors_in
from perfguard.graph.shape_rules import META, empty_twin
from perfguard.pytorch import (
    compiled_parts,
    function_inside,
    gc_paused,
    has_data_parallel,
    is_compiled,
    path_inside,
    random_numbers_kept,
    too_large_named,
)
from perfguard.unmodelled import (
    CPU_AUTOCAST,
    DATA_PARALLEL,
    DDP_ALL_REDUCE,
    GROUPED_PRODUCTS,
    OPAQUE_FUNCTIONS,
    OWN_STEP_AUTOCAST,
    PAGED_STATES,
    PARTS_TRACED_AS_EAGER,
    RNN_WORKSPACE,
    TRACED_AS_EAGER,
    TRITON,
    Unmodelled,
)
from perfguard.workload import TensorSpec, Workload, mapped

if TYPE_CHECKING:
    from perfguard.devices import Device

_LAZY = (UninitializedParameter, UninitializedBuffer)
_PURE = {"fp16": torch.float16, "bf16": torch.bfloat16}
_AUTOCAST = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}


def trace(workload: Workload, *, target: Device | Literal["cuda", "cpu"] = "cuda") -> OpGraph:
    """Run one step of ``workload`` on the meta device and return what it would launch.

    The step that is traced is one in the middle of training: the optimizer's state exists, the gradients were set to None.
    The model must not be used by another thread meanwhile if its parameters are on meta; otherwise a copy is traced.

    Args:
        workload: what to trace.
        target: the device, or just its kind ("cuda": a recent GPU). It decides which fused kernels PyTorch picks.

    Raises:
        TraceError: if the step cannot be traced; the message names the module, the line and what to do.
        TooLargeError: if a tensor of the step has more bytes than PyTorch can count.
        WorkloadError: if the description itself is wrong.
    """
    kind = target_of(target)
    with tracing(kind):
        return _Tracer(workload, kind).run()


@contextmanager
def tracing(target: Target) -> Iterator[None]:
    """Whatever contexts the caller is in, what runs inside is traced as if it were in none, on meta, and leaves no traces.

    PyTorch loads a part of itself on its way through the first operator; what is on the stack at that time would stay alive.
    """
    import torch._dynamo

    with ExitStack() as stack:
        stack.enter_context(random_numbers_kept())  # a guard must not move the user's
        stack.enter_context(gc_paused())
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                torch.set_autocast_enabled(device, False)
                stack.callback(torch.set_autocast_enabled, device, True)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(device_semantics("cpu" if target.is_cpu else "cuda"))
        stack.enter_context(META)  # where a tensor belongs that forward makes without a device
        stack.enter_context(too_large_named())
        yield


class _Tracer:
    """One trace: the model on meta, and the modes around its step."""

    def __init__(self, workload: Workload, target: Target) -> None:
        self._workload = workload
        self._target = target
        self._paths = DevicePaths(target)
        self._modules: list[str] = []
        self._recorder = Recorder(self._modules, is_cpu=target.is_cpu)
        if not isinstance(workload.model, nn.Module):
            raise WorkloadError(f"Workload.model must be a torch.nn.Module, but got {type(workload.model).__name__}.")
        if names := unquantized_layers(workload.model):
            raise TraceError(
                f"The layer {names[0]} of bitsandbytes, cannot be traced in a Workload: its weights are quantized on a GPU. "
                f"Guard the objective itself: a dry run quantizes them (docs/llm.md)."
            )
        self._constants = constants_of_4bit(workload.model)
        self._model = model_on_meta(workload)
        self._loss_of = loss_on_meta(workload)
        self._reached: set[int] = set()
        """Ids of the parameters that got a gradient."""
        self._has_paged_states = False

    def run(self) -> OpGraph:
        model = self._model
        modes = {module: module.training for module in model.modules()}
        model.train(self._workload.mode == "train")
        try:
            self._initialize_lazy_parameters()
            if self._workload.mode == "train":
                self._training_step()
            else:
                self._inference()
        finally:  # it may be the user's own
            model.zero_grad(set_to_none=True)
            for module, training in modes.items():
                module.training = training
        workload = self._workload
        return OpGraph(
            ops=tuple(self._recorder.ops),
            storages=self._recorder.storages(),
            mode=workload.mode,
            precision=workload.precision,
            layout=workload.layout,
            options=workload.options,
            unmodelled=(
                *self._unmodelled(),
                *self._recorder.selections.assumed,
                *((GROUPED_PRODUCTS,) if self._paths.has_grouped_products else ()),
            ),
        )

    def _unmodelled(self) -> Iterator[Unmodelled]:
        workload = self._workload
        parts = [*compiled_parts(workload.model), *(n for n in ("loss", "step") if is_compiled(getattr(workload, n)))]
        yield from unmodelled(
            self._target,
            {op.name for op in self._recorder.ops},
            precision=workload.precision,
            compiled=workload.compiled,
            compiled_parts=parts,
        )
        if has_data_parallel(workload.model):
            yield DATA_PARALLEL
        if workload.precision in _AUTOCAST and workload.step is not None:
            yield OWN_STEP_AUTOCAST
        if self._has_paged_states:
            yield PAGED_STATES
        if workload.ddp:
            yield DDP_ALL_REDUCE

    def _initialize_lazy_parameters(self) -> None:
        """Lazy modules get their shapes from a first batch, as in the user's own code."""
        if any(isinstance(parameter, UninitializedParameter) for parameter in self._model.parameters()):
            with self._paths, torch.no_grad():
                self._forward(batch_on_meta(self._workload.inputs, self._workload))

    def _inference(self) -> None:
        inputs, _ = self._batch()
        self._recorder.phase = Phase.FORWARD
        with self._recorded(), torch.no_grad(), self._autocast():
            output = self._forward(inputs)
            if self._workload.retain == "outputs":
                with self._recorder.freeing_in_next_step(len(self._recorder.ops) - 1):
                    del output

    def _training_step(self) -> None:
        workload = self._workload
        model = self._model
        recorder = self._recorder
        inputs, targets = self._batch()
        optimizers = optimizers_on_meta(workload, model, self._target, around_step=self._optimizing)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for optimizer in optimizers.values():
            state = ((names[id(parameter)], value) for parameter, value in optimizer.state_tensors())
            recorder.adopt(state, StorageKind.OPTIMIZER_STATE)
            self._has_paged_states |= getattr(optimizer.optimizer, "is_paged", False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        buckets = _buckets(trained) if workload.ddp else []
        averages = [torch.empty_like(parameter) for parameter in trained] if workload.ema else []
        recorder.adopt((("ddp.bucket", bucket[0][1]) for bucket in buckets), StorageKind.GRADIENT)
        recorder.adopt((("ema", average) for average in averages), StorageKind.BUFFER)
        if not workload.set_to_none:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            recorder.adopt(((name, parameter.grad) for name, parameter in model.named_parameters()), StorageKind.GRADIENT)
        with self._recorded(), self._noting_gradients(trained):
            if workload.step is not None:
                self._own_step(inputs, targets, optimizers)
                self._remove_untrained(optimizers)
                return
            if not workload.set_to_none:
                recorder.phase = Phase.OPTIMIZER
                torch._foreach_zero_([parameter.grad for parameter in trained if parameter.grad is not None])
            is_scaled = workload.precision == "amp-fp16" and not self._target.is_cpu
            scale = torch.empty(()) if is_scaled else None
            keeps = workload.retain == "outputs"
            returned = computed = -1  # the last operators of the first forward pass, and of its loss
            for number in range(workload.accumulation):
                recorder.phase = Phase.FORWARD
                with self._autocast():
                    output = self._forward(inputs)
                    returned = returned if number else len(recorder.ops) - 1
                    loss = self._loss(output, targets)
                    computed = computed if number else len(recorder.ops) - 1
                    if not keeps:
                        del output
                if scale is not None:
                    loss = loss * scale
                recorder.phase = Phase.BACKWARD
                self._guarded(loss.backward)
                if not keeps:
                    del loss
            gradients: list[torch.Tensor] = [parameter.grad for parameter in trained if parameter.grad is not None]
            if buckets:
                _average_over_processes(buckets)
            recorder.phase = Phase.OPTIMIZER
            if scale is not None:
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(()), scale.reciprocal())
            for optimizer in optimizers.values():
                optimizer.step()
            if averages:
                torch._foreach_lerp_(averages, list(trained), 1e-3)
            self._remove_untrained(optimizers)
            if keeps:
                with recorder.freeing_in_next_step(returned):
                    del output
                with recorder.freeing_in_next_step(computed):
                    del loss
            if workload.set_to_none and workload.zero_grad != "before-forward":
                gradients.clear()
                frees = recorder.freeing_in_next_step(computed) if workload.zero_grad == "before-backward" else nullcontext()
                with frees:
                    model.zero_grad(set_to_none=True)

    @contextmanager
    def _noting_gradients(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        with ExitStack() as stack:
            for parameter in parameters:
                note = parameter.register_post_accumulate_grad_hook(lambda tensor: self._reached.add(id(tensor)))
                stack.callback(note.remove)
            yield

    def _remove_untrained(self, optimizers: Mapping[str, OptimizerOnMeta]) -> None:
        """A parameter that no loss reaches has neither a gradient nor any state in its optimizer."""
        for optimizer in optimizers.values():
            for parameter, value in optimizer.state_tensors():
                if id(parameter) not in self._reached:
                    self._recorder.forget(value)
            for parameter in optimizer.parameters():
                if id(parameter) not in self._reached:
                    self._recorder.forget(parameter.grad)

    def _own_step(self, inputs: Any, targets: Any, optimizers: Mapping[str, OptimizerOnMeta]) -> None:
        """The user's ``step(model, inputs, targets, optimizer)``."""
        step = self._workload.step
        assert step is not None
        self._recorder.phase = None
        given = {path: made.optimizer for path, made in optimizers.items()}
        self._guarded(lambda: step(self._model, inputs, targets, given[""] if set(given) == {""} else given))

    @contextmanager
    def _optimizing(self) -> Iterator[None]:
        recorder = self._recorder
        recorder.mark_gradients(self._model.named_parameters())
        with recorder.in_phase(Phase.OPTIMIZER):
            yield

    def _batch(self) -> tuple[Any, Any]:
        workload = self._workload
        recorder = self._recorder
        model = self._model
        inputs = batch_on_meta(workload.inputs, workload)
        targets = batch_on_meta(workload.targets, workload)
        recorder.adopt(model.named_parameters(), StorageKind.PARAMETER)
        recorder.adopt([*model.named_buffers(), *self._constants], StorageKind.BUFFER)
        recorder.adopt((("inputs", tensor) for tensor in tensors_in(inputs)), StorageKind.INPUT)
        recorder.adopt((("targets", tensor) for tensor in tensors_in(targets)), StorageKind.INPUT)
        return inputs, targets

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = _AUTOCAST.get(self._workload.precision)
        return nullcontext() if dtype is None else self._paths.autocast(dtype)

    def _forward(self, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return self._guarded(lambda: self._model(**inputs))
        several = isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence)
        return self._guarded(lambda: self._model(*inputs) if several else self._model(inputs))

    def _loss(self, output: Any, targets: Any) -> torch.Tensor:
        if self._loss_of is not None:
            make = self._loss_of
            loss = self._guarded(lambda: make(output) if targets is None else make(output, targets))
        elif isinstance(output, Mapping):
            loss = output.get("loss")
        else:
            loss = getattr(output, "loss", output)
        if isinstance(loss, (tuple, list, Mapping)):  # several losses
            parts = list(loss.values()) if isinstance(loss, Mapping) else list(loss)
            if parts and all(isinstance(part, torch.Tensor) and part.numel() == 1 for part in parts):
                loss = sum(parts)
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
            summary = text.splitlines()[0][:240].rstrip(".: ")  # another library's message may have pages
            raise TraceError(f"The step cannot be traced, {_where(error, self._model)}: {summary}. {_advice(text)}") from error

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record what runs inside, and keep the path of the running module."""

        def leave(*_: Any) -> None:
            self._modules.pop()

        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                path = path_inside(name)
                enter = module.register_forward_pre_hook(lambda _m, _a, path=path: self._modules.append(path))
                stack.callback(enter.remove)
                # Checkpointing ends a recomputation by an exception as soon as it has what it needs.
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(self._paths)
            stack.enter_context(self._recorder)
            self._recorder.calibrate()
            yield


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[tuple[nn.Parameter, torch.Tensor]]]:
    """DDP's gradient buckets as lists of parameters with their flat views, in reverse order; the first bucket is small."""
    buckets: list[list[tuple[nn.Parameter, torch.Tensor]]] = []
    open_by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}

    def close(dtype: torch.dtype) -> None:
        members = open_by_dtype.pop(dtype)
        sizes = [parameter.numel() for parameter in members]
        buckets.append(list(zip(members, torch.empty(sum(sizes), dtype=dtype).split(sizes), strict=True)))

    first, other = 2**20, 25 * 2**20  # bytes, in torch.nn.parallel.DistributedDataParallel
    for parameter in reversed(parameters):
        members = open_by_dtype.setdefault(parameter.dtype, [])
        members.append(parameter)
        if sum(member.numel() for member in members) * parameter.element_size() >= (other if buckets else first):
            close(parameter.dtype)
    for dtype in list(open_by_dtype):
        close(dtype)
    return buckets


def _average_over_processes(buckets: Sequence[Sequence[tuple[nn.Parameter, torch.Tensor]]]) -> None:
    """Into the buckets, and back after the all-reduce."""
    pairs = [(view, parameter.grad.flatten()) for bucket in buckets for parameter, view in bucket if parameter.grad is not None]
    if pairs:
        views, flat = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(views, flat)
        torch._foreach_copy_(flat, views)


def unmodelled(
    target: Target, names: set[str], *, precision: str, compiled: bool, compiled_parts: Sequence[str]
) -> Iterator[Unmodelled]:
    """Say what a trace does not account for, of a step with operators of those ``names``."""
    if precision in _AUTOCAST and target.is_cpu:
        yield CPU_AUTOCAST
    if compiled:
        yield TRACED_AS_EAGER
    elif compiled_parts:
        others = f" and {len(compiled_parts) - 4} more" if len(compiled_parts) > 4 else ""
        yield PARTS_TRACED_AS_EAGER.of(", ".join(compiled_parts[:4]) + others)
    if "fused_rnn" in names:
        yield RNN_WORKSPACE
    if "opaque" in names:
        yield OPAQUE_FUNCTIONS
    if "triton_kernel" in names:
        yield TRITON


def _advice(text: str) -> str:
    """What to do about an error of the user's step, by the words of the error. One true sentence each."""
    data_dependent = (
        "What it runs depends on the data. Move that out of the model, describe a fixed case, or wrap the part in "
        "perfguard.opaque(function, example_outputs=...)."
    )
    full_lengths = 'take `torch.full((len(x),), x.shape[1], device="cpu")` where `x.is_meta`.'
    by_signs = {
        ("'lengths' argument should be",): f"Packing reads the lengths, and a trace has no values: {full_lengths}",
        ("SparseTensorImpl", "SparseMeta"): "PyTorch cannot trace sparse gradients. Describe the model with Embedding(..., "
        "sparse=False) and a dense optimizer; that counts a dense gradient, more than the sparse one has.",
        ("Tensor.item", "_local_scalar_dense"): "A value is read from a tensor (`.item()`, `bool(tensor)`, `if tensor > 0`). "
        + data_dependent,
        ("data-dependent",): data_dependent,
        ("numpy",): "It leaves torch for numpy. Use torch operators, or wrap the part in "
        "perfguard.opaque(function, example_outputs=...).",
        ("Cannot copy out of meta tensor",): "A tensor is copied to another device, or its values are needed. Make tensors on "
        "`x.device`; where values are needed, wrap the part in perfguard.opaque(function, example_outputs=...). As the lengths "
        f"of sequences to pack, {full_lengths}",
        (
            "Expected all tensors to be on the same device", "is not on the expected device meta",
            "Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available",
        ): "A tensor was made on a fixed device inside the model. Make it on `x.device`, or register it as a buffer.",
        (
            "with arguments from the 'Meta' backend", "no fake impl", "Could not run",
            "data pointer of tensor that doesn't have storage", "Cannot access data pointer",
        ): "A custom operator has no kernel for the meta device. Register one (torch.library.register_fake), or wrap its call in "
        "perfguard.opaque(function, example_outputs=...).",
        ("device cpu but got meta",): "A forward that was replaced computes with the real weights, which it holds. Define it in "
        "the class, or let a dry run of the objective show the step.",
        ("one of the following scalar types",): 'Check the dtypes given to Workload(inputs=...): TensorSpec(shape, "int64") '
        "gives integers.",
        ("positional argument", "unexpected keyword argument"): "Workload(inputs=...) gives forward one argument for each item "
        "of a tuple, one keyword for each key of a dict.",
    }  # fmt: skip
    for signs, advice in by_signs.items():
        if any(sign in text for sign in signs):
            return advice
    is_of_names = re.match(
        r"(Key|Attribute|Name|Import|ModuleNotFound|FileNotFound|OS)Error\b", text
    )  # which may contain such words
    if not is_of_names and re.search(r"\b(shapes?|sizes?|dim|dims|dimensions?|channels?|broadcast\w*|elements)\b", text.lower()):
        return "Check the shapes given to Workload(inputs=...)."
    return "Run one step on real tensors: if it fails there too, the model or its inputs are the cause."


def _where(error: BaseException, model: nn.Module) -> str:
    """The module and the line of the user's own code in which ``error`` was raised."""
    names = {id(module): path_inside(name) for name, module in model.named_modules()}
    path: str | None = None
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            path = names[id(owner)]
        file = frame.f_code.co_filename
        if not file.startswith((str(Path(torch.__file__).parent), str(Path(__file__).parent))):
            line = f" ({Path(file).name}:{number})"
    return (f"in module {path!r}" if path else "in the model") + line


def model_on_meta(workload: Workload) -> nn.Module:
    """The model with every tensor replaced by one without memory, in the workload's precision and layout.

    A model that is on meta already is used as it is where nothing has to be converted. Otherwise a copy is made, and nothing
    is allocated for it: ``copy.deepcopy`` finds the replacement of each tensor in its memo. Only a model on meta that cannot
    be copied is converted itself.
    """
    model = workload.model
    # The parameters of a lazy module are made in the trace, so a copy gets them.
    on_meta = all(tensor.is_meta and not isinstance(tensor, _LAZY) for tensor in _tensors_of(model))
    if on_meta and workload.precision not in _PURE and workload.layout == "nchw":
        return model
    try:
        twins: dict[int, Any] = {id(tensor): _twin_of(tensor) for tensor in _tensors_of(model)} | _custom_operators()
        model = copy.deepcopy(model, twins)
        _rebind_compiled_methods(model, twins)
    except Exception as error:
        if not on_meta:
            raise TraceError(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). "
                f'Build it under `with torch.device("meta"):`, or give `build=` instead of a live model.'
            ) from error
    if workload.precision in _PURE:
        model = model.to(_PURE[workload.precision])
    if workload.layout == "nhwc":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _custom_operators() -> dict[int, Any]:
    """Return the custom operators and the namespaces of operators by their ids, for the memo of a copy.

    A module may have them as attributes. They exist once in a process, and PyTorch cannot copy them.
    """
    namespaces = [value for value in vars(torch.ops).values() if isinstance(value, torch._ops._OpNamespace)]
    return {id(operator): operator for operator in (*OPDEFS.values(), *namespaces)}


def _rebind_compiled_methods(model: nn.Module, twins: dict[int, Any]) -> None:
    """A compiled method that an instance holds is copied as a function, so it would still run on the original."""
    for module in model.modules():
        for name, value in vars(module).items():
            inside = function_inside(value)
            if id(getattr(inside, "__self__", None)) in twins:
                vars(module)[name] = copy.deepcopy(inside, twins)


def loss_on_meta(workload: Workload) -> Any:
    """The loss; a module's own tensors (class weights) are replaced as the model's are."""
    if isinstance(workload.loss, type):
        name = workload.loss.__name__
        raise WorkloadError(f"Workload.loss must be called as loss(output, targets), but got the class {name}. Give {name}().")
    if not isinstance(workload.loss, nn.Module):
        return workload.loss
    return copy.deepcopy(workload.loss, {id(tensor): _twin_of(tensor) for tensor in _tensors_of(workload.loss)})


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():  # tensors kept as plain attributes
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _twin_of(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, _LAZY):  # it has no shape yet
        make: Callable[..., torch.Tensor] = type(tensor)
        grad = {"requires_grad": tensor.requires_grad} if isinstance(tensor, UninitializedParameter) else {}
        return make(device=META, dtype=tensor.data.dtype, **grad)
    twin = empty_twin(tensor)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def batch_on_meta(value: Any, workload: Workload) -> Any:
    """Tensors, TensorSpecs and shapes, nested in tuples, lists and dicts, as meta tensors."""

    def on_meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _cast(empty_twin(leaf), workload)
        if isinstance(leaf, TensorSpec):
            return _cast(torch.empty(leaf.shape, dtype=_dtype_named(leaf.dtype), device=META), workload)
        return leaf

    return mapped(value, on_meta)


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise WorkloadError(f'TensorSpec.dtype must name a torch dtype such as "float32" or "int64", but got {name!r}.')
    return dtype


def _cast(tensor: torch.Tensor, workload: Workload) -> torch.Tensor:
    if workload.precision in _PURE and tensor.is_floating_point():
        tensor = tensor.to(_PURE[workload.precision])
    if workload.layout == "nhwc" and tensor.dim() == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    return tensor
