"""MPI's own all-reduce behind the same four methods as `Execution`."""

from mpi4py import MPI

from nnmpi.comm.buffers import Buffer, check_buffer, pieces
from nnmpi.comm.execute import MAX_MESSAGE_BYTES
from nnmpi.errors import CommError


class Native:
    """MPI's all-reduce of one array, again and again.

    Unlike with `Execution` there is no tag: MPI pairs these by the order of their starts, so all ranks must start
    them in the same order.

    Args:
        array: (n,) the buffer, summed in place.
        comm: the communicator whose ranks take part.
        max_message_bytes: longer arrays are summed in pieces of at most that.
    """

    def __init__(self, array: Buffer, comm: MPI.Comm, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._comm = comm
        self._pieces = tuple(pieces(check_buffer(array), max_message_bytes))
        self._requests: list[MPI.Request] = []

    def start(self) -> None:
        """Begin; the array must be left alone until `poll` says true or `wait` is over.

        Raises:
            CommError: when it is running already.
        """
        if self._requests:
            raise CommError("this native all-reduce is still running; wait for it before the next start")
        self._requests = [self._comm.Iallreduce(MPI.IN_PLACE, piece) for piece in self._pieces]

    def poll(self) -> bool:
        """Return whether it is finished, without waiting; MPI moves on while it is asked."""
        if self._requests and MPI.Request.Testall(self._requests):
            self._requests = []
        return not self._requests

    def wait(self) -> None:
        """Return when the array holds the sum."""
        MPI.Request.Waitall(self._requests)
        self._requests = []

    def run(self) -> None:
        """Sum at once, with the blocking call: in Open MPI it takes half the time of a start and a wait."""
        for piece in self._pieces:
            self._comm.Allreduce(MPI.IN_PLACE, piece)
