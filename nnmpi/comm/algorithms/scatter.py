"""Broadcast for long messages: rank 0 scatters its buffer along a binomial tree, then a ring gathers it everywhere.

Scatter: at each distance, the largest first, a rank passes on the chunks of the ranks behind it. With eight ranks:

    rank       0        1     2     3     4        5     6     7
    has        0..7
    round 0    0..3 ------------------->  4..7                        distance 4
    round 1    0 1 ------->  2 3          4 5 ------->  6 7           distance 2
    round 2    0 ---->  1    2 ---> 3     4 ---->  5    6 --->  7     distance 1

Then the all-gather of `ring.py`: every rank's chunk goes once around.

Cost with N ranks, M bytes, latency alpha, time per byte beta:

    (ceil(log2 N) + N - 1) alpha  +  2 (N-1)/N M beta

against the tree's  ceil(log2 N) alpha + ceil(log2 N) M beta: for long messages on three ranks and more.
Source: van de Geijn, On global combine operations, 1994; Barnett et al., Interprocessor collective communication
library (InterCom), 1994.
"""

from nnmpi.comm.steps import Step


def tree_scatter(rank: int, size: int) -> tuple[Step, ...]:
    """Return the steps after which each rank has the chunk of its own number out of rank 0's buffer."""
    reach = 1 << (size - 1).bit_length() if rank == 0 else rank & -rank  # it is served with chunks rank..rank+reach-1
    steps = () if rank == 0 else (Step(from_=rank - reach, recv=range(rank, min(rank + reach, size))),)
    children = []
    distance = reach // 2
    while distance:
        if rank + distance < size:
            chunks = range(rank + distance, min(rank + 2 * distance, size))
            children.append(Step(to=rank + distance, send=chunks))
        distance //= 2
    return (*steps, *children)
