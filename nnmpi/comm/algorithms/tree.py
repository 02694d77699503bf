"""All-reduce along a binomial tree: sums run up to rank 0, the result runs down the same branches.

The whole buffer travels at once. With eight ranks, on the way up (the way down is a broadcast: read
the picture from the bottom to the top, with the arrows reversed):

    rank       0     1     2     3     4     5     6     7
    round 0    o<----o     o<----o     o<----o     o<----o        distance 1
    round 1    o<----------o           o<----------o              distance 2
    round 2    o<----------------------o                          distance 4

A rank receives while its lower bits are 0, and sends at its lowest 1 bit. Branches to ranks past
the last one (size not a power of two) are left out.

Cost with N ranks, M bytes, latency alpha, time per byte beta, time per added byte gamma:

    broadcast      ceil(log2 N) alpha  +    ceil(log2 N) M beta
    all-reduce   2 ceil(log2 N) alpha  +  2 ceil(log2 N) M beta  +  ceil(log2 N) M gamma

Few rounds with the whole message in each: for short messages and many ranks. Source: Thakur,
Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.

Broadcast for long messages: rank 0 scatters its buffer along a binomial tree, then a ring gathers
it on every rank.

Scatter: at each distance, the largest first, a rank passes on the chunks of the ranks behind it.
With eight ranks:

    rank       0        1     2     3     4        5     6     7
    has        0..7
    round 0    0..3 ------------------->  4..7                        distance 4
    round 1    0 1 ------->  2 3          4 5 ------->  6 7           distance 2
    round 2    0 ---->  1    2 ---> 3     4 ---->  5    6 --->  7     distance 1

Then the all-gather of `ring.py`: every rank's chunk goes around once. (The one of `doubling.py`
takes fewer rounds on powers of two.)

Cost with N ranks, M bytes, latency alpha, time per byte beta:

    (ceil(log2 N) + N - 1) alpha  +  2 (N-1)/N M beta

against the tree's  ceil(log2 N) alpha + ceil(log2 N) M beta:  less for long messages on three or
more ranks. Source: van de Geijn, On global combine operations, 1994; Barnett et al., Interprocessor
collective communication library (InterCom), 1994.
"""

from nnmpi.comm.collective import Step, Steps


def tree(rank: int, size: int) -> Steps:
    """Return this rank's steps: reduce the children's sums to the parent, then broadcast down."""
    return tree_reduce(rank, size) + tree_broadcast(rank, size)


def tree_reduce(rank: int, size: int) -> Steps:
    """Return the steps that reduce to rank 0: add the children's sums, pass the sum up."""
    steps = tuple(
        Step(from_=child, recv=range(size), reduce=True) for child in _children(rank, size)
    )
    return steps if rank == 0 else (*steps, Step(to=_parent(rank), send=range(size)))


def tree_broadcast(rank: int, size: int) -> Steps:
    """Return the steps that broadcast rank 0's buffer: receive from the parent, pass it down."""
    steps = tuple(Step(to=child, send=range(size)) for child in reversed(_children(rank, size)))
    return steps if rank == 0 else (Step(from_=_parent(rank), recv=range(size)), *steps)


def tree_scatter(rank: int, size: int) -> Steps:
    """Return the steps that scatter rank 0's buffer, a chunk to each rank."""
    # this rank receives chunks rank..rank+reach-1
    reach = 1 << (size - 1).bit_length() if rank == 0 else rank & -rank
    steps = (
        () if rank == 0 else (Step(from_=rank - reach, recv=range(rank, min(rank + reach, size))),)
    )
    distances = (reach >> bit for bit in range(1, reach.bit_length()))
    passed_on = (
        Step(to=rank + distance, send=range(rank + distance, min(rank + 2 * distance, size)))
        for distance in distances
        if rank + distance < size
    )
    return (*steps, *passed_on)


def _parent(rank: int) -> int:
    return rank & (rank - 1)


def _children(rank: int, size: int) -> list[int]:
    """Return the ranks that send their sums to this one, nearest first: that one is ready first."""
    children, distance = [], 1
    while rank & distance == 0 and rank + distance < size:
        children.append(rank + distance)
        distance *= 2
    return children


# All-reduce through a parameter server: rank 0 collects all buffers, adds, and sends the sum back.
#
# The server serves the workers in rank order, so that the sum's bits do not depend on arrival:
#
#     step        0    1    2    3    4    5
#     worker 1    o----.              .--->o
#     worker 2         o----.              .--->o          (each waits for its turn)
#     worker 3    |    |    o----.    |    |    .--->o
#     rank 0      +<1  +<2  +<3       1>   2>   3>
#                 collect and add     send the sum
#
# Cost with N ranks, M bytes, latency alpha, time per byte beta, time per added byte gamma:
#
#     2 (N-1) alpha  +  2 (N-1) M beta  +  (N-1) M gamma
#
# The server's link carries all bytes, so the time grows with N: the baseline for the others.
# (Textbooks often give it a latency of 2 alpha, which needs a server that receives from all workers
# at once.) Source: Li et al., Scaling distributed machine learning with the parameter server, 2014,
# with one server.


def star(rank: int, size: int) -> Steps:
    """Return this rank's steps: 2(size-1) at the server, one send and one receive at a worker."""
    everything, workers = range(size), range(1, size)
    if rank > 0:
        return Step(to=0, send=everything), Step(from_=0, recv=everything)
    collect = tuple(Step(from_=worker, recv=everything, reduce=True) for worker in workers)
    return collect + tuple(Step(to=worker, send=everything) for worker in workers)
