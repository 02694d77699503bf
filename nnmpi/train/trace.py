"""One Chrome trace of a run: every rank's events, on one time axis, in a file that Perfetto opens.

How far the ranks' clocks are apart is found out first. Rank 0 asks every other rank in turn what time it has:

    rank 0     sent |---.           .---| came            offset = there - (sent + came) / 2
    rank r               `--| there |                     wrong by at most (came - sent) / 2

The answer of the shortest of several round trips counts (Cristian, Probabilistic clock synchronization, 1989). An
offset that is within its own error is taken to be none: ranks of one node mostly read the same clock, and then have
none, to the last bit. Clocks of different nodes are apart by days, since each counts from its node's start; they drift,
typically by 1 to 50 microseconds a second, so ask near the time that is to be shown.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nnmpi import clock
from nnmpi.comm.agreement import on_root
from nnmpi.comm.group import Group
from nnmpi.comm.world import Comm
from nnmpi.errors import CommError, NnmpiError
from nnmpi.timeline import Timeline, TraceEvent, recording, to_chrome, write_chrome
from nnmpi.train.run import TrainingRun

ROUNDS = 20
_TAG = 0


class Answer(NamedTuple):
    """One round trip: when the question went out and the answer came, by one clock, and the time in the answer."""

    sent_s: float
    there_s: float
    came_s: float


def offsets(group: Group, clock: Callable[[], float] = clock.now) -> list[float]:
    """Return how far each rank's clock is ahead of rank 0's, in seconds, on every rank. Collective.

    Takes ROUNDS round trips for each rank, one rank after the other.

    Args:
        group: the ranks.
        clock: what this rank reads, in seconds.
    """
    comm = group.comm.duplicate()  # its messages never meet others'
    try:
        found = [0.0] * group.size
        for rank in range(1, group.size):
            if group.is_root:
                found[rank] = estimate([_ask(comm, rank, clock) for _ in range(ROUNDS)])
            elif group.rank == rank:
                for _ in range(ROUNDS):
                    _answer(comm, clock)
    finally:
        comm.free()
    return list(group.share(found))


def estimate(answers: Sequence[Answer]) -> float:
    """Return the offset of the clock that answered, in seconds; 0 where it cannot be told from none."""
    best = min(answers, key=lambda answer: answer.came_s - answer.sent_s)
    offset_s = best.there_s - (best.sent_s + best.came_s) / 2
    is_between = best.sent_s <= best.there_s <= best.came_s
    return 0.0 if is_between else offset_s


def _ask(comm: Comm, rank: int, clock: Callable[[], float]) -> Answer:
    there_s = np.empty(1)
    sent_s = clock()
    comm.wait_all([comm.irecv(there_s, rank, _TAG), comm.isend(np.empty(0), rank, _TAG)])
    return Answer(sent_s, float(there_s[0]), clock())


def _answer(comm: Comm, clock: Callable[[], float]) -> None:
    comm.wait_all([comm.irecv(np.empty(0), 0, _TAG)])
    comm.wait_all([comm.isend(np.array([clock()]), 0, _TAG)])


def write_trace(path: Path, timeline: Timeline, group: Group, names: Sequence[str] | None = None) -> None:
    """Write the events of all ranks into one file, on rank 0. Collective.

    Clocks are compared now, so call it soon after what is to be seen.

    Args:
        path: the file, compressed when its name ends in .gz; its folder is made. Only rank 0's is looked at.
        timeline: this rank's events; a message has the same name at both its ends and in all ranks' events.
        group: the ranks.
        names: what to call each rank besides its number, such as its coordinates "d0 p1 t0"; only rank 0's count.

    Raises:
        NnmpiError: on all ranks, when the file cannot be written; nothing is left of it then.
        CommError: on all ranks, for an event with args that JSON cannot hold.
    """
    ahead_s = offsets(group, timeline.clock)
    everyones = group.gather(timeline.events)

    def write() -> None:
        processes = {rank: [TraceEvent(*row) for row in rows] for rank, rows in enumerate(everyones)}
        titles = {rank: f"rank {rank}: {name}" for rank, name in enumerate(names or ())}
        trace = to_chrome(processes, titles, dict(enumerate(ahead_s)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_chrome(path, trace)
        except OSError as error:
            raise NnmpiError(
                f"the trace cannot be written to {path}: {error.strerror or error}; give a file in a folder with room "
                "that you may write to"
            ) from None

    on_root(group, write)


TRACE_FILE = "trace.json.gz"
TRACED = 20  # steps


class Tracer:
    """Records the first steps of this start of a run if `--trace` asks for it; else it does nothing.

    Args:
        run: whose options say whether.
        say: prints lines. A trace that cannot be written is reported so, and the run goes on.
    """

    def __init__(self, run: TrainingRun, say: Callable[[Sequence[str]], None]) -> None:
        self._run, self._say = run, say
        self._timeline = Timeline() if run.config.run.trace else None
        self._left = TRACED

    @property
    def left(self) -> int:
        """The number of steps that are still to be recorded."""
        return 0 if self._timeline is None else self._left

    @contextmanager
    def steps(self, count: int) -> Iterator[None]:
        """Record so many steps, and write the file when they were the last that are wanted. Collective."""
        if self._timeline is None:
            yield
            return
        with recording(self._timeline):
            yield
        self._left -= count
        if self._left <= 0:
            self.finish()

    def finish(self) -> None:
        """Write the file, unless it is written. Collective."""
        if self._timeline is None:
            return
        where, group = self._run.arrangement, self._run.group
        mesh = None if where is None else where.mesh.mesh
        names = [f"d{rank}" if mesh is None else str(mesh.coordinates(rank)) for rank in range(group.size)]
        timeline, self._timeline = self._timeline, None
        try:
            write_trace(self._run.folder.path / TRACE_FILE, timeline, group, names)
        except CommError:
            raise
        except NnmpiError as error:
            self._say([f"no trace: {error}"])
