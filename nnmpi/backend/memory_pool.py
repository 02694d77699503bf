"""Memory for the results of a recorded step, taken back into the pool as soon as nobody uses a result any more.

    recorded      a = f(x)      b = g(a)      (nobody needs a any more)      c = h(b)
    memory        [  a  ]       [  b  ]            back in the pool          [  c  ] where a was

Each result is an array over a block of the pool, and so is every view of it. When the last of them goes away, as in an
ordinary step, the block is free for another result: a recorded step takes no more memory than one that is not recorded,
and works in the same warm cache. The recorded calls must not keep blocks from being used again within the step. So they
keep aliases, bare arrays over the same memory which do not count as its users. That is safe because a replay makes the
same calls in the same order: whatever overwrites a result comes after its last use.
"""

from __future__ import annotations

import mmap
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array

LEAST_BYTES = 1024  # smaller results have memory of their own
LINE_BYTES = 64
LEAST_MAPPED_BYTES = 128 * 1024


class ChunkPart(NamedTuple):
    """Some bytes of a chunk of memory."""

    chunk: int
    start: int
    stop: int


class PooledBlock:
    """A block of memory that goes back to its pool when the last array over it goes away.

    NumPy makes an array over it by `__array_interface__`, and the array and its views then keep this object alive.

    Args:
        pool: where the block comes from.
        span: where it is.
        block: its bytes, at least as many as the array needs.
        shape: of the array, C-contiguous.
        dtype: of the array; bfloat16 appears as 16-bit integers, since the interface has no word for it.
    """

    def __init__(
        self, pool: MemoryPool, span: ChunkPart, block: Array, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.pool, self.span, self.block = pool, span, block
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str if dtype.kind != "V" else f"<u{dtype.itemsize}",  # bfloat16's own says nothing
            "data": (block.ctypes.data, False),
        }

    def __del__(self) -> None:
        self.pool.returned.append(self.span)


class ChunkParts:
    """Which parts of chunks are in use, and which are free.

    A result gets the tightest part that is free, and of these the one that was given back last, whose lines may still
    be in the cache. What it does not need stays free, and parts that meet become one again. So a pass of fewer rows
    finds room among what one of more rows has left. Where no part is long enough, there is a new chunk.

    Attributes:
        returned: parts over which there is no array any more, since the last result.
        size_bytes: of all chunks together.
        chunks: how many there are.
    """

    def __init__(self) -> None:
        # A collection of garbage may give back at any time: nothing is joined there.
        self.returned: list[ChunkPart] = []
        self.size_bytes = self.chunks = 0
        self._free: list[ChunkPart] = []

    def take(self, count_bytes: int) -> ChunkPart:
        """Return so many bytes that are free."""
        while self.returned:
            self._join(self.returned.pop(0))
        fitting = [span for span in self._free if span.stop - span.start >= count_bytes]
        if not fitting:
            self._add_chunk(count_bytes)
            return ChunkPart(self.chunks - 1, 0, count_bytes)
        chunk, start, stop = found = min(reversed(fitting), key=lambda span: span.stop - span.start)
        self._free.remove(found)
        if stop - start > count_bytes:
            self._free.append(ChunkPart(chunk, start + count_bytes, stop))
        return ChunkPart(chunk, start, start + count_bytes)

    def _add_chunk(self, count_bytes: int) -> None:
        self.size_bytes += count_bytes
        self.chunks += 1

    def _join(self, span: ChunkPart) -> None:
        """Let a part be free, as one with those beside it."""
        for other in [each for each in self._free if each.chunk == span.chunk]:
            if other.stop == span.start or other.start == span.stop:
                self._free.remove(other)
                span = ChunkPart(span.chunk, min(span.start, other.start), max(span.stop, other.stop))
        self._free.append(span)


class MemoryPool(ChunkParts):
    """The same, with memory."""

    def __init__(self) -> None:
        super().__init__()
        self._chunks: list[Array] = []

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a C-contiguous array of any values, over memory of the pool unless it is short."""
        bytes_needed = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if bytes_needed < LEAST_BYTES:
            return np.empty(shape, dtype)
        rounded = -(-bytes_needed // LINE_BYTES) * LINE_BYTES
        span = self.take(rounded)
        block = self._chunks[span.chunk][span.start : span.stop]
        array: Array = np.asarray(PooledBlock(self, span, block, shape, dtype))
        return array if array.dtype == dtype else array.view(dtype)

    def _add_chunk(self, count_bytes: int) -> None:
        self._chunks.append(_aligned(count_bytes))
        super()._add_chunk(count_bytes)


def alias(x: Any) -> Any:
    """Return the same call, array or value over bare memory, which the pool may then use again.

    Understood are arrays, their methods, tuples of arrays, and partial calls of these; anything else keeps what it
    holds.
    """
    if type(x) is np.ndarray:
        return _bare(x)
    if isinstance(x, partial):
        words = {name: alias(each) for name, each in x.keywords.items()}
        return partial(alias(x.func), *map(alias, x.args), **words)
    if hasattr(x, "_fields"):
        return type(x)(*map(alias, x))
    if type(x) is tuple:
        return tuple(map(alias, x))
    owner = getattr(x, "__self__", None)
    if type(owner) is np.ndarray:
        return getattr(_bare(owner), x.__name__)
    return x


def _bare(array: Array) -> Array:
    """Return an array over the same elements that does not keep its block in use."""
    base: Any = array
    while base is not None and not isinstance(base, PooledBlock):
        base = getattr(base, "base", None)  # windows have one between them and their array that is no array itself
    if base is None:
        return array
    block = base.block
    bare: Array = np.ndarray(array.shape, array.dtype, block.data, array.ctypes.data - block.ctypes.data, array.strides)
    return bare


def _aligned(count_bytes: int) -> Array:
    """Return bytes that begin where a line of the cache does.

    Many are a mapping of their own: between what malloc gives and takes back while a step is recorded they would leave
    holes, which nobody uses later.
    """
    if count_bytes >= LEAST_MAPPED_BYTES and hasattr(mmap, "MAP_ANONYMOUS"):
        mapping = mmap.mmap(-1, count_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(mapping, np.uint8)
    whole = np.empty(-(-count_bytes // LINE_BYTES) * LINE_BYTES + LINE_BYTES, np.uint8)
    skip = -whole.ctypes.data % LINE_BYTES
    return whole[skip : skip + whole.size - LINE_BYTES]
