import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.base.shard import part
from nnmpi.data import Batch, Compose, Dataset, Flip, Loader, Normalize, Shift
from nnmpi.data.sampler import (
    POOL_BLOCKS,
    Cut,
    cut_batch,
    in_blocks,
    order,
    partition_order,
    partition_samples,
    row_owners,
)
from tests.data.conftest import prefetch_threads
from tests.harness.refusals import usage_error

AUGMENT = Compose(Shift(1), Flip(), Normalize(0.5, 0.25))


def made_up(n=23):
    x = np.random.default_rng(0).integers(0, 256, (n, 4, 4, 1)).astype(np.uint8)
    return Dataset("made up", x, np.arange(n) % 3, 3, 1 / 255)


def test_batch_holds_what_the_sampler_says():
    data = made_up()
    loader = Loader(data, 10, seed=4, rank=1, world=3, dtype="float64")
    batches = list(loader.epoch(2))
    assert len(batches) == loader.batches_per_epoch == 3
    for number, batch in enumerate(batches):
        (local,) = cut_batch((10, 10, 3)[number], 1, 3)
        mine = order(23, seed=4, epoch=2)[10 * number + local.first_row :][: local.stop]
        np.testing.assert_array_equal(batch.indices, mine)
        np.testing.assert_array_equal(batch.y, data.y[mine])
        np.testing.assert_allclose(batch.x, data.x[mine] / 255, rtol=1e-15)
        assert (batch.x.dtype, batch.y.dtype) == (np.float64, np.int64)
        assert batch.x.flags.c_contiguous
        assert (batch.epoch, batch.number, batch.global_rows) == (
            2,
            number,
            10 if number < 2 else 3,
        )
        assert batch.first_row == (4 if number < 2 else 1)


def joined(parts, field):
    return [
        np.concatenate([getattr(batch, field) for batch in batches])
        for batches in zip(*parts, strict=True)
    ]


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(2, 8), st.integers(0, 2))
def test_every_world_gets_the_serial_batches(n, size, world, epoch):
    data = made_up(n)

    def batches(rank: int, world: int) -> list[Batch]:
        return list(
            Loader(data, size, seed=1, rank=rank, world=world, transform=AUGMENT, workers=0).epoch(
                epoch
            )
        )

    serial = batches(0, 1)
    parts = [batches(rank, world) for rank in range(world)]
    for field in ("x", "y", "indices"):
        for mine, full in zip(joined(parts, field), serial, strict=True):
            np.testing.assert_array_equal(mine, getattr(full, field))
    for rank_batches in parts:
        for batch, full in zip(rank_batches, serial, strict=True):
            assert batch.global_rows == len(full.y)
            np.testing.assert_array_equal(full.y[batch.first_row :][: len(batch.y)], batch.y)


def test_the_group_says_which_rows_are_ours():
    """Its rank and size; with an arrangement those of the replica, which several ranks may be."""
    group = SimpleNamespace(rank=5, size=6)
    replicas = SimpleNamespace(rank=5, size=6, data_rank=2, data_ranks=3)
    for ranks, rank, world in ((group, 5, 6), (replicas, 2, 3), (None, 0, 1)):
        loader = Loader(made_up(), 10, ranks, shuffle=False)
        assert (loader.rank, loader.world) == (rank, world)
        loader.batch_size = 8  # derives everything anew
        ours, theirs = (
            next(item.epoch(0)) for item in (loader, Loader(made_up(), 8, shuffle=False))
        )
        assert ours.indices.tolist() == theirs.indices[part(8, world, rank)].tolist()
    with pytest.raises(UsageError, match="group is read when Loader is made"):
        loader.group = group


def test_cuts_say_where_the_microbatches_are():
    """23 samples, batches of 10 in 3 microbatches of 4, 3, 3 rows; the last batch has 3 rows, one
    each.
    """
    data = made_up()
    full = list(Loader(data, 10, workers=0).epoch(0))
    batches = list(Loader(data, 10, rank=1, world=2, microbatches=3, workers=0).epoch(0))
    assert batches[1].cuts == (Cut(0, 2, 2, 0), Cut(2, 3, 6, 1), Cut(3, 4, 9, 2))
    assert batches[2].cuts == (Cut(0, 0, 1, 0), Cut(0, 0, 2, 1), Cut(0, 0, 3, 2))
    for batch, serial in zip(batches, full, strict=True):
        assert batch.first_row == batch.cuts[0].first_row
        for cut in batch.cuts:
            there = slice(cut.first_row, cut.first_row + cut.stop - cut.start)
            np.testing.assert_array_equal(
                batch.indices[cut.start : cut.stop], serial.indices[there]
            )


