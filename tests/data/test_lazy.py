"""Arrays that are read by rows give what they give in memory, without being read whole."""

import threading
import tracemalloc

import h5py
import numpy as np
import pytest

import nnmpi
from nnmpi.data import Dataset, Loader, Normalize, split
from nnmpi.data.dataset import IGNORED, as_yes_or_no
from nnmpi.data.lazy import Chosen, Chunked, Computed, as_rows, blocks, is_lazy, read_all
from nnmpi.data.sampler import in_blocks
from tests.harness.refusals import data_error

ROWS = 101


class Listed:
    """The least that a lazy array must be: rows by slice and by ascending row numbers."""

    def __init__(self, array):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __len__(self):
        return len(self._array)

    def __getitem__(self, rows):
        assert isinstance(rows, slice) or (np.diff(rows) > 0).all()
        return self._array[rows]


def mapped(array, folder):
    np.save(folder / "mapped.npy", array)
    return np.load(folder / "mapped.npy", mmap_mode="r")


def stored(array, folder, **options):
    with h5py.File(folder / "stored.h5", "w") as file:
        file.create_dataset("x", data=array, **options)
    return h5py.File(folder / "stored.h5")["x"]


def as_zarr(array, folder):
    zarr = pytest.importorskip("zarr")
    result = zarr.create_array(
        folder / "z", shape=array.shape, chunks=(7, *array.shape[1:]), dtype=array.dtype
    )
    result[:] = array
    return result


def packed(array, folder):
    return stored(array, folder, chunks=(8, *array.shape[1:]), compression="gzip")


def in_parts_of_rows(array, folder):
    return stored(array, folder, chunks=(9, *(1 for _ in array.shape[1:])))


KINDS = {
    "mapped": mapped,
    "listed": lambda array, folder: Listed(array),
    "hdf5": stored,
    "packed hdf5": packed,
    "parts of rows": in_parts_of_rows,
    "zarr": as_zarr,
}


@pytest.fixture(params=KINDS)
def lazily(request, tmp_path):
    """A function that stores an array and returns what reads it by rows."""
    count = iter(range(9))

    def make(array):
        folder = tmp_path / str(next(count))
        folder.mkdir()
        return KINDS[request.param](array, folder)

    return make


def draw(*shape, dtype="float32", most=255):
    values = np.random.default_rng(len(shape)).random((ROWS, *shape)) * most
    return values.astype(dtype)


SETS = {
    "numbers": lambda: (draw(3, dtype="float64"), np.arange(ROWS) % 4, 4),
    "other order of bytes": lambda: (draw(3, dtype=">f4"), (np.arange(ROWS) % 4).astype(">i2"), 4),
    "images": lambda: (draw(4, 4, 3, dtype="uint8"), np.arange(ROWS) % 4, 4, 1 / 255),
    "tokens": lambda: (draw(6, dtype="uint16"), draw(6, dtype="int32") - 1, 256),
    "fields": lambda: (draw(4, 4, 2, dtype="float16"), draw(4, 4, 1, dtype="float64"), 0),
    "masks": lambda: (draw(4, 4, 2), draw(4, 4, dtype="uint8", most=4), 4),
}


def batches(dataset, **options):
    normalize = None if dataset.is_tokens else Normalize.fit(dataset)
    loader = Loader(dataset, 16, rank=1, world=2, transform=normalize, microbatches=2, **options)
    return [
        (b.x.tobytes(), b.y.tobytes(), b.x.dtype, b.targets, b.global_rows)
        for epoch in range(2)
        for b in loader.epoch(epoch)
    ]


