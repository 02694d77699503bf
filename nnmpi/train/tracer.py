"""The trace of a run's first steps: recording them, and writing the file when they are over."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nnmpi.compose.worker import Worker
from nnmpi.errors import CommError, NnmpiError, UsageError
from nnmpi.timeline import Timeline, recording
from nnmpi.train.parts import Parts
from nnmpi.train.trace import write_trace

TRACE_FILE = "trace.json.gz"


class Tracer:
    """Records the first steps of this start of a run if `--trace` asks for it; else it does nothing.

    Args:
        say: prints lines; a file that cannot be written costs the trace, not the run.
    """

    def __init__(self, parts: Parts, say: Callable[[Sequence[str]], None]) -> None:
        self._parts, self._say = parts, say
        self._timeline = Timeline() if parts.options.trace else None
        self._left = parts.options.trace_steps

    @property
    def left(self) -> int:
        """The number of steps that are still to be recorded."""
        return 0 if self._timeline is None else self._left

    @contextmanager
    def steps(self, count: int) -> Iterator[None]:
        """Record steps that are done at one go, and write the file when they were the last. Collective."""
        if self._timeline is None:
            yield
            return
        with recording(self._timeline):
            yield
        self._left -= count
        if self._left <= 0:
            self.finish()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record a step; after the last one that is wanted the file is written. Collective."""
        if self._timeline is None:
            yield
            return
        with recording(self._timeline), self._timeline.span(f"step {number}", "step", "steps"):
            yield
        self._left -= 1
        if self._left == 0:
            self.finish()

    def finish(self) -> None:
        """Write the file, unless it is written. Collective."""
        if self._timeline is None:
            return
        worker, group = self._parts.worker, self._parts.group
        where = worker.arrangement if isinstance(worker, Worker) else None
        mesh = None if where is None else where.mesh.mesh
        names = [f"d{rank}" if mesh is None else str(mesh.coordinates(rank)) for rank in range(group.size)]
        timeline, self._timeline = self._timeline, None
        try:
            write_trace(self._parts.folder.path / TRACE_FILE, timeline, group, names)
        except (UsageError, CommError):
            raise
        except NnmpiError as error:
            self._say([f"no trace: {error}"])
