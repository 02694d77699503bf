"""All-reduce by recursive halving and doubling: few rounds and few bytes, for the sizes between tree and ring.

Ranks pair up at half the distance each round and halve what they are responsible for: a reduce-scatter. Then the same
pairs in reverse order double what they have: an all-gather. With eight ranks, what rank 0 does (chunks 0..7):

    round    partner    sends      receives    afterwards finished or responsible for
    0        4          4 5 6 7    0 1 2 3 +   0 1 2 3
    1        2          2 3        0 1 +       0 1
    2        1          1          0 +         0                     now 0 is the sum
    3        1          0          1           0 1
    4        2          0 1        2 3         0 1 2 3
    5        4          0 1 2 3    4 5 6 7     0 1 2 3 4 5 6 7

When the size is no power of two, P = 2^floor(log2 size) ranks do this. Each of the first size - P odd ranks gives its
buffer to the even rank before it at the beginning and gets the result at the end:

    size 6, P = 4      0<-1   2<-3   4   5      then 0 2 4 5 halve and double      then 0->1   2->3

Cost with N ranks (a power of two), M bytes, latency alpha, time per byte beta, time per added byte gamma:

    2 log2 N alpha  +  2 (N-1)/N M beta  +  (N-1)/N M gamma

and for other N with P in the place of N and  2 alpha + 2 M beta + M gamma  more.
Source: Rabenseifner, Optimization of collective reduction operations, 2004.
"""

from nnmpi.comm.steps import Step
from nnmpi.shard import part


def halving_doubling(rank: int, size: int) -> tuple[Step, ...]:
    """Return this rank's steps: fold to a power of two, halve, double, unfold."""
    power = 1 << size.bit_length() - 1
    folded = size - power  # so many pairs (0, 1), (2, 3) ... become one
    everything = range(size)
    if rank < 2 * folded and rank % 2:
        return Step(to=rank - 1, send=everything), Step(from_=rank - 1, recv=everything)
    inner = _butterfly(rank // 2 if rank < 2 * folded else rank - folded, power, folded, size)
    if rank < 2 * folded:
        return (
            Step(from_=rank + 1, recv=everything, reduce=True),
            *inner,
            Step(to=rank + 1, send=everything),
        )
    return inner


def _butterfly(place: int, power: int, folded: int, size: int) -> tuple[Step, ...]:
    """Return the halving and the doubling for place 0..power-1 among those that were not folded away."""
    steps: list[Step] = []
    first, last = 0, power  # this place is responsible for the shares first..last-1
    distance = power // 2
    while distance:
        middle = first + distance
        lower, upper = _chunks(first, middle, power, size), _chunks(middle, last, power, size)
        partner = _rank(place ^ distance, folded)
        if place & distance:
            steps.append(Step(to=partner, send=lower, from_=partner, recv=upper, reduce=True))
            first = middle
        else:
            steps.append(Step(to=partner, send=upper, from_=partner, recv=lower, reduce=True))
            last = middle
        distance //= 2
    doubling = [Step(to=step.to, send=step.recv, from_=step.from_, recv=step.send) for step in reversed(steps)]
    return (*steps, *doubling)


def _rank(place: int, folded: int) -> int:
    """Return the rank that stands at a place of the butterfly."""
    return 2 * place if place < folded else place + folded


def _chunks(first: int, last: int, power: int, size: int) -> range:
    """Return the chunks of the shares first..last-1, when `size` chunks are shared out over `power` places."""
    return range(part(size, power, first).start, part(size, power, last - 1).stop)
