"""The catalog: laws that hold for every card, figures checked by hand, and the names that people write."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import pytest

from perfguard.devices import catalog, resolve_device
from perfguard.devices.catalog import find, is_short_for, look_up
from perfguard.exceptions import ConfigurationError

CATALOG = json.loads(resources.files("perfguard.devices").joinpath("catalog.json").read_text(encoding="utf-8"))
ENTRIES: dict[str, dict[str, Any]] = {entry["id"]: entry for entry in CATALOG["devices"]}
FP32_LANES_PER_SM = {"Kepler": 192, "Volta": 64, "Turing": 64}
DATACENTER_LANES = {"p100": 64, "a100": 64, "a800": 64, "a30": 64}


def test_ids_are_unique_and_plain() -> None:
    ids = [entry["id"] for entry in CATALOG["devices"]]
    assert ids == list(catalog())
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", id_) for id_ in ids)
    assert all(device.id == id_ and device.kind == "cuda" for id_, device in catalog().items())


@pytest.mark.parametrize("id_", catalog())
def test_a_card_obeys_the_laws(id_: str) -> None:
    device, entry, rates = catalog()[id_], ENTRIES[id_], catalog()[id_].peak_flops
    assert 100e9 <= device.bandwidth_bytes_per_s <= 8e12
    assert 2e12 <= rates["fp32"] <= 170e12
    assert 6 <= device.num_sms <= 310
    assert 0.8e9 <= device.boost_clock_hz <= 2.7e9
    assert 2**20 <= device.l2_bytes <= 256 * 2**20
    assert 60 <= device.tdp_w <= 1400
    assert 250 * 2**20 <= device.context_bytes <= 800 * 2**20
    assert 4e-6 <= device.launch_overhead_s <= 6e-6
    assert set(rates) <= {"fp32", "tf32", "fp16", "bf16"}
    assert re.search("data sheet|whitepaper|specifications", device.source.partition("; ")[0])
    # The usable memory is just below the nominal size.
    assert 0.91 <= device.memory_bytes / (entry["memory_gb"] * 2**30) <= 1.0
    stated = re.search(r"-(\d+)gb$", id_)
    assert stated is None or int(stated[1]) == entry["memory_gb"]
    # FP32 is two FLOPs for each lane and clock.
    lanes = DATACENTER_LANES.get(id_.partition("-")[0], FP32_LANES_PER_SM.get(device.architecture, 128))
    tolerance = 0.12 if id_ == "a10g" else 0.015  # the A10G's data sheet lists FP32 at a lower clock than its tensor rates
    assert rates["fp32"] == pytest.approx(2 * lanes * device.num_sms * device.boost_clock_hz, rel=tolerance)
    if device.architecture in {"Kepler", "Pascal"} or id_.startswith("gtx16"):
        return
    # The dense rate of a multiprocessor is a power of two for each clock. Rates exceed FP32, and halve with the width.
    per_sm_and_clock = rates["fp16"] / device.num_sms / device.boost_clock_hz
    least = 0.86 if "-nvl-" in id_ else 0.9  # their data sheets have the rates at a clock that their power can hold
    assert any(power * least <= per_sm_and_clock <= power * 1.02 for power in (512, 1024, 2048, 4096, 8192))
    assert rates["fp16"] > 1.9 * rates["fp32"]
    if device.architecture in {"Volta", "Turing"}:
        assert set(rates) == {"fp32", "fp16"}
        return
    assert rates["bf16"] == rates["fp16"]
    assert rates["tf32"] == pytest.approx(rates["fp16"] / 2, rel=0.015)
    assert rates["tf32"] >= rates["fp32"]


@pytest.mark.parametrize(
    ("id_", "figures"),
    [
        ("t4", (14.75, 320, 8.1, None, 65, 40, 1590, 4, 70)),
        ("v100-sxm-32gb", (31.74, 900, 15.7, None, 125, 80, 1530, 6, 300)),
        ("a100-pcie-40gb", (39.39, 1555, 19.5, 156, 312, 108, 1410, 40, 250)),
        ("h100-sxm-80gb", (79.11, 3352, 66.9, 494.7, 989.4, 132, 1980, 50, 700)),
        ("rtx3090", (23.69, 936, 35.6, 35.6, 71, 82, 1695, 6, 350)),
        ("rtx4090", (23.64, 1008, 82.6, 82.6, 165.2, 128, 2520, 72, 450)),
    ],
)
def test_figures_agree_with_the_data_sheet(id_: str, figures: tuple[Any, ...]) -> None:
    device = catalog()[id_]
    memory_gib, gb_per_s, fp32, tf32, fp16, sms, mhz, l2_mib, watts = figures
    assert device.memory_bytes / 2**30 == pytest.approx(memory_gib, abs=0.01)
    assert device.bandwidth_bytes_per_s == gb_per_s * 1e9
    assert device.peak_flops["fp32"] == pytest.approx(fp32 * 1e12)
    assert device.peak_flops.get("tf32") == (None if tf32 is None else pytest.approx(tf32 * 1e12))
    assert device.peak_flops["fp16"] == pytest.approx(fp16 * 1e12)
    assert (device.num_sms, device.boost_clock_hz, device.l2_bytes, device.tdp_w) == (sms, mhz * 1e6, l2_mib * 2**20, watts)


@pytest.mark.parametrize(
    ("name", "id_"),
    [
        ("a100", "a100-pcie-40gb"),
        ("h100", "h100-sxm-80gb"),
        ("RTX 3090", "rtx3090"),
        ("3090", "rtx3090"),
        (" rtx_2080_ti ", "rtx2080ti"),
        ("a100_sxm_80gb", "a100-sxm-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("A100-SXM4-80GB", "a100-sxm-80gb"),
        ("RTX PRO 6000 Max-Q", "rtxpro6000maxq"),
    ],
)
def test_a_card_goes_by_many_names(name: str, id_: str) -> None:
    assert find(name).id == id_


@pytest.mark.parametrize(
    ("name", "id_", "gib"),
    [
        ("a100-sxm-80gb/3g.40gb", "a100-sxm-80gb:3g.40gb", 35.6),
        ("A100-SXM-80GB/3G.40gb", "a100-sxm-80gb:3g.40gb", 35.6),
        ("a100-sxm-80gb:3g.40gb", "a100-sxm-80gb:3g.40gb", 35.6),
        ("a100/1g.5gb", "a100-pcie-40gb:1g.5gb", 4.4),
        ("a100-sxm-40gb/4g.20gb", "a100-sxm-40gb:4g.20gb", 17.7),
    ],
)
def test_a_mig_slice_goes_by_its_card_and_profile(name: str, id_: str, gib: float) -> None:
    device = resolve_device(name)
    assert device.id == id_
    assert device.memory_bytes / 2**30 == pytest.approx(gib, abs=0.1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a100-sxm-80gb/3g.20gb", "no MIG profile '3g.20gb'. It has: 1g.10gb, 2g.20gb, 3g.40gb, 7g.80gb, 1g.20gb, 4g.40gb"),
        ("t4/1g.5gb", "Tesla T4 has no MIG profile '1g.5gb'. It has: none"),
        ("z80/1g.5gb", "gpu must be a name from the catalog"),
    ],
)
def test_a_slice_that_does_not_exist_names_those_that_do(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        resolve_device(name)


def test_namesakes_are_told_apart_by_their_memory() -> None:
    """The driver calls both an RTX 3080: the wrong one would be guarded with 2 GB too much."""
    name = "NVIDIA GeForce RTX 3080"
    found = [look_up(name), look_up(name, 10 * 2**30), look_up(name, 12 * 2**30), look_up("rtx3080-12gb")]
    assert [device and device.id for device in found] == ["rtx3080", "rtx3080", "rtx3080-12gb", "rtx3080-12gb"]
    assert is_short_for("NVIDIA GeForce RTX 3080", catalog()["rtx3080-12gb"])
    assert is_short_for("3080", catalog()["rtx3080-12gb"])
    assert not is_short_for("rtx3080-12gb", catalog()["rtx3080"]), "who names a size means it"
    assert not is_short_for("rtx3060-8gb", catalog()["rtx3060"])
    assert not is_short_for("RTX 3080", catalog()["rtx3080ti"])


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 2050", "NVIDIA GH200 144G HBM3e", "A100-SXM4-40GB MIG 1g.5gb", ""])
def test_a_relative_of_a_card_is_not_that_card(name: str) -> None:
    assert look_up(name) is None


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("a1000", r"got 'a1000'\. Did you mean 'a100'.*`perfguard gpus` lists all"),
        ("h100-sxm-96gb", "'h100-sxm-80gb'"),
        ("rtx3091", "'rtx3090'"),
        ("atuo", "'auto'"),
        ("tpu", r"got 'tpu'\. .*`perfguard gpus` lists all"),
    ],
)
def test_find_of_unknown_name_suggests_nearest(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigurationError, match=suggestion) as caught:
        find(name)
    assert isinstance(caught.value, ConfigurationError)
