"""mpi4py's calls on simulated ranks: `MPI` for programs that `nnmpi simrun` runs.

    Send([x, MPI.DOUBLE], 1)         a buffer becomes views of its elements, one    `read_parts`
                                     for each rank
    send({"a": 1}, 1)                an object travels as its pickle, which never leaves this
                                     process
    Gather, Alltoallv, bcast ...     ranks exchange lists of arrays by target;      `_exchange`
                                     each takes its own entries
    Reduce, scan ...                 each rank gets all ranks' values and           `_fold`
                                     combines them, neighbours first
    MPI.Win                          refused by name

Messages match receives as in MPI: a receive may take any rank and any tag, and its buffer may be
longer. Where MPI leaves the choice of a message open, the clocks decide, or else the seed. Programs
pass arguments without types, so this module has none, either; setup.cfg exempts it.
"""

import pickle
import platform
import re
from contextlib import suppress
from functools import partial, partialmethod
from itertools import zip_longest
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from nnmpi.base.errors import CommError, check_int
from nnmpi.base.shard import split
from nnmpi.comm.buffers import as_bytes
from nnmpi.comm.simulated.scheduler import Abandoned, describe_lines, find_lines
from nnmpi.comm.simulated.simulated_comm import MessageQueue, SimulatedComm

ANY_SOURCE = ANY_TAG = ANY = -1  # Open MPI's values
PROC_NULL, UNDEFINED, SUCCESS = -2, -32766, 0
ROOM_BYTES = 1 << 15  # mpi4py's buffer for the pickle of irecv
TICK_S = 1e-7  # simulated seconds of a call of Wtime, so that no two times are equal
BYTE, PICKLED = np.dtype("u1"), np.dtype([("pickle", "u1")])
IN_PLACE, COMM_NULL = object(), None
CALLERS_LINES = True  # the scheduler names the lines that call this module, not its own

# MPI's datatypes, and NumPy's codes.
_TYPES = """
    BYTE u1  UNSIGNED_CHAR u1  UINT8_T u1  CHAR i1  SIGNED_CHAR i1  INT8_T i1  BOOL ?  C_BOOL ?
    SHORT i2  INT16_T i2  UNSIGNED_SHORT u2  UINT16_T u2
    INT i4  INTEGER i4  INT32_T i4  UNSIGNED u4  UINT32_T u4
    LONG i8  LONG_LONG i8  INT64_T i8  UNSIGNED_LONG u8  UNSIGNED_LONG_LONG u8  UINT64_T u8
    FLOAT f4  REAL f4  DOUBLE f8  DOUBLE_PRECISION f8  COMPLEX c8  C_FLOAT_COMPLEX c8
    DOUBLE_COMPLEX c16  C_DOUBLE_COMPLEX c16
"""
DATATYPES = {name: np.dtype(code) for name, code in re.findall(r"(\w+) (\S+)", _TYPES)}

# MPI's reductions, and NumPy's functions. (An object is reduced as an array of one.)
_OPS = """
    SUM add  PROD multiply  MAX maximum  MIN minimum
    LAND logical_and  LOR logical_or  BAND bitwise_and  BOR bitwise_or
"""
OPS = dict(re.findall(r"(\w+) (\S+)", _OPS))

# Collectives in which only root sends, or only root receives, and those that send each rank a part
# of its own. In all others all ranks send, and all receive the same.
ROOT_SENDS = "bcast", "scatter"
ROOT_RECEIVES = "gather", "reduce"
SCATTERED = "scatter", "alltoall"


def refuse(self, name):
    """Refuse an attribute that the simulated MPI lacks, and list those that it has."""
    whose = self.__name__ if isinstance(self, ModuleType) else type(self).__name__
    names = [item for item in dir(self) if item[0] != "_"]
    raise AttributeError(f"the simulated MPI has no {whose}.{name}; {whose} has {', '.join(names)}")


class Status:
    """The envelope of a received message."""

    __getattr__ = refuse
    source = tag = ANY
    count = error = 0

    def Get_source(self):
        """Return its sender."""
        return self.source

    def Get_tag(self):
        """Return its tag."""
        return self.tag

    def Get_count(self, datatype=BYTE):
        """Return its number of elements."""
        return self.count // datatype.itemsize


