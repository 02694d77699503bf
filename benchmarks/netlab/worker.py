"""A rank on its host: `python -m benchmarks.netlab.worker JOB`, started by mpirun; the job is JSON.

It measures the link, then each (size, algorithm) several times, verifies every sum, and reads its
host's byte counter before and after. Rank 0 prints a line for each, and one when all ranks have
ended.

16 ranks may share 2 cores here: a rank that spins keeps others from sending, and a rank that waits
for a core looks like a slow link. So waiting ranks sleep, at a higher priority than ordinary
programs.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.collectives.pattern import Pattern
from benchmarks.netlab.launch import END, RESULT
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.errors import CommError
from nnmpi.base.shard import split
from nnmpi.comm.algorithms.registry import COLLECTIVES, NATIVE, find_collective
from nnmpi.comm.execution import Execution, NativeExecution
from nnmpi.comm.mpi.start import start
from nnmpi.comm.world import Comm, RequestHandle

SHORT_BYTES, LONG_BYTES = 1024, (2**18, 2**21)
_TAG = 1000
RESTED_S = 0.02  # a processor idle for that long takes longer to notice a message
# 16 ranks that poll every 0.05 ms use 1.5 cores, every 0.2 ms one. It must stay below the 2.6 ms
# that the 64 KB in the system's send buffer last at 200 Mbit/s, or the link runs dry.
PAUSE_S = 200e-6
_PRIORITY = -10  # above ordinary programs (0), below the system's own (-20)
_AHEAD_S = 0.02  # of a common start


class CollectiveRun:
    """One algorithm on a buffer of one size.

    Args:
        comm: all ranks.
        operation: such as "all-reduce".
        name: "native", or one of nnmpi's own algorithms.
        nbytes: the length of the buffer, float32.
    """

    def __init__(self, comm: Comm, operation: str, name: str, nbytes: int) -> None:
        self._comm, self._calls, size = comm, 0, comm.size
        self._array = np.empty(nbytes // 4, np.float32)
        # any operation has a ring algorithm
        contract = COLLECTIVES[operation, "ring"].contract
        self._pattern = Pattern(
            contract, comm.rank, size, self._array.size, "float32", numpy_backend()
        )
        self.sent_bytes = 0  # by this rank; 0 for MPI's own algorithms, whose steps are unknown
        if name == NATIVE:
            self._pending: NativeExecution | Execution = NativeExecution(
                self._array, comm, operation
            )
        else:
            collective = find_collective(operation, name, range(size))
            steps, parts = collective(comm.rank, size), collective.contract.parts(size)
            chunks = split(self._array.size, parts)
            self.sent_bytes = sum(4 * len(chunks[chunk]) for step in steps for chunk in step.send)
            self._pending = Execution(steps, self._array, comm, 1, parts)

    def run(self) -> float:
        """Return the seconds from a common start to the last rank's end.

        Raises:
            CommError: for a wrong element.
        """
        self._calls += 1
        self._pattern.fill(self._array, self._calls)
        # the hosts are one machine with one clock
        begin = float(gather(self._comm, [time.monotonic() + _AHEAD_S]).max())
        time.sleep(max(0.0, begin - time.monotonic()))
        if isinstance(self._pending, NativeExecution):
            self._pending.run()  # as users call it: blocking
        else:
            self._pending.start()
            wait(self._pending.poll)
        taken = time.monotonic() - begin
        wrong = self._pattern.first_wrong(self._array, self._calls)
        slowest, wrongest = gather(self._comm, [taken, wrong is not None]).max(axis=0)
        if wrongest:
            raise CommError(f"the result is wrong on a rank; here: {wrong or 'right'}")
        return float(slowest)


def measure(comm: Comm, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the measurements, the link first; the link's are valid on rank 0 alone."""
    operation, repeats = job["operation"], job["repeats"]
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")

    def snapshot() -> NDArray[np.float64]:
        return np.array([int(counter.read_text()), time.process_time(), time.monotonic()])

    # MPI's own call, whose steps are unknown, is predicted from these
    native = []
    for nbytes in sorted({SHORT_BYTES, *job["sizes"]}) if job["sizes"] else ():
        item = CollectiveRun(comm, operation, NATIVE, nbytes)
        native.append((nbytes, statistics.median([item.run() for _ in range(repeats + 1)][1:])))
    yield {"kind": "link", **calibrate(comm, repeats, trains=not job["sizes"]), "native": native}
    for nbytes in job["sizes"]:
        for name in job["algorithms"]:
            item = CollectiveRun(comm, operation, name, nbytes)
            item.run()  # the first message makes the connections
            before = snapshot()
            seconds = [item.run() for _ in range(repeats)]
            sent_bytes, used_s, taken_s = snapshot() - before
            local, sent_bytes, used_s = (
                gather(comm, [item.sent_bytes, sent_bytes, used_s]).sum(axis=0).tolist()
            )
            yield {
                "kind": "row",
                "algorithm": name,
                "bytes": nbytes,
                "seconds": seconds,
                "expected_bytes": local * repeats,
                "sent_bytes": sent_bytes,
                "cores": used_s / taken_s,
            }


