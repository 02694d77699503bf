"""Barriers among the ranks of a node that cost a tenth of MPI's: each rank counts on a flag that the others watch.

    rank 0's page   [ 7 | 3 | 0 ...       one counter per barrier, 8 bytes each; only rank 0 writes here
    rank 1's page   [ 6 | 3 | 0 ...       rank 1 has not come to the first barrier's 7th crossing yet
                      |   |
               barrier 0  barrier 1

A rank that arrives raises its own counter, and is through when everybody's counter is as high. That what was written
before a flag is seen by those who see the flag holds on x86, whose processors keep stores, and loads, in order. In any
other world the ranks meet in a collective between two synchronizations of the memory instead.
"""

import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from nnmpi.comm.agreement import name_ranks
from nnmpi.comm.world import PAGE_BYTES, Comm, Request, SharedPages
from nnmpi.errors import CommError

FLAGS_PER_PAGE = PAGE_BYTES // 8
TIMEOUT_S = 600.0

# A rank looks this often before it offers its core to others; with fewer cores than ranks, the one it waits for may be
# waiting for this very core.
PATIENT_POLLS = 2000
CROWDED_POLLS = 20
# Between two looks at the clock, in which messages move on. One takes about as long as a yield.
POLLS_PER_CHECK = 64
MOST_CORES = 4096


class Watch:
    """The time limit of waiting, and what else is done while waiting. Making one is collective.

    Args:
        comm: the ranks of the node; its messages move on meanwhile.
        names: the number under which each of them is known to the user.
        timeout_s: how long to wait for other ranks.
    """

    def __init__(self, comm: Comm, names: Sequence[int], timeout_s: float) -> None:
        self.comm, self.names, self.timeout_s = comm, tuple(names), timeout_s
        self.crowded = comm.size > count_cores(comm)
        self.polls = CROWDED_POLLS if self.crowded else PATIENT_POLLS

    def until(self, barrier: "Barrier") -> None:
        """Return when all ranks have come to a barrier, offering the core to others at every look.

        Raises:
            CommError: after the time limit; names the missing ranks. A simulated world notices by itself.
        """
        world = self.comm.world
        if world.simulated:
            world.wait_until(barrier.poll)
            return
        world.waiter = barrier
        try:
            self._look(barrier)
        finally:
            world.waiter = None

    def _look(self, barrier: "Barrier") -> None:
        give_way = getattr(os, "sched_yield", lambda: time.sleep(0))
        deadline = time.monotonic() + self.timeout_s
        looks = 0
        while not barrier.poll():
            give_way()
            looks += 1
            if looks % POLLS_PER_CHECK == 0:
                self.comm.poke()
                if time.monotonic() > deadline:
                    late = self.name(barrier.missing())
                    step = self.comm.world.step
                    raise CommError(
                        f"{late} did not come to a barrier of the ranks of this node within {self.timeout_s:g} s"
                        f"{'' if step is None else f' (in step {step})'}; all ranks must run the same collectives, in "
                        "the same order"
                    )

    def name(self, ranks: Sequence[int]) -> str:
        """Return ranks of the node in words, by the numbers that the user knows."""
        return name_ranks([self.names[rank] for rank in ranks])


