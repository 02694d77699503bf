"""The calls of `comm.world.Comm` in a simulated world.

A message and its receive find one another by (communicator, from, to, tag), in the order of their
starts. A short one is copied and has left; a long one goes when both ends have come to it. To the
n-th collective of a communicator each rank brings what it has, and the last one to come lets all go
on.

    rank 0   allreduce #7 ......................|          #7 is the seventh collective of this communicator, on every
    rank 1            allreduce #7 .............|          rank; who brings another name, length or dtype is told so
    rank 2                         allreduce #7 |
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, partialmethod
from itertools import count
from mmap import mmap
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES
from nnmpi.comm.algorithms.tree import levels
from nnmpi.comm.buffers import Buffer, as_bytes
from nnmpi.comm.collective import Cost
from nnmpi.comm.machine import Links, Machine
from nnmpi.comm.simulated.scheduler import (
    Lines,
    Scheduler,
    SimulatedRank,
    describe_lines,
    find_lines,
)
from nnmpi.comm.world import SharedPages, World
from nnmpi.errors import CommError

Bytes: TypeAlias = NDArray[np.uint8]

# When a message arrives, by the same machine that the cost model has (`comm.machine`).
#
# inside a node     ready |-- curve(bytes) --| there
# between nodes     ready |. waits .|-- bytes, with both links for itself --|-- latency --| there
#
# short message     leaves at once, and waits at its end until it is received
# long message      begins when both ends have come to it (rendezvous)
#
# What leaves a node, and what enters one, goes one after another (`links`), as in simulated
# collectives.

# Open MPI's limit between ranks of a node; its limits on networks are of that order
EAGER_BYTES = 4096


_ALL_REDUCES: tuple[Cost, ...] = (  # MPI takes recursive doubling for short arrays
    lambda N: (levels(N), levels(N), 0),
    ALGORITHMS["ring"].cost,
)
_GATHERS = (COLLECTIVES["all-gather", "tree"].cost,)
_BROADCASTS = tuple(COLLECTIVES["broadcast", how].cost for how in ("tree", "ring"))
_WAYS: Mapping[str, Sequence[Cost]] = MappingProxyType(
    {
        "allreduce": _ALL_REDUCES,
        **dict.fromkeys(("broadcast", "bcast", "reduce"), _BROADCASTS),
        **dict.fromkeys(("allgather", "reduce_scatter", "gather", "scatter"), _GATHERS),
        "alltoall": (lambda N: (N - 1, 1, 0),),
    }
)
_LATENCIES: Sequence[Cost] = (lambda N: (levels(N), 0, 0),)


# What a simulated rank has started, and the mistakes that can be seen in it.
#
# MPI forbids what is named here and mostly says nothing: numbers are wrong sometimes, or a job
# hangs. The same mistakes are found on real jobs by MUST (Hilbrich et al., 2009); where all ranks
# are in one process, looking is enough.
#
#     a buffer is given to two requests at once, one of which writes it
#     an array is changed while it is being sent
#     a message is longer or shorter than what it is received into
#     somebody ends without having waited for what it started; nobody receives a message


@dataclass(eq=False)
class SimulatedRequest:
    """Something that a rank has started.

    Attributes:
        owner: the rank.
        what: it is, as text.
        lines: where it was started.
        missing: returns the ranks, by number, without which it does not become complete now.
        memory: the bytes that it reads or writes.
        writes: whether it writes them.
        checksum: of `memory` when it was started, if it reads that; else None.
        envelope: of a message: the sender's number in its communicator, the tag, the dtype. Of a
            receive: what it takes, and later what it has got.
        complete: whether it is.
        complete_s: when it became so, by simulated time.
        result: what this rank gets of a collective that makes something.
    """

    owner: SimulatedRank
    what: str
    lines: Lines
    missing: Callable[[], Sequence[int]] = tuple
    memory: Bytes | None = None
    writes: bool = False
    checksum: int | None = None
    envelope: tuple[int, int, Any] = (0, 0, None)
    complete: bool = False
    complete_s: float = 0.0
    result: Any = None


def checksum(memory: Bytes | None) -> int:
    """Return the sum of the 8-byte words, to detect changed bytes (with near certainty)."""
    if memory is None:
        return 0
    full = memory.size - memory.size % 8
    return int(memory[:full].view(np.uint64).sum()) + int.from_bytes(
        memory[full:].tobytes(), "little"
    )


class OpenRequests(dict[SimulatedRequest, tuple[int, int]]):
    """A rank's unfinished requests, with the address ranges they read or write."""

    def add(self, request: SimulatedRequest) -> None:
        """Note a request.

        Raises:
            CommError: when its memory is in use by another one, and one of the two writes.
        """
        memory = request.memory
        begin = 0 if memory is None else memory.__array_interface__["data"][0]
        end = begin + (0 if memory is None else memory.nbytes)
        for other, (low, high) in self.items() if begin < end else ():
            if begin < high and low < end and (request.writes or other.writes):
                use = "writes" if other.writes else "reads"
                raise CommError(
                    f"rank {request.owner.number} gives its {request.what} memory"
                    f" ({describe_lines(request.lines)}) that its {other.what} still {use}"
                    f" ({describe_lines(other.lines)}); wait for that one first"
                )
        self[request] = begin, end

    def close(self, request: SimulatedRequest) -> None:
        """Note that a request was waited for.

        Raises:
            CommError: when what it sent was changed meanwhile.
        """
        if self.pop(request, None) is None:
            return
        if request.checksum is not None and request.checksum != checksum(request.memory):
            raise CommError(
                f"rank {request.owner.number} changed an array while its {request.what} read it"
                f" ({describe_lines(request.lines)}); wait for the request before the array is"
                " written"
            )
        request.memory = None  # whoever still knows the request does not keep the array


