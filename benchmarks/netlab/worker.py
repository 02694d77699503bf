"""What one rank does on its host: `python -m benchmarks.netlab.worker JOB.json`, started by mpirun.

It measures the link, then each (size, algorithm) several times, verifies every sum, and reads its host's own counter
before and after. Rank 0 writes a line of JSON for each; every rank leaves a file when it has come to the end, because
the status of an mpirun says little.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np

from benchmarks.collectives.pattern import Pattern
from benchmarks.netlab.waiting import barrier, common_start, gather, go_first, wait
from nnmpi.backend.backend import numpy_backend
from nnmpi.comm.algorithms.registry import COLLECTIVES, NATIVE, find_collective
from nnmpi.comm.execution import Execution, NativeExecution
from nnmpi.comm.mpi.start import start
from nnmpi.comm.world import Comm, Request
from nnmpi.errors import CommError
from nnmpi.shard import split

SHORT_BYTES, LONG_BYTES = 1024, (2**18, 2**21)
Finish: TypeAlias = Callable[..., None]
"""(communicator, requests...): returns when the requests are complete."""

_TAG = 1000
RESTED_S = 0.02  # a processor that was idle for that long takes longer to notice a message
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


class CollectiveRun:
    """One algorithm on one size of buffer, ready to be run.

    Args:
        comm: all ranks.
        operation: such as "all-reduce".
        name: "native", or one of nnmpi's own algorithms.
        nbytes: the length of the buffer, float32.
        cut_bytes: longer messages are cut into pieces of that.
    """

    def __init__(self, comm: Comm, operation: str, name: str, nbytes: int, cut_bytes: int) -> None:
        self._comm, self._calls, size = comm, 0, comm.size
        self._array = np.empty(nbytes // 4, np.float32)
        contract = COLLECTIVES[operation, "ring"].contract  # every operation can be done around a ring
        self._pattern = Pattern(contract, comm.rank, size, self._array.size, "float32", numpy_backend())
        self.own_bytes = 0  # what this rank has to send; not known of MPI's own algorithms
        if name == NATIVE:
            self._pending: NativeExecution | Execution = NativeExecution(self._array, comm, operation)
        else:
            steps = find_collective(operation, name, range(size))(comm.rank, size)
            chunks = split(self._array.size, size)
            self.own_bytes = sum(4 * len(chunks[chunk]) for step in steps for chunk in step.send)
            self._pending = Execution(steps, self._array, comm, tag=1, max_message_bytes=cut_bytes)

    def run(self) -> float:
        """Return the seconds from the common start until the last rank has finished.

        Raises:
            CommError: when an element is wrong.
        """
        self._calls += 1
        self._pattern.fill(self._array, self._calls)
        begin = common_start(self._comm)
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
    """Yield what was measured, the link first; the same on all ranks except for the link (rank 0)."""
    link = calibrate(comm, job["repeats"], _spin, RESTED_S) if job.get("trains") else calibrate(comm, job["repeats"])
    yield {"kind": "link", **link, "native": _native(comm, job)}
    for nbytes in job["sizes"]:
        for name in job["algorithms"]:
            one = CollectiveRun(comm, job["operation"], name, nbytes, job["cut_bytes"])
            one.run()  # connections are made at the first message
            before = (_sent_bytes(), time.process_time(), time.monotonic())
            seconds = [one.run() for _ in range(job["repeats"])]
            after = (_sent_bytes(), time.process_time(), time.monotonic())
            sent, used_s, taken_s = (late - early for late, early in zip(after, before, strict=True))
            own, sent, used_s = gather(comm, [one.own_bytes, sent, used_s]).sum(axis=0).tolist()
            yield {
                "kind": "row",
                "algorithm": name,
                "bytes": nbytes,
                "seconds": seconds,
                "expected_bytes": own * job["repeats"],
                "sent_bytes": sent,
                "cores": used_s / taken_s,
            }


def _native(comm: Comm, job: dict[str, Any]) -> list[tuple[int, float]]:
    """Return bytes and seconds of MPI's own call, whose steps are not known: it is predicted from these."""
    found = []
    for nbytes in sorted({SHORT_BYTES, *job["sizes"]}):
        one = CollectiveRun(comm, job["operation"], NATIVE, nbytes, nbytes)
        one.run()
        found.append((nbytes, statistics.median(one.run() for _ in range(job["repeats"]))))
    return found


