"""Arrays shared by all ranks of a node: gradients there are summed without messages.

    allocate   | rank 0's array | rank 1's array | rank 2's array |      each rank gets its own, and views of all
    common     | one array                       |                       all ranks get the same one

Everything here is collective over the group, except where a docstring excludes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.comm.agreement import Communicator, agreed
from nnmpi.comm.buffers import Buffer
from nnmpi.comm.execution import Calls, Stages
from nnmpi.comm.world import PAGE_BYTES, SharedPages
from nnmpi.errors import DeviceError, ShapeError, UsageError, name_ranks

# Barriers among the ranks of a node that cost a tenth of MPI's: each rank counts on a flag that the
# others watch.
#
#     rank 0's page   [ 7 | 3 | 0 ...       one counter per barrier, 8 bytes each; only rank 0 writes here
#     rank 1's page   [ 6 | 3 | 0 ...       rank 1 has not come to the first barrier's 7th crossing yet
#                       |   |
#                barrier 0  barrier 1
#
# A rank that arrives raises its own counter, and is through when everybody's counter is as high.
# That what was written before a flag is seen by those who see the flag holds on x86, whose
# processors keep stores, and loads, in order. In any other world the ranks meet in a collective
# between two synchronizations of the memory instead.

FLAGS_PER_PAGE = PAGE_BYTES // 8

# A rank looks this often before it offers its core to others; with fewer cores than ranks, the one
# it waits for may be waiting for this very core.
PATIENT_POLLS = 2000
CROWDED_POLLS = 20
# Until messages move on once, which takes about as long as a yield.
POLLS_PER_POKE = 64


class FlagBarrier:
    """A barrier by counters in shared memory, for worlds that preserve the order of writes.

    Args:
        counters: every rank's counter, in rank order, as memoryviews of one int64.
        memory: of the node whose ranks meet.
    """

    def __init__(self, counters: Sequence[memoryview], memory: SharedMemory) -> None:
        rank = memory.rank
        self._counters, self._memory = tuple(counters), memory
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
        """Return when all ranks have arrived."""
        goal = self._goal
        for counter in self._others:
            polls = self._memory.polls
            while counter[0] < goal:
                polls -= 1
                if polls < 0:
                    self._memory.wait_for(self)

    def free(self) -> None:
        """Do nothing: the counters are the memory's."""

    def run(self) -> None:
        """Arrive, and return when all others have."""
        local = self._own  # what start and wait do, without calling them: a barrier takes 0.2 us
        goal = self._goal = local[0] = local[0] + 1
        for counter in self._others:
            if counter[0] < goal:
                self.wait()
                return

    def waits_for(self) -> str:
        """Return what it waits for, as text."""
        return (
            f"crossing {self._goal} of a barrier in shared memory, for {name_ranks(self.missing())}"
        )

    def missing(self) -> list[int]:
        """Return which ranks of the group have not arrived."""
        pairs = zip(self._memory.members, self._counters, strict=True)
        return [rank for rank, counter in pairs if counter[0] < self._goal]


