"""What a link costs: measured between the hosts 0 and 1, without any knowledge of the rate that was set.

alpha   half the round trip of a message of 1 KB. Not the intercept of a line through long messages: that comes out
        anywhere between -1 and +50 ms, because a bucket lets the first bytes through for nothing.
beta    the slope between the half round trips of 256 KB and 2 MB: seconds for each further byte. The two lie far apart,
        because a slope over a short way magnifies what other programs add to one of the times.
gamma   the time to add, per byte added.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import numpy as np
from mpi4py import MPI

from benchmarks.netlab.waiting import barrier, wait

SHORT_BYTES, LONG_BYTES = 1024, (2**18, 2**21)
_TAG = 1000


def calibrate(comm: MPI.Comm, rounds: int) -> dict[str, float]:
    """Return alpha_s, beta_s_per_byte, both_ways_s_per_byte and gamma_s_per_byte, on rank 0. Collective.

    The other ranks sleep meanwhile. `both_ways_s_per_byte` is the same as beta with messages in both directions at
    once: no part of the prediction, but where it is larger, an algorithm that sends and receives will be slower.
    """
    short = _round_trip(comm, SHORT_BYTES, 20 * rounds)
    long = [_round_trip(comm, nbytes, 2 * rounds) for nbytes in LONG_BYTES]
    both = [_exchange(comm, nbytes, rounds) for nbytes in LONG_BYTES]
    further = LONG_BYTES[1] - LONG_BYTES[0]
    return {
        "alpha_s": short / 2,
        "beta_s_per_byte": (long[1] - long[0]) / 2 / further,
        "both_ways_s_per_byte": (both[1] - both[0]) / further,
        "gamma_s_per_byte": _adding(rounds) if comm.Get_rank() == 0 else 0.0,
    }


def _round_trip(comm: MPI.Comm, nbytes: int, rounds: int) -> float:
    """Return the median time there and back; the first, which may set up a connection, is not counted."""
    rank, message, taken = comm.Get_rank(), np.zeros(nbytes, np.uint8), [0.0]
    barrier(comm)
    for _ in range(rounds + 1 if rank < 2 else 0):
        begin = time.monotonic()
        if rank == 0:
            wait(comm.Isend([message, MPI.BYTE], 1, _TAG).Test)
        wait(comm.Irecv([message, MPI.BYTE], 1 - rank, _TAG).Test)
        if rank == 1:
            wait(comm.Isend([message, MPI.BYTE], 0, _TAG).Test)
        taken.append(time.monotonic() - begin)
    barrier(comm)
    return statistics.median(taken[2:] or taken)


def _exchange(comm: MPI.Comm, nbytes: int, rounds: int) -> float:
    """Return the median time in which hosts 0 and 1 send to each other at once."""
    rank, taken = comm.Get_rank(), [0.0]
    out, into = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    barrier(comm)
    for _ in range(rounds + 1 if rank < 2 else 0):
        begin = time.monotonic()
        requests = [comm.Irecv([into, MPI.BYTE], 1 - rank, _TAG), comm.Isend([out, MPI.BYTE], 1 - rank, _TAG)]
        wait(partial(MPI.Request.Testall, requests))
        taken.append(time.monotonic() - begin)
    barrier(comm)
    return statistics.median(taken[2:] or taken)


def _adding(rounds: int, nbytes: int = 2**20) -> float:
    """Return the median time to add, per byte."""
    target, other, taken = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32), []
    for _ in range(rounds + 1):
        begin = time.monotonic()
        np.add(target, other, out=target)
        taken.append(time.monotonic() - begin)
    return statistics.median(taken[1:]) / nbytes