def test_rank_without_rows_gets_empty_arrays():
    last = list(Loader(made_up(9), 4, rank=3, world=4, transform=AUGMENT).epoch(0))[-1]
    assert (last.x.shape, last.y.shape, last.indices.shape) == ((0, 4, 4, 1), (0,), (0,))
    assert (last.x.dtype, last.global_rows, last.first_row) == (np.float32, 1, 1)


@pytest.mark.parametrize("size", [23, 24, 10**9])
def test_large_batch_size_gives_one_batch_of_everything(size):
    (batch,) = Loader(made_up(), size).epoch(0)
    assert sorted(batch.indices) == list(range(23))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_threads_change_nothing(workers):
    def run(workers):
        return list(Loader(made_up(), 2, seed=3, transform=AUGMENT, workers=workers).epoch(1))

    for threaded, plain in zip(run(workers), run(0), strict=True):
        np.testing.assert_array_equal(threaded.x, plain.x)
        assert threaded.number == plain.number


def test_start_skips_batches_and_changes_nothing_else():
    loader = Loader(made_up(), 5, transform=AUGMENT)
    full, rest = list(loader.epoch(1)), list(loader.epoch(1, start=3))
    assert [batch.number for batch in rest] == [3, 4]
    for a, b in zip(full[3:], rest, strict=True):
        np.testing.assert_array_equal(a.x, b.x)
    assert list(loader.epoch(1, start=5)) == []


def test_without_shuffling_the_order_is_that_of_the_set():
    indices = np.concatenate(
        [batch.indices for batch in Loader(made_up(), 5, shuffle=False).epoch(7)]
    )
    np.testing.assert_array_equal(indices, np.arange(23))


@pytest.mark.usefixtures("no_threads_left")
def test_exception_of_the_transform_reaches_the_consumer():
    def fail(x, indices, epoch, seed):
        if 7 in indices:
            raise RuntimeError("seven")
        return x

    seen = []
    with pytest.raises(RuntimeError, match="seven"):
        for batch in Loader(made_up(), 5, shuffle=False, transform=fail, workers=2).epoch(0):
            seen.append(batch.number)
    assert seen == [0]


def test_transform_is_keyed_by_seed_epoch_and_index():
    data, seen = made_up(), []

    def watch(x, indices, epoch, seed):
        seen.append((indices.tolist(), epoch, seed))
        return x

    batches = list(Loader(data, 10, seed=5, transform=watch, workers=0).epoch(4))
    assert seen == [(batch.indices.tolist(), 4, 5) for batch in batches]


@pytest.mark.usefixtures("no_threads_left")
@pytest.mark.parametrize(
    "options, threads",
    [
        ({}, 0),
        ({"transform": Normalize(0.5, 2.0)}, 0),
        ({"transform": Compose(Flip(), Normalize(0.5, 2.0))}, 1),
        ({"transform": lambda x, *key: x}, 1),  # nobody knows how long it takes
        ({"batch_size": 64}, 1),
        ({"batch_size": 64, "rank": 0, "world": 2}, 0),
    ],
)
def test_a_thread_makes_batches_where_that_pays(options, threads):
    # so many that no thread is done already
    images = Dataset("images", np.zeros((2048, 16, 32, 1), np.uint8), np.zeros(2048, np.int64), 2)
    with Loader(images, **{"batch_size": 8, **options}).epoch(0):
        assert len(prefetch_threads()) == threads


def test_all_threads_make_batches_at_once():
    """With two batches ahead and no more, the third and fourth thread would wait for ever."""
    together = threading.Barrier(4)

    def meet(x, *_):
        together.wait(20)
        return x

    assert len(list(Loader(made_up(8), 2, transform=meet, workers=4))) == 4