@pytest.mark.parametrize("name", SETS)
def test_rows_that_are_read_are_those_in_memory(lazily, name):
    x, y, *rest = SETS[name]()
    given = lazily(x)
    lazy, memory = Dataset("set", given, lazily(y), *rest), Dataset("set", x, y, *rest)
    assert is_lazy(lazy.x) and not is_lazy(memory.x)
    assert is_lazy(lazy.y) or y.ndim == 1 or y.dtype == np.int64
    assert batches(lazy) == batches(memory) == batches(lazy, workers=3)
    alike = "predicts variance vocabulary identity sample_shape target_shape"
    assert [getattr(lazy, name) for name in alike.split()] == [
        getattr(memory, name) for name in alike.split()
    ]
    np.testing.assert_array_equal(lazy.targets, memory.targets)
    for ours, theirs in zip(split(lazy, 0.3), split(memory, 0.3), strict=True):
        assert is_lazy(ours.x), "a part is not copied"
        assert batches(ours) == batches(theirs)
        assert batches(ours, shuffle_block=4) == batches(theirs, shuffle_block=4) != batches(theirs)
        assert batches(ours.take(np.arange(5, 20))) == batches(theirs.take(np.arange(5, 20)))
        assert ours.variance == theirs.variance
        assert ours.identity != lazy.identity
    assert (
        split(lazy, 0.3)[0].identity
        == split(lazy, 0.3)[0].identity
        != split(lazy, 0.3, 1)[0].identity
    )


def test_blocks_are_of_rows_as_they_are_stored(tmp_path):
    """Which a part of a split has in another order."""
    train, _ = split(Dataset("set", mapped(draw(3), tmp_path), np.zeros(ROWS, int), 1), 0.2)
    loader = Loader(train, 16, shuffle_block=3, seed=5)
    expected = in_blocks(len(train), 3, 5, 1, train.x.places)
    assert loader.order(1).tolist() == expected.tolist()
    assert expected.tolist() != in_blocks(len(train), 3, 5, 1).tolist()


def test_yes_or_no_of_rows_that_are_read(lazily):
    x, y = draw(3), (draw(2) > 100).astype("uint8")
    lazy, memory = (as_yes_or_no(Dataset("set", x, z, 2)) for z in (lazily(y), y))
    assert batches(lazy) == batches(memory)


def test_what_is_given_stays_as_it_is(tmp_path):
    x = as_rows(Listed(draw(3)))
    assert Dataset("set", x, np.zeros(ROWS, int), 1).x is x
    array = mapped(draw(3), tmp_path)
    assert np.shares_memory(Dataset("set", array, np.zeros(ROWS, int), 1).x, array)


@pytest.mark.parametrize("kind", ["listed", "packed hdf5"])
def test_a_value_that_is_wrong_is_named_when_its_row_is_read(kind, tmp_path):
    x, y = draw(4, 4, 1, dtype="float64"), draw(4, 4)
    x[40, 1, 2] = 1e300
    y[50, 3, 3] = np.nan
    dataset = Dataset("set", KINDS[kind](x, tmp_path), Listed(y), 0)
    dataset.rows(np.arange(40))
    some = np.array([45, 40, 39])
    data_error(r"set: sample.40, 1, 2, 0.: 1e.300 is not a finite", dataset.rows, some)
    some = np.array([3, 50])
    data_error("set: target nan of sample 50 is not a finite number", dataset.labels, some)
    labels = Dataset("set", Listed(draw(4, 4)), Listed(np.full((ROWS, 4, 4), 7)), 7)
    data_error("set: label 7 of sample 9 is not in 0..6", labels.labels, np.array([9]))


def test_float32_must_tell_a_table_s_values_apart():
    x = 1e9 + np.arange(4.0 * 5000).reshape(5000, 4) / 1e4
    data_error(
        r"sample\[:, 0\]: float32 cannot tell", Dataset, "set", Listed(x), np.zeros(5000, int), 1
    )


def test_what_float32_cannot_hold_is_named_when_it_is_read():
    x = np.repeat([1.0, 1e300], [1, 8])[:, None]
    huge = Dataset("set", Listed(x), np.zeros(9, int), 1)
    data_error(r"sample\[4, 0\]: 1e[+]300 is not a finite", huge.rows, np.array([4]))


def test_what_gives_other_rows_or_none_is_refused(tmp_path):
    class Wrong(Listed):
        def __getitem__(self, rows):
            return super().__getitem__(rows)[:1]

    class Broken(Listed):
        def __getitem__(self, rows):
            raise OSError("the disc is gone")

    y = np.zeros(ROWS, int)
    data_error(
        "a Wrong gave float32 .1, 3. for 2 rows",
        Dataset("set", Wrong(draw(3)), y, 1).rows,
        np.arange(2),
    )
    data_error(
        "rows of the Broken .*the disc is gone",
        Dataset("set", Broken(draw(3)), y, 1).rows,
        np.arange(2),
    )


