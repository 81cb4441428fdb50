"""Workload: everything that decides what one training step, or one inference, costs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from perfguard.exceptions import BuildError, TooLargeError, WorkloadError, log_once
from perfguard.pytorch import is_compiled, module_inside, random_numbers_kept, too_large_named
from perfguard.quantities import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from perfguard.graph import OpGraph
    from perfguard.verdict import Source

    OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    Optimizers = OptimizerLike | Mapping[str, OptimizerLike]
    Step = Callable[[nn.Module, Any, Any, Any], object]

Mode = Literal["train", "infer"]
Precision = Literal["fp32", "amp-fp16", "amp-bf16", "fp16", "bf16"]
Layout = Literal["nchw", "nhwc"]
ZeroGrad = Literal["before-forward", "before-backward", "after-step"]
Retain = Literal["outputs", "nothing"]
BatchOn = Literal["host", "device"]
Tf32 = Literal["default", "on", "off"]
"""Use of TF32 for float32 on GPUs that have it: "default" (convolutions and recurrent layers, not matrix products), all, or
none."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is described instead of allocated.

    Example:
        >>> TensorSpec((64,), "int64")      # class labels of a batch of 64
        TensorSpec(shape=(64,), dtype='int64')
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    """Name of a torch dtype, for instance "float32" or "int64"."""

    def __post_init__(self) -> None:
        if any(not isinstance(size, Integral) or isinstance(size, bool) or int(size) < 0 for size in self.shape):
            raise WorkloadError(f"TensorSpec.shape must hold integers of at least 0, but got {self.shape!r}.")
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))  # those of NumPy become Python's


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """The work of a trial: a model, one batch, a loss and an optimizer.

    Nothing is executed on a real device. The model is traced on PyTorch's meta device, and is not changed.

    Example:
        >>> import functools, torch
        >>> from torch import nn
        >>> workload = Workload(
        ...     nn.Linear(64, 10),
        ...     inputs=(32, 64),                        # a shape: float32; or TensorSpec, tensors, dicts of them
        ...     targets=TensorSpec((32,), "int64"),
        ...     loss=nn.functional.cross_entropy,
        ...     optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        ...     steps=1000,
        ... )
    """

    model: nn.Module
    """The network. On ``torch.device("meta")`` it costs no memory. Elsewhere it is copied to meta. ``torch.compile(module)`` is
    replaced by ``module``, and ``compiled`` is then True."""
    inputs: Any
    """The micro-batch: what one forward pass gets. A tensor, a TensorSpec, or a shape (a tuple of integers, float32). For several
    arguments a tuple or list of those (by position), or a dict of them (by name)."""
    targets: Any = None
    """Arguments of ``loss`` after the output, described in the same way. None: ``loss`` receives only the output."""
    loss: Callable[..., torch.Tensor] | None = None
    """``loss(output, targets)`` returns a scalar, or several (a tuple, a list, a dict), which are summed. None: the model returns
    its loss (a scalar, or an object or dict with ``loss``)."""
    optimizer: Optimizers | None = None
    """An optimizer class, a ``functools.partial`` of one, or an optimizer object over the model's parameters. For several, a dict
    from the path of a submodule to the optimizer of its parameters. None: SGD without momentum."""
    step: Step | None = None
    """``step(model, inputs, targets, optimizer)``: a whole training step, for what ``loss`` cannot describe (a GAN, several
    backward passes). It receives a dict of optimizers if ``optimizer`` is a dict. It excludes ``loss`` and ``accumulation``."""
    mode: Mode = "train"
    """"train": one optimizer step with its forward and backward passes. "infer": one forward pass without gradients."""
    precision: Precision = "fp32"
    """"fp32" (PyTorch's default), "amp-fp16" and "amp-bf16" (autocast; with fp16 a GradScaler too), "fp16" and "bf16" (model and
    inputs are cast)."""
    layout: Layout = "nchw"
    """Memory format of images: "nchw" is PyTorch's default, "nhwc" is torch.channels_last."""
    accumulation: int = 1
    """Forward and backward passes for one optimizer step, each on a micro-batch of ``inputs``."""
    set_to_none: bool = True
    """As in ``zero_grad``. False: gradients are zeroed in place and stay allocated."""
    zero_grad: ZeroGrad = "before-forward"
    """Where the script calls ``zero_grad``. "before-backward" keeps the last step's gradients while the forward pass runs. The
    other two need the same memory."""
    retain: Retain = "outputs"
    """What the script keeps of the last step. "outputs": the outputs and the loss, until the next forward pass returns, as a loop
    with ``outputs = model(batch)`` does. "nothing": the loss is all that the backward pass gets, as in Lightning and
    Transformers. With ``step``, nothing is kept."""
    batch_on: BatchOn = "host"
    """Where a step finds its batch. "host": it is copied to the device in each step. "device": it is there already."""
    ema: bool = False
    """True: a moving average of the parameters is kept on the device."""
    ddp: bool = False
    """True: the model is wrapped in DistributedDataParallel, so its gradient buckets are on the device too."""
    cudnn_benchmark: bool = False
    """``torch.backends.cudnn.benchmark``. True: cuDNN tries its algorithms. Their workspaces stay in the allocator's cache."""
    compiled: bool = False
    """True: ``torch.compile`` compiles the whole model. It is always True after ``torch.compile(model)`` or ``model.compile()``,
    so set it only for a model that is compiled later. Inference is predicted with fused kernels. Training is predicted with the
    memory of eager code, and with its time on CPUs. On GPUs, the time is shorter than that of eager code."""
    steps: int | None = None
    """Optimizer steps (training) or batches (inference) of the whole trial. None: unknown, and no trial time is predicted."""
    steps_per_epoch: int | None = None
    """Optimizer steps of an epoch. None: unknown, and no time of an epoch is predicted."""
    tf32: Tf32 | None = None
    """Where fp32 is computed in TF32, on GPUs that have it. "default": in convolutions and recurrent layers, PyTorch's default.
    "on": in matrix products too. "off": nowhere. None: as PyTorch's own switches are set when the workload is made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiled", self.compiled or is_compiled(self.model))
        object.__setattr__(self, "model", module_inside(self.model))
        if self.tf32 is None:
            object.__setattr__(self, "tf32", tf32_switches())
        literals = {
            "mode": Mode,
            "precision": Precision,
            "tf32": Tf32,
            "layout": Layout,
            "zero_grad": ZeroGrad,
            "retain": Retain,
            "batch_on": BatchOn,
        }
        for name, literal in literals.items():
            if (value := getattr(self, name)) not in get_args(literal):
                allowed = ", ".join(get_args(literal))
                instead = tf32_instead(value) if name == "precision" else ""
                raise WorkloadError(f"Workload.{name} must be one of {allowed}, but got {value!r}.{instead}")
        for name, or_none in (("accumulation", ""), ("steps", " or None"), ("steps_per_epoch", " or None")):
            value = getattr(self, name)
            if not (isinstance(value, Integral) and int(value) >= 1) and not (or_none and value is None):
                raise WorkloadError(f"Workload.{name} must be a whole number of at least 1{or_none}, but got {value!r}.")
        if isinstance(self.loss, type):
            name = self.loss.__name__
            raise WorkloadError(f"Workload.loss must be a function, but got the class {name}. Make one of it: loss={name}().")
        if self.step is not None and (self.loss is not None or self.mode == "infer" or self.accumulation > 1):
            raise WorkloadError("Workload.step is the whole training step; it excludes loss, accumulation and mode='infer'.")

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the switches that are on, of those that change the cost of a step; "tf32" or "no-tf32" beside them."""
        switches = tuple(name for name in ("cudnn_benchmark", "compiled", "ddp", "ema") if getattr(self, name))
        switches += ("batch-on-device",) if self.batch_on == "device" else ()
        return switches + tf32_options(self.precision, self.tf32)


