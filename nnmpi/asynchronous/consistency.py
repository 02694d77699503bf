"""The server's consistency controller: which worker waits, and which task is next.

    worker            controller                        worker            controller, bound 0
      | gradient ----->| a task is left: continue      A | gradient ---->| A leads by 1: it waits
      |<------- task   |                               B | gradient ---->| no worker leads any more
      | computes       |                               A |<----- task    |
      | gradient ----->| no task is left: it waits     B |<----- task    |
      |<------- None   | when all gradients have arrived

Task                     one part of one batch: a worker's computation in one step
WorkQueue                assigns the tasks of a segment in order
WorkerClocks             the steps that each worker has done, and its lead over the slowest
ConsistencyController    both together, and the end of a segment
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nnmpi.comm.synchrony.sync import Bound


@dataclass(frozen=True, order=True, slots=True)
class Task:
    """A worker's computation in one step: the gradient of one part of one batch.

    Attributes:
        batch: the number of the global batch in its epoch.
        part: the number of the batch's part, from 0 to workers - 1; it may have no rows.
    """

    batch: int
    part: int


class WorkQueue:
    """Assigns each part of the batches first..stop-1 once, in order, to any idle worker.

        3 parts     (0,0) (0,1) (0,2)   (1,0) (1,1) (1,2)   (2,0) ...
                                               ^ next
        close()         (1,2) is the last task, stop becomes 2
        close(True)     no task is left, stop becomes 1

    Attributes:
        first, stop: the batches; `stop` is lower after `close`.
        assigned: the number of assigned tasks.
    """

    def __init__(self, first: int, stop: int, parts: int) -> None:
        self.first, self.stop, self.parts = first, max(first, stop), parts
        self.assigned = 0

    def assign(self) -> Task | None:
        """Return the next task, or None if none is left."""
        batch, part = divmod(self.assigned, self.parts)
        if self.first + batch >= self.stop:
            return None
        self.assigned += 1
        return Task(self.first + batch, part)

    @property
    def exhausted(self) -> bool:
        """Whether no task is left."""
        return self.first + self.assigned // self.parts >= self.stop

    def close(self, at_once: bool = False) -> None:
        """Assign nothing after the current batch; with `at_once` not even the rest of it."""
        full, begun = divmod(self.assigned, self.parts)
        self.stop = min(self.stop, self.first + full + (begun > 0 and not at_once))


class WorkerClocks:
    """Each worker's step count. A step may begin with a lead over the slowest of at most `bound`.

    This is the stale synchronous parallel rule of Ho et al., "More effective distributed ML via a
    stale synchronous parallel parameter server" (2013).

        steps    7   5   6    slowest 5
        lead     2   0   1    bound 1: workers 1 and 2 may begin a step, worker 0 waits for worker 1

    Attributes:
        steps: by worker: its steps, including those credited by `limit_lag`.
    """

    def __init__(self, workers: int) -> None:
        self.steps = [0] * workers

    def lead(self, worker: int) -> int:
        """Return a worker's lead over the slowest, in steps."""
        return self.steps[worker] - min(self.steps)

    def may_start(self, worker: int, bound: int | None) -> bool:
        """Return whether a worker may begin a step; without a bound it always may."""
        return bound is None or self.lead(worker) <= bound

    def limit_lag(self, bound: int | None) -> None:
        """Raise slow workers' step counts up to the bound, when all ranks meet.

        Otherwise all would wait until the slow ones had caught up. Under a bound above 0 a waiting
        worker has a lead of at most bound + 1, so the counts end at max - (bound + 1). Under bound
        0 all workers have done the same number of steps when they meet, so they end at max.
        """
        if bound is not None:
            least = max(self.steps) - (bound + 1 if bound else 0)
            self.steps[:] = [max(steps, least) for steps in self.steps]

    def done(self, worker: int) -> None:
        """Count one more step of a worker."""
        self.steps[worker] += 1


class ConsistencyController:
    """Decides which worker may continue in a segment between two synchronizations.

    Attributes:
        clocks: the workers' steps since the start of the run; see `WorkerClocks.limit_lag`.
        queue: assigns the segment's tasks.
        bound: how far workers may drift apart in this segment; None for any distance.
        arrived: the number of gradients that arrived in this segment.
        longest_lead: the largest lead with which a worker began a step in this segment.
    """

    def __init__(self, workers: int) -> None:
        self.clocks, self.queue = WorkerClocks(workers), WorkQueue(0, 0, workers)
        self.bound: Bound | None = Bound(0)
        self.arrived = self.longest_lead = 0
        self._waiting = [False] * workers

    @property
    def batches_done(self) -> int:
        """The batches of this segment; fewer than `open`'s if it was closed early."""
        return self.queue.stop - self.queue.first

    @property
    def is_over(self) -> bool:
        """Whether the segment has ended for every worker."""
        return self._finished and not any(self._waiting)

    def open(self, first: int, stop: int, bound: Bound | None) -> None:
        """Begin a segment of batches first..stop-1; all workers wait and have sent nothing."""
        workers = len(self._waiting)
        self.queue, self.bound = WorkQueue(first, stop, workers), bound
        self.arrived = self.longest_lead = 0
        self._waiting = [True] * workers
        self.clocks.limit_lag(bound.most if bound is not None and bound.unit == STEP else None)

    def add_gradient(self, worker: int) -> None:
        """Note that a worker's gradient has arrived, and that the worker waits."""
        self.arrived += 1
        self._waiting[worker] = True
        self.clocks.done(worker)

    def release(self) -> dict[int, Task | None]:
        """Return the workers that may continue, each with its next task; None ends its segment.

        When no task is left, workers wait until the gradients of all assigned tasks have arrived.
        Then all continue, whatever their lead.
        """
        released: dict[int, Task | None] = {}
        for worker in (worker for worker, waits in enumerate(self._waiting) if waits):
            if self._finished:
                released[worker] = None
            elif self._may_start(worker) and (task := self.queue.assign()):
                self.longest_lead = max(self.longest_lead, self.clocks.lead(worker))
                released[worker] = task
        for worker in released:
            self._waiting[worker] = False
        return released

    def close(self, at_once: bool = False) -> None:
        """End the segment early: after the current batch, or at once."""
        self.queue.close(at_once)

    def _may_start(self, worker: int) -> bool:
        bound = self.bound
        return bound is None or RULES[bound.unit](self, worker, bound.most)

    @property
    def _finished(self) -> bool:
        return self.queue.exhausted and self.arrived == self.queue.assigned


STEP = "step"
RULES: Mapping[str, Callable[[ConsistencyController, int, int], bool]] = {
    STEP: lambda controller, worker, most: controller.clocks.may_start(worker, most)
}
"""Whether a worker may begin a step, by the unit in which a `Bound` counts, and its number."""
