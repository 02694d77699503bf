"""Messages between two ranks: blocking exchanges, overlapped messages, and a handshake.

    send_and_receive    posts a set of sends and receives, and waits for all (halos, all-to-all)
    Messages            sends in flight and receives posted early, while the rank computes
                        (pipelines, servers)
    rendezvous          one array at a time after a handshake: a failed rank refuses, so that the
                        other does not wait for a message that never comes (saving and loading)

Only making `Messages` and a `rendezvous` is collective. No call here relies on MPI's buffering:
plain blocking sends pass tests with short messages, which MPI buffers, and deadlock with long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

import nnmpi.base.clock as clock
from nnmpi.comm.agreement import Communicator
from nnmpi.comm.buffers import (
    CommBuffer,
    as_bytes,
    check_contiguous,
    is_device,
    pieces,
    room_like,
    to_hosts,
)
from nnmpi.comm.execution import MessageRequest
from nnmpi.comm.world import Comm, RequestHandle

# MPI guarantees tags up to 32767. The lower half is the caller's. One more serves all blocking sums
# and exchanges, of which only one is in flight at a time.
BLOCKING_TAG = 2**14
HANDSHAKE_TAG, DATA_TAG = 0, 1


def send_and_receive(
    group: Communicator,
    sends: Sequence[tuple[int, CommBuffer]],
    receives: Sequence[tuple[int, CommBuffer]],
) -> None:
    """Send some arrays and fill others; return when all are sent and filled.

        rank 0   receive from 1, send to 1                       every receive is posted before a
        rank 1   receive from 0, receive from 2, send to 0 ...   send begins: no circle of waits

    Not collective: only the ranks with messages call it. Messages between two ranks are paired by
    their order in the lists.

    Args:
        group: the ranks.
        sends: (rank, array) pairs: any shape, C-contiguous; the message to that rank.
        receives: (rank, array) pairs: any shape, C-contiguous, writeable; filled with the message
            of that rank, of the same length. Device arrays go through host memory.

    Raises:
        ShapeError: for an array with gaps, or a read-only one.
        DtypeError: for an object array.
    """
    start_exchange(group, sends, receives).wait()


def start_exchange(
    group: Communicator,
    sends: Sequence[tuple[int, CommBuffer]],
    receives: Sequence[tuple[int, CommBuffer]],
) -> MessageRequest:
    """Start `send_and_receive`; `wait` ends it. Until then the sent array is read-only.

    Args:
        group, sends, receives: see `send_and_receive`; it raises the same.
    """
    hosts = to_hosts([array if is_device(array) else check_contiguous(array) for _, array in sends])
    filled = [
        (room_like(array, array.shape) if is_device(array) else array, array)
        for _, array in receives
    ]
    requests: list[RequestHandle] = []
    for (rank, _), (room, _) in zip(receives, filled, strict=True):
        requests += _post(group.comm.irecv, check_contiguous(room), rank, BLOCKING_TAG)
    for (rank, _), host in zip(sends, hosts, strict=True):
        requests += _post(group.comm.isend, host, rank, BLOCKING_TAG)
    return MessageRequest(group.comm, requests, hosts, filled)


class Messages:
    """Non-blocking messages on a communicator of their own. Collective to make.

        sender     send --------- computes -------- progress ------ drain
                       \\
        receiver   receive (posted) --- computes --- wait

    A send returns at once and keeps its array alive until the message has left. A receive is posted
    before its message is needed, into an array of its own. So no order of calls on the two sides
    deadlocks. Messages with the same sender, receiver and tag arrive in the order of sending.

    Args:
        group: the ranks.
        synchronous_sends: whether a message leaves only after its receive was posted. MPI then
            buffers nothing; tests use it to show that no code relies on buffering.

    Attributes:
        sent, sent_bytes: number and bytes of messages sent since the caller last reset them; a
            message cut into pieces counts once.
    """

    def __init__(self, group: Communicator, synchronous_sends: bool = False) -> None:
        self._comm = group.comm.duplicate()
        self._isend = self._comm.issend if synchronous_sends else self._comm.isend
        self._leaving: list[MessageRequest] = []  # kept alive: MPI reads their arrays
        self.sent = self.sent_bytes = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the block's time as communication."""
        world, begin = self._comm.world, clock.now()
        yield
        world.collective_s += clock.now() - begin

    @property
    def leaving(self) -> int:
        """The number of sends whose arrays are still in use, as of the last `progress`."""
        return len(self._leaving)

    def send(self, array: CommBuffer, to: int, tag: int) -> MessageRequest:
        """Send an array, which must not change until `drain` or the returned `wait` has returned.

        Args:
            array: any shape, numbers, C-contiguous, on the host.
            to: the rank that receives it.
            tag: the receiver's tag.
        """
        request = MessageRequest(self._comm, _post(self._isend, array, to, tag), array)
        self._leaving.append(request)
        self.sent, self.sent_bytes = self.sent + 1, self.sent_bytes + array.nbytes
        return request

    def receive(self, array: CommBuffer, source: int, tag: int) -> MessageRequest:
        """Post the receive of a message.

        Args:
            array: of the message's shape and dtype, C-contiguous, on the host; written until the
                message has arrived.
            source: the rank that sends it.
            tag: the sender's tag.

        Raises:
            ShapeError, DtypeError: for an array with gaps, a read-only one, or one of Python
                objects.
        """
        array = check_contiguous(array)
        return MessageRequest(self._comm, _post(self._comm.irecv, array, source, tag), array)

    def progress(self) -> None:
        """Drive messages and release the arrays that have left; never waits."""
        self._leaving = [request for request in self._leaving if not request.poll()]

    def drain(self) -> None:
        """Return when all sent messages have left."""
        with self.timed():
            for request in self._leaving:
                request.wait()
        self._leaving = []

    def free(self) -> None:
        """Free the communicator. Collective."""
        self._comm.free()


