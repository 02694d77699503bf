"""Push and pull: a rank sends gradients to the parameter server on rank 0 and gets weights back, point to point.

    worker     receive posted | push >--.              wait .... | weights | compute | receive posted | push >-- ...
                                         \\                      /
    rank 0      take, take, update        take, update, reply >--          take ...

    segment    open: the server replies to all workers    push, pull ...    finish: it broadcasts the weights

Between `open` and `finish` no rank waits for all the others. Rank 0 is the server and a worker, and sends itself no
messages. It posts the receive for a worker's next gradient before it sends the reply that lets the worker
compute it, so every push finds its receive posted.

A segment of T steps of N workers in step takes T (N-1) pushes and (T+1) (N-1) replies, as every worker gets the weights
once at the beginning: 2 (N-1) messages per step. (Li et al., "Scaling distributed machine learning with the parameter
server", 2014, where several servers share the weights out; the broadcast at the end of a segment is not counted.)

A message is a header and the values of the flat arrays. All messages of a kind have the same length, so that a receive
can be posted before anybody knows what will come.

Every message says its segment and how many gradients its worker has pushed, and every gradient the version of the
weights that it was computed on: a message at the wrong time is an error, and not a wrong update.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import accumulate
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.comm.execution import MessageRequest
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import Messages
from nnmpi.errors import CommError
from nnmpi.parallel.server.parameter_server import ParameterServer, Push
from nnmpi.synchrony.consistency import Task
from nnmpi.tensor.parameter import FlatStorage

TAG = 0  # a push goes to rank 0 and a reply comes from there, so that one is enough


@dataclass(frozen=True)
class Reply:
    """What comes with the weights: the worker's next task, or -1 and -1 when the segment is over for it."""

    batch: int
    part: int
    segment: int
    sequence: int
    version: int


Kind = TypeVar("Kind", bound="Push | Reply")
OnPush: TypeAlias = Callable[[int, Push], None]


class MessageBuffer(Generic[Kind]):
    """A header and the values of the flat arrays, in one buffer that can be sent or received.

    Args:
        kind: of message.
        arrays: the flat arrays; their sizes and dtypes matter, their values do not.
        backend: where they live.
    """

    def __init__(self, kind: type[Kind], arrays: Sequence[Array], backend: Backend) -> None:
        self._kind: Any = kind
        self._backend = backend
        layout = np.dtype([(each.name, "f8" if each.type is float else "i8") for each in fields(kind)])
        dtypes = [np.dtype(str(array.dtype)) for array in arrays]
        sizes = [array.size * dtype.itemsize for array, dtype in zip(arrays, dtypes, strict=True)]
        stops = list(accumulate(sizes, initial=layout.itemsize))
        self.buffer = np.zeros(stops[-1], np.uint8)
        self._header = self.buffer[: layout.itemsize].view(layout)
        self._values = [
            self.buffer[start:stop].view(dtype) for start, stop, dtype in zip(stops, stops[1:], dtypes, strict=False)
        ]

    def write(self, message: Kind, arrays: Sequence[Array]) -> None:
        """Copy a message and arrays of the flat arrays' sizes into the buffer."""
        self._header[0] = astuple(message)
        for value, array in zip(self._values, arrays, strict=True):
            value[...] = self._backend.to_host(array)

    def read(self) -> tuple[Kind, list[Array]]:
        """Return the message, and its arrays where the backend has them: with NumPy they are the buffer itself."""
        numbers = dict(zip(self._header.dtype.names or (), self._header[0].item(), strict=True))
        return self._kind(**numbers), [self._backend.asarray(value) for value in self._values]