def read_parts(spec, ranks):
    """Return a buffer's elements for each rank, as views; [None] without a buffer.

    Args:
        spec: an array or other buffer; or a list of a buffer and a datatype, a count, or counts
            and displacements.
        ranks: the number of parts. Without counts they are equal, or the first ones have one
            element more.

    Raises:
        ValueError: for a buffer that is too short, or has gaps.
    """
    buffer, *rest = spec if isinstance(spec, list | tuple) else [spec]
    if buffer is None or buffer is IN_PLACE:
        return [None]
    dtype = rest.pop() if rest and isinstance(rest[-1], np.dtype | str) else None
    counts, begins = (*(rest[0] if rest and isinstance(rest[0], tuple) else rest), None, None)[:2]
    try:
        array = np.asarray(memoryview(buffer))
    except TypeError:
        raise TypeError(
            f"{buffer!r} is no array; give one, or send objects by the call in small letters"
        ) from None
    if not array.flags.c_contiguous:
        raise ValueError(
            f"an array with strides {array.strides} is not contiguous; pass"
            " numpy.ascontiguousarray(array)"
        )
    flat = as_bytes(array).view(array.dtype if dtype is None else dtype)
    if counts is None:
        counts = [*map(len, split(flat.size, ranks))]
    counts = np.broadcast_to(counts, ranks).tolist()
    begins = np.cumsum([0, *counts]) if begins is None else begins
    parts = [flat[begin:][:count] for begin, count in zip(begins, counts, strict=False)]
    if [part.size for part in parts] != counts:
        raise ValueError(f"a buffer of {flat.size} elements is too short for the counts {counts}")
    return parts


def _read(spec):
    (part,) = read_parts(spec, 1)
    # [None, MPI.BYTE] is an empty message
    return np.empty(0, BYTE) if part is None else part


def _pack(value):
    return np.frombuffer(pickle.dumps(value), PICKLED)


class Mailbox(MessageQueue):
    """All messages to a rank, and its receives."""

    def find_receive(self, message):
        """Return the first receive that matches a message."""
        return next((receive for receive in self.receives if _fits(message, receive)), None)

    def find_send(self, receive):
        """Return a message that matches a receive: one sender's first."""
        scheduler = receive.owner.world._scheduler
        # MPI keeps the order of a sender's messages. In reverse, the first one is stored last.
        firsts = {
            send.request.owner.number: send for send in reversed(self.sends) if _fits(send, receive)
        }
        result = [*firsts.values()]
        if result and not scheduler.by_time:
            return scheduler.random.choice(result)
        return min(result, key=lambda item: (not item.arrived, item.ready_s), default=None)


def _fits(message, receive):
    pairs = zip(receive.envelope[:2], message.request.envelope, strict=False)
    return all(expected in (ANY, result) for expected, result in pairs)


class Wire(SimulatedComm):
    """A communicator that matches messages as MPI does, with wildcards."""

    def _queue(self, source, target, tag):
        return self._board.queues.setdefault((self._number, ANY, target, ANY), Mailbox())

    def _pair(self, message, receive, queue):
        (source, tag, sent), expected = message.request.envelope, receive.envelope[2]
        if sent != expected and BYTE not in (sent, expected):
            raise CommError(
                f"rank {message.request.owner.number} sends {sent}"
                f" ({describe_lines(message.request.lines)}), which rank {receive.owner.number}"
                f" receives as {expected} ({describe_lines(receive.lines)}); send and recv are for"
                " objects, Send and Recv for arrays"
            )
        if receive.memory is None:
            receive.memory = np.empty(message.nbytes, BYTE)
        receive.memory = receive.memory[: message.nbytes]
        receive.envelope = source, tag, receive.memory
        super()._pair(message, receive, queue)

    def receive(self, into, source, tag):
        """Start receiving; `into` is None for a pickle of any length."""
        others = [rank for rank in self.members if rank != self._local.number] or self.members
        partners = others if source == ANY else [self.members[source]]
        senders = (
            f"{'any rank' if source == ANY else f'rank {partners[0]}'} with"
            f" {'any tag' if tag == ANY else f'tag {tag}'}"
        )
        memory, kind = (None, PICKLED) if into is None else (as_bytes(into), into.dtype)
        if memory is not None and not memory.flags.writeable:
            raise ValueError("a message cannot be received into an array that is read-only")
        return self._receive(senders, memory, (source, tag, kind), *partners)


def _fold(combine, values):
    while len(values) > 1:  # neighbours first: the order of mpi4py, and of MPI for short arrays
        pairs = zip_longest(values[::2], values[1::2])
        values = [x if y is None else combine(x, y) for x, y in pairs]
    return values[0]


