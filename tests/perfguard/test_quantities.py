"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfguard.exceptions import ConfigurationError
from perfguard.quantities import (
    SPECS,
    Quantity,
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
    ("parse", "written", "value"),
    [
        (parse_bytes, 1, 1),
        (parse_bytes, "38GiB", 38 * 2**30),
        (parse_bytes, "38 gib", 38 * 2**30),
        (parse_bytes, "800 MB", 800_000_000),
        (parse_bytes, "1.5k", 1536),
        (parse_seconds, 90, 90.0),
        (parse_seconds, "250ms", 0.25),
        (parse_seconds, "3 us", 3e-6),
        (parse_seconds, "2h", 7200.0),
        (parse_seconds, "1D", 86400.0),
        (parse_joules, 5, 5.0),
        (parse_joules, "250mJ", 0.25),
        (parse_joules, "2 Wh", 7200.0),
        (parse_dollars, "2.50", 2.5),
        (parse_dollars, " $0.5 ", 0.5),
    ],
)
def test_quantities_are_read_as_people_write_them(parse: Any, written: int | float | str, value: float) -> None:
    assert parse(written) == pytest.approx(value)


@pytest.mark.parametrize("wrong", ["", "much", "3 parsecs", "1.2.3 GiB", "GiB", "5 e", "0x10", "2 EUR"])
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
    ("written", "value", "text"),
    [
        (format_bytes, 0, "0 B"),
        (format_bytes, 1023, "1023 B"),
        (format_bytes, 1024, "1.00 KiB"),
        (format_bytes, 38 * 2**30, "38.0 GiB"),
        (format_bytes, -(2**20), "-1.00 MiB"),
        (format_seconds, 1.234e-5, "12.3 us"),
        (format_seconds, 0.9996, "1000 ms"),
        (format_seconds, 150, "2.50 min"),
        (format_seconds, 7560, "2.10 h"),
        (format_joules, 0.0123, "12.3 mJ"),
        (format_joules, 2100, "2.10 kJ"),
        (format_dollars, 0.00725, "$0.00725"),
        (format_dollars, 12.34, "$12.3"),
        (format_dollars, 1234.4, "$1234"),
    ],
)
def test_quantities_are_written_in_three_digits(written: Any, value: float, text: str) -> None:
    assert written(value) == text


@given(st.floats(1, 1e15))
def test_bytes_that_were_written_are_read_back(num_bytes: float) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006, abs=0.51)


@given(st.floats(1e-6, 1e8))
def test_seconds_that_were_written_are_read_back(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.006)


def test_each_quantity_has_a_row_and_its_scales_rise() -> None:
    """Its facts stood in nine tables, and host memory was missing in one: it was drawn in hours."""
    assert tuple(SPECS) == get_args(Quantity)
    for spec in SPECS.values():
        sizes = [size for _, size in spec.unit.scales]
        assert sizes == sorted(sizes)
        assert spec.unit.parse(spec.unit.format(1234.0)) == pytest.approx(1234.0, rel=0.01), "what is shown can be read"
        assert spec.multiple_of is None or SPECS[spec.multiple_of].multiple_of is None
