"""Numbers of bytes in words, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.base.errors import UsageError
from nnmpi.base.units import (
    Seconds,
    format_bytes,
    format_duration,
    format_seconds,
    parse_bytes,
)


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("4", 4),
        ("0", 0),
        ("64k", 65536),
        ("64 KB", 65536),
        ("64KiB", 65536),
        ("1mb", 2**20),
        (" 1.5 GiB ", 3 * 2**29),
        ("12B", 12),
        ("0.5k", 512),
        ("13.3MiB", 13946060),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_what_people_write(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "k", "-4", "1e6", "4 x", "64kk", "0.3", "nan", "1 2"])
def test_what_is_no_size_is_named_with_what_would_work(text):
    with pytest.raises(UsageError, match="write it like 4, 64k, 1MiB") as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


def test_names():
    assert [format_bytes(n) for n in (0, 1000, 1024, 1536, 65536, 2**20, 2**31)] == [
        "0 B",
        "1000 B",
        "1 KiB",
        "1.5 KiB",
        "64 KiB",
        "1 MiB",
        "2 GiB",
    ]


@given(st.integers(0, 1023), st.sampled_from([1, 2**10, 2**20, 2**30, 2**40]))
def test_a_name_is_read_back(count, unit):
    assert parse_bytes(format_bytes(count * unit)) == count * unit


def test_times():
    assert [format_seconds(s) for s in (0, 2.5e-6, 999e-6, 0.001, 0.0123456, 1, 90)] == [
        "0 us",
        "2.5 us",
        "999 us",
        "1 ms",
        "12.35 ms",
        "1 s",
        "90 s",
    ]


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.44, "0.4 s"),
        (59.9, "59.9 s"),
        (245.4, "4 min 05 s"),
        (3600.0, "1 h 00 min"),
        (7380.0, "2 h 03 min"),
    ],
)
def test_times_for_people(seconds, text):
    assert format_duration(seconds) == text


def test_seconds_are_rounded_before_the_unit_is_chosen():
    assert format_seconds(0.9996, 3) == "1 s" and format_seconds(0.0009996, 3) == "1 ms"
    assert format_seconds(120.0, 2) == "120 s" and format_seconds(0.1234567) == "123.5 ms"
    assert format_seconds(0.0) == "0 us" and format_seconds(2.5e-6) == "2.5 us"


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("3h", 10800),
        ("1h30m", 5400),
        ("90m", 5400),
        ("45s", 45),
        ("1m2.5s", 62.5),
        ("10800.0", 10800),
    ],
)
def test_times_are_read(text, seconds):
    assert Seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "3 h", "-1s", "1s1m", "1d", "inf", "1e3"])
def test_other_times_are_refused(text):
    with pytest.raises(ValueError):
        Seconds(text)