def count_cores(comm: Comm) -> int:
    """Return how many cores the ranks of a node may run on, all together. Collective."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = np.zeros(MOST_CORES, np.uint8)
    cores[[core for core in usable if core < MOST_CORES]] = 1
    comm.allreduce_max(cores)
    return int(cores.sum())


class FlagBarrier:
    """A barrier by counters in shared memory, for worlds that keep the order of what is written there.

    Args:
        counters: every rank's counter, in rank order, as memoryviews of one int64.
        watch: how to wait.
    """

    def __init__(self, counters: Sequence[memoryview], watch: Watch) -> None:
        rank = watch.comm.rank
        self._counters, self._watch = tuple(counters), watch
        self._own = counters[rank]
        self._others = tuple(counter for other, counter in enumerate(counters) if other != rank)
        self._goal = 0

    def start(self) -> None:
        """Say that this rank has arrived."""
        self._goal = self._own[0] = self._own[0] + 1

    def poll(self) -> bool:
        """Return whether all ranks have arrived."""
        goal = self._goal
        return all(counter[0] >= goal for counter in self._others)

    def wait(self) -> None:
        """Return when all ranks have arrived.

        Raises:
            CommError: after the time limit.
        """
        goal = self._goal
        for counter in self._others:
            polls = self._watch.polls
            while counter[0] < goal:
                polls -= 1
                if polls < 0:
                    self._watch.until(self)

    def run(self) -> None:
        """Arrive, and return when all others have."""
        own = self._own  # what start and wait do, without calling them: a barrier takes 0.2 us
        goal = self._goal = own[0] = own[0] + 1
        for counter in self._others:
            if counter[0] < goal:
                self.wait()
                return

    def waits_for(self) -> str:
        """Return what it waits for, in words."""
        return f"crossing {self._goal} of a barrier in shared memory, for {self._watch.name(self.missing())}"

    def missing(self) -> list[int]:
        """Return which ranks of the node have not arrived."""
        return [rank for rank, counter in enumerate(self._counters) if counter[0] < self._goal]


class CollectiveBarrier:
    """A barrier by a sum that nobody needs, between two synchronizations of the memory: right in any world.

    It has a communicator of its own, so that several barriers can be under way in any order. The counters only tell who
    is missing.

    Args:
        counters: as `FlagBarrier` has them.
        sync: synchronizes this rank's view of the shared memory.
        watch: how to wait.
    """

    def __init__(self, counters: Sequence[memoryview], sync: Callable[[], None], watch: Watch) -> None:
        self._counters, self._sync, self._watch = tuple(counters), sync, watch
        self._own = counters[watch.comm.rank]
        self._comm = watch.comm.duplicate()
        self._sum = np.zeros(1, np.int64)  # one element: a sum of none need not wait for anybody
        self._requests: list[Request] = []

    def start(self) -> None:
        """Say that this rank has arrived."""
        self._sync()
        self._own[0] += 1
        self._requests = [self._comm.iallreduce(self._sum)]

    def poll(self) -> bool:
        """Return whether all ranks have arrived."""
        if not self._comm.test_all(self._requests):
            return False
        self._sync()
        return True

    def wait(self) -> None:
        """Return when all ranks have arrived.

        Raises:
            CommError: after the time limit.
        """
        self._watch.until(self)

    def run(self) -> None:
        """Arrive, and return when all others have."""
        self.start()
        self.wait()

    def free(self) -> None:
        """Give the communicator back. Collective over the node."""
        self._comm.free()

    def waits_for(self) -> str:
        """Return what it waits for, in words."""
        return f"crossing {self._own[0]} of a barrier in shared memory"

    def missing(self) -> list[int]:
        """Return which ranks of the node have not arrived."""
        self._sync()
        return [rank for rank, counter in enumerate(self._counters) if counter[0] < self._own[0]]


Barrier = FlagBarrier | CollectiveBarrier


class Flags:
    """As many barriers as are asked for, of the ranks of one node. Collective: all ask in the same order.

    Args:
        watch: how to wait, and for whom.
        ordered: whether what is written is seen in the order of writing, so that counters will do.
    """

    def __init__(self, watch: Watch, ordered: bool) -> None:
        self._watch = watch
        self._ordered = ordered
        self._pages: list[SharedPages] = []
        self._made: list[Barrier] = []

    def barrier(self, sync: Callable[[], None]) -> Barrier:
        """Return a new barrier; `sync` synchronizes the memory that it guards, where that is needed.

        Raises:
            DeviceError: when there is no shared memory for another page of flags.
        """
        page, place = divmod(len(self._made), FLAGS_PER_PAGE)
        if page == len(self._pages):
            self._pages.append(self._watch.comm.share_pages(PAGE_BYTES))
        views = [memoryview(part).cast("B").cast("q") for part in self._pages[page].parts]  # type: ignore[arg-type]
        counters, watch = [view[place : place + 1] for view in views], self._watch
        made = FlagBarrier(counters, watch) if self._ordered else CollectiveBarrier(counters, sync, watch)
        self._made.append(made)
        return made

    def free(self) -> None:
        """Give the pages and communicators back. Collective over the node."""
        for barrier in self._made:
            if isinstance(barrier, CollectiveBarrier):
                barrier.free()
        for page in self._pages:
            page.free()
        self._pages = []
        self._made = []