@dataclass(eq=False)
class SimulatedMessage:
    """A message under way.

    Attributes:
        request: of its sender.
        nbytes: its length.
        data: a copy, if it left at once; None while its sender's memory is read when it arrives.
        ready_s: when it was sent.
        both_ways: whether its sender was receiving then.
        there: whether it has arrived at its end, received or not.
        receive: the request that it is for, once there is one.
    """

    request: SimulatedRequest
    nbytes: int
    data: Bytes | None
    ready_s: float
    both_ways: bool
    there: bool = False
    receive: SimulatedRequest | None = None


@dataclass(eq=False)
class MessageQueue:
    """Unmatched sends or receives with one tag, from one rank to another.

    Whose messages may be taken in another order, derives from it.

    Attributes:
        sends, receives: in the order in which they were started.
        last_s: when the last message so far arrived; none may be there before it.
    """

    sends: deque[SimulatedMessage] = field(default_factory=deque)
    receives: deque[SimulatedRequest] = field(default_factory=deque)
    last_s: float = 0.0

    def find_receive(self, message: SimulatedMessage) -> SimulatedRequest | None:
        """Return the receive that takes a message."""
        return self.receives[0] if self.receives else None

    def find_send(self, receive: SimulatedRequest) -> SimulatedMessage | None:
        """Return the message that a receive takes."""
        return self.sends[0] if self.sends else None


# the share of short messages that have left when they are sent, where the seed decides
LEAVES_AT_ONCE = 0.5
NAMED = 3  # requests that are named when a rank waits for many


@dataclass(eq=False)
class CollectiveCall:
    """The n-th collective of a communicator, as far as ranks have come to it.

    Attributes:
        signature: what all ranks must bring alike: the name of the call, lengths, dtypes.
        first: the number of the rank that came first, and where it called.
        brought: what each rank has brought, by its number in the communicator.
        requests: theirs.
        last_s: when the last one so far came.
        nbytes: the most that one brings, for its time.
    """

    signature: tuple[Any, ...]
    first: tuple[int, Lines]
    brought: dict[int, Any] = field(default_factory=dict)
    requests: dict[int, SimulatedRequest] = field(default_factory=dict)
    last_s: float = 0.0
    nbytes: int = 0


