"""One Chrome trace of a run: every rank's events on one time axis, in a file for Perfetto.

The ranks' clocks are compared first: all read theirs after a barrier. Ranks of one node share a
clock. Clocks of different nodes differ by days, since each counts from its node's start. They also
drift, typically by 1 to 50 microseconds per second, so compare them close to the traced steps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nnmpi.base.errors import CommError, NnmpiError, raised_as
from nnmpi.base.timeline import (
    Timeline,
    TraceEvent,
    split_waits,
    to_chrome,
    tracing,
    write_chrome,
)
from nnmpi.comm.agreement import on_root
from nnmpi.comm.group import Group
from nnmpi.train.run import TrainingRun


def offsets(group: Group, clock: Callable[[], float]) -> list[float]:
    """Return each rank's clock minus rank 0's, in seconds, on every rank. Collective.

    Args:
        group: the ranks.
        clock: this rank's, in seconds.
    """
    nodes = group.nodes()
    group.barrier()
    times = group.gather(clock())
    return [
        0.0 if node == nodes[0] else local - times[0]
        for node, local in zip(nodes, times, strict=True)
    ]


def write_trace(
    path: Path, timeline: Timeline, group: Group, names: Sequence[str] | None = None
) -> None:
    """Write the events of all ranks into one file, on rank 0. Collective.

    Clocks are compared now: call this soon after the traced steps.

    Args:
        path: the file, compressed if its name ends in .gz; its folder is created. Only rank 0's
            value counts.
        timeline: this rank's events. A message has the same name in the events of both its ranks.
        group: the ranks.
        names: of the ranks, such as their coordinates "d0 p1 t0". Only rank 0's value counts.

    Raises:
        NnmpiError: on all ranks, when the file cannot be written; it is removed then.
        CommError: on all ranks, for an event with args that JSON cannot hold.
    """
    ahead_s = offsets(group, timeline.clock)
    gathered = group.gather(timeline.events)

    def write() -> None:
        processes = split_waits([[TraceEvent(*row) for row in rows] for rows in gathered], ahead_s)
        titles = {rank: f"rank {rank}: {name}" for rank, name in enumerate(names or ())}
        trace = to_chrome(processes, titles)
        advice = "give a file in a folder with room that you may write to"
        with raised_as(NnmpiError, f"the trace cannot be written to {path}", advice):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_chrome(path, trace)

    on_root(group, write)


TRACED = 20  # number of steps in a trace


class Tracer:
    """Record the first steps of a run's start with --trace; without it do nothing.

    Args:
        run: to trace.
        say: prints lines. If the trace cannot be written, it prints why, and the run continues.
    """

    def __init__(self, run: TrainingRun, say: Callable[[Sequence[str]], None]) -> None:
        self._run, self._say = run, say
        self._timeline = Timeline() if run.config.run.trace else None
        self._left = TRACED

    @property
    def left(self) -> int:
        """The number of steps still to record."""
        return 0 if self._timeline is None else self._left

    @contextmanager
    def steps(self, count: int) -> Iterator[None]:
        """Record the body's steps, and write the file after the last of TRACED. Collective."""
        if self._timeline is None:
            yield
            return
        with tracing(self._timeline):
            yield
        self._left -= count
        if self._left <= 0:
            self.finish()

    def finish(self) -> None:
        """Write the file unless it is written. Collective."""
        if self._timeline is None:
            return
        mesh, group = self._run.arrangement.mesh.sizes, self._run.group
        plain = mesh.dp == mesh.size
        names = [f"d{rank}" if plain else str(mesh.coordinates(rank)) for rank in range(group.size)]
        timeline, self._timeline = self._timeline, None
        try:
            write_trace(self._run.folder.trace, timeline, group, names)
        except CommError:
            raise
        except NnmpiError as error:
            self._say([f"no trace: {error}"])