def test_transform_that_changes_rows_or_dtype_is_refused():
    for made, transform in (
        ("4 rows of float32", lambda x, *_: x[1:]),
        ("5 rows of float64", lambda x, *_: x.astype(float)),
        ("no array", lambda *_: None),
    ):
        with pytest.raises(ShapeError, match=f"made {made} from 5 rows of float32"):
            list(Loader(made_up(), 5, transform=transform).epoch(0))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"rank": 2, "world": 2}, "rank 2 of 2 ranks"),
        ({"rank": -1, "world": 1}, "rank is -1; give a whole number"),
        ({"rank": "0", "world": 1}, "rank is '0'; give a whole number"),
        ({"rank": 0, "world": "2"}, "world is '2'; give a whole number"),
        ({"world": 2}, "got rank=None, world=2 and group=None, so ranks might take the same"),
        ({"rank": 0}, "got rank=0, world=None and group=None, so ranks might take the same"),
        (
            {"group": SimpleNamespace(rank=0, size=2), "world": 2},
            "group=namespace.*, so ranks might",
        ),
        ({"group": True}, "third argument is the group of the ranks that share each .*, not True"),
        ({"workers": -1}, "workers is -1"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"dtype": "int64"}, "cannot be converted to int64"),
        ({"partition": "halves"}, "partition halves is unknown"),
        ({"shuffle_block": 0}, "shuffle_block is 0"),
        ({"shuffle_block": 8, "shuffle": False}, "shuffle=False has an order of its own"),
        ({"shuffle_block": 8, "partition": "iid"}, "the partition 'iid' has an order of its own"),
        ({"shuffle": False, "partition": "iid"}, "shuffle=False has an order of its own"),
        ({"partition": "iid", "rank": 0, "world": 24}, "partition iid shares 23 training samples"),
        (
            {"partition": "iid", "whole_microbatches": True},
            "cannot be combined with whole microbatches",
        ),
    ],
)
def test_options_without_sense_are_refused(options, text):
    usage_error(text, lambda: Loader(made_up(), **{"batch_size": 5, **options}))


def test_a_batch_before_the_first_is_refused():
    """Its rows would be the epoch's last ones."""
    usage_error(
        "start is -1; give a whole number of at least 0",
        lambda: Loader(made_up(), 5).epoch(0, start=-1),
    )


def test_whole_microbatches_have_the_same_shape_on_every_rank():
    """With 3 microbatches on 5 ranks two ranks have none, and all rows are there once."""
    data = made_up()
    serial = list(Loader(data, 10, microbatches=3, workers=0).epoch(0))
    for number, full in enumerate(serial):
        seen = {}
        for rank in range(5):
            batch = list(
                Loader(
                    data, 10, rank=rank, world=5, microbatches=3, whole_microbatches=True, workers=0
                ).epoch(0)
            )[number]
            assert len(batch.x) == sum(cut.stop - cut.start for cut in batch.cuts)
            seen |= {
                cut.number: (cut.first_row, batch.x[cut.start : cut.stop]) for cut in batch.cuts
            }
        assert seen.keys() == {cut.number for cut in full.cuts}
        for cut in full.cuts:
            first_row, x = seen[cut.number]
            assert first_row == cut.first_row
            np.testing.assert_array_equal(x, full.x[cut.start : cut.stop])


# The sampler: every layout sees the same samples in the same batches and microbatches.


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 9))
def test_microbatches_hold_the_same_rows_in_every_world(rows, world, microbatches):
    serial = cut_batch(rows, microbatches=microbatches)
    assert [
        row
        for item in serial
        for row in range(item.first_row, item.first_row + item.stop - item.start)
    ] == list(range(rows))
    assert len(serial) == min(microbatches, rows)
    for full in (False, True):
        ranks = [cut_batch(rows, rank, world, microbatches, full) for rank in range(world)]
        dealt = sorted(
            (cut.number, cut.first_row, cut.stop - cut.start) for cuts in ranks for cut in cuts
        )
        dealt = [item for item in dealt if item[2]]
        for entry in serial:
            mine = [(first, count) for number, first, count in dealt if number == entry.number]
            counts = [count for _, count in mine]
            assert mine[0][0] == entry.first_row and sum(counts) == entry.stop - entry.start
            assert [first + count for first, count in mine[:-1]] == [first for first, _ in mine[1:]]
            assert len(counts) == 1 if full else max(counts) - min(counts) <= 1


