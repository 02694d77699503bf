"""Push and pull: a rank sends gradients to the parameter servers and gets weights back, in point-to-point messages.

    worker      receive posted | push >--.              wait .... | weights | compute | receive posted | push >-- ...
                                          \\                      /
    server 0     take, take, update        take, update, reply >--          take ...
    server 1          take, update, reply >--' (a worker goes on when all have replied)

    segment     open: all servers reply to all workers    push, pull ...    finish: every server broadcasts its shard

Between `open` and `finish` no rank waits for all the others. A worker pushes one message to each server, and each
server replies with one: a header and the server's shard. Server 0 assigns the parts of the batches. As soon as it has
assigned the last one, it tells the other servers how many gradients there are in the segment, so that they know its end
too. A worker on a server's rank needs no messages for that shard.

A segment of T steps of N workers in step takes, for each server, T (N-1) pushes and (T+1) (N-1) replies, as every
worker gets the weights once at the beginning: 2 (N-1) messages per step. With a dedicated server it is N instead of
N-1. Server 0 also sends one total to each other server. (Li et al., "Scaling distributed machine learning with the
parameter server", 2014; the broadcast at the end of a segment is not counted.)

Some errors would go unnoticed and only spoil the results, so every message is checked for them: a server that replies
before the update with the worker's gradient is complete (the version of its weights has not risen then), shards of
different segments or steps (their message ids differ), a gradient that was computed on other weights than the worker
got last, and a worker that is further ahead than it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.comm.execution import MessageRequest
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import Messages
from nnmpi.errors import CommError
from nnmpi.parallel.server.parameter_server import ParameterServer, Push, Reply
from nnmpi.parallel.server.server_endpoint import PUSH_TAG, REPLY_TAG, OnPush, Roles, ServerEndpoint
from nnmpi.parallel.server.shards import Shard
from nnmpi.parallel.server.wire_format import MessageBuffer, MessageId, read_reply, write_push
from nnmpi.synchrony.consistency import Task
from nnmpi.synchrony.sync import Sync
from nnmpi.tensor.flat import FlatStorage


@dataclass(frozen=True)
class PullResult:
    """What a worker gets when all servers have answered: its next task, and what it should know.

    Attributes:
        task: the part of a batch to compute; None if it is over.
        over: whether the segment is over for this worker.
        versions: of the weights that it has now, by shard.
        slowest: the steps that the slowest worker had done when the servers answered.
        signal: the number of the signal (SIGTERM ...) that a server's rank got, 0 for none; the worker reports it to
            all servers with its next push.
    """

    task: Task | None
    over: bool
    versions: tuple[int, ...]
    slowest: int
    signal: int = 0


class PushPull:
    """A rank's part in training through parameter servers: worker, server or both. Making one is collective.

    Args:
        group: all ranks; which are servers and workers says `sync`.
        sync: how far ahead workers may be, and who is what.
        storage: of the model; `data` is where pulled weights go, `grads` what is pushed.
        shards: one for each server, the same on all ranks.
        server: on a server's rank, the server there.
        on_push: called on server 0 with (worker, push) for every gradient that arrives, dropped ones too: after it was
            taken and before anybody goes on, so that nothing more is assigned if the controller is closed there.
        synchronous_sends: whether a message leaves only when its receive is posted (for tests).
        backend: where the model's arrays live; NumPy by default.

    Raises:
        CommError: from all methods, for a message that must not come at that time.
    """

    def __init__(
        self,
        group: Group,
        sync: Sync,
        storage: FlatStorage,
        shards: Sequence[Shard],
        server: ParameterServer | None,
        on_push: OnPush | None = None,
        synchronous_sends: bool = False,
        backend: Backend | None = None,
    ) -> None:
        self._group, self._storage, self._shards, self._server = group, storage, shards, server
        self._wait_until = group.comm.world.wait_until
        self._backend = numpy_backend() if backend is None else backend
        self._roles = Roles.of(group.rank, sync.server_ranks(group.size), sync.worker_ranks(group.size))
        # With backup workers a gradient that comes late is dropped, and the update that its worker waits for lacks it.
        self._drops = sync.backup > 0
        self._messages = Messages(group, synchronous_sends)
        on_push = (lambda worker, push: None) if on_push is None else on_push
        self._endpoint = (
            None
            if server is None
            else ServerEndpoint(server, self._roles, self._messages, storage, self._backend, on_push, self._accept)
        )
        self._number = -1 if self._roles.worker is None else self._roles.worker
        distant = [n for n in range(len(shards)) if self._roles.worker is not None and n != self._roles.server]
        self._pushes = {number: MessageBuffer(shards[number], storage.data) for number in distant}
        self._replies = {number: MessageBuffer(shards[number], storage.data) for number in distant}
        self._going: dict[int, MessageRequest] = {}  # the last push to each server
        self._coming: dict[int, MessageRequest] = {}  # by server
        self._replied: dict[int, Reply] = {}  # by server: those that have answered since the last push
        self._versions = [0] * len(shards)
        self._segment = self._sequence = 0
        self._bound: int | None = None
        self._must_rise = False  # whether the last push changes the weights
        self._over, self._asked = True, False  # asked: whether the servers owe this worker an answer
        self._sent = (0, 0)

    @property
    def messages(self) -> int:
        """The messages that this rank has sent since `open`."""
        return self._messages.sent - self._sent[0]

    @property
    def bytes(self) -> int:
        """The bytes of these messages."""
        return self._messages.sent_bytes - self._sent[1]

    def open(self, first: int, stop: int, bound: int | None) -> None:
        """Begin a segment: the servers answer all workers that may go on.

        All ranks call it, not necessarily at the same time. The weights, `storage.data`, must be the same on all.

        Args:
            first, stop: the batches of the segment.
            bound: how many steps a worker may be ahead of the slowest; None for no limit.

        Raises:
            CommError: when the segment before was not finished.
        """
        if not self._over:
            raise CommError(f"segment {self._segment} is not over yet; call finish() on all ranks before open()")
        self._segment, self._bound, self._must_rise = self._segment + 1, bound, False
        self._sent = self._messages.sent, self._messages.sent_bytes
        self._over = False
        if self._roles.worker is not None:
            self._expect()
        if self._endpoint is not None:
            self._endpoint.open(self._segment, first, stop, bound)

    def pull(self) -> PullResult:
        """Return what to do next when all servers have answered; `storage.data` has their weights then.

        Raises:
            CommError: when nothing was pushed since the last call, or a reply is not what must come now.
        """
        if not self._asked:
            raise CommError("there is nothing to pull; a worker calls open, then pull and push in turn")
        while len(self._replied) < len(self._shards):
            self._wait_until(self._look)
        replies = [self._replied[number] for number in range(len(self._shards))]
        self._replied, self._asked = {}, False
        task, self._over = replies[0].task, replies[0].over
        if self._over != (task is None) or (not self._over and any(reply.over for reply in replies)):
            raise CommError(f"the servers disagree whether segment {self._segment} is over: {replies}")
        slowest, signal = min(reply.slowest for reply in replies), max(reply.signal for reply in replies)
        return PullResult(task, self._over, tuple(self._versions), slowest, signal)

    def push(self, push: Push) -> None:
        """Send the gradient in `storage.grads`, which must stay there until the next `pull` has returned.

        Args:
            push: what is known of the gradient; its version is filled in here, for each server. The values of a broken
                gradient mean nothing.

        Raises:
            CommError: when nothing was pulled since the last call.
        """
        if self._roles.worker is None or self._asked or self._over:
            raise CommError("there is nothing to push; a worker pulls first, and stops when the result says over")
        self._sequence, self._must_rise = self._sequence + 1, push.targets > 0 and not push.broken and not self._drops
        self._expect()
        for number, message in self._pushes.items():
            if number in self._going:
                self._going[number].wait()  # the server has replied to that one, so this hardly ever waits
            write_push(message.header, self._message_id(number), replace(push, version=self._versions[number]))
            message.put(self._shards[number].views(self._storage.grads))
            self._going[number] = self._messages.send(message.buffer, self._roles.servers[number], PUSH_TAG)
        own = self._roles.server
        if self._endpoint is not None and own is not None:
            grads = self._shards[own].views(self._storage.grads)
            push = replace(push, version=self._versions[own])
            self._endpoint.take(self._number, self._message_id(own), push, None if push.broken else grads)

    def serve(self) -> None:
        """Take gradients that have arrived and answer, if this rank is a server; never waits."""
        if self._endpoint is not None:
            self._endpoint.poll()

    def serve_until(self, until_s: float) -> None:
        """Do so whenever something comes, and return at this time of `nnmpi.clock`."""

        def look() -> bool:
            self.serve()
            return False

        self._wait_until(look, until_s)

    def finish(self) -> None:
        """End the segment: serve until it is over, then give all ranks the servers' weights. Collective.

        Raises:
            CommError: on a worker for which the segment is not over yet.
        """
        if self._roles.worker is not None and not self._over:
            raise CommError(
                f"segment {self._segment} is not over for this worker; pull and push until a result says so"
            )
        while self._endpoint is not None and not self._endpoint.over:
            self._wait_until(self._endpoint.poll)
        self._wait_until(self._all_sent)
        self._over = True
        if self._server is not None:
            self._server.close()
        self.broadcast_shards(self._storage.data)

    def broadcast_shards(self, arrays: Sequence[Array]) -> None:
        """Broadcast every server's shard of arrays that are laid out like the flat buffers. Collective."""
        for shard, root in zip(self._shards, self._roles.servers, strict=True):
            for view in shard.views(arrays):
                self._group.broadcast(view, root)

    def free(self) -> None:
        """Give the communicator back to MPI, between two segments. Collective."""
        if self._endpoint is not None:
            self._endpoint.free()
        self._messages.free()

    def _look(self) -> bool:
        """Serve, and take replies that have come; return whether anything had come."""
        moved = self._endpoint is not None and self._endpoint.poll()
        for number in sorted(self._coming):
            if self._coming[number].poll():
                del self._coming[number]
                message = self._replies[number]
                self._accept(number, *read_reply(message.header), message.on_device(self._backend))
                moved = True
        self._messages.progress()
        return moved

    def _accept(self, number: int, message_id: MessageId, reply: Reply, weights: Sequence[Array]) -> None:
        """Take a server's weights, if they are what must come now."""
        self._check(number, message_id, reply)
        self._replied[number], self._versions[number] = reply, reply.version
        for view, values in zip(self._shards[number].views(self._storage.data), weights, strict=True):
            view[...] = values

    def _check(self, number: int, message_id: MessageId, reply: Reply) -> None:
        what = f"a reply to worker {self._number} from server {number}"
        message_id.check(self._message_id(number), what)
        if reply.worker != self._number:
            raise CommError(f"{what} is for worker {reply.worker}")
        if number in self._replied:
            raise CommError(f"{what} came twice for one gradient")
        least = self._versions[number] + self._must_rise
        if reply.version < least:
            raise CommError(
                f"{what} has version {reply.version} of the weights, but there must be version {least} at least; a "
                "server may answer only when the update with the worker's gradient is whole"
            )
        lead = self._sequence - reply.slowest
        if self._bound is not None and not reply.over and lead > self._bound:
            raise CommError(
                f"worker {self._number} may go on {lead} steps ahead of the slowest, but at most {self._bound} are "
                "allowed"
            )

    def _expect(self) -> None:
        """Post the receives of the replies."""
        for number, message in self._replies.items():
            self._coming[number] = self._messages.receive(message.buffer, self._roles.servers[number], REPLY_TAG)
        self._asked = True

    def _message_id(self, number: int) -> MessageId:
        """Return the id of the next message between this worker and a server."""
        return MessageId(self._segment, self._sequence, number)

    def _all_sent(self) -> bool:
        self._messages.progress()
        return self._messages.leaving == 0
