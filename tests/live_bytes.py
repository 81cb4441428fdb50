"""The true live bytes of a program for a GPU: it runs for real on the CPU, and what it puts on "cuda" is tracked.

A tensor is on the device if the program names a GPU as it makes or moves it, or if an operator computes it of one that is. So
batches and data sets of the host do not count. It asks nothing of PerfGuard. Notation:

    on the device    the storage of a tensor that was made or moved there, or computed of one that is there
    live bytes       the sum over these storages, each from its making to its end

What kernels take beside their results is not tracked, but for the losses of which they take a mean or a sum (a profile of PyTorch
shows them: `tests/perfguard/graph/test_recorder.py`). Where a GPU keeps something else than a CPU for a backward pass, the
tracker does as the GPU: dropout keeps a mask of bytes, and optimizers step all their parameters at once ("foreach"). Where
PyTorch does something else because it is tracked, the tracker does as PyTorch alone: autograd adds a second gradient to the first
in place, where nothing else holds that, and writes the gradient of a selection into its zeros.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_IN_PLACE: dict[Any, Any] = {
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
}
_BESIDE_A_LOSS: dict[Any, int] = {
    torch.ops.aten.mse_loss.default: 0,
    torch.ops.aten.smooth_l1_loss.default: 0,
    torch.ops.aten.huber_loss.default: 0,
    torch.ops.aten.binary_cross_entropy_with_logits.default: 1,
}
"""Tensors as large as the losses of all elements that a kernel takes while it runs, without those losses themselves."""
_ZEROS = (torch.ops.aten.new_zeros.default, torch.ops.aten.zeros.default, torch.ops.aten.zeros_like.default)


class LiveBytes(TorchDispatchMode):
    """Tracks the storages of the device: those that an operator makes of one that is there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracked: weakref.WeakKeyDictionary[torch.UntypedStorage, None] = weakref.WeakKeyDictionary()
        self.now = 0
        self.peak = 0
        self._zeros = -1
        """Address of the storage of zeros, if the last operator of a backward pass has made some."""
        self._is_calibrating = False
        self._alone: tuple[int, ...] = ()
        """References to a gradient that only autograd's buffer holds, as they look in the mode."""

    def calibrate(self) -> None:
        """Learn how a gradient looks that only autograd's buffer holds. Call it once all modes are on."""
        self._is_calibrating = True
        x = torch.ones((), requires_grad=True).neg()
        (x.neg() + x.neg()).backward()
        self._is_calibrating = False

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is on the device."""
        is_plain = tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)
        return is_plain and tensor.untyped_storage() in self._tracked

    def track(self, tensor: torch.Tensor) -> None:
        """Let ``tensor`` be on the device."""
        if tensor.layout is not torch.strided or is_functorch_wrapped_tensor(tensor) or self.is_on_device(tensor):
            return
        storage = tensor.untyped_storage()
        self._tracked[storage] = None
        self._add(storage.nbytes())
        weakref.finalize(storage, self._add, -storage.nbytes())

    def _add(self, number: int) -> None:
        self.now += number
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and self._is_accumulated(*args):
            return args[0].add_(args[1])
        if func in _IN_PLACE and args[0].untyped_storage()._cdata == self._zeros:
            func = _IN_PLACE[func]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        out = func(*args, **(kwargs or {}))
        is_of_backward = torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()
        self._zeros = out.untyped_storage()._cdata if func in _ZEROS and is_of_backward else -1
        is_on_device = any(self.is_on_device(tensor) for tensor in given)
        made = out[:1] if func is torch.ops.aten._pack_padded_sequence.default else out  # the other one is for the host
        for tensor in tree_leaves(made) if is_on_device else ():
            if isinstance(tensor, torch.Tensor):
                self.track(tensor)
        if is_on_device and func in _BESIDE_A_LOSS:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            number = _BESIDE_A_LOSS[func] + (out.shape != shape)
            self.peak = max(self.peak, self.now + number * shape.numel() * out.element_size())
        return out

    def _is_accumulated(self, gradient: Any, other: Any) -> bool:
        """Whether autograd adds ``other`` to a ``gradient`` that it alone holds (`can_accumulate_inplace` of PyTorch)."""
        if torch._C._current_autograd_node() is None or torch.is_grad_enabled() or not isinstance(gradient, torch.Tensor):
            return False
        uses = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
        references = (gradient._use_count(), uses, sys.getrefcount(gradient))  # type: ignore[attr-defined]
        if self._is_calibrating:
            self._alone = references
        is_whole = isinstance(other, torch.Tensor) and gradient.shape == other.shape and gradient.is_contiguous()
        return is_whole and references == self._alone


class _OnDevice(TorchFunctionMode):
    """Lets what the program puts on "cuda" be on the CPU, and be tracked."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if source is not None and self._live.is_on_device(source):
            if func == _DEVICE_OF:
                return _CUDA
            if func == _IS_CUDA:
                return True
        if func is torch.Tensor.cuda:
            return self._moved(source, torch.Tensor.to, (source, _CPU), {})
        if func is torch.Tensor.cpu:
            return self._moved_back(source, torch.Tensor.to, (source, _CPU), {})
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func in (torch._C._nn._parse_to, torch.device):
            return func(*args, **kwargs)
        names_gpu = any(map(_is_gpu, (*args, *kwargs.values())))
        names_host = any(map(_is_host, (*args, *kwargs.values())))
        args, kwargs = tree_map(_on_cpu, (args, kwargs)) if names_gpu else (args, kwargs)
        if func is torch.Tensor.to:
            if names_gpu:
                return self._moved(source, func, args, kwargs)
            return self._moved_back(source, func, args, kwargs) if names_host else func(*args, **kwargs)
        out = func(*args, **kwargs)
        if names_gpu:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._live.track(leaf)
        return out

    def _moved(self, source: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if self._live.is_on_device(source):
            return func(*args, **kwargs)
        kwargs.pop("copy", None)
        out = func(*args, **kwargs)
        out = out.clone() if out.untyped_storage()._cdata == source.untyped_storage()._cdata else out
        self._live.track(out)
        return out

    def _moved_back(self, source: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._live.is_on_device(source):
            return func(*args, **kwargs)
        with _disable_current_modes():
            copied = func(source.detach().clone(), *args[1:], **kwargs)
        return copied

    def _dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0 or inplace:
            with torch._C.DisableTorchFunction():
                return F.dropout(x, p, training, inplace)
        return torch.native_dropout(x, p, True)[0]


_ATTRIBUTES: Any = torch.Tensor
_DEVICE_OF = _ATTRIBUTES.device.__get__
_IS_CUDA = _ATTRIBUTES.is_cuda.__get__


def _is_gpu(value: object) -> bool:
    return _type_named(value) == "cuda"


def _is_host(value: object) -> bool:
    return _type_named(value) == "cpu"


def _type_named(value: object) -> str:
    """The type of the device that ``value`` is or names. Empty: none."""
    if isinstance(value, torch.device):
        return value.type
    return value.split(":")[0] if isinstance(value, str) else ""


def _on_cpu(value: Any) -> Any:
    return _CPU if _is_gpu(value) else value


def _autocast_here(own: Callable[..., None]) -> Callable[..., None]:
    """Autocast of "cuda" as that of the CPU. Their lists differ: a program computes its loss in float32 of its own will."""

    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        own(self, "cpu" if _is_gpu(device_type) else device_type, *args, **kwargs)

    return __init__


def _loading_there(own: Callable[..., Any], live: LiveBytes) -> Callable[..., Any]:
    """Load a file on the host. If it is for the device, what it holds is there."""

    def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        with _disable_current_modes():
            loaded = own(f, map_location="cpu", **kwargs)
        for leaf in tree_leaves(loaded) if _is_gpu(map_location) else ():
            if isinstance(leaf, torch.Tensor):
                live.track(leaf)
        return loaded

    return load


@contextmanager
def live_bytes_tracked() -> Iterator[LiveBytes]:
    """Run the block on the CPU, with what it puts on "cuda" tracked."""
    live = LiveBytes()
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "manual_seed_all", lambda _: None),
            (torch.cuda, "is_bf16_supported", lambda *_: True),
            (torch.cuda, "set_device", lambda _: None),
            (torch.cuda.random, "get_rng_state", lambda *_: torch.zeros(8, dtype=torch.uint8)),
            (torch.cuda.random, "set_rng_state", lambda *_: None),
            (torch.cuda, "get_device_properties", lambda *_: mock.Mock(major=8, minor=0, total_memory=2**35)),
            (torch.cuda, "get_device_capability", lambda *_: (8, 0)),
            (torch.cuda, "get_device_name", lambda *_: "a GPU"),
            (torch.autocast, "__init__", _autocast_here(torch.autocast.__init__)),
            (torch, "load", _loading_there(torch.load, live)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # `torch.compile` is predicted as eager, and says so
        stack.enter_context(live)
        stack.enter_context(_OnDevice(live))
        live.calibrate()
        yield live


def peak_live_bytes(program: Callable[[], object]) -> int:
    """Run a ``program`` for real on the CPU, and return the peak of its live bytes on the device."""
    with live_bytes_tracked() as live:
        program()
    return live.peak
