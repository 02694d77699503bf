"""How gradients are grouped: pictures of buckets."""

import pytest

from nnmpi.comm.gradients import Bucket, plan_buckets
from nnmpi.errors import UsageError

# four parameters in one buffer: 10, 2, 6 and 4 elements of 4 bytes
SPANS = [(0, 0, 10), (0, 10, 12), (0, 12, 18), (0, 18, 22)]


def drawn(spans: list[tuple[int, int, int]], itemsizes: list[int], limit: int) -> list[str]:
    return [f"{b.buffer}[{b.start}:{b.stop}] of {list(b.spans)}" for b in plan_buckets(spans, itemsizes, limit)]


def test_buckets_fill_from_the_end() -> None:
    assert drawn(SPANS, [4], 48) == ["0[10:22] of [1, 2, 3]", "0[0:10] of [0]"]
    assert drawn(SPANS, [4], 40) == ["0[12:22] of [2, 3]", "0[10:12] of [1]", "0[0:10] of [0]"]


def test_a_long_span_stands_alone() -> None:
    assert drawn(SPANS, [4], 1) == ["0[18:22] of [3]", "0[12:18] of [2]", "0[10:12] of [1]", "0[0:10] of [0]"]


def test_one_bucket_holds_all_when_it_may() -> None:
    assert plan_buckets(SPANS, [4], 10**9) == (Bucket(0, 0, 0, 22, (0, 1, 2, 3)),)


def test_buffers_are_never_mixed_and_come_in_the_order_of_backward() -> None:
    spans = [(0, 0, 4), (1, 0, 3), (0, 4, 8), (1, 3, 5), (0, 8, 9)]
    assert drawn(spans, [4, 8], 10**9) == ["1[0:5] of [1, 3]", "0[0:9] of [0, 2, 4]"]
    assert drawn(spans, [4, 8], 24) == ["1[3:5] of [3]", "0[4:9] of [2, 4]", "1[0:3] of [1]", "0[0:4] of [0]"]


def test_a_gap_goes_with_its_bucket() -> None:
    assert drawn([(0, 0, 3), (0, 8, 10)], [4], 10**9) == ["0[0:10] of [0, 1]"]
    assert drawn([(0, 0, 3), (0, 8, 10)], [4], 8) == ["0[8:10] of [1]", "0[0:3] of [0]"]


def test_no_parameters_no_buckets() -> None:
    assert plan_buckets([], [4], 100) == ()


@pytest.mark.parametrize("spans", [[(0, 0, 4), (0, 3, 5)], [(0, 4, 8), (0, 0, 4)], [(0, 4, 2)]])
def test_spans_out_of_order_are_refused(spans: list[tuple[int, int, int]]) -> None:
    with pytest.raises(UsageError, match="must begin at or after"):
        plan_buckets(spans, [4], 100)


def test_an_empty_bucket_is_refused() -> None:
    with pytest.raises(UsageError, match="0 bytes"):
        plan_buckets(SPANS, [4], 0)
