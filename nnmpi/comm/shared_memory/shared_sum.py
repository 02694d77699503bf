"""All-reduce inside a node without messages: every rank adds up its slice of everybody's array, in place.

                  slice 0     slice 1     slice 2
    rank 0's    | a0        | a1        | a2        |       barrier: all arrays are final
    rank 1's    | b0        | b1        | b2        |       rank r adds column r, block by block, and writes the sum
    rank 2's    | c0        | c1        | c2        |         to all arrays, while it is in its cache
                  by rank 0   by rank 1   by rank 2         barrier: all columns are done

Each byte is read once and written once: 2 M bytes per rank. A ring touches 4 (N-1)/N M bytes and
sends 2 (N-1) messages. The sum is taken in rank order whoever takes it, so all ranks have the same bits. With several
nodes the sum of each goes into its leader's array, the leaders add theirs up with the steps of a ring, and the ranks
copy:

    node sum -> leader   |   leaders: ring   |   every rank copies its leader's array

Where more ranks than cores wait for one another, waiting is what takes the time, and short arrays are summed with one
barrier: each rank copies its array to where all see it, and adds all of them up for itself.

An array that does not lie in the shared memory is copied through a window piece by piece, which takes about as long as
MPI's own all-reduce: allocate there (`SharedMemory.allocate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

import nnmpi.shard as shard
from nnmpi.comm.agreement import refuse_different
from nnmpi.comm.algorithms.ring import ring
from nnmpi.comm.buffers import DTYPES, Buffer, check_buffer
from nnmpi.comm.execution import Execution, Startable
from nnmpi.comm.shared_memory.memory import SharedMemory, WindowSlice
from nnmpi.errors import CommError

ALIGNMENT_BYTES = 64
# What is added at a time of all ranks' arrays together should lie in a core's cache, but shorter blocks than this cost
# more in calls than the cache saves. Measured (Zen 4, 1 MiB L2, Open MPI | MPICH, buffers refilled, microseconds for
# 4 MB): 2 ranks with blocks of 64, 128, 256 KiB 232, 132, 110 | 340, 251, 231; 4 ranks 1278, 1002, 1227 | 1328, 1061,
# 1222.
CACHED_BYTES = 512 * 1024
LEAST_BLOCK_BYTES = 128 * 1024
STAGE_BYTES = 1024 * 1024
SLOT_BYTES = 32 * 1024


class LocalWork:
    """A stage in which this rank has something to compute, and nothing to wait for."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = self.start = run

    def poll(self) -> bool:
        """Return True: it was finished when it was started."""
        return True

    def wait(self) -> None:
        """Do nothing."""


