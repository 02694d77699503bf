"""Collectives whose parts have any lengths: gathering them, and sums of which each rank gets its part.

    counts (3, 1, 2)       rank 0  a a a . . .         a a a b c c     all ranks
                           rank 1  . . . b . .   -->
                           rank 2  . . . . c c

All are collective; the counts are the same on all ranks and the arrays have one dtype. Device arrays go through host
memory.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from nnmpi.backend.array import namespace
from nnmpi.backend.precision import is_low
from nnmpi.comm.buffers import Buffer, as_bytes, check_any, check_buffer
from nnmpi.comm.device.copies import from_host, put, room_like, to_host
from nnmpi.comm.group import Group
from nnmpi.errors import ShapeError


def all_gather_v(group: Group, own: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """Return every rank's part, in rank order, on every rank.

    Args:
        own: (counts[rank],) this rank's part.
        counts: every rank's length; a part may be empty.

    Raises:
        ShapeError: when this rank's part has another length, or is not 1-D and contiguous.
    """
    _check(group, own, counts[group.rank])
    everything = room_like(own, sum(counts))
    sizes = [count * own.itemsize for count in counts]
    group.comm.allgatherv(as_bytes(to_host(own)), as_bytes(everything), sizes)
    stops = list(accumulate(counts))
    whole = from_host(everything, namespace(own))
    return [whole[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]


def reduce_scatter_v(group: Group, parts: Buffer, counts: Sequence[int]) -> Buffer:
    """Return this rank's part of the sum over the ranks.

    Args:
        parts: (sum of counts,) what this rank adds to every rank's part, in rank order. float16 and bfloat16 are added
            up in float32.
        counts: every rank's length; a part may be empty.

    Raises:
        ShapeError: when `parts` has another length, or is not 1-D and contiguous.
    """
    _check(group, parts, sum(counts))
    if is_low(parts.dtype):
        return reduce_scatter_v(group, parts.astype(np.float32), counts).astype(parts.dtype)
    own = room_like(parts, counts[group.rank])
    group.comm.reduce_scatter(to_host(parts), own, list(counts))
    return from_host(own, namespace(parts))


def all_reduce_max(group: Group, array: Buffer) -> None:
    """Replace the array on every rank by its elementwise largest value over the ranks.

    Args:
        array: (n,) without NaN: MPI does not say what becomes of that. Not of 16-bit floating point.

    Raises:
        ShapeError: when it is not 1-D and contiguous.
        DtypeError: for 16-bit floating point.
    """
    check_any(array)
    host = to_host(array)
    group.comm.allreduce_max(check_buffer(host))
    put(host, array)


def _check(group: Group, array: Buffer, length: int) -> None:
    if check_any(array).size != length:
        raise ShapeError(
            f"rank {group.rank} of {group.size} has {array.size} elements, but {length} are agreed; give the array "
            "the length that its counts say"
        )
