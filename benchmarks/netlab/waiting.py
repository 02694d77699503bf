"""Waiting without using the processor, and not waiting for the processor: 16 ranks may share 2 cores here.

A rank that spins keeps others from sending, and one that waits for a core looks like a slow link.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nnmpi.comm.world import Comm

# 16 ranks that look every 0.05 ms use 1.5 cores, every 0.2 ms one. It must stay below the 2.6 ms that the 64 KB in the
# system's send buffer last at 200 Mbit/s, or the link runs dry.
PAUSE_S = 200e-6


# Before ordinary programs (0), behind the system's own (-20).
_PRIORITY = -10


def go_first() -> None:
    """Let this process go before other programs of the machine when both want a core."""
    os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    session = Path("/proc/self/autogroup")  # where the system shares cores among sessions, this is what counts
    if session.exists():
        session.write_text(str(_PRIORITY))


def wait(poll: Callable[[], bool]) -> None:
    """Return when `poll` says true; sleep in between."""
    while not poll():
        time.sleep(PAUSE_S)


def barrier(comm: Comm) -> None:
    """Return when every rank has come here."""
    gather(comm, [0.0])


def gather(comm: Comm, values: Sequence[float]) -> NDArray[np.float64]:
    """Return every rank's numbers: (ranks, numbers)."""
    everyones = np.empty((comm.size, len(values)))
    own, counts = np.array(values, np.float64), [len(values)] * comm.size
    wait(partial(comm.test_all, [comm.iallgatherv(own, everyones.reshape(-1), counts)]))
    return everyones


def common_start(comm: Comm, ahead_s: float = 0.02) -> float:
    """Return on all ranks at one moment, and what the clock shows then: the hosts are one machine with one clock."""
    barrier(comm)
    moment = np.array([time.monotonic() + ahead_s])
    wait(partial(comm.test_all, [comm.ibroadcast(moment, 0)]))
    time.sleep(max(0.0, float(moment[0]) - time.monotonic()))
    return float(moment[0])