def test_order_is_a_function_of_seed_and_epoch_and_the_same_for_ever():
    """A checkpoint of an older version resumes in the middle of an epoch only if this holds."""
    assert order(8, 0, 0).tolist() == [3, 7, 6, 2, 4, 1, 5, 0]
    assert order(8, 3, 7).tolist() == [3, 5, 7, 2, 1, 6, 0, 4]
    assert len({tuple(order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_order_in_blocks_is_a_function_of_seed_and_epoch_and_the_same_for_ever():
    """As `test_order_is_a_function_of_seed_and_epoch_and_the_same_for_ever`."""
    assert in_blocks(8, 2, 0, 0).tolist() == [0, 4, 3, 2, 5, 7, 1, 6]
    assert in_blocks(100, 2, 0, 0).tolist()[:8] == [74, 63, 65, 54, 81, 97, 55, 62]
    epochs = {tuple(in_blocks(50, 2, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(epochs) == 16


@given(n=st.integers(1, 400), rows=st.integers(1, 30), shuffled=st.booleans())
def test_order_in_blocks_takes_the_samples_of_a_pool_together(n, rows, shuffled):
    """So that few blocks are in use at a time; as stored, which need not be the set's order."""
    places = np.random.default_rng(n).permutation(n) * 3 if shuffled else None
    result = in_blocks(n, rows, 1, 2, places)
    assert sorted(result) == list(range(n))
    blocks = (result if places is None else places[result] // 3) // rows
    uses = [np.flatnonzero(blocks == block) for block in range(-(-n // rows))]
    now = np.arange(n)
    in_use = sum((use[0] <= now) & (now <= use[-1]) for use in uses)
    assert in_use.max() <= POOL_BLOCKS


def test_a_place_within_an_epoch_is_of_its_order():
    loader = Loader(made_up(), 5, shuffle_block=2)
    state = {**loader.state(), "batch": 2}
    Loader(made_up(), 5, shuffle_block=2).load(state)
    usage_error("with shuffle_block 2, but this one has None", Loader(made_up(), 5).load, state)


@pytest.mark.parametrize("alike", [True, False])
def test_order_in_blocks_has_the_statistics_that_are_promised(alike):
    """The variance of a batch's mean: of a file of blocks that are alike, or of a random order."""
    rows, count, size = 32, 640, 64
    draws = np.random.default_rng(0)
    values = draws.standard_normal((count, 1 if alike else rows))
    values = np.broadcast_to(values, (count, rows)).reshape(-1)
    means = [
        values[in_blocks(len(values), rows, 0, epoch)].reshape(-1, size).mean(axis=1)
        for epoch in range(20)
    ]
    ratio = np.var(means) * size / np.var(values)
    assert ratio == pytest.approx(1 + (size - 1) / POOL_BLOCKS if alike else 1, rel=0.1)


# Samples that are one worker's: each has one owner, who goes through them without skipping any.

LABELLED = Dataset(
    "numbers",
    np.arange(47, dtype="float32").reshape(47, 1),
    np.random.default_rng(0).integers(0, 5, 47),
    5,
)


@given(n=st.integers(9, 70), workers=st.integers(1, 9), partition=st.sampled_from(["iid", "label"]))
def test_every_sample_has_one_owner(n, workers, partition):
    """Who finds it in one of its rows, in another order in each epoch."""
    labels = np.random.default_rng(n).integers(0, 5, n)
    owners = row_owners(n, workers, 2)
    owned = partition_samples(labels, partition, 1, owners)
    assert sorted(np.concatenate(owned).tolist()) == list(range(n))
    assert [len(item) for item in owned] == np.bincount(owners).tolist()
    if partition == "label":
        assert np.all(np.diff(labels[np.concatenate(owned)]) >= 0)
    for epoch in range(2):
        result = partition_order(owned, owners, 1, epoch)
        assert all(
            sorted(result[owners == worker]) == sorted(item) for worker, item in enumerate(owned)
        )


@pytest.mark.parametrize("world", [1, 2, 5])
def test_loader_gives_each_worker_its_own_in_the_shares_of_the_others(world):
    for rank in range(world):
        loader = Loader(
            LABELLED, 10, rank=rank, world=world, partition="label", microbatches=2, workers=0
        )
        plain = Loader(LABELLED, 10, rank=rank, world=world, microbatches=2, workers=0)
        local = set(loader.order(7)[loader._owners == rank].tolist())
        seen = Counter()
        for epoch in range(2):
            for batch, other in zip(loader.epoch(epoch), plain.epoch(epoch), strict=True):
                assert (batch.cuts, batch.global_rows, len(batch.y)) == (
                    other.cuts,
                    other.global_rows,
                    len(other.y),
                )
                assert batch.x[:, 0].astype(int).tolist() == batch.indices.tolist()
                seen.update(batch.indices.tolist())
            assert set(seen) <= local
        # nothing is skipped between two turns
        assert max(seen.values()) - min(seen[sample] for sample in local) <= 1


def test_a_transform_of_tokens_is_refused():
    """It would never be called."""
    tokens = np.arange(12, dtype=np.uint32).reshape(4, 3)
    samples = Dataset("tokens", tokens, np.zeros(4, int), classes=2)
    loader = Loader(samples, 2)
    for give in (
        lambda: Loader(samples, 2, transform=Shift(1)),
        lambda: setattr(loader, "transform", lambda x, indices, epoch, seed: x),
    ):
        usage_error("the samples are tokens, so it would never be called", give)
    assert len([*loader]) == 2
