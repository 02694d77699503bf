"""A time limit for MPI's own start, in which no thread of Python runs: a child of each rank looks after it.

    rank 0   fork ---- MPI_Init ........ waits for rank 1 ........ ended by its child
             child  watches the pipe ............. limit: looks who has come, says it
    rank 1   stopped: it has no such child yet, so it is the one that is missing

The child ends as soon as MPI is up. It sees the other ranks of its node, as they have the same parent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

from nnmpi.comm.agreement import name_ranks
from nnmpi.comm.mpi.shutdown import LONGEST_TURN_S, STAGGER_S, STALLED, tell_launcher
from nnmpi.errors import UsageError
from nnmpi.launcher import Launch, launch_of

VARIABLE, LIMIT_S = "NNMPI_START_LIMIT_S", 300.0


def read_start_limit(environ: Mapping[str, str]) -> float:
    """Return the limit in seconds; `math.inf` for none.

    Raises:
        UsageError: when the variable is not a positive number.
    """
    text = environ.get(VARIABLE, str(LIMIT_S))
    with suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise UsageError(f"{VARIABLE} is {text!r}; give a positive number of seconds, or inf")


@contextmanager
def limited(launch: Launch | None, limit_s: float) -> Iterator[None]:
    """End this process with a sentence if the block lasts for longer than a limit.

    Args:
        launch: the process's place; one that is alone, or of a launcher that is not known, waits for nobody.
        limit_s: how long it may take.
    """
    if launch is None or launch.size == 1 or limit_s == inf or not hasattr(os, "fork"):
        yield
        return
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        _watch(ours, launch, limit_s)
    os.close(ours)
    try:
        yield
    finally:
        os.close(theirs)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _watch(pipe: int, launch: Launch, limit_s: float) -> None:
    """Wait for the end of the parent's block, or of itself; never return."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        parent = os.getppid()
        ready, _, _ = select.select([pipe], [], [], limit_s + min(STAGGER_S * launch.rank, LONGEST_TURN_S))
        if not ready:
            text = f"the job is ended: it has waited for {limit_s:g} s in MPI's start{_describe(find_missing(parent))}"
            sys.stderr.write(f"nnmpi: rank {launch.rank} of {launch.size}: {text}\n")
            sys.stderr.flush()
            _end(parent)
    finally:
        os._exit(0)


def _end(process: int) -> None:
    """End a process that may hold its interpreter's lock; MPICH's launcher is told of the status."""
    tell_launcher(STALLED)
    os.kill(process, signal.SIGKILL)


def _describe(missing: dict[int, str]) -> str:
    return "".join(f"; {name_ranks([rank])} {state}" for rank, state in sorted(missing.items())) or (
        f"; all ranks of this node have come to it; {VARIABLE} is the limit"
    )


def find_missing(process: int) -> dict[int, str]:
    """Return the ranks on this node that have not come to MPI's start, and what is known of each, in words."""
    stats = {int(path.parent.name): _read_stat(path) for path in Path("/proc").glob("[0-9]*/stat")}
    parents = {number: int(stat[1]) for number, stat in stats.items() if stat}
    found = {}
    for number, stat in stats.items():
        if stat and number != process and parents[number] == parents.get(process):
            launch = launch_of(number)
            if launch is None:
                continue
            if stat[0] in "Tt":
                found[launch.rank] = f"is stopped (process {number})"
            elif number not in parents.values():
                found[launch.rank] = f"has not come to it (process {number})"
    return found


def _read_stat(path: Path) -> list[str]:
    with suppress(OSError):  # it has ended meanwhile
        return path.read_text().rpartition(")")[2].split()
    return []