class HostMemory(NamedTuple):
    """What a trial holds in the memory of the host, in bytes, as its dry run shows it."""

    process_bytes: int
    """Of the process itself: libraries, data, what is offloaded to the host."""
    model_bytes: int
    """Of the largest model that is made on the host before it moves to the GPU."""
    workers_bytes: int
    """Of the workers of loaders, and the batches that they keep ready."""
    num_workers: int

    @property
    def needed_bytes(self) -> int:
        """The larger one of set-up and training."""
        return self.process_bytes + max(self.model_bytes, self.workers_bytes)

    def __str__(self) -> str:
        if self.workers_bytes < max(self.model_bytes, self.process_bytes):
            most = (self.model_bytes, "a model that is made on the host"), (self.process_bytes, "the process and its data")
            num_bytes, what = max(most)
            return f"{format_bytes(num_bytes)} of host memory are {what}"
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        return f"{format_bytes(self.workers_bytes)} of host memory are {workers} of loaders and the batches they keep ready"


@dataclass(frozen=True, slots=True, eq=False)
class CapturedTrial:
    """The work of a trial as a dry run of its objective shows it. It stands where a Workload stands, and is traced already."""

    graph: OpGraph
    """One training step in the middle of training."""
    phases: Mapping[str, OpGraph] = field(default_factory=dict)
    """Other phases, of which only the memory counts: "the evaluation" after the first epoch, a training step with "the longest
    batch of 1000 samples" where their lengths vary, and what runs wherever else more is alive than in all these."""
    steps_per_epoch: int | None = None
    """Optimizer steps of an epoch. None: the batches do not come from a DataLoader of known length."""
    steps: int | None = None
    """Optimizer steps of the whole trial. None: the dry run did not come to the objective's end."""
    unseen: str = ""
    """Why the dry run did not come to the objective's end. Empty: it did."""
    num_optimizers: int = 1
    """Optimizers that have made steps: several make one step together, or train one model after the other."""
    samples_per_step: int | None = None
    """Samples that a process gives to one optimizer step, over all its micro-batches. None: they were not seen."""
    tokens_per_step: int | None = None
    """Tokens, likewise: the numbers in batches of whole numbers with two dimensions. None: the model reads no such batch."""
    num_ranks: int = 1
    """Processes of the trial's process group, of which this is one. 1: there is no group."""
    host_memory: HostMemory | None = None
    """What the host holds. None: that was not looked at."""
    source: Source = "captured"
    """Where the dry run began: at the objective's first line, or in the trial itself, at its first training forward pass."""
    may_be_lost: bool = False
    """Whether an error ended the dry run while its loop was counted without its model, which may be the reason."""
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Where the time of the dry run went: "set-up", "batches", "steps", "counting", "graphs", and "process" for all around it."""

    @property
    def mode(self) -> Mode:
        """Always "train"."""
        return "train"

    @property
    def num_operators(self) -> int:
        """Number of operators of all its graphs, which decides how much memory they take."""
        return sum(len(graph.ops) for graph in (self.graph, *self.phases.values()))


def tf32_options(precision: str, tf32: Tf32 | None) -> tuple[str, ...]:
    """Return the options of a graph that say where float32 is computed in TF32. Empty: as PyTorch does by default."""
    return {"on": ("tf32",), "off": ("no-tf32",)}.get(tf32 or "default", ()) if precision == "fp32" else ()


def tf32_instead(precision: object) -> str:
    """Return how to state TF32, for the message about an unknown ``precision``. Empty: that is not what is meant."""
    return ' TF32 is a way to compute fp32: give precision="fp32", tf32="on".' if precision == "tf32" else ""


def tf32_switches() -> Tf32:
    """State of PyTorch's switches. Reading an old switch raises if a new one was set, so the new ones come first."""
    import torch

    cudnn: Any = torch.backends.cudnn
    try:
        products = torch.backends.cuda.matmul.fp32_precision == "tf32"
        convolutions = cudnn.conv.fp32_precision == "tf32"
    except AttributeError:  # before PyTorch 2.9
        products = torch.backends.cuda.matmul.allow_tf32
        convolutions = cudnn.allow_tf32
    return "on" if products else "default" if convolutions else "off"