def main(path: Path) -> None:
    """Do the job that this file describes."""
    go_first()
    comm, folder, job = start().comm, path.parent, json.loads(path.read_text())
    with contextlib.ExitStack() as stack:
        lines: TextIO | None = None
        if comm.rank == 0:
            lines = stack.enter_context((folder / "lines").open("w"))
        for found in measure(comm, job):
            if lines is not None:
                print(json.dumps(found), file=lines, flush=True)
    (folder / f"done-{comm.rank}").touch()


def _finish(comm: Comm, *requests: Request) -> None:
    """Return when these are complete; sleep in between."""
    wait(partial(comm.test_all, requests))


def _spin(comm: Comm, *requests: Request) -> None:
    """Return when these are complete; wait as the train command does, by MPI's own wait."""
    comm.wait_all(requests)


def calibrate(comm: Comm, rounds: int, finish: Finish = _finish, pause_s: float = 0.0) -> dict[str, float]:
    """Return alpha_s, beta_s_per_byte, both_ways_s_per_byte and gamma_s_per_byte, on rank 0. Collective.

    Measured between the hosts 0 and 1, without any knowledge of the rate that was set:

    alpha   half the round trip of a message of 1 KB. Not the intercept of a line through long messages: that comes out
            anywhere between -1 and +50 ms, because a bucket lets the first bytes through for nothing.
    beta    the slope between the half round trips of 256 KB and 2 MB: seconds for each further byte. The two lie far
            apart, because a slope over a short way magnifies what other programs add to one of the times.
    gamma   the time to add, per byte added.

    The other ranks sleep meanwhile. `both_ways_s_per_byte` is the same as beta with messages in both directions at
    once: no part of the prediction, but where it is larger, an algorithm that sends and receives will be slower.

    Args:
        comm: all ranks.
        rounds: how often each is measured.
        finish: returns when requests are complete.
        pause_s: before each message, as after computing; the shortest messages tell the difference.
    """
    short = _round_trip(comm, SHORT_BYTES, 20 * rounds, finish, pause_s)
    long = [_round_trip(comm, nbytes, 2 * rounds, finish, pause_s) for nbytes in LONG_BYTES]
    both = [_exchange(comm, nbytes, rounds, finish) for nbytes in LONG_BYTES]
    further = LONG_BYTES[1] - LONG_BYTES[0]
    return {
        "alpha_s": short / 2,
        "beta_s_per_byte": (long[1] - long[0]) / 2 / further,
        "both_ways_s_per_byte": (both[1] - both[0]) / further,
        "gamma_s_per_byte": _adding(rounds) if comm.rank == 0 else 0.0,
    }


def _round_trip(comm: Comm, nbytes: int, rounds: int, finish: Finish, pause_s: float) -> float:
    """Return the median time there and back; the first, which may set up a connection, is not counted."""
    rank, message, taken = comm.rank, np.zeros(nbytes, np.uint8), [0.0]
    barrier(comm)
    for _ in range(rounds + 1 if rank < 2 else 0):
        time.sleep(pause_s)
        begin = time.monotonic()
        if rank == 0:
            finish(comm, comm.isend(message, 1, _TAG))
        finish(comm, comm.irecv(message, 1 - rank, _TAG))
        if rank == 1:
            finish(comm, comm.isend(message, 0, _TAG))
        taken.append(time.monotonic() - begin)
    barrier(comm)
    return statistics.median(taken[2:] or taken)


def _exchange(comm: Comm, nbytes: int, rounds: int, finish: Finish) -> float:
    """Return the median time in which hosts 0 and 1 send to each other at once."""
    rank, taken = comm.rank, [0.0]
    out, into = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    barrier(comm)
    for _ in range(rounds + 1 if rank < 2 else 0):
        begin = time.monotonic()
        finish(comm, comm.irecv(into, 1 - rank, _TAG), comm.isend(out, 1 - rank, _TAG))
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


def _sent_bytes() -> int:
    """Return the bytes that this host has sent since it exists."""
    return int(_SENT.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