class SharedSum:
    """The sum of an array over the ranks of a group, through the memory of each node. Making one is collective.

    It has the methods of `Execution`. Several may be in flight at once if their tags differ, and be started and polled
    in any order.

    Args:
        array: (n,) the buffer, summed in place; it may be a slice of an allocated one, of any length, 0 too.
        memory: of the group whose ranks take part. If a rank's array lies elsewhere, all go through a window.
        tag: 0..32767, the same on all ranks.
        block_bytes: how much of each array is added at a time, if not what suits a cache.
        stage_bytes: the longest piece of an array that goes through a window.
        slot_bytes: the longest array that is copied to all and added up by each, where that is quicker.

    Raises:
        ShapeError, DtypeError: see `check_buffer`.
        CommError: on all ranks, when their arrays differ in length or dtype.
        DeviceError: on all ranks, when there is no shared memory for the window.
    """

    def __init__(
        self,
        array: Buffer,
        memory: SharedMemory,
        tag: int = 0,
        block_bytes: int | None = None,
        stage_bytes: int = STAGE_BYTES,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self._array, self._memory, self._tag = check_buffer(array), memory, tag
        suits = max(CACHED_BYTES // memory.size, LEAST_BLOCK_BYTES)
        self._block = max(1, (suits if block_bytes is None else block_bytes) // array.itemsize)
        places = _exchange_places(self._array, memory)
        self._stages: tuple[Startable, ...] = tuple(self._plan(places, stage_bytes, slot_bytes))
        self._runs = tuple(stage.run for stage in self._stages)
        self._at = len(self._stages)

    def start(self) -> None:
        """Start it, with what the array holds now. Leave the array alone until `poll` returns True or `wait` returns.

        Raises:
            CommError: when it is running already.
        """
        if self._at < len(self._stages):
            raise CommError(f"the shared sum with tag {self._tag} is still running; wait for it before the next start")
        self._at = -1
        self._next()

    def poll(self) -> bool:
        """Go as far as possible without waiting for others; return whether it is finished."""
        while self._at < len(self._stages):
            if not self._stages[self._at].poll():
                return False
            self._next()
        return True

    def wait(self) -> None:
        """Return when the array holds the sum, and no other rank needs it any more.

        Raises:
            CommError: when other ranks do not come in time.
        """
        while self._at < len(self._stages):
            self._stages[self._at].wait()
            self._next()

    def run(self) -> None:
        """Start and wait."""
        if self._at < len(self._stages):
            self.start()  # raises
        for run in self._runs:
            run()

    def free(self) -> None:
        """Give back what MPI keeps for the leaders' ring; the windows and barriers are the memory's."""
        for stage in self._stages:
            if isinstance(stage, Execution):
                stage.free()

    def _next(self) -> None:
        self._at += 1
        if self._at < len(self._stages):
            self._stages[self._at].start()

    # ---- what is to be done ----

    def _plan(self, places: Sequence[WindowSlice | None], stage_bytes: int, slot_bytes: int) -> Iterator[Startable]:
        """Yield the stages of the sum; which, is decided by where the ranks' arrays are.

        1. One rank, or nothing to add: no stages.
        2. One node and a short array, which is private or has too few cores: copied to all, added up by each.
        3. A rank on each node: over the nodes alone, in the array itself.
        4. Some rank's array is private: through a window, piece by piece.
        5. All arrays lie in the node's shared memory: in place.
        """
        array, memory = self._array, self._memory
        if array.size == 0 or len(places) == 1:
            return
        nodes, private = len(set(memory.node_of)), None in places
        if nodes == 1 and array.nbytes <= slot_bytes and (private or memory.crowded):
            yield from self._through_slots(slot_bytes)
        elif nodes == len(places):  # a rank on each node: nobody has to see another's array
            yield from self._sum([array])
        elif private:
            yield from self._through_window(max(1, stage_bytes // array.itemsize))
        else:
            found = [(local, places[rank]) for local, rank in enumerate(memory.members)]
            yield from self._sum([memory.view(i, place, array.size, array.dtype) for i, place in found if place])

    def _through_window(self, length: int) -> Iterator[Startable]:
        """Yield the stages for an array that the others do not see: copied in, summed there, copied out."""
        array, memory = self._array, self._memory
        window = memory.staging("pieces", self._tag, min(length, array.size) * array.itemsize)
        for begin in range(0, array.size, length):
            piece = array[begin : begin + length]
            parts = [part[: piece.nbytes].view(array.dtype) for part in window]
            own = parts[memory.rank]
            yield LocalWork(_copies([(own, piece)]))
            yield from self._sum(parts)
            yield LocalWork(_copies([(piece, own)]))

    def _through_slots(self, slot_bytes: int) -> Iterator[Startable]:
        """Yield the stages for a short array, with one barrier: copied in, and all of it added up by every rank.

        In the next call with this tag the other slot is used, as slower ranks may still read this one; before the call
        after that everybody has come to a barrier again. So the slots of a tag must lie at the same places for arrays
        of any length.
        """
        array, memory, tag = self._array, self._memory, self._tag
        stride = -(-slot_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        windows = memory.staging(f"slots of {stride}", tag, 2 * stride)
        slots = [[window[turn * stride :][: array.nbytes].view(array.dtype) for window in windows] for turn in range(2)]
        turn = 0

        def copy_in() -> None:
            nonlocal turn
            turn = memory.next_turn(tag)
            slots[turn][memory.rank][...] = array

        def add_up() -> None:
            first, second, *rest = slots[turn]
            np.add(first, second, array)
            for other in rest:
                np.add(array, other, array)

        yield LocalWork(copy_in)
        yield memory.barrier_of(tag)
        yield LocalWork(add_up)

    def _sum(self, parts: Sequence[Buffer]) -> Iterator[Startable]:
        """Yield the stages of the sum of arrays that all ranks of the node see."""
        memory = self._memory
        barrier = memory.barrier_of(self._tag)
        nodes = memory.across
        yield barrier
        yield LocalWork(_sums(parts, memory.rank, self._block, everywhere=nodes is None))
        yield barrier
        if nodes is not None:
            if memory.rank == 0:
                yield Execution(ring(nodes.rank, nodes.size), parts[0], nodes, self._tag, persistent=True)
            yield barrier
            if memory.rank > 0:
                yield LocalWork(_copies([(parts[memory.rank], parts[0])]))
            yield barrier


def own_slice(array: Buffer, size: int, rank: int) -> slice:
    """Return the part of an array that one rank adds up; it begins and ends at multiples of 64 bytes.

    Args:
        array: (n,) of the sum.
        size: the number of ranks that add up a part each.
        rank: the one in question.
    """
    step = ALIGNMENT_BYTES // array.itemsize
    units = shard.part(-(-array.size // step), size, rank)
    return slice(min(units.start * step, array.size), min(units.stop * step, array.size))


def blocks(parts: Sequence[Buffer], limit: int) -> Iterator[tuple[Buffer, ...]]:
    """Yield views of the same elements of each array, `limit` at a time."""
    for start in range(0, parts[0].size, limit):
        yield tuple(part[start : start + limit] for part in parts)


def _sums(parts: Sequence[Buffer], rank: int, limit: int, everywhere: bool) -> Callable[[], None]:
    """Return what adds up a rank's slice, into the first array, and copies the sum to all others if asked to."""
    mine = own_slice(parts[0], len(parts), rank)
    cut = [(first, others) for first, *others in blocks([part[mine] for part in parts], limit)]
    add = np.add

    def run() -> None:
        for first, others in cut:
            for other in others:
                add(first, other, first)
            if everywhere:
                for other in others:
                    other[...] = first  # a third of what the call of np.copyto takes

    return run


def _copies(pairs: Sequence[tuple[Buffer, Buffer]]) -> Callable[[], None]:
    """Return what copies the second array of each pair into the first."""

    def run() -> None:
        for target, source in pairs:
            target[...] = source

    return run


def _exchange_places(array: Buffer, memory: SharedMemory) -> list[WindowSlice | None]:
    """Return where each group rank's array lies on its node, after making sure that they can be added."""
    kinds = sorted(dtype.name for dtype in DTYPES)
    place = memory.place(array) or WindowSlice(-1, 0)
    own = np.array([array.size, kinds.index(array.dtype.name), place.allocation, place.start], np.int64)
    everyones = memory.gather_numbers(own)
    described = [[f"{size} elements of {kinds[kind]}"] for size, kind, _, _ in everyones]
    refuse_different(described, "the ranks would sum different arrays", "give all the same length and dtype")
    return [WindowSlice(allocation, start) if allocation >= 0 else None for _, _, allocation, start in everyones]
