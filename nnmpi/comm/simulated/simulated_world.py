"""Running a program on simulated ranks.

    def main(group):
        total = numpy.ones(5)
        group.all_reduce(total, "ring")
        return total[0]

    nnmpi.simulate(main, ranks=16)          # [16.0, 16.0, ...]: what each rank returned

The program is the one that runs under mpirun, and so are its results, byte for byte. What differs:
all of it is in this process, so that ranks see one another's global variables; a seed decides about
whatever MPI leaves open; and clocks are simulated (`nnmpi.clock`), by what computing takes here and
what messages cost on a given machine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import Context, copy_context
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

import nnmpi.clock as clock
from nnmpi.backend.blas import one_blas_thread
from nnmpi.backend.memory import share_freed_memory
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Machine
from nnmpi.comm.simulated.scheduler import Faults, Scheduler, SimulatedRank, find_lines
from nnmpi.comm.simulated.simulated_comm import MessageBoard, SimulatedComm
from nnmpi.comm.world import BackgroundWork
from nnmpi.errors import CommError, UsageError

T = TypeVar("T")
# What says how to compute: ranks do it as who simulates them does (names of context variables).
COMPUTING = ("nnmpi_kernels", "nnmpi_precision")


class SimulatedWorld:
    """One rank's view of the simulated world (see `comm.world.World`), and its clock."""

    library = "simulated"
    simulated = True
    keeps_order = False  # a rank that watches a counter would never let another one raise it

    def __init__(
        self,
        board: MessageBoard,
        own: SimulatedRank,
        comm_type: type[SimulatedComm] = SimulatedComm,
    ) -> None:
        self._scheduler, self._own, self._made = board.scheduler, own, board.made
        self.machine: Machine | None = board.machine
        self.comm = comm_type(board, self, own, range(len(board.scheduler.ranks)), 0)
        self.waiter: object = None
        self.met_s = 0.0
        self.step: int | None = None
        own.world = self

    def wait_until(self, ready: Callable[[], bool], until_s: float = inf) -> bool:
        """Return when `ready()` is true, or at a time limit.

        It is asked again whenever a request of this rank has become complete.
        """
        local, scheduler = self._own, self._scheduler
        while True:
            news = local.news
            if ready():
                return True
            scheduler.enter(local)  # in which something may become complete
            if local.clock_s >= until_s:
                scheduler.leave(local)
                return False
            if local.news == news:
                scheduler.block(
                    local, set(), "something to become complete", find_lines(), list, until_s
                )
            scheduler.leave(local)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make()` returns, the same object on all ranks."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def beside(self, work: Callable[[], T]) -> BackgroundWork[T]:
        """Return the work, which is done when somebody asks for its end.

        So the rank's own thread does it, by its clock, and in the same order whenever a seed is
        repeated.
        """
        return cast(BackgroundWork[T], SimpleNamespace(done=lambda: True, result=work))

    def watch(self, warning_s: float, limit_s: float, folder: Path | None = None) -> None:
        """Do nothing: when nobody can ever continue, the scheduler knows at once."""

    def now(self) -> float:
        """Return how late it is on this rank."""
        return self._scheduler.now(self._own)

    def sleep(self, seconds: float) -> None:
        """Let time pass on this rank."""
        self._scheduler.sleep(self._own, seconds)

    def reproducible(self, seconds: float) -> float:
        """Return seconds if they are exact, else 0.0: decisions must not depend on measured
        time.
        """
        return seconds if self._scheduler.by_time else 0.0


class SimulatedRun(list[T]):
    """What each rank of a simulated program returned.

    Attributes:
        seconds: when the last rank ended, by simulated time.
        bytes: that were sent between two ranks.
        busiest: the rank that sent or received the most bytes, collectives counted in, and how
            many.
    """

    seconds = 0.0
    bytes = 0
    busiest = 0, 0


def simulate(
    main: Callable[[Group], T],
    ranks: int = 16,
    machine: Machine | None = None,
    seed: int = 0,
    cpu_factor: float = 1.0,
    check: bool = True,
    faults: Faults | None = None,
) -> SimulatedRun[T]:
    """Call `main(group)` on simulated ranks and return what each rank returned.

    Args:
        main: the program of each rank. It computes with the kernels, BLAS and precision that are in
            use here.
        ranks: how many.
        machine: what messages cost (see `comm.machine`); None: they take no time, and all ranks are
            on one node.
        seed: decides about all that MPI leaves open: who goes first, when messages arrive. The same
            program with the same seed does the same.
        cpu_factor: how many seconds of a rank's clock go by for each second of processor time that
            it computes here. With 0 computing takes no time but what `nnmpi.clock.sleep` gives it:
            then all seconds are exact and reproducible, and what happens first is what is earlier.
        check: whether messages that nobody received, and requests that nobody waited for, are an
            error at the end.
        faults: what goes wrong: ranks that are killed, stop or are slow, and late messages.

    Raises:
        UsageError: for less than one rank.
        CommError: for a mistake in the program's communication: ranks that wait for one another for
            ever, collectives that do not match, buffers that are used twice. It names the ranks and
            the lines. After a rank was killed or has stopped: which one, and where.
        Exception: the first that a rank raised, with its own traceback and a note of its rank.

    Example:
        >>> def main(group):
        ...     x = np.full(2, float(group.rank))
        ...     group.all_reduce(x)
        ...     return x.tolist()
        >>> nnmpi.simulate(main, ranks=3)
        [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    if ranks < 1:
        raise UsageError(f"{ranks} ranks cannot be simulated; give 1 or more")
    if not 0 <= cpu_factor < float("inf"):
        raise UsageError(f"a cpu_factor of {cpu_factor} means nothing; give 0 or more")
    scheduler = Scheduler(ranks, seed, cpu_factor, faults)
    return play(main, MessageBoard(scheduler, machine or Machine.uniform(0.0, 0.0)), check)


def play(
    main: Callable[[Group], T],
    board: MessageBoard,
    check: bool = True,
    comm_type: type[SimulatedComm] = SimulatedComm,
) -> SimulatedRun[T]:
    """Do what `simulate` does, with a scheduler, a machine and calls of your own.

    Args:
        main, check: as there.
        board: with the scheduler, of which no rank has begun.
        comm_type: what the ranks communicate by.
    """
    share_freed_memory()
    scheduler = board.scheduler
    ranks = len(scheduler.ranks)
    results: list[T | None] = [None] * ranks

    def live(number: int) -> None:
        world = SimulatedWorld(board, scheduler.ranks[number], comm_type)
        with clock.using(world):
            results[number] = main(Group(world.comm, private=True))

    computing = [(var, value) for var, value in copy_context().items() if var.name in COMPUTING]

    def begin(number: int) -> None:
        # as in a process of its own: nothing of what the caller records, counts or reads
        local = Context()
        for var, value in computing:
            local.run(var.set, value)
        local.run(live, number)

    with one_blas_thread():  # here and not in the ranks, whose blocks would overlap
        scheduler.run(begin)
    if scheduler.failure is not None:
        number, error = scheduler.failure
        if number >= 0:
            error.add_note(
                f"(on rank {number} of {ranks} simulated ones, with seed {scheduler.seed})"
            )
        raise error
    leftovers = board.find_leftovers() if check else []
    if leftovers:
        raise CommError("the ranks have ended, but " + "; ".join(leftovers))
    run = SimulatedRun(cast(list[T], results))
    run.seconds, run.bytes = max(rank.clock_s for rank in scheduler.ranks), board.bytes
    most = [*map(max, board.sent, board.received)]
    run.busiest = most.index(max(most)), max(most)
    return run