class MessageBoard:
    """State shared by simulated ranks: messages, incomplete collectives, open requests.

    Args:
        scheduler: lets the ranks take turns.
        machine: what messages cost.

    Attributes:
        scheduler: this one.
        machine, places: what messages cost, and the node of each rank.
        bytes: how many were carried so far.
        sent, received: how many bytes each rank has, in messages and by the formulas of
            collectives.
        eager_bytes: how long a message may be that leaves at once.
        queues: by (communicator, from, to, tag).
        calls: by (communicator, number of the collective).
        open: what each rank has started and not yet waited for, by number.
        numbers: of the communicators that are made.
        made: what is there once for all ranks, by key (`World.once`).
    """

    def __init__(self, scheduler: Scheduler, machine: Machine) -> None:
        self.scheduler, self.places = scheduler, machine.places(len(scheduler.ranks))
        self.bytes, self.eager_bytes = 0, EAGER_BYTES
        self.sent, self.received = [0] * len(self.places), [0] * len(self.places)
        self.machine, self._links = machine, Links(self.places)
        self.queues: defaultdict[tuple[int, int, int, int], MessageQueue] = defaultdict(
            MessageQueue
        )
        self.calls: dict[tuple[int, int], CollectiveCall] = {}
        self.open = [OpenRequests() for _ in scheduler.ranks]
        self.numbers = count(1)
        self.made: dict[Hashable, Any] = {}

    def carry(
        self, source: int, target: int, nbytes: int, ready_s: float, both_ways: bool
    ) -> float:
        """Let a message go; return when it is there.

        Args:
            source, target: the ranks, by number.
            nbytes: its length.
            ready_s: when it can begin.
            both_ways: whether its sender receives something at the same time.
        """
        self.bytes += nbytes
        self.sent[source] += nbytes
        self.received[target] += nbytes
        across = self.places[source] != self.places[target]
        costs = self.machine.message(across, [both_ways], [nbytes])
        return self._links.carry(source, target, ready_s, *costs)

    def collective_s(self, name: str, ranks: tuple[int, ...], nbytes: int) -> float:
        """Return the seconds of a library collective after its last rank's arrival, by formula.

        What each rank sends and receives is counted.

        Args:
            name: of the call.
            ranks: who takes part.
            nbytes: of the whole array.
        """
        if len(ranks) == 1:
            return 0.0
        across = len({self.places[rank] for rank in ranks}) > 1
        curve = self.machine.link(across).one_way
        costs = [way(len(ranks)) for way in _WAYS.get(name, _LATENCIES)]
        beta_s = curve.beta(max(nbytes, 1))
        seconds, sent = min(
            (alphas * curve.alpha_s + sent * nbytes * beta_s, sent) for alphas, sent, _ in costs
        )
        for rank in ranks:
            self.sent[rank] += round(sent * nbytes)
            self.received[rank] += round(sent * nbytes)
        return seconds

    def complete(self, request: SimulatedRequest, at_s: float) -> None:
        """Let a request be complete, and its rank know it."""
        request.complete, request.complete_s = True, at_s
        self.scheduler.tell(request.owner, request, at_s)

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


