"""Timing of collective calls: what the slowest rank needs, once all are there.

    rank 0   refill | barrier |  call       |
    rank 1   refill | barrier |     call         |
                                 |<- seconds ->|         from the last start to the last end

The ranks of one node read one clock, so starts and ends can be compared; across nodes the longest call counts, which
holds the wait for the last to start as well.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnmpi.comm.group import Group

LEAST_ROUNDS = 3
MOST_ROUNDS = 300
WARM_UP_ROUNDS = 1


Refilled: TypeAlias = tuple[Callable[[], Any], Callable[[], Any]]
"""A call and what refills its buffers: fresh data, as in training."""


def time_calls(group: Group, calls: Sequence[Refilled], budget_s: float) -> NDArray[np.float64]:
    """Return the seconds that each of some calls took, in rounds, the same on all ranks: (calls, rounds). Collective.

    In a round each call is made once, so that what else the machine does meets all alike, and each finds the caches as
    the others have left them. Another one is the first in every round.

    Args:
        calls: what is timed, and what is called before it, outside of the time; all ranks take part.
        budget_s: seconds to spend, about; at least 3 rounds are made.
    """
    trial = _time_rounds(group, calls, WARM_UP_ROUNDS)
    each_s = float(np.median((trial[:, :, 1] - trial[:, :, 0]).sum(axis=0)))
    slowest_s = group.max_floats([each_s])[0]
    rounds = int(np.clip(budget_s / max(slowest_s, 1e-7), LEAST_ROUNDS, MOST_ROUNDS))
    own = _time_rounds(group, calls, rounds)
    everyones = np.empty((group.size, *own.shape))
    group.comm.Allgather(own, everyones)
    begin, end = everyones[..., 0], everyones[..., 1]
    if len(set(group.nodes())) == 1:
        seconds: NDArray[np.float64] = end.max(axis=0) - begin.max(axis=0)
        return seconds
    longest: NDArray[np.float64] = (end - begin).max(axis=0)
    return longest


def _time_rounds(group: Group, calls: Sequence[Refilled], rounds: int) -> NDArray[np.float64]:
    """Return when this rank began and ended each call, in seconds of its node's clock: (calls, rounds, 2)."""
    stamps = np.empty((len(calls), rounds, 2))
    clock, barrier = time.perf_counter, group.barrier
    for number in range(rounds):
        for turn in range(len(calls)):
            index = (number + turn) % len(calls)
            call, refill = calls[index]
            refill()
            barrier()
            begin = clock()
            call()
            stamps[index, number] = begin, clock()
    return stamps
