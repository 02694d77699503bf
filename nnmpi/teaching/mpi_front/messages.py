"""Message specifications, as mpi4py reads them, and the matching of messages.

x                                     an array or other buffer
[x, type]  [x, count]  [x, count, type]  [x, (count, offset), type]  [x, count, offset, type]
[x, counts, offsets, type]            with v: a count and an offset for each rank
[x, counts, offsets in bytes, types]  with w: a datatype, too
"""

import operator
from collections import OrderedDict, defaultdict
from functools import partial
from itertools import accumulate, count
from typing import Any

import numpy as np

from nnmpi.base.errors import CommError
from nnmpi.base.shard import split
from nnmpi.comm.buffers import as_bytes
from nnmpi.comm.simulated.scheduler import describe_lines
from nnmpi.comm.simulated.simulated_comm import MessageQueue, SimulatedComm
from nnmpi.teaching.mpi_front.datatypes import (
    BYTE,
    Datatype,
    bytes_at,
    datatype_of,
    find_bytes,
)
from nnmpi.teaching.mpi_front.handles import ANY, Exception, local

PICKLED = np.dtype([("pickle", "u1")])
BOTTOM, IN_PLACE = (type(name, (), {"__repr__": lambda self: type(self).__name__})()
                    for name in ("BOTTOM", "IN_PLACE"))  # fmt: skip


class BufferPart:
    """Elements of a buffer that are sent or received.

    Args:
        memory: (n,) uint8, the whole buffer; None for the machine's memory (BOTTOM).
        begin: of the first element, in bytes.
        count: of elements.
        datatype: of them.

    Raises:
        ValueError: for elements outside of the buffer.
    """

    def __init__(self, memory, begin, count, datatype):
        layout = datatype._layout()
        if not layout.is_ready:
            raise Exception("ERR_TYPE", "a datatype of the program's own needs Commit() first")
        self.datatype, self.kind, self.nbytes = datatype, layout.dtype, count * layout.size
        self._where = layout.find_bytes(begin, count if self.nbytes else 0)
        low, high = begin, begin
        if isinstance(self._where, slice):
            high = self._where.stop
        elif self._where.size:
            low, high = int(self._where.min()), int(self._where.max()) + 1
        if memory is None:
            memory = bytes_at(low, high - low)
            begin, high = begin - low, high - low
            self._where = layout.find_bytes(begin, count if self.nbytes else 0)
        elif not 0 <= low <= high <= memory.size:
            raise ValueError(
                f"a buffer of {memory.size} bytes is too short for bytes {low} to {high} of it"
            )
        self._memory = memory
        # None with gaps: other requests may use the bytes between
        self.bytes = memory[self._where] if isinstance(self._where, slice) else None

    def read(self):
        """Return the bytes; a view, if they have no gaps."""
        return self._memory[self._where] if self.bytes is None else self.bytes

    def numbers(self):
        """Return the elements as an array."""
        return np.array(self.read()).view(self.kind)

    def write(self, values):
        """Write elements or bytes, from the first one on."""
        data = as_bytes(np.ascontiguousarray(values))
        where = self._where if data.size == self.nbytes else (
            self._where[: data.size]
            if self.bytes is None
            else slice(self._where.start, self._where.start + data.size)
        )  # fmt: skip
        self._memory[where] = data


def whole(values):
    """Return whole numbers as a list.

    Raises:
        TypeError: for others.
    """
    try:
        return [operator.index(item) for item in values]
    except TypeError:
        raise TypeError(f"{values!r} are no whole numbers") from None


def _look(buffer, datatype, count=1, offset=None):
    """Return a buffer's memory (None for BOTTOM) and the datatype of its elements.

    Raises:
        ValueError: for a null datatype by which elements are to be counted.
    """
    if buffer is BOTTOM:
        memory, dtype = None, BYTE
    elif buffer is None or buffer is IN_PLACE:
        memory, dtype = np.empty(0, BYTE), BYTE
    else:
        if datatype is None and getattr(getattr(buffer, "dtype", None), "hasobject", False):
            datatype_of(buffer.dtype)
        memory, dtype = find_bytes(buffer)
    if isinstance(datatype, str):
        try:
            datatype = Datatype.fromcode(datatype)
        except ValueError as error:
            raise KeyError(str(error)) from None
    elif datatype is None:
        if dtype is None:
            raise BufferError("the array's byte order is not the machine's; convert it first")
        datatype = datatype_of(dtype)
    if not isinstance(datatype, Datatype):
        raise TypeError(f"{datatype!r} is no datatype")
    if not datatype and (count is None or offset is not None):
        raise ValueError("the datatype is DATATYPE_NULL; give another")
    if datatype._layout().extent <= 0 and datatype.size:
        raise ValueError(f"the datatype's extent is {datatype.extent}; give one above 0")
    return memory, datatype


