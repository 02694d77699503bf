"""How far the ranks' clocks are apart, so that what they recorded can be shown on one time axis.

Rank 0 asks every other rank in turn what time it has:

    rank 0     sent |---.           .---| came            offset = there - (sent + came) / 2
    rank r               `--| there |                     wrong by at most (came - sent) / 2

The answer of the shortest of several round trips counts (Cristian, Probabilistic clock synchronization, 1989). An
offset that is within its own error is taken to be none: ranks of one node mostly read the same clock, and then have
none, to the last bit. Clocks of different nodes are apart by days, since each counts from its node's start; they drift,
typically by 1 to 50 microseconds a second, so ask near the time that is to be shown.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from nnmpi import clock
from nnmpi.comm.group import Group
from nnmpi.comm.world import Comm

ROUNDS = 20
_TAG = 0


class Answer(NamedTuple):
    """One round trip: when the question went out and the answer came, by one clock, and the time in the answer."""

    sent_s: float
    there_s: float
    came_s: float


def offsets(group: Group, clock: Callable[[], float] = clock.now, rounds: int = ROUNDS) -> list[float]:
    """Return how far each rank's clock is ahead of rank 0's, in seconds, on every rank. Collective.

    Takes `rounds` round trips for each rank, one rank after the other.

    Args:
        group: the ranks.
        clock: what this rank reads, in seconds.
        rounds: questions for each rank; at least 1.
    """
    comm = group.comm.duplicate()  # its messages never meet others'
    try:
        found = [0.0] * group.size
        for rank in range(1, group.size):
            if group.is_root:
                found[rank] = estimate([_ask(comm, rank, clock) for _ in range(rounds)])
            elif group.rank == rank:
                for _ in range(rounds):
                    _answer(comm, clock)
    finally:
        comm.free()
    return list(group.share(found))


def estimate(answers: Sequence[Answer]) -> float:
    """Return the offset of the clock that answered, in seconds; 0 where it cannot be told from none."""
    best = min(answers, key=lambda answer: answer.came_s - answer.sent_s)
    offset_s = best.there_s - (best.sent_s + best.came_s) / 2
    is_between = best.sent_s <= best.there_s <= best.came_s
    return 0.0 if is_between else offset_s


def _ask(comm: Comm, rank: int, clock: Callable[[], float]) -> Answer:
    there_s = np.empty(1)
    sent_s = clock()
    comm.wait_all([comm.irecv(there_s, rank, _TAG), comm.isend(np.empty(0), rank, _TAG)])
    return Answer(sent_s, float(there_s[0]), clock())


def _answer(comm: Comm, clock: Callable[[], float]) -> None:
    comm.wait_all([comm.irecv(np.empty(0), 0, _TAG)])
    comm.wait_all([comm.isend(np.array([clock()]), 0, _TAG)])
