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

    def wait(self) -> Buffer:
        """Return the array when the message is there."""
        MPI.Request.Waitall(self._requests)
        self._requests = []
        return self.array


class Messages:
    """Point-to-point messages in a group, on a communicator of their own. Making one is collective.

    Messages with one tag from one rank to another arrive in the order in which they were sent.

    Args:
        synchronous: whether a message leaves only when its receive has been posted: MPI then buffers nothing, which
            tests use to show that nothing depends on it.
    """

    def __init__(self, group: Group, synchronous: bool = False) -> None:
        self._comm = group.comm.Dup()
        self._post = self._comm.Issend if synchronous else self._comm.Isend
        self._leaving: list[tuple[MPI.Request, Buffer]] = []

    @property
    def leaving(self) -> int:
        """The number of sends whose arrays are still needed, as far as this rank knows."""
        return len(self._leaving)

    def send(self, array: Buffer, to: int, tag: int) -> None:
        """Send an array; it must not be changed until `drain` has returned.

        Args:
            array: any shape, numbers, C-contiguous, on the host.
        """
        for piece in pieces(as_bytes(array), MAX_MESSAGE_BYTES):
            self._leaving.append((self._post([piece, MPI.BYTE], to, tag), piece))

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
