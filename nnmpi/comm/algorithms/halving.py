"""All-reduce by vector halving with distance doubling, and back: few rounds and few bytes.

Ranks pair up, first with the nearest, then at twice the distance each round, and halve the range of
chunks that they reduce: a reduce-scatter. Then the same pairs in reverse order double their range:
an all-gather. The longest messages go the shortest way: inside a node when neighbours share one.
With eight ranks, rank 0's rounds (chunks 0..7):

    round    partner    sends      receives    range afterwards (+: added)
    0        1          4 5 6 7    0 1 2 3 +   0 1 2 3
    1        2          2 3        0 1 +       0 1
    2        4          1          0 +         0                     now 0 is the sum
    3        4          0          1           0 1
    4        2          0 1        2 3         0 1 2 3
    5        1          0 1 2 3    4 5 6 7     0 1 2 3 4 5 6 7

When the size is no power of two, P = 2^floor(log2 size) ranks do this. Each of the first size - P
odd ranks first sends its whole buffer to the even rank before it, and receives the result at the
end (as MPICH folds them):

    size 6, P = 4      0<-1   2<-3   4   5      then 0 2 4 5 halve and double      then 0->1   2->3

Cost with N ranks (a power of two), M bytes, latency alpha, time per byte beta, time per added byte
gamma:

    2 log2 N alpha  +  2 (N-1)/N M beta  +  (N-1)/N M gamma

For other N: P in place of N, and 2 alpha + 2 M beta + M gamma more. The buffer has P chunks, so
that each half is as long as the other. Source: Rabenseifner, Optimization of collective reduction
operations, 2004.
"""

from dataclasses import replace

from nnmpi.comm.collective import ALL_REDUCE, Step, Steps


def largest_power(size: int) -> int:
    """Return the largest power of two up to a number of ranks."""
    return 1 << size.bit_length() - 1


HALVED = replace(ALL_REDUCE, chunks=largest_power, parts=largest_power)


def halving_doubling(rank: int, size: int) -> Steps:
    """Return this rank's steps: fold to a power of two, halve, double, unfold."""
    power = largest_power(size)
    folded = size - power  # pairs (0, 1), (2, 3) ... that become one rank
    everything = range(power)
    if rank < 2 * folded and rank % 2:
        return Step(to=rank - 1, send=everything), Step(from_=rank - 1, recv=everything)
    inner = _butterfly(rank // 2 if rank < 2 * folded else rank - folded, power, folded)
    if rank < 2 * folded:
        return (
            Step(from_=rank + 1, recv=everything, reduce=True),
            *inner,
            Step(to=rank + 1, send=everything),
        )
    return inner


def _butterfly(position: int, power: int, folded: int) -> Steps:
    """Return the halving and the doubling of one of the remaining ranks, at `position` 0..power-1.

    The first `folded` of these are the even ranks of the pairs.
    """
    halving: list[Step] = []
    chunks = range(power)
    distance = 1
    while distance < power:
        middle = chunks.start + len(chunks) // 2
        lower, upper = range(chunks.start, middle), range(middle, chunks.stop)
        chunks, sent = (upper, lower) if position & distance else (lower, upper)
        other = position ^ distance
        partner = 2 * other if other < folded else other + folded
        halving.append(Step(to=partner, send=sent, from_=partner, recv=chunks, reduce=True))
        distance *= 2
    doubling = [
        Step(to=step.to, send=step.recv, from_=step.from_, recv=step.send)
        for step in reversed(halving)
    ]
    return (*halving, *doubling)


def recursive_doubling(rank: int, size: int) -> Steps:
    """Return the steps of MPI's usual sum of short arrays: log2 N (alpha + M beta).

    The rounds are those of the halving, with whole buffers.
    """
    full = range(size)
    return tuple(
        replace(step, send=step.send and full, recv=step.recv and full)
        for step in halving_doubling(rank, size)
        if step.reduce or None in (step.to, step.from_)
    )