AnyWorkload = Workload | CapturedTrial
"""The work of a trial, described or captured."""
Build = Callable[[Mapping[str, Any]], Workload]
"""A function of the hyperparameters that describes what they would run."""


if TYPE_CHECKING:
    _Dict = dict[str, Any]
else:

    class _Dict(MutableMapping, dict):
        """A dict whose methods are made from five of them, so that none reads in silence."""


class WatchedParams(_Dict):
    """Hyperparameters that note which of them are read, and which are asked for though they are missing.

    ``build`` may remove items, as from any dict, so the given ones are kept.
    """

    def __init__(self, params: Mapping[str, object]) -> None:
        self.given: dict[str, Any] = params.given if isinstance(params, WatchedParams) else dict(params)
        """All parameters. To look here does not count as reading."""
        self.missing: set[str] = set()
        self._read: set[str] = set()
        dict.__init__(self, self.given)

    def refill(self) -> None:
        """Restore the given items for another attempt. What was read stays noted."""
        dict.clear(self)
        dict.update(self, self.given)

    @property
    def used(self) -> dict[str, Any]:
        """The given parameters that were read."""
        return {name: value for name, value in self.given.items() if name in self._read}

    def __getitem__(self, name: str) -> Any:
        (self._read if name in self.given else self.missing).add(name)
        return dict.__getitem__(self, name)

    def __setitem__(self, name: str, value: object) -> None:
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        dict.__delitem__(self, name)

    def __iter__(self) -> Iterator[str]:
        self._read.update(self.given)
        return dict.__iter__(self)

    def __len__(self) -> int:
        self._read.update(self.given)
        return dict.__len__(self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self))

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def copy(self) -> dict[str, Any]:
        """Return a plain dict. All parameters count as read."""
        return dict(self.items())


