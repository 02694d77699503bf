"""MPI's own collectives behind the same methods as `Execution`, to work with and to compare with.

They work in place on the same layouts as those made of steps: rank r's chunk is part r of `shard.split(n, size)`.
Unlike with `Execution` there is no tag: MPI pairs these by the order of their starts, so all ranks must start them in
the same order.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from mpi4py import MPI

from nnmpi.backend.array import namespace
from nnmpi.comm.buffers import Buffer, check_buffer, check_device, is_device, pieces
from nnmpi.comm.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, ROOT
from nnmpi.comm.execute import MAX_MESSAGE_BYTES
from nnmpi.errors import CommError, UsageError
from nnmpi.shard import split

Begin: TypeAlias = Callable[[], MPI.Request]
"""Starts one of MPI's non-blocking collectives."""

Block: TypeAlias = Callable[[], Any]
"""Does the same with the blocking call."""


class Native:
    """One of MPI's own collectives on one array, again and again.

    Args:
        array: (n,) the buffer, worked on in place.
        comm: the communicator whose ranks take part.
        operation: "all-reduce", "broadcast", "all-gather" or "reduce-scatter".
        max_message_bytes: longer arrays are worked on in pieces of at most that.
        on_device: whether the array is a device's, and MPI takes such arrays. What was computed is waited for then
            before MPI sees it.
        root: whose values a broadcast spreads.

    Raises:
        UsageError: for another operation.
    """

    def __init__(
        self,
        array: Buffer,
        comm: MPI.Comm,
        operation: str = ALL_REDUCE.name,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        on_device: bool = False,
        root: int = ROOT,
    ) -> None:
        if operation not in _CALLS:
            raise UsageError(f"MPI has no {operation} of its own here; it has {', '.join(_CALLS)}")
        checked = check_device(array) if on_device else check_buffer(array)
        self._current = namespace(checked).cuda.get_current_stream if on_device else None
        more = (root,) if operation == BROADCAST.name else ()
        self._calls = tuple(_CALLS[operation](checked, comm, max_message_bytes, *more))
        self._requests: list[MPI.Request] = []

    def start(self) -> None:
        """Begin; the array must be left alone until `poll` says true or `wait` is over.

        A device's array is done with on return: Open MPI takes device pointers in its blocking collectives, but not in
        those that are only started (https://www.open-mpi.org/faq/?category=runcuda).

        Raises:
            CommError: when it is running already.
        """
        if self._current is not None:
            return self.run()
        if self._requests:
            raise CommError("this native collective is still running; wait for it before the next start")
        self._requests = [begin() for begin, _ in self._calls]
        return None

    def poll(self) -> bool:
        """Return whether it is finished, without waiting; MPI moves on while it is asked."""
        if self._requests and MPI.Request.Testall(self._requests):
            self._requests = []
        return not self._requests

    def wait(self) -> None:
        """Return when the array holds the result."""
        MPI.Request.Waitall(self._requests)
        self._requests = []

    def run(self) -> None:
        """Do it at once, with the blocking call: in Open MPI it takes half the time of a start and a wait.

        Raises:
            CommError: when it is running already.
        """
        if self._requests:
            raise CommError("this native collective is still running; wait for it before the next start")
        if self._current is not None:
            self._current().synchronize()
        for _, block in self._calls:
            block()

    def free(self) -> None:
        """Give back what MPI keeps for it, which is nothing."""


def _all_reduce(array: Buffer, comm: MPI.Comm, limit: int) -> list[tuple[Begin, Block]]:
    def calls(piece: Buffer) -> tuple[Begin, Block]:
        return lambda: comm.Iallreduce(MPI.IN_PLACE, piece), lambda: comm.Allreduce(MPI.IN_PLACE, piece)

    return [calls(piece) for piece in pieces(array, limit)]


def _broadcast(array: Buffer, comm: MPI.Comm, limit: int, root: int = ROOT) -> list[tuple[Begin, Block]]:
    def calls(piece: Buffer) -> tuple[Begin, Block]:
        return lambda: comm.Ibcast(piece, root), lambda: comm.Bcast(piece, root)

    return [calls(piece) for piece in pieces(array, limit)]


def _all_gather(array: Buffer, comm: MPI.Comm, limit: int) -> list[tuple[Begin, Block]]:
    """Gather the chunks; an array too long for one call is broadcast by its owners, piece by piece."""
    chunks = split(array.size, comm.Get_size())
    if array.nbytes > limit:
        owned = [(array[chunk.start : chunk.stop], owner) for owner, chunk in enumerate(chunks)]
        return [call for part, owner in owned for call in _broadcast(part, comm, limit, owner)]
    into = [array, [len(chunk) for chunk in chunks]]
    return [(lambda: comm.Iallgatherv(MPI.IN_PLACE, into), lambda: comm.Allgatherv(MPI.IN_PLACE, into))]


def _reduce_scatter(array: Buffer, comm: MPI.Comm, limit: int) -> list[tuple[Begin, Block]]:
    """Leave each rank the sum of its chunk; an array too long for one call is summed for all, piece by piece."""
    if array.nbytes > limit:
        return _all_reduce(array, comm, limit)
    chunks = split(array.size, comm.Get_size())
    own = chunks[comm.Get_rank()]
    counts, scratch, into = [len(chunk) for chunk in chunks], array.copy(), array[own.start : own.stop]
    on_device = is_device(array)

    def begin() -> MPI.Request:
        scratch[...] = array  # what MPI writes may not overlap what it reads
        return comm.Ireduce_scatter(scratch, into, counts)

    def block() -> None:
        scratch[...] = array
        if on_device:
            namespace(array).cuda.get_current_stream().synchronize()
        comm.Reduce_scatter(scratch, into, counts)

    return [(begin, block)]


_CALLS: Mapping[str, Callable[..., list[tuple[Begin, Block]]]] = MappingProxyType(
    {
        ALL_REDUCE.name: _all_reduce,
        BROADCAST.name: _broadcast,
        ALL_GATHER.name: _all_gather,
        REDUCE_SCATTER.name: _reduce_scatter,
    }
)
