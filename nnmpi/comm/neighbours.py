"""Messages between single ranks: all that one rank sends and receives at a time, posted together.

    rank 0   receive from 1, send to 1                      every receive is posted before a send begins, so nothing
    rank 1   receive from 0, receive from 2, send to 0 ...  waits for another, and no message needs room in MPI

Not collective: only the ranks that have something to exchange call it. Between two ranks, messages are paired in the
order in which both name them.
"""

from collections.abc import Sequence

from mpi4py import MPI

from nnmpi.comm.buffers import Buffer, as_bytes, check_contiguous, is_device, pieces
from nnmpi.comm.device.hosts import put, room_like, to_hosts
from nnmpi.comm.execute import MAX_MESSAGE_BYTES
from nnmpi.comm.group import BLOCKING_TAG, Group


def exchange(group: Group, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]]) -> None:
    """Send some arrays and fill others; return when all are sent and filled.

    Args:
        sends: (rank, array) any shape, C-contiguous; what goes to that rank.
        receives: (rank, array) any shape, C-contiguous and writeable; filled with what comes from that rank, of the
            same length. Arrays of a device go through host memory.

    Raises:
        ShapeError: for an array with gaps, or a read-only one.
        DtypeError: for an object array.
    """
    hosts = to_hosts([array if is_device(array) else check_contiguous(array) for _, array in sends])
    room = [room_like(array, array.shape) if is_device(array) else array for _, array in receives]
    requests: list[MPI.Request] = []
    for (rank, _), array in zip(receives, room, strict=True):
        for piece in pieces(as_bytes(check_contiguous(array)), MAX_MESSAGE_BYTES):
            requests.append(group.comm.Irecv([piece, MPI.BYTE], rank, BLOCKING_TAG))
    for (rank, _), array in zip(sends, hosts, strict=True):
        for piece in pieces(as_bytes(check_contiguous(array)), MAX_MESSAGE_BYTES):
            requests.append(group.comm.Isend([piece, MPI.BYTE], rank, BLOCKING_TAG))
    MPI.Request.Waitall(requests)
    for (_, array), host in zip(receives, room, strict=True):
        put(host, array)
