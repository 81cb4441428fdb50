"""What links add to a step: collectives and overlap by hand, laws, and steps that were captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from perfguard import load_predictor
from perfguard.collectives import LINKS, LinkConfig, collective_s, largest_normal, link_times, makespan_s, ring_factor
from perfguard.devices import resolve_device
from perfguard.exceptions import ConfigurationError
from perfguard.graph import Op, OpGraph, Phase
from perfguard.log_tables import device_from_json, device_row
from perfguard.unmodelled import NETWORK_ASSUMED
from tests.perfguard.capture.toy_ranks import dry_run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # this build has no NCCL, and PyTorch says so
H100 = resolve_device("h100")
GB = 10**9
DEVICE = replace(H100, link_bytes_per_s=100e9, network_bytes_per_s=10e9)
PLAIN = LinkConfig(latency_s=0.0, hop_s=0.0, efficiency=1.0, jitter=0.0)


def op_of(name: str, reads: Sequence[int], writes: Sequence[int], *, ranks: tuple[int, int] | None = None, size: int = GB) -> Op:
    attributes = {"stream": 1} if name.startswith("beside") else {} if ranks is None else {"ranks": ranks}
    return Op(name, "copy", Phase.BACKWARD, 0, size, size, tuple(reads), tuple(writes), "", (), "float32", attributes)


def graph_of(*ops: Op) -> OpGraph:
    return OpGraph(ops, (), "train", "fp32", "nchw")


def waits_s(graph: OpGraph, op_time_s: Sequence[float], links: LinkConfig = PLAIN) -> float:
    times = link_times(graph, DEVICE, np.array(op_time_s), links)
    assert times is not None
    return float(times.waits_s.sum())


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("allreduce_", 1.5),
        ("_allgather_base_", 0.75),
        ("_reduce_scatter_base_", 0.75),
        ("alltoall_base_", 0.75),
        ("broadcast_", 1),
    ],
)
def test_ring_factors_of_four_ranks(name: str, factor: float) -> None:
    assert ring_factor(name, 4) == factor
    assert collective_s(name, GB, 4, 4, DEVICE, PLAIN) == pytest.approx(factor * 0.01)  # 1 GB at 100 GB/s
    assert collective_s(name, GB, 4, 2, DEVICE, PLAIN) == pytest.approx(factor * 0.05)  # two GPUs have 20 GB/s of the network


def test_latency_grows_with_nodes_and_slower_in_a_ring_than_in_a_tree() -> None:
    links = replace(PLAIN, latency_s=1.0, hop_s=1.0)
    assert [collective_s("_allgather_base_", 0, 8 * nodes, 8, DEVICE, links) for nodes in (1, 2, 16)] == [1, 2, 16]
    assert [collective_s("allreduce_", 0, 8 * nodes, 8, DEVICE, links) for nodes in (1, 2, 16)] == [1, 3, 9]


def test_more_bytes_and_more_nodes_are_never_faster() -> None:
    for name in ("allreduce_", "_allgather_base_"):
        by_bytes = [collective_s(name, 2**power, 16, 8, H100) for power in range(0, 40, 3)]
        by_nodes = [collective_s(name, GB, 16, in_node, H100) for in_node in (16, 8, 4, 2, 1)]
        assert by_bytes == sorted(by_bytes)
        assert by_nodes == sorted(by_nodes)
        assert by_nodes[0] < by_nodes[1]


def test_expected_largest_of_normal_values() -> None:
    assert largest_normal(1) == 0
    draws = np.random.default_rng(0).normal(size=(20_000, 64)).max(axis=1)
    assert largest_normal(64) == pytest.approx(draws.mean(), rel=0.01)


def test_bucket_overlaps_the_rest_of_the_backward_pass() -> None:
    reduce = op_of("allreduce_", [0], [0], ranks=(2, 2))  # 10 ms
    ops = op_of("mm", [], [0]), reduce, op_of("mm", [], [1]), op_of("adam", [0], [])
    assert waits_s(graph_of(*ops), [0.1, 0, 0.010, 0.1]) == pytest.approx(0)
    assert waits_s(graph_of(*ops), [0.1, 0, 0.004, 0.1]) == pytest.approx(0.006)
    assert waits_s(graph_of(*ops[:2], ops[3], ops[2]), [0.1, 0, 0.1, 0.1]) == pytest.approx(0.010)  # nothing to overlap


def test_two_gathers_are_in_flight() -> None:
    ops, on_link = [], []
    for layer, gather_s in enumerate((0.1, 0.1, 0.1, 3.0)):  # the last begins when the second is copied out, at 1.1 s
        copy_out, compute = op_of("split_with_sizes_copy", [layer], [10 + layer]), op_of("mm", [10 + layer], [])
        ops += [op_of("_allgather_base_", [], [layer]), copy_out, compute]
        on_link += [gather_s, 0.0, 0.0]
    assert makespan_s(ops, np.array([0.0, 0.0, 1.0] * 4), np.array(on_link)) == pytest.approx(1.1 + 3.0 + 1.0)


def test_what_follows_on_the_stream_of_a_collective_does_not_hold_the_computation() -> None:
    scatter = op_of("_reduce_scatter_base_", [0], [1])
    after = [op_of("mm", [], []), op_of("adam", [2], [])]
    for name, expected_s in (("beside", 0.1 + 0.5 + 0.1), ("waits", 0.1 + 0.2 + 0.5 + 0.1)):
        ops = [op_of("mm", [], [0]), scatter, op_of(name, [1], [2]), *after]
        assert makespan_s(ops, np.array([0.1, 0, 0, 0.5, 0.1]), np.array([0, 0.2, 0, 0, 0])) == pytest.approx(expected_s)


def test_links_of_one_rank_add_nothing_and_the_spread_grows_with_ranks() -> None:
    graphs = [graph_of(op_of("mm", [], [0]), op_of("allreduce_", [0], [0], ranks=(ranks, 8))) for ranks in (1, 2, 8, 16)]
    one, *many = (link_times(graph, DEVICE, np.array([1.0, 0.0])) for graph in graphs)
    assert one is None
    sigmas = [times.log_sigma for times in many if times]
    assert sigmas == sorted(sigmas)
    unstated = link_times(graphs[-1], replace(DEVICE, network_bytes_per_s=0.0), np.array([1.0, 0.0]))
    assert unstated
    assert unstated.log_sigma > sigmas[-1]
    assert unstated.assumed == (NETWORK_ASSUMED.of("12.5 GB/s"),)


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_captured_step_waits_for_slow_links_and_on_fast_ones_takes_its_computation(way: str) -> None:
    graph, guardnet = dry_run(way, 16, "h100").graph, load_predictor()
    groups = [op.attributes["ranks"] for op in graph.ops if "ranks" in op.attributes]
    assert set(groups) == {(16, 8)}
    alone = [op._replace(attributes={key: value for key, value in op.attributes.items() if key != "ranks"}) for op in graph.ops]
    computed = guardnet.predict(replace(graph, ops=tuple(alone)), H100)
    one_rank = replace(graph, ops=tuple(op._replace(attributes={**op.attributes, "ranks": (1, 1)}) for op in graph.ops))
    assert guardnet.predict(one_rank, H100).step_time == computed.step_time  # to the bit
    slow, fast = (guardnet.predict(graph, H100.with_network(rate)) for rate in (1e8, 50e9))
    assert slow.time_parts_s["communication"] > 10 * fast.time_parts_s["communication"] > 0
    assert slow.step_time.median > fast.step_time.median > computed.step_time.median
    assert slow.step_time.log_sigma > computed.step_time.log_sigma
    assert slow.account["step_time"][-1].name == "links"
    without_nccl = guardnet.predict(replace(graph, options=()), H100)
    for found in (slow, computed):  # an evaluation has no collectives
        assert found.peak_memory.median - without_nccl.peak_memory.median == pytest.approx(LINKS.nccl_bytes)
    assert sum(slow.time_by_kind_s.values()) == pytest.approx(slow.step_time.median)
    shares = guardnet.op_time_shares(graph, H100.with_network(1e8))  # type: ignore[attr-defined]
    assert shares[["ranks" in op.attributes for op in graph.ops]].sum() > 0.5
    fastest = link_times(graph, H100.with_network(1e30), np.ones(len(graph.ops)), replace(PLAIN, link_bytes_per_s=1e30))
    assert fastest
    assert fastest.waits_s.sum() == pytest.approx(0, abs=1e-9)


def test_gpus_of_a_node_are_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    graph = dry_run("DDP", 4, "h100").graph
    assert {op.attributes["ranks"] for op in graph.ops if op.name == "allreduce_"} == {(4, 2)}
    assert OpGraph.from_bytes(graph.to_bytes()).ops == graph.ops


def test_links_are_no_part_of_a_devices_identity_and_a_log_has_them() -> None:
    there = H100.with_network(50e9)
    assert there.identity == H100.identity
    assert device_from_json(device_row(there).values["data"]) == there
    with pytest.raises(ConfigurationError, match=r"network_bytes_per_s of 'h100-sxm-80gb' must be finite and not negative"):
        H100.with_network(-1.0)