class PushPull:
    """A rank's part in training through a parameter server. Making one is collective.

    Args:
        group: all ranks.
        storage: of the model; `data` is where pulled weights go, `grads` what is pushed.
        server: on rank 0, the server; None on the others.
        on_push: called on rank 0 with (worker, push) for every gradient that arrives: after it was taken and before
            anybody goes on, so that nothing more is assigned if the controller is closed there.
        backend: where the model's arrays live; NumPy by default.

    Raises:
        CommError: from all methods, for a message that must not come at that time.
    """

    def __init__(
        self,
        group: Group,
        storage: FlatStorage,
        server: ParameterServer | None,
        on_push: OnPush | None = None,
        backend: Backend | None = None,
    ) -> None:
        self._group, self._storage, self._server, self._on_push = group, storage, server, on_push
        self._wait_until = group.comm.world.wait_until
        self._messages = Messages(group)
        peers = (0,) if server is None else range(1, group.size)
        received, sent = (Reply, Push) if server is None else (Push, Reply)
        where = numpy_backend() if backend is None else backend
        self._received: dict[int, MessageBuffer[Any]] = {p: MessageBuffer(received, storage.data, where) for p in peers}
        self._sent: dict[int, MessageBuffer[Any]] = {p: MessageBuffer(sent, storage.data, where) for p in peers}
        self._coming: dict[int, MessageRequest] = {}  # by peer
        self._going: dict[int, MessageRequest] = {}  # the last message to each
        self._segment = self._sequence = self._version = 0  # the last two: of this worker
        self._taken, self._given = [0] * group.size, [0] * group.size  # at the server: gradients taken, version given
        self._reply: Reply | None = None
        self._over, self._asked = True, False  # asked: whether the server owes this worker an answer
        self._before = (0, 0)

    @property
    def messages(self) -> int:
        """The messages that this rank has sent since `open`."""
        return self._messages.sent - self._before[0]

    @property
    def bytes(self) -> int:
        """The bytes of these messages."""
        return self._messages.sent_bytes - self._before[1]

    def open(self, first: int, stop: int, bound: int | None) -> None:
        """Begin a segment: the server answers all workers that may go on.

        All ranks call it, not necessarily at the same time. The weights, `storage.data`, must be the same on all.

        Args:
            first, stop: the batches of the segment.
            bound: how many steps a worker may be ahead of the slowest; None for no limit.

        Raises:
            CommError: when the segment before was not finished.
        """
        if not self._over:
            raise CommError(f"segment {self._segment} is not over yet; call finish() on all ranks before open()")
        self._segment, self._over, self._asked = self._segment + 1, False, True
        self._before = self._messages.sent, self._messages.sent_bytes
        if self._server is None:
            self._expect(0)
        else:
            self._server.open(first, stop, bound)
            self._answer(self._server)

    def pull(self) -> Task | None:
        """Return what to do next when the server has answered, None at the end; `storage.data` has the weights then.

        Raises:
            CommError: when nothing was pushed since the last call, or a reply is not what must come now.
        """
        if not self._asked:
            raise CommError("there is nothing to pull; a worker calls open, then pull and push in turn")
        while self._reply is None:
            self._wait_until(self.poll)
        reply, self._reply, self._asked = self._reply, None, False
        self._over = reply.batch < 0
        return None if self._over else Task(reply.batch, reply.part)

    def push(self, push: Push) -> None:
        """Send the gradient in `storage.grads`, which must stay there until the next `pull` has returned.

        Args:
            push: what is known of the gradient. The values of a broken gradient mean nothing.

        Raises:
            CommError: when nothing was pulled since the last call.
        """
        if self._asked or self._over:
            raise CommError("there is nothing to push; a worker pulls first, and stops when there is no task")
        self._sequence, self._asked = self._sequence + 1, True
        push = replace(push, segment=self._segment, sequence=self._sequence, version=self._version)
        if self._server is None:
            self._expect(0)
            self._send(0, push, self._storage.grads)
        else:
            self._take(self._server, 0, push, self._storage.grads)

    def poll(self) -> bool:
        """Take what has come, and at the server answer; never waits. Return whether anything had come."""
        moved = False
        for peer in sorted(self._coming):
            if self._coming[peer].poll():
                del self._coming[peer]
                message, arrays = self._received[peer].read()
                if self._server is None:
                    self._accept(message, arrays)
                else:
                    self._take(self._server, peer, message, arrays)
                moved = True
        self._messages.progress()
        return moved

    def serve_until(self, until_s: float) -> None:
        """Poll whenever something comes, and return at this time of `nnmpi.clock`."""
        self._wait_until(lambda: self.poll() and False, until_s)

    def finish(self) -> None:
        """End the segment: serve until it is over, then give all ranks the server's weights. Collective.

        Raises:
            CommError: on a worker for which the segment is not over yet.
        """
        if not self._over:
            raise CommError(f"segment {self._segment} is not over for this worker; pull and push until it has no task")
        while self._server is not None and not self._server.controller.over:
            self._wait_until(self.poll)
        self._wait_until(self._all_sent)
        if self._server is not None:
            self._server.close()
        self.broadcast(self._storage.data)

    def broadcast(self, arrays: Sequence[Array]) -> None:
        """Give all ranks the server's arrays. Collective."""
        for array in arrays:
            self._group.broadcast(array)

    def free(self) -> None:
        """Give the communicator back to MPI, between two segments. Collective."""
        self._messages.free()

    def _take(self, server: ParameterServer, worker: int, push: Push, grads: Sequence[Array]) -> None:
        """Give a gradient to the server, and answer all workers that may go on now."""
        self._taken[worker] += 1
        self._check(push, self._taken[worker], f"a gradient of worker {worker}")
        if push.version != self._given[worker]:
            raise CommError(
                f"worker {worker} pushed a gradient of version {push.version} of the weights, but got version "
                f"{self._given[worker]} last; a worker must compute on what it pulled"
            )
        server.push(worker, push, grads)
        if self._on_push is not None:
            self._on_push(worker, push)
        self._answer(server)

    def _answer(self, server: ParameterServer) -> None:
        released = server.release()
        # Replies that travel go first: they are on their way while the reply to rank 0's own worker is copied.
        for worker in sorted(released, key=lambda worker: worker == 0):
            task = released[worker]
            batch, part = (-1, -1) if task is None else (task.batch, task.part)
            reply = Reply(batch, part, self._segment, self._taken[worker], server.version)
            self._given[worker] = server.version
            if worker == 0:
                self._accept(reply, server.master)
                continue
            if task is not None:
                self._expect(worker)
            self._send(worker, reply, server.master)

    def _accept(self, reply: Reply, weights: Sequence[Array]) -> None:
        """Take the server's weights."""
        self._check(reply, self._sequence, f"a reply to worker {self._group.rank}")
        self._reply, self._version = reply, reply.version
        for mine, theirs in zip(self._storage.data, weights, strict=True):
            mine[...] = theirs

    def _check(self, message: Push | Reply, sequence: int, what: str) -> None:
        if (message.segment, message.sequence) != (self._segment, sequence):
            raise CommError(
                f"{what} has segment {message.segment}, gradient {message.sequence}, but segment {self._segment}, "
                f"gradient {sequence} must come now; all ranks must call open, pull, push and finish for the same "
                "segments"
            )

    def _expect(self, peer: int) -> None:
        self._coming[peer] = self._messages.receive(self._received[peer].buffer, peer, TAG)

    def _send(self, peer: int, message: Push | Reply, arrays: Sequence[Array]) -> None:
        if peer in self._going:
            self._going[peer].wait()  # the peer has answered since, so this hardly ever waits
        self._sent[peer].write(message, arrays)
        self._going[peer] = self._messages.send(self._sent[peer].buffer, peer, TAG)

    def _all_sent(self) -> bool:
        self._messages.progress()
        return self._messages.leaving == 0
