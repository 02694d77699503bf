"""Ring all-reduce: each rank sends only to its right neighbour, and all links stay busy.

First half, reduce-scatter: partial sums travel to the right, one chunk at a time, and grow at every
rank they pass, until chunk r is complete at rank r. Second half, all-gather: the complete chunks
travel around once more. Each half is also a collective by itself. With three ranks (chunk numbers;
a ' for each contribution added, so that 0'' is the complete sum of chunk 0):

             rank 0      rank 1      rank 2
    step 0   2 ----->    0 ----->    1 -----> (to rank 0)   reduce
    step 1   1' ---->    2' ---->    0' ---->               reduce: rank 0 has 0'', 1 1'', 2 2''
    step 2   0'' --->    1'' --->    2'' --->               replace
    step 3   2'' --->    0'' --->    1'' --->               replace: all have 0'', 1'', 2''

Cost with N ranks, M bytes of all chunks together, latency alpha, time per byte beta, time per added
byte gamma:

    reduce-scatter      (N-1) alpha  +    (N-1)/N M beta  +  (N-1)/N M gamma
    all-gather          (N-1) alpha  +    (N-1)/N M beta
    all-reduce        2 (N-1) alpha  +  2 (N-1)/N M beta  +  (N-1)/N M gamma

No algorithm moves fewer bytes per rank, so the ring is the one for long messages; short ones pay
the many latencies. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters
of workstations, 2009.
"""

from nnmpi.comm.collective import Step, Steps


def ring(rank: int, size: int) -> Steps:
    """Return this rank's 2(size-1) steps; each sends one chunk right and receives one from left."""
    return ring_reduce_scatter(rank, size) + ring_all_gather(rank, size)


def ring_reduce_scatter(rank: int, size: int) -> Steps:
    """Return the size-1 steps after which this rank has the sum of chunk `rank`."""
    return tuple(_pass_on(rank, size, chunk=rank - 1 - i, reduce=True) for i in range(size - 1))


def ring_all_gather(rank: int, size: int) -> Steps:
    """Return the size-1 steps after which every rank has every rank's chunk."""
    return tuple(_pass_on(rank, size, chunk=rank - i, reduce=False) for i in range(size - 1))


def _pass_on(rank: int, size: int, chunk: int, reduce: bool) -> Step:
    right, left = (rank + 1) % size, (rank - 1) % size
    return Step(
        to=right, send=(chunk % size,), from_=left, recv=((chunk - 1) % size,), reduce=reduce
    )
