"""How gradients are grouped into messages: arithmetic only.

The gradients lie in flat buffers, in the order in which the parameters were registered; a backward pass finishes them
from the end. A bucket is a contiguous range of one buffer, so that nothing is copied together:

    buffer      | w0  b0 | w1  b1      | w2  b2 |
    buckets     | third  | second      | first  |         in this order on every rank
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import nnmpi.shard as shard
from nnmpi.errors import UsageError

Span: TypeAlias = tuple[int, int, int]
"""(buffer, start, stop): where one parameter's gradient lies, in elements."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message.

    Attributes:
        index: its place in the order of launching.
        buffer: the flat buffer it lies in, by number.
        start: its first element there.
        stop: the element behind its last one.
        spans: the spans in it, by their numbers in order of registration.
    """

    index: int
    buffer: int
    start: int
    stop: int
    spans: tuple[int, ...]


def plan_buckets(spans: Sequence[Span], itemsizes: Sequence[int], limit_bytes: int) -> tuple[Bucket, ...]:
    """Group the spans of each buffer, from its end backwards, into buckets of at most limit_bytes.

    A span that is longer stands alone. A gap between two spans of a bucket belongs to the bucket.

    Args:
        spans: in order of registration, which is also their order within each buffer.
        itemsizes: bytes per element of each buffer.
        limit_bytes: at least 1.

    Returns:
        The buckets in the order in which a backward pass over the parameters, last one first, completes them.

    Raises:
        UsageError: for spans that overlap or are out of order, and for a limit below 1.
    """
    if limit_bytes < 1:
        raise UsageError(f"a bucket of {limit_bytes} bytes holds nothing; give at least 1 byte")
    ranges = [found for buffer, item in enumerate(itemsizes) for found in _ranges(spans, buffer, item, limit_bytes)]
    ranges.sort(key=lambda members: -members[0])
    return tuple(
        Bucket(index, spans[members[0]][0], spans[members[0]][1], spans[members[-1]][2], tuple(members))
        for index, members in enumerate(ranges)
    )


def _ranges(spans: Sequence[Span], buffer: int, itemsize: int, limit_bytes: int) -> list[list[int]]:
    """Return the numbers of one buffer's spans, grouped; each group in order of registration."""
    numbers = [i for i, span in enumerate(spans) if span[0] == buffer]
    end = 0
    for i in numbers:
        _, start, stop = spans[i]
        if not end <= start <= stop:
            raise UsageError(
                f"gradient {i} lies at {start}..{stop} of buffer {buffer}, but it must begin at or after {end}"
            )
        end = stop
    numbers.reverse()
    sizes = [(spans[i][2] - spans[i][1]) * itemsize for i in numbers]
    return [sorted(numbers[k] for k in group) for group in shard.buckets(sizes, limit_bytes)]
