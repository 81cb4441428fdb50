"""The smallest MIG profile that fits."""

from __future__ import annotations

import pytest

from perfguard.devices import catalog, mig_profiles, smallest_profile
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


def test_every_card_with_profiles_is_in_the_catalog() -> None:
    split = [id_ for id_, device in catalog().items() if mig_profiles(device)]
    assert set(SPLIT) < set(split)
    assert len(split) == 8
