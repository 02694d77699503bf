"""Waiting for ranks that are not in step, without taking a core from those that are at work.

MPI's own waits look for messages as fast as they can. That is right for ranks that come at the same time; a rank that
waits long for a slow one on a crowded machine slows it down even more.

    look . look .. look .... look ........ look ........ look        sleeps of 50 us, growing to 1 ms

Measured with 4 ranks on 2 cores and one that comes 2 s late, the processor time that each of the others took, in s:

                       MPI's own wait    dozing
    Open MPI 5.0.11    1.33              0.04         (1.33 is all that three ranks can take of two cores in 2 s)
    MPICH 5.0.2        1.33              0.05
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from nnmpi.comm.group import Group

FIRST_S, LONGEST_S = 50e-6, 1e-3


def wait_with_backoff(finished: Callable[[], bool]) -> None:
    """Return when `finished()`, asleep between looks at it."""
    pause_s = FIRST_S
    while not finished():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_S)


def sum_with_backoff(group: Group, values: Sequence[float]) -> list[float]:
    """Return the sums over the ranks of a few numbers, as `Group.sum_floats`; asleep until the last rank comes."""
    total = np.array(values, np.float64)
    request = group.comm.Iallreduce(MPI.IN_PLACE, total)
    wait_with_backoff(request.Test)
    return list(total.tolist())
