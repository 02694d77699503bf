"""NVIDIA's library for collectives between cards (NCCL): one rank for each, on a stream of its own.

    compute stream   kernel kernel [event]  kernel kernel ...        [wait] optimizer
    NCCL's stream                   wait    all-reduce of bucket 0 ---'

NCCL refuses, or hangs with, two ranks on one card, and hangs when ranks call different things; so whether there are as
many cards as ranks is looked at before, and lengths and dtypes are compared as for every collective (`Group.check_same`
and `Exchange`). Its errors come late: they are asked for whenever somebody waits, and end its communicator.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.backend.device import UUID_BYTES
from nnmpi.comm.agreement import agreed, name_ranks, on_root
from nnmpi.comm.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, ROOT
from nnmpi.comm.communicator import Communicator
from nnmpi.comm.device.coroutine import Awaited, CoroutineCollective, EventWait
from nnmpi.errors import CommError, DeviceError, DtypeError, UsageError
from nnmpi.shard import split

# The names of NCCL's numbers for dtypes, and the number where a CuPy does not export the name.
CODES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "int8": ("NCCL_INT8", 0),
        "uint8": ("NCCL_UINT8", 1),
        "int32": ("NCCL_INT32", 2),
        "uint32": ("NCCL_UINT32", 3),
        "int64": ("NCCL_INT64", 4),
        "uint64": ("NCCL_UINT64", 5),
        "float16": ("NCCL_FLOAT16", 6),
        "float32": ("NCCL_FLOAT32", 7),
        "float64": ("NCCL_FLOAT64", 8),
        "bfloat16": ("NCCL_BFLOAT16", 9),
    }
)


def library(xp: ModuleType) -> ModuleType:
    """Return the array module's binding of NCCL.

    Raises:
        DeviceError: when it has none, or NCCL is not installed.
    """
    try:
        found = importlib.import_module(f"{xp.__name__}.cuda.nccl")
    except ImportError as error:
        raise DeviceError(
            f"NCCL cannot be used ({error}); install nvidia-nccl-cu13 (the extra nccl), or choose another all-reduce"
        ) from error
    if not getattr(found, "available", True):
        raise DeviceError(
            "NCCL is not installed; install nvidia-nccl-cu13 (the extra nccl), or choose another all-reduce"
        )
    return found


def name_card(xp: ModuleType) -> str:
    """Return what tells this process's card from the node's others."""
    runtime = xp.cuda.runtime
    number = runtime.getDevice()
    uuid = runtime.getDeviceProperties(number).get("uuid", b"")  # parts of one card have one address on the bus
    return f"{runtime.deviceGetPCIBusId(number)} {bytes(uuid[:UUID_BYTES]).hex()}"


def refuse_shared_cards(cards: Sequence[tuple[int, str]]) -> None:
    """Raise when two ranks have one card, of which NCCL can make nothing.

    Args:
        cards: each rank's node and card.

    Raises:
        DeviceError: with the ranks and the card.
    """
    holders: dict[tuple[int, str], list[int]] = {}
    for rank, (node, card) in enumerate(cards):
        holders.setdefault((node, card), []).append(rank)
    for (_, card), ranks in holders.items():
        if len(ranks) > 1:
            raise DeviceError(
                f"NCCL needs a GPU for each rank, but {name_ranks(ranks)} of {len(cards)} are on one, "
                f"{card.split()[0]}; start one rank for each GPU, or choose another all-reduce"
            )


class Nccl:
    """A communicator of NCCL for a group. Making one is collective.

    Args:
        group: the ranks; nobody waits for others once this has been made.
        xp: the device's array module.

    Raises:
        DeviceError: on all ranks, when NCCL is missing, cannot start, or two ranks are on one GPU.
    """

    def __init__(self, group: Communicator, xp: ModuleType) -> None:
        self._xp = xp
        with agreed(group):
            self.library = library(xp)
        cards = group.gather([group.nodes()[group.rank], name_card(xp)])
        refuse_shared_cards([(node, card) for node, card in cards])
        name = on_root(group, lambda: bytes(self._begin(self.library.get_unique_id)).hex())
        self.rank, self.size = group.rank, group.size
        with agreed(group):
            self.comm = self._begin(self.library.NcclCommunicator, group.size, bytes.fromhex(name), group.rank)
        self.stream = xp.cuda.Stream(non_blocking=True)
        self._alive = True

    def _begin(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return what a call of NCCL returns that belongs to its start.

        Raises:
            DeviceError: when it fails.
        """
        try:
            return call(*args)
        except self.library.NcclError as error:
            raise DeviceError(f"NCCL cannot start ({error}); NCCL_DEBUG=WARN says more") from error

    def fork(self) -> None:
        """Let what comes on NCCL's stream wait for what was computed so far."""
        event = self._event()
        event.record(self._xp.cuda.get_current_stream())
        self.stream.wait_event(event)

    def mark(self) -> Any:
        """Return an event behind what was given to NCCL's stream."""
        event = self._event()
        event.record(self.stream)
        return event

    def join(self, event: Any) -> None:
        """Let what is computed from now on wait for an event, and look whether NCCL has failed."""
        self.check()
        self._xp.cuda.get_current_stream().wait_event(event)

    def check(self) -> None:
        """Raise if NCCL has failed, after ending its communicator, so that nobody waits for it.

        Raises:
            CommError: with what it says.
        """
        self.guard(self.comm.check_async_error)

    def guard(self, call: Callable[[], Any]) -> Any:
        """Return what a call of NCCL returns.

        Raises:
            CommError: when it fails; the communicator is ended then.
        """
        try:
            return call()
        except self.library.NcclError as error:
            if self._alive:
                self._alive = False
                self.comm.abort()
            raise CommError(
                f"NCCL failed on rank {self.rank} of {self.size} ({error}); NCCL_DEBUG=WARN says more, and the "
                "all-reduce auto does without NCCL"
            ) from error

    def code(self, array: Array) -> int:
        """Return NCCL's number for a dtype.

        Raises:
            DtypeError: for a dtype that it does not know.
        """
        if array.dtype.name not in CODES:
            raise DtypeError(f"NCCL knows no {array.dtype}; convert to one of {', '.join(CODES)}")
        name, number = CODES[array.dtype.name]
        return int(getattr(self.library, name, number))

    def free(self) -> None:
        """End the communicator, when all that was given to it is done."""
        if self._alive:
            self._alive = False
            self.stream.synchronize()
            self.comm.destroy()

    def _event(self) -> Any:
        return self._xp.cuda.Event(disable_timing=True)


