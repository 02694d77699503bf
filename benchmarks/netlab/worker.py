"""What one rank does on its host: `python -m benchmarks.netlab.worker JOB.json`, started by mpirun.

It measures the link, then each (size, algorithm) several times, verifies every sum, and reads its host's own counter
before and after. Rank 0 writes a line of JSON for each; every rank leaves a file when it has come to the end, because
the status of an mpirun says little.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from mpi4py import MPI

from benchmarks.netlab.calibrate import SHORT_BYTES, calibrate
from benchmarks.netlab.waiting import common_start, go_first, largest, total, wait
from nnmpi.comm.algorithms.registry import NATIVE, find_algorithm
from nnmpi.comm.execute import Execution
from nnmpi.comm.native import Native
from nnmpi.comm.start import start
from nnmpi.errors import CommError
from nnmpi.shard import split

_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


class Trial:
    """One algorithm on one size of buffer.

    Args:
        name: "native", or one of nnmpi's own algorithms.
        nbytes: the length of the buffer, float32.
        cut_bytes: longer messages are cut into pieces of that.
    """

    def __init__(self, comm: MPI.Comm, name: str, nbytes: int, cut_bytes: int) -> None:
        self._comm, size = comm, comm.Get_size()
        self._array = np.empty(nbytes // 4, np.float32)
        self.own_bytes = 0  # what this rank has to send; not known of MPI's own algorithms
        if name == NATIVE:
            self._pending: Native | Execution = Native(self._array, comm)
        else:
            steps = find_algorithm(name, range(size))(comm.Get_rank(), size)
            chunks = split(self._array.size, size)
            self.own_bytes = sum(4 * len(chunks[chunk]) for step in steps for chunk in step.send)
            self._pending = Execution(steps, self._array, comm, tag=1, max_message_bytes=cut_bytes)
        # Small whole numbers: their sum is the same in any order, so that every element can be compared.
        self._pattern = (np.arange(self._array.size) % 251).astype(np.float32)

    def run(self) -> float:
        """Return the seconds from the common start until the last rank has finished.

        Raises:
            CommError: when a sum is wrong.
        """
        size, rank = self._comm.Get_size(), self._comm.Get_rank()
        np.add(self._pattern, rank, out=self._array)
        begin = common_start(self._comm)
        if isinstance(self._pending, Native):
            self._pending.run()  # as users call it: blocking
        else:
            self._pending.start()
            wait(self._pending.poll)
        taken = time.monotonic() - begin
        wrong = float(np.count_nonzero(self._array != self._pattern * size + size * (size - 1) // 2))
        slowest, wrongest = largest(self._comm, [taken, wrong])
        if wrongest:
            raise CommError(f"{wrongest:.0f} of {self._array.size} sums are wrong")
        return slowest


def measure(comm: MPI.Comm, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what was measured, the link first; the same on all ranks except for the link (rank 0)."""
    yield {"kind": "link", **calibrate(comm, job["repeats"]), "native": _native(comm, job["sizes"], job["repeats"])}
    for nbytes in job["sizes"]:
        for name in job["algorithms"]:
            trial = Trial(comm, name, nbytes, job["cut_bytes"])
            trial.run()  # connections are made at the first message
            before = (_sent_bytes(), time.process_time(), time.monotonic())
            seconds = [trial.run() for _ in range(job["repeats"])]
            after = (_sent_bytes(), time.process_time(), time.monotonic())
            sent, used_s, taken_s = (late - early for late, early in zip(after, before, strict=True))
            own, sent, used_s = total(comm, [trial.own_bytes, sent, used_s])
            yield {
                "kind": "row",
                "algorithm": name,
                "bytes": nbytes,
                "seconds": seconds,
                "expected_bytes": own * job["repeats"],
                "sent_bytes": sent,
                "cores": used_s / taken_s,
            }


def _native(comm: MPI.Comm, sizes: Sequence[int], rounds: int) -> list[tuple[int, float]]:
    """Return bytes and seconds of MPI's own all-reduce, whose steps are not known: it is predicted from these."""
    found = []
    for nbytes in sorted({SHORT_BYTES, *sizes}):
        trial = Trial(comm, NATIVE, nbytes, nbytes)
        trial.run()
        found.append((nbytes, statistics.median(trial.run() for _ in range(rounds))))
    return found


def main(path: Path) -> None:
    """Do the job that this file describes."""
    go_first()
    comm, folder, job = start().comm, path.parent, json.loads(path.read_text())
    with contextlib.ExitStack() as stack:
        lines: TextIO | None = None
        if comm.Get_rank() == 0:
            lines = stack.enter_context((folder / "lines").open("w"))
        for found in measure(comm, job):
            if lines is not None:
                print(json.dumps(found), file=lines, flush=True)
    (folder / f"done-{comm.Get_rank()}").touch()


def _sent_bytes() -> int:
    """Return the bytes that this host has sent since it exists."""
    return int(_SENT.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