def _find_function(op):
    if op not in [*OPS]:  # (a list: `op` may be no key)
        raise TypeError(f"{op!r} is no reduction of MPI; give one of {', '.join(OPS)}")
    return getattr(np, OPS[op])


class Request:
    """A started operation, with the requests that it waits for: none if nothing was to be done."""

    __getattr__ = refuse
    __hash__ = object.__hash__

    def __init__(self, wire=None, started=(), loads=False):
        self._wire, self._started, self._loads = wire, started, loads

    def __bool__(self):
        return bool(self._started)

    def __eq__(self, other):  # a completed request equals REQUEST_NULL
        return self is other or (isinstance(other, Request) and not self and not other)

    def Test(self, status=None):
        """Return whether it is complete."""
        return self._is_over() and self.Wait(status)

    def test(self, status=None):
        """Return whether it is complete, and the received object."""
        return (True, self.wait(status)) if self._is_over() else (False, None)

    def _is_over(self):
        return not self._started or self._wire.test_all(self._started)

    def Wait(self, status=None):
        """Return when it is complete."""
        started, self._started = self._started, []
        if started:
            self._wire.wait_all(started)
        if status is not None:
            source, tag, got = started[0].envelope if started else (PROC_NULL, ANY, b"")
            status.source, status.tag, status.count = source, tag, len(got)
        return True

    def wait(self, status=None):
        """Return the received object."""
        started = self._started
        self.Wait(status)
        return pickle.loads(started[0].envelope[2]) if self._loads and started else None

    @staticmethod
    def Testany(requests, status=None):
        """Return the number of a complete request, or UNDEFINED, and whether none is awaited."""
        return Request.testany(requests, status)[:2]

    @staticmethod
    def testany(requests, status=None):
        """Return the received object, too."""
        for number, request in enumerate(requests):
            if request and request._is_over():
                return number, True, request.wait(status)
        return UNDEFINED, not any(requests), None

    @staticmethod
    def Waitany(requests, status=None):
        """Return the number of one that is complete, or UNDEFINED if none is awaited."""
        return Request.waitany(requests, status)[0]

    @staticmethod
    def waitany(requests, status=None):
        """Return the received object, too."""
        awaited = [item for item in requests if item]
        if awaited:
            awaited[0]._wire.world.wait_until(
                lambda: any(item._started[0].complete for item in awaited)
            )
        return Request.testany(requests, status)[::2]

    @staticmethod
    def Waitall(requests, statuses=None):
        """Return when all are complete."""
        Request.waitall(requests, statuses)
        return True

    @staticmethod
    def waitall(requests, statuses=None):
        """Return the received objects."""
        return [item.wait(status) for item, status in zip_longest(requests, statuses or ())]


