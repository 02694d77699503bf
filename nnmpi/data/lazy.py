"""Arrays that are not in memory: mapped files, and what is read by rows, as of h5py and zarr.

A **lazy array** is any object with `shape`, `dtype`, and rows by slice or by an ascending array of
different row numbers, which NumPy can read. A `Dataset` holds it and reads rows when
their batch is made. What must see all rows reads them by `blocks`.

    mapped ndarray     pages that the system reads when they are used, and drops when it needs room
    Foreign            an object of another library, which reads its rows
    Chunked            one with `chunks`, as h5py's and zarr's: whole chunks are read and kept
    Chosen             some rows of a lazy array, in another order: a part of a `split`
    Computed           rows changed when they are read: to another dtype, say

To read something else by rows, derive from LazyRows.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from math import prod
from mmap import mmap
from threading import Lock
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Dtype, Integers, Shape
from nnmpi.base.errors import DataError, NnmpiError, shortened

BLOCK_BYTES = 2**24  # of rows that are read at once where all are read
KEPT_BYTES = 2**25  # of chunks that are kept for the next batches; at least one chunk is kept
# What stands for all rows where reading them would take long: places, and bytes at each.
PLACES, PLACE_BYTES = 16, 2**12
# What the types of arrays in memory have: sparse ones; NumPy's, PyTorch's and CuPy's kinds; columns
# of pandas and polars.
IN_MEMORY = "toarray", "__array_interface__", "__dlpack__", "__cuda_array_interface__", "to_numpy"

RowsFunction: TypeAlias = Callable[[Array, Integers], Array]  # of rows and their numbers


class LazyRows(ABC):
    """Base of the lazy arrays that are no mapped ones; they are read as NumPy's arrays are.

    Attributes:
        shape, dtype: of all rows.
    """

    shape: Shape
    dtype: Dtype

    @abstractmethod
    def take(self, indices: Integers, axis: int = 0) -> Array:
        """Return rows in the order of the indices, as a new array."""

    def part(self, start: int, stop: int) -> Array:
        """Return rows that follow one another; may be a view."""
        return self.take(np.arange(start, stop))

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def __getitem__(self, key: Any) -> Array:
        """Return the rows of a slice or of an array of numbers, or the row of one."""
        if isinstance(key, int | np.integer):
            return self.take(np.array([range(len(self))[key]]))[0]
        if not isinstance(key, slice):
            return self.take(np.asarray(key, np.int64))
        rows = range(*key.indices(len(self)))
        if rows.step != 1:
            return self.take(np.arange(rows.start, rows.stop, rows.step))
        return self.part(rows.start, max(rows.start, rows.stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Read all rows."""
        result = read_all(self)
        return result if dtype is None else result.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype} {self.shape})"