class CollectiveBarrier(Stages):
    """A barrier by a dummy sum between two memory barriers, valid in any world.

    It has a communicator of its own, so that several barriers can be under way in any order.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._comm = memory.node.duplicate()
        number = np.zeros(1, np.int64)  # one element: a sum of none need not wait for anybody
        crossing = Calls(self._comm, [partial(self._comm.iallreduce, number)])
        super().__init__([memory.sync, crossing, memory.sync], "a barrier in shared memory")

    def free(self) -> None:
        """Give the communicator back. Collective over the node."""
        self._comm.free()


LINE_BYTES = 64
MAIN = -1  # the tag of the barrier that everybody uses


class SharedMemory:
    """What the ranks of each node of a group share.

    The arrays live until `free`, or the end of the process: nothing has to be freed before that.

    Args:
        group: the ranks; those on one node share memory.

    Attributes:
        group: the ranks.
        node: the communicator of this node's ranks, in the group's order.
        rank, size: this rank's number on its node, and the number of ranks there.
        node_of: the number of each group rank's node.
        members: the group's numbers of this node's ranks, in their order here.
        polls: how many times a rank looks before it offers its core to others.
        across: the communicator between nodes, of the ranks that have the same number on theirs;
            `rank` 0 are leaders. None where there is one node.
        closed: whether it was closed, or freed: then it makes no arrays and no barriers any more.

    Raises:
        DeviceError: on all ranks, when there is no shared memory on one of their nodes.
    """

    def __init__(self, group: Communicator) -> None:
        self.group, self._ordered = group, group.comm.world.keeps_order
        self.node_of = tuple(group.nodes())
        several = len(set(self.node_of)) > 1
        self._owns_node = (
            several or not self._ordered
        )  # and gives it back; whether it is the group's is not to be seen later
        # where nothing is sent on it; and communicators are scarce: MPICH has 2048
        self.node = group.comm
        if self._owns_node:
            self.node = group.comm.split(self.node_of[group.rank], group.rank)
        self.rank, self.size = self.node.rank, self.node.size
        self.across = group.comm.split(self.rank, group.rank) if several else None
        self.members = tuple(
            item for item, node in enumerate(self.node_of) if node == self.node_of[group.rank]
        )
        usable = (
            os.sched_getaffinity(0)
            if hasattr(os, "sched_getaffinity")
            else range(os.cpu_count() or 1)
        )
        everyones = group.gather(sorted(usable))  # the cores that each rank may run on
        cores = {core for rank in self.members for core in everyones[rank]}
        self.polls = CROWDED_POLLS if self.size > len(cores) else PATIENT_POLLS
        self._pages: list[SharedPages] = []  # of the barriers' flags
        self._barriers: dict[int, FlagBarrier | CollectiveBarrier] = {}
        self._windows: dict[int, SharedPages] = {}  # by allocation number; twins have the same
        self.closed = False
        try:
            self.barrier_of(MAIN)
        except DeviceError:
            self.close()
            raise

    def twin(self, group: Communicator) -> SharedMemory:
        """Return the same memory for a duplicate of the group, with barriers of its own.

        Raises:
            UsageError: when it was closed.
        """
        self._check_open()
        twin = SharedMemory(group)
        twin._windows = self._windows
        return twin

    # ---- arrays ----

    def allocate(self, elements: int, dtype: DTypeLike) -> Buffer:
        """Return (elements,) zeros of this rank, which its node's other ranks see in `parts`.

        Ranks may ask for different lengths.

        Raises:
            DeviceError: on all ranks, when it does not fit on one of the nodes.
            UsageError: when the memory was closed.
        """
        kind = np.dtype(dtype)
        return self._make(elements * kind.itemsize).parts[self.rank].view(kind)

    def common_all(self, arrays: Iterable[tuple[int, DTypeLike]]) -> list[Buffer]:
        """Return (elements,) zeros common to all ranks of the node, for each pair.

        They are in one allocation, and begin at multiples of 64 bytes.

        Raises:
            DeviceError, UsageError: as in `allocate`.
        """
        kinds = [(elements, np.dtype(dtype)) for elements, dtype in arrays]
        lines = [-(-elements * kind.itemsize // LINE_BYTES) for elements, kind in kinds]
        *starts, end = accumulate((LINE_BYTES * count for count in lines), initial=0)
        part = self._make(end if self.rank == 0 else 0).parts[0]
        return [
            part[start : start + elements * kind.itemsize].view(kind)
            for start, (elements, kind) in zip(starts, kinds, strict=True)
        ]

    def place(self, array: Buffer) -> tuple[int, int] | None:
        """Return an array's allocation and first byte here; None if it is elsewhere (local)."""
        address = array.ctypes.data
        for number, window in self._windows.items():
            start = address - window.parts[self.rank].ctypes.data
            if start >= 0 and start + array.nbytes <= window.parts[self.rank].nbytes:
                return number, start
        return None

    def parts(self, array: Buffer) -> list[Buffer]:
        """Return every rank's array of the same allocation, sliced alike, in rank order (local).

        Raises:
            ShapeError: for an array that was not allocated here.
        """
        number, start = self._find(array)
        parts = self._windows[number].parts
        return [part[start : start + array.nbytes].view(array.dtype) for part in parts]

    # ---- waiting for one another ----

    def barrier(self) -> None:
        """Return when all ranks of the node have come here; what they wrote before is seen then.

        Raises:
            UsageError: when the memory was closed.
        """
        self._check_open()
        self._barriers[MAIN].run()

    def barrier_of(self, tag: int) -> FlagBarrier | CollectiveBarrier:
        """Return the node's barrier with this tag; collective where the tag is new.

        Raises:
            UsageError: when the memory was closed.
            DeviceError: when there is no shared memory for another page of flags.
        """
        self._check_open()
        if tag not in self._barriers:
            with agreed(self.group):
                number = len(self._barriers)
                self._barriers[tag] = (
                    FlagBarrier(self._find_counters(number), self)
                    if self._ordered
                    else CollectiveBarrier(self)
                )
        return self._barriers[tag]

    def _find_counters(self, number: int) -> list[memoryview]:
        page, place = divmod(number, FLAGS_PER_PAGE)
        if page == len(self._pages):
            self._pages.append(self.node.share_pages(PAGE_BYTES))
        views = [memoryview(part).cast("B").cast("q") for part in self._pages[page].parts]  # type: ignore[arg-type]
        return [view[place : place + 1] for view in views]

    def wait_for(self, barrier: FlagBarrier) -> None:
        """Return when all ranks have come to a barrier, offering the core to others at every look.

        Who waits for long is reported, and ended, by the world's own watch (`World.watch`).
        """
        world = self.node.world
        give_way = getattr(os, "sched_yield", lambda: time.sleep(0))
        world.waiter, looks = barrier, 0
        try:
            while not barrier.poll():
                give_way()
                looks += 1
                if looks % POLLS_PER_POKE == 0:
                    self.node.poke()
        finally:
            world.waiter = None

    def sync(self) -> None:
        """Memory barrier: order this rank's accesses to all shared arrays (local)."""
        for window in self._windows.values():
            window.sync()

    def drop(self, arrays: Iterable[Buffer]) -> None:
        """Free an array of `allocate` and all its slices, which must not be used any more.

        Raises:
            ShapeError: for an array that was not allocated here.
        """
        for number in {self._find(array)[0] for array in arrays}:
            self._windows.pop(number).free()

    def free(self) -> None:
        """Free all arrays, also of duplicates; none may be used any more.

        Done again, it does nothing.
        """
        while self._windows:
            self._windows.popitem()[1].free()
        self.close()

    def close(self) -> None:
        """Give back the barriers and communicators alone: what a `twin` has for itself.

        MPI's windows that are left to its end are freed there in an order that may differ between
        ranks of several groups, and then they wait for one another for ever. Done again, it does
        nothing.
        """
        if self.closed:
            return
        self.closed = True
        for barrier in self._barriers.values():
            barrier.free()
        for page in self._pages:
            page.free()
        self._barriers, self._pages = {}, []
        if self.across is not None:
            self.across.free()
        if self._owns_node:
            self.node.free()

    def _check_open(self) -> None:
        """Refuse what needs barriers and communicators when they are gone: on all ranks, as all
        have closed it.
        """
        if self.closed:
            raise UsageError(
                "this shared memory was closed or freed; ask the group for its memory() again"
            )

    def _find(self, array: Buffer) -> tuple[int, int]:
        place = self.place(array)
        if place is None:
            raise ShapeError(
                f"the array of {array.size} elements was not allocated in shared memory; use"
                " allocate()"
            )
        return place

    def _make(self, own_bytes: int) -> SharedPages:
        """Return a new window, or let all ranks raise."""
        self._check_open()
        window: SharedPages | None = None
        try:
            with agreed(self.group):
                window = self.node.share_pages(own_bytes)
        except DeviceError:
            if window is not None:  # this node had room, and another had not
                window.free()
            raise
        assert window is not None
        self._windows[max(self._windows, default=-1) + 1] = window
        return window
