"""FSDP2 with offload to the host under PyTorch's own tracker, on fake tensors of a device that Python makes.

It prints the peaks of a step on the device and on the host, in bytes:

    python -m tests.perfguard.capture.toy_offloaded bf16 8
"""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.warm import run_warm

POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
STEPS = 4


class Layer(nn.Linear):
    """With whatever weights: a fake device draws none."""

    def reset_parameters(self) -> None: ...


def perceptron(mesh: DeviceMesh, precision: str) -> nn.Module:
    """Return layers that are sharded one by one over ``mesh``, and offloaded. Nothing is pinned: the tracker would not round."""
    options: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": POLICIES[precision], "mesh": mesh}
    with torch.device(mesh.device_type):
        model = nn.Sequential(*(nn.Sequential(Layer(256, 1024), nn.GELU(), Layer(1024, 256)) for _ in range(6)))
    for part in (*model, model):
        fully_shard(part, **options)
    return model


def train(model: nn.Module, device: str, around: Any = lambda *_: nullcontext()) -> None:
    """Train for some steps, each within ``around(optimizer, batch)``."""
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.empty(64, 256, device=device)
    for _ in range(STEPS):
        with around(optimizer, batch):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()


def tracked_bytes(precision: str, world_size: int) -> tuple[int, int]:
    """The peaks of a step on the device and on the host, in a process of its own."""
    status, printed = run_warm("-m", __spec__.name, precision, str(world_size), cwd=Path.cwd(), timeout_s=300)
    assert status == 0, printed
    device, host = re.findall(r"^the peaks: (\d+) (\d+)$", printed, re.MULTILINE)[0]
    return int(device), int(host)


class _Stream:
    """A stream or an event: fake tensors are there at once."""

    stream_id = device_index = device_type = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class _Gpu:
    """What PyTorch asks of the module of a device."""

    Stream = Event = _Stream
    stream = device = staticmethod(lambda *_: nullcontext())
    current_stream = staticmethod(lambda *_: _Stream())
    current_device, device_count = staticmethod(lambda: 0), staticmethod(lambda: 1)
    is_available = is_initialized = staticmethod(lambda: True)
    set_device = staticmethod(lambda _: None)


def main() -> None:
    """Train, and print the peaks of the last step."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.testing._internal.distributed import fake_pg  # noqa: F401
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("gpu", _Gpu())
    vars(sys.modules["torch.optim.adam"])["_get_value"] = lambda step: 1.0  # a fake tensor has none
    dist.init_process_group("fake", rank=0, world_size=int(sys.argv[2]))
    trackers: list[Any] = []

    def tracked(optimizer: Any, batch: torch.Tensor) -> Any:
        trackers.append(FSDPMemTracker(model, optimizer))
        trackers[-1].track_inputs((batch,))
        return trackers[-1]

    mesh = init_device_mesh("gpu", (dist.get_world_size(),))  # it reads numbers of ranks
    with FakeTensorMode():
        model = perceptron(mesh, sys.argv[1])
        train(model, "gpu", tracked)
    peaks = {device.type: found["Total"] for device, found in trackers[-1].get_tracker_snapshot("peak").items()}
    print(f"\nthe peaks: {peaks['gpu']} {peaks['cpu']}")


if __name__ == "__main__":
    main()
