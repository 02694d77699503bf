"""Who owns which index: arithmetic on integers, used for batches, chunks, buckets and layers alike.

Nothing here knows of arrays or MPI.

    split(10, 4)      0 1 2 | 3 4 5 | 6 7 | 8 9        sizes differ by at most one, the longer parts come first
"""

from collections.abc import Sequence


def part(n: int, parts: int, index: int) -> range:
    """Return the indices of `range(n)` that belong to part `index` of `parts`.

    Parts are contiguous, in order, and differ in length by at most one; with n < parts the last ones are empty.

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


def owner(i: int, n: int, parts: int) -> int:
    """Return the part of `split(n, parts)` that holds index i.

    Raises:
        ValueError: when i is not in 0..n-1.
    """
    if not 0 <= i < n:
        raise ValueError(f"index {i} is not in 0..{n - 1}")
    short, longer = divmod(n, parts)
    boundary = longer * (short + 1)  # the parts before it have short + 1 items
    return i // (short + 1) if i < boundary else longer + (i - boundary) // short


def buckets(sizes: Sequence[int], limit: int) -> tuple[range, ...]:
    """Group consecutive items so that no group's sizes add up to more than `limit`; a larger item stands alone.

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
