"""NVIDIA's library for collectives between cards (NCCL): one rank for each, on a stream of its own.

    compute stream   kernel kernel [event]  kernel kernel ...        [wait] optimizer
    NCCL's stream                   wait    all-reduce of bucket 0 ---'

Two ranks on one card hang, or end in an error, so that is looked at before. NCCL's own errors come late: they are
asked for whenever somebody waits, and end its communicator.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.backend.device import name_card
from nnmpi.comm.agreement import Communicator, agreed, name_ranks, on_root
from nnmpi.comm.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, ROOT
from nnmpi.errors import CommError, DeviceError, DtypeError, UsageError
from nnmpi.shard import split

# NCCL's numbers for dtypes that it adds up, of which CuPy exports names for most alone.
CODES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
BYTES, SUM = CODES["uint8"], 0
INSTEAD = "install nvidia-nccl-cu13 (the extra nccl), or choose another all-reduce"


class Nccl:
    """A communicator of NCCL for a group. Making one is collective.

    Args:
        group: the ranks; nobody waits for others once this has been made.
        xp: the device's array module.

    Raises:
        DeviceError: on all ranks, when NCCL is missing, cannot start, or two ranks are on one GPU.
    """

    def __init__(self, group: Communicator, xp: ModuleType) -> None:
        with agreed(group):
            self.library = _library(xp)
        cards = group.gather([group.nodes()[group.rank], name_card(xp, xp.cuda.runtime.getDevice())])
        shared = [rank for rank, card in enumerate(cards) if cards.count(card) > 1]
        if shared:
            raise DeviceError(
                f"NCCL needs a GPU for each rank, but {name_ranks(shared)} of {len(cards)} share one; start one rank "
                "for each GPU, or choose another all-reduce"
            )
        name = on_root(group, lambda: bytes(self._begin(self.library.get_unique_id)).hex())
        self.rank, self.size = group.rank, group.size
        with agreed(group):
            self.comm = self._begin(self.library.NcclCommunicator, group.size, bytes.fromhex(name), group.rank)
        self.cuda, self.stream = xp.cuda, xp.cuda.Stream(non_blocking=True)
        self._alive = True

    def _begin(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except self.library.NcclError as error:
            raise DeviceError(f"NCCL cannot start ({error}); NCCL_DEBUG=WARN says more") from error

    def guard(self, call: Callable[[], Any]) -> None:
        """Call NCCL; where that fails its communicator is ended, so that nobody waits for it.

        Raises:
            CommError: with what NCCL says.
        """
        try:
            call()
        except self.library.NcclError as error:
            if self._alive:
                self._alive = False
                self.comm.abort()
            raise CommError(
                f"NCCL failed on rank {self.rank} of {self.size} ({error}); NCCL_DEBUG=WARN says more, and the "
                "all-reduce auto does without NCCL"
            ) from error

    def free(self) -> None:
        """End the communicator, when all that was given to it is done."""
        if self._alive:
            self._alive = False
            self.stream.synchronize()
            self.comm.destroy()


class NcclCollective:
    """A collective of NCCL on one array, again and again; see `execution.Pending` for the methods.

    Args:
        array: (n,) on the device, contiguous; worked on in place.
        nccl: of the group.
        operation: "all-reduce", "reduce-scatter", "all-gather", or "broadcast" (from rank 0).

    Raises:
        UsageError: for another operation.
        DtypeError: for a sum of a dtype that NCCL does not know.
    """

    def __init__(self, array: Array, nccl: Nccl, operation: str = ALL_REDUCE.name) -> None:
        known = (ALL_REDUCE.name, REDUCE_SCATTER.name, ALL_GATHER.name, BROADCAST.name)
        if operation not in known:
            raise UsageError(f"NCCL has no {operation}; it has {', '.join(known)}")
        self._sums = operation in (ALL_REDUCE.name, REDUCE_SCATTER.name)
        if self._sums and array.dtype.name not in CODES:
            raise DtypeError(f"NCCL adds up no {array.dtype}; convert to one of {', '.join(CODES)}")
        self._array, self._nccl = array, nccl
        # What the ranks give and get: (start, length, the rank whose part it is)
        whole = operation in (ALL_REDUCE.name, BROADCAST.name)
        chunks = [range(array.size)] if whole else split(array.size, nccl.size)
        self._chunks = [(chunk.start, len(chunk), ROOT + root) for root, chunk in enumerate(chunks) if chunk]
        self._all = operation == ALL_REDUCE.name

    def start(self) -> None:
        """Give the calls to NCCL's stream, behind what was computed so far."""
        self._nccl.stream.wait_event(self._nccl.cuda.get_current_stream().record())
        self._nccl.guard(self._call)
        self._done = self._nccl.stream.record()

    def poll(self) -> bool:
        """Return whether the device has come to its end."""
        if not self._done.done:
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Let what is computed from now on wait for it; the host does not."""
        self._nccl.guard(self._nccl.comm.check_async_error)
        self._nccl.cuda.get_current_stream().wait_event(self._done)

    def run(self) -> None:
        """Start and wait."""
        self.start()
        self.wait()

    def free(self) -> None:
        """Do nothing: what NCCL keeps is the group's."""

    def _call(self) -> None:
        """Sum all, or each rank's chunk at that rank; or send each rank's chunk to all: as one group of calls."""
        comm, library, stream = self._nccl.comm, self._nccl.library, self._nccl.stream.ptr
        data: Any = self._array.data
        library.groupStart()
        for start, length, root in self._chunks:
            at = int(data.ptr) + start * self._array.itemsize
            if not self._sums:
                comm.broadcast(at, at, length * self._array.itemsize, BYTES, root, stream)
            elif self._all:
                comm.allReduce(at, at, length, CODES[self._array.dtype.name], SUM, stream)
            else:
                comm.reduce(at, at, length, CODES[self._array.dtype.name], SUM, root, stream)
        library.groupEnd()


def _library(xp: ModuleType) -> ModuleType:
    try:
        found = importlib.import_module(f"{xp.__name__}.cuda.nccl")
    except ImportError as error:
        raise DeviceError(f"NCCL cannot be used ({error}); {INSTEAD}") from error
    if not getattr(found, "available", True):
        raise DeviceError(f"NCCL is not installed; {INSTEAD}")
    return found