class Intracomm:
    """mpi4py's communicator, on simulated ranks."""

    __getattr__ = refuse

    def __init__(self, wire):
        self._wire, self.rank, self.size = wire, wire.rank, wire.size

    def Get_rank(self):
        """Return this rank's number."""
        return self.rank

    def Get_size(self):
        """Return the number of ranks."""
        return self.size

    def Abort(self, errorcode=0):
        """End all ranks."""
        self._wire._scheduler.failure = self._wire._local.number, SystemExit(errorcode)
        raise Abandoned

    def Barrier(self):
        """Return when all ranks have entered the barrier."""
        self._wire.barrier()

    barrier = Barrier

    def _among(self, rank):
        if rank not in range(self.size):
            raise ValueError(
                f"there is no rank {rank!r} in this communicator, whose ranks are 0 to"
                f" {self.size - 1}"
            )
        return rank

    # ---- messages ----

    def _send(self, name, buf=None, dest=PROC_NULL, tag=0, obj=None):
        data = _pack(obj if buf is None else buf) if name.islower() else _read(buf)
        synchronous = "ss" in name.lower()
        check_int(f"{name}'s tag", tag, 0)
        started = (
            []
            if dest == PROC_NULL
            else [self._wire.isend(data, self._among(dest), tag, synchronous)]
        )
        request = Request(self._wire, started)
        return request if name[0] in "Ii" else request.wait()

    def _receive(self, name, buf=None, source=ANY, tag=ANY, status=None):
        into = (
            _read(buf)
            if not name.islower()
            else np.empty(ROOM_BYTES, PICKLED)
            if name == "irecv"
            else None
        )
        if source not in (ANY, PROC_NULL):
            self._among(source)
        started = [] if source == PROC_NULL else [self._wire.receive(into, source, tag)]
        request = Request(self._wire, started, name.islower())
        return request if name[0] in "Ii" else request.wait(status)

    def _both(
        self,
        name,
        sendbuf=None,
        dest=PROC_NULL,
        sendtag=0,
        recvbuf=None,
        source=ANY,
        recvtag=ANY,
        status=None,
        sendobj=None,
    ):
        start, receive = ("isend", "recv") if name.islower() else ("Isend", "Recv")
        sent = self._send(start, sendbuf, dest, sendtag, sendobj)
        result = self._receive(receive, recvbuf, source, recvtag, status)
        sent.Wait()
        return result

    # ---- collectives ----

    def _exchange(self, name, root, make, *words):
        """Return the ranks' arrays for this rank, each with the source lines of its call.

        Args:
            make: (number of parts) -> this rank's arrays; the number is 1 or that of the ranks.
            words: values that must be equal on all ranks.
        """
        root_sends, root_receives, scattered = (
            name.lower().removesuffix("v") in item
            for item in (ROOT_SENDS, ROOT_RECEIVES, SCATTERED)
        )
        is_root = self.rank == self._among(root)
        local = (
            [item.copy() for item in make(self.size if scattered else 1)]
            if is_root or not root_sends
            else []
        )
        nbytes = sum(item.nbytes for item in local) * (
            1 if words or scattered or root_sends else self.size
        )
        rooted = [f"root {root}"] if root_sends or root_receives else []
        by_rank = self._wire._exchange(
            name,
            (local, find_lines()),
            lambda all_: [all_] * self.size,
            *rooted,
            *words,
            nbytes=nbytes,
        )
        result = [(parts[self.rank * scattered], lines) for parts, lines in by_rank if parts]
        if name.lower() == "scan":
            return result[: self.rank + 1]
        return result if is_root or not root_receives else []

    def _buffers(self, name, sendbuf, recvbuf, root=0):
        def make(parts):
            if sendbuf is not IN_PLACE:
                return read_parts(sendbuf, parts)
            room = read_parts(recvbuf, self.size)
            return room if parts > 1 else [room[self.rank]]

        result = self._exchange(name, root, make)
        for (data, lines), into in zip(
            result, read_parts(recvbuf, len(result)) if result else (), strict=True
        ):
            if into is not None:
                self._store(name, data, lines, into)

    def _store(self, name, data, lines, into):
        if (data.size, data.dtype) != (into.size, into.dtype):
            raise CommError(
                f"{name}: {data.size} {data.dtype} are sent ({describe_lines(lines)}) to"
                f" rank {self.rank} of its communicator, where there is room for"
                f" {into.size} {into.dtype} ({describe_lines(find_lines())})"
            )
        into[...] = data

    def Bcast(self, buf, root=0):
        """Replace the elements with root's."""
        self._buffers("Bcast", buf, buf, root)

    def _objects(self, name, sendobj=None, root=0, *words, obj=None):
        value = obj if sendobj is None else sendobj

        def make(parts):
            if parts > 1 and len(value) != parts:
                raise ValueError(
                    f"{name} has {len(value)} objects for {parts} ranks; give one for each"
                )
            return map(_pack, value if name in SCATTERED else [value])

        result = [pickle.loads(data) for data, _ in self._exchange(name, root, make, *words)]
        return result[0] if name in ROOT_SENDS else result or None

    def _combine(self, name, sendobj, op="SUM", root=0):
        combine = np.frompyfunc(op, 2, 1) if callable(op) else _find_function(op)
        result = self._objects(name, sendobj, root, getattr(op, "__name__", op))
        total = (
            result and _fold(combine, [np.array([item, None], object)[:1] for item in result])[0]
        )
        return bool(total) if op in ("LAND", "LOR") and result else total

    def _reduce(self, name, sendbuf, recvbuf, op="SUM", root=0, recvcounts=None):
        function = _find_function(op)
        data = _read(recvbuf if sendbuf is IN_PLACE else sendbuf)
        result = self._exchange(name, root, lambda parts: [data], op, data.size, data.dtype)
        if result:
            total = _fold(function, [item for item, _ in result]).astype(data.dtype)
            if "scatter" in name:
                total = np.split(total, self.size if recvcounts is None else np.cumsum(recvcounts))[
                    self.rank
                ]
            self._store(name, total, result[0][1], _read(recvbuf)[: total.size])

    def Reduce_scatter(self, sendbuf, recvbuf, recvcounts=None, op="SUM"):
        """Reduce all arrays and scatter the result, by counts or in equal parts."""
        self._reduce("Reduce_scatter", sendbuf, recvbuf, op, 0, recvcounts)

    # ---- other communicators ----

    def Split(self, color=0, key=0):
        """Return the communicator of the ranks with one color; COMM_NULL for UNDEFINED."""
        wire = self._wire.split(color, key)
        return COMM_NULL if color == UNDEFINED else Intracomm(wire)

    def Dup(self):
        """Return another communicator of the same ranks."""
        return Intracomm(self._wire.duplicate())

    def Free(self):
        """Do nothing: a simulated communicator has no resources."""

    def Create_cart(self, dims, periods=False, reorder=False):
        """Return a grid of the first ranks, row by row; COMM_NULL on the other ranks."""
        cells = np.prod(dims)
        if not 0 < cells <= self.size:
            raise ValueError(f"a grid of {dims} does not fit a communicator of {self.size} ranks")
        outside = bool(self.rank >= cells)
        wire = self._wire.split(outside, self.rank)
        return COMM_NULL if outside else Cartcomm(wire, dims, periods)


