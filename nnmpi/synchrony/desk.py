"""The desk of a server: who waits, who may go on, and with which part of which batch.

        worker            desk                               worker            desk, bound 0
          | arrive ------->| may start, there is a unit        A | arrive ------>| lead 1: waits
          |<------- Grant  |                                   B | arrive ------>| lead 0 for both
          | computes       |                                   A |<----- Grant   |
          | arrive ------->| nothing left: waits               B |<----- Grant   |
          |<- Grant(over)  | when all gradients have arrived

Of several servers one deals the units; the others decide by their clocks alone and learn from it how many gradients
there are in all.

With backup workers (Chen et al., "Revisiting distributed synchronous SGD", 2016) a round is over with the first
workers - backup gradients of its batch; those that come later are dropped, and their workers go on with the batch that
is under way. Everybody's clock counts rounds then.
"""

from dataclasses import dataclass

from nnmpi.errors import CommError
from nnmpi.synchrony.clocks import Clocks
from nnmpi.synchrony.dealer import Dealer, Unit


@dataclass(frozen=True, slots=True)
class Grant:
    """A worker may go on.

    Attributes:
        worker: which one.
        unit: what it does next; None on a desk that does not deal, and when the segment is over.
        over: whether the segment is over for this worker.
    """

    worker: int
    unit: Unit | None
    over: bool


class Desk:
    """Decides who may go on in a segment: batches between two meetings of all ranks.

    Args:
        workers: how many there are, at least 1.
        backup: how many gradients of each batch are not waited for, less than the workers; for a bound of 0 and a
            desk that deals.
        deals: whether units are dealt here.

    Attributes:
        clocks: the workers' steps since the start of the run; see `Clocks.meet`.
        dealer: what deals the segment's units, None where that is another desk.
        bound: the largest lead of the segment, None for any.
        arrived: the gradients that came in this segment, dropped ones too.
        dropped: those of them that came too late.
        longest_lead: the largest lead with which a worker has begun a step in this segment.
        update_due: whether the gradients that wait make an update now, before the last grants are given out.
    """

    def __init__(self, workers: int, backup: int = 0, deals: bool = True) -> None:
        self.workers, self.backup = workers, backup
        self.clocks = Clocks(workers)
        self.dealer: Dealer | None = None
        self.bound: int | None = 0
        self.arrived = self.dropped = self.longest_lead = 0
        self.update_due = False
        self._deals = deals
        self._total: int | None = None
        self._waiting = [False] * workers
        self._units: list[Unit | None] = [None] * workers
        self._taken: set[int] = set()  # with backup: whose gradients the round has
        self._idle: set[int] = set()  # who might go on, if something were left to deal
        self._round = 0

    @property
    def undealt(self) -> int:
        """The parts of begun batches that nobody will do."""
        return 0 if self.dealer is None else self.dealer.undealt

    @property
    def batches_done(self) -> int:
        """The batches of this segment that are dealt with, on a desk that deals: all, unless it was closed early."""
        return 0 if self.dealer is None else self.dealer.stop - self.dealer.first

    @property
    def over(self) -> bool:
        """Whether the segment is over and everybody who waited was told."""
        return self._finished and not any(self._waiting)

    def open(self, first: int, stop: int, bound: int | None) -> None:
        """Begin a segment of batches first..stop-1: all workers wait, and have sent nothing yet."""
        self.dealer = Dealer(first, stop, self.workers) if self._deals else None
        self.bound, self._round, self._total = bound, first, None
        self.arrived = self.dropped = self.longest_lead = 0
        self._waiting = [True] * self.workers
        self.clocks.meet(bound)
        self._taken.clear()
        self._idle.clear()

    def arrive(self, worker: int) -> bool:
        """Note that a worker's gradient is here and that it waits; return False if it came too late to be used.

        Raises:
            CommError: for a worker that was not told to go on.
        """
        if self._waiting[worker]:
            raise CommError(f"a gradient came from worker {worker}, which still waits for the reply to its last one")
        self.arrived += 1
        self._waiting[worker] = True
        if not self.backup:
            self.clocks.done(worker)
            return True
        unit = self._units[worker]
        if unit is None or unit.batch != self._round or self._is_round_full:
            self.dropped += 1
            return False
        self._taken.add(worker)
        return True

    def release(self) -> list[Grant]:
        """Return who may go on now, in the order of workers; see `update_due`.

        Where nothing is left to deal, workers wait until all units that were dealt have arrived; then the segment is
        over for everybody who waits, whatever its lead. Updates do not wait for that: an update is due whenever
        somebody might go on, so that the last gradients are used like all others, and alike on all servers.

        Raises:
            CommError: when a worker would be further ahead than the bound, or there are more gradients than the
                server that deals has counted.
        """
        ends_round = bool(self.backup) and self._is_round_full
        if ends_round:
            self._end_round()
        if self._finished:
            waiting = [worker for worker in range(self.workers) if self._waiting[worker]]
            self._waiting = [False] * self.workers
            self.update_due = bool(waiting)
            return [Grant(worker, None, over=True) for worker in waiting]
        idle = len(self._idle)
        grants = self._grant()
        self.update_due = ends_round if self.backup else bool(grants) or len(self._idle) > idle
        return grants

    def close(self, at_once: bool = False) -> None:
        """End the segment early: after the batch that was begun, or at once. Does nothing on a desk that deals not."""
        if self.dealer is not None:
            self.dealer.close(at_once)

    def end(self, total: int) -> None:
        """Learn, on a desk that does not deal, how many gradients there are in this segment in all."""
        self._total = total

    @property
    def _is_round_full(self) -> bool:
        return len(self._taken) == self.workers - self.backup

    @property
    def _finished(self) -> bool:
        """Whether no worker is at work any more, and none will be."""
        if self.dealer is not None:
            return self.dealer.exhausted and self.arrived == self.dealer.dealt
        if self._total is not None and self.arrived > self._total:
            raise CommError(f"{self.arrived} gradients came in a segment of {self._total}")
        return self.arrived == self._total

    def _end_round(self) -> None:
        """Leave the rest of the batch, and count the round for everybody."""
        if self.dealer is not None:
            self.dealer.skip()
        self._round += 1
        self._taken.clear()
        for worker in range(self.workers):
            self.clocks.done(worker)

    def _grant(self) -> list[Grant]:
        """Let those go on who may, as long as there are units; who may, but gets none, is idle from now on."""
        grants = []
        for worker in range(self.workers):
            waits = self._waiting[worker] and worker not in self._taken and worker not in self._idle
            if not waits or not self.clocks.may_start(worker, self.bound):
                continue
            unit = None
            if self.dealer is not None:
                unit = self.dealer.deal()
                if unit is None:
                    self._idle.add(worker)
                    continue
            self._begin(worker, unit)
            grants.append(Grant(worker, unit, over=False))
        return grants

    def _begin(self, worker: int, unit: Unit | None) -> None:
        """Note that a worker begins a step, and check once more that it may."""
        self._waiting[worker] = False
        self._units[worker] = unit
        lead = self.clocks.lead(worker)
        if self.bound is not None and lead > self.bound:
            raise CommError(f"worker {worker} would begin a step {lead} steps ahead of the slowest, not {self.bound}")
        self.longest_lead = max(self.longest_lead, lead)