def test_arrays_in_memory_are_no_rows():
    """Nor are lists, which have no dtype."""
    pandas = pytest.importorskip("pandas")
    for values in (draw(3), [1.0], "text", np.float32(1), nnmpi.Tensor(draw(3)), draw(3).data):
        assert not is_lazy(values)
    assert not is_lazy(pandas.Series([1.0, 2.0])) and not is_lazy(pandas.DataFrame({"a": [1.0]}))


def test_chunks_are_read_once_while_they_are_kept():
    class Counted(Listed):
        chunks, reads = (10, 3), 0

        def __getitem__(self, rows):
            self.reads += 1
            return super().__getitem__(rows)

    source = Counted(draw(3))
    rows = Chunked(source)
    wanted = np.array([3, 99, 3, 5, 100, 11])
    np.testing.assert_array_equal(rows.take(wanted), source._array[wanted])
    np.testing.assert_array_equal(rows.take(wanted[::-1]), source._array[wanted[::-1]])
    assert source.reads == 4  # of rows 0 to 9, 10 to 19, 90 to 99, 100
    rows.keep(10 * 12 * 2)  # bytes: two chunks
    rows.take(np.array([50]))
    rows.take(np.array([11, 50]))
    assert source.reads == 6
    column = Chunked(Counted(draw(3)), kept_bytes=240)
    column.take(np.array([1]))
    assert len(column._chunk(0)) == 10
    Counted.chunks = (ROWS, 1)
    assert len(Chunked(Counted(draw(3)), kept_bytes=240)._chunk(0)) == 20, (
        "a full column is read in parts"
    )


def test_nothing_reads_a_large_set_whole(tmp_path):
    shape = 40_000, 32, 32
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float64, shape)
    y = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", np.int32, (40_000, 8, 8))
    x[:], y[:, 0] = 1.0, IGNORED
    tracemalloc.start()
    dataset = Dataset(
        "set", *(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy"), 1
    )
    train, _ = split(dataset, 0.25)
    Normalize.fit(train)
    assert (train.targets == 56).all() and train.moments.top == 1 and train.identity
    next(iter(Loader(train, 64).epoch(0)))
    nnmpi.data.loader.Order(Loader(train, 64)).texts()
    (_, peak), _ = tracemalloc.get_traced_memory(), tracemalloc.stop()
    assert peak < 130e6 < x.nbytes / 2


def test_two_loaders_and_their_threads_read_one_file(tmp_path):
    x, y = draw(8, 8, 1), np.arange(ROWS) % 3
    lazy = Dataset("set", stored(x, tmp_path, chunks=(8, 8, 8, 1)), y, 3)
    lazy.x.keep(1)
    expected = batches(Dataset("set", x, y, 3))
    seen = []
    threads = [
        threading.Thread(target=lambda: seen.append(batches(lazy, workers=3))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 3


def test_no_rows_are_an_empty_data_set():
    empty = draw(3, dtype="float64")[:0]
    for x in (empty, Listed(empty)):
        dataset = Dataset("set", x, np.zeros(0, int), 2)
        assert len(dataset) == 0 and dataset.x.shape == (0, 3) and dataset.x.dtype == np.float32


def test_rows_of_rows():
    x = as_rows(Listed(draw(3)))
    rows = Chosen(Chosen(x, np.arange(50, 0, -1)), np.array([3, 1, 1]))
    assert rows.source is x and rows.places.tolist() == [47, 49, 49]
    twice = Computed(rows, lambda values, numbers: values * 2 + numbers[:, None])
    expected = x[:][[47, 49, 49]] * 2 + np.arange(3)[:, None]
    np.testing.assert_array_equal(read_all(twice), expected)
    np.testing.assert_array_equal(np.asarray(twice), expected)
    np.testing.assert_array_equal(twice[1], expected[1])
    np.testing.assert_array_equal(twice[::-1], expected[::-1])
    np.testing.assert_array_equal(twice.take(np.array([2, 0])), expected[[2, 0]])
    assert [first for first, _ in blocks(twice, 1)] == [0, 1, 2]
    assert len(twice[2:1]) == 0 and (twice.ndim, twice.size) == (2, 9)
