"""Ownership of indices: arithmetic on integers, for batches, chunks, buckets and layers alike.

Nothing here depends on arrays or MPI.

    split(10, 4)      0 1 2 | 3 4 5 | 6 7 | 8 9        sizes differ by at most one, longer first
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any


def part(n: int, parts: int, index: int) -> range:
    """Return the indices of `range(n)` in part `index` of `parts`.

    Parts are contiguous, in order, and differ in length by at most one; with n < parts the last
    ones are empty.

    Args:
        n: the number of indices.
        parts: the number of parts.
        index: the number of the part, from 0.

    Raises:
        ValueError: for a negative n, fewer than one part, or an index outside 0..parts-1.

    Example:
        >>> from nnmpi.base.shard import part
        >>> part(10, parts=4, index=1)
        range(3, 6)
    """
    if n < 0 or parts < 1 or not 0 <= index < parts:
        raise ValueError(f"part {index} of {parts} parts of {n} items does not exist")
    short, longer = divmod(n, parts)
    start = index * short + min(index, longer)
    return range(start, start + short + (index < longer))


@lru_cache  # ranks of a simulation ask for the same
def split(n: int, parts: int) -> tuple[range, ...]:
    """Return all `parts` parts of `range(n)`, in order. See `part`."""
    return tuple(part(n, parts, index) for index in range(parts))


def common(one: range | slice, other: range | slice) -> range:
    """Return the indices in both ranges."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def buckets(sizes: Sequence[int], limit: int) -> tuple[range, ...]:
    """Group consecutive items up to a total size of `limit`; a larger item stands alone.

        buckets([3, 4, 2, 9, 1], 7)  ->  (0, 1), (2), (3), (4)

    Raises:
        ValueError: for a limit below 1.
    """
    if limit < 1:
        raise ValueError(f"a bucket of {limit} bytes is empty; give at least 1")
    groups: list[range] = []
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > limit:
            groups.append(range(start, i))
            start, total = i, 0
        total += size
    if start < len(sizes):
        groups.append(range(start, len(sizes)))
    return tuple(groups)


@dataclass(frozen=True)
class Region:
    """A rank's part of an array: a range of one axis.

        Region((4, 6), axis=1, start=2, stop=4)            Region((6, 2), axis=0, start=1, stop=2,
                                                           repeats=2)

            . . # # . .                                        . .      row 1 of each of the two
            . . # # . .                                        # #      groups of 6 / 2 = 3 rows
            . . # # . .                                        . .
            . . # # . .                                        . .
                                                               # #
                                                               . .

    Attributes:
        shape: of the full array.
        axis: the sharded axis, from 0.
        start, stop: the part's range of each repeat; may be empty.
        repeats: the axis is divided into this many equal ranges, and start..stop is taken from
            each. Flattened images (height, width, channels) with sharded channels have this form.
        second: another range of the axis, which follows the first, with one repeat.

    Raises:
        ValueError: when the axis or the range does not exist, or the repeats do not divide the
            axis.
    """

    shape: tuple[int, ...]
    axis: int
    start: int
    stop: int
    repeats: int = 1
    second: range = range(0)

    def __post_init__(self) -> None:
        """Check that the part exists."""
        fits = (
            0 <= self.axis < len(self.shape)
            and self.repeats >= 1
            and self.shape[self.axis] % self.repeats == 0
        )
        if not fits or not 0 <= self.start <= self.stop <= self.shape[self.axis] // self.repeats:
            raise ValueError(
                f"range {self.start}..{self.stop} of each of {self.repeats} repeats on axis"
                f" {self.axis} does not exist in an array of shape {self.shape}"
            )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        length = (self.stop - self.start) * self.repeats + len(self.second)
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    @property
    def is_whole(self) -> bool:
        """Whether the part is the full array."""
        return self.local_shape == self.shape

    def take(self, full: Any) -> Any:
        """Return the part of an array of the full shape; a view or a copy."""
        return self._grouped(full)[self._index].reshape(self.local_shape)

    def put(self, full: Any, local: Any) -> None:
        """Write a part into a C-contiguous array of the full shape."""
        grouped = self._grouped(full)
        grouped[self._index] = local.reshape(grouped[self._index].shape)

    @property
    def _index(self) -> tuple[Any, ...]:
        local = (
            [*range(self.start, self.stop), *self.second]
            if self.second
            else slice(self.start, self.stop)
        )
        return (slice(None), slice(None), local)

    def _grouped(self, full: Any) -> Any:
        """Return a view with the axes (axes before, repeats, range, axes after)."""
        if full.shape != self.shape:
            raise ValueError(
                f"a part of an array of shape {self.shape} is not one of shape {full.shape}"
            )
        before, after = prod(self.shape[: self.axis]), prod(self.shape[self.axis + 1 :])
        return full.reshape(before, self.repeats, self.shape[self.axis] // self.repeats, after)


def zigzag(n: int, parts: int, index: int) -> tuple[range, range]:
    """Return part `index` of `range(n)`, a pair of chunks from both ends.

        zigzag(12, 3, ...)     0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11     chunks of split(12, 6)
                                0     1     2     2     1      0       the part of each chunk

    Work that grows along the axis, such as causal attention's, is then equal for all parts.

    Args:
        n, parts, index: see `part`.
    """
    return part(n, 2 * parts, index), part(n, 2 * parts, 2 * parts - 1 - index)
