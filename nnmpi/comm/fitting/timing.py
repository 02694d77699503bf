"""Timing of collective calls: what the slowest rank needs, once all are there.

    rank 0   refill | barrier |  call       |
    rank 1   refill | barrier |     call         |
                                 |<- seconds ->|         from the last start to the last end

The ranks of one node read one clock, so starts and ends can be compared; across nodes the longest call counts, which
holds the wait for the last to start as well.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnmpi.comm.group import Group

LEAST_ROUNDS = 5
MOST_ROUNDS = 300
WARM_UP_ROUNDS = 3


def time_calls(
    group: Group, call: Callable[[], Any], refill: Callable[[], Any], budget_s: float
) -> NDArray[np.float64]:
    """Return the seconds that each of many calls took, the same on all ranks. Collective.

    Args:
        call: what is timed; all ranks take part in it.
        refill: called before each call, outside of the time: fresh data in the buffers, as in training.
        budget_s: seconds to spend, about; at least 5 calls are made.
    """
    trial = _rounds(group, call, refill, WARM_UP_ROUNDS)
    each_s = float(np.median(trial[:, 1] - trial[:, 0]))
    slowest_s = group.max_floats([each_s])[0]
    rounds = int(np.clip(budget_s / max(slowest_s, 1e-7), LEAST_ROUNDS, MOST_ROUNDS))
    own = _rounds(group, call, refill, rounds)
    everyones = np.empty((group.size, rounds, 2))
    group.comm.Allgather(own, everyones)
    if len(set(group.nodes())) == 1:
        seconds: NDArray[np.float64] = everyones[:, :, 1].max(axis=0) - everyones[:, :, 0].max(axis=0)
        return seconds
    longest: NDArray[np.float64] = (everyones[:, :, 1] - everyones[:, :, 0]).max(axis=0)
    return longest


def _rounds(group: Group, call: Callable[[], Any], refill: Callable[[], Any], rounds: int) -> NDArray[np.float64]:
    """Return when this rank began and ended each call, in seconds of its node's clock: (rounds, 2)."""
    stamps = np.empty((rounds, 2))
    clock, barrier = time.perf_counter, group.barrier
    for number in range(rounds):
        refill()
        barrier()
        begin = clock()
        call()
        stamps[number] = begin, clock()
    return stamps
