"""Push and pull: gradients to the parameter servers and weights back, by messages between two ranks, in segments.

    worker      receive posted | push >--.              wait .... | weights | compute | receive posted | push >-- ...
                                          \\                      /
    server 0     take, take, update        take, update, reply >--          take ...
    server 1          take, update, reply >--' (a worker goes on when all have replied)

    segment     open: all servers reply to all workers    push, pull ...    finish: every server broadcasts its shard

Nobody is in step with anybody between `open` and `finish`. A push, and a reply, is one message to each server: a header
and the server's shard. Server 0 deals the parts of the batches, and tells the other servers how many gradients there
are in the segment as soon as no more will be dealt, so that they know its end too. A worker on a server's rank needs no
messages for that shard.

A segment of T steps of N workers in step takes, for each server, T (N-1) pushes and (T+1) (N-1) replies, as every
worker gets the weights once at the beginning; 2 (N-1) messages per step; N instead of N-1 for a dedicated server. And
server 0 sends one total to each other server. (Li et al., "Scaling distributed machine learning with the parameter
server", 2014; the closing broadcast is not counted, it belongs to the meeting.)

What could go wrong without being seen is looked for in every message: a reply that comes before the update with the
worker's gradient is whole (its version would not have risen), shards of different segments or steps (their stamps), a
gradient of other weights than were given last, and a worker that is further ahead than it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nnmpi.backend.array import Array
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.comm.doze import doze
from nnmpi.comm.group import Group
from nnmpi.comm.messages import Arrival, Departure, Messages
from nnmpi.errors import CommError
from nnmpi.parallel.parcel import Parcel, Stamp, read_reply, write_push
from nnmpi.parallel.server import ParameterServer, Push, Reply
from nnmpi.parallel.serving import PUSH_TAG, REPLY_TAG, Note, Seats, Serving
from nnmpi.parallel.shards import Shard
from nnmpi.synchrony.dealer import Unit
from nnmpi.synchrony.sync import Sync
from nnmpi.tensor.flat import FlatStorage


@dataclass(frozen=True)
class Ticket:
    """What a worker may do now.

    Attributes:
        unit: the part of a batch to compute; None if it is over.
        over: whether the segment is over for this worker.
        versions: of the weights that it has now, by shard.
        slowest: the steps that the slowest worker had done when the servers answered.
        signal: the number of the signal that a server's rank got, 0 for none; to be said in the next push.
    """

    unit: Unit | None
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
        server: on the servers' ranks, the one that owns this rank's shard.
        note: called on server 0 with (worker, push) for every gradient that arrives, dropped ones too: after it was
            taken and before anybody goes on, so that closing the desk there lets nothing more be dealt.
        synchronous: let no message leave before its receive is posted (for tests).
        backend: where the model's arrays live; NumPy by default.

    Raises:
        CommError: from all methods, for messages that do not belong where they come.
    """

    def __init__(
        self,
        group: Group,
        sync: Sync,
        storage: FlatStorage,
        shards: Sequence[Shard],
        server: ParameterServer | None,
        note: Note | None = None,
        synchronous: bool = False,
        backend: Backend | None = None,
    ) -> None:
        self._group, self._storage, self._shards, self._server = group, storage, shards, server
        self._backend = numpy_backend() if backend is None else backend
        self._seats = Seats.of(group.rank, sync.server_ranks(group.size), sync.worker_ranks(group.size))
        self._drops = sync.backup > 0  # then a worker may be late, and its gradient not in the update that it waits for
        self._messages = Messages(group, synchronous)
        note = (lambda worker, push: None) if note is None else note
        self._serving = (
            None
            if server is None
            else Serving(server, self._seats, self._messages, storage, self._backend, note, self._accept)
        )
        self._number = -1 if self._seats.worker is None else self._seats.worker
        distant = [n for n in range(len(shards)) if self._seats.worker is not None and n != self._seats.server]
        self._pushes = {number: Parcel(shards[number], storage.data) for number in distant}
        self._replies = {number: Parcel(shards[number], storage.data) for number in distant}
        self._going = {number: Departure([]) for number in distant}
        self._coming: dict[int, Arrival] = {}  # by server
        self._tickets: dict[int, Reply] = {}  # by server: those that have answered since the last push
        self._versions = [0] * len(shards)
        self._segment = self._serial = 0
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
        """Begin a segment: the servers answer all workers who may go on. All ranks call it, in no hurry.

        The weights, `storage.data`, must be the same on all ranks.

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
        if self._seats.worker is not None:
            self._expect()
        if self._serving is not None:
            self._serving.open(self._segment, first, stop, bound)

    def pull(self) -> Ticket:
        """Return what to do next when all servers have answered; `storage.data` has their weights then.

        Raises:
            CommError: when nothing was pushed since the last call, or a reply is not what must come now.
        """
        if not self._asked:
            raise CommError("there is nothing to pull; a worker calls open, then pull and push in turn")
        while len(self._tickets) < len(self._shards):
            doze(self._look)
        replies = [self._tickets[number] for number in range(len(self._shards))]
        self._tickets, self._asked = {}, False
        unit, self._over = replies[0].unit, replies[0].over
        if self._over != (unit is None) or (not self._over and any(reply.over for reply in replies)):
            raise CommError(f"the servers disagree whether segment {self._segment} is over: {replies}")
        slowest, signal = min(reply.slowest for reply in replies), max(reply.signal for reply in replies)
        return Ticket(unit, self._over, tuple(self._versions), slowest, signal)

    def push(self, push: Push) -> None:
        """Send the gradient in `storage.grads`, which must stay there until the next `pull` has returned.

        Args:
            push: about the gradient; its version is filled in for each server. A broken one's values mean nothing.

        Raises:
            CommError: when nothing was pulled since the last call.
        """
        if self._seats.worker is None or self._asked or self._over:
            raise CommError("there is nothing to push; a worker pulls first, and stops when its ticket says over")
        self._serial, self._must_rise = self._serial + 1, push.rows > 0 and not push.broken and not self._drops
        self._expect()
        for number, parcel in self._pushes.items():
            self._going[number].wait()  # its reply shows that it has come, so this hardly ever takes any time
            write_push(parcel.header, self._stamp(number), replace(push, version=self._versions[number]))
            parcel.put(self._shards[number].views(self._storage.grads), self._backend)
            self._going[number] = self._messages.send(parcel.buffer, self._seats.servers[number], PUSH_TAG)
        own = self._seats.server
        if self._serving is not None and own is not None:
            grads = self._shards[own].views(self._storage.grads)
            push = replace(push, version=self._versions[own])
            self._serving.take(self._number, self._stamp(own), push, None if push.broken else grads)

    def serve(self) -> None:
        """Take what has arrived and answer, if this rank is a server; never waits."""
        if self._serving is not None:
            self._serving.poll()

    def finish(self) -> None:
        """End the segment: serve until it is over, then give all ranks the servers' weights. Collective.

        Raises:
            CommError: on a worker that has not been told yet that it is over.
        """
        if self._seats.worker is not None and not self._over:
            raise CommError(
                f"segment {self._segment} is not over for this worker; pull and push until a ticket says so"
            )
        while self._serving is not None and not self._serving.over:
            doze(self._serving.poll)
        doze(self._all_sent)
        self._over = True
        if self._server is not None:
            self._server.shut()
        self.give_all(self._storage.data)

    def give_all(self, arrays: Sequence[Array]) -> None:
        """Give all ranks the servers' parts of arrays that are laid out like the flat buffers. Collective."""
        for shard, root in zip(self._shards, self._seats.servers, strict=True):
            for view in shard.views(arrays):
                self._group.broadcast(view, root)

    def free(self) -> None:
        """Give the communicator back to MPI, between two segments. Collective."""
        if self._serving is not None:
            self._serving.free()
        self._messages.free()

    def _look(self) -> bool:
        """Serve, and take replies that have come; return whether anything had."""
        moved = self._serving is not None and self._serving.poll()
        for number in sorted(self._coming):
            if self._coming[number].ready():
                del self._coming[number]
                parcel = self._replies[number]
                self._accept(number, *read_reply(parcel.header), parcel.on_device(self._backend))
                moved = True
        self._messages.progress()
        return moved

    def _accept(self, number: int, stamp: Stamp, reply: Reply, weights: Sequence[Array]) -> None:
        """Take a server's weights, if they are what must come now."""
        self._check(number, stamp, reply)
        self._tickets[number], self._versions[number] = reply, reply.version
        for view, values in zip(self._shards[number].views(self._storage.data), weights, strict=True):
            view[...] = values

    def _check(self, number: int, stamp: Stamp, reply: Reply) -> None:
        what = f"a reply to worker {self._number} from server {number}"
        stamp.check(self._stamp(number), what)
        if reply.worker != self._number:
            raise CommError(f"{what} is for worker {reply.worker}")
        if number in self._tickets:
            raise CommError(f"{what} came twice for one gradient")
        least = self._versions[number] + self._must_rise
        if reply.version < least:
            raise CommError(
                f"{what} has version {reply.version} of the weights, but there must be version {least} at least; a "
                "server may answer only when the update with the worker's gradient is whole"
            )
        lead = self._serial - reply.slowest
        if self._bound is not None and not reply.over and lead > self._bound:
            raise CommError(
                f"worker {self._number} is let go on {lead} steps ahead of the slowest, but at most {self._bound} are "
                "allowed"
            )

    def _expect(self) -> None:
        """Post the receives of the replies."""
        for number, parcel in self._replies.items():
            self._coming[number] = self._messages.receive(parcel.buffer, self._seats.servers[number], REPLY_TAG)
        self._asked = True

    def _stamp(self, number: int) -> Stamp:
        """Return what a message between this worker and a server carries now."""
        return Stamp(self._segment, self._serial, number)

    def _all_sent(self) -> bool:
        self._messages.progress()
        return self._messages.leaving == 0
