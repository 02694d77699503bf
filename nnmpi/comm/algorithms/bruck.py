"""All-gather, reduce-scatter and all-to-all in ceil(log2 N) rounds for any number N (Bruck).

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

In the all-to-all a chunk has a way of d ranks to go, and goes it in the powers of two that d is the
sum of: 1 in round 0 if d is odd, then 2, 4 ... Ranks on the way pass it on. `pairwise` moves fewer
bytes in more rounds. Chunk sr goes from rank s to rank r; with three ranks:

              rank 0      rank 1      rank 2
    before    00 01 02    10 11 12    20 21 22
    round 0   00 20 02    11 01 10    22 12 21    d = 1 has arrived
    round 1   00 10 20    01 11 21    02 12 22    d = 2 has

Cost with N ranks, M bytes of all chunks together, latency alpha, time per byte beta, time per added
byte gamma:

    all-gather       ceil(log2 N) alpha  +  (N-1)/N M beta
    reduce-scatter   ceil(log2 N) alpha  +  (N-1)/N M beta  +  (N-1)/N M gamma
    all-to-all       ceil(log2 N) alpha  +  log2(N)/2 M beta, N a power of two

(Chunk numbers with gaps, as 4 0 1, are several messages at once. The all-to-all's have many; who
packs them into one pays a copy instead.) Source: Bruck et al.,
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


def bruck_all_to_all(rank: int, size: int) -> Steps:
    """Return the ceil(log2 size) steps after which a rank has every other rank's chunk for it."""
    return tuple(
        Step(
            to=(rank + distance) % size,
            send=_passed(rank, distance, size),
            from_=(rank - distance) % size,
            recv=_passed(rank - distance, distance, size),
        )
        for distance in (1 << bit for bit in range((size - 1).bit_length()))
    )


def _passed(rank: int, distance: int, size: int) -> Chunks:
    """Return the chunks that a rank has, and whose way has this power of two in it."""
    ways = (way for way in range(size) if way & distance)
    sources = ((rank - way % distance, way) for way in ways)
    return tuple(source % size * size + (source + way) % size for source, way in sources)


def _around(first: int, count: int, size: int) -> Chunks:
    first %= size
    if first + count <= size:
        return range(first, first + count)
    return (*range(first, size), *range(first + count - size))
