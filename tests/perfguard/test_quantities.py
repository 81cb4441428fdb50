"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfguard.exceptions import ConfigurationError
from perfguard.quantities import (
    format_bytes,
    format_dollars,
    format_joules,
    format_seconds,
    parse_bytes,
    parse_dollars,
    parse_joules,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (1, 1),
        (1.5e9, 1_500_000_000),
        ("38GiB", 38 * 2**30),
        ("38 gib", 38 * 2**30),
        ("800 MB", 800_000_000),
        ("1.5k", 1536),
        ("1e3 kb", 1_000_000),
    ],
)
def test_bytes_are_read_as_people_write_them(written: int | float | str, num_bytes: int) -> None:
    assert parse_bytes(written) == num_bytes


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(90, 90.0), (0.25, 0.25), ("90", 90.0), ("250ms", 0.25), ("3 us", 3e-6), ("2h", 7200.0), ("1.5 min", 90.0), ("1D", 86400.0)],
)
def test_seconds_are_read_as_people_write_them(written: int | float | str, seconds: float) -> None:
    assert parse_seconds(written) == pytest.approx(seconds)


@pytest.mark.parametrize("wrong", ["", "much", "3 parsecs", "1.2.3 GiB", "GiB", "5 e", "0x10"])
def test_parse_quotes_text_that_is_no_quantity(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=f"memory_budget must look like .*38GiB.* but got '{wrong}'"):
        parse_bytes(wrong, what="memory_budget")
    with pytest.raises(ConfigurationError, match=f"time_budget must look like .*2h.* but got '{wrong}'"):
        parse_seconds(wrong, what="time_budget")


@pytest.mark.parametrize("wrong", [0, -1, 0.0, "-3", math.nan, math.inf, "1e999"])
def test_a_quantity_must_be_positive_and_finite(wrong: int | float | str) -> None:
    for parse in (parse_bytes, parse_seconds):
        with pytest.raises(ConfigurationError, match="must be positive and finite"):
            parse(wrong)


def test_parse_bytes_refuses_less_than_a_byte() -> None:
    """It is taken for a fraction in the wrong place."""
    with pytest.raises(ConfigurationError, match=r"at least 1, but got '0.5'.*fraction of the device"):
        parse_bytes("0.5")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (38 * 2**30, "38.0 GiB"),
        (999.4 * 2**20, "999 MiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_bytes_are_written_in_three_digits(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234e-5, "12.3 us"),
        (0.0123, "12.3 ms"),
        (0.9996, "1000 ms"),
        (99.96, "100 s"),
        (150, "2.50 min"),
        (7560, "2.10 h"),
        (-2.0, "-2.00 s"),
    ],
)
def test_seconds_are_written_in_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(1, 1e15))
def test_bytes_that_were_written_are_read_back(num_bytes: float) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006, abs=0.51)


@given(st.floats(1e-6, 1e8))
def test_seconds_that_were_written_are_read_back(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.006)


@pytest.mark.parametrize(("written", "joules"), [(5, 5.0), ("250mJ", 0.25), ("2 Wh", 7200.0), ("1.5kJ", 1500.0)])
def test_joules_are_read_as_people_write_them(written: int | str, joules: float) -> None:
    assert parse_joules(written) == pytest.approx(joules)


def test_joules_are_written_in_three_digits() -> None:
    assert [format_joules(joules) for joules in (0.0123, 4.56, 2100)] == ["12.3 mJ", "4.56 J", "2.10 kJ"]


def test_dollars_are_written_and_read() -> None:
    assert [parse_dollars(written) for written in (2, "2.50", " $0.5 ", "3 USD")] == [2.0, 2.5, 0.5, 3.0]
    amounts = [0.00725, 0.5, 1.2, 12.34, 1234.4]
    assert [format_dollars(amount) for amount in amounts] == ["$0.00725", "$0.500", "$1.20", "$12.3", "$1234"]
    with pytest.raises(ConfigurationError, match="cost must"):
        parse_dollars("2 EUR")
