"""Parts of a GPU have their share of everything."""

from __future__ import annotations

from typing import Any

import pytest

from perfguard.devices import Device, catalog, mig_instance, mig_profiles, mps_share, resolve_device
from perfguard.exceptions import ConfigurationError


@pytest.fixture
def a100() -> Device:
    return catalog()["a100-pcie-40gb"]


@pytest.mark.parametrize(("profile", "num_sms", "eighths"), [(0, 14, 1), (1, 28, 2), (2, 42, 4), (3, 98, 8)])
def test_a_mig_instance_has_its_sevenths_and_eighths(a100: Device, profile: int, num_sms: int, eighths: int) -> None:
    """Multiprocessors as NVIDIA's guide lists them for the A100."""
    chosen = mig_profiles(a100)[profile]
    part = mig_instance(a100, chosen)
    assert part.num_sms == num_sms
    assert part.memory_bytes == chosen.memory_bytes
    assert part.bandwidth_bytes_per_s == pytest.approx(a100.bandwidth_bytes_per_s * eighths / 8)
    assert part.flops_per_s("fp16") == pytest.approx(a100.flops_per_s("fp16") * num_sms / 108)
    assert part.id == f"a100-pcie-40gb:{chosen.name}"


def test_mps_share_has_fewer_sms_and_all_memory(a100: Device) -> None:
    part = mps_share(a100, 0.25)
    assert (part.num_sms, part.memory_bytes) == (27, a100.memory_bytes)
    assert part.bandwidth_bytes_per_s == a100.bandwidth_bytes_per_s
    assert mps_share(a100, 1).num_sms == a100.num_sms


@pytest.mark.parametrize("share", [0, -0.5, 1.5, True, "half", float("nan")])
def test_a_share_that_is_none_is_refused(a100: Device, share: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"must lie in \(0, 1\]"):
        mps_share(a100, share)


@pytest.mark.parametrize("name", ["cpu", "mi300x"])
def test_only_nvidia_gpus_can_be_shared_so(name: str) -> None:
    with pytest.raises(ConfigurationError, match="MPS is for NVIDIA's GPUs"):
        mps_share(resolve_device(name), 0.5)
