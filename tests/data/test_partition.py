"""Samples that are one worker's: each has one owner, who goes through them without skipping any."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.data.partition import own_rows, own_samples
from nnmpi.errors import UsageError


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
