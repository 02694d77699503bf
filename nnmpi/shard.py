"""Who owns which index: arithmetic on integers, used for batches, chunks, buckets and layers alike.

Nothing here knows of arrays or MPI.

    split(10, 4)      0 1 2 | 3 4 5 | 6 7 | 8 9        sizes differ by at most one, the longer parts come first
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any


def part(n: int, parts: int, index: int) -> range:
    """Return the indices of `range(n)` that belong to part `index` of `parts`.

    Parts are contiguous, in order, and differ in length by at most one; with n < parts the last
    ones are empty.

    Args:
        n: how many indices there are.
        parts: among how many parts they are divided.
        index: the number of the part, from 0.

    Raises:
        ValueError: for a negative n, fewer than one part, or an index outside 0..parts-1.
    """
    if n < 0 or parts < 1 or not 0 <= index < parts:
        raise ValueError(f"part {index} of {parts} parts of {n} items does not exist")
    short, longer = divmod(n, parts)
    start = index * short + min(index, longer)
    return range(start, start + short + (index < longer))


def split(n: int, parts: int) -> tuple[range, ...]:
    """Return all `parts` parts of `range(n)`, in order. See `part`."""
    return tuple(part(n, parts, index) for index in range(parts))


def buckets(sizes: Sequence[int], limit: int) -> tuple[range, ...]:
    """Group consecutive items up to a total size of `limit`; a larger item stands alone.

        buckets([3, 4, 2, 9, 1], 7)  ->  (0, 1), (2), (3), (4)

    Raises:
        ValueError: for a limit below 1.
    """
    if limit < 1:
        raise ValueError(f"a bucket of {limit} bytes holds nothing; give at least 1")
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
    """The part of an array that one rank holds: a range of one axis.

        Region((4, 6), axis=1, start=2, stop=4)            Region((6, 2), axis=0, start=1, stop=2,
                                                           repeats=2)

            . . # # . .                                        . .      row 1 of each of the two
            . . # # . .                                        # #      groups of 6 / 2 = 3 rows
            . . # # . .                                        . .
            . . # # . .                                        . .
                                                               # #
                                                               . .

    Attributes:
        shape: of the whole array.
        axis: the axis that is cut, from 0.
        start, stop: the range of each repeat that belongs to the part; it may be empty.
        repeats: the axis is seen as this many equal ranges one after another, and start..stop is
            taken from each. That is the form of flattened images (height, width, channels) whose
            channels are cut.
        second: another range of the axis, which comes behind, where it is seen as one range.

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
        """Check that there is such a part."""
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
        """Whether the part is the whole array."""
        return self.local_shape == self.shape

    def take(self, whole: Any) -> Any:
        """Return the part of an array of the whole shape; a view or a copy."""
        return self._seen(whole)[self._index].reshape(self.local_shape)

    def put(self, whole: Any, local: Any) -> None:
        """Write a part into its place in a C-contiguous array of the whole shape."""
        seen = self._seen(whole)
        seen[self._index] = local.reshape(seen[self._index].shape)

    @property
    def _index(self) -> tuple[Any, ...]:
        local = (
            [*range(self.start, self.stop), *self.second]
            if self.second
            else slice(self.start, self.stop)
        )
        return (slice(None), slice(None), local)

    def _seen(self, whole: Any) -> Any:
        """Return the array as (axes before, repeats, range, axes after)."""
        if whole.shape != self.shape:
            raise ValueError(
                f"a part of an array of shape {self.shape} is not one of shape {whole.shape}"
            )
        before, after = prod(self.shape[: self.axis]), prod(self.shape[self.axis + 1 :])
        return whole.reshape(before, self.repeats, self.shape[self.axis] // self.repeats, after)


def zigzag(n: int, parts: int, index: int) -> tuple[range, range]:
    """Return the indices of `range(n)` in part `index`, a pair of chunks from both ends.

        zigzag(12, 3, ...)     0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11     chunks of split(12, 6)
                                0     1     2     2     1      0       the part that each belongs to

    Work that grows along the axis, such as causal attention's, is the same for all parts then.

    Args:
        n, parts, index: see `part`.
    """
    return part(n, 2 * parts, index), part(n, 2 * parts, 2 * parts - 1 - index)
