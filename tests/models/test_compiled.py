"""What compilers fuse, used for compiled workloads: laws, and numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfguard import Workload, trace
from perfguard.devices import resolve_device
from perfguard.graph import Op, OpGraph, Phase, Storage, StorageKind
from perfguard.predictor import load_predictor
from perfguard.unmodelled import COMPILED_KERNELS
from perfguard_models.compiled import as_compiled, kernels_of, without_inner_tensors
from perfguard_research.fusion.network import shipped
from tests.fusible import SHAPE, network

MIB = 2**20


def traffic(graph: OpGraph) -> int:
    return sum(op.bytes_read + op.bytes_written for op in graph.ops)


def op(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], read: int, written: int, kind: str = "elementwise") -> Op:
    return Op(name, kind, Phase.FORWARD, 10, read, written, inputs, outputs, "", (4,), "float32", {})


def chain(*ops: Op, output: int) -> OpGraph:
    """Storages of a mebibyte. Storage 0 is the input; each other one is born with its writer and lives until its last use."""
    storages = [Storage(MIB, StorageKind.INPUT, -1, len(ops), "x")]
    for index in range(1, max(made for each in ops for made in each.outputs) + 1):
        uses = [at for at, each in enumerate(ops) if index in (*each.inputs, *each.outputs)]
        storages.append(Storage(MIB, StorageKind.TEMPORARY, uses[0], len(ops) if index == output else uses[-1], ""))
    return OpGraph(ops, tuple(storages), "infer", "fp32", "nchw")


CHAIN = chain(
    op("convolution", (0,), (1,), MIB, MIB, "conv"),
    op("native_batch_norm", (1,), (2,), MIB, MIB),
    op("relu_", (2,), (2,), MIB, MIB),
    op("add", (2, 0), (3,), 2 * MIB, MIB),
    output=3,
)


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    """Random graphs of up to 14 operators, some of which run in place."""
    storages = [Storage(draw(st.integers(0, 64)), StorageKind.INPUT, -1, 0, "x")]
    ops = []
    for index in range(draw(st.integers(1, 14))):
        inputs = tuple(sorted(draw(st.sets(st.integers(0, len(storages) - 1), min_size=1, max_size=3))))
        if draw(st.booleans()) and storages[inputs[-1]].birth >= 0:
            outputs: tuple[int, ...] = (inputs[-1],)
        else:
            outputs = (len(storages),)
            storages.append(Storage(draw(st.integers(0, 64)), StorageKind.TEMPORARY, index, 0, ""))
        read = draw(st.integers(0, 3)) * sum(storages[s].num_bytes for s in inputs)
        kind = draw(st.sampled_from(["elementwise", "elementwise", "conv"]))
        ops.append(op(f"op{index}", inputs, outputs, read, sum(storages[s].num_bytes for s in outputs), kind))
    lives = []
    for at, storage in enumerate(storages):
        used = [index for index, made in enumerate(ops) if at in (*made.inputs, *made.outputs)]
        death = len(ops) if storage.birth < 0 or draw(st.booleans()) else max(used)
        lives.append(storage._replace(death=death))
    return OpGraph(tuple(ops), tuple(lives), "infer", "fp32", "nchw")


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_fusion_never_adds_bytes_and_no_kernel_waits_for_itself(graph: OpGraph) -> None:
    kernel = kernels_of(graph)
    fused = without_inner_tensors(graph, kernel)
    assert traffic(fused) <= traffic(graph)
    assert fused.flops == graph.flops
    OpGraph.from_bytes(fused.to_bytes())  # which checks every index
    for at, each in enumerate(fused.ops):
        if each.kind == "conv":
            assert (kernel == kernel[at]).sum() == 1
    before = {number: {kernel[a] for a, b in graph.edges.T if kernel[b] == number} - {number} for number in set(kernel.tolist())}
    while free := [number for number, waits in before.items() if not waits]:  # an order of the kernels exists
        before = {number: waits.difference(free) for number, waits in before.items() if number not in free}
    assert not before


def test_what_only_the_kernel_reads_is_never_written() -> None:
    """Batch norm, the activation in place and the sum are one kernel. It reads the convolution's output and the input."""
    kernel = kernels_of(CHAIN)
    assert kernel.tolist() == [0, 1, 1, 1]
    fused = without_inner_tensors(CHAIN, kernel)
    assert [(each.bytes_read, each.bytes_written) for each in fused.ops] == [(MIB, MIB), (MIB, 0), (0, 0), (MIB, MIB)]
    assert [storage.num_bytes for storage in fused.storages] == [MIB, MIB, 0, MIB]
    assert fused.storages[1].death == 3  # the kernel reads it until it has written its result
    assert (CHAIN.peak_live_bytes, fused.peak_live_bytes) == (3 * MIB, 3 * MIB)


