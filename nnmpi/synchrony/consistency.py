"""The consistency controller of a server: which worker waits, which one may go on, and with which part of which batch.

        worker            controller                         worker            controller, bound 0
          | arrive ------->| may start, a task is left         A | arrive ------>| A leads by 1: it waits
          |<------- Grant  |                                   B | arrive ------>| nobody leads any more
          | computes       |                                   A |<----- Grant   |
          | arrive ------->| no task is left: it waits         B |<----- Grant   |
          |<- Grant(over)  | when all gradients have arrived

    Task                     one part of one batch: what a worker computes in one step
    WorkQueue                assigns the tasks of a segment in order
    WorkerClocks             how many steps each worker has done, and who is too far ahead
    ConsistencyController    both together, with backup workers and the end of a segment

Where there are several servers, the first one assigns the tasks. The others decide by their clocks alone, and the first
one tells them how many gradients there are in all.

With backup workers (Chen et al., "Revisiting distributed synchronous SGD", 2016) a round ends with the first
(workers - backup) gradients of its batch. Gradients that come later are dropped, and their workers go on with the batch
that is under way by then. Everybody's clock counts rounds in this case, and not the worker's own steps.
"""

from dataclasses import dataclass

from nnmpi.errors import CommError


@dataclass(frozen=True, order=True, slots=True)
class Task:
    """What a worker computes in one step: the gradient of one part of one batch.

    Attributes:
        batch: the number of the global batch in its epoch.
        part: which of the batch's parts, of which there is one per worker; it may have no rows.
    """

    batch: int
    part: int


class WorkQueue:
    """Assigns each part of the batches first..stop-1 once, in order, to whoever is free.

        3 parts     (0,0) (0,1) (0,2)   (1,0) (1,1) (1,2)   (2,0) ...
                                               ^ next         close():     (1,2) is the last task, stop becomes 2
                                                              close(True): no task is left, stop becomes 1
    Args:
        first, stop: the batches; there may be none.
        parts: of each batch, at least 1.

    Attributes:
        stop: the batch at which it stops; lower after `close`.
        assigned: how many tasks were assigned.
        unassigned: how many parts of batches that were begun will never be assigned.
    """

    def __init__(self, first: int, stop: int, parts: int) -> None:
        self.first, self.stop, self.parts = first, max(first, stop), parts
        self.assigned = self.unassigned = 0
        self._batch, self._part = first, 0

    @property
    def exhausted(self) -> bool:
        """Whether no task is left."""
        return self._batch >= self.stop

    def assign(self) -> Task | None:
        """Return the next task, or None if none is left."""
        if self.exhausted:
            return None
        task = Task(self._batch, self._part)
        self.assigned += 1
        self._part += 1
        if self._part == self.parts:
            self._batch, self._part = self._batch + 1, 0
        return task

    def skip(self) -> None:
        """Assign no more of a batch that was begun: it counts as done, and its remaining parts as unassigned."""
        if self._part:
            self.unassigned += self.parts - self._part
            self._batch, self._part = self._batch + 1, 0

    def close(self, at_once: bool = False) -> None:
        """Assign nothing after the batch that was begun; or nothing at all, and then `stop` leaves that batch out."""
        if self.exhausted:
            return
        if at_once:
            self.stop = self._batch
            self.unassigned += self.parts - self._part if self._part else 0
        else:
            self.stop = self._batch + (self._part > 0)


