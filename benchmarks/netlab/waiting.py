"""Waiting without using the processor: 16 ranks share 2 cores here, and one that spins keeps others from sending."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

# Long enough that 16 ranks leave the cores idle most of the time; short against the milliseconds of a message.
PAUSE_S = 50e-6


def wait(poll: Callable[[], bool]) -> None:
    """Return when `poll` says true; sleep in between."""
    while not poll():
        time.sleep(PAUSE_S)


def barrier(comm: MPI.Comm) -> None:
    """Return when every rank has come here."""
    wait(comm.Ibarrier().Test)


def largest(comm: MPI.Comm, values: Sequence[float]) -> list[float]:
    """Return the elementwise maximum over the ranks."""
    return _reduce(comm, values, MPI.MAX)


def total(comm: MPI.Comm, values: Sequence[float]) -> list[float]:
    """Return the elementwise sum over the ranks."""
    return _reduce(comm, values, MPI.SUM)


def common_start(comm: MPI.Comm, ahead_s: float = 0.02) -> float:
    """Return on all ranks at one moment, and what the clock shows then: the hosts are one machine with one clock."""
    barrier(comm)
    moment = np.array([time.monotonic() + ahead_s])
    wait(comm.Ibcast(moment).Test)
    time.sleep(max(0.0, float(moment[0]) - time.monotonic()))
    return float(moment[0])


def _reduce(comm: MPI.Comm, values: Sequence[float], operation: MPI.Op) -> list[float]:
    reduced = np.array(values, dtype=np.float64)
    wait(comm.Iallreduce(MPI.IN_PLACE, reduced, operation).Test)
    return [float(value) for value in reduced]
