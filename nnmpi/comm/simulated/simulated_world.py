"""Running a program on simulated ranks.

    def main(group):
        total = numpy.ones(5)
        group.all_reduce(total, "ring")
        return total[0]

    nnmpi.simulate(main, ranks=16)          # [16.0, 16.0, ...]: the result of each rank

The program is the one that runs under mpirun, with the same results, byte for byte. Three things
differ. All ranks are in this process, so they share global variables. A seed makes the choices that
MPI leaves open. Clocks are simulated (`nnmpi.base.clock`): a computation advances them by its
processor time here, a message by its cost on a given machine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextvars import Context, copy_context
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import nnmpi.base.clock as clock
from nnmpi.backend.blas import one_blas_thread
from nnmpi.backend.memory import share_freed_memory
from nnmpi.base.errors import CommError, check_int, note_read_only, number
from nnmpi.base.ownership import SimulatedOwner, owner
from nnmpi.comm.group import Group, simulated_ranks
from nnmpi.comm.machine import Machine
from nnmpi.comm.simulated.scheduler import Faults, Scheduler, SimulatedRank
from nnmpi.comm.simulated.simulated_comm import MessageBoard, SimulatedComm
from nnmpi.comm.world import Traffic

T = TypeVar("T")
# Context variables that ranks inherit from the caller: its kernels and precision.
COMPUTING = ("nnmpi_kernels", "nnmpi_precision")


class SimulatedWorld:
    """One rank's view of the simulated world (see `comm.world.World`), and its clock."""

    library = "simulated"
    keeps_order = False  # a rank that polled a counter would never let another rank run

    def __init__(self, board: MessageBoard, local: SimulatedRank) -> None:
        self._scheduler, self._local, self._made = board.scheduler, local, board.made
        self.machine: Machine | None = board.machine
        self.comm = SimulatedComm(board, self, local, board.everyone, 0)
        self.waiter: object = None
        self.collective_s, self.traffic = 0.0, Traffic()
        self.step: int | None = None
        local.world = self

    def wait_until(self, ready: Callable[[], bool], until_s: float = inf) -> bool:
        """Return when `ready()` is true, or at a time limit.

        `ready` is called again whenever a request of this rank has completed.
        """
        local, scheduler = self._local, self._scheduler
        while True:
            before = local.completions
            if ready():
                return True
            scheduler.begin_call(local)  # other ranks' turns in it may complete a request
            if local.clock_s >= until_s:
                scheduler.end_call(local)
                return False
            if local.completions == before:
                scheduler.block(
                    local,
                    set(),
                    "something to become complete",
                    scheduler.find_lines(),
                    list,
                    until_s,
                )
            scheduler.end_call(local)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`'s result, the same object on all ranks."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Return the work, which `result()` runs.

        It then runs on the rank's thread and clock, in the same order for the same seed.
        """
        return cast(Future[T], SimpleNamespace(done=lambda: True, result=work))

    def watch(self, warning_s: float, limit_s: float, folder: str | Path | None = None) -> None:
        """Do nothing: the scheduler reports a deadlock at once."""

    def now(self) -> float:
        """Return this rank's clock."""
        return self._scheduler.now(self._local)

    def sleep(self, seconds: float) -> None:
        """Advance this rank's clock."""
        self._scheduler.sleep(self._local, seconds)

    def reproducible(self, seconds: float) -> float:
        """Return seconds if they are exact, else 0.0: measured time must not decide anything."""
        return seconds if self._scheduler.by_time else 0.0


class SimulatedRun(list[T]):
    """The results of a simulated program, by rank.

    Attributes:
        seconds: the end of the last rank, in simulated time.
        bytes: total bytes of messages between two ranks.
        busiest: (rank, bytes) of the rank that sent or received the most, including collectives.
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
    """Call `main(group)` on simulated ranks and return the result of each rank.

    Args:
        main: the program of each rank. It computes with the caller's kernels, BLAS and precision.
        ranks: number of ranks.
        machine: the cost of messages (see `comm.machine`). With None messages take no time, and all
            ranks are on one node.
        seed: decides what MPI leaves open, such as the order of ranks and the arrival of messages.
            The same program with the same seed repeats exactly.
        cpu_factor: seconds of a rank's clock per processor second that it computes here. With 0
            computing takes only the time given by `nnmpi.base.clock.sleep`: then all seconds are
            exact and reproducible, and events happen in the order of time.
        check: whether messages never received, and requests never awaited, are an error at the end.
        faults: injected faults: ranks that are killed, stopped or slow, and late messages.

    Raises:
        UsageError: for fewer than one rank, or a cpu_factor that is negative or infinite.
        CommError: for a mistake in the program's communication, with the ranks and lines: a
            deadlock, collectives that do not match, a buffer in use twice. After a rank was killed
            or stopped, with that rank and its line.
        Exception: the first exception of a rank, with its traceback and a note of the rank.

    Example:
        >>> def main(group):
        ...     x = np.full(2, float(group.rank))
        ...     group.all_reduce(x)
        ...     return x.tolist()
        >>> nnmpi.simulate(main, ranks=3)
        [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    factor = number("cpu_factor", cpu_factor)
    scheduler = Scheduler(check_int("ranks", ranks), seed, factor, faults)
    return play(main, MessageBoard(scheduler, machine or Machine.uniform(0.0, 0.0)), check)


def play(main: Callable[[Group], T], board: MessageBoard, check: bool = True) -> SimulatedRun[T]:
    """Do the work of `simulate`, with a given scheduler and machine.

    Args:
        main, check: see `simulate`.
        board: with a scheduler that has not run.
    """
    share_freed_memory()
    scheduler = board.scheduler
    ranks = len(scheduler.ranks)
    results: list[T | None] = [None] * ranks
    owners = WeakKeyDictionary[object, int]()

    def live(number: int) -> None:
        world = SimulatedWorld(board, scheduler.ranks[number])
        group = Group(world.comm, private=True)
        simulated_ranks.set(group)
        owner.set(SimulatedOwner(number, owners))
        with clock.using(world):
            results[number] = main(group)

    computing = [(var, value) for var, value in copy_context().items() if var.name in COMPUTING]

    def begin(number: int) -> None:
        # an empty context, as in a process: no recording, counting or settings of the caller
        local = Context()
        for var, value in computing:
            local.run(var.set, value)
        local.run(live, number)

    # once, not per rank: the ranks' `with` blocks would overlap and restore one another's settings
    with one_blas_thread():
        scheduler.run(begin)
    if scheduler.failure is not None:
        number, error = scheduler.failure
        note_read_only(error)
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
