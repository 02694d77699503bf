from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.data.sampler import batches_per_epoch, order, own_rows, own_samples, rows
from nnmpi.errors import UsageError

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


# Samples that are one worker's: each has one owner, who goes through them without skipping any.


def labelled(n: int, classes: int = 5) -> Dataset:
    """Samples that can be told apart, with labels that are not in order."""
    y = np.random.default_rng(0).integers(0, classes, n)
    return Dataset("numbers", np.arange(n, dtype="float32").reshape(n, 1), y, classes)


@given(n=st.integers(1, 70), workers=st.integers(1, 9), partition=st.sampled_from(["iid", "label"]))
def test_every_sample_has_one_owner(n: int, workers: int, partition: str) -> None:
    labels = labelled(n).y
    if n < workers:
        with pytest.raises(UsageError, match=f"^partition {partition} shares {n} training samples"):
            own_samples(labels, partition, 1, 0, workers)
        return
    owned = [own_samples(labels, partition, 1, worker, workers) for worker in range(workers)]
    assert sorted(np.concatenate(owned).tolist()) == list(range(n))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    if partition == "label":
        assert np.all(np.diff(labels[np.concatenate(owned)]) >= 0)


def test_parts_by_label_are_of_few_classes_and_random_ones_of_all() -> None:
    labels = labelled(500).y
    assert all(len(set(labels[own_samples(labels, "label", 3, worker, 5)])) <= 3 for worker in range(5))
    assert all(len(set(labels[own_samples(labels, "iid", 3, worker, 5)])) == 5 for worker in range(5))
    assert own_samples(labels, "iid", 3, 1, 5).tolist() != own_samples(labels, "iid", 4, 1, 5).tolist()


@given(n=st.integers(1, 12), count=st.integers(0, 7), turns=st.integers(1, 9))
def test_a_worker_goes_through_its_own_again_and_again(n: int, count: int, turns: int) -> None:
    """Whole passes have every sample once, however the passes are cut into turns."""
    own = np.arange(100, 100 + n)
    taken = np.concatenate([own_rows(own, 0, 2, turn * count, count) for turn in range(turns)])
    for first in range(0, len(taken) - n + 1, n):
        assert sorted(taken[first : first + n].tolist()) == own.tolist()


@pytest.mark.parametrize("world", [1, 3, 4])
def test_loaders_give_own_samples_alone(world: int) -> None:
    """Over an epoch, with a short last batch and parts that divide nothing; rows are as without a partition."""
    data = labelled(47)
    for rank in range(world):
        loader = Loader(data, 10, rank=rank, world=world, partition="label", microbatches=2, workers=0)
        plain = Loader(data, 10, rank=rank, world=world, microbatches=2, workers=0)
        own = set(own_samples(data.y, "label", 0, rank, world).tolist())
        seen = Counter[int]()
        for batch, other in zip(loader.epoch(0), plain.epoch(0), strict=True):
            assert (batch.cuts, batch.global_rows, len(batch.y)) == (other.cuts, other.global_rows, len(other.y))
            assert batch.x[:, 0].astype(int).tolist() == batch.indices.tolist()
            seen.update(batch.indices.tolist())
        assert set(seen) <= own
        again = Counter(seen)
        for batch in loader.epoch(1):
            again.update(batch.indices.tolist())
        assert max(again.values()) - min(again[sample] for sample in own) <= 1  # nothing is skipped between two turns


def test_whole_batches_are_of_all_workers_and_assigned_parts_of_the_one_who_got_them() -> None:
    data = labelled(40)
    parts = Loader(data, 10, partition="label", workers=0).parts(1)
    whole = parts.whole(2, 3)
    assert whole.indices.tolist() == [i for worker in range(3) for i in parts(2, worker, 3).indices.tolist()]
    assert [len(range(cut.start, cut.stop)) for cut in whole.cuts] == [4, 3, 3] and whole.global_rows == 10
    own = set(own_samples(data.y, "label", 0, 2, 3).tolist())
    first, second = (parts.assigned(2, part, 3, worker=2, taken=taken) for part, taken in ((0, 5), (1, 8)))
    assert set(first.indices.tolist()) | set(second.indices.tolist()) <= own
    assert first.indices.tolist() != second.indices.tolist()
    shared = Loader(data, 10, workers=0).parts(1)
    assert shared.assigned(2, 1, 3, worker=2, taken=5).indices.tolist() == shared(2, 1, 3).indices.tolist()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="the partition 'halves' does not exist; choose from: none, iid, label"):
        Loader(labelled(10), 2, partition="halves")
    with pytest.raises(UsageError, match="does not go with whole microbatches"):
        Loader(labelled(10), 2, partition="iid", whole=True)