CALLS = (
    (Intracomm._send, "send ssend isend issend Send Ssend Rsend Isend Issend Irsend"),
    (Intracomm._receive, "recv irecv Recv Irecv"),
    (Intracomm._both, "sendrecv Sendrecv"),
    (Intracomm._objects, "bcast scatter gather allgather alltoall"),
    (Intracomm._buffers, "Scatter Scatterv Gather Gatherv Allgather Allgatherv Alltoall Alltoallv"),
    (Intracomm._combine, "reduce allreduce scan"),
    (Intracomm._reduce, "Reduce Allreduce Reduce_scatter_block Scan"),
)
for function, names in CALLS:
    for name in names.split():
        setattr(Intracomm, name, partialmethod(function, name))


class Cartcomm(Intracomm):
    """Ranks on a grid."""

    def __init__(self, wire, dims, periods):
        super().__init__(wire)
        self.dims = np.atleast_1d(dims).tolist()
        self.periods = np.broadcast_to(periods, len(self.dims))
        self.coords = self.Get_coords(self.rank)

    def Get_coords(self, rank):
        """Return a rank's coordinates."""
        return [int(item) for item in np.unravel_index(rank, self.dims)]

    def Get_cart_rank(self, coords):
        """Return the rank at these coordinates; PROC_NULL outside the grid."""
        with suppress(ValueError):
            return int(
                np.ravel_multi_index(
                    coords, self.dims, np.where(self.periods, "wrap", "raise").tolist()
                )
            )
        return PROC_NULL

    def Shift(self, direction, disp):
        """Return the source and the target of a shift along an axis."""
        step = disp * np.eye(len(self.dims), dtype=int)[direction]
        return self.Get_cart_rank(self.coords - step), self.Get_cart_rank(self.coords + step)


_SAME = (
    "Intracomm Cartcomm Request Status COMM_NULL ANY_SOURCE ANY_TAG PROC_NULL UNDEFINED SUCCESS"
    " IN_PLACE"
)


def make_modules(wire: Any) -> dict[str, ModuleType]:
    """Return a rank's replacements for mpi4py's modules, by name."""

    def wtime():
        wire.world.sleep(TICK_S)
        return wire.world.now()

    local = wire._local
    alone = Wire(wire._board, wire.world, local, [local.number], -1 - local.number)
    mpi, package = ModuleType("mpi4py.MPI"), ModuleType("mpi4py")
    vars(package).update(
        MPI=mpi, rc=SimpleNamespace(), __path__=[], __getattr__=partial(refuse, package)
    )
    vars(mpi).update(
        {name: name for name in OPS},
        **DATATYPES,
        **{name: globals()[name] for name in _SAME.split()},
        Comm=Intracomm,
        Exception=CommError,
        COMM_WORLD=Intracomm(wire),
        COMM_SELF=Intracomm(alone),
        REQUEST_NULL=Request(),
        Wtime=wtime,
        Get_processor_name=platform.node,
        Finalize=wire.barrier,
        __getattr__=partial(refuse, mpi),
    )
    return {"mpi4py": package, "mpi4py.MPI": mpi}
