"""The calls of `comm.world.Comm` in a simulated world.

A message and its receive are paired by (communicator, from, to, tag), in the order of their starts.
A short message is copied, so its send completes at once; a long one starts when both its send and
its receive are posted. Each rank adds its argument to the communicator's n-th collective, and the
last rank to arrive completes it for all.

    rank 0   allreduce #7 ......................|     #7 is the communicator's seventh collective
    rank 1            allreduce #7 .............|     on every rank; another name, length or dtype
    rank 2                         allreduce #7 |     on one of them is an error
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, partialmethod
from itertools import count
from math import inf
from mmap import mmap
from types import SimpleNamespace
from typing import Any, Self, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from nnmpi.base.errors import CommError, name_ranks
from nnmpi.comm.algorithms.registry import native_algorithms
from nnmpi.comm.buffers import CommBuffer, as_bytes
from nnmpi.comm.duration import buffers_sent, price
from nnmpi.comm.machine import EAGER_BYTES, Links, Machine
from nnmpi.comm.simulated.scheduler import (
    Lines,
    Scheduler,
    SimulatedRank,
    describe_lines,
)
from nnmpi.comm.world import Closing, SharedPages, World

ByteArray: TypeAlias = NDArray[np.uint8]

# The arrival of a message, by the cost model's machine (`comm.machine`).
#
# ready |. waits .|-- bytes, alone on their links --|-- latency --| arrived
#
# short message     leaves at once, and waits at the receiver for its receive (eager)
# long message      begins when its send and its receive are posted (rendezvous)
#
# Messages share links (`machine.Links`) as in simulated collectives.

# MPI's native collectives by call, as operations; another call, such as a barrier, takes as long as
# a short broadcast.
_OPERATIONS: Mapping[str, str] = {
    "allreduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    **dict.fromkeys(("allgather", "gather", "scatter", "alltoall"), "all-gather"),
}


# Open requests of a simulated rank, and mistakes with them.
#
# MPI forbids these mistakes but mostly does not report them: numbers are wrong sometimes, or a job
# hangs. MUST (Hilbrich et al., 2009) finds them on real jobs by intercepting MPI's calls; with all
# ranks in one process, comparing memory ranges is enough.
#
#     two open requests use one buffer, and one of them writes it
#     an array changes while it is being sent
#     a message and its receive differ in length
#     a rank ends with a request never awaited; a message is never received


@dataclass(eq=False)
class SimulatedRequest:
    """A message, receive or collective that a rank has started.

    Attributes:
        owner: the rank.
        what: description.
        lines: the source lines of its start.
        missing: returns the numbers of the ranks whose calls it still needs.
        memory: the bytes that it reads or writes.
        writes: whether it writes them.
        reads: bytes that it reads besides, as a collective that writes others.
        checksum: of what it reads, at the start; None to allow changes.
        envelope: (sender's number in its communicator, tag, dtype). A receive's is what it accepts,
            and after its message has arrived, the message's.
        complete: whether it is complete.
        complete_s: the simulated time of completion.
        result: this rank's result of a collective that returns one.
        sees: for one that looks for a message: called with it, returns whether it takes it.
    """

    owner: SimulatedRank
    what: str
    lines: Lines
    missing: Callable[[], Sequence[int]] = tuple
    memory: ByteArray | None = None
    writes: bool = False
    reads: ByteArray | None = None
    checksum: int | None = None
    envelope: tuple[int, int, Any] = (0, 0, None)
    complete: bool = False
    complete_s: float = 0.0
    result: Any = None
    sees: Callable[[SimulatedMessage], bool] | None = None

    @property
    def source(self) -> ByteArray | None:
        """The bytes that it reads."""
        return self.reads if self.writes else self.memory


def checksum(memory: ByteArray | None) -> int:
    """Return the sum of the 8-byte words, to detect changed bytes (with near certainty)."""
    if memory is None:
        return 0
    full = memory.size & -8
    return int(memory[:full].view(np.uint64).sum()) + int.from_bytes(
        memory[full:].tobytes(), "little"
    )


Range: TypeAlias = tuple[int, int, int, SimulatedRequest]
"""The addresses of a request's memory, a number of its own, and the request."""


class Ranges(list[Range]):
    """Ranges of memory in the order of their beginnings.

    A search looks back by the longest one, so it is quick among many requests of one size.
    """

    longest = 0

    def insert_range(self, item: Range) -> None:
        """Add a range."""
        self.longest = max(self.longest, item[1] - item[0])
        insort(self, item)

    def find(self, begin: int, end: int) -> SimulatedRequest | None:
        """Return a request whose range overlaps another one, or None."""
        at = bisect_left(self, (end,)) - 1
        while at >= 0 and self[at][0] > begin - self.longest:
            if self[at][1] > begin:
                return self[at][3]
            at -= 1
        return None


class OpenRequests(dict[SimulatedRequest, list[tuple[Ranges, Range]]]):
    """A rank's unfinished requests, with the address ranges they read or write."""

    def __init__(self) -> None:
        super().__init__()
        self._read, self._written, self._numbers = Ranges(), Ranges(), count()
        self.writers = 0

    def add(self, request: SimulatedRequest) -> None:
        """Add a request.

        Raises:
            CommError: when another open request uses the same memory, and one of the two writes.
        """
        self[request] = kept = []
        self.writers += request.writes
        uses = (request.source, False), (request.memory if request.writes else None, True)
        for memory, writes in uses:
            if memory is None or not memory.nbytes:
                continue
            begin = memory.__array_interface__["data"][0]
            end = begin + memory.nbytes
            for ranges in (self._written, self._read) if writes else (self._written,):
                other = ranges.find(begin, end)
                if other is not None:
                    del self[request]
                    raise CommError(_describe_overlap(request, other, ranges is self._written))
            ranges = self._written if writes else self._read
            item = begin, end, next(self._numbers), request
            ranges.insert_range(item)
            kept.append((ranges, item))

    def close(self, request: SimulatedRequest) -> None:
        """Remove an awaited request.

        Raises:
            CommError: when the array was changed while it was being sent.
        """
        kept = self.pop(request, None)
        if kept is None:
            return
        self.writers -= request.writes
        for ranges, item in kept:
            del ranges[bisect_left(ranges, item)]
        if request.checksum is not None and request.checksum != checksum(request.source):
            raise CommError(
                f"rank {request.owner.number} changed an array while its {request.what} read it"
                f" ({describe_lines(request.lines)}); wait for the request before the array is"
                " written"
            )
        # a caller that keeps the request keeps no array alive
        request.memory = request.reads = None


def _describe_overlap(request: SimulatedRequest, other: SimulatedRequest, written: bool) -> str:
    rank, begin = request.owner.number, describe_lines(request.lines)
    if request is other:
        return (
            f"rank {rank} gives its {request.what} memory to read and to write ({begin}); give it"
            " two arrays, or MPI.IN_PLACE for the first"
        )
    return (
        f"rank {rank} gives its {request.what} memory ({begin}) that its {other.what} still"
        f" {'writes' if written else 'reads'} ({describe_lines(other.lines)}); wait for that one"
        " first, or give another array"
    )


@dataclass(eq=False)
class SimulatedMessage:
    """A message in flight.

    Attributes:
        request: the sender's.
        nbytes: its length.
        data: a copy if the message is short; otherwise None, and the sender's memory is read when
            the message arrives.
        ready_s: the time of its start, later of its arrival.
        both_ways: whether its sender was receiving at the start.
        arrived: whether it has arrived at its target, received or not.
        arrives_s: the time of its arrival; infinite before it has left.
        receive: the paired receive, or None so far.
    """

    request: SimulatedRequest
    nbytes: int
    data: ByteArray | None
    ready_s: float
    both_ways: bool
    arrived: bool = False
    arrives_s: float = inf
    receive: SimulatedRequest | None = None


@dataclass(eq=False)
class MessageQueue:
    """Unmatched sends or receives with one tag, from one rank to another.

    Subclasses may match in another order.

    Attributes:
        sends, receives: in the order of their starts.
        last_s: the arrival of the last message so far; later ones must not overtake it.
    """

    sends: deque[SimulatedMessage] = field(default_factory=deque)
    receives: deque[SimulatedRequest] = field(default_factory=deque)
    last_s: float = 0.0

    def add_send(self, message: SimulatedMessage) -> None:
        """Keep a message until its receive is posted."""
        self.sends.append(message)

    def add_receive(self, receive: SimulatedRequest) -> None:
        """Keep a receive until its message is sent."""
        self.receives.append(receive)

    def take_receive(self, message: SimulatedMessage) -> SimulatedRequest | None:
        """Remove and return the receive that matches a message, or None."""
        return self.receives.popleft() if self.receives else None

    def take_send(self, receive: SimulatedRequest) -> SimulatedMessage | None:
        """Remove and return the message that matches a receive, or None."""
        return self.sends.popleft() if self.sends else None


# If the seed decides the order, the share of short messages whose send completes at once; other
# sends complete when the message arrives. MPI permits both, so a program must work with both.
LEAVES_AT_ONCE = 0.5
NAMED = 3  # requests named in a report of a wait for many


@dataclass(eq=False)
class CollectiveCall:
    """The n-th collective of a communicator, with the ranks that have entered it.

    Attributes:
        signature: must be equal on all ranks: the name of the call, lengths, dtypes.
        first: number and source lines of the first rank.
        arguments: by number in the communicator, each rank's argument.
        requests: the ranks' requests, by number.
        last_s: the arrival of the last rank so far.
        nbytes: the longest argument, for the collective's time.
    """

    signature: tuple[Any, ...]
    first: tuple[int, Lines]
    arguments: dict[int, Any] = field(default_factory=dict)
    requests: dict[int, SimulatedRequest] = field(default_factory=dict)
    last_s: float = 0.0
    nbytes: int = 0


EVERYONE = "the communicator of all ranks"  # the world


class MessageBoard:
    """State shared by simulated ranks: messages, incomplete collectives, open requests.

    Args:
        scheduler: of the ranks.
        machine: the costs of messages.

    Attributes:
        scheduler, machine: as given.
        nodes: the node of each rank.
        bytes: bytes of all messages so far.
        sent, received: bytes of each rank, in messages and by the formulas of collectives.
        eager_bytes: the length of the longest message that leaves at once.
        everyone: the ranks, in order.
        queues: by (communicator, from, to, tag).
        calls: by (communicator, number of the collective).
        open: by rank, the requests started and not yet awaited.
        numbers: the iterator that numbers new communicators.
        made: the results of `World.once`, by key.
        names: of communicators for people, by number.
    """

    def __init__(self, scheduler: Scheduler, machine: Machine) -> None:
        size = len(scheduler.ranks)
        self.scheduler, self.everyone = scheduler, tuple(range(size))
        self.bytes, self.eager_bytes = 0, EAGER_BYTES
        self.sent, self.received = [0] * size, [0] * size
        self.machine, self.nodes = machine, machine.nodes_of(size)
        self._links = Links(machine, size)
        self.queues: defaultdict[tuple[int, int, int, int], MessageQueue] = defaultdict(
            MessageQueue
        )
        self.calls: dict[tuple[int, int], CollectiveCall] = {}
        self.open = [OpenRequests() for _ in scheduler.ranks]
        self.numbers = count(1)
        self.made: dict[Hashable, Any] = {}
        self.names = {0: EVERYONE}

    def name(self, number: int, members: tuple[int, ...]) -> str:
        """Return what a communicator is called in sentences: by its ranks, which tell it from
        others, and counted where several have the same ranks.
        """
        if number not in self.names:
            whose = "all ranks" if members == self.everyone else name_ranks(members)
            known = {name for name in self.names.values() if name.endswith(f"of {whose}")}
            which = f"communicator {len(known) + 1}" if known else "the communicator"
            self.names[number] = f"{which} of {whose}"
        return self.names[number]

    def carry(
        self, source: int, target: int, nbytes: int, ready_s: float, both_ways: bool
    ) -> float:
        """Carry a message over the links; return its arrival in simulated seconds.

        Args:
            source, target: the ranks, by number.
            nbytes: its length.
            ready_s: its earliest start.
            both_ways: whether its sender receives at the same time.
        """
        self.bytes += nbytes
        self.sent[source] += nbytes
        self.received[target] += nbytes
        return self._links.carry(source, target, ready_s, (nbytes,), both_ways)

    def carry_collective(
        self, name: str, ranks: tuple[int, ...], nbytes: int, ready_s: float
    ) -> float:
        """Carry a native collective over the links, in its predicted time; return its end.

        Also count the bytes that each rank sends and receives.

        Args:
            name: of the call.
            ranks: its ranks.
            nbytes: of the complete array.
            ready_s: the last rank's arrival.
        """
        if len(ranks) == 1:
            return ready_s
        (machine,) = self.machine.parts([ranks], len(self.nodes))
        algorithms = native_algorithms(_OPERATIONS.get(name, "broadcast"))
        call = len(ranks), nbytes or 1, machine
        item = min(algorithms, key=lambda algorithm: price(algorithm, *call))
        for rank, sent in zip(ranks, buffers_sent(item, len(ranks)), strict=True):
            for total in (self.sent, self.received):
                total[rank] += round(sent * nbytes)
        seconds = price(item, *call)
        wire_s = seconds - price(item, len(ranks), 1, machine)
        return self._links.occupy(ranks, ready_s, wire_s) + seconds

    def complete(self, request: SimulatedRequest, at_s: float) -> None:
        """Mark a request complete, and notify its rank."""
        request.complete, request.complete_s = True, at_s
        self.scheduler.notify(request.owner, request, at_s)

    def find_leftovers(self) -> list[str]:
        """Return a sentence for each request never awaited and each message never received."""
        waited = [
            f"rank {request.owner.number} never waited for its {request.what}"
            f" ({describe_lines(request.lines)})"
            for opened in self.open
            for request in opened
        ]
        lost = [
            f"nobody received rank {message.request.owner.number}'s {message.request.what} of"
            f" {message.nbytes} bytes ({describe_lines(message.request.lines)})"
            for queue in self.queues.values()
            for message in queue.sends
        ]
        return waited + lost


class SimulatedComm(Closing):
    """One rank's view of a communicator of simulated ranks; see `comm.world.Comm`.

    Args:
        board: shared by all ranks.
        world: of this rank.
        local: this rank.
        members: the communicator's ranks, by their numbers in the world, in order. All ranks of the
            world have one tuple: 10,000 of their own took 3.6 GB.
        number: of the communicator.
    """

    def __init__(
        self,
        board: MessageBoard,
        world: Any,
        local: SimulatedRank,
        members: Sequence[int],
        number: int,
    ) -> None:
        self.world, self._board, self._local = cast(World, world), board, local
        self.members, self._number = tuple(members), number
        self._scheduler = board.scheduler
        self._collectives = 0
        self.rank: int = self.members.index(local.number)
        self.size: int = len(self.members)

    @cached_property
    def _name(self) -> str:
        """What it is called in sentences."""
        return self._board.name(self._number, self.members)

    @cached_property
    def _beside(self) -> str:
        """What a message is said to be sent on, if it is not the world."""
        return "" if self._name == EVERYONE else f" on {self._name}"

    # ---- messages between two ranks ----

    def isend(
        self, data: CommBuffer, to: int, tag: int, eager_bytes: float | None = None
    ) -> SimulatedRequest:
        """Start sending; see `comm.world.Comm`.

        Args:
            eager_bytes: the length of the longest message that leaves at once; the board's if None.
        """
        local, board = self._local, self._board
        self._scheduler.begin_call(local)
        memory = as_bytes(data)
        request = self._open(
            f"send to rank {self.members[to]} with tag {tag}{self._beside}",
            memory,
            False,
            self.members[to],
        )
        request.envelope = self.rank, tag, data.dtype
        leaves = memory.nbytes <= (board.eager_bytes if eager_bytes is None else eager_bytes)
        receiving = board.open[local.number].writers > 0
        message = SimulatedMessage(
            request, memory.nbytes, memory.copy() if leaves else None, local.clock_s, receiving
        )
        queue = self._queue(local.number, self.members[to], tag)
        if leaves:
            if self._scheduler.by_time or self._scheduler.random.random() < LEAVES_AT_ONCE:
                board.complete(request, local.clock_s)
            self._depart(message, queue, self.members[to], local.clock_s)
        receive = queue.take_receive(message)
        if receive is not None:
            self._pair(message, receive, queue)
        else:
            queue.add_send(message)
        self._scheduler.end_call(local)
        return request

    issend = partialmethod(isend, eager_bytes=-1)

    def _queue(self, source: int, target: int, tag: int) -> MessageQueue:
        return self._board.queues[self._number, source, target, tag]

    def irecv(self, into: CommBuffer, source: int, tag: int) -> SimulatedRequest:
        """Start receiving; see `comm.world.Comm`."""
        partner = self.members[source]
        return self._receive(
            f"rank {partner} with tag {tag}", as_bytes(into), (source, tag, into.dtype), partner
        )

    def _receive(
        self,
        senders: str,
        memory: ByteArray | None,
        envelope: tuple[int, int, Any],
        *partners: int,
        message: SimulatedMessage | None = None,
    ) -> SimulatedRequest:
        """Start receiving from one of several ranks; `senders` describes them.

        Args:
            message: the one to receive, if it was taken from its queue before.
        """
        local = self._local
        self._scheduler.begin_call(local)
        request = self._open(f"receive from {senders}{self._beside}", memory, True, *partners)
        request.envelope = envelope
        queue = self._queue(partners[0], local.number, envelope[1])
        message = message or queue.take_send(request)
        if message is not None:
            self._pair(message, request, queue)
        else:
            queue.add_receive(request)
        self._scheduler.end_call(local)
        return request

    def _open(
        self,
        what: str,
        memory: ByteArray | None,
        writes: bool,
        *missing: int,
        reads: ByteArray | None = None,
    ) -> SimulatedRequest:
        """Return a new open request of this rank."""
        request = SimulatedRequest(
            self._local, what, self._scheduler.find_lines(), lambda: missing, memory, writes, reads
        )
        if request.source is not None:
            request.checksum = checksum(request.source)
        self._board.open[self._local.number].add(request)
        self._scheduler.note_progress(self._local)
        return request

    def _pair(
        self, message: SimulatedMessage, receive: SimulatedRequest, queue: MessageQueue
    ) -> None:
        """Pair a message with its receive, and deliver or start it."""
        assert receive.memory is not None
        if message.nbytes != receive.memory.nbytes:
            sender, ends = message.request, (message.request.lines, receive.lines)
            sent, received = map(describe_lines, ends)
            raise CommError(
                f"rank {sender.owner.number} sends {message.nbytes} bytes ({sent}), which rank"
                f" {receive.owner.number} receives into a buffer of {receive.memory.nbytes}"
                f" ({received}); give both the same length"
            )
        message.receive = receive
        if message.arrived:
            self._deliver(message, receive, self._local.clock_s)
        elif message.data is None:
            self._depart(message, queue, receive.owner.number, self._local.clock_s)

    def _depart(
        self, message: SimulatedMessage, queue: MessageQueue, target: int, ready_s: float
    ) -> None:
        """Start a message's transfer; it does not overtake an earlier one."""
        sender = message.request.owner.number
        ready_s = max(ready_s, message.ready_s)
        at_s = self._board.carry(sender, target, message.nbytes, ready_s, message.both_ways)
        at_s = queue.last_s = message.arrives_s = max(at_s, queue.last_s)
        self._scheduler.plan(at_s, partial(self._arrive, message, at_s))

    def _arrive(self, message: SimulatedMessage, at_s: float) -> None:
        message.arrived, message.ready_s = True, at_s
        if message.receive is not None:
            self._deliver(message, message.receive, at_s)
        if message.data is not None and not message.request.complete:
            self._board.complete(message.request, at_s)

    def _deliver(self, message: SimulatedMessage, receive: SimulatedRequest, at_s: float) -> None:
        """Write an arrived message into the receive's memory, and complete both requests."""
        assert receive.memory is not None
        at_s = max(at_s, message.ready_s)
        if message.data is not None:
            receive.memory[...] = message.data
        else:
            assert message.request.memory is not None
            receive.memory[...] = message.request.memory
            self._board.complete(message.request, at_s)
        self._board.complete(receive, at_s)

    # ---- requests ----

    def test_all(self, requests: Sequence[SimulatedRequest]) -> bool:
        """Return whether all are complete; see `comm.world.Comm`."""
        if not requests:
            return True
        local = self._local
        self._scheduler.begin_call(local)
        self._scheduler.yield_turn(local)
        complete = all(request.complete for request in requests)
        if complete:
            self._close(requests)
        else:
            self._scheduler.count_fruitless_poll(
                local, _describe_all(requests), partial(_missing, requests)
            )
        self._scheduler.end_call(local)
        return complete

    def wait_all(self, requests: Sequence[SimulatedRequest]) -> None:
        """Return when all are complete; see `comm.world.Comm`."""
        local = self._local
        self._scheduler.begin_call(local)
        awaited = {request for request in requests if not request.complete}
        if awaited:
            self._scheduler.block(
                local,
                awaited,
                _describe_all(requests),
                self._scheduler.find_lines(),
                partial(_missing, requests),
            )
        self._close(requests)
        self._scheduler.end_call(local)

    def _close(self, requests: Sequence[SimulatedRequest]) -> None:
        """Remove awaited requests, and advance this rank's clock to their completion."""
        for request in requests:
            self._local.clock_s = max(self._local.clock_s, request.complete_s)
            self._board.open[self._local.number].close(request)
        self._local.completions += 1

    def progress(self) -> None:
        """Let other ranks and messages advance; see `comm.world.Comm`."""
        self._scheduler.begin_call(self._local)
        self._scheduler.yield_turn(self._local)
        self._scheduler.end_call(self._local)

    # ---- collectives ----

    def _wait_for(self, start: Callable[..., SimulatedRequest], *arguments: Any) -> None:
        self.wait_all([start(self, *arguments)])

    def barrier(self) -> None:
        """Return when all ranks have entered the barrier."""
        self._exchange("barrier", None, lambda by_rank: None)

    def _reduce(self, name: str, array: CommBuffer) -> SimulatedRequest:
        """Sum over the ranks, in their order."""

        def write(arrays: list[CommBuffer]) -> None:
            total = _total(arrays)
            for item in arrays:
                item[...] = total

        return self._join(
            (name, array.size, array.dtype.name), array, array.nbytes, write, writes=array
        )

    allreduce = partialmethod(_wait_for, _reduce, "allreduce")
    iallreduce = partialmethod(_reduce, "iallreduce")

    def _broadcast(self, name: str, data: CommBuffer, root: int) -> SimulatedRequest:
        memory = as_bytes(data)

        def combine(by_rank: list[ByteArray]) -> None:
            for rank, target in enumerate(by_rank):
                if rank != root:
                    target[...] = by_rank[root]

        return self._join(
            (name, memory.nbytes, f"root {root}"), memory, memory.nbytes, combine, writes=memory
        )

    broadcast = partialmethod(_wait_for, _broadcast, "broadcast")
    ibroadcast = partialmethod(_broadcast, "ibroadcast")

    def _allgatherv(
        self, name: str, local: CommBuffer | None, into: CommBuffer, counts: Sequence[int]
    ) -> SimulatedRequest:
        begin = sum(counts[: self.rank])
        flat = into.reshape(-1)
        part = flat[begin : begin + counts[self.rank]].copy() if local is None else local
        if part.size != counts[self.rank]:
            raise CommError(
                f"rank {self._local.number} passes {part.size} elements to {name}, but its count"
                f" there is {counts[self.rank]} ({describe_lines(self._scheduler.find_lines())})"
            )
        signature = (name, tuple(counts), into.dtype.name)
        return self._join(signature, (part, flat), into.nbytes, _gather, writes=into)

    allgatherv = partialmethod(_wait_for, _allgatherv, "allgatherv")
    iallgatherv = partialmethod(_allgatherv, "iallgatherv")

    def allgather(self, local: CommBuffer, into: CommBuffer) -> None:
        """Gather arrays of one length."""
        self._wait_for(type(self)._allgatherv, "allgather", local, into, [local.size] * self.size)

    def _reduce_scatter(
        self, name: str, array: CommBuffer, local: CommBuffer, counts: Sequence[int]
    ) -> SimulatedRequest:
        def combine(by_rank: list[tuple[CommBuffer, CommBuffer]]) -> None:
            total = _total([full for full, _ in by_rank])
            for part, (_, own) in zip(
                np.split(total, np.cumsum(counts)[:-1]), by_rank, strict=True
            ):
                own[...] = part

        return self._join(
            (name, tuple(counts), array.dtype.name),
            (array, local),
            array.nbytes,
            combine,
            writes=local,
        )

    reduce_scatter = partialmethod(_wait_for, _reduce_scatter, "reduce_scatter")
    ireduce_scatter = partialmethod(_reduce_scatter, "ireduce_scatter")

    def _join(
        self,
        signature: tuple[Any, ...],
        value: Any,
        nbytes: int,
        combine: Callable[[list[Any]], Any],
        writes: CommBuffer | None = None,
        reads: ByteArray | None = None,
        name: str = "",
    ) -> SimulatedRequest:
        """Enter this communicator's next collective.

        Args:
            signature: see `CollectiveCall`.
            value: this rank's argument.
            nbytes: of the complete array as seen on this rank, for the collective's time.
            combine: called by the last rank with all arguments in rank order; writes the results,
                or returns one for each rank.
            writes: the array written on this rank.
            reads: bytes read on this rank until it is complete; another array.
            name: of the collective, for its time; the signature's if empty.
        """
        local, board, scheduler = self._local, self._board, self._scheduler
        scheduler.begin_call(local)
        number = self._collectives
        self._collectives += 1
        memory = None if writes is None else as_bytes(writes)
        request = self._open(
            f"{signature[0]} (collective {number + 1} of {self._name})",
            memory,
            True,
            reads=reads,
        )
        call = board.calls.setdefault(
            (self._number, number), CollectiveCall(signature, (local.number, request.lines))
        )
        if call.signature != signature:
            both = (*call.first, call.signature), (local.number, request.lines, signature)
            texts = [
                f"rank {rank} in {_describe(what)} ({describe_lines(lines)})"
                for rank, lines, what in both
            ]
            raise CommError(f"the ranks are in different collectives: {', '.join(texts)}")
        call.arguments[self.rank], call.requests[self.rank] = value, request
        request.missing = lambda: [
            member for rank, member in enumerate(self.members) if rank not in call.arguments
        ]
        call.last_s, call.nbytes = max(call.last_s, local.clock_s), max(call.nbytes, nbytes)
        if len(call.arguments) == self.size:
            del board.calls[self._number, number]
            name = name or signature[0].removeprefix("i").removesuffix("v")
            end_s = board.carry_collective(name, self.members, call.nbytes, call.last_s)
            finish = partial(self._finish, call, combine, end_s)
            if self.size == 1:  # nobody to wait for
                finish()
            else:
                scheduler.plan(end_s, finish)
        scheduler.end_call(local)
        return request

    def _finish(
        self, call: CollectiveCall, combine: Callable[[list[Any]], Any], end_s: float
    ) -> None:
        """Write a collective's results and complete it.

        If the seed decides the order, each rank's request completes as a separate event.
        """
        results = combine([call.arguments[rank] for rank in range(self.size)])
        call.arguments.clear()  # a kept request does not keep the arrays alive
        for rank, request in call.requests.items():
            request.result = results and results[rank]
            if self._scheduler.by_time or self.size == 1:
                self._board.complete(request, end_s)
            else:
                self._scheduler.plan(end_s, partial(self._board.complete, request, end_s))
        call.requests.clear()

    # ---- other communicators ----

    def duplicate(self) -> Self:
        """Return another communicator of the same ranks; see `comm.world.Comm`."""
        return self._regroup("duplicate", 0, self.rank)

    def split(self, color: int, key: int) -> Self:
        """Return the communicator of the ranks with one color; see `comm.world.Comm`."""
        return self._regroup("split", color, key)

    def split_by_node(self, key: int) -> Self:
        """Return the communicator of this node's ranks; see `comm.world.Comm`."""
        return self._regroup("split_by_node", self._board.nodes[self._local.number], key)

    def _regroup(self, name: str, color: int, key: int) -> Self:
        def make(by_rank: Sequence[tuple[int, int]]) -> list[tuple[int, list[int]]]:
            # number and ranks of each communicator, by color
            made: dict[int, tuple[int, list[int]]] = {}
            for color, _, rank in sorted((*given, rank) for rank, given in enumerate(by_rank)):
                made.setdefault(color, (next(self._board.numbers), []))[1].append(
                    self.members[rank]
                )
            return [made[color] for color, _ in by_rank]

        number, ranks = self._exchange(name, (color, key), make)
        return type(self)(self._board, self.world, self._local, ranks, number)

    def _exchange(self, name: str, value: Any, make: Callable[[list[Any]], Any]) -> Any:
        request = self._join((name,), value, 0, make)
        self.wait_all([request])
        return request.result

    def free(self) -> None:
        """Close it: a simulated communicator has no resources."""
        self.close()

    def share_pages(self, own_bytes: int) -> SharedPages:
        """Return process memory, visible to all ranks, freed with the last reference."""

        def make(lengths: list[int]) -> list[tuple[ByteArray, ...]]:
            parts = tuple(
                np.frombuffer(mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes] for nbytes in lengths
            )
            return [parts] * self.size  # (each part begins on a page, as a mapping does)

        parts = self._exchange("share_pages", own_bytes, make)
        return cast(SharedPages, SimpleNamespace(parts=parts, sync=lambda: None, free=lambda: None))


def _describe_all(requests: Sequence[SimulatedRequest]) -> str:
    """Return the incomplete requests as text."""
    texts = [request.what for request in requests if not request.complete]
    texts[NAMED:] = [f"{len(texts) - NAMED} more"] if len(texts) > NAMED else []
    return ", ".join(texts)


def _missing(requests: Sequence[SimulatedRequest]) -> list[int]:
    """Return the ranks whose calls these requests still need."""
    return sorted(
        {rank for request in requests if not request.complete for rank in request.missing()}
    )


def _describe(signature: tuple[Any, ...]) -> str:
    name, *rest = signature
    return f"{name}({', '.join(map(str, rest))})"


def _total(arrays: Sequence[CommBuffer]) -> CommBuffer:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def _gather(by_rank: list[tuple[CommBuffer, CommBuffer]]) -> None:
    full = np.concatenate([as_bytes(local) for local, _ in by_rank])
    for _, into in by_rank:
        as_bytes(into)[...] = full
