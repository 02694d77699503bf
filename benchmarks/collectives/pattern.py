"""The values of the buffers before a call, and the expected ones after it: integers, so that every
sum is exact.

    element i on rank r in call k  =  i % TILE % 11 + i // TILE % 5 + r * 7919 % 97 + 1 + k % 3

The moduli shrink until the sum fits into the dtype: overflow differs between MPI libraries (8-bit
sums wrap in some and saturate in others).

A misplaced chunk, a missing one, one counted twice, and one left from the previous call all give
another number. The tile is short and stays in the core's cache: a refill reads nothing else, and
leaves the buffer like a backward pass, written by its own rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.base.shard import split
from nnmpi.comm.collective import Contract, count

TILE = 16381  # elements; a prime, so that no chunk begins where a tile begins
JUNK = 77  # in chunks without a value before the call


@dataclass(frozen=True, slots=True)
class Span:
    """Elements start..stop-1, which hold a sum of `parts` buffers; `weight` is the sum of their
    ranks' weights.
    """

    start: int
    stop: int
    parts: int
    weight: int


@dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong element."""

    index: int
    value: float
    expected: float


@dataclass(frozen=True, slots=True)
class Range:
    """The largest value of each term of an element."""

    tile: int
    block: int
    call: int
    weight: int

    @classmethod
    def fitting(cls, dtype: str, size: int) -> "Range":
        """Return the range whose sum over `size` ranks is exact in this dtype."""
        kind = np.dtype(dtype)
        largest = 2 ** (np.finfo(kind).nmant + 1) if kind.kind == "f" else int(np.iinfo(kind).max)
        room = largest // size
        tile, block, call = min(10, room // 4), min(4, room // 4), min(2, room // 4)
        return cls(tile, block, call, min(97, room - tile - block - call))

    def weigh(self, rank: int) -> int:
        """Return the term that differs between neighbouring ranks."""
        return rank * 7919 % self.weight + 1 if self.weight else 0

    def shift(self, block: int, call: int) -> int:
        """Return the terms that differ between neighbouring tiles, and between successive calls."""
        return block % (self.block + 1) + call % (self.call + 1)


class Pattern:
    """The values of one operation on buffers of one length.

    Args:
        contract: the chunks of each rank before and after.
        rank: this rank.
        size: the number of ranks.
        elements: of each rank's buffer.
        dtype: of the buffer.
        backend: of the buffers.
    """

    def __init__(
        self, contract: Contract, rank: int, size: int, elements: int, dtype: str, backend: Backend
    ) -> None:
        self._range = Range.fitting(dtype, size)
        self._tile = (np.arange(min(TILE, elements)) % (self._range.tile + 1)).astype(dtype)
        self._on_device = backend.asarray(self._tile)
        self._xp = backend.xp
        chunks = split(elements, size)
        weights = [self._range.weigh(item) for item in range(size)]
        self._before = list(
            _spans([contract.begins(rank, chunk, size) for chunk in range(size)], chunks, weights)
        )
        after = _spans([contract.ends(rank, chunk, size) for chunk in range(size)], chunks, weights)
        self._after = [span for span in after if span.parts]

    def fill(self, array: Array, call: int) -> None:
        """Write this rank's values before call number `call`."""
        for span in self._before:
            if not span.parts:
                array[span.start : span.stop] = JUNK
                continue
            for start, stop, first, block in _blocks(span):
                offset = span.weight + self._range.shift(block, call)
                self._xp.add(
                    self._on_device[first : first + stop - start], offset, out=array[start:stop]
                )

    def first_wrong(self, array: NDArray[Any], call: int) -> Wrong | None:
        """Return the first element of a host array that violates the contract, or None."""
        for span in self._after:
            for start, stop, first, block in _blocks(span):
                offset = span.weight + span.parts * self._range.shift(block, call)
                tile = self._tile[first : first + stop - start].astype(np.int64)
                expected = (tile * span.parts + offset).astype(array.dtype)
                wrong = np.flatnonzero(array[start:stop] != expected)
                if wrong.size:
                    at = int(wrong[0])
                    return Wrong(start + at, float(array[start + at]), float(expected[at]))
        return None


def _spans(
    parts: Sequence[int | None], chunks: Sequence[range], weights: Sequence[int]
) -> Iterator[Span]:
    """Yield runs of chunks that hold the same parts."""
    edges = [0, *(i for i in range(1, len(parts)) if parts[i] != parts[i - 1]), len(parts)]
    for first, last in pairwise(edges):
        held = parts[first]
        start, stop = chunks[first].start, chunks[last - 1].stop
        if start == stop:
            continue
        if held is None:
            yield Span(start, stop, 0, 0)
            continue
        counts = [count(held, rank) for rank in range(len(parts))]
        yield Span(
            start,
            stop,
            sum(counts),
            sum(n * local for n, local in zip(counts, weights, strict=True)),
        )


def _blocks(span: Span) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, stop, offset in the tile, number of the tile) of a span's pieces by tile."""
    for block in range(span.start // TILE, -(-span.stop // TILE)):
        start, stop = max(span.start, block * TILE), min(span.stop, (block + 1) * TILE)
        yield start, stop, start - block * TILE, block
