"""Collectives whose parts have any lengths: gathering them, and sums of which each rank gets its part.

    counts (3, 1, 2)       rank 0  a a a . . .         a a a b c c     all ranks
                           rank 1  . . . b . .   -->
                           rank 2  . . . . c c

All are collective; the counts are the same on all ranks and the arrays have one dtype of `buffers.DTYPES`.
"""

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from nnmpi.comm.buffers import Buffer, check_buffer
from nnmpi.comm.group import Group
from nnmpi.errors import ShapeError


def gather_parts(group: Group, own: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """Return every rank's part, in rank order, on every rank.

    Args:
        own: (counts[rank],) this rank's part.
        counts: every rank's length; a part may be empty.

    Raises:
        ShapeError: when this rank's part has another length, or is not 1-D and contiguous.
    """
    _check(group, own, counts[group.rank])
    everything = np.empty(sum(counts), own.dtype)
    group.comm.Allgatherv(own, [everything, list(counts)])
    return np.split(everything, np.cumsum(counts)[:-1])


def sum_parts(group: Group, parts: Buffer, counts: Sequence[int]) -> Buffer:
    """Return this rank's part of the sum over the ranks.

    Args:
        parts: (sum of counts,) what this rank adds to every rank's part, in rank order.
        counts: every rank's length; a part may be empty.

    Raises:
        ShapeError: when `parts` has another length, or is not 1-D and contiguous.
    """
    _check(group, parts, sum(counts))
    own = np.empty(counts[group.rank], parts.dtype)
    group.comm.Reduce_scatter(parts, own, list(counts))
    return own


def largest(group: Group, array: Buffer) -> None:
    """Replace the array on every rank by its elementwise largest value over the ranks.

    Args:
        array: (n,) without NaN: MPI does not say what becomes of that.

    Raises:
        ShapeError: when it is not 1-D and contiguous.
    """
    group.comm.Allreduce(MPI.IN_PLACE, check_buffer(array), MPI.MAX)


def _check(group: Group, array: Buffer, length: int) -> None:
    if check_buffer(array).size != length:
        raise ShapeError(
            f"rank {group.rank} of {group.size} has {array.size} elements, but {length} are agreed; give the array "
            "the length that its counts say"
        )
