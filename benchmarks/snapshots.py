"""Does our allocator reserve what CUDA's did? PyTorch's own memory snapshots of real runs, replayed event by event.

    python benchmarks/snapshots.py SNAPSHOTS.csv.gz EVENTS.csv.gz

SNAPSHOTS has the reserved bytes at the end of each recording, EVENTS every request in order. A recording counts if it began with
an empty allocator: the segments that it shows are all that is reserved at its end.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from _record import parser_of, show

from perfguard.graph.allocator import CachingAllocator, rounded

MIB = 2**20


def replayed_bytes(events: pd.DataFrame) -> int:
    """Bytes that our allocator has reserved after ``events``."""
    requests: list[int] = []  # as `CachingAllocator.run` takes them
    sizes: list[int] = []
    block_at: dict[int, int] = {}
    for action, size, address in zip(events["action"], events["size"], events["addr_id"], strict=True):
        if action == "alloc":
            block_at[address] = len(sizes)
            requests.append(len(sizes))
            sizes.append(rounded(size))
        elif action == "free_completed" and address in block_at:
            requests.append(~block_at.pop(address))
    allocator = CachingAllocator()
    allocator.run(requests, sizes, [0] * len(sizes))
    return allocator.reserved_bytes


def main() -> None:
    """Show each recording that began with an empty allocator."""
    parser = parser_of(__doc__)
    parser.add_argument("snapshots", type=Path)
    parser.add_argument("events", type=Path)
    arguments = parser.parse_args()
    snapshots = pd.read_csv(arguments.snapshots).set_index("snapshot")
    lines = []
    for number, events in pd.read_csv(arguments.events).groupby("snapshot"):
        snapshot = snapshots.loc[number]
        segments = events["size"].where(events["action"] == "segment_alloc", 0) - events["size"].where(
            events["action"] == "segment_free", 0
        )
        if segments.sum() != snapshot["reserved_end"] or snapshot["expandable"]:
            continue
        found = replayed_bytes(events)
        name = f"{snapshot['source']}, {Path(snapshot['path']).stem}"
        difference = found / snapshot["reserved_end"] - 1
        lines.append(
            [name, f"{len(events):,}", f"{snapshot['reserved_end'] / MIB:,.0f}", f"{found / MIB:,.0f}", f"{difference:+.2%}"]
        )
    show("snapshots", ["recording", "events", "reserved, MiB", "replayed, MiB", "difference"], lines, record=arguments.record)


if __name__ == "__main__":
    main()
