"""Arrays shared by all ranks of a node: gradients there are summed without messages.

    allocate     | rank 0's array | rank 1's array | rank 2's array |     each rank gets one array,
                                                                          and views of all
    common_all   | one array                       |                      all ranks get the same one

Everything here is collective over the group unless a docstring says "local".
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.base.errors import DeviceError, ShapeError, UsageError, name_ranks
from nnmpi.comm.agreement import Communicator, agreed
from nnmpi.comm.buffers import CommBuffer
from nnmpi.comm.execution import Calls, Stages
from nnmpi.comm.world import PAGE_BYTES, SharedPages

# Barriers among the ranks of a node at a tenth of the cost of MPI's: each rank increments a counter
# that the others poll.
#
#     rank 0's page   [ 7 | 3 | 0 ...       one counter per barrier, 8 bytes each; only rank 0
#                                           writes here
#     rank 1's page   [ 6 | 3 | 0 ...       rank 1 has not yet come to barrier 0's 7th crossing
#                       |   |
#                barrier 0  barrier 1
#
# A rank that arrives increments its counter, and passes when all counters are as high. Data written
# before a counter must be visible to a rank that sees the counter. x86 guarantees that: its
# processors keep the order of stores, and of loads. In any other world the ranks meet in a
# collective between two memory fences instead.

FLAGS_PER_PAGE = PAGE_BYTES // 8

# Polls before a rank yields its core. With fewer cores than ranks, the awaited rank may be waiting
# for this very core, so a rank yields sooner.
PATIENT_POLLS = 2000
CROWDED_POLLS = 20
# Polls between two calls that drive the progress of messages; a call takes about as long as a
# yield.
POLLS_PER_PROGRESS = 64


class FlagBarrier:
    """A barrier by counters in shared memory, for worlds that preserve the order of writes.

    Args:
        counters: every rank's counter, in rank order, as memoryviews of one int64: reading one
            takes less than reading a NumPy element.
        memory: the memory of the node.
    """

    def __init__(self, counters: Sequence[memoryview], memory: SharedMemory) -> None:
        rank = memory.rank
        self._counters, self._memory = tuple(counters), memory
        self._counter = counters[rank]
        self._others = tuple(counter for other, counter in enumerate(counters) if other != rank)
        self._goal = 0

    def start(self) -> None:
        """Mark this rank as arrived."""
        self._goal = self._counter[0] = self._counter[0] + 1

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
        """Do nothing: `SharedMemory` frees the counters' page."""

    def run(self) -> None:
        """Arrive, and return when all others have."""
        arrived = self._counter  # start and wait, inlined: a barrier takes 0.2 us
        goal = self._goal = arrived[0] = arrived[0] + 1
        for counter in self._others:
            if counter[0] < goal:
                self.wait()
                return

    def waits_for(self) -> str:
        """Describe the wait, for reports of stalls."""
        return (
            f"crossing {self._goal} of a barrier in shared memory, for {name_ranks(self.missing())}"
        )

    def missing(self) -> list[int]:
        """Return the ranks of the group that have not arrived."""
        pairs = zip(self._memory.members, self._counters, strict=True)
        return [rank for rank, counter in pairs if counter[0] < self._goal]


