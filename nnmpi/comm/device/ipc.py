"""Sums between ranks of one node through one another's device memory (CUDA's inter-process communication).

Each rank has a buffer that the others have opened, and adds up one slice of all of them, in rank order:

                  slice 0     slice 1     slice 2
    rank 0's    | a0        | a1        | a2        |       own array -> own buffer                            barrier
    rank 1's    | b0        | b1        | b2        |       rank r adds column r and writes it to its buffer    barrier
    rank 2's    | c0        | c1        | c2        |       every column from its rank's buffer -> own array    barrier

So all ranks have the same bits. What a rank has written is there for the others when its stream has been waited for and
it has said so by a message. The memory comes straight from cudaMalloc: an address inside a pool's block could not be
handed over, as the handle is that of the whole allocation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.agreement import agreed, name_ranks
from nnmpi.comm.communicator import Communicator
from nnmpi.comm.device.coroutine import Awaited, CoroutineCollective, EventWait, start_barrier
from nnmpi.errors import DeviceError
from nnmpi.shard import split

PIECE_BYTES = 64 * 2**20
PROBED = 1024
# cudaMalloc may cut small allocations out of one block, of which a handle would be; whole blocks have one of their own.
BLOCK_BYTES = 2 * 2**20


class Exported:
    """Device memory that all ranks of a group on one node see. Making and freeing one is collective.

    Args:
        group: the ranks.
        xp: the device's array module.
        nbytes: at least 1, the same on all ranks.

    Attributes:
        views: each rank's memory as (nbytes,) uint8 arrays of this device; for reading, but for this rank's own.

    Raises:
        DeviceError: on all ranks, when one has no memory, or cannot open another's.
    """

    def __init__(self, group: Communicator, xp: ModuleType, nbytes: int) -> None:
        self._group, self._runtime = group, xp.cuda.runtime
        self._opened: list[int] = []
        with agreed(group), _as_device_error("cannot share device memory"):
            self._own = xp.cuda.Memory(-(-nbytes // BLOCK_BYTES) * BLOCK_BYTES)
            handle = bytes(self._runtime.ipcGetMemHandle(self._own.ptr))
        handles = group.gather(handle.hex())
        self.views: list[Array] = []
        try:
            with agreed(group), _as_device_error("cannot open another rank's device memory"):
                for rank, text in enumerate(handles):
                    self.views.append(self._view(xp, nbytes, None if rank == group.rank else bytes.fromhex(text)))
        except DeviceError:
            self._close()
            raise

    def _view(self, xp: ModuleType, nbytes: int, handle: bytes | None) -> Array:
        """Return a rank's memory as an array; this rank's own where there is no handle to open."""
        memory = self._own
        if handle is not None:
            address = self._runtime.ipcOpenMemHandle(handle)
            self._opened.append(address)
            memory = xp.cuda.UnownedMemory(address, nbytes, self, xp.cuda.runtime.getDevice())
        view: Array = xp.ndarray((nbytes,), np.uint8, xp.cuda.MemoryPointer(memory, 0))
        return view

    def free(self) -> None:
        """Close the others' memory, and give this rank's back when all have closed it."""
        self._close()
        self._group.barrier()

    def _close(self) -> None:
        self.views = []
        for address in self._opened:
            self._runtime.ipcCloseMemHandle(address)
        self._opened = []


class IpcSum(CoroutineCollective):
    """The sum of a device array over the ranks of a node, again and again. Making and freeing one is collective.

    Args:
        array: (n,) on the device, contiguous; summed in place.
        group: the ranks.
        tag: tells its messages from others under way at the same time.
        piece_bytes: the longest part that is summed at once, of which the ranks keep a copy each.

    Raises:
        DeviceError: on all ranks, see `Exported`.
    """

    def __init__(self, array: Array, group: Communicator, tag: int, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__("sum through CUDA IPC")
        self._array, self._comm, self._tag = array, group.comm, tag
        self._rank, self._size = group.rank, group.size
        self._xp = namespace(array)
        self._length = max(1, min(array.size, piece_bytes // array.itemsize))
        self._memory: Exported | None = None
        if array.size and group.size > 1:
            self._memory = Exported(group, self._xp, self._length * array.itemsize)

    def stages(self) -> Iterator[Awaited]:
        """Write, add a column, read the other columns: piece by piece."""
        if self._memory is None:
            return
        for start in range(0, self._array.size, self._length):
            yield from self._sum(self._array[start : start + self._length], self._memory)

    def free(self) -> None:
        """Give the buffers back. Collective."""
        if self._memory is not None:
            self._memory.free()
            self._memory = None

    def _sum(self, part: Array, memory: Exported) -> Iterator[Awaited]:
        buffers = [view[: part.nbytes].view(part.dtype) for view in memory.views]
        columns = [slice(column.start, column.stop) for column in split(part.size, self._size)]
        own = columns[self._rank]
        buffers[self._rank][...] = part
        yield from self._barrier()
        if part[own].size:
            total = buffers[0][own] + buffers[1][own]
            for other in buffers[2:]:
                total += other[own]
            buffers[self._rank][own] = total
        yield from self._barrier()
        for buffer, column in zip(buffers, columns, strict=True):
            part[column] = buffer[column]
        yield from self._barrier()

    def _barrier(self) -> Iterator[Awaited]:
        """Wait for the device, and then for the other ranks to have done so too."""
        event = self._xp.cuda.Event(disable_timing=True)
        event.record(self._xp.cuda.get_current_stream())
        yield EventWait(event)
        yield start_barrier(self._comm, self._tag)


def ipc_problem(group: Communicator, xp: ModuleType) -> str | None:
    """Return why the ranks cannot use one another's device memory, the same on all; None if they can. Collective.

    Every rank writes numbers of its own and reads everybody's.
    """
    if len(set(group.nodes())) > 1:
        return f"the ranks are on {len(set(group.nodes()))} nodes, and CUDA IPC works within one"
    try:
        memory = Exported(group, xp, PROBED)
    except DeviceError as error:
        return str(error)
    stream = xp.cuda.get_current_stream()
    memory.views[group.rank][...] = group.rank + 1
    stream.synchronize()
    group.barrier()
    read = [int(view.max().get()) for view in memory.views]
    right = bool(np.all(np.array(read) == np.arange(1, group.size + 1)))
    wrong = [rank for rank, fine in enumerate(group.gather(right)) if not fine]
    memory.free()
    return f"{name_ranks(wrong)} did not find in the others' device memory what they wrote" if wrong else None


@contextmanager
def _as_device_error(what: str) -> Iterator[None]:
    """Turn CUDA's errors (CUDARuntimeError, OutOfMemoryError) into a DeviceError that says what failed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise DeviceError(f"{what} ({error})") from error