class SimulatedComm:
    """Some simulated ranks, as one of them sees them; see `comm.world.Comm`.

    Args:
        board: what all ranks share.
        world: of this rank.
        own: this rank.
        members: the ranks of this communicator, by their numbers in the world, in order.
        number: of the communicator.
    """

    def __init__(
        self,
        board: MessageBoard,
        world: Any,
        own: SimulatedRank,
        members: Sequence[int],
        number: int,
    ) -> None:
        self.world, self._board, self._own = cast(World, world), board, own
        self.members, self._number = tuple(members), number
        self._scheduler = board.scheduler
        self._collectives = 0
        self.rank: int = self.members.index(own.number)
        self.size: int = len(self.members)

    # ---- messages between two ranks ----

    def isend(self, data: Buffer, to: int, tag: int, synchronous: bool = False) -> SimulatedRequest:
        """Start sending; see `comm.world.Comm`."""
        local, board = self._own, self._board
        self._scheduler.enter(local)
        memory = as_bytes(data)
        request = self._open(
            f"send to rank {self.members[to]} with tag {tag}", memory, False, self.members[to]
        )
        request.envelope = self.rank, tag, data.dtype
        leaves = not synchronous and memory.nbytes <= board.eager_bytes
        receiving = any(request.writes for request in board.open[local.number])
        message = SimulatedMessage(
            request, memory.nbytes, memory.copy() if leaves else None, local.clock_s, receiving
        )
        queue = self._queue(local.number, self.members[to], tag)
        if leaves:
            if self._scheduler.by_time or self._scheduler.random.random() < LEAVES_AT_ONCE:
                board.complete(request, local.clock_s)
            self._depart(message, queue, self.members[to], local.clock_s)
        receive = queue.find_receive(message)
        if receive is not None:
            queue.receives.remove(receive)
            self._pair(message, receive, queue)
        else:
            queue.sends.append(message)
        self._scheduler.leave(local)
        return request

    issend = partialmethod(isend, synchronous=True)

    def _queue(self, source: int, target: int, tag: int) -> MessageQueue:
        return self._board.queues[self._number, source, target, tag]

    def irecv(self, into: Buffer, source: int, tag: int) -> SimulatedRequest:
        """Start receiving; see `comm.world.Comm`."""
        partner = self.members[source]
        return self._receive(
            f"rank {partner} with tag {tag}", as_bytes(into), (source, tag, into.dtype), partner
        )

    def _receive(
        self, words: str, memory: Bytes | None, envelope: tuple[int, int, Any], *partners: int
    ) -> SimulatedRequest:
        """Start receiving what may come from some ranks."""
        local = self._own
        self._scheduler.enter(local)
        request = self._open(f"receive from {words}", memory, True, *partners)
        request.envelope = envelope
        queue = self._queue(partners[0], local.number, envelope[1])
        message = queue.find_send(request)
        if message is not None:
            queue.sends.remove(message)
            self._pair(message, request, queue)
        else:
            queue.receives.append(request)
        self._scheduler.leave(local)
        return request

    def _open(
        self, what: str, memory: Bytes | None, writes: bool, *missing: int
    ) -> SimulatedRequest:
        """Return a new request of this rank, noted as open."""
        read = None if memory is None or writes else checksum(memory)
        request = SimulatedRequest(
            self._own, what, find_lines(), lambda: missing, memory, writes, read
        )
        self._board.open[self._own.number].add(request)
        return request

    def _pair(
        self, message: SimulatedMessage, receive: SimulatedRequest, queue: MessageQueue
    ) -> None:
        """Let a message and the receive for it know one another."""
        assert receive.memory is not None
        if message.nbytes != receive.memory.nbytes:
            sender, ends = message.request, (message.request.lines, receive.lines)
            sent, received = map(describe_lines, ends)
            raise CommError(
                f"rank {sender.owner.number} sends {message.nbytes} bytes ({sent}), which rank"
                f" {receive.owner.number} receives into {receive.memory.nbytes} ({received}); give"
                " both the same length"
            )
        message.receive = receive
        if message.there:
            self._deliver(message, receive, self._own.clock_s)
        elif message.data is None:
            self._depart(message, queue, receive.owner.number, self._own.clock_s)

    def _depart(
        self, message: SimulatedMessage, queue: MessageQueue, target: int, ready_s: float
    ) -> None:
        """Let a message travel; it does not arrive before an earlier one."""
        sender = message.request.owner.number
        ready_s = max(ready_s, message.ready_s)
        at_s = self._board.carry(sender, target, message.nbytes, ready_s, message.both_ways)
        at_s = queue.last_s = max(at_s, queue.last_s)
        self._scheduler.plan(at_s, partial(self._arrive, message, at_s))

    def _arrive(self, message: SimulatedMessage, at_s: float) -> None:
        message.there, message.ready_s = True, at_s
        if message.receive is not None:
            self._deliver(message, message.receive, at_s)
        if message.data is not None and not message.request.complete:
            self._board.complete(message.request, at_s)

    def _deliver(self, message: SimulatedMessage, receive: SimulatedRequest, at_s: float) -> None:
        """Write what has arrived where it is received; that is the end of both requests."""
        assert receive.memory is not None
        at_s = max(at_s, message.ready_s)
        if message.data is not None:
            receive.memory[...] = message.data
        else:
            assert message.request.memory is not None
            receive.memory[...] = message.request.memory
            self._board.complete(message.request, at_s)
        self._board.complete(receive, at_s)

    # ---- what was started ----

    def test_all(self, requests: Sequence[SimulatedRequest]) -> bool:
        """Return whether all are complete; see `comm.world.Comm`."""
        if not requests:
            return True
        local = self._own
        self._scheduler.enter(local)
        self._scheduler.give_way(local)
        complete = all(request.complete for request in requests)
        if complete:
            self._close(requests)
        else:
            self._scheduler.look_in_vain(local)
        self._scheduler.leave(local)
        return complete

    def wait_all(self, requests: Sequence[SimulatedRequest]) -> None:
        """Return when all are complete; see `comm.world.Comm`."""
        local = self._own
        self._scheduler.enter(local)
        awaited = {request for request in requests if not request.complete}
        if awaited:
            words = [request.what for request in requests if request in awaited]
            words[NAMED:] = [f"{len(words) - NAMED} more"] if len(words) > NAMED else []
            pending = list(awaited)
            self._scheduler.block(
                local, awaited, ", ".join(words), find_lines(), lambda: _missing(pending)
            )
        self._close(requests)
        self._scheduler.leave(local)

    def _close(self, requests: Sequence[SimulatedRequest]) -> None:
        """Note that requests were waited for, and that it is as late as their ends."""
        for request in requests:
            self._own.clock_s = max(self._own.clock_s, request.complete_s)
            self._board.open[self._own.number].close(request)
        self._own.news += 1

    def progress(self) -> None:
        """Let messages move on; see `comm.world.Comm`."""
        self._scheduler.enter(self._own)
        self._scheduler.give_way(self._own)
        self._scheduler.leave(self._own)

    # ---- collectives ----

    def _wait_for(self, start: Callable[..., SimulatedRequest], *arguments: Any) -> None:
        self.wait_all([start(self, *arguments)])

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.wait_all([self._join(("barrier",), None, 0, lambda everyones: None)])

    def _reduce(self, name: str, array: Buffer) -> SimulatedRequest:
        """Sum over the ranks, in their order."""

        def write(arrays: list[Buffer]) -> None:
            total = _total(arrays)
            for item in arrays:
                item[...] = total

        return self._join(
            (name, array.size, array.dtype.name), array, array.nbytes, write, writes=array
        )

    allreduce = partialmethod(_wait_for, _reduce, "allreduce")
    iallreduce = partialmethod(_reduce, "iallreduce")

    def _broadcast(self, name: str, data: Buffer, root: int) -> SimulatedRequest:
        memory = as_bytes(data)

        def combine(everyones: list[Bytes]) -> None:
            for rank, everyone in enumerate(everyones):
                if rank != root:
                    everyone[...] = everyones[root]

        return self._join(
            (name, memory.nbytes, f"root {root}"), memory, memory.nbytes, combine, writes=memory
        )

    broadcast = partialmethod(_wait_for, _broadcast, "broadcast")
    ibroadcast = partialmethod(_broadcast, "ibroadcast")

    def _allgatherv(
        self, name: str, own: Buffer | None, into: Buffer, counts: Sequence[int]
    ) -> SimulatedRequest:
        begin = sum(counts[: self.rank])
        flat = into.reshape(-1)
        part = flat[begin : begin + counts[self.rank]].copy() if own is None else own
        if part.size != counts[self.rank]:
            raise CommError(
                f"rank {self._own.number} brings {part.size} elements to {name}, but its count"
                f" there is {counts[self.rank]} ({describe_lines(find_lines())})"
            )
        signature = (name, tuple(counts), into.dtype.name)
        return self._join(signature, (part, flat), into.nbytes, _gather, writes=into)

    allgatherv = partialmethod(_wait_for, _allgatherv, "allgatherv")
    iallgatherv = partialmethod(_allgatherv, "iallgatherv")

    def allgather(self, own: Buffer, into: Buffer) -> None:
        """Gather arrays of one length."""
        self._wait_for(type(self)._allgatherv, "allgather", own, into, [own.size] * self.size)

    def _reduce_scatter(
        self, name: str, array: Buffer, own: Buffer, counts: Sequence[int]
    ) -> SimulatedRequest:
        def combine(everyones: list[tuple[Buffer, Buffer]]) -> None:
            begin = 0
            for length, (_, part) in zip(counts, everyones, strict=True):
                part[...] = _total(
                    [full.reshape(-1)[begin : begin + length] for full, _ in everyones]
                )
                begin += length

        return self._join(
            (name, tuple(counts), array.dtype.name), (array, own), array.nbytes, combine, writes=own
        )

    reduce_scatter = partialmethod(_wait_for, _reduce_scatter, "reduce_scatter")
    ireduce_scatter = partialmethod(_reduce_scatter, "ireduce_scatter")

    def _join(
        self,
        signature: tuple[Any, ...],
        value: Any,
        nbytes: int,
        combine: Callable[[list[Any]], Any],
        writes: Buffer | None = None,
    ) -> SimulatedRequest:
        """Come to this communicator's next collective.

        Args:
            signature: see `CollectiveCall`.
            value: what this rank brings.
            nbytes: of the whole array, for its time, as far as this rank knows.
            combine: called by the last rank with what all have brought, in rank order; writes the
                results, or returns one for each rank.
            writes: the array that is written here.
        """
        local, board, scheduler = self._own, self._board, self._scheduler
        scheduler.enter(local)
        number = self._collectives
        self._collectives += 1
        memory = None if writes is None else as_bytes(writes)
        request = self._open(
            f"{signature[0]} (collective {number} of its communicator)", memory, writes=True
        )
        call = board.calls.setdefault(
            (self._number, number), CollectiveCall(signature, (local.number, request.lines))
        )
        if call.signature != signature:
            ways = (*call.first, call.signature), (local.number, request.lines, signature)
            texts = [
                f"rank {rank} in {_describe(what)} ({describe_lines(lines)})"
                for rank, lines, what in ways
            ]
            raise CommError(f"the ranks are in different collectives: {', '.join(texts)}")
        call.brought[self.rank], call.requests[self.rank] = value, request
        request.missing = lambda: [
            member for rank, member in enumerate(self.members) if rank not in call.brought
        ]
        call.last_s, call.nbytes = max(call.last_s, local.clock_s), max(call.nbytes, nbytes)
        if len(call.brought) == self.size:
            del board.calls[self._number, number]
            name = signature[0].removeprefix("i").removesuffix("v").lower()
            end_s = call.last_s + board.collective_s(name, self.members, call.nbytes)
            scheduler.plan(end_s, partial(self._finish, call, combine, end_s))
        scheduler.leave(local)
        return request

    def _finish(
        self, call: CollectiveCall, combine: Callable[[list[Any]], Any], end_s: float
    ) -> None:
        """Write a collective's results and complete it; if the seed decides, on each rank by
        itself.
        """
        results = combine([call.brought[rank] for rank in range(self.size)])
        call.brought.clear()  # nor is what was brought kept by who knows the call
        for rank, request in call.requests.items():
            request.result = results and results[rank]
            if self._scheduler.by_time:
                self._board.complete(request, end_s)
            else:
                self._scheduler.plan(end_s, partial(self._board.complete, request, end_s))

    # ---- other communicators ----

    def duplicate(self) -> Self:
        """Return another one of the same ranks; see `comm.world.Comm`."""
        return self._regroup("duplicate", 0, self.rank)

    def split(self, color: int, key: int) -> Self:
        """Return one of the ranks of a color; see `comm.world.Comm`."""
        return self._regroup("split", color, key)

    def split_by_node(self, key: int) -> Self:
        """Return one of the ranks of this node; see `comm.world.Comm`."""
        return self._regroup("split_by_node", self._board.places[self._own.number], key)

    def _regroup(self, name: str, color: int, key: int) -> Self:
        def make(everyones: Sequence[tuple[int, int]]) -> list[tuple[int, list[int]]]:
            # number and ranks of each communicator, by color
            made: dict[int, tuple[int, list[int]]] = {}
            for color, _, rank in sorted((*given, rank) for rank, given in enumerate(everyones)):
                made.setdefault(color, (next(self._board.numbers), []))[1].append(
                    self.members[rank]
                )
            return [made[color] for color, _ in everyones]

        number, ranks = self._exchange(name, (color, key), make)
        return type(self)(self._board, self.world, self._own, ranks, number)

    def _exchange(
        self,
        name: str,
        value: Any,
        make: Callable[[list[Any]], Sequence[Any]],
        *words: Any,
        nbytes: int = 0,
    ) -> Any:
        request = self._join((name, *words), value, nbytes, make)
        self.wait_all([request])
        return request.result

    def free(self) -> None:
        """Give it back: there is nothing to give."""

    def share_pages(self, own_bytes: int) -> SharedPages:
        """Return process memory, visible to all ranks, freed with its last holder."""

        def make(lengths: list[int]) -> list[tuple[Bytes, ...]]:
            parts = tuple(
                np.frombuffer(mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes] for nbytes in lengths
            )
            return [parts] * self.size  # each begins on a page

        parts = self._exchange("share_pages", own_bytes, make)
        return cast(SharedPages, SimpleNamespace(parts=parts, sync=lambda: None, free=lambda: None))


def _missing(requests: Sequence[SimulatedRequest]) -> list[int]:
    """Return the ranks without which requests do not become complete."""
    return sorted(
        {rank for request in requests if not request.complete for rank in request.missing()}
    )


def _describe(signature: tuple[Any, ...]) -> str:
    name, *rest = signature
    return f"{name}({', '.join(map(str, rest))})"


def _total(arrays: Sequence[Buffer]) -> Buffer:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def _gather(everyones: list[tuple[Buffer, Buffer]]) -> None:
    full = np.concatenate([as_bytes(local) for local, _ in everyones])
    for _, into in everyones:
        as_bytes(into)[...] = full
