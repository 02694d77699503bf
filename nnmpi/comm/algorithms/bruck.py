"""All-gather and reduce-scatter in ceil(log2 N) rounds for any number of ranks (Bruck).

In the all-gather, each rank's chunks double every round. It sends all of them (in the last round
the missing ones) to the rank 1, 2, 4 ... before it, and receives as many from the rank as far
behind. Each chunk travels along a binomial tree with its owner at the root. With five ranks, the
chunks of each rank:

              rank 0      rank 1      rank 2      rank 3      rank 4
    before    0           1           2           3           4
    round 0   0 1         1 2         2 3         3 4         4 0          from rank + 1
    round 1   0 1 2 3     1 2 3 4     2 3 4 0     3 4 0 1     4 0 1 2      from rank + 2
    round 2   all         all         all         all         all          from rank + 4, one chunk

The reduce-scatter is the same steps in reverse: messages change direction, arrivals are added.

Cost with N ranks, M bytes of all chunks together, latency alpha, time per byte beta, time per added
byte gamma:

    all-gather       ceil(log2 N) alpha  +  (N-1)/N M beta
    reduce-scatter   ceil(log2 N) alpha  +  (N-1)/N M beta  +  (N-1)/N M gamma

(Chunk numbers that wrap around, as 4 0 1, are two messages at once.) Source: Bruck et al.,
Efficient algorithms for all-to-all communications in multiport message-passing systems, 1997.
"""

from nnmpi.comm.algorithms.doubling import reverse
from nnmpi.comm.collective import Chunks, Step, Steps


def bruck_all_gather(rank: int, size: int) -> Steps:
    """Return the ceil(log2 size) steps after which every rank has everybody's chunk."""
    return tuple(
        Step(
            to=(rank - distance) % size,
            send=_around(rank, min(distance, size - distance), size),
            from_=(rank + distance) % size,
            recv=_around(rank + distance, min(distance, size - distance), size),
        )
        for distance in (1 << bit for bit in range((size - 1).bit_length()))
    )


def bruck_reduce_scatter(rank: int, size: int) -> Steps:
    """Return the ceil(log2 size) steps after which each rank has the sum of its own chunk."""
    return reverse(bruck_all_gather(rank, size))


def _around(first: int, count: int, size: int) -> Chunks:
    first %= size
    if first + count <= size:
        return range(first, first + count)
    return (*range(first, size), *range(first + count - size))