def test_kernel_reads_an_input_once() -> None:
    graph = chain(op("sigmoid", (0,), (1,), MIB, MIB), op("mul", (0, 1), (2,), 2 * MIB, MIB), output=2)
    assert traffic(without_inner_tensors(graph, np.array([0, 1]))) == traffic(graph)
    assert traffic(without_inner_tensors(graph, kernels_of(graph))) == 2 * MIB


def test_operators_around_a_library_kernel_are_apart() -> None:
    """A sum with what a convolution reads, too, waits for the convolution."""
    graph = chain(
        op("relu", (0,), (1,), MIB, MIB),
        op("convolution", (1,), (2,), MIB, MIB, "conv"),
        op("add", (1, 2), (3,), 2 * MIB, MIB),
        output=3,
    )
    assert kernels_of(graph).tolist() == [0, 1, 2]
    assert traffic(without_inner_tensors(graph, kernels_of(graph))) == traffic(graph)


@pytest.mark.parametrize("method", ["rule", "network"])
def test_batch_norm_and_its_activation_are_one_kernel(method: str) -> None:
    graph = trace(Workload(network(), SHAPE, mode="infer", compiled=True), target="cpu")
    number = kernels_of(graph)
    by_rule = [np.flatnonzero(number == at).tolist() for at in range(number.max() + 1)]
    kernels = by_rule if method == "rule" else shipped().kernels(graph, "inductor-cpu")
    names = [[graph.ops[at].name for at in kernel] for kernel in kernels]
    assert sum(found[:2] == ["native_batch_norm", "relu"] for found in names) >= 2
    assert all(found == ["convolution"] for found in names if "convolution" in found)


@pytest.mark.parametrize("gpu", ["cpu", "a100"])
def test_compiled_inference_is_taken_for_faster(gpu: str) -> None:
    device, predictor = resolve_device(gpu), load_predictor()
    for shape in (SHAPE, (256, 8, 64, 64)):
        workload = Workload(network(), shape, mode="infer")
        eager, compiled = (
            predictor.predict(trace(seen, target=device), device) for seen in (workload, replace(workload, compiled=True))
        )
        assert 0 < compiled.step_time.median < eager.step_time.median
        assert compiled.peak_memory.median <= eager.peak_memory.median
        assert any(gap.code == COMPILED_KERNELS.code for gap in compiled.unmodelled)


def test_shares_of_the_time_are_those_of_the_kernels() -> None:
    """Where traffic decides, a kernel takes the share of its operators' bytes that it moves."""
    device = resolve_device("a100")
    graph = trace(Workload(network(), (4096, 8, 64, 64), mode="infer", compiled=True), target=device)
    compiled = as_compiled(graph)
    assert compiled is not None
    shares = compiled.time_shares(device)
    convolution, *kernel = range(4)
    eager = sum(compiled.eager.ops[at].bytes_read + compiled.eager.ops[at].bytes_written for at in kernel)
    left = sum(compiled.graph.ops[at].bytes_read + compiled.graph.ops[at].bytes_written for at in kernel)
    assert shares[convolution] == 1
    assert shares[kernel] == pytest.approx(left / eager, rel=1e-3)
