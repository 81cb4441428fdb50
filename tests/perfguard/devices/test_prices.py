"""Prices: list prices with their source and month, and a user's own in their place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perfguard.devices import catalog, cpu, mig_instance, mig_profiles, price_of, read_prices
from perfguard.devices._prices import _list_prices
from perfguard.exceptions import ConfigurationError, TableError


def test_each_list_price_has_a_known_card_a_source_and_a_month() -> None:
    seen = set()
    for row in _list_prices():
        assert set(row) == {"gpu", "provider", "per_hour", "source", "as_of"}
        assert row["gpu"] in catalog()
        assert row["provider"] in ("hyperscaler", "gpu-cloud")
        assert 0.1 < row["per_hour"] < 20
        assert row["source"]
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", row["as_of"])
        seen.add((row["gpu"], row["provider"]))
    assert len(seen) == len(_list_prices())  # one price for each card and kind of provider


def test_price_is_the_lowest_or_that_of_a_kind_of_provider() -> None:
    device = catalog()["a100-sxm-40gb"]
    kinds = {"hyperscaler": price_of(device, provider="hyperscaler"), "gpu-cloud": price_of(device, provider="gpu-cloud")}
    lowest = price_of(device)
    assert lowest is not None
    assert lowest.per_hour == min(price.per_hour for price in kinds.values() if price is not None)
    for kind, price in kinds.items():
        assert price is not None
        assert re.search(rf"list price of .*\({kind}\), as of 20", str(price))
    with pytest.raises(ConfigurationError, match="provider must be one of hyperscaler, gpu-cloud, but got 'aws'"):
        price_of(device, provider="aws")  # type: ignore[arg-type]


def test_what_nobody_lists_has_no_price() -> None:
    a100 = catalog()["a100-pcie-40gb"]
    assert price_of(cpu()) is None
    assert price_of(mig_instance(a100, mig_profiles(a100)[0])) is None


def test_own_prices_replace_the_list_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The user's may be in another currency, so the two are never mixed.
    t4, l4 = catalog()["t4"], catalog()["l4"]
    table = tmp_path / "prices.csv"
    table.write_text("gpu,price_per_hour\nTesla T4,0.2\n")
    monkeypatch.setenv("PERFGUARD_PRICES", str(table))
    own = price_of(t4)
    assert own is not None
    assert (own.per_hour, price_of(l4)) == (0.2, None)
    named = price_of(l4, {"l4": 0.3})
    assert named is not None
    assert named.per_hour == 0.3
    monkeypatch.setenv("PERFGUARD_PRICES", str(tmp_path / "absent.csv"))
    with pytest.raises(TableError, match="cannot be read"):
        price_of(t4)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no column 'gpu'"),
        ("gpu,price\na100,1\n", "no column 'price_per_hour'"),
        ("gpu,price_per_hour\n", "has no rows"),
        ("gpu,price_per_hour\na100,free\n", "line 2: price_per_hour must be a positive number.*'free'"),
        ("gpu,price_per_hour\na100,1\nt4,-1\n", "line 3: price_per_hour must be a positive number"),
        ("gpu,price_per_hour\na100,nan\n", "line 2: price_per_hour"),
        ("gpu,price_per_hour\na100\n", "line 2: price_per_hour must be a positive number.*''"),
        ("gpu,price_per_hour\na1000,1\n", "line 2: gpu must be a name from the catalog.*Did you mean"),
        ("gpu,price_per_hour\na100,1\nA100,2\n", "line 3: a100-pcie-40gb has a price already"),
        ('gpu,price_per_hour\n"a100,1\n', "is no CSV table"),
    ],
)
def test_a_price_table_that_cannot_be_used_says_where(tmp_path: Path, text: str, match: str) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text(text)
    with pytest.raises(TableError, match=match):
        read_prices(prices)
