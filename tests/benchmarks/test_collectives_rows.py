"""From stamps to rows, and to files and pictures of them."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.collectives.rows import TABLE, CallTimes, build_rows, bus_factor, content, draw
from benchmarks.collectives.timing import LEAST, MOST, rounds_within

FIELDS = [
    *("algorithm", "size", "avg_us", "min_us", "max_us", "p50_us", "p99_us", "iterations", "algbw_gbs", "busbw_gbs"),
    *("predicted_us", "measured_over_predicted", "speed_against_native", "chosen"),
]
HEADER = {"operation": "all-reduce", "ranks": 2, "nodes": 1, "mpi": "Open MPI 5.0.11", "dtype": "float32"}


def two_ranks() -> np.ndarray:
    """Return stamps of two ranks, two contestants and three calls: the second rank enters 2 us later."""
    stamps = np.zeros((2, 2, 2, 3))
    stamps[0, :, 0], stamps[1, :, 0] = 100.0, 100.0 + 2e-6
    stamps[:, 0, 1] = 100.0 + 12e-6  # the first contestant: both leave 10 us after the second rank has entered
    stamps[0, 1, 1], stamps[1, 1, 1] = 100.0 + 22e-6, 100.0 + 6e-6
    return stamps


def rows(one_clock: bool = True) -> list[CallTimes]:
    return build_rows(
        ["native", "ring"], two_ranks(), 10_000, "all-reduce", one_clock, {"ring": 10e-6}, {"ring": "halving"}
    )


def test_own_times_are_averaged_and_the_collective_lasts_from_the_last_in_to_the_last_out() -> None:
    native, ring = rows()
    assert [native.avg_us, native.min_us, native.max_us] == pytest.approx([11, 10, 12], abs=0.02)
    assert [native.p50_us, native.p99_us] == pytest.approx([10, 10], abs=0.02)
    assert [ring.avg_us, ring.min_us, ring.max_us, ring.p50_us] == pytest.approx([13, 4, 22, 20], abs=0.02)
    assert (native.iterations, native.size) == (3, 10_000)


def test_without_one_clock_the_longest_own_time_counts() -> None:
    native, ring = rows(one_clock=False)
    assert [native.p50_us, ring.p50_us] == pytest.approx([12, 22], abs=0.02)


def test_bandwidths_and_ratios_follow_from_the_median() -> None:
    native, ring = rows()
    assert native.algbw_gbs == pytest.approx(1.0, rel=0.01)
    assert native.busbw_gbs == native.algbw_gbs * bus_factor("all-reduce", 2)
    assert native.speed_against_native == 1.0
    assert ring.speed_against_native == pytest.approx(0.5, rel=0.01)
    assert ring.measured_over_predicted == pytest.approx(2.0, rel=0.01)
    assert (native.predicted_us, native.measured_over_predicted, native.chosen) == (None, None, None)
    assert (ring.predicted_us, ring.chosen) == (10.0, "halving")


def test_the_update_is_compared_with_mpis_call_and_the_update() -> None:
    found = build_rows(["native+update", "fused"], two_ranks(), 4, "all-reduce", True, {}, {})
    assert [row.speed_against_native for row in found] == pytest.approx([1.0, 0.5], rel=0.01)
    (_, fused) = build_rows(["native", "fused"], two_ranks(), 4, "all-reduce", True, {}, {})
    assert fused.speed_against_native is None


@pytest.mark.parametrize(
    ("operation", "factor"), [("all-reduce", 1.5), ("reduce-scatter", 0.75), ("all-gather", 0.75), ("broadcast", 1)]
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation: str, factor: float) -> None:
    assert bus_factor(operation, 4) == factor


def test_a_record_has_exactly_the_named_fields() -> None:
    assert list(content(HEADER, rows(), finished=True)["rows"][0]) == FIELDS


def test_lines_stand_under_their_titles() -> None:
    words = TABLE.head().split("  ")
    assert {"algorithm", "size", "avg us", "p50 us", "p99 us"} <= {word.strip() for word in words}
    native, ring = map(TABLE.line, rows())
    assert len(native) == len(TABLE.head())
    assert ring.endswith("  chose halving")
    assert native.split() == (
        ["native", "9.766", "KB", "11.00", "10.00", "12.00", "10.00", "10.00", "3", "1", "1", "-", "-", "1.00"]
    )


def test_the_budget_decides_the_rounds_within_limits() -> None:
    assert rounds_within(1.0, 0.01) == 100
    assert rounds_within(-1.0, 0.01) == LEAST
    assert rounds_within(1.0, 1e-6) == rounds_within(1.0, 0.0) == MOST


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_rows_are_drawn(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    draw(file, HEADER, rows())
    assert file.stat().st_size > 5000
    if suffix == ".svg":
        text = file.read_text()
        for words in ("time / that of MPI's own", "predicted", "9.766 KB", "Open MPI 5.0.11"):
            assert words in text
