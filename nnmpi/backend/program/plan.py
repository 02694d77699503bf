"""Places in one block of memory for the results of a recorded step, by their lifetimes.

    calls           0     1     2     3     4          memory
    a               [-----------]                      a  d
    b                     [-----------]                b  b  e
    c                                 [.....           c
    d                                 [------          in place of a
    e                                       [---       in place of b

A result lives from the first call that names it to the last one. If a call may keep it (a send,
until its wait), it lives at least as long as it did while the step was recorded. An array that
somebody else still holds after the step, such as an operation for a later call, keeps its own
memory.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from nnmpi.backend.array import LINE_BYTES
from nnmpi.backend.program.call import Allocation, Call


def plan(calls: Sequence[Call]) -> tuple[dict[Allocation, int], int]:
    """Return where each allocation begins, and the size of the block, in bytes.

    First fit, in the order of the first calls: of all places that are free for the whole lifetime
    the lowest, which was in use the latest in most cases, and is still in the cache. (By falling
    size, as compilers for inference do, blocks are as small, and replays up to ... slower.)
    """
    first: dict[Allocation, int] = {}
    last: dict[Allocation, int] = {}
    numbers = [call.number for call in calls]
    for i, call in enumerate(calls):
        for ref in call.refs():
            allocation = ref.allocation
            first.setdefault(allocation, i)
            # the call during which it was freed may have used it, as a wait does
            end = bisect_right(numbers, allocation.freed) - 1 if call.keeps else i
            last[allocation] = max(i, end, last.get(allocation, i))
    places: dict[Allocation, int] = {}
    size = 0
    live: list[tuple[int, int, int]] = []  # start, stop, last use; by start
    for allocation, begin in first.items():
        if allocation.owner is not None:
            continue
        live = [item for item in live if item[2] >= begin]
        start, needed = 0, -(-allocation.size // LINE_BYTES) * LINE_BYTES
        for other, stop, _ in live:
            if other - start >= needed:
                break
            start = max(start, stop)
        insort(live, (start, start + needed, last[allocation]))
        places[allocation] = start
        size = max(size, start + needed)
    return places, size
