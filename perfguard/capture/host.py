"""HostUse: what a trial holds in the memory of the host, as its dry run shows it.

    process   the peak of the dry run itself, which reads data, imports libraries and keeps what is offloaded as the trial will
    results   what comes back from the device and is kept, such as activations that are offloaded, or FSDP's shards; and what is
              too large to have data in a dry run (`blanks.py`)
    model     the largest model that the host makes before it moves to the GPU: it is on meta here, so it is counted
    workers   of a DataLoader. Each has memory of its own, makes a batch, and keeps some ready

A dry run starts no worker and pins nothing, so what loaders take is worked out from their settings and their batches.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from perfguard.capture.blanks import zeros_on_host
from perfguard.graph.recorder import tensors_in
from perfguard.measure.cpu import peak_resident_bytes, reset_peak
from perfguard.workload import HostMemory

NO_LENGTH = TypeError, NotImplementedError, ValueError
"""What `len` of a loader raises if it does not know: it streams, or PyTorch Geometric's DynamicBatchSampler makes its batches."""


class HostUse:
    """Follows loaders and models of a dry run.

    Args:
        worker_bytes: what a worker takes for itself. It shares all else with the process (`benchmarks/host_memory.py`).
    """

    def __init__(self, *, worker_bytes: int = 10 * 2**20) -> None:
        reset_peak()
        self._worker_bytes = worker_bytes
        self._model_bytes = self._kept_bytes = self._most_kept_bytes = 0
        self._kept: weakref.WeakKeyDictionary[torch.UntypedStorage, bool] = weakref.WeakKeyDictionary()
        """Storages, and whether each is offloaded."""
        self._loaders: dict[tuple[int, int, bool], int] = {}
        """Bytes of the workers of each loader and of their batches, by its data, their number, and whether they last. A loader
        that is made anew in each epoch is one."""

    def move(self, module: nn.Module) -> None:
        """Note that ``module`` is about to move from the host to the GPU."""
        tensors = {id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
        self._model_bytes = max(self._model_bytes, sum(tensors.values()))

    def keep(self, tensor: torch.Tensor, *, is_pinned: bool = False, is_offloaded: bool = False) -> torch.Tensor:
        """Note and return a ``tensor`` that comes from the device. Here it is never filled, so it takes no memory."""
        storage = tensor.untyped_storage()
        if storage not in self._kept:
            num_bytes = storage.nbytes()
            if is_pinned and num_bytes:  # PyTorch rounds up to a power of two (2.13: ATen/core/CachingHostAllocator.h)
                num_bytes = 1 << (num_bytes - 1).bit_length()
            self._kept_bytes += num_bytes
            self._most_kept_bytes = max(self._most_kept_bytes, self._kept_bytes)
            weakref.finalize(storage, self._drop, num_bytes)
        self._kept[storage] = is_offloaded or self._kept.get(storage, False)
        return tensor

    def offload(self, tensor: torch.Tensor, *, is_pinned: bool = False) -> torch.Tensor:
        """Return a ``tensor`` of parameters, gradients or states on the host. It has no values, so nothing is computed of it."""
        return self.keep(zeros_on_host(tensor) if tensor.is_meta else tensor, is_pinned=is_pinned, is_offloaded=True)

    def has_offloaded(self, value: Any) -> bool:
        """Whether a tensor in ``value`` is offloaded."""
        return any(self._kept.get(tensor.untyped_storage(), False) for tensor in tensors_in(value)) if self._kept else False

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept now."""
        return self._kept_bytes

    def note_held(self, num_bytes: int) -> None:
        """Note bytes that a trial holds for a moment, beside what is kept now, and a dry run does not."""
        self._most_kept_bytes = max(self._most_kept_bytes, self._kept_bytes + num_bytes)

    def _drop(self, num_bytes: int) -> None:
        self._kept_bytes -= num_bytes

    def give(self, loader: Any, batch: Any) -> None:
        """Note a batch that ``loader`` gives."""
        number = loader.num_workers
        batch_bytes = sum(x.nbytes for x in tree_leaves(batch) if isinstance(x, torch.Tensor))
        ready = number * (loader.prefetch_factor or 0)
        with suppress(*NO_LENGTH):
            ready = min(ready, len(loader))
        num_bytes = number * (self._worker_bytes + batch_bytes) + (ready + loader.pin_memory) * batch_bytes
        key = id(loader.dataset), number, loader.persistent_workers
        self._loaders[key] = max(self._loaders.get(key, 0), num_bytes)

    def memory(self) -> HostMemory:
        """What was seen. Of loaders whose workers do not last, the largest one counts."""
        lasting = [(0, 0)]
        passing = [(0, 0)]
        for (_, number, lasts), num_bytes in self._loaders.items():
            (lasting if lasts else passing).append((num_bytes, number))
        num_bytes, num_workers = (sum(column) for column in zip(*lasting, max(passing), strict=True))
        return HostMemory(peak_resident_bytes() + self._most_kept_bytes, self._model_bytes, num_bytes, num_workers)
