"""All-reduce around a ring: every rank talks to its right neighbour only, and every link is busy all the time.

First half, reduce-scatter: partial sums travel to the right, one chunk at a time, and grow at every rank they pass.
Second half, all-gather: the finished chunks travel once more around. With three ranks (chunk numbers; a ' for each
part that has been added, so that 0'' is the finished sum of chunk 0):

               rank 0        rank 1        rank 2
    step 0     0 ------->    1 ------->    2 -------> (to rank 0)      reduce
    step 1     2' ------>    0' ----->     1' ------>                  reduce: now rank 0 has 1'', 1 has 2'', 2 has 0''
    step 2     1'' ----->    2'' ----->    0'' ----->                  replace
    step 3     0'' ----->    1'' ----->    2'' ----->                  replace: everybody has 0'', 1'', 2''

Cost with N ranks, M bytes, latency alpha, time per byte beta, time per added byte gamma:

    2 (N-1) alpha  +  2 (N-1)/N M beta  +  (N-1)/N M gamma

No algorithm moves fewer bytes per rank, so it is the one for long messages; short ones suffer from the many steps.
Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
"""

from nnmpi.comm.steps import Step


def ring(rank: int, size: int) -> tuple[Step, ...]:
    """Return the 2(size-1) steps of this rank; each sends one chunk to the right and takes one from the left."""
    right, left = (rank + 1) % size, (rank - 1) % size

    def step(chunk: int, reduce: bool) -> Step:
        """Pass this chunk on while the one before it arrives."""
        return Step(to=right, send=(chunk % size,), from_=left, recv=((chunk - 1) % size,), reduce=reduce)

    reduce_scatter = tuple(step(rank - i, reduce=True) for i in range(size - 1))
    all_gather = tuple(step(rank + 1 - i, reduce=False) for i in range(size - 1))
    return reduce_scatter + all_gather
