"""The one message that workers and servers exchange: sixteen numbers, then a shard's values.

    header, 16 float64                                                  payload
    push    segment serial shard | batch part rows ... norm ... broken  | the gradient's part of each flat array |
    reply   segment serial shard | batch part worker over version ...   | the weights' part of each flat array   |

All messages between one worker and one server are of one length, so that a receive can be posted before anybody knows
what will come. Whole numbers below 2**53 go through float64 unharmed. Nothing here sends anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.record import Backend
from nnmpi.comm.buffers import is_device
from nnmpi.comm.device.hosts import room_for
from nnmpi.comm.device.lane import lane_of
from nnmpi.errors import CommError
from nnmpi.parallel.server import Push, Reply
from nnmpi.parallel.shards import Shard
from nnmpi.synchrony.dealer import Unit

HEADER = 16
HEADER_BYTES = HEADER * 8


@dataclass(frozen=True)
class Stamp:
    """What a message belongs to, so that one that comes at the wrong time is seen.

    Attributes:
        segment: the number of the segment, from 1.
        serial: how many gradients the worker has pushed to this server since the start: in a push this one counted, in
            a reply those that the server has taken.
        shard: the number of the shard.
    """

    segment: int
    serial: int
    shard: int

    def check(self, expected: Stamp, what: str) -> None:
        """Raise unless this is the stamp that must come now.

        Raises:
            CommError: with both.
        """
        if self != expected:
            raise CommError(
                f"{what} has segment {self.segment}, gradient {self.serial}, shard {self.shard}, but segment "
                f"{expected.segment}, gradient {expected.serial}, shard {expected.shard} must come now; all ranks "
                "must call open, pull, push and finish for the same segments"
            )


class Parcel:
    """A header and room for a shard's values, in one buffer that can be sent or received.

    Args:
        shard: which part of each flat array.
        arrays: the flat arrays, for their dtypes.

    Attributes:
        buffer: (HEADER_BYTES + bytes of the shard,) uint8, in host memory.
        header: (16,) float64, a view of its beginning.
        values: views of the rest, one for each flat array: 1-D, of its dtype, maybe empty.
    """

    def __init__(self, shard: Shard, arrays: Sequence[Array]) -> None:
        views = shard.views(arrays)
        dtypes = [np.dtype(str(view.dtype)) for view in views]
        sizes = [view.size * dtype.itemsize for view, dtype in zip(views, dtypes, strict=True)]
        stops = list(accumulate(sizes, initial=HEADER_BYTES))
        xp = namespace(views[0]) if views else np
        self._lane = None if xp is np else lane_of(xp)
        self.buffer = room_for(xp, stops[-1], np.uint8)
        self.buffer[...] = 0
        self.header = self.buffer[:HEADER_BYTES].view(np.float64)
        self.values: list[Array] = [
            self.buffer[start:stop].view(dtype) for start, stop, dtype in zip(stops, stops[1:], dtypes, strict=False)
        ]

    def put(self, views: Sequence[Array], backend: Backend) -> None:
        """Copy arrays of the shard's lengths, one for each flat array, into the buffer."""
        pairs = list(zip(self.values, views, strict=True))
        if self._lane is not None and all(is_device(view) for view in views):
            self._lane.fork()
            self._lane.copy_out([(view, value) for value, view in pairs]).synchronize()
            return
        for value, view in pairs:
            value[...] = backend.to_host(view)

    def on_device(self, backend: Backend) -> list[Array]:
        """Return the values as arrays of the backend: with NumPy these are the buffer itself."""
        if self._lane is None:
            return [backend.asarray(value) for value in self.values]
        arrays: list[Array] = [backend.xp.empty(value.shape, dtype=value.dtype) for value in self.values]
        self._lane.fork()
        self._lane.copy_in(list(zip(arrays, self.values, strict=True))).synchronize()  # the buffer is free again
        return arrays


def write_push(header: Array, stamp: Stamp, push: Push) -> None:
    """Write what a worker says about its gradient into (16,) float64."""
    header[...] = (
        *(stamp.segment, stamp.serial, stamp.shard),
        *(push.unit.batch, push.unit.part, push.rows, push.global_rows, push.lr, push.version),
        *(push.loss_sum, push.correct, push.norm, push.compute_s, push.wait_s, push.signal, push.broken),
    )


def read_push(header: Array) -> tuple[Stamp, Push]:
    """Return what `write_push` wrote."""
    numbers = header.tolist()
    segment, serial, shard, batch, part, rows, global_rows = (int(number) for number in numbers[:7])
    lr, version, loss_sum, correct, norm, compute_s, wait_s, signal, broken = numbers[7:]
    push = Push(
        unit=Unit(batch, part),
        rows=rows,
        global_rows=global_rows,
        lr=lr,
        version=int(version),
        loss_sum=loss_sum,
        correct=correct,
        norm=norm,
        compute_s=compute_s,
        wait_s=wait_s,
        signal=int(signal),
        broken=bool(broken),
    )
    return Stamp(segment, serial, shard), push


def write_reply(header: Array, stamp: Stamp, reply: Reply) -> None:
    """Write what a server says about its weights into (16,) float64; a batch of -1 means no unit."""
    unit = (-1, -1) if reply.unit is None else (reply.unit.batch, reply.unit.part)
    said = (
        *(stamp.segment, stamp.serial, stamp.shard),
        *unit,
        *(reply.worker, reply.over, reply.version, reply.slowest, reply.signal),
    )
    header[: len(said)] = said


def read_reply(header: Array) -> tuple[Stamp, Reply]:
    """Return what `write_reply` wrote."""
    segment, serial, shard, batch, part, *said = (int(number) for number in header[:10])
    worker, over, version, slowest, signal = said
    unit = None if batch < 0 else Unit(batch, part)
    reply = Reply(worker=worker, unit=unit, over=bool(over), version=version, slowest=slowest, signal=signal)
    return Stamp(segment, serial, shard), reply
