"""All-to-all by rounds of pairs: each rank sends one chunk to each other rank.

Chunk (s, r), number s N + r, goes from rank s to rank r. In round i each rank sends to the i-th
rank behind it and receives from the i-th before it, so that every link carries one message at a
time. With three ranks:

               rank 0            rank 1            rank 2
    before     0 1 2             3 4 5             6 7 8          a row of the matrix each
    round 0    1 -> 1, 6 <- 2    5 -> 2, 1 <- 0    6 -> 0, 5 <- 1
    round 1    2 -> 2, 3 <- 1    3 -> 0, 7 <- 2    7 -> 1, 2 <- 0
    after      0 3 6             1 4 7             2 5 8          a column each

Cost with N ranks of M bytes each, latency alpha, time per byte beta:

    (N-1) alpha  +  (N-1)/N M beta

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
MPICH, 2005, section 3.4.
"""

from nnmpi.comm.collective import Step, Steps


def pairwise(rank: int, size: int) -> Steps:
    """Return the size - 1 steps after which a rank has every other rank's chunk for it."""
    return tuple(
        Step(to=to, send=(rank * size + to,), from_=source, recv=(source * size + rank,))
        for to, source in (((rank + i) % size, (rank - i) % size) for i in range(1, size))
    )
