"""The order of the configurations, their recipes, and the batches that they get."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import pytest

from perfguard import resolve_device
from perfguard.devices import Device
from perfguard.graph import OpGraph, TraceCache
from perfguard_research.collect.loop import COLUMNS, planned
from perfguard_research.collect.spaces import SPACES, Draft, Space, drafts, import_libraries
from perfguard_research.networks import Network
from perfguard_research.tables import MeasuredRow
from tests import zoo
from tests.doubles import TOY_CPU
from tests.rows import MLP, mlp

OWN: tuple[Space, ...] = ("mlp", "rnn", "nas")
"""Spaces that need no other package."""


def first(number: int, spaces: tuple[Space, ...] = OWN, *, seed: int = 0, on_gpu: bool = True) -> list[Draft]:
    return list(itertools.islice(drafts(spaces, seed=seed, device=resolve_device("t4" if on_gpu else "cpu")), number))


def draft_of(row: MeasuredRow, share: float, *, round_batch: bool = False) -> Draft:
    return Draft({}, row, share, round_batch)


def plan(
    row: MeasuredRow, share: float, device: Device, capacity_bytes: int | None = None, *, round_batch: bool = False
) -> MeasuredRow:
    found = planned(draft_of(row, share, round_batch=round_batch), device, capacity_bytes or device.memory_bytes)
    assert isinstance(found, MeasuredRow), found
    return found


def graph_of(row: MeasuredRow, device: Device) -> OpGraph:
    return row.graph(row.make_model(), TraceCache(), device)


def test_spaces_take_turns_and_a_seed_is_an_order() -> None:
    assert [draft.columns["space"] for draft in first(15)] == [*OWN] * 5
    assert first(20) == first(20)
    assert [draft.row.network.key for draft in first(20)] != [draft.row.network.key for draft in first(20, seed=1)]


def test_drafts_on_cpu_have_no_gpu_options() -> None:
    rows = [draft.row for draft in first(200, on_gpu=False)]
    assert not any(r.cudnn_benchmark or r.compiled or r.tf32 != "default" or r.precision == "amp-fp16" for r in rows)


def test_configuration_with_a_missing_library_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    import_libraries(["text"])
    device = resolve_device("t4")
    assert "The model is from transformers, which is not installed" in str(planned(first(1, ("text",))[0], device, 2**34))


@pytest.mark.skipif(not zoo.IS_COMPLETE, reason="needs timm, torchvision and transformers")
def test_each_draft_can_be_traced_and_is_written_in_columns_of_the_table() -> None:
    for draft in first(10, SPACES):
        graph = graph_of(dataclasses.replace(draft.row, batch_size=2), resolve_device("t4"))
        assert graph.mode == draft.row.mode
        assert graph.peak_live_bytes > 0
        assert set(draft.columns) < set(COLUMNS)


def test_a_plan_takes_the_wanted_share_of_the_memory() -> None:
    device = resolve_device("t4")
    row = plan(mlp(width=256, depth=3), 0.25, device, round_batch=True)
    peak = graph_of(row, device).peak_live_bytes + device.context_bytes
    assert peak == pytest.approx(0.25 * device.memory_bytes, rel=0.06)
    assert row.batch_size % 16 == 0


def test_plan_has_no_long_step_unless_it_should_fail() -> None:
    slow, device = mlp(width=8192, depth=16), resolve_device("t4")
    assert plan(slow, 0.9, device).batch_size < 0.8 * plan(slow, 1.1, device).batch_size
    assert plan(mlp(width=512, depth=16), 1.1, TOY_CPU, 2**30).batch_size < 2000  # 30 ms at 100 GFLOP/s
    assert planned(draft_of(slow, 0.9), TOY_CPU, 2**40) == "a step would take too long on a CPU"


def test_plan_gives_reason_for_untraceable_network() -> None:
    network = Network(name="perfguard:mlp", config={"inputs": 3, "depth": 1})
    draft = draft_of(dataclasses.replace(MLP, network=network), 0.5)
    reason = planned(draft, resolve_device("t4"), 2**34)
    assert isinstance(reason, str)
    assert "cannot be made: KeyError: 'width'" in reason