def _unpack(spec, *pairs):
    """Return a specification's buffer, counts, offsets and datatype; None where it has none.

    Args:
        pairs: the types of (counts, offsets); a list may be a count for each rank instead.
    """
    if spec is None:
        raise TypeError("None is no message; give an array, or [array, ...]")
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    if not 2 <= len(spec) <= 4:
        raise ValueError(
            f"a message is [buffer, counts, offsets, datatype], not {len(spec)} values"
        )
    rest: Any
    buffer, *rest = spec
    datatype = rest.pop() if len(spec) > 2 or isinstance(rest[-1], Datatype | str) else None
    if len(rest) == 1 and isinstance(rest[0], pairs):
        rest = rest[0]
        if len(rest) != 2:
            raise ValueError(
                f"{rest} is no pair of counts and offsets; give a count for each rank as a list"
            )
    counts, offsets = (*rest, None, None)[:2]
    return buffer, counts, offsets, datatype


def read(spec, parts=0):
    """Return a message's elements, as a `BufferPart`; or those for each rank, as equal ones.

    Args:
        spec: see the module.
        parts: the number of ranks; 0 for one part that is no list.

    Raises:
        ValueError: for a buffer that is too short, or that cannot be divided.
    """
    buffer, number, offset, datatype = _unpack(spec, tuple, list)
    memory, datatype = _look(buffer, datatype, number, offset)
    extent, size = datatype.extent, 0 if memory is None else memory.size
    (offset,) = whole([0 if offset is None else offset])
    if number is None:
        number, rest = divmod(size - offset * extent, extent) if size else (0, 0)
        blocks = max(parts, 1)
        if rest or number < 0 or number % blocks:
            raise ValueError(
                f"a buffer of {size} bytes, of which {offset * extent} are left out, does not hold"
                f" {'an equal number' if blocks > 1 else 'a whole number'} of elements of {extent}"
                f" bytes{f' for each of {blocks} ranks' if blocks > 1 else ''}; give counts"
            )
        number //= blocks
    (number,) = whole([number])
    if number < 0 or (memory is not None and not 0 <= offset * extent <= size):
        raise ValueError(
            f"a message of {number} elements from element {offset} on, of a buffer of {size} bytes"
        )
    found = [
        BufferPart(memory, (offset + at * number) * extent, number, datatype)
        for at in range(max(parts, 1))
    ]
    return found if parts else found[0]