class CollectiveBarrier(Stages):
    """A barrier by a dummy sum between two memory fences, valid in any world.

    Each has its own communicator, so that several barriers can be in flight in any order.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._comm = memory.node.duplicate()
        number = np.zeros(1, np.int64)  # one element: an empty sum need not wait for other ranks
        crossing = Calls(self._comm, [partial(self._comm.iallreduce, number)])
        super().__init__([memory.sync, crossing, memory.sync], "a barrier in shared memory")

    def free(self) -> None:
        """Free the communicator. Collective over the node."""
        self._comm.free()


LINE_BYTES = 64
MAIN = -1  # the tag of `SharedMemory.barrier`


class SharedMemory:
    """Memory shared by the ranks of each node of a group.

    The arrays live until `free` or the end of the process; freeing them is optional.

    Args:
        group: the ranks; those of one node share memory.

    Attributes:
        group: the ranks.
        node: the communicator of this node's ranks, in the group's order.
        rank, size: this rank's number on its node, and the number of ranks there.
        node_of: the node number of each rank of the group.
        members: the group's ranks on this node, in order.
        polls: polls before a rank yields its core.
        across: the communicator of one rank per node, those with this rank's `rank`; the leaders
            have `rank` 0. None with a single node.
        closed: whether it was closed or freed; then it makes no more arrays and barriers.

    Raises:
        DeviceError: on all ranks, when one of their nodes has no shared memory.
    """

    def __init__(self, group: Communicator) -> None:
        self.group, self._ordered = group, group.comm.world.keeps_order
        self.node_of = tuple(group.nodes())
        several = len(set(self.node_of)) > 1
        # On a single node with flags, no message goes through `node`: the group's communicator
        # serves. Communicators are scarce: MPICH has 2048.
        self._owns_node = several or not self._ordered  # whether `close` frees `node`
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
        by_rank = group.gather(sorted(usable))  # the cores that each rank may run on
        cores = {core for rank in self.members for core in by_rank[rank]}
        self.polls = CROWDED_POLLS if self.size > len(cores) else PATIENT_POLLS
        self._pages: list[SharedPages] = []  # of the barriers' flags
        self._barriers: dict[int, FlagBarrier | CollectiveBarrier] = {}
        self._windows: dict[int, SharedPages] = {}  # by allocation number; shared with twins
        self.closed = False
        try:
            self.barrier_of(MAIN)
        except DeviceError:
            self.close()
            raise

    def twin(self, group: Communicator) -> SharedMemory:
        """Return the same memory for a duplicate of the group, with barriers of its own.

        Raises:
            UsageError: for a closed memory.
        """
        self.check_open()
        twin = SharedMemory(group)
        twin._windows = self._windows
        return twin

    # ---- arrays ----

    def allocate(self, elements: int, dtype: DTypeLike) -> CommBuffer:
        """Return (elements,) zeros of this rank, which its node's other ranks see in `parts`.

        The ranks' lengths may differ.

        Raises:
            DeviceError: on all ranks, when it does not fit on one of the nodes.
            UsageError: for a closed memory.
        """
        kind = np.dtype(dtype)
        return self._make(elements * kind.itemsize).parts[self.rank].view(kind)

    def common_all(self, arrays: Iterable[tuple[int, DTypeLike]]) -> list[CommBuffer]:
        """Return (elements,) zeros common to all ranks of the node, for each pair.

        They lie in one allocation, at multiples of 64 bytes.

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

    def locate(self, array: CommBuffer) -> tuple[int, int] | None:
        """Return an array's allocation and first byte; None for other memory (local)."""
        address = array.ctypes.data
        for number, window in self._windows.items():
            start = address - window.parts[self.rank].ctypes.data
            if start >= 0 and start + array.nbytes <= window.parts[self.rank].nbytes:
                return number, start
        return None

    def parts(self, array: CommBuffer) -> list[CommBuffer]:
        """Return every rank's array of the same allocation, sliced alike, in rank order (local).

        Raises:
            ShapeError: for an array in other memory.
        """
        number, start = self._find(array)
        parts = self._windows[number].parts
        return [part[start : start + array.nbytes].view(array.dtype) for part in parts]

    # ---- barriers ----

    def barrier(self) -> None:
        """Return when all ranks of the node have entered; their earlier writes are visible then.

        Raises:
            UsageError: for a closed memory.
        """
        self.check_open()
        self._barriers[MAIN].run()

    def barrier_of(self, tag: int) -> FlagBarrier | CollectiveBarrier:
        """Return the node's barrier with this tag; collective for a new tag.

        Raises:
            UsageError: for a closed memory.
            DeviceError: when another page of flags cannot be allocated.
        """
        self.check_open()
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
        page, offset = divmod(number, FLAGS_PER_PAGE)
        if page == len(self._pages):
            self._pages.append(self.node.share_pages(PAGE_BYTES))
        parts = self._pages[page].parts
        views = [memoryview(part).cast("B").cast("q") for part in parts]  # type: ignore[arg-type]
        return [view[offset : offset + 1] for view in views]

    def wait_for(self, barrier: FlagBarrier) -> None:
        """Return when all ranks have come to a barrier, yielding the core after every poll.

        `World.watch` limits long waits.
        """
        world = self.node.world
        yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))
        world.waiter, polls = barrier, 0
        try:
            while not barrier.poll():
                yield_core()
                polls += 1
                if polls % POLLS_PER_PROGRESS == 0:
                    self.node.progress()
        finally:
            world.waiter = None

    def sync(self) -> None:
        """Memory fence: order this rank's accesses to all shared arrays (local)."""
        for window in self._windows.values():
            window.sync()

    def drop(self, arrays: Iterable[CommBuffer]) -> None:
        """Free arrays of `allocate` and all their slices; do not use them afterwards.

        Raises:
            ShapeError: for an array in other memory.
        """
        for number in {self._find(array)[0] for array in arrays}:
            self._windows.pop(number).free()

    def free(self) -> None:
        """Free all arrays, also those of duplicates; do not use them afterwards. Idempotent."""
        while self._windows:
            self._windows.popitem()[1].free()
        self.close()

    def close(self) -> None:
        """Free the barriers and communicators, but not the arrays, which twins share. Idempotent.

        MPI frees the remaining windows when it ends. Ranks of several groups could then free them
        in different orders, and deadlock.
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

    def check_open(self) -> None:
        """Refuse a closed memory; all ranks raise, because closing is collective."""
        if self.closed:
            raise UsageError(
                "this shared memory was closed or freed; ask the group for its memory() again"
            )

    def _find(self, array: CommBuffer) -> tuple[int, int]:
        location = self.locate(array)
        if location is None:
            raise ShapeError(
                f"the array of {array.size} elements was not allocated in shared memory; use"
                " allocate()"
            )
        return location

    def _make(self, own_bytes: int) -> SharedPages:
        """Return a new window, or raise on all ranks."""
        self.check_open()
        window: SharedPages | None = None
        try:
            with agreed(self.group):
                window = self.node.share_pages(own_bytes)
        except DeviceError:
            if window is not None:  # this node had room, another one had not
                window.free()
            raise
        assert window is not None
        # Allocations are collective, so this number is the same on all ranks, also after `drop`.
        self._windows[max(self._windows, default=-1) + 1] = window
        return window