class NcclCollective(CoroutineCollective):
    """A collective of NCCL on one array, again and again.

    Args:
        array: (n,) on the device, contiguous; worked on in place.
        nccl: of the group.
        operation: "all-reduce", "reduce-scatter", "all-gather", or "broadcast" (from rank 0).

    Raises:
        UsageError: for another operation.
        DtypeError: for a dtype that NCCL does not know.
    """

    def __init__(self, array: Array, nccl: Nccl, operation: str = ALL_REDUCE.name) -> None:
        super().__init__(f"{operation} of NCCL")
        if operation not in _CALLS:
            raise UsageError(f"NCCL has no {operation}; it has {', '.join(_CALLS)}")
        nccl.code(array)
        self._array, self._nccl, self._call = array, nccl, _CALLS[operation]

    def stages(self) -> Iterator[Awaited]:
        """Give the call to NCCL's stream, and come back when the device has done it."""
        nccl = self._nccl
        nccl.fork()
        if self._array.size:
            nccl.guard(lambda: self._call(self._array, nccl))
        event = nccl.mark()
        yield _Done(event, nccl)
        nccl.join(event)


class _Done(EventWait):
    """The end of a call, which only the device has to wait for: `wait` returns at once."""

    def __init__(self, event: Any, nccl: Nccl) -> None:
        super().__init__(event)
        self._nccl = nccl

    def poll(self) -> bool:
        """Return whether the device has come to it."""
        self._nccl.check()
        return super().poll()

    def wait(self) -> None:
        """Do nothing: the current stream is told to wait, by `Nccl.join`."""


def _address(array: Array) -> int:
    """Return where a device array begins."""
    data: Any = array.data
    return int(data.ptr)


def _all_reduce(array: Array, nccl: Nccl) -> None:
    at, code = _address(array), nccl.code(array)
    nccl.comm.allReduce(at, at, array.size, code, nccl.library.NCCL_SUM, nccl.stream.ptr)


def _broadcast(array: Array, nccl: Nccl) -> None:
    at = _address(array)
    nccl.comm.broadcast(at, at, array.size, nccl.code(array), ROOT, nccl.stream.ptr)


def _reduce_scatter(array: Array, nccl: Nccl) -> None:
    """Leave each rank the sum of its chunk: one call for equal chunks, else a reduction for each in one group."""
    at, code, chunks = _address(array), nccl.code(array), split(array.size, nccl.size)
    if array.size % nccl.size == 0:
        own = at + chunks[nccl.rank].start * array.itemsize
        nccl.comm.reduceScatter(at, own, len(chunks[0]), code, nccl.library.NCCL_SUM, nccl.stream.ptr)
        return
    nccl.library.groupStart()
    for root, chunk in enumerate(chunks):
        if chunk:
            start = at + chunk.start * array.itemsize
            nccl.comm.reduce(start, start, len(chunk), code, nccl.library.NCCL_SUM, root, nccl.stream.ptr)
    nccl.library.groupEnd()


def _all_gather(array: Array, nccl: Nccl) -> None:
    """Give each rank's chunk to all: one call for equal chunks, else a broadcast of each in one group."""
    at, code, chunks = _address(array), nccl.code(array), split(array.size, nccl.size)
    if array.size % nccl.size == 0:
        own = at + chunks[nccl.rank].start * array.itemsize
        nccl.comm.allGather(own, at, len(chunks[0]), code, nccl.stream.ptr)
        return
    nccl.library.groupStart()
    for root, chunk in enumerate(chunks):
        if chunk:
            start = at + chunk.start * array.itemsize
            nccl.comm.broadcast(start, start, len(chunk), code, root, nccl.stream.ptr)
    nccl.library.groupEnd()


_CALLS: Mapping[str, Callable[[Array, Nccl], None]] = MappingProxyType(
    {
        ALL_REDUCE.name: _all_reduce,
        BROADCAST.name: _broadcast,
        REDUCE_SCATTER.name: _reduce_scatter,
        ALL_GATHER.name: _all_gather,
    }
)
