"""Who averages with whom in decentralized training: the same two neighbours each time, or somebody else at every step.

    ring of 5          0 --- 1 --- 2 --- 3 --- 4 --- 0       every step

    matching of 5      0 --- 3     1 --- 4     2             step 0: one is left out where the number is odd
                       2 --- 3     0 --- 1     4             step 1

Differences from the mean shrink by a constant factor per step: cos(pi/N)^2 on a ring of N > 2 ranks with the weights of
`comm.algorithms.gossip`, which goes to 1 as N grows; with random matchings their square by 1/2 or less in expectation,
whatever N is.

Source: Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip algorithms" (2006), for random pairs; there one pair is drawn
at a time, here all ranks are paired at once. Lian et al., "Can decentralized algorithms outperform centralized
algorithms?" (2017), for training on a ring.
"""

from nnmpi.backend.random import stream
from nnmpi.errors import UsageError

RING, RANDOM = "ring", "random"
NEIGHBOURS = (RING, RANDOM)


def ring(rank: int, size: int) -> tuple[int, ...]:
    """Return the ranks beside this one on a ring, the left one first; one of two ranks, none of a single one.

    Raises:
        UsageError: for a rank that does not exist.
    """
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} does not exist among {size} ranks; they are numbered from 0")
    return tuple(dict.fromkeys(((rank - 1) % size, (rank + 1) % size))) if size > 1 else ()


def matching(size: int, seed: int, step: int) -> list[int]:
    """Return each rank's partner at a step, itself if it is left out: one rank is where their number is odd.

    All pairings are equally likely. It depends on the arguments alone, so that all ranks draw the same one.

    Raises:
        UsageError: for fewer than one rank.
    """
    if size < 1:
        raise UsageError(f"{size} ranks cannot be paired; give at least 1")
    order = stream(seed, "matching", step).permutation(size).tolist()
    partners = list(range(size))
    for one, other in zip(order[::2], order[1::2], strict=False):  # the last one of an odd number has nobody
        partners[one], partners[other] = other, one
    return partners
