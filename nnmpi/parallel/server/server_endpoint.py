"""A parameter server's end of the messages: whenever it is polled, it takes gradients that came and sends weights out.

    worker 1   push ------------.                 .---- reply
    worker 2   push ---.        |                 |---- reply
                       v        v                 |
    server     | poll: take, take; release: update, then the replies |

The server posts the receive for a worker's next gradient before it sends the reply that lets the worker compute it. So
every push finds its receive posted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.comm.execution import MessageRequest
from nnmpi.comm.point_to_point import Messages
from nnmpi.errors import CommError
from nnmpi.parallel.server.parameter_server import ParameterServer, Push, Reply
from nnmpi.parallel.server.wire_format import MessageBuffer, MessageId, read_push, write_reply
from nnmpi.tensor.flat import FlatStorage

PUSH_TAG, REPLY_TAG, TOTAL_TAG = 0, 1, 2

OnPush: TypeAlias = Callable[[int, Push], None]
# Takes a reply to the worker on this rank, without a message: number of the server, message id, reply, the weights.
Deliver: TypeAlias = Callable[[int, MessageId, Reply, Sequence[Array]], None]


@dataclass(frozen=True)
class Roles:
    """Which ranks are servers and which are workers, and what this rank is. A rank may be both.

    Attributes:
        servers, workers: the rank of each server, and of each worker.
        server, worker: the number that this rank has among the servers, and among the workers; None if it is none.
    """

    servers: Sequence[int]
    workers: Sequence[int]
    server: int | None
    worker: int | None

    @classmethod
    def of(cls, rank: int, servers: Sequence[int], workers: Sequence[int]) -> Roles:
        """Return the roles as this rank sees them.

        Args:
            rank: this rank.
            servers, workers: the rank of each server, and of each worker.
        """
        return cls(
            servers,
            workers,
            servers.index(rank) if rank in servers else None,
            workers.index(rank) if rank in workers else None,
        )


class ServerEndpoint:
    """Receives the gradients of one server and answers its workers.

    It keeps two buffers of the shard's size for every worker on another rank: one for pushes, one for replies.

    Args:
        server: the server on this rank.
        roles: which ranks are servers and workers.
        messages: carries messages between all ranks.
        storage: of the model.
        backend: where the model's arrays live.
        on_push: called on server 0 for every gradient that arrives, after it was taken and before anybody goes on.
        deliver: takes replies to the worker on this rank.
    """

    def __init__(
        self,
        server: ParameterServer,
        roles: Roles,
        messages: Messages,
        storage: FlatStorage,
        backend: Backend,
        on_push: OnPush,
        deliver: Deliver,
    ) -> None:
        self._server, self._roles, self._messages, self._backend = server, roles, messages, backend
        self._on_push, self._deliver = on_push, deliver
        others = [worker for worker in range(len(roles.workers)) if worker != roles.worker]
        self._pushes = {worker: MessageBuffer(server.shard, storage.data) for worker in others}
        self._replies = {worker: MessageBuffer(server.shard, storage.data) for worker in others}
        self._coming: dict[int, MessageRequest] = {}  # by worker
        self._going: dict[int, MessageRequest] = {}  # the last reply to each worker
        self._sequences = [0] * len(roles.workers)  # gradients taken from each worker
        self._given = [0] * len(roles.workers)  # the version that each worker got last
        self._segment = 0
        self._total = np.zeros(2, np.int64)  # the segment, and how many gradients there are in it
        self._total_coming: MessageRequest | None = None
        self._total_known = False  # whether server 0, which assigns the tasks, has told the others

    @property
    def over(self) -> bool:
        """Whether every gradient of the segment has come, and been answered."""
        return self._server.controller.over

    def open(self, segment: int, first: int, stop: int, bound: int | None) -> None:
        """Begin a segment and answer all workers that may go on.

        Args:
            segment: its number, from 1.
            first, stop, bound: see `PushPull.open`.
        """
        self._segment, self._total_known = segment, False
        if self._roles.server != 0:
            self._total_coming = self._messages.receive(self._total, self._roles.servers[0], TOTAL_TAG)
        self._server.open(first, stop, bound)
        self._answer()

    def poll(self) -> bool:
        """Take the gradients that have come, in the order of the workers, and answer.

        Never waits.

        Returns:
            Whether anything had come.
        """
        moved = False
        for worker in sorted(self._coming):
            if self._coming[worker].poll():
                del self._coming[worker]
                message = self._pushes[worker]
                message_id, push = read_push(message.header)
                self.take(worker, message_id, push, None if push.broken else message.on_device(self._backend))
                moved = True
        if self._total_coming is not None and self._total_coming.poll():
            self._total_coming = None
            self._check_total()
            self._server.controller.end(int(self._total[1]))
            self._answer()
            moved = True
        self._messages.progress()
        return moved

    def take(self, worker: int, message_id: MessageId, push: Push, grads: list[Array] | None) -> None:
        """Give a gradient to the server, and answer all workers that may go on now.

        Args:
            worker: whose gradient it is.
            message_id: of the push.
            push: what came with the gradient.
            grads: one array for each flat one, which stay unchanged until the worker gets its reply. None if the
                gradient is broken.

        Raises:
            CommError: for a gradient that must not come now, or of other weights than this worker got last.
        """
        number = self._server.shard.number
        self._sequences[worker] += 1
        message_id.check(MessageId(self._segment, self._sequences[worker], number), f"a gradient of worker {worker}")
        if push.version != self._given[worker]:
            raise CommError(
                f"worker {worker} pushed a gradient of version {push.version} of shard {number}, but got version "
                f"{self._given[worker]} last; a worker must compute on what it pulled"
            )
        self._server.push(worker, push, grads)
        if number == 0:
            self._on_push(worker, push)
        self._answer()

    def free(self) -> None:
        """Cancel the receives of gradients that nobody will send."""
        for arrival in self._coming.values():
            arrival.cancel()
        self._coming = {}

    def _answer(self) -> None:
        # Replies that travel go first: they are on their way while the reply to this rank's own worker is copied.
        for reply in sorted(self._server.release(), key=lambda reply: reply.worker == self._roles.worker):
            self._reply(reply)
        queue = self._server.controller.queue
        if queue is not None and queue.exhausted and not self._total_known:
            self._total_known = True
            self._total[...] = self._segment, queue.assigned
            for rank in self._roles.servers[1:]:
                self._messages.send(self._total, rank, TOTAL_TAG)

    def _reply(self, reply: Reply) -> None:
        worker, server = reply.worker, self._server
        message_id = MessageId(self._segment, self._sequences[worker], server.shard.number)
        self._given[worker] = reply.version
        if worker == self._roles.worker:
            self._deliver(server.shard.number, message_id, reply, server.master)
            return
        if worker in self._going:
            self._going[worker].wait()  # the worker has pushed since that reply, so this hardly ever waits
        message, rank = self._replies[worker], self._roles.workers[worker]
        write_reply(message.header, message_id, reply)
        message.put(server.master)
        # A receive may be left from the last segment: this server let the worker go on before it knew that it was over.
        if not reply.over and worker not in self._coming:
            self._coming[worker] = self._messages.receive(self._pushes[worker].buffer, rank, PUSH_TAG)
        self._going[worker] = self._messages.send(message.buffer, rank, REPLY_TAG)

    def _check_total(self) -> None:
        if self._total[0] != self._segment:
            raise CommError(
                f"server 0 has ended segment {self._total[0]} while server {self._roles.server} is in segment "
                f"{self._segment}; all ranks must open and finish the same segments"
            )