@runtime_checkable
class CapturingBuild(Protocol):
    """The default ``build``: it dry-runs the objective."""

    captures: bool

    def __call__(self, params: Mapping[str, object]) -> CapturedTrial:
        """Return what the objective would run with ``params``."""
        ...


AnyBuild = Build | CapturingBuild


def build_workload(build: Build, params: Mapping[str, object]) -> Workload:
    """Call ``build(params)`` so that it allocates nothing: on the meta device where it can, as it stands where it cannot.

    The user's random numbers are left where they were.

    Raises:
        KeyError: as ``build`` raised it, if it reads a parameter that ``params`` does not have.
        TooLargeError: if a tensor that it makes does not fit into any memory.
        BuildError: if it raises anything else, or returns something that is not a Workload.
    """
    import torch

    with random_numbers_kept():
        try:
            with too_large_named(), torch.device("meta"):
                workload = build(params)
        except TooLargeError:
            raise
        except Exception as error:
            if is_missing_parameter(error, params):
                raise
            if isinstance(params, WatchedParams):
                params.refill()  # with what the first attempt took out
            workload = _build_on_the_host(build, params)
    if not isinstance(workload, Workload):
        raise BuildError(f"build(params) must return a perfguard.Workload, but returned {type(workload).__name__}.")
    announce_optimizer(workload)
    return workload


def announce_optimizer(workload: Workload) -> None:
    """Log once in a process that training without an optimizer counts as plain SGD, which keeps no state."""
    if workload.mode == "train" and workload.optimizer is None and workload.step is None:
        log_once(
            "no optimizer",
            "A workload names no optimizer, so it is judged with SGD without momentum, which keeps no state. If the trials train "
            "with another, give it: Workload(..., optimizer=torch.optim.AdamW).",
        )