class WorkerClocks:
    """How many steps each worker has done. A worker may begin a step if it is at most `bound` ahead of the slowest.

    This is the stale synchronous parallel rule of Ho et al., "More effective distributed ML via a stale synchronous
    parallel parameter server" (2013).

        steps     7   5   6         slowest 5
        lead      2   0   1         bound 1: workers 1 and 2 may begin a step, worker 0 waits for worker 1

    Args:
        workers: at least 1.

    Attributes:
        steps: the steps that each worker has done, or counts as having done (see `limit_lag`).
    """

    def __init__(self, workers: int) -> None:
        self.steps = [0] * workers

    @property
    def slowest(self) -> int:
        """The steps of the worker that has done the fewest."""
        return min(self.steps)

    def lead(self, worker: int) -> int:
        """Return how many steps a worker is ahead of the slowest."""
        return self.steps[worker] - self.slowest

    def may_start(self, worker: int, bound: int | None) -> bool:
        """Return whether a worker may begin a step; without a bound it always may."""
        return bound is None or self.lead(worker) <= bound

    def limit_lag(self, bound: int | None) -> None:
        """Move slow workers' step counts up to what this bound allows; done where all ranks meet.

        The bound may have shrunk since they fell behind, and otherwise all would wait until they had caught up. Under a
        bound above 0 a worker that waits has a lead of at most bound + 1, so the counts end at max - (bound + 1); under
        bound 0 all workers have done the same number of steps when they meet, so they end at max.
        """
        if bound is not None:
            least = max(self.steps) - (bound + 1 if bound else 0)
            self.steps[:] = [max(steps, least) for steps in self.steps]

    def done(self, worker: int) -> None:
        """Count one more step of a worker."""
        self.steps[worker] += 1


@dataclass(frozen=True, slots=True)
class Grant:
    """The permission for a worker to go on.

    Attributes:
        worker: which one.
        task: what it computes next; None from a controller without a work queue, and when the segment is over.
        over: whether the segment is over for this worker.
    """

    worker: int
    task: Task | None
    over: bool