class Foreign(LazyRows):
    """Rows of another library's array.

    Args:
        source: the array.
        check: called before rows are read; raises an error if they may be others by now.
    """

    def __init__(self, source: Any, check: Callable[[], None] | None = None) -> None:
        self.source, self.shape, self.dtype = source, tuple(source.shape), source.dtype
        self._check = check

    def take(self, indices: Integers, axis: int = 0) -> Array:
        """See `LazyRows`."""
        ascending, places = np.unique(indices, return_inverse=True)
        return self.read(ascending, len(ascending)).take(places.reshape(-1), axis=0)

    def part(self, start: int, stop: int) -> Array:
        """See `LazyRows`."""
        return self.read(slice(start, stop), stop - start)

    def read(self, rows: slice | Integers, count: int) -> Array:
        """Return the rows of a slice, or of ascending numbers, as the library gives them.

        Raises:
            DataError: for rows that cannot be read, or others than were asked for.
        """
        if not count:
            return np.empty((0, *self.shape[1:]), self.dtype)
        what = type(self.source).__name__
        if self._check is not None:
            self._check()
        try:
            result = np.asarray(self.source[rows])
        except (NnmpiError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's own
            name = shortened(str(getattr(self.source, "name", "")))
            raise DataError(
                f"rows of the {what} {name} cannot be read: {shortened(str(error))}"
            ) from error
        if result.shape != (count, *self.shape[1:]) or result.dtype != self.dtype:
            raise DataError(
                f"a {what} gave {result.dtype} {result.shape} for {count} rows of {self.dtype}"
                f" {self.shape}; a data set needs rows by slice and by arrays of row numbers"
            )
        return result


class Chunked(Foreign):
    """Rows of an array that is stored in chunks: each is read whole, and the last ones are kept.

    A batch takes single rows, and a library unpacks a chunk for each of them.

    Args:
        source: h5py's or zarr's array; its `chunks` are lengths along the axes.
        kept_bytes: of the chunks that are kept.
        check: see `Foreign`.
    """

    def __init__(
        self,
        source: Any,
        kept_bytes: int = KEPT_BYTES,
        check: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(source, check)
        # a chunk of many rows, such as a full column, is read in parts
        most = max(1, kept_bytes // max(1, row_bytes(source)))
        self._step = min(int(source.chunks[0]), most)
        self.keep(kept_bytes)
        self._chunks: OrderedDict[int, Array] = OrderedDict()
        self._lock = Lock()  # a loader's threads read one object

    def keep(self, kept_bytes: int) -> None:
        """Set how many bytes of chunks are kept; at least one chunk is."""
        self._most = max(1, kept_bytes // max(1, self._step * row_bytes(self)))

    def take(self, indices: Integers, axis: int = 0) -> Array:
        """See `LazyRows`."""
        result = np.empty((len(indices), *self.shape[1:]), self.dtype)
        order = np.argsort(indices, kind="stable")
        ascending = indices[order]
        numbers, starts = np.unique(ascending // self._step, return_index=True)
        stops = [*starts[1:].tolist(), len(indices)]
        for number, start, stop in zip(numbers.tolist(), starts.tolist(), stops, strict=True):
            rows = ascending[start:stop] - number * self._step
            result[order[start:stop]] = self._chunk(number)[rows]
        return result

    def _chunk(self, number: int) -> Array:
        with self._lock:
            if number in self._chunks:
                self._chunks.move_to_end(number)
                return self._chunks[number]
        first = number * self._step
        chunk = self.part(first, min(first + self._step, len(self)))
        with self._lock:
            self._chunks[number] = chunk
            while len(self._chunks) > self._most:
                self._chunks.popitem(last=False)
        return chunk


class Chosen(LazyRows):
    """Rows of a lazy array at some places, in any order.

    Args:
        source: the array.
        places: (n,), the row of `source` that each row is.
    """

    def __init__(self, source: Any, places: Integers) -> None:
        is_chosen = isinstance(source, Chosen)
        self.source: Any = source.source if is_chosen else source
        self.places = source.places[places] if is_chosen else places
        self.shape, self.dtype = (len(places), *source.shape[1:]), source.dtype

    def take(self, indices: Integers, axis: int = 0) -> Array:
        """See `LazyRows`."""
        return self.source.take(self.places[indices], axis=0)


class Computed(LazyRows):
    """Rows of a lazy array after a function, which is called when they are read.

    Args:
        source: the array.
        function: see `change_rows`.
    """

    def __init__(self, source: Any, function: RowsFunction) -> None:
        self.source, self._function = source, function
        first = self.part(0, min(1, len(source)))
        self.shape, self.dtype = (len(source), *first.shape[1:]), first.dtype

    def take(self, indices: Integers, axis: int = 0) -> Array:
        """See `LazyRows`."""
        return self._function(self.source.take(indices, axis=0), indices)

    def part(self, start: int, stop: int) -> Array:
        """See `LazyRows`."""
        return self._function(self.source[start:stop], np.arange(start, stop))


def is_mapped(x: Any) -> bool:
    """Return whether an array is a part of a mapped file."""
    while isinstance(x, np.ndarray):
        x = x.base
    return isinstance(x.obj if isinstance(x, memoryview) else x, mmap)


def is_lazy(x: Any) -> bool:
    """Return whether an object is a lazy array.

    Arrays and columns of other libraries that are in memory say so by a protocol.
    """
    if isinstance(x, np.ndarray):
        return is_mapped(x)
    if isinstance(x, LazyRows):
        return True
    kind = type(x)
    if not hasattr(kind, "__getitem__") or any(hasattr(kind, name) for name in IN_MEMORY):
        return False
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    return isinstance(shape, tuple) and isinstance(dtype, np.dtype)


def as_rows(x: Any, check: Callable[[], None] | None = None) -> Any:
    """Return a lazy array as a mapped ndarray or LazyRows; these unchanged.

    Args:
        x: the array.
        check: see `Foreign`.
    """
    if isinstance(x, np.ndarray | LazyRows):
        return x
    chunks = getattr(x, "chunks", None)
    is_chunked = chunks and isinstance(chunks[0], int)
    return Chunked(x, check=check) if is_chunked else Foreign(x, check)


def change_rows(x: Any, function: RowsFunction) -> Any:
    """Return an array after a function of its rows; of a lazy array, a lazy one.

    Args:
        x: (n, ...), an array or a lazy one as `as_rows` returns it.
        function: of rows and their numbers, (rows,). It returns as many, each computed from its own
            row alone, and leaves the given ones as they are.
    """
    return Computed(x, function) if is_lazy(x) else function(x, np.arange(len(x)))


def blocks(x: Any, most_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, Array]]:
    """Yield all rows of an array, which may be lazy, in blocks: the first row's number, and rows.

    Args:
        x: the array; a block of an ndarray is a view.
        most_bytes: of a block; it has at least one row.
    """
    step = max(1, most_bytes // max(1, row_bytes(x)))
    for first in range(0, len(x), step):
        yield first, x[first : first + step]


def keep_rows(x: Any, count: int) -> None:
    """Let an array that is read in chunks keep those of so many rows, or more."""
    while not isinstance(x, Chunked):
        x = getattr(x, "source", None)
        if x is None:
            return
    x.keep(max(KEPT_BYTES, count * row_bytes(x)))


def row_bytes(x: Any) -> int:
    """Return the bytes of a row."""
    return prod(x.shape[1:]) * int(x.dtype.itemsize)


def read_all(x: Any) -> Array:
    """Return a lazy array in memory; arrays, also mapped ones, unchanged."""
    if isinstance(x, np.ndarray):
        return x
    result = np.empty(x.shape, x.dtype)
    for first, rows in blocks(x):
        result[first : first + len(rows)] = rows
    return result


def sampled(x: Any) -> Array:
    """Return rows at fixed places of an array that is not read whole, to judge it by them."""
    count = max(1, PLACE_BYTES // max(1, row_bytes(x)))
    starts = np.linspace(0, max(0, len(x) - count), PLACES).astype(np.int64)
    rows = np.unique(starts[:, None] + np.arange(count))
    return np.asarray(x.take(rows[rows < len(x)], axis=0))