class Rendezvous:
    """Sends arrays between two ranks of which either may fail just before. `rendezvous` makes one.

        sender          receiver
        ready?     <->  ready?              a byte each way
        array       ->  array               only if both are ready

    Each call waits for the other end. So two ranks must not send to one another at the same time;
    ranks that all process the same list of transfers in the same order are safe.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def send(self, array: CommBuffer | None, to: int) -> bool:
        """Send the array, and return whether it was received.

        Args:
            array: any shape, numbers, on the host; None to refuse.
            to: the rank that calls `receive`.
        """
        return self._pass(self._comm.isend, array, to)

    def receive(self, array: CommBuffer | None, source: int) -> bool:
        """Fill the array with source's, and return whether it was sent.

        Args:
            array: shape and dtype as at the other end, C-contiguous; None to refuse.
            source: the rank that calls `send`.

        Raises:
            ShapeError, DtypeError: for an array with gaps, a read-only one, or one of Python
                objects.
        """
        if array is not None:
            check_contiguous(array)
        return self._pass(self._comm.irecv, array, source)

    def _pass(
        self, call: Callable[..., RequestHandle], array: CommBuffer | None, partner: int
    ) -> bool:
        ready, partner_ready = np.array([array is not None]), np.empty(1, bool)
        comm, tag = self._comm, HANDSHAKE_TAG
        comm.wait_all([comm.irecv(partner_ready, partner, tag), comm.isend(ready, partner, tag)])
        if array is None or not partner_ready[0]:
            return False
        comm.wait_all(_post(call, array, partner, DATA_TAG))
        return True


@contextmanager
def rendezvous(group: Communicator) -> Iterator[Rendezvous]:
    """Return a rendezvous of the group's ranks on a duplicate of its communicator. Collective."""
    comm = group.comm.duplicate()
    try:
        yield Rendezvous(comm)
    finally:
        comm.free()


def _post(
    call: Callable[..., RequestHandle], array: CommBuffer, partner: int, tag: int
) -> list[RequestHandle]:
    return [call(piece, partner, tag) for piece in pieces(as_bytes(array))]
