"""The limit of MPI's own start, and the word on a rank that is gone: of processes that only seem to be ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nnmpi.comm.mpi.startup import find_missing, read_start_limit
from nnmpi.errors import UsageError

ROOT = Path(__file__).parents[2]
LIMIT_S = 60

WAITS = """
import time
from nnmpi.comm.mpi.startup import limited
from nnmpi.launcher import Launch
with limited(Launch("a launcher", 2, 0, 2, 0), {limit_s}):
    time.sleep({seconds})
print("up")
"""
DIES = """
import sys, time
from collections import deque
from types import SimpleNamespace
from nnmpi.comm.mpi.watchdog import Watchdog

class Pair:
    size, told = 2, None
    def __init__(self, rank):
        self.rank = rank
    def share(self, value):
        Pair.told = value or Pair.told
        return Pair.told

world = SimpleNamespace(step=3, waiter=None)
root, other = [Watchdog(Pair(rank), deque(), world, True) for rank in (0, 1)]
said = []
root._say, other._say = said.append, lambda text: None  # the connection ends for the other one, too
for _ in range(2):  # the first word may be of the start, which went on while it was looked at
    root._heard.pop(1, None)
    while 1 not in root._heard or not other._lines:
        time.sleep(0.01)
if sys.argv[1] == "leaves":
    other.leave()
for line in other._lines.values():
    line.link.shutdown(2)
while 1 not in root._gone or (sys.argv[1] == "dies" and not said):
    time.sleep(0.01)
print("gone", *said)
"""


def ranks(stack: ExitStack) -> Iterator[subprocess.Popen[bytes]]:
    for rank in range(3):
        told = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": str(rank)}
        process = stack.enter_context(subprocess.Popen(["sleep", "100"], env={**os.environ, **told}))
        stack.callback(process.kill)
        yield process


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_ranks_that_have_not_come_are_found() -> None:
    """Neither has a child that watches over it, and one is stopped."""
    with ExitStack() as stack:
        first, stopped, late = ranks(stack)
        stopped.send_signal(signal.SIGSTOP)
        end_s, found = time.monotonic() + LIMIT_S, {0: ""}
        while "stopped" not in found.get(1, "") or 2 not in found:
            assert time.monotonic() < end_s, found
            found = find_missing(first.pid)
    assert found[1] == f"is stopped (process {stopped.pid})"
    assert found[2] == f"has not come to it (process {late.pid})"
    assert 0 not in found


def run(program: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False)


def test_a_start_that_takes_too_long_is_ended_with_a_sentence() -> None:
    ending = run(WAITS.format(limit_s=0.1, seconds=LIMIT_S))
    assert ending.returncode == -signal.SIGKILL
    assert "rank 0 of 2: the job is ended: it has waited for 0.1 s in MPI's start" in ending.stderr
    assert run(WAITS.format(limit_s=LIMIT_S, seconds=0)).stdout == "up\n"


@pytest.mark.parametrize("limit", ["0", "-1", "soon", "nan"])
def test_a_wrong_limit_is_refused(limit: str) -> None:
    with pytest.raises(UsageError, match="NNMPI_START_LIMIT_S is"):
        read_start_limit({"NNMPI_START_LIMIT_S": limit})


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_a_rank_whose_connection_ends_without_a_word_is_told(how: str) -> None:
    ending = run(DIES, how)
    said = " rank 1 has gone, killed or by an exit of its own; it was last heard of at "
    assert ending.stdout.startswith("gone" + said * (how == "dies")), ending
    assert (said in ending.stdout) == (how == "dies"), ending.stdout
