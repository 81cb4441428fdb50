"""Memory of one rank of many: PerfGuard's dry run, PyTorch's own tracker, and two real processes with gloo.

    python benchmarks/ranks.py                       # all ways, for 2 and 8 ranks; five minutes
    python benchmarks/ranks.py --only DDP FSDP2

The model is a transformer of 3.7 million parameters on the CPU. The tracker follows real tensors, with PyTorch's fake process
group for the other ranks. It does not know FSDP1, tensor parallelism and DeepSpeed (in bfloat16): in its place is what the CPU's
allocator gives out, which is summed for the real processes, too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from _record import parser_of, show

sys.path.append(str(Path(__file__).parents[1]))
from perfguard.capture.ranks import torchrun_variables
from tests.perfguard.capture import toy_deepspeed
from tests.perfguard.capture.toy_allocated import allocated_bytes
from tests.perfguard.capture.toy_ranks import WAYS, dry_run, in_a_child, real_bytes, tracked_bytes


def main() -> None:
    """Train in each way and show the table."""
    parser = parser_of(__doc__)
    ways = [*WAYS, *toy_deepspeed.ZERO]
    parser.add_argument("--only", nargs="+", default=ways, metavar="WAY", help="some of: " + ", ".join(ways))
    arguments = parser.parse_args()
    rows = [row_of(way, world_size) for way in arguments.only for world_size in (2, 8)]
    columns = ["way", "ranks", "dry run, MiB", "tracker, MiB", "difference", "real peak, MiB"]
    show("ranks", columns, rows, record=arguments.record)


def row_of(way: str, world_size: int) -> list[str]:
    """Peaks of the last step."""
    real = "-"
    if way in toy_deepspeed.ZERO:
        os.environ |= torchrun_variables(world_size)
        seen = in_a_child(lambda: toy_deepspeed.train(toy_deepspeed.ZERO[way]), "h100").graph.peak_live_bytes
    else:
        seen = dry_run(way, world_size).graph.peak_live_bytes
        if world_size == 2:
            with tempfile.TemporaryDirectory() as folder:
                real = f"{real_bytes(way, Path(folder))[0] / 2**20:.2f}"
    knows = way.startswith(("DDP", "FSDP2"))
    tracked = tracked_bytes(way, world_size) if knows else allocated_bytes(way, world_size)
    return [way, str(world_size), f"{seen / 2**20:.2f}", f"{tracked / 2**20:.2f}", f"{seen / tracked - 1:+.2%}", real]


if __name__ == "__main__":
    main()
