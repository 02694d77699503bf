"""All-gather by recursive doubling, and reduce-scatter by recursive halving, its reverse.

In each round a rank exchanges all that it has with a partner at twice the distance. With eight
ranks, rank 0's rounds:

    round    partner    sends      receives    has afterwards
    0        1          0          1           0 1
    1        2          0 1        2 3         0 1 2 3
    2        4          0 1 2 3    4 5 6 7     all

When the size is no power of two, P = 2^floor(log2 size) ranks do this. Each of the first size - P
odd ranks first gives its chunk to the even rank before it, and gets all others at the end:

    size 6, P = 4      0<-1   2<-3   4   5      then 0 2 4 5 double      then 0->1   2->3

The reduce-scatter is the same steps in reverse: messages change direction, arrivals are added.

Cost with N ranks (a power of two), M bytes of all chunks together, latency alpha, time per byte
beta, time per added byte gamma:

    all-gather       log2 N alpha  +  (N-1)/N M beta
    reduce-scatter   log2 N alpha  +  (N-1)/N M beta  +  (N-1)/N M gamma

For other N Bruck's are better (`bruck.py`). After a scatter (`tree.py`) the all-gather makes a
broadcast of 2 log2 N alpha + 2 (N-1)/N M beta. Source: Thakur, Rabenseifner and Gropp, Optimization
of collective communication operations in MPICH, 2005.
"""

from nnmpi.comm.algorithms.halving import largest_power
from nnmpi.comm.collective import Step, Steps


def doubling_all_gather(rank: int, size: int) -> Steps:
    """Return this rank's steps: fold to a power of two, double, unfold."""
    power = largest_power(size)
    folded = size - power  # pairs (0, 1), (2, 3) ... that become one rank

    def first(position: int) -> int:
        return position + min(position, folded)

    own, others = (rank,), (*range(rank), *range(rank + 1, size))
    if rank < 2 * folded and rank % 2:
        return Step(to=rank - 1, send=own), Step(from_=rank - 1, recv=others)
    position = rank // 2 if rank < 2 * folded else rank - folded
    steps = []
    for distance in (1 << bit for bit in range(power.bit_length() - 1)):
        here, there = (at & -distance for at in (position, position ^ distance))
        partner = first(position ^ distance)
        send, recv = (range(first(at), first(at + distance)) for at in (here, there))
        steps.append(Step(to=partner, send=send, from_=partner, recv=recv))
    if rank < 2 * folded:
        missing = (*range(rank + 1), *range(rank + 2, size))
        last = Step(to=rank + 1, send=missing)
        return Step(from_=rank + 1, recv=(rank + 1,)), *steps, last
    return tuple(steps)


def halving_reduce_scatter(rank: int, size: int) -> Steps:
    """Return the all-gather's steps in reverse."""
    return reverse(doubling_all_gather(rank, size))


def reverse(gather: Steps) -> Steps:
    """Return the reduce-scatter that undoes an all-gather."""
    return tuple(
        Step(to=step.from_, send=step.recv, from_=step.to, recv=step.send, reduce=bool(step.send))
        for step in reversed(gather)
    )