def is_missing_parameter(error: BaseException, params: Mapping[str, object]) -> bool:
    """Whether ``error`` means that ``params`` lacks a parameter."""
    return isinstance(error, KeyError) and bool(error.args) and isinstance(error.args[0], str) and error.args[0] not in params


def _build_on_the_host(build: Build, params: Mapping[str, object]) -> Workload:
    try:
        with too_large_named():
            return build(params)
    except WorkloadError:
        raise
    except Exception as error:
        if is_missing_parameter(error, params):
            raise
        raise BuildError(f"build({dict(params)!r}) raised {type(error).__name__}: {error}{_hint(error, params)}") from error


def why_missing(names: Iterable[str], params: Mapping[str, object]) -> str:
    """A sentence on the parameters that ``build`` reads and the trial lacks, with the nearest that it has."""
    missing = " and ".join(f"{name!r}{did_you_mean(name, params)}" for name in sorted(names))
    return f"build(params) reads {missing}, which the trial has not suggested"


def _hint(error: Exception, params: Mapping[str, object]) -> str:
    """A correction of a common mistake; empty: none is known."""
    if isinstance(error, AttributeError) and isinstance(error.name, str):
        if error.obj is not params:
            return did_you_mean(error.name, dir(error.obj))
        if error.name.startswith("suggest_"):
            return " (build gets the parameters that the trial has suggested, a dict, and not the trial)"
        return f" (parameters are items: params[{error.name!r}])" if error.name in params else did_you_mean(error.name, params)
    if re.search(r"CUDA enabled|NVIDIA driver|Cannot copy out of meta", str(error)):
        return " (build only describes a trial, so leave out .cuda() and .to(device))"
    argument = re.search(r"argument:? '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    return did_you_mean(argument[1], [*params, *(field.name for field in fields(Workload))]) if argument else ""


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.7) -> str:
    """Return " (did you mean 'width'?)" for the nearest of the ``known`` names; empty: none is as near as ``cutoff``."""
    found = [near for near in difflib.get_close_matches(name, list(known), n=2, cutoff=cutoff) if near != name]
    return f" (did you mean {found[0]!r}?)" if found else ""


# A batch as a user describes it: tensors, specifications and shapes, nested in tuples, lists and dicts.


def _as_shape(value: object) -> tuple[int, ...] | None:
    """The shape that a tuple or list of integers stands for, those of NumPy included; None: it is something else."""
    if not isinstance(value, (tuple, list)) or not value or any(isinstance(size, bool) for size in value):
        return None
    if all(isinstance(size, Integral) for size in value):
        return tuple(map(int, value))
    if all(isinstance(size, Real) and float(size).is_integer() for size in value):
        raise WorkloadError(f"A shape has whole numbers, but got {value!r}. Use int(...) for its sizes.")
    return None


def mapped(value: object, change: Callable[[Any], Any]) -> Any:
    """The nest ``value`` with ``change(leaf)`` in the place of each leaf; a shape is handed over as a TensorSpec."""
    from torch.nn.utils.rnn import PackedSequence

    if (shape := _as_shape(value)) is not None:
        return change(TensorSpec(shape))
    if isinstance(value, PackedSequence):  # PyTorch keeps the numbers of sequences on the host, and reads them
        order = (None if indices is None else change(indices) for indices in value[2:])
        return PackedSequence(change(value.data), value.batch_sizes, *order)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def shape_of(leaf: object) -> tuple[int, ...] | None:
    """The shape of a tensor or TensorSpec; None for anything else."""
    return tuple(leaf.shape) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None


def shapes_in(value: object) -> list[tuple[int, ...]]:
    """The shapes of all tensors and specifications in ``value``, in order."""
    found: list[tuple[int, ...] | None] = []
    mapped(value, lambda leaf: found.append(shape_of(leaf)))
    return [shape for shape in found if shape is not None]
