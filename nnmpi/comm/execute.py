"""Runs the steps of a collective on MPI, without ever waiting unless asked to.

An execution is bound to one array, and may be started again and again: which bytes go where is worked out once. It
moves on when it is polled, so that it can run while something else is computed, and several can be in flight at once
if their tags differ.

    started:  for each step   post its receives, post its sends      (receives first: a message finds its place)
                              all done?  no: come back at the next poll
                              add what arrived in scratch; next step

An execution that will be started often keeps MPI's persistent requests: what a message is, MPI is told once.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mpi4py import MPI

from nnmpi.backend.array import namespace
from nnmpi.comm.buffers import Buffer, as_bytes, check_buffer, check_device, pieces
from nnmpi.comm.steps import Chunks, Step, runs
from nnmpi.errors import CommError
from nnmpi.shard import split

# Counts in MPI messages are 32-bit in most libraries; half of that leaves room, and nobody can tell the difference.
MAX_MESSAGE_BYTES = 2**30

Message: TypeAlias = list[Any]  # the bytes as mpi4py takes them: [uint8 view, MPI.BYTE]


@dataclass(frozen=True, slots=True)
class _Bound:
    """One step with its places in memory: messages with their partners, and what is to be added to what."""

    receives: tuple[tuple[Message, int], ...]
    sends: tuple[tuple[Message, int], ...]
    sums: tuple[tuple[Buffer, Buffer], ...]

    def post(self, comm: MPI.Comm, tag: int) -> list[MPI.Request]:
        """Start the step's messages and return their requests."""
        requests = [comm.Irecv(message, source, tag) for message, source in self.receives]
        return requests + [comm.Isend(message, to, tag) for message, to in self.sends]

    def prepare(self, comm: MPI.Comm, tag: int) -> list[MPI.Prequest]:
        """Return persistent requests for the step's messages, not started."""
        requests = [comm.Recv_init(message, source, tag) for message, source in self.receives]
        return requests + [comm.Send_init(message, to, tag) for message, to in self.sends]


class Execution:
    """One rank's part of a collective, as a state machine.

    Args:
        steps: this rank's steps over comm.size chunks.
        array: (n,) the buffer, worked on in place; n may be 0 or less than the number of ranks.
        comm: the communicator; its ranks are those in the steps.
        tag: tells the messages of this execution from those of others in flight between the same ranks.
        max_message_bytes: longer messages are cut into pieces of at most that.
        persistent: whether it will be started often; costs a little once and saves a little each time.
        on_device: whether the array is a device's, and MPI takes such arrays. What was computed is waited for then
            before MPI sees it.

    Raises:
        ShapeError: see `check_buffer`.
        DtypeError: see `check_buffer`.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        array: Buffer,
        comm: MPI.Comm,
        tag: int = 0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        persistent: bool = False,
        on_device: bool = False,
    ) -> None:
        self._comm, self._tag = comm, tag
        checked = check_device(array) if on_device else check_buffer(array)
        self._add = namespace(checked).add
        self._current = namespace(checked).cuda.get_current_stream if on_device else None
        self._bound = _bind(steps, checked, comm.Get_size(), max_message_bytes)
        self._kept = [bound.prepare(comm, tag) for bound in self._bound] if persistent else []
        self._at = len(self._bound)
        self._requests: Sequence[MPI.Request] = ()
        # At the latest when Python ends, which is before MPI does: MPICH complains of requests that are left.
        self.free = weakref.finalize(self, _free, self._kept)

    def start(self) -> None:
        """Begin, with what the array holds now; it must be left alone until `poll` says true or `wait` is over.

        Raises:
            CommError: when it is running already.
        """
        if self._at < len(self._bound):
            raise CommError(f"the collective with tag {self._tag} is still running; wait for it before the next start")
        self._at = 0
        self._post()

    def poll(self) -> bool:
        """Go as far as possible without waiting; return whether it is finished."""
        while self._at < len(self._bound):
            if not MPI.Request.Testall(self._requests):
                return False
            self._next()
        return True

    def wait(self) -> None:
        """Return when this rank's part is finished and the array holds the result."""
        while self._at < len(self._bound):
            MPI.Request.Waitall(self._requests)
            self._next()

    def run(self) -> None:
        """Start and wait."""
        if not self._kept or self._at < len(self._bound):
            self.start()
            return self.wait()
        add, current = self._add, self._current
        for requests, bound in zip(self._kept, self._bound, strict=True):  # without a call per step, 1 us shorter
            if current is not None:
                current().synchronize()
            MPI.Prequest.Startall(requests)
            MPI.Request.Waitall(requests)
            for target, arrived in bound.sums:
                add(target, arrived, out=target)
        return None

    def _post(self) -> None:
        """Start the messages of the step it has come to."""
        if self._current is not None:
            self._current().synchronize()
        if self._at == len(self._bound):
            self._requests = ()
        elif self._kept:
            self._requests = self._kept[self._at]
            MPI.Prequest.Startall(self._requests)
        else:
            self._requests = self._bound[self._at].post(self._comm, self._tag)

    def _next(self) -> None:
        """Finish the step it is in, whose messages are through, and begin the next."""
        for target, arrived in self._bound[self._at].sums:
            self._add(target, arrived, out=target)
        self._at += 1
        self._post()


def _free(kept: Sequence[Sequence[MPI.Prequest]]) -> None:
    """Give persistent requests back to MPI."""
    for requests in kept:
        for request in requests:
            request.Free()


def _bind(steps: Sequence[Step], array: Buffer, size: int, max_bytes: int) -> list[_Bound]:
    """Give every step its places in the array and in scratch; leave out those whose chunks are all empty."""
    chunks = split(array.size, size)
    longest = max((sum(len(chunks[c]) for c in step.recv) for step in steps if step.reduce), default=0)
    scratch = namespace(array).empty(longest, dtype=array.dtype)  # one for all steps: only one step is under way
    bound = []
    for step in steps:
        targets = list(_slices(step.recv, array, chunks))
        landing = list(_landing(targets, scratch)) if step.reduce else targets
        receives = () if step.from_ is None else _messages(landing, step.from_, max_bytes)
        sends = () if step.to is None else _messages(_slices(step.send, array, chunks), step.to, max_bytes)
        if receives or sends:
            bound.append(_Bound(receives, sends, tuple(zip(targets, landing, strict=True)) if step.reduce else ()))
    return bound


def _slices(numbers: Chunks, array: Buffer, chunks: Sequence[range]) -> Iterator[Buffer]:
    """Yield a view of the array for each run of neighbouring chunks that is not empty."""
    for run in runs(numbers):
        part = array[chunks[run[0]].start : chunks[run[-1]].stop]
        if part.size:
            yield part


def _landing(targets: Sequence[Buffer], scratch: Buffer) -> Iterator[Buffer]:
    """Yield a view of scratch, one behind the other, for each target."""
    start = 0
    for target in targets:
        yield scratch[start : start + target.size]
        start += target.size


def _messages(
    parts: Iterator[Buffer] | Sequence[Buffer], partner: int, max_bytes: int
) -> tuple[tuple[Message, int], ...]:
    """Return the parts, cut to max_bytes, as bytes with the partner's rank: MPI need not know the dtype."""
    return tuple(([as_bytes(piece), MPI.BYTE], partner) for part in parts for piece in pieces(part, max_bytes))
