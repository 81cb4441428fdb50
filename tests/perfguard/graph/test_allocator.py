"""CUDA's caching allocator, by its published constants and by invariants."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from perfguard.devices import resolve_device
from perfguard.graph import Op, OpGraph, Phase, Storage, StorageKind, replay_allocator, trace
from perfguard.graph.allocator import CachingAllocator, cublas_workspace_bytes, rounded
from perfguard.workload import Workload
from tests.models import oracle

MIB = 2**20
DEVICE = resolve_device("a100")


@pytest.mark.parametrize(
    ("num_bytes", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 1024, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
        (100 * MIB + 512, 102 * MIB),
    ],
)
def test_the_size_of_a_segment(num_bytes: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.run([0], [rounded(num_bytes)], [0])
    assert allocator.reserved_bytes == reserved


requests = st.lists(st.tuples(st.integers(0, 40 * MIB), st.integers(0, 10)), min_size=1, max_size=60)


SlowBlock = dict[str, int]
"""Its size, and whether it is free."""


class SlowAllocator:
    """The allocator as plainly as can be: segments are lists of blocks, and every request looks at all of them."""

    def __init__(self) -> None:
        self._segments: list[tuple[bool, list[SlowBlock]]] = []
        """Whether it is of large requests, and its blocks."""
        self.reserved_bytes = 0

    def malloc(self, num_bytes: int) -> SlowBlock | None:
        size, is_large = -(-num_bytes // 512) * 512, num_bytes > MIB
        if not size:
            return None
        segments = [blocks for large, blocks in self._segments if large == is_large]
        fitting = [(block["size"], at, blocks, block) for at, blocks in enumerate(segments) for block in blocks if block["free"]]
        fitting = sorted((entry for entry in fitting if entry[0] >= size), key=lambda entry: entry[:2])
        blocks, block = fitting[0][2:] if fitting else self._new(size, is_large)
        rest = block["size"] - size
        if rest > MIB if is_large else rest >= 512:
            block["size"] = size
            blocks.insert([other is block for other in blocks].index(True) + 1, {"size": rest, "free": 1})
        block["free"] = 0
        return block

    def _new(self, size: int, is_large: bool) -> tuple[list[SlowBlock], SlowBlock]:
        unit = 20 * MIB if is_large and size < 10 * MIB else 2 * MIB
        blocks = [{"size": -(-size // unit) * unit, "free": 1}]
        self._segments.append((is_large, blocks))
        self.reserved_bytes += blocks[0]["size"]
        return blocks, blocks[0]

    @property
    def allocated_bytes(self) -> int:
        return sum(block["size"] for _, blocks in self._segments for block in blocks if not block["free"])

    def free(self, block: SlowBlock | None) -> None:
        if block is None:
            return
        block["free"] = 1
        for _, blocks in self._segments:
            for at in range(len(blocks) - 1, 0, -1):
                if blocks[at]["free"] and blocks[at - 1]["free"]:
                    blocks[at - 1]["size"] += blocks.pop(at)["size"]


@settings(max_examples=100)
@given(requests)
def test_allocator_equals_slow_allocator(calls: list[tuple[int, int]]) -> None:
    allocator, slow = CachingAllocator(), SlowAllocator()
    sizes, blocks = [rounded(num_bytes) for num_bytes, _ in calls], [0] * len(calls)
    live: list[tuple[int, SlowBlock | None]] = []
    for at, (num_bytes, keep) in enumerate(calls):
        allocator.run([at], sizes, blocks)
        live.append((at, slow.malloc(num_bytes)))
        assert (allocator.reserved_bytes, allocator.allocated_bytes) == (slow.reserved_bytes, slow.allocated_bytes)
        if len(live) > keep:
            freed, slow_block = live.pop(keep // 2)
            allocator.run([~freed], sizes, blocks)
            slow.free(slow_block)


def step(width: int, depth: int, batch: int, mode: str = "train") -> OpGraph:
    model = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])
    loss = (lambda output: output.sum()) if mode == "train" else None
    return trace(Workload(model, (batch, width), loss=loss, mode=mode, optimizer=torch.optim.Adam))  # type: ignore[arg-type]


@settings(max_examples=20)
@given(st.integers(8, 512), st.integers(1, 4), st.integers(1, 2048), st.sampled_from(["train", "infer"]))
def test_reserved_is_never_less_than_live(width: int, depth: int, batch: int, mode: str) -> None:
    graph = step(width, depth, batch, mode)
    replay = replay_allocator(graph, DEVICE)
    assert replay.reserved_bytes >= replay.allocated_bytes >= graph.peak_live_bytes


def test_kept_outputs_are_held_twice() -> None:
    """100 MiB of outputs are made while those of the step before are there, and 30 MiB more when these are gone."""
    ops = tuple(Op("add", "add", Phase.FORWARD, 0, 0, 0, (), (), "", (), "float32", {}) for _ in range(3))
    until_next_forward, whole = len(ops) + 1 + 1, len(ops)
    for death, peak, reserved in ((until_next_forward, 200, 230), (whole, 130, 130)):
        storages = (Storage(100 * MIB, StorageKind.ACTIVATION, 1, death, ""), Storage(30 * MIB, StorageKind.TEMPORARY, 2, 2, ""))
        graph = OpGraph(ops, storages, "train", "fp32", "nchw")
        assert replay_allocator(graph, DEVICE).allocated_bytes == peak * MIB
        assert graph.peak_live_bytes == peak * MIB
        assert graph.reserved_bytes(DEVICE) == reserved * MIB


@pytest.mark.parametrize(("gpu", "workspace"), [("a100", 8_519_680), ("h100", 32 * MIB)])
def test_each_thread_has_a_workspace_of_cublas_since_its_first_product(gpu: str, workspace: int) -> None:
    """As recordings of PyTorch's allocator show: one in a forward pass, another in a backward pass."""

    def allocated(*phases: Phase) -> int:
        ops = tuple(Op("mm", "matmul", phase, 0, 0, 0, (), (), "", (), "float32", {}) for phase in phases)
        return replay_allocator(OpGraph(ops, (), "train", "fp32", "nchw"), resolve_device(gpu)).allocated_bytes

    assert cublas_workspace_bytes(resolve_device(gpu)) == workspace
    assert allocated() == 0
    assert allocated(Phase.FORWARD, Phase.FORWARD) == workspace
    assert allocated(Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.OPTIMIZER) == 2 * workspace


@pytest.mark.parametrize("exponent", [20, 33, 45])
def test_no_size_is_too_large_for_the_replay(exponent: int) -> None:
    """At 2^49 bytes addresses ran into sizes: a KeyError, or a wrong number without one."""
    graph = step(64, 3, 32)
    storages = tuple(storage._replace(num_bytes=storage.num_bytes << exponent) for storage in graph.storages)
    large = OpGraph(graph.ops, storages, graph.mode, graph.precision, graph.layout)
    replay = replay_allocator(large, DEVICE)
    assert replay.reserved_bytes >= replay.allocated_bytes >= max(oracle.live_bytes(large))
    assert large.live_bytes.tolist() == pytest.approx(oracle.live_bytes(large), rel=1e-15)