class ConsistencyController:
    """Decides who may go on in a segment: the batches between two synchronization points of all ranks.

    Args:
        workers: how many there are, at least 1.
        backup: how many gradients of each batch are not waited for: fewer than the workers. It needs a bound of 0 and
            a controller that assigns tasks.
        assigns: whether tasks are assigned here: on the first server alone.

    Attributes:
        clocks: the workers' steps since the start of the run; see `WorkerClocks.limit_lag`.
        queue: assigns the segment's tasks; None where another server's controller does.
        bound: the largest lead in this segment; None for any.
        arrived: the gradients that came in this segment, including those that were dropped.
        dropped: the gradients that came too late.
        longest_lead: the largest lead with which a worker has begun a step in this segment.
        update_due: whether the gradients that wait make an update now, before the grants of `release` are sent.
    """

    def __init__(self, workers: int, backup: int = 0, assigns: bool = True) -> None:
        self.workers, self.backup = workers, backup
        self.clocks = WorkerClocks(workers)
        self.queue: WorkQueue | None = None
        self.bound: int | None = 0
        self.arrived = self.dropped = self.longest_lead = 0
        self.update_due = False
        self._assigns = assigns
        self._total: int | None = None
        self._waiting = [False] * workers
        self._tasks: list[Task | None] = [None] * workers
        self._taken: set[int] = set()  # with backup workers: whose gradients this round has
        self._idle: set[int] = set()  # who may go on, but no task was left
        self._round = 0

    @property
    def unassigned(self) -> int:
        """The parts of begun batches that nobody will compute."""
        return 0 if self.queue is None else self.queue.unassigned

    @property
    def batches_done(self) -> int:
        """The batches of this segment that are done, where tasks are assigned: all, unless it was closed early."""
        return 0 if self.queue is None else self.queue.stop - self.queue.first

    @property
    def over(self) -> bool:
        """Whether the segment is over and everybody who waited has got a grant that says so."""
        return self._finished and not any(self._waiting)

    def open(self, first: int, stop: int, bound: int | None) -> None:
        """Begin a segment, in which all workers wait and have sent nothing yet.

        Args:
            first, stop: the batches first..stop-1.
            bound: the largest lead; None for any.
        """
        self.queue = WorkQueue(first, stop, self.workers) if self._assigns else None
        self.bound, self._round, self._total = bound, first, None
        self.arrived = self.dropped = self.longest_lead = 0
        self._waiting = [True] * self.workers
        self.clocks.limit_lag(bound)
        self._taken.clear()
        self._idle.clear()

    def arrive(self, worker: int) -> bool:
        """Note that a worker's gradient is here and that the worker waits; return False if it came too late to be used.

        Raises:
            CommError: for a worker that has no grant.
        """
        if self._waiting[worker]:
            raise CommError(f"a gradient came from worker {worker}, which still waits for the reply to its last one")
        self.arrived += 1
        self._waiting[worker] = True
        if not self.backup:
            self.clocks.done(worker)
            return True
        task = self._tasks[worker]
        if task is None or task.batch != self._round or self._is_round_full:
            self.dropped += 1
            return False
        self._taken.add(worker)
        return True

    def release(self) -> list[Grant]:
        """Return grants for all who may go on now, in the order of workers; and set `update_due`.

        When no tasks are left, workers wait until the gradients of all assigned tasks have arrived; then all get a
        grant that says `over`, whatever their lead. Meanwhile gradients are applied as always: an update is due
        whenever a worker might go on, though it gets no task, so that every server does the same updates.

        Raises:
            CommError: when a worker would be further ahead than the bound; when there are more gradients than the
                server that assigns tasks has counted.
        """
        ends_round = bool(self.backup) and self._is_round_full
        if ends_round:
            self._end_round()
        if self._finished:
            waiting = [worker for worker in range(self.workers) if self._waiting[worker]]
            self._waiting = [False] * self.workers
            self.update_due = bool(waiting)
            return [Grant(worker, None, over=True) for worker in waiting]
        # Servers without a work queue would release a worker that finds no task here, and would update then. So update
        # here as well, once for each such worker: all servers must do equally many updates.
        idle = len(self._idle)
        grants = self._grant()
        self.update_due = ends_round if self.backup else bool(grants) or len(self._idle) > idle
        return grants

    def close(self, at_once: bool = False) -> None:
        """End the segment early: after the batch that was begun, or at once. It does nothing without a work queue."""
        if self.queue is not None:
            self.queue.close(at_once)

    def end(self, total: int) -> None:
        """Learn, where another server assigns the tasks, how many gradients there are in this segment in all."""
        self._total = total

    @property
    def _is_round_full(self) -> bool:
        return len(self._taken) == self.workers - self.backup

    @property
    def _finished(self) -> bool:
        """Whether no worker computes any more, and none will."""
        if self.queue is not None:
            return self.queue.exhausted and self.arrived == self.queue.assigned
        if self._total is not None and self.arrived > self._total:
            raise CommError(f"{self.arrived} gradients came in a segment of {self._total}")
        return self.arrived == self._total

    def _end_round(self) -> None:
        """Leave the rest of the batch, and count the round for everybody."""
        if self.queue is not None:
            self.queue.skip()
        self._round += 1
        self._taken.clear()
        for worker in range(self.workers):
            self.clocks.done(worker)

    def _grant(self) -> list[Grant]:
        """Let those go on who may, as long as there are tasks; who may, but gets none, is idle from now on."""
        grants = []
        for worker in range(self.workers):
            waits = self._waiting[worker] and worker not in self._taken and worker not in self._idle
            if not waits or not self.clocks.may_start(worker, self.bound):
                continue
            task = None
            if self.queue is not None:
                task = self.queue.assign()
                if task is None:
                    self._idle.add(worker)
                    continue
            self._begin(worker, task)
            grants.append(Grant(worker, task, over=False))
        return grants

    def _begin(self, worker: int, task: Task | None) -> None:
        """Note that a worker begins a step, and check once more that it may."""
        self._waiting[worker] = False
        self._tasks[worker] = task
        lead = self.clocks.lead(worker)
        # `may_start` has been asked, but a worker too far ahead trains silently on wrong weights: so ask what it is.
        if self.bound is not None and lead > self.bound:
            raise CommError(f"worker {worker} would begin a step {lead} steps ahead of the slowest, not {self.bound}")
        self.longest_lead = max(self.longest_lead, lead)
