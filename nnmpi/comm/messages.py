"""Messages between two ranks that nobody waits for where it can be avoided: receives posted early, sends on their way.

    sender    send --------- goes on -------- progress ------ drain
                  \\
    receiver   receive (posted) --- goes on --- wait

A send returns at once and keeps its array until the message has left; a receive is a buffer of its own that is posted
before the message is needed. So no order of calls on the two sides can lock them, whatever MPI buffers or does not.
"""

from __future__ import annotations

from mpi4py import MPI

from nnmpi.comm.buffers import Buffer, as_bytes, check_contiguous, pieces
from nnmpi.comm.execute import MAX_MESSAGE_BYTES
from nnmpi.comm.group import Group


class Arrival:
    """A message that is received into `array`, which may be read once `wait` has returned."""

    __slots__ = ("_requests", "array")

    def __init__(self, array: Buffer, requests: list[MPI.Request]) -> None:
        self.array, self._requests = array, requests

    def ready(self) -> bool:
        """Return whether the message is there, without waiting; then the array may be read."""
        if self._requests and MPI.Request.Testall(self._requests):
            self._requests = []
        return not self._requests

    def wait(self) -> Buffer:
        """Return the array when the message is there."""
        MPI.Request.Waitall(self._requests)
        self._requests = []
        return self.array

    def cancel(self) -> None:
        """Give up a message that will not be sent; the array is free again."""
        for request in self._requests:
            request.Cancel()
        self.wait()


class Departure:
    """A message on its way out of an array, which may be changed once `wait` has returned."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests

    def wait(self) -> None:
        """Return when the message has left."""
        MPI.Request.Waitall(self._requests)
        self._requests = []


class Messages:
    """Point-to-point messages in a group, on a communicator of their own. Making one is collective.

    Messages with one tag from one rank to another arrive in the order in which they were sent.

    Args:
        synchronous: whether a message leaves only when its receive has been posted: MPI then buffers nothing, which
            tests use to show that nothing depends on it.

    Attributes:
        sent, sent_bytes: the messages that were sent so far, and their bytes; one that was cut counts once.
    """

    def __init__(self, group: Group, synchronous: bool = False) -> None:
        self._comm = group.comm.Dup()
        self._post = self._comm.Issend if synchronous else self._comm.Isend
        self._leaving: list[tuple[MPI.Request, Buffer]] = []
        self.sent = self.sent_bytes = 0

    @property
    def leaving(self) -> int:
        """The number of sends whose arrays are still needed, as far as this rank knows."""
        return len(self._leaving)

    def send(self, array: Buffer, to: int, tag: int) -> Departure:
        """Send an array; it must not be changed until `drain`, or the `wait` of what is returned, has come back.

        Args:
            array: any shape, numbers, C-contiguous, on the host.
        """
        posted = [
            (self._post([piece, MPI.BYTE], to, tag), piece) for piece in pieces(as_bytes(array), MAX_MESSAGE_BYTES)
        ]
        self._leaving += posted
        self.sent, self.sent_bytes = self.sent + 1, self.sent_bytes + array.nbytes
        return Departure([request for request, _ in posted])

    def receive(self, array: Buffer, source: int, tag: int) -> Arrival:
        """Post the receive of a message into an array of its shape and dtype.

        Raises:
            ShapeError, DtypeError: for an array with gaps, a read-only one, or one of Python objects.
        """
        parts = pieces(as_bytes(check_contiguous(array)), MAX_MESSAGE_BYTES)
        return Arrival(array, [self._comm.Irecv([piece, MPI.BYTE], source, tag) for piece in parts])

    def progress(self) -> None:
        """Let messages move on, and let go of the arrays that have left. Never waits."""
        self._leaving = [each for each in self._leaving if not each[0].Test()]

    def drain(self) -> None:
        """Return when everything that was sent has left."""
        MPI.Request.Waitall([request for request, _ in self._leaving])
        self._leaving = []

    def free(self) -> None:
        """Give the communicator back to MPI. Collective."""
        self._comm.Free()
