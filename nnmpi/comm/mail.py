"""One array from one rank to another, where either may fail just before: nobody waits for a message that never comes.

    sender          receiver
    I have it  <->  I have room         a byte each way
    array       ->  array               only if both said yes

The messages travel on a communicator of their own, so that they never meet others'.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from nnmpi.comm.buffers import Buffer, as_bytes, check_contiguous, pieces
from nnmpi.comm.execute import MAX_MESSAGE_BYTES
from nnmpi.comm.group import Group

HANDSHAKE_TAG, DATA_TAG = 0, 1


class Mail:
    """Sends arrays between two ranks of a group. `opened` makes one.

    Neither call depends on MPI's buffering: each returns when the other end has come. So two ranks must not send to
    one another at the same time; all ranks that go through the same list of transfers in the same order are safe.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm

    def send(self, array: Buffer | None, to: int) -> bool:
        """Send the array, and return whether it was received.

        Args:
            array: any shape, numbers, on the host; None when there is nothing to send after all.
            to: the rank that calls `receive`.
        """
        agreed = self._agree(array is not None, to)
        if agreed and array is not None:
            for piece in pieces(as_bytes(array), MAX_MESSAGE_BYTES):
                self._comm.Send([piece, MPI.BYTE], to, DATA_TAG)
        return agreed

    def receive(self, array: Buffer | None, source: int) -> bool:
        """Write into the array what `source` sends, and return whether it sent anything.

        Args:
            array: shape and dtype as at the other end, C-contiguous; None to refuse.
            source: the rank that calls `send`.

        Raises:
            ShapeError, DtypeError: for an array with gaps, a read-only one, or one of Python objects.
        """
        if array is not None:
            check_contiguous(array)
        agreed = self._agree(array is not None, source)
        if agreed and array is not None:
            for piece in pieces(as_bytes(array), MAX_MESSAGE_BYTES):
                self._comm.Recv([piece, MPI.BYTE], source, DATA_TAG)
        return agreed

    def _agree(self, ready: bool, partner: int) -> bool:
        own, theirs = np.array([ready], np.uint8), np.empty(1, np.uint8)
        self._comm.Sendrecv(own, partner, HANDSHAKE_TAG, theirs, partner, HANDSHAKE_TAG)
        return ready and bool(theirs[0])


@contextmanager
def opened(group: Group) -> Iterator[Mail]:
    """Give a mail between the ranks of the group, on a duplicate of its communicator. Collective."""
    comm = group.comm.Dup()
    try:
        yield Mail(comm)
    finally:
        comm.Free()
