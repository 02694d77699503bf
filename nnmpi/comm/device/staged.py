"""A collective of a device array by way of page-locked host memory, in pieces that follow one another.

    device to host   | 0 | 1 |   | 2 |   | 3 |              two buffers: piece 2 takes the place of piece 0
    MPI                  | 0   | 1   | 2   | 3   |          once that is back on the device
    host to device             | 0 |  1 |  | 2 |  | 3 |

Any MPI can do it, and any algorithm: each piece is a collective of the host. Which element is added to which in what
order depends on the pieces with some algorithms, so that a device's sum of a long array may differ from the host's in
the last bits; up to one piece they are the same. Where the parts of ranks matter (reduce-scatter, all-gather) there is
one piece, of which only what is needed is copied.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import PAGESIZE
from types import ModuleType
from typing import Any, Protocol

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.buffers import Buffer, pieces
from nnmpi.comm.collective import ALL_GATHER, BROADCAST, REDUCE_SCATTER, ROOT
from nnmpi.comm.device.copies import CopyStreams, PinnedBlock, copy_streams_of
from nnmpi.comm.device.coroutine import Awaited, CoroutineCollective, EventWait
from nnmpi.comm.execution import Pending
from nnmpi.comm.shared_memory.memory import SharedMemory
from nnmpi.shard import split

# A piece takes about 80 us over PCIe 5 and longer in MPI; shorter ones would cost more in calls than overlap saves.
PIECE_BYTES = 4 * 2**20
BUFFERS = 2


class BlockSource(Protocol):
    """Where host memory comes from and goes back to."""

    def take(self, nbytes: int) -> PinnedBlock:
        """Return a block of at least so many bytes."""

    def give(self, block: PinnedBlock) -> None:
        """Take it back."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece with its buffer.

    Attributes:
        block: its host memory.
        out: what is copied to the host before: (device part, host part).
        into: what is copied to the device afterwards.
        sum: the host's collective, on the buffer.
    """

    block: PinnedBlock
    out: tuple[tuple[Array, Array], ...]
    into: tuple[tuple[Array, Array], ...]
    sum: Pending


class BlockLease:
    """The host memory of a staged collective, to be given back once.

    Attributes:
        blocks: what was taken.
        in_use: whether MPI may still read and write there. For copies there is the event of each block.
    """

    def __init__(self, memory: BlockSource) -> None:
        self._memory, self.in_use = memory, False
        self.blocks: list[PinnedBlock] = []

    def take(self, nbytes: int) -> PinnedBlock:
        """Return a block of at least so many bytes."""
        block = self._memory.take(nbytes)
        self.blocks.append(block)
        return block

    def end(self) -> None:
        """Give back what was taken; done again, it does nothing."""
        blocks, self.blocks = self.blocks, []
        for block in blocks:
            self._memory.give(block)

    def let_go(self) -> None:
        """Give it back when nobody has the collective any more, unless that was dropped in the middle."""
        if not self.in_use:
            self.end()


class QueuedRun:
    """One run of a staged collective, for the one that comes after it to wait for."""

    def __init__(self, collective: CoroutineCollective) -> None:
        self._collective: CoroutineCollective | None = collective

    @property
    def is_over(self) -> bool:
        """Whether it is over."""
        return self._collective is None

    def end(self) -> None:
        """Say that it is over; what was run is not kept any longer."""
        self._collective = None

    def poll(self) -> bool:
        """Move it on, and return whether it is over."""
        if self._collective is not None:
            self._collective.poll()
        return self.is_over

    def wait(self) -> None:
        """Return when it is over."""
        if self._collective is not None:
            self._collective.wait()


class Queue:
    """Staged collectives of one communicator that MPI pairs by the order of their starts.

    What one of them gives to MPI begins when its copy has arrived, on each rank at another time; so it waits until the
    one that was started before it is over.
    """

    def __init__(self) -> None:
        self._last: QueuedRun | None = None

    def enter(self, queued: QueuedRun) -> QueuedRun | None:
        """Return the run before this one, None if there is none."""
        before, self._last = self._last, queued
        return before


class Staged(CoroutineCollective):
    """A collective of a device array through host memory, again and again. Making one is collective.

    Args:
        array: (n,) on the device, contiguous; worked on in place.
        bind: returns the host's collective on a NumPy array.
        operation: what it is; see `collective`.
        rank, size: of this rank, and how many there are.
        piece_bytes: how much is copied at a time.
        memory: where the host's buffers come from, and go to in `free`; by default the copy streams' pool, to which
            they go at the latest when nobody has the collective any more.
        root: whose values a broadcast spreads.
        queue: of those that must come to the host's collectives in the order of their starts.
    """

    def __init__(
        self,
        array: Array,
        bind: Callable[[Buffer], Pending],
        operation: str,
        rank: int,
        size: int,
        piece_bytes: int = PIECE_BYTES,
        memory: BlockSource | None = None,
        root: int = ROOT,
        queue: Queue | None = None,
    ) -> None:
        super().__init__(f"staged {operation}")
        self._queue = queue
        self._copies: CopyStreams = copy_streams_of(namespace(array))
        self._lease = BlockLease(self._copies.pool if memory is None else memory)
        if memory is None:
            # With their events: the last copy to the device may be under way when `wait` is over, and CuPy's own pool
            # would give the memory to somebody else at once. Other memory's giving may be collective.
            weakref.finalize(self, self._lease.let_go).atexit = False
        if operation in (REDUCE_SCATTER.name, ALL_GATHER.name):
            self._pieces = [self._whole(array, bind, operation, rank, size)]
        else:
            self._pieces = self._cut(array, bind, piece_bytes, operation == BROADCAST.name, rank == root)

    def stages(self) -> Iterator[Awaited]:
        """Copy out, let the host work, copy in; see the module."""
        return self._flow_of(started=True)

    def run(self) -> None:
        """Start and wait; MPI's blocking calls are quicker than a start and a wait."""
        if self._flow is not None:
            self.start()  # raises
        for awaited in self._flow_of(started=False):
            awaited.wait()

    def _flow_of(self, started: bool) -> Iterator[Awaited]:
        queued = QueuedRun(self)
        before = None if self._queue is None else self._queue.enter(queued)
        self._lease.in_use = True
        try:
            yield from self._stages(started, before)
            self._lease.in_use = False  # not where it broke off: then MPI may still write
        finally:
            queued.end()

    def _stages(self, started: bool, before: QueuedRun | None) -> Iterator[Awaited]:
        copies, cut = self._copies, self._pieces
        copies.fork()
        out: list[Any] = [copies.copy_out(piece.out, piece.block) for piece in cut[:BUFFERS]]
        arrived = None
        if before is not None:
            yield before
        for number, piece in enumerate(cut):
            yield EventWait(out[number])
            if started:
                piece.sum.start()
                yield piece.sum
            else:
                piece.sum.run()
            arrived = copies.copy_in(piece.into, piece.block)
            if number + BUFFERS < len(cut):
                following = cut[number + BUFFERS]
                out.append(copies.copy_out(following.out, following.block))
        if arrived is not None:
            copies.join(arrived)

    def free(self) -> None:
        """Give the buffers back, and what MPI keeps."""
        for each in {id(piece.sum): piece.sum for piece in self._pieces}.values():
            each.free()
        self._pieces = []
        self._lease.end()

    def _cut(
        self, array: Array, bind: Callable[[Buffer], Pending], piece_bytes: int, spreads: bool, is_root: bool
    ) -> list[Piece]:
        """Return the pieces of an array whose elements are independent of one another; none for an empty array."""
        parts = list(pieces(array, piece_bytes))
        blocks = [self._lease.take(part.nbytes) for part in parts[:BUFFERS]]
        sums: dict[tuple[int, int], tuple[Buffer, Pending]] = {}
        found = []
        for number, part in enumerate(parts):
            key = number % BUFFERS, part.size
            if key not in sums:
                host = blocks[key[0]].view(part.size, part.dtype)
                sums[key] = host, bind(host)
            host, pending = sums[key]
            pair = ((part, host),)
            out, into = (pair if is_root else (), () if is_root else pair) if spreads else (pair, pair)
            found.append(Piece(blocks[key[0]], out, into, pending))
        return found

    def _whole(self, array: Array, bind: Callable[[Buffer], Pending], operation: str, rank: int, size: int) -> Piece:
        """Return the whole array as one piece, of which the ranks have parts."""
        block = self._lease.take(array.nbytes)
        host = block.view(array.size, array.dtype)
        own = split(array.size, size)[rank]
        mine = slice(own.start, own.stop)
        inner = ((array[mine], host[mine]),)
        if operation == REDUCE_SCATTER.name:
            return Piece(block, ((array, host),), inner, bind(host))
        others: Sequence[slice] = (slice(0, own.start), slice(own.stop, array.size))
        return Piece(block, inner, tuple((array[part], host[part]) for part in others), bind(host))


