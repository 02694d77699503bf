"""Ring all-reduce: each rank sends only to its right neighbour, and all links stay busy.

First half, reduce-scatter: partial sums travel to the right, one chunk at a time, and grow at every
rank they pass, until chunk r is finished at rank r. Second half, all-gather: the finished chunks
travel once more around. Each half is a collective of its own. With three ranks (chunk numbers; a '
for each part that has been added, so that 0'' is the finished sum of chunk 0):

               rank 0        rank 1        rank 2
    step 0     2 ------->    0 ------->    1 -------> (to rank 0)      reduce
    step 1     1' ------>    2' ----->     0' ------>                  reduce: now rank 0 has 0'', 1 has 1'', 2 has 2''
    step 2     0'' ----->    1'' ----->    2'' ----->                  replace
    step 3     2'' ----->    0'' ----->    1'' ----->                  replace: everybody has 0'', 1'', 2''

Cost with N ranks, M bytes, latency alpha, time per byte beta, time per added byte gamma:

    reduce-scatter      (N-1) alpha  +    (N-1)/N M beta  +  (N-1)/N M gamma
    all-gather          (N-1) alpha  +    (N-1)/N M beta                          (M: the bytes of all chunks together)
    all-reduce        2 (N-1) alpha  +  2 (N-1)/N M beta  +  (N-1)/N M gamma

No algorithm moves fewer bytes per rank, so it is the one for long messages; short ones suffer from
the many steps. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
workstations, 2009.
"""

from nnmpi.comm.collective import Step


def ring(rank: int, size: int) -> tuple[Step, ...]:
    """Return this rank's 2(size-1) steps; each sends one chunk right and receives one from left."""
    return ring_reduce_scatter(rank, size) + ring_all_gather(rank, size)


def ring_reduce_scatter(rank: int, size: int) -> tuple[Step, ...]:
    """Return the size-1 steps after which this rank has the sum of the chunk of its own number."""
    return tuple(_pass_on(rank, size, chunk=rank - 1 - i, reduce=True) for i in range(size - 1))


def ring_all_gather(rank: int, size: int) -> tuple[Step, ...]:
    """Return the size-1 steps after which every rank has every rank's chunk."""
    return tuple(_pass_on(rank, size, chunk=rank - i, reduce=False) for i in range(size - 1))


def _pass_on(rank: int, size: int, chunk: int, reduce: bool) -> Step:
    right, left = (rank + 1) % size, (rank - 1) % size
    return Step(
        to=right, send=(chunk % size,), from_=left, recv=((chunk - 1) % size,), reduce=reduce
    )
