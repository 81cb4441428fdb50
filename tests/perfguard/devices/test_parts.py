"""Parts of a GPU: the smallest MIG profile that fits, and what a part has of the whole."""

from __future__ import annotations

from typing import Any

import pytest

from perfguard.devices import Device, catalog, mig_instance, mig_profiles, mps_share, smallest_profile
from perfguard.exceptions import ConfigurationError

GIB = 2**30
SPLIT = ["a100-pcie-40gb", "a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb"]


@pytest.mark.parametrize(
    ("device", "num_gib", "expected"),
    [
        ("a100-pcie-40gb", 1.0, "1g.5gb"),
        ("a100-pcie-40gb", 4.4, "1g.5gb"),
        ("a100-pcie-40gb", 4.8, "2g.10gb"),  # nominally under 5 GB, but nvidia-smi lists 4.75 GiB
        ("a100-pcie-40gb", 9.7, "3g.20gb"),
        ("a100-pcie-40gb", 20.0, "7g.40gb"),
        ("a100-pcie-40gb", 39.3, None),
        ("a100-sxm-80gb", 9.0, "2g.20gb"),
        ("h200-sxm-141gb", 15.0, "1g.18gb"),
        ("h200-sxm-141gb", 16.5, "2g.35gb"),
        ("b200-sxm-180gb", 60.0, "3g.90gb"),
    ],
)
def test_smallest_profile_that_holds_bytes_is_chosen(device: str, num_gib: float, expected: str | None) -> None:
    profile = smallest_profile(catalog()[device], num_gib * GIB)
    assert (profile.name if profile else None) == expected


@pytest.mark.parametrize("device", SPLIT)
def test_mig_profiles_grow_and_fit_the_card(device: str) -> None:
    profiles = mig_profiles(catalog()[device])
    sizes = [profile.memory_bytes for profile in profiles]
    assert sizes == sorted(set(sizes))
    assert [profile.num_instances for profile in profiles] == [7, 3, 2, 1]
    assert all(profile.num_instances * profile.memory_bytes <= catalog()[device].memory_bytes for profile in profiles)


def test_a_card_that_cannot_be_split_says_which_can() -> None:
    with pytest.raises(ConfigurationError, match=r"RTX 3090 .*has no MIG profiles.*h200-sxm-141gb"):
        smallest_profile(catalog()["rtx3090"], GIB)


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
