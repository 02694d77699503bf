"""How the messages of workers and servers look: eighteen numbers, then the values of one shard.

    header, 18 float64                                                    payload
    push    segment sequence shard | batch part rows ... norm ... broken  | the gradient's part of each flat array |
    reply   segment sequence shard | batch part worker over version ...   | the weights' part of each flat array   |
            `---- MessageId ----'

All messages between one worker and one server have the same length, so that a receive can be posted before anybody
knows what will come. Float64 holds whole numbers below 2**53 exactly. This module sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.comm.device.staged import from_host, room_for, to_host
from nnmpi.errors import CommError
from nnmpi.parallel.server.parameter_server import Push, Reply
from nnmpi.parallel.server.shards import Shard
from nnmpi.synchrony.consistency import Task

HEADER = 18
HEADER_BYTES = HEADER * 8


@dataclass(frozen=True)
class MessageId:
    """Which message this is, so that a message that comes at the wrong time is noticed.

    Attributes:
        segment: the number of the segment, from 1.
        sequence: the sequence number: how many gradients the worker has pushed to this server since the start. A push
            counts itself; a reply counts the gradients that the server has taken.
        shard: the number of the shard, which is that of its server.
    """

    segment: int
    sequence: int
    shard: int

    def check(self, expected: MessageId, what: str) -> None:
        """Raise unless this is the id that must come now.

        Raises:
            CommError: when it is another one; the message names both.
        """
        if self != expected:
            raise CommError(
                f"{what} has segment {self.segment}, gradient {self.sequence}, shard {self.shard}, but segment "
                f"{expected.segment}, gradient {expected.sequence}, shard {expected.shard} must come now; all ranks "
                "must call open, pull, push and finish for the same segments"
            )


class MessageBuffer:
    """A header and room for a shard's values, in one buffer that can be sent or received.

    Args:
        shard: which part of each flat array the message carries.
        arrays: the flat arrays; only their dtypes and their library matter.

    Attributes:
        buffer: (HEADER_BYTES + bytes of the shard,) uint8, in host memory.
        header: (18,) float64, a view of the buffer's beginning.
        values: views of the rest, one for each flat array: 1-D, of that array's dtype, maybe empty.
    """

    def __init__(self, shard: Shard, arrays: Sequence[Array]) -> None:
        views = shard.views(arrays)
        dtypes = [np.dtype(str(view.dtype)) for view in views]
        sizes = [view.size * dtype.itemsize for view, dtype in zip(views, dtypes, strict=True)]
        stops = list(accumulate(sizes, initial=HEADER_BYTES))
        self.buffer = room_for(namespace(views[0]) if views else np, stops[-1], np.uint8)
        self.buffer[...] = 0
        self.header = self.buffer[:HEADER_BYTES].view(np.float64)
        self.values: list[Array] = [
            self.buffer[start:stop].view(dtype) for start, stop, dtype in zip(stops, stops[1:], dtypes, strict=False)
        ]

    def put(self, views: Sequence[Array]) -> None:
        """Copy arrays of the shard's lengths, one for each flat array, into the buffer."""
        for value, view in zip(self.values, views, strict=True):
            value[...] = to_host(view)

    def on_device(self, backend: Backend) -> list[Array]:
        """Return the values as arrays of the backend: with NumPy these are the buffer itself."""
        return [from_host(value, backend.xp) for value in self.values]


def write_push(header: Array, message_id: MessageId, push: Push) -> None:
    """Write what a worker reports about its gradient into a header.

    Args:
        header: (18,) float64.
        message_id: of the push.
        push: what comes with the gradient.
    """
    header[...] = (
        *(message_id.segment, message_id.sequence, message_id.shard),
        *(push.task.batch, push.task.part, push.rows, push.targets, push.global_targets),
        *(push.lr, push.version),
        *(push.loss_sum, push.score_sum, push.norm, push.compute_s, push.wait_s, push.input_s),
        *(push.signal, push.broken),
    )


def read_push(header: Array) -> tuple[MessageId, Push]:
    """Return what `write_push` wrote into a header, (18,) float64."""
    numbers = header.tolist()
    segment, sequence, shard, batch, part, rows, targets, global_targets = (int(number) for number in numbers[:8])
    lr, version, loss_sum, score_sum, norm, compute_s, wait_s, input_s, signal, broken = numbers[8:]
    push = Push(
        task=Task(batch, part),
        rows=rows,
        targets=targets,
        global_targets=global_targets,
        lr=lr,
        version=int(version),
        loss_sum=loss_sum,
        score_sum=score_sum,
        norm=norm,
        compute_s=compute_s,
        wait_s=wait_s,
        input_s=input_s,
        signal=int(signal),
        broken=bool(broken),
    )
    return MessageId(segment, sequence, shard), push


def write_reply(header: Array, message_id: MessageId, reply: Reply) -> None:
    """Write what a server answers into a header; a batch of -1 means no task.

    Args:
        header: (18,) float64; its last numbers stay as they are.
        message_id: of the reply.
        reply: what comes with the weights.
    """
    task = (-1, -1) if reply.task is None else (reply.task.batch, reply.task.part)
    numbers = (
        *(message_id.segment, message_id.sequence, message_id.shard),
        *task,
        *(reply.worker, reply.over, reply.version, reply.slowest, reply.signal),
    )
    header[: len(numbers)] = numbers


def read_reply(header: Array) -> tuple[MessageId, Reply]:
    """Return what `write_reply` wrote into a header, (18,) float64."""
    segment, sequence, shard, batch, part, *rest = (int(number) for number in header[:10])
    worker, over, version, slowest, signal = rest
    task = None if batch < 0 else Task(batch, part)
    reply = Reply(worker=worker, task=task, over=bool(over), version=version, slowest=slowest, signal=signal)
    return MessageId(segment, sequence, shard), reply