def read_vector(spec, parts):
    """Return a `BufferPart` for each rank, of which each has its count and offset."""
    buffer, counts, offsets, datatype = _unpack(spec, tuple)
    memory, datatype = _look(buffer, datatype, counts, offsets)
    extent, size = datatype.extent, 0 if memory is None else memory.size
    if counts is None:
        if size % extent:
            raise ValueError(f"a buffer of {size} bytes has no whole number of {extent} bytes")
        counts = [*map(len, split(size // extent, parts))]
    counts = _spread(counts, parts)
    if min(counts, default=0) < 0:
        raise Exception("ERR_COUNT", f"a message cannot have {min(counts)} elements")
    if offsets is None:
        offsets = [*accumulate([0, *counts])][:parts]
    elif np.ndim(offsets) == 0:
        (step,) = whole([offsets])
        offsets = [at * step for at in range(parts)]
    offsets = _spread(offsets, parts)
    return [
        BufferPart(memory, at * extent, number, datatype)
        for at, number in zip(offsets, counts, strict=True)
    ]


def _spread(values, parts):
    values = whole(np.ravel(values).tolist() if np.ndim(values) else [values] * parts)
    if len(values) != parts:
        raise ValueError(f"{len(values)} counts or offsets are given for {parts} ranks")
    return values


def read_types(spec, parts):
    """Return a `BufferPart` for each rank, each with its count, offset in bytes and datatype."""
    if not isinstance(spec, list | tuple) or not 2 <= len(spec) <= 4:
        raise ValueError("a message of several datatypes is [buffer, counts, offsets, datatypes]")
    buffer, *rest, datatypes = spec
    counts, offsets = rest[0] if len(rest) == 1 else (rest or (None, None))
    if buffer is BOTTOM and (counts is None or offsets is None):
        raise ValueError("BOTTOM needs counts and offsets")
    memory, _ = _look(buffer, datatypes[0] if datatypes else "B")
    counts = _spread(1 if counts is None else counts, parts)
    offsets = _spread(0 if offsets is None else offsets, parts)
    return [BufferPart(memory, *one) for one in zip(offsets, counts, datatypes, strict=True)]


def read_parts(name, spec, parts):
    """Return the parts of a collective's buffer; the last letter of its name says how."""
    return {"v": read_vector, "w": read_types}.get(name[-1], read)(spec, parts)


def pack(value):
    """Return an object as bytes, which never leave this process."""
    return np.frombuffer(local().pickle.dumps(value), PICKLED)


def unpack(data):
    """Return the object again."""
    return local().pickle.loads(data) if len(data) else None


# ---- matching ----


class Waiting:
    """Messages or receives that wait for one another, found in constant time, first come first."""

    def __init__(self):
        self._by_key: Any = defaultdict(OrderedDict)
        self._sources: dict[int, None] = {}
        self._numbers = count()

    def add(self, item, *keys):
        """Add an item, to be found by each of some keys."""
        item.place = next(self._numbers), keys
        for key in keys:
            self._by_key[key][id(item)] = item
            if key[1] == ANY:
                self._sources[key[0]] = None

    def remove(self, item):
        """Remove it."""
        for key in item.place[1]:
            found = self._by_key[key]
            del found[id(item)]
            if not found:
                del self._by_key[key]
                if key[1] == ANY:
                    del self._sources[key[0]]

    def first(self, *keys):
        """Return the item that was added first under any of these keys."""
        items = [next(iter(self._by_key[key].values())) for key in keys if key in self._by_key]
        return min(items, key=lambda item: item.place[0], default=None)

    def ranks(self):
        """Return the ranks that have sent items."""
        return [*self._sources]

    def __iter__(self):
        items = {id(item): item for found in self._by_key.values() for item in found.values()}
        return iter(sorted(items.values(), key=lambda item: item.place[0]))


class Mailbox(MessageQueue):
    """All messages to a rank, and its receives, which may take any rank and any tag."""

    sends: Any
    receives: Any

    def __init__(self):
        self.sends, self.receives, self.last_s = Waiting(), Waiting(), 0.0

    def add_send(self, message):
        """Keep a message until its receive is posted."""
        source, tag, _ = message.request.envelope
        self.sends.add(message, (source, tag), (source, ANY))

    def add_receive(self, receive):
        """Keep a receive until its message is sent."""
        self.receives.add(receive, receive.envelope[:2])

    def take_receive(self, message):
        """Remove and return the receive that matches a message; probes before it see it."""
        source, tag, _ = message.request.envelope
        while True:
            receive = self.receives.first((source, tag), (source, ANY), (ANY, tag), (ANY, ANY))
            if receive is not None:
                self.receives.remove(receive)
            if receive is None or receive.sees is None or receive.sees(message):
                return receive

    def find_send(self, scheduler, source, tag):
        """Return a message that matches a receive: one sender's first.

        MPI keeps the order of a sender's messages. Between senders the clocks decide, or the seed.
        """
        ranks = self.sends.ranks() if source == ANY else [source]
        result = [
            item for item in (self.sends.first((rank, tag)) for rank in ranks) if item is not None
        ]
        if len(result) > 1 and not scheduler.by_time:
            return scheduler.random.choice(result)
        return min(result, key=lambda item: (not item.arrived, item.ready_s), default=None)

    def take_send(self, receive):
        """Remove and return the message that matches a receive, or None."""
        message = self.find_send(receive.owner.world._scheduler, *receive.envelope[:2])
        if message is not None:
            self.sends.remove(message)
        return message


class Wire(SimulatedComm):
    """A communicator that matches messages as MPI does, with wildcards.

    Attributes:
        topology: of its ranks; None without one.
        name: for people.
        info: hints.
    """

    topology = None
    name = ""
    info: dict[str, str] = {}

    def _queue(self, source, target, tag):
        return self._board.queues.setdefault((self._number, ANY, target, ANY), Mailbox())

    def _mailbox(self):
        return self._queue(ANY, self._local.number, ANY)

    def shadow(self):
        """Return a communicator of the same ranks, for what a topology's collectives send."""
        number = -2 - 2 * self._number
        self._board.names[number] = self._name
        return type(self)(self._board, self.world, self._local, self.members, number)

    def _pair(self, message, receive, queue):
        if receive.sees is not None:  # a probe that takes the message
            return
        (source, tag, sent), expected = message.request.envelope, receive.envelope[2]
        if sent != expected and BYTE not in (sent, expected):
            advice = (
                "send and recv are for objects, Send and Recv for arrays"
                if PICKLED in (sent, expected)
                else "give both one dtype"
            )
            raise CommError(
                f"rank {message.request.owner.number} sends {sent}"
                f" ({describe_lines(message.request.lines)}), which rank {receive.owner.number}"
                f" receives as {expected} ({describe_lines(receive.lines)}); {advice}"
            )
        if receive.memory is None:
            receive.memory = np.empty(message.nbytes, BYTE)
        receive.memory = receive.memory[: message.nbytes]
        receive.envelope = source, tag, receive.memory
        super()._pair(message, receive, queue)

    def _senders(self, source, tag):
        others = [rank for rank in self.members if rank != self._local.number] or self.members
        partners = others if source == ANY else [self.members[source]]
        text = (
            f"{'any rank' if source == ANY else f'rank {partners[0]}'} with"
            f" {'any tag' if tag == ANY else f'tag {tag}'}"
        )
        return text, partners

    def receive(self, memory, kind, source, tag, message=None):
        """Start receiving.

        Args:
            memory: (n,) uint8; None for a message of any length.
            kind: the dtype.
            source, tag: what is accepted.
            message: the one to receive, if it was taken before.
        """
        if memory is not None and not memory.flags.writeable:
            raise BufferError("a message cannot be received into an array that is read-only")
        text, partners = self._senders(source, tag)
        return self._receive(text, memory, (source, tag, kind), *partners, message=message)

    def _seen_s(self, message):
        """Return when a message can be seen by its receiver: the time of its first byte."""
        if message.data is not None or message.arrived:
            return message.arrives_s
        board = self._board
        sender, own = board.nodes[message.request.owner.number], board.nodes[self._local.number]
        return board.machine.message(sender != own, False, (0,))[0] + message.ready_s

    def look(self, source, tag, take=False):
        """Return a message that can be received now, or None; with `take` nobody else gets it."""
        scheduler, rank = self._scheduler, self._local
        scheduler.begin_call(rank)
        scheduler.yield_turn(rank)
        queue = self._mailbox()
        message = queue.find_send(scheduler, source, tag)
        if message is not None and scheduler.by_time and self._seen_s(message) > rank.clock_s:
            message = None
        if message is None:
            text, partners = self._senders(source, tag)
            what = f"a message from {text}{self._beside}"
            scheduler.count_fruitless_poll(rank, what, lambda: partners)
        elif take:
            queue.sends.remove(message)
        scheduler.end_call(rank)
        return message

    def await_message(self, source, tag, take=False):
        """Return a message, when it has come."""
        text, partners = self._senders(source, tag)
        queue, scheduler, rank = self._mailbox(), self._scheduler, self._local
        scheduler.begin_call(rank)
        probe = self._open(f"a message from {text}{self._beside}", None, True, *partners)
        probe.envelope = source, tag, None

        def see(message):
            probe.result = message
            at_s = max(self._seen_s(message), rank.clock_s)
            scheduler.plan(at_s, partial(self._board.complete, probe, at_s))
            return take

        message = queue.find_send(scheduler, source, tag)
        if message is None:
            probe.sees = see
            queue.add_receive(probe)
        else:
            see(message)
            if take:
                queue.sends.remove(message)
        self.wait_all([probe])
        scheduler.end_call(rank)
        return probe.result

    def cancel(self, request):
        """Take a message or a receive back, if it has not met its other end; return whether."""
        if request.complete:
            return False
        for queue in [*self._board.queues.values()]:
            if not isinstance(queue, Mailbox):
                continue
            if request in list(queue.receives):
                queue.receives.remove(request)
                request.envelope = ANY, ANY, b""
                self._board.complete(request, self._local.clock_s)
                return True
            for message in queue.sends:
                if message.request is request and message.data is None:
                    queue.sends.remove(message)
                    self._board.complete(request, self._local.clock_s)
                    return True
        return False

    def forget(self, request):
        """Let a request go on for which nobody waits."""
        self._board.open[self._local.number].close(request)
