"""A parameter server's end of the messages: gradients come in, weights go out, whenever it is polled.

    worker 1   push ------------.                 .---- reply
    worker 2   push ---.        |                 |---- reply
                       v        v                 |
    server     | poll: take, take; release: update, then the replies |

The receive of a worker's next gradient is posted before the reply that lets it compute one; so it meets every push.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.record import Backend
from nnmpi.comm.messages import Arrival, Departure, Messages
from nnmpi.errors import CommError
from nnmpi.parallel.parcel import Parcel, Stamp, read_push, write_reply
from nnmpi.parallel.server import ParameterServer, Push, Reply
from nnmpi.tensor.flat import FlatStorage

PUSH_TAG, REPLY_TAG, TOTAL_TAG = 0, 1, 2

Note: TypeAlias = Callable[[int, Push], None]
# What a reply is given to that goes to the worker on this rank: number of the server, stamp, reply, the weights.
Deliver: TypeAlias = Callable[[int, Stamp, Reply, Sequence[Array]], None]


@dataclass(frozen=True)
class Seats:
    """Who is where in the group.

    Attributes:
        servers, workers: the rank of each.
        server, worker: the numbers that this rank has among them; None if it is none.
    """

    servers: Sequence[int]
    workers: Sequence[int]
    server: int | None
    worker: int | None

    @classmethod
    def of(cls, rank: int, servers: Sequence[int], workers: Sequence[int]) -> Seats:
        """Return the seats as this rank sees them."""
        return cls(
            servers,
            workers,
            servers.index(rank) if rank in servers else None,
            workers.index(rank) if rank in workers else None,
        )


class Serving:
    """Answers the workers of one server. It keeps two buffers of the shard's size for every worker on another rank.

    Args:
        server: the server on this rank.
        seats: who is where.
        messages: between all ranks.
        storage: of the model.
        backend: where the model's arrays live.
        note: called on server 0 for every gradient that arrives, after it was taken and before anybody goes on.
        deliver: takes replies for the worker on this rank.
    """

    def __init__(
        self,
        server: ParameterServer,
        seats: Seats,
        messages: Messages,
        storage: FlatStorage,
        backend: Backend,
        note: Note,
        deliver: Deliver,
    ) -> None:
        self._server, self._seats, self._messages, self._backend = server, seats, messages, backend
        self._note, self._deliver = note, deliver
        others = [worker for worker in range(len(seats.workers)) if worker != seats.worker]
        self._pushes = {worker: Parcel(server.shard, storage.data) for worker in others}
        self._replies = {worker: Parcel(server.shard, storage.data) for worker in others}
        self._coming: dict[int, Arrival] = {}  # by worker
        self._going = {worker: Departure([]) for worker in others}
        self._serials = [0] * len(seats.workers)  # gradients taken from each worker
        self._given = [0] * len(seats.workers)  # the version that each worker got last
        self._segment = 0
        self._total = np.zeros(2, np.int64)  # segment, gradients in it
        self._total_coming: Arrival | None = None
        self._total_known = False  # to server 0, which tells it the others

    @property
    def over(self) -> bool:
        """Whether every gradient of the segment has come, and been answered."""
        return self._server.desk.over

    def open(self, segment: int, first: int, stop: int, bound: int | None) -> None:
        """Begin a segment and answer all who may go on. See `PushPull.open`."""
        self._segment, self._total_known = segment, False
        if self._seats.server != 0:
            self._total_coming = self._messages.receive(self._total, self._seats.servers[0], TOTAL_TAG)
        self._server.open(first, stop, bound)
        self._answer()

    def poll(self) -> bool:
        """Take what has come, in the order of the workers, and answer; return whether anything had. Never waits."""
        moved = False
        for worker in sorted(self._coming):
            if self._coming[worker].ready():
                del self._coming[worker]
                parcel = self._pushes[worker]
                stamp, push = read_push(parcel.header)
                self.take(worker, stamp, push, None if push.broken else parcel.on_device(self._backend))
                moved = True
        if self._total_coming is not None and self._total_coming.ready():
            self._total_coming = None
            self._check_total()
            self._server.desk.end(int(self._total[1]))
            self._answer()
            moved = True
        self._messages.progress()
        return moved

    def take(self, worker: int, stamp: Stamp, push: Push, grads: list[Array] | None) -> None:
        """Give a gradient to the server, and answer all who may go on now.

        Args:
            grads: one array for each flat one; unchanged until the worker gets its reply. None if it is broken.

        Raises:
            CommError: for a gradient that must not come now, or of other weights than this worker got last.
        """
        number = self._server.shard.number
        self._serials[worker] += 1
        stamp.check(Stamp(self._segment, self._serials[worker], number), f"a gradient of worker {worker}")
        if push.version != self._given[worker]:
            raise CommError(
                f"worker {worker} pushed a gradient of version {push.version} of shard {number}, but got version "
                f"{self._given[worker]} last; a worker must compute on what it pulled"
            )
        self._server.push(worker, push, grads)
        if number == 0:
            self._note(worker, push)
        self._answer()

    def free(self) -> None:
        """Give up the receives of gradients that nobody will send."""
        for arrival in self._coming.values():
            arrival.cancel()
        self._coming = {}

    def _answer(self) -> None:
        # What must travel goes first.
        for reply in sorted(self._server.release(), key=lambda reply: reply.worker == self._seats.worker):
            self._reply(reply)
        dealer = self._server.desk.dealer
        if dealer is not None and dealer.exhausted and not self._total_known:
            self._total_known = True
            self._total[...] = self._segment, dealer.dealt
            for rank in self._seats.servers[1:]:
                self._messages.send(self._total, rank, TOTAL_TAG)

    def _reply(self, reply: Reply) -> None:
        worker, server = reply.worker, self._server
        stamp = Stamp(self._segment, self._serials[worker], server.shard.number)
        self._given[worker] = reply.version
        if worker == self._seats.worker:
            self._deliver(server.shard.number, stamp, reply, server.master)
            return
        # What this worker said since the last reply shows that it has come, so this hardly ever takes any time.
        self._going[worker].wait()
        parcel, rank = self._replies[worker], self._seats.workers[worker]
        write_reply(parcel.header, stamp, reply)
        parcel.put(server.master, self._backend)
        # One may be there still: from a segment whose end this server had not known when it let the worker go on.
        if not reply.over and worker not in self._coming:
            self._coming[worker] = self._messages.receive(self._pushes[worker].buffer, rank, PUSH_TAG)
        self._going[worker] = self._messages.send(parcel.buffer, rank, REPLY_TAG)

    def _check_total(self) -> None:
        if self._total[0] != self._segment:
            raise CommError(
                f"server 0 has ended segment {self._total[0]} while server {self._seats.server} is in segment "
                f"{self._segment}; all ranks must open and finish the same segments"
            )
