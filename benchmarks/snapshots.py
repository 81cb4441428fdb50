"""Do we reserve what CUDA's allocator did? PyTorch's own memory snapshots of real runs, replayed event by event, and traced.

    python benchmarks/snapshots.py SNAPSHOTS.csv.gz EVENTS.csv.gz

SNAPSHOTS has the reserved bytes at the end of each recording, EVENTS every request in order.

Replayed: a recording counts if it began with an empty allocator, so that the segments that it shows are all that is reserved at
its end. Traced: a recording counts if its file's name says the size, the length and the mode. The batch and the vocabulary of
each author follow from the sizes of the segments. The optimizers are the authors' own, in a Python loop over the parameters.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pandas as pd
from _record import parser_of, show

from perfguard import trace
from perfguard.graph.allocator import CachingAllocator, rounded
from perfguard_research.tables import MIB, run_row

SIZES = {
    "medium": {"d_model": 1024, "num_layers": 24, "num_heads": 16, "d_ff": 4096},
    "large": {"d_model": 1280, "num_layers": 36, "num_heads": 20, "d_ff": 5120},
    "xl": {"d_model": 2560, "num_layers": 32, "num_heads": 32, "d_ff": 10240},
}
SIZES["2.7b"] = SIZES["xl"]
"""Of the course's table. For these authors, "xl" is the model of 2.7 billion parameters, as their segments say."""
BATCHES = {"LINYUNLinYun": 4, "Luoluoluo0110": 1, "Hyperion-shuo": 1, "Wedsonlin": 4, "aimetrics": 4}
VOCABULARY = {"Luoluoluo0110": 32000}
"""Others have 10,000 words."""
AUTOCAST = ("medium_512_inference", "medium_512_training", "medium_1024_training")
"""Names that do not say that they ran under autocast. These ask for blocks of half the scores' size, and a third more of them."""


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


def traced_bytes(author: str, name: str) -> tuple[str, int] | None:
    """What was run, and the bytes that are reserved for it. None: nobody says what it was."""
    found = re.search(rf"({'|'.join(map(re.escape, SIZES))})_(?:ctx|cl|seq|forward_seq)?(\d+)", name)
    if found is None or author not in BATCHES or "with_grad" in name:  # what they keep of a forward pass is not known
        return None
    size, length = found[1], int(found[2])
    mode = "train" if "training" in name else "infer"
    precision = "amp-bf16" if "bf16" in name or name.startswith(AUTOCAST) else "fp32"
    row = {
        "source": author,
        "model": "cs336:BasicsTransformerLM",
        "config": json.dumps(SIZES[size] | {"vocab_size": VOCABULARY.get(author, 10000), "context_length": length}),
        "mode": mode,
        "gpu": "a100",  # no card is named; their workspaces of cuBLAS are not those of a Hopper
        "num_gpus": "1",
        "precision": precision,
        "optimizer": "adamw" if mode == "train" else "none",
        "batch_size": str(BATCHES[author]),
        "input": json.dumps({"seq_len": length}),
    }
    run = run_row(row, "run")
    model = run.make_model()
    assert model is not None
    graph = trace(run.workload(model), target=run.device)
    return f"{size}, {length} tokens, {mode}, {precision}", graph.reserved_bytes(run.device)


def main() -> None:
    """Show each recording that began with an empty allocator, and each that can be traced."""
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

    lines, errors = [], []
    for snapshot in snapshots[~snapshots["expandable"]].itertuples():
        author = snapshot.source.partition("/")[0]
        traced = traced_bytes(author, Path(snapshot.path).stem)
        if traced is not None:
            run, found = traced
            reserved = snapshot.reserved_end
            difference = found / reserved - 1
            lines.append([f"{author}: {run}", f"{reserved / MIB:,.0f}", f"{found / MIB:,.0f}", f"{difference:+.1%}"])
            errors.append(abs(difference))
    lines.append(["mean error", "", "", f"{statistics.fmean(errors):.1%}"])
    show("snapshots-traced", ["recording", "reserved, MiB", "traced, MiB", "difference"], lines, record=arguments.record)


if __name__ == "__main__":
    main()
