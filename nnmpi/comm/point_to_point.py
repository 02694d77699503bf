"""Messages between two ranks, in the three ways in which they are needed.

    send_and_receive    all that a rank sends and receives at one moment; returns when it is through
                        (halos, all-to-all)
    Messages            sends on their way and receives posted early, while the rank computes
                        (pipelines, servers)
    rendezvous          one array at a time, sent only if both ends say that they can: a rank that
                        has failed says no, and the other does not wait for a message that never
                        comes (saving and loading)

Making `Messages` and a `rendezvous` is collective, nothing else is. No call here depends on what
MPI buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from nnmpi.comm.buffers import (
    Buffer,
    as_bytes,
    check_contiguous,
    is_device,
    pieces,
    room_like,
    to_hosts,
)
from nnmpi.comm.execution import MessageRequest
from nnmpi.comm.world import Comm, Request

if TYPE_CHECKING:
    from nnmpi.comm.group import Group

# MPI promises tags up to 32767. The lower half is the caller's; one more is for all blocking sums
# and exchanges, of which there is only one at a time.
BLOCKING_TAG = 2**14
HANDSHAKE_TAG, DATA_TAG = 0, 1


def send_and_receive(
    group: Group, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]]
) -> None:
    """Send some arrays and fill others; return when all are sent and filled.

        rank 0   receive from 1, send to 1                      every receive is posted before a send begins, so
        rank 1   receive from 0, receive from 2, send to 0 ...  nothing waits for another, whatever MPI buffers

    Not collective: only the ranks that have something to exchange call it. Between two ranks,
    messages are paired in the order in which both name them.

    Args:
        group: whose ranks are meant.
        sends: (rank, array) any shape, C-contiguous; what goes to that rank.
        receives: (rank, array) any shape, C-contiguous and writeable; filled with what comes from
            that rank, of the same length. Arrays of a device go through host memory.

    Raises:
        ShapeError: for an array with gaps, or a read-only one.
        DtypeError: for an object array.
    """
    start_exchange(group, sends, receives).wait()


def start_exchange(
    group: Group, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]]
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
    requests: list[Request] = []
    for (rank, _), (room, _) in zip(receives, filled, strict=True):
        requests += _post(group.comm.irecv, check_contiguous(room), rank, BLOCKING_TAG)
    for (rank, _), host in zip(sends, hosts, strict=True):
        requests += _post(group.comm.isend, host, rank, BLOCKING_TAG)
    return MessageRequest(group.comm, requests, hosts, filled)


class Messages:
    """Messages that block only if they must, on a communicator of their own. Collective to make.

        sender    send --------- goes on -------- progress ------ drain
                      \\
        receiver   receive (posted) --- goes on --- wait

    A send returns at once and keeps its array until the message has left; a receive is posted
    before the message is needed, into an array of its own. So no order of calls on the two sides
    can lock them. Messages with one tag from one rank to another arrive in the order in which they
    were sent.

    Args:
        group: the ranks.
        synchronous_sends: whether a message leaves only when its receive has been posted: MPI then
            buffers nothing, which tests use to show that nothing depends on it.

    Attributes:
        sent, sent_bytes: the messages that were sent so far, and their bytes; one that was cut
            counts once.
    """

    def __init__(self, group: Group, synchronous_sends: bool = False) -> None:
        self._comm = group.comm.duplicate()
        self._isend = self._comm.issend if synchronous_sends else self._comm.isend
        self._leaving: list[MessageRequest] = []  # MPI reads their arrays until they are complete
        self.sent = self.sent_bytes = 0

    @property
    def leaving(self) -> int:
        """The number of sends whose arrays are still needed, as far as this rank knows."""
        return len(self._leaving)

    def send(self, array: Buffer, to: int, tag: int) -> MessageRequest:
        """Send an array, which must not change until `drain` or the returned `wait` has returned.

        Args:
            array: any shape, numbers, C-contiguous, on the host.
            to: the rank that receives it.
            tag: the tag that it receives with.
        """
        request = MessageRequest(self._comm, _post(self._isend, array, to, tag), array)
        self._leaving.append(request)
        self.sent, self.sent_bytes = self.sent + 1, self.sent_bytes + array.nbytes
        return request

    def receive(self, array: Buffer, source: int, tag: int) -> MessageRequest:
        """Post the receive of a message.

        Args:
            array: of the message's shape and dtype, C-contiguous, on the host; written from now
                until it is there.
            source: the rank that sends it.
            tag: the tag that it sends with.

        Raises:
            ShapeError, DtypeError: for an array with gaps, a read-only one, or one of Python
                objects.
        """
        array = check_contiguous(array)
        return MessageRequest(self._comm, _post(self._comm.irecv, array, source, tag), array)

    def progress(self) -> None:
        """Let messages move on, and let go of the arrays that have left. Never waits."""
        self._leaving = [request for request in self._leaving if not request.poll()]

    def drain(self) -> None:
        """Return when everything that was sent has left."""
        for request in self._leaving:
            request.wait()
        self._leaving = []

    def free(self) -> None:
        """Give the communicator back. Collective."""
        self._comm.free()


class Rendezvous:
    """Sends arrays between two ranks of which either may fail just before. `rendezvous` makes one.

        sender          receiver
        I have it  <->  I have room         a byte each way
        array       ->  array               only if both said yes

    Each call returns when the other end has come. So two ranks must not send to one another at the
    same time; ranks that all go through the same list of transfers in the same order are safe.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def send(self, array: Buffer | None, to: int) -> bool:
        """Send the array, and return whether it was received.

        Args:
            array: any shape, numbers, on the host; None when there is nothing to send after all.
            to: the rank that calls `receive`.
        """
        return self._pass(self._comm.isend, array, to)

    def receive(self, array: Buffer | None, source: int) -> bool:
        """Write into the array what `source` sends, and return whether it sent anything.

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

    def _pass(self, call: Callable[..., Request], array: Buffer | None, partner: int) -> bool:
        local, theirs = np.array([array is not None]), np.empty(1, bool)
        comm, tag = self._comm, HANDSHAKE_TAG
        comm.wait_all([comm.irecv(theirs, partner, tag), comm.isend(local, partner, tag)])
        if array is None or not theirs[0]:
            return False
        comm.wait_all(_post(call, array, partner, DATA_TAG))
        return True


@contextmanager
def rendezvous(group: Group) -> Iterator[Rendezvous]:
    """Return a rendezvous of the group's ranks on a duplicate of its communicator. Collective."""
    comm = group.comm.duplicate()
    try:
        yield Rendezvous(comm)
    finally:
        comm.free()


def _post(call: Callable[..., Request], array: Buffer, partner: int, tag: int) -> list[Request]:
    return [call(piece, partner, tag) for piece in pieces(as_bytes(array))]