def calibrate(comm: Comm, rounds: int, trains: bool) -> dict[str, float]:
    """Return alpha_s, beta_s_per_byte and gamma_s_per_byte, on rank 0. Collective.

    Measured between hosts 0 and 1, without knowledge of the configured rate; the other ranks
    sleep:

    alpha   half the round trip of a message of 1 KB. The intercept of a line through long messages
            lost: it comes out anywhere from -1 to +50 ms, because a token bucket passes the first
            bytes at once.
    beta    the slope between the half round trips of 256 KB and 2 MB: seconds per further byte. The
            two sizes lie far apart, because a short baseline magnifies the noise of either time.
    gamma   seconds per byte added.

    Args:
        comm: all ranks.
        rounds: how often each is measured.
        trains: wait like the train command, by MPI's own wait, and idle before each message, as a
            rank does after computing.
    """
    short = _round_trip(comm, SHORT_BYTES, 20 * rounds, trains)
    long = [_round_trip(comm, nbytes, 2 * rounds, trains) for nbytes in LONG_BYTES]
    target, other, taken = np.ones(2**18, np.float32), np.ones(2**18, np.float32), []
    for _ in range(rounds + 1):
        begin = time.monotonic()
        np.add(target, other, out=target)
        taken.append(time.monotonic() - begin)
    return {
        "alpha_s": short / 2,
        "beta_s_per_byte": (long[1] - long[0]) / 2 / (LONG_BYTES[1] - LONG_BYTES[0]),
        "gamma_s_per_byte": statistics.median(taken[1:]) / target.nbytes,
    }


def _round_trip(comm: Comm, nbytes: int, rounds: int, trains: bool) -> float:
    """Return the median round trip; the first, which may set up a connection, does not count."""
    rank, message, taken = comm.rank, np.zeros(nbytes, np.uint8), [0.0, 0.0]

    def finish(request: RequestHandle) -> None:
        if trains:
            comm.wait_all([request])
        else:
            wait(partial(comm.test_all, [request]))

    gather(comm, [0.0])
    for _ in range(rounds + 1 if rank < 2 else 0):
        time.sleep(RESTED_S if trains else 0.0)
        begin = time.monotonic()
        if rank == 0:
            finish(comm.isend(message, 1, _TAG))
        finish(comm.irecv(message, 1 - rank, _TAG))
        if rank == 1:
            finish(comm.isend(message, 0, _TAG))
        taken.append(time.monotonic() - begin)
    gather(comm, [0.0])
    return statistics.median(taken[3:] or taken)


def wait(poll: Callable[[], bool]) -> None:
    """Poll until it is true; sleep in between."""
    while not poll():
        time.sleep(PAUSE_S)


def gather(comm: Comm, values: Sequence[float]) -> NDArray[np.float64]:
    """Return every rank's numbers: (ranks, numbers)."""
    result = np.empty((comm.size, len(values)))
    local, counts = np.array(values, np.float64), [len(values)] * comm.size
    wait(partial(comm.test_all, [comm.iallgatherv(local, result.reshape(-1), counts)]))
    return result


def main() -> None:
    """Do the job of the command line."""
    os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    # with autogroups, cores are shared among sessions, and the session's priority counts
    session = Path("/proc/self/autogroup")
    if session.exists():
        session.write_text(str(_PRIORITY))
    comm = start().comm
    for result in measure(comm, json.loads(sys.argv[1])):
        if comm.rank == 0:
            print(f"{RESULT}{json.dumps(result)}", flush=True)
    gather(comm, [0.0])
    if comm.rank == 0:
        print(f'{RESULT}{{"kind": "{END}"}}', flush=True)


if __name__ == "__main__":
    main()
