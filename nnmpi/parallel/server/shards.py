"""Which part of a model each parameter server holds.

    buffer 0   | w0 row 0 | row 1 | row 2 | b0 | gap | w1 row 0 | row 1 |     buffer 1   | b1 | gap |
    shard      |--------- 0 ----------|-------- 1 --------|------- 2 -------------------------------|

Shards are contiguous and as equal as rows allow: only whole rows (along axis 0) of a parameter are cut apart, so that
what a server holds of each is a `Region`, which a checkpoint of any layout can be made of. The gaps between parameters
belong to a shard too, so that a message is one range of memory.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from nnmpi.backend.array import Array
from nnmpi.shard import Region
from nnmpi.tensor.flat import FlatStorage, Span


@dataclass(frozen=True)
class Shard:
    """A contiguous range of every flat buffer.

    Attributes:
        number: which server holds it, from 0.
        parts: what of each buffer belongs to it, in elements; maybe nothing.
    """

    number: int
    parts: tuple[slice, ...]

    @property
    def elements(self) -> int:
        """The number of elements, gaps included."""
        return sum(part.stop - part.start for part in self.parts)

    def views(self, arrays: Sequence[Array]) -> list[Array]:
        """Return its parts of arrays laid out like the flat buffers: one view per buffer, maybe empty."""
        return [array[part] for array, part in zip(arrays, self.parts, strict=True)]

    def nbytes(self, arrays: Sequence[Array]) -> int:
        """Return the bytes of its parts of such arrays."""
        return sum(view.size * view.dtype.itemsize for view in self.views(arrays))


def cut_shards(storage: FlatStorage, servers: int) -> list[Shard]:
    """Return the shard of each server, of which there is at least 1; with more servers than rows some are empty."""
    lengths = [data.size for data in storage.data]
    offsets = [sum(lengths[:buffer]) for buffer in range(len(lengths))]
    total = sum(lengths)
    # Where each parameter starts, its rows, and the elements of a row: what `_nearest` may cut apart.
    places = sorted(
        (offsets[span.buffer] + span.start, *_rows(span)) for span in storage.spans if span.start < span.stop
    )
    starts = [start for start, _, _ in places]
    edges = [0]
    for number in range(1, servers):
        edges.append(_nearest(number * total / servers, places, starts, total))
    edges.append(total)
    return [
        Shard(
            number,
            tuple(
                slice(min(max(begin - offset, 0), length), min(max(end - offset, 0), length))
                for offset, length in zip(offsets, lengths, strict=True)
            ),
        )
        for number, (begin, end) in enumerate(zip(edges, edges[1:], strict=False))
    ]


def regions(storage: FlatStorage, shard: Shard) -> list[tuple[int, Region | None]]:
    """Return which rows of which parameters lie in a shard.

    Returns:
        For each parameter of which the shard has something: its number in the storage, and its rows, None for all of
        them. A parameter without elements is in exactly one shard, like any element.
    """
    found: list[tuple[int, Region | None]] = []
    for number, span in enumerate(storage.spans):
        part = shard.parts[span.buffer]
        if span.start == span.stop:
            if _holds(shard, part, span.start, storage.data[span.buffer].size):
                found.append((number, None))
            continue
        first, last = max(part.start, span.start), min(part.stop, span.stop)
        if first < last:
            count, row = _rows(span)
            is_whole = last - first == count * row
            begin, end = (first - span.start) // row, (last - span.start) // row
            found.append((number, None if is_whole else Region(span.parameter.declared, 0, begin, end)))
    return found


def _rows(span: Span) -> tuple[int, int]:
    """Return a parameter's number of rows, and the elements of one; a number by itself is one row."""
    shape = span.parameter.declared
    count = shape[0] if shape else 1
    return count, (span.stop - span.start) // max(1, count)


def _nearest(target: float, places: Sequence[tuple[int, int, int]], starts: Sequence[int], total: int) -> int:
    """Return the place nearest to the target where a cut is allowed, the first one of two.

    Args:
        target: in elements from the first buffer's start, at most `total`.
        places: where each parameter starts, its rows, and the elements of a row, in order.
        starts: the first of these.
        total: the end of the last buffer, where a cut is allowed too.
    """
    number = bisect_right(starts, target) - 1
    allowed = [0, *starts[number + 1 : number + 2], total]
    if number >= 0:
        start, count, row = places[number]
        below = min(int(target - start) // row, count) if row else 0
        allowed += [start + below * row, start + min(below + 1, count) * row]
    return min(sorted(allowed), key=lambda place: abs(place - target))


def _holds(shard: Shard, part: slice, place: int, length: int) -> bool:
    """Return whether a place between two elements belongs to a shard's part of a buffer: each belongs to one."""
    if length == 0:
        return shard.number == 0
    first, stop = int(part.start), int(part.stop)
    return first <= place < stop or (first < stop == place == length)
