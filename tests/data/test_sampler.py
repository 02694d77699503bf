import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi.data.sampler import batches_per_epoch, order, rows

WORLDS = range(1, 10)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 250), st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_every_world_partitions_every_batch_alike(n: int, size: int, seed: int, epoch: int, shuffle: bool) -> None:
    whole = order(n, seed, epoch, shuffle)
    assert sorted(whole) == list(range(n))
    pieces = []
    for number in range(batches_per_epoch(n, size)):
        batch = whole[number * size : (number + 1) * size]
        for world in WORLDS:
            parts = [
                whole[mine.start : mine.stop]
                for rank in range(world)
                for mine in rows(n, size, number, rank, world)[0].values()
            ]
            np.testing.assert_array_equal(np.concatenate(parts), batch)
            lengths = [len(part) for part in parts]
            assert max(lengths) - min(lengths) <= 1
        pieces.append(batch)
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 250), st.integers(1, 9), st.integers(1, 5))
def test_microbatches_hold_the_same_rows_in_every_world(n: int, size: int, world: int, microbatches: int) -> None:
    totals = []
    for number in range(batches_per_epoch(n, size)):
        serial, total = rows(n, size, number, microbatches=microbatches)
        assert [i for mine in serial.values() for i in mine] == list(range(number * size, number * size + total))
        parts = [rows(n, size, number, rank, world, microbatches) for rank in range(world)]
        assert {part_total for _, part_total in parts} == {total}
        for micro, whole in serial.items():
            assert [i for ranges, _ in parts for i in ranges[micro]] == list(whole)
        dealt = [rows(n, size, number, rank, world, microbatches, whole=True)[0] for rank in range(world)]
        assert [(i, mine) for ranges in dealt for i, mine in ranges.items()] == list(serial.items())
        totals.append(total)
    assert sum(totals) == n
    assert totals[:-1] == [size] * (len(totals) - 1)


def test_no_more_microbatches_than_rows() -> None:
    """However many are asked for: a list of a hundred thousand million empty ones would fill the memory."""
    ranges, _ = rows(10, 4, 2, microbatches=10**11)
    assert ranges == {0: range(8, 9), 1: range(9, 10)}


@pytest.mark.parametrize("number", [-1, 3])
def test_batch_that_does_not_exist_is_refused(number: int) -> None:
    with pytest.raises(IndexError, match=f"batch {number} of 3 batches"):
        rows(10, 4, number)


def test_orders_differ_by_seed_and_epoch() -> None:
    orders = {tuple(order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_order_is_the_same_for_ever() -> None:
    """A checkpoint of an older version resumes in the middle of an epoch only if this holds."""
    assert order(8, 0, 0).tolist() == [3, 7, 6, 2, 4, 1, 5, 0]
    assert order(8, 3, 7).tolist() == [3, 5, 7, 2, 1, 6, 0, 4]
