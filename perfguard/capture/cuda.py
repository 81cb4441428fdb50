"""What PyTorch and the libraries ask of CUDA, answered as by a process with the guarded GPU, whatever this machine has.

No question reaches a driver. A build of PyTorch for the CPU lacks the functions that ask one (`torch._C._cuda_...`), which
libraries name as they are imported. A function without effect stands for each.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from perfguard.graph.libraries import Replace

if TYPE_CHECKING:
    from perfguard.devices import Device

_CUDA_VERSION = "13.0"
"""Of a build of PyTorch that is for the CPU. Libraries ask for its major number."""
_CUDNN_VERSION = 91300


@contextmanager
def missing_functions() -> Iterator[None]:
    """Let `torch._C` have each function of CUDA that a build may have. One that is missing returns 0."""

    def __getattr__(name: str) -> Callable[..., int]:
        if not name.startswith(("_cuda_", "_nccl_", "_cudnn_")):
            raise AttributeError(f"module 'torch._C' has no attribute {name!r}")
        return lambda *_, **__: 0

    vars(torch._C)["__getattr__"] = __getattr__
    try:
        yield
    finally:
        del vars(torch._C)["__getattr__"]


class _Nothing:
    """A stream or an event of CUDA."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0.0

    def record_event(self, *_: Any) -> _Nothing:
        return self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None: ...


# https://developer.nvidia.com/cuda-gpus; of a generation's cards, its large ones.
_CAPABILITIES = {
    "Kepler": (3, 7), "Pascal": (6, 0), "Volta": (7, 0), "Turing": (7, 5), "Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0),
    "Blackwell": (10, 0),
}  # fmt: skip


def pretend_cuda(replace: Replace, device: Device, on_replay: Callable[[Any], object]) -> None:
    """Answer as a process with the guarded GPU would, whatever this machine has. No question reaches a driver.

    Args:
        replace: replaces an attribute of a module.
        device: the guarded device.
        on_replay: called with each graph that is replayed, which may be a step that nothing shows.
    """
    memory = device.memory_bytes
    capability = _CAPABILITIES.get(device.architecture, (8, 0))
    properties = types.SimpleNamespace(
        name=device.name, total_memory=memory, major=capability[0], minor=capability[1], multi_processor_count=device.num_sms,
        is_integrated=False, is_multi_gpu_board=False, warp_size=32, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152, gcnArchName="",
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_name": device.name,
        "get_device_capability": capability, "get_device_properties": properties, "mem_get_info": (memory, memory),
        "is_bf16_supported": True, "set_device": None, "synchronize": None, "empty_cache": None, "ipc_collect": None,
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "reset_peak_memory_stats": None, "reset_max_memory_allocated": None, "memory_stats": {}, "memory_summary": "",
        "set_per_process_memory_fraction": None, "manual_seed": None, "manual_seed_all": None, "init": None, "_lazy_init": None,
        "get_rng_state": torch.zeros(0, dtype=torch.uint8), "set_rng_state": None, "get_rng_state_all": [],
        "set_rng_state_all": None, "can_device_access_peer": False, "cudart": _Nothing(), "is_current_stream_capturing": False,
        "get_arch_list": [f"sm_{capability[0]}{capability[1]}"], "is_initialized": True, "utilization": 0, "memory_usage": 0,
        "temperature": 0, "power_draw": 0, "clock_rate": 0, "list_gpu_processes": "", "memory_snapshot": [],
        "current_accelerator": torch.device("cuda"), "current_device_index": 0, "set_device_index": None,
    }  # fmt: skip

    def answering(answer: Any) -> Callable[[Any], Any]:
        return lambda _: lambda *_, **__: answer

    for name, answer in answers.items():
        for module in (torch.cuda, torch.cuda.random, torch.accelerator):
            replace(module, name, answering(answer))
    replace(torch.version, "cuda", lambda own: own or _CUDA_VERSION)
    replace(torch.backends.cuda, "is_built", answering(True))
    replace(torch.backends.cudnn, "is_available", answering(True))
    replace(torch.backends.cudnn, "version", answering(_CUDNN_VERSION))
    replace(torch.backends.cudnn, "is_acceptable", answering(False))  # it would load cuDNN, to lay out weights of an LSTM
    for name in ("mark", "range_push", "range_pop", "range_start", "range_end"):
        replace(torch.cuda.nvtx, name, answering(0))
    replace(torch.autograd.profiler.emit_nvtx, "__enter__", lambda _: lambda self: self)
    replace(torch.autograd.profiler.emit_nvtx, "__exit__", answering(None))
    for name in ("Event", "Stream"):
        replace(torch.cuda, name, lambda _: _Nothing)
    replace(torch.cuda, "CUDAGraph", lambda _: type("CUDAGraph", (_Nothing,), {"replay": on_replay}))
    replace(torch.cuda, "graph", lambda _: lambda *_, **__: nullcontext())  # what is captured runs once, as at its capture
    replace(torch.cuda, "make_graphed_callables", lambda _: lambda callables, *_, **__: callables)
    replace(torch.cuda, "graph_pool_handle", answering((0, 0)))
    current = _Nothing()
    for module in (torch.cuda, torch.accelerator):
        for name in ("current_stream", "default_stream"):
            replace(module, name, lambda _: lambda *_, **__: current)
        for name in ("stream", "device", "device_index"):
            replace(module, name, lambda _: lambda *_, **__: nullcontext())