class SharedBlocks:
    """Hands out blocks that all ranks of a node see. Taking and giving is collective.

    A sum through shared memory needs no further copies then: the device writes into the buffer that the others read.

    Args:
        memory: of the group.
        xp: the device's array module.
    """

    def __init__(self, memory: SharedMemory, xp: ModuleType) -> None:
        self._memory, self._runtime = memory, xp.cuda.runtime
        self._arrays: dict[int, Array] = {}
        self._locked: set[int] = set()

    def take(self, nbytes: int) -> PinnedBlock:
        """Return a new block of that many bytes.

        Raises:
            DeviceError: on all ranks, when there is no shared memory.
        """
        length = -(-max(1, nbytes) // PAGESIZE) * PAGESIZE
        array = self._memory.allocate(length + PAGESIZE, "uint8")
        # Whole pages, as CUDA locks no page twice, and copies from no half of one.
        start = -array.ctypes.data % PAGESIZE
        block = PinnedBlock(array[start : start + length])
        self._arrays[id(block)] = array
        with suppress(RuntimeError):  # CUDA may refuse to lock it: then copies take longer, and wait
            self._runtime.hostRegister(block.bytes.ctypes.data, length, 0)
            self._locked.add(id(block))
        return block

    def give(self, block: PinnedBlock) -> None:
        """Drop the block."""
        if block.event is not None:
            block.event.synchronize()
        array = self._arrays.pop(id(block))
        if id(block) in self._locked:
            self._locked.discard(id(block))
            self._runtime.hostUnregister(block.bytes.ctypes.data)
        self._memory.drop([array])
