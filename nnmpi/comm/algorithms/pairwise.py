"""All-to-all: each rank has something for every other one, and gets something from every other one.

Chunk (s, r), number s N + r, is what rank s has for rank r. In round i each rank sends to the one i
behind it and receives from the one i before it, so that every link carries one message at a time.
With three ranks:

               rank 0            rank 1            rank 2
    before     0 1 2             3 4 5             6 7 8          a row of the matrix each
    round 0    1 -> 1, 6 <- 2    5 -> 2, 1 <- 0    6 -> 0, 5 <- 1
    round 1    2 -> 2, 3 <- 1    3 -> 0, 7 <- 2    7 -> 1, 2 <- 0
    after      0 3 6             1 4 7             2 5 8          a column each

Cost with N ranks, each of which has M bytes for all together, latency alpha, time per byte beta:

    (N-1) alpha  +  (N-1)/N M beta

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
MPICH, 2005, section 3.4.
"""

from nnmpi.comm.collective import Step


def pairwise(rank: int, size: int) -> tuple[Step, ...]:
    """Return the size - 1 steps after which a rank has what every other one had for it."""
    return tuple(
        Step(to=to, send=(rank * size + to,), from_=source, recv=(source * size + rank,))
        for to, source in (((rank + i) % size, (rank - i) % size) for i in range(1, size))
    )
