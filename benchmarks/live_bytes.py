"""Are the live bytes of a traced step those of a real one? Counted on this machine's CPU by a tracker of its own.

    OMP_NUM_THREADS=1 python benchmarks/live_bytes.py                       # a few minutes
    OMP_NUM_THREADS=1 python benchmarks/live_bytes.py timm:tresnet_m --batch 2

A network of timm trains for two steps of SGD with momentum. In the second one, each operator that runs is asked which storages it
has read and written, and these count until PyTorch frees them (`torch.multiprocessing.reductions.StorageWeakRef`). Nothing of
PerfGuard counts there. The other column is what `perfguard.trace` says of the same step.

The networks are some of those that `benchmarks/search_quality.py` leaves out of the A100's table, since the traced step has more
bytes alive than the table says that the run had needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from _record import parser_of, show
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfguard import TensorSpec, Workload, trace
from perfguard.quantities import format_bytes

NETWORKS = (
    "resnet101_clip", "vitamin_small_224", "xception41", "fastvit_mci0", "eva02_tiny_patch14_224", "ecaresnext50t_32x4d",
)  # fmt: skip


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators have met and that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, value: Any) -> None:
        """Count the tensors in ``value``."""
        for leaf in tree_leaves(value):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._bury()  # before the address of one that is dead is that of another
        out = func(*args, **(kwargs or {}))
        self._bury()
        self.note((args, kwargs, out))
        return out

    def _bury(self) -> None:
        for address in [address for address, (reference, _) in self._alive.items() if reference.expired()]:
            del self._alive[address]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """That of the table."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def real_peak(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> int:
    """Peak live bytes of the second step."""
    optimizer = optimizer_of(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    step()
    live = LiveBytes()
    with live:
        live.note([*model.parameters(), *model.buffers(), images, labels, *map(dict, optimizer.state.values())])
        step()
    return live.peak


def row_of(name: str, batch: int) -> list[str]:
    """A network, as a row of the table."""
    import timm

    torch.manual_seed(0)
    model: Any = timm.create_model(name).train()
    shape = (batch, *model.default_cfg["input_size"])
    workload = Workload(timm.create_model(name), TensorSpec(shape), TensorSpec((batch,), "int64"), F.cross_entropy, optimizer_of)
    traced = int(trace(workload).peak_live_bytes)
    real = real_peak(model, torch.randn(shape), torch.zeros(batch, dtype=torch.int64))
    return [f"timm:{name}", str(batch), format_bytes(real), format_bytes(traced), f"{traced / real - 1:+.2%}"]


def main() -> None:
    """Count, and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("networks", nargs="*", default=[f"timm:{name}" for name in NETWORKS])
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()
    rows = [row_of(name.removeprefix("timm:"), arguments.batch) for name in arguments.networks]
    columns = ["network", "batch", "alive at once, real step", "traced step", "difference"]
    show("live-bytes", columns, rows, record=arguments.record)


if __name__ == "__main__":
    main()
