"""Arrays that all ranks of a node see: where gradients lie that are to be summed without being sent.

    allocate   | rank 0's array | rank 1's array | rank 2's array |      each rank gets its own, and views of all
    common     | one array                       |                       all ranks get the same one

Everything here is collective over the group, except where a docstring excludes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.comm.agreement import agreed
from nnmpi.comm.buffers import Buffer
from nnmpi.comm.communicator import Communicator
from nnmpi.comm.shared_memory.barriers import TIMEOUT_S, Barrier, Flags, Watch
from nnmpi.comm.world import Comm, SharedPages
from nnmpi.errors import DeviceError, ShapeError, UsageError

LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class WindowSlice:
    """Where an array of this rank lies: `start` bytes into the part of allocation number `allocation`."""

    allocation: int
    start: int


class SharedMemory:
    """What the ranks of each node of a group share.

    The arrays live until `free`, or the end of the process: nothing has to be freed before that.

    Args:
        group: the ranks; those on one node share memory.
        timeout_s: how long to wait for another rank in a barrier.
        nodes: the node of each rank of the group, for trying several nodes on one machine; found out by default.
        ordered: see `Flags`; as the world says by default.

    Attributes:
        group: the ranks.
        node: the communicator of this node's ranks, in the group's order.
        rank, size: this rank's number on its node, and the number of ranks there.
        node_of: the number of each group rank's node: its lowest rank.
        members: the group's numbers of this node's ranks, in their order here.
        crowded: whether this node has more ranks than cores for them.
        across: the communicator between nodes, of the ranks that have the same number on theirs; `rank` 0 are leaders.
            None where there is one node.
        closed: whether it was closed, or freed: then it makes no arrays and no barriers any more.

    Raises:
        UsageError: for `nodes` of another length than the group's.
        DeviceError: on all ranks, when there is no shared memory on one of their nodes.
    """

    def __init__(
        self,
        group: Communicator,
        timeout_s: float = TIMEOUT_S,
        nodes: Sequence[int] | None = None,
        ordered: bool | None = None,
    ) -> None:
        if nodes is not None and len(nodes) != group.size:
            raise UsageError(f"{len(nodes)} nodes are given for {group.size} ranks; give the node of each rank")
        self.group, self._options = group, (timeout_s, nodes, ordered)
        ordered = group.comm.world.keeps_order if ordered is None else ordered
        if nodes is None:
            self.node = group.comm.split_by_node(group.rank)
        else:
            self.node = group.comm.split(nodes[group.rank], group.rank)
        self._owns_node = True  # and gives it back; whether it is the group's is not to be seen later
        self.rank, self.size = self.node.rank, self.node.size
        names = np.empty(self.size, np.int64)
        self.node.allgather(np.array([group.rank], np.int64), names)
        everyones = np.empty(group.size, np.int64)
        group.comm.allgather(names[:1].copy(), everyones)
        self.node_of: tuple[int, ...] = tuple(everyones.tolist())
        self.across: Comm | None = None
        if len(set(self.node_of)) > 1:
            self.across = group.comm.split(self.rank, group.rank)
        elif ordered:  # no messages are sent then; and communicators are scarce: MPICH has 2048
            self.node.free()
            self.node, self._owns_node = group.comm, False
        self.members: tuple[int, ...] = tuple(names.tolist())
        watch = Watch(self.node, self.members, timeout_s)
        self.crowded = watch.crowded
        self._flags = Flags(watch, ordered)
        self._barriers: dict[int, Barrier] = {}
        self._windows: dict[int, SharedPages] = {}  # by allocation number; twins have the same
        self._own: WeakSet[SharedPages] = WeakSet()  # those of them that were made through this object
        self.closed = False
        try:
            with agreed(group):
                self._barrier = self._flags.barrier(self.sync)
        except DeviceError:
            self.close()
            raise

    def twin(self, group: Communicator) -> SharedMemory:
        """Return the same memory for a duplicate of the group, with barriers of its own.

        Raises:
            UsageError: when it was closed.
        """
        self._check_open()
        twin = SharedMemory(group, *self._options)
        twin._windows = self._windows
        return twin

    # ---- arrays ----

    def allocate(self, elements: int, dtype: DTypeLike) -> Buffer:
        """Return (elements,) zeros: this rank's own array, which the others of its node see as one of their `parts`.

        Ranks may ask for different lengths.

        Raises:
            DeviceError: on all ranks, when it does not fit on one of the nodes.
            UsageError: on all ranks, when one asks for less than none, or the memory was closed.
        """
        kind = np.dtype(dtype)
        return self._make(self._length(elements, kind)).parts[self.rank].view(kind)

    def common(self, elements: int, dtype: DTypeLike) -> Buffer:
        """Return (elements,) zeros that stand once per node: what one rank writes, all have.

        Raises:
            DeviceError, UsageError: as in `allocate`.
        """
        return self.common_all([(elements, dtype)])[0]

    def common_all(self, arrays: Iterable[tuple[int, DTypeLike]]) -> list[Buffer]:
        """Return several such arrays by elements and dtype, in one allocation; each begins at a multiple of 64 bytes.

        Raises:
            DeviceError, UsageError: as in `allocate`.
        """
        kinds = [(elements, np.dtype(dtype)) for elements, dtype in arrays]
        lengths = [self._length(elements, kind) for elements, kind in kinds]
        ends = list(accumulate(-(-length // LINE_BYTES) * LINE_BYTES for length in lengths))
        part = self._make(ends[-1] if ends and self.rank == 0 else 0).parts[0]
        starts = [0, *ends[:-1]]
        return [
            part[start : start + length].view(kind)
            for start, length, (_, kind) in zip(starts, lengths, kinds, strict=False)
        ]

    def place(self, array: Buffer) -> WindowSlice | None:
        """Return where an array of this rank lies, None if it lies elsewhere (not collective)."""
        address = array.ctypes.data
        for number, window in self._windows.items():
            start = address - window.parts[self.rank].ctypes.data
            if start >= 0 and start + array.nbytes <= window.parts[self.rank].nbytes:
                return WindowSlice(number, start)
        return None

    def view(self, rank: int, place: WindowSlice, elements: int, dtype: DTypeLike) -> Buffer:
        """Return the array of one rank of the node that lies at a place (not collective).

        Args:
            rank: that rank, by its number on the node.
            place: where the array lies in that rank's part.
            elements: its length.
            dtype: of its elements.
        """
        kind = np.dtype(dtype)
        part = self._windows[place.allocation].parts[rank]
        return part[place.start : place.start + elements * kind.itemsize].view(kind)

    def holds(self, array: Buffer) -> bool:
        """Return whether the array, or what it is a slice of, was allocated here by this rank (not collective)."""
        return self.place(array) is not None

    def parts(self, array: Buffer) -> list[Buffer]:
        """Return every rank's array of the same allocation, cut like this one, in rank order (not collective).

        Raises:
            ShapeError: for an array that was not allocated here.
        """
        place = self._find(array)
        return [self.view(rank, place, array.size, array.dtype) for rank in range(self.size)]

    # ---- waiting for one another ----

    def barrier(self) -> None:
        """Return when all ranks of the node have come here; what they wrote before is seen then.

        Raises:
            CommError: after the time limit; names the ranks that have not come.
            UsageError: when the memory was closed.
        """
        self._check_open()
        self._barrier.run()

    def barrier_of(self, tag: int) -> Barrier:
        """Return the node's barrier with this tag; collective where the tag is new.

        Raises:
            UsageError: when the memory was closed.
        """
        self._check_open()
        if tag not in self._barriers:
            with agreed(self.group):
                self._barriers[tag] = self._flags.barrier(self.sync)
        return self._barriers[tag]

    def sync(self) -> None:
        """Order this rank's reads and writes of all shared arrays before against those after (not collective)."""
        for window in self._windows.values():
            window.sync()

    def drop(self, arrays: Iterable[Buffer]) -> None:
        """Give back what `allocate` gave, and all slices of it; the arrays must not be touched any more.

        Raises:
            ShapeError: for an array that was not allocated here.
        """
        self.drop_allocations(self._find(array).allocation for array in arrays)

    @property
    def allocations(self) -> int:
        """The number that the next allocation will have, if none is given back before."""
        return max(self._windows, default=-1) + 1

    def drop_allocations(self, numbers: Iterable[int]) -> None:
        """Give back allocations by number, also arrays in common; they must not be touched any more."""
        for number in numbers:
            self._windows.pop(number).free()

    def free(self) -> None:
        """Give back all that was made through this object; arrays that are still held must not be touched any more.

        What was allocated through a twin stays. Done again, it does nothing.
        """
        self.drop_allocations(sorted(number for number, window in self._windows.items() if window in self._own))
        self.close()

    def close(self) -> None:
        """Give back the barriers and communicators alone: what a `twin` has for itself.

        MPI's windows that are left to its end are freed there in an order that may differ between ranks of several
        groups, and then they wait for one another for ever. Done again, it does nothing.
        """
        if self.closed:
            return
        self.closed = True
        self._barriers.clear()
        self._flags.free()
        if self.across is not None:
            self.across.free()
        if self._owns_node:
            self.node.free()

    def _check_open(self) -> None:
        """Refuse what needs barriers and communicators when they are gone: on all ranks, as all have closed it."""
        if self.closed:
            raise UsageError("this shared memory was closed or freed; ask the group for its memory() again")

    def _length(self, elements: int, dtype: np.dtype[Any]) -> int:
        """Return the bytes of an array; let all ranks raise if a rank asks for less than none, or it is closed."""
        self._check_open()
        with agreed(self.group):
            if elements < 0:
                raise UsageError(f"an array of {elements} elements cannot be shared; give 0 or more")
        return elements * dtype.itemsize

    def _find(self, array: Buffer) -> WindowSlice:
        place = self.place(array)
        if place is None:
            raise ShapeError(f"the array of {array.size} elements was not allocated in shared memory; use allocate()")
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
        self._windows[self.allocations] = window
        self._own.add(window)
        return window
