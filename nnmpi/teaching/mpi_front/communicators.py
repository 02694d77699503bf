"""mpi4py's communicators: messages, collectives, topologies.

    start_gather ...   a function that starts an operation, with mpi4py's arguments
    FORMS              its three forms: blocking, non-blocking, persistent

A collective is an exchange: each rank gives parts to its targets and takes those of its sources.

                 targets   sources              targets: an array for each, or one for all
    gather       root      all, at root
    alltoall     all       all                  reductions combine what comes from the sources
    exscan       all       the lower ranks
    neighbor_*   as messages, between a topology's neighbours
"""

import warnings
from functools import partial, partialmethod
from itertools import pairwise, zip_longest
from math import prod
from typing import Any

import numpy as np

from nnmpi.base.errors import CommError
from nnmpi.comm.simulated.scheduler import Abandoned, describe_lines
from nnmpi.teaching.mpi_front.datatypes import BYTE, Datatype, find_bytes
from nnmpi.teaching.mpi_front.handles import (
    ANY,
    CONGRUENT,
    IDENT,
    PROC_NULL,
    SIMILAR,
    UNDEFINED,
    UNEQUAL,
    Exception,
    FrontGroup,
    FrontHandle,
    Info,
    as_int,
    local,
)
from nnmpi.teaching.mpi_front.messages import (
    IN_PLACE,
    PICKLED,
    pack,
    read,
    read_parts,
    unpack,
    whole,
)
from nnmpi.teaching.mpi_front.reductions import Op
from nnmpi.teaching.mpi_front.requests import (
    ROOM_BYTES,
    Message,
    Operation,
    Prequest,
    Request,
    start_receive,
    start_send,
)

DEFAULT = object()  # a reduction that is not given: SUM
GRAPH, CART, DIST_GRAPH = 1, 2, 3
BUFFER_AUTOMATIC = "BUFFER_AUTOMATIC"
SHARED, HW_UNGUIDED, HW_GUIDED, RESOURCE_GUIDED = range(4)
RESOURCE, NODE = "mpi_hw_resource_type", "mpi_shared_memory"


def fold(combine, values):
    """Return the combination of all values, neighbours first.

    It is the order of mpi4py, and of MPI for short arrays.
    """
    while len(values) > 1:
        pairs = zip_longest(values[::2], values[1::2], fillvalue=fold)
        values = [x if y is fold else combine(x, y) for x, y in pairs]
    return values[0]


def check_tag(name, tag, least):
    """Refuse a tag that a call does not take."""
    if as_int(tag) < least:
        raise Exception("ERR_TAG", f"{name}'s tag is {tag}; give {least} or more")
    return as_int(tag)


def is_in_place(buffer):
    """Return whether a rank's own part stays where it is, which mpi4py takes None for, too."""
    return buffer is None or buffer is IN_PLACE


def refuse_in_place(name, which, buffer):
    """Refuse MPI.IN_PLACE for a buffer that is read or written.

    Raises:
        Exception: as MPI does, when all arguments are known to be messages.
    """
    if buffer is IN_PLACE:
        raise Exception(
            "ERR_ARG",
            f"{name} has MPI.IN_PLACE for a {which} buffer that this rank needs; it stands for what"
            " would only move within a rank: for what is sent where the result comes, and for what"
            " the root of a scatter receives",
        )


class FrontComm(FrontHandle):
    """A communicator."""

    allgather: Any
    _topology: Any = object

    @property
    def _wire(self):
        return self._given()

    def __new__(cls, comm=None):
        """Return a copy of a handle, or COMM_NULL."""
        result = super().__new__(cls, comm)
        if result and not isinstance(result._value.topology, cls._topology):
            raise TypeError(f"the communicator is no {cls.__name__}")
        return result

    @classmethod
    def _of(cls, value):
        kind = Intracomm if cls is FrontComm else cls
        if value is not None and value.topology is not None:
            kind = value.topology.kind
        return super(FrontComm, kind)._of(value)

    rank = property(lambda self: self._wire.rank)
    size = property(lambda self: self._wire.size)
    group = property(lambda self: self.Get_group())
    topology = property(lambda self: self.Get_topology())
    is_inter, is_intra = property(lambda self: False), property(lambda self: True)
    is_topo = property(lambda self: self._wire.topology is not None)

    def Get_rank(self):
        """Return this rank's number."""
        return self.rank

    def Get_size(self):
        """Return the number of ranks."""
        return self.size

    def Get_group(self):
        """Return its ranks."""
        return FrontGroup._made(self._wire.members)

    def Get_topology(self):
        """Return CART, GRAPH, DIST_GRAPH or UNDEFINED."""
        return UNDEFINED if self._wire.topology is None else self._wire.topology.number

    def Is_inter(self):
        """Return whether it connects two groups: it never does."""
        return False

    def Is_intra(self):
        """Return whether it is a communicator of one group."""
        return True

    def Get_name(self):
        """Return its name."""
        return "MPI_COMM_NULL" if self._value is None else self._wire.name

    def Set_name(self, name):
        """Set its name."""
        if not isinstance(name, str | bytes):
            raise TypeError(f"{name!r} is given for a text")
        self._wire.name = name

    name = property(Get_name, Set_name)

    def Get_info(self):
        """Return its hints."""
        return Info.Create(self._wire.info)

    def Set_info(self, info):
        """Set its hints."""
        self._wire.info = dict(info._value or {})

    info = property(Get_info, Set_info)

    def Get_attr(self, keyval):
        """Return the value of one of MPI's keys, or None."""
        if keyval not in local()._attributes:
            raise Exception("ERR_OTHER", f"{keyval} is no key of an attribute")
        return local()._attributes[keyval]

    def Get_errhandler(self):
        """Return what an error does: it raises an exception."""
        return local().ERRORS_RETURN

    def Set_errhandler(self, errhandler):
        """Do nothing: an error raises an exception, and if nobody catches it all ranks end."""

    @classmethod
    def Get_parent(cls):
        """Return COMM_NULL: nobody spawned these ranks."""
        return Intercomm()

    def Compare(self, other):
        """Return IDENT, CONGRUENT for the same ranks, SIMILAR for another order, or UNEQUAL."""
        if self._wire is FrontComm._checked(other)._wire:
            return IDENT
        result = self.Get_group().Compare(other.Get_group())
        return {IDENT: CONGRUENT, SIMILAR: SIMILAR, UNEQUAL: UNEQUAL}[result]

    def Abort(self, errorcode=0):
        """End all ranks."""
        self._wire._scheduler.failure = self._wire._local.number, SystemExit(errorcode)
        raise Abandoned

    def _among(self, rank, error="ERR_RANK"):
        text = (
            f"there is no rank {rank!r} in this communicator, whose ranks are 0 to {self.size - 1}"
        )
        try:
            rank = as_int(rank)
        except TypeError:
            raise TypeError(text) from None
        if not 0 <= rank < self.size:
            raise Exception(error, text)
        return rank

    # ---- buffers of MPI_Bsend ----

    def Attach_buffer(self, buf):
        """Give memory to buffered sends."""
        attach(buf)

    def Detach_buffer(self):
        """Take the memory back."""
        return detach()

    def Flush_buffer(self):
        """Do nothing: a buffered message has left at once."""

    def Iflush_buffer(self):
        """Return a request that is complete."""
        return Request._of(Operation(self._wire))

    # ---- messages ----

    def _start_send(self, name, buf=None, dest=PROC_NULL, tag=0, obj=None):
        return self._prepare_send(name, buf, dest, tag, obj)()

    def _prepare_send(self, name, buf=None, dest=PROC_NULL, tag=0, obj=None):
        """Check the arguments of a send; return a function that starts it."""
        data, dest = None, as_int(dest)
        if dest != PROC_NULL:  # to nobody: the message is not looked at
            data = pack(obj if buf is None else buf) if name.islower() else read(buf)
            self._among(dest)
        tag = check_tag(name, tag, 0)
        base = name.lower().removeprefix("i").removesuffix("_init")
        eager = {"ssend": -1, "bsend": np.inf}.get(base)

        def start():
            if base == "bsend" and data is not None:
                check_room(data.nbytes)
            return start_send(self._wire, data, dest, tag, eager)

        return start

    def _start_receive(self, name, buf=None, source=ANY, tag=ANY):
        return self._prepare_receive(name, buf, source, tag)()

    def _prepare_receive(self, name, buf=None, source=ANY, tag=ANY):
        """Check the arguments of a receive; return a function that starts it."""
        into, source = None, as_int(source)
        if not name.islower():
            into = None if source == PROC_NULL else read(buf)
        elif name == "recv":
            if buf is not None and not isinstance(buf, int):
                warnings.warn("recv ignores its buffer", UserWarning, stacklevel=4)
        else:
            into = ROOM_BYTES if buf is None else buf if isinstance(buf, int) else len(buf)
        if source not in (ANY, PROC_NULL):
            self._among(source)
        return partial(start_receive, self._wire, into, source, check_tag(name, tag, ANY))

    def _receive(self, name, buf=None, source=ANY, tag=ANY, status=None):
        return Request._of(self._start_receive(name, buf, source, tag))._finish(status)

    def _start_both(
        self, name, sendbuf=None, dest=PROC_NULL, sendtag=0, recvbuf=None, source=ANY, recvtag=ANY
    ):
        dest = as_int(dest)
        receive = self._prepare_receive("Irecv", recvbuf, source, recvtag)
        send = self._prepare_send("Isend", sendbuf, dest, sendtag)
        got, sent = receive(), send()
        return Operation(self._wire, [*got.started, *sent.started], got.finish, got.status)

    def _start_replace(self, name, buf, dest=PROC_NULL, sendtag=0, source=ANY, recvtag=ANY):
        if as_int(dest) == as_int(source) == PROC_NULL:  # the message is not looked at
            return self._start_both(name, None, dest, sendtag, None, source, recvtag)
        part = read(buf)
        into, kind = np.empty(part.nbytes, BYTE), Datatype._plain(part.kind)
        sent = np.array(part.read())
        both = self._start_both(name, [sent, kind], dest, sendtag, [into, kind], source, recvtag)
        if source != PROC_NULL:
            received = both.started[0]
            both.finish = lambda: part.write(received.envelope[2])
        return both

    def sendrecv(
        self,
        sendobj,
        dest,
        sendtag=0,
        recvbuf=None,
        source=ANY,
        recvtag=ANY,
        status=None,
    ):
        """Send an object and return another."""
        send = self._prepare_send("isend", sendobj, dest, sendtag)
        receive = self._prepare_receive("recv", recvbuf, source, recvtag)
        sent, got = send(), receive()
        result = Request._of(got)._finish(status)
        sent.wait()
        return result

    def Probe(self, source=ANY, tag=ANY, status=None):
        """Return True when there is a message."""
        return self._probe(source, tag, status, False) and True

    def Iprobe(self, source=ANY, tag=ANY, status=None):
        """Return whether there is a message."""
        return self._look(source, tag, status, False) is not None

    def Mprobe(self, source=ANY, tag=ANY, status=None):
        """Take a message, when it has come."""
        return self._probe(source, tag, status, True)

    def Improbe(self, source=ANY, tag=ANY, status=None):
        """Take a message, or return None."""
        return self._look(source, tag, status, True)

    probe, iprobe, mprobe, improbe = Probe, Iprobe, Mprobe, Improbe

    def _probe(self, source, tag, status, take):
        return self._look(source, tag, status, take, self._wire.await_message)

    def _look(self, source, tag, status, take, find=None):
        source, tag = as_int(source), check_tag("a probe", tag, ANY)
        if source == PROC_NULL:
            if status is not None:
                status._set(PROC_NULL, ANY, 0, 0, 0)
            return local().MESSAGE_NO_PROC
        if source != ANY:
            self._among(source)
        message = (find or self._wire.look)(source, tag, take)
        if message is None:
            return None
        if status is not None:
            status._set(*message.request.envelope[:2], 0, message.nbytes, 0)
        return Message._of((self._wire, message))

    # ---- collectives ----

    def _exchange(self, name, words, parts, targets, sources, finish, reads=None, writes=None):
        """Start an exchange.

        Args:
            name: of the call.
            words: values that must be equal on all ranks.
            parts: (bytes, dtype) for each target, or one for all.
            targets, sources: ranks, without repetition.
            finish: called in the end with (bytes, dtype, lines) of each source; returns the result.
            reads, writes: the memory of the call.
        """
        wire = self._wire
        base = name.removesuffix("_init").removesuffix("v").removesuffix("w").lower()
        base = base.removesuffix("_block").removeprefix("i" if name[0] in "Ii" else "")
        nbytes = sum(len(data) for data, _ in parts)
        if len(parts) == 1 and base in ("gather", "allgather"):
            nbytes *= self.size
        value = (
            [(np.array(data), kind) for data, kind in parts],
            targets,
            wire._scheduler.find_lines(),
        )
        request = wire._join(
            (name, *words),
            value,
            nbytes,
            lambda every: [every] * self.size,
            writes,
            reads,
            base,
        )

        def end():
            taken = []
            for source in sources:
                given, its_targets, lines = request.result[source]
                at = its_targets.index(self.rank) if len(given) > 1 else 0
                taken.append((*given[at], lines))
            return finish(taken)

        return Operation(wire, [request], end)

    def _store(self, name, data, kind, lines, into):
        if len(data) != into.nbytes or (kind != into.kind and BYTE not in (kind, into.kind)):
            sent, room = (
                f"{size // dtype.itemsize} {dtype}"
                for size, dtype in ((len(data), kind), (into.nbytes, into.kind))
            )
            text = (
                f"{name}: {sent} are sent ({describe_lines(lines)}) to"
                f" rank {self.rank} of its communicator, where there is room for"
                f" {room} ({describe_lines(self._wire._scheduler.find_lines())})"
            )
            # MPI sees that there is too little room, but no other difference
            raise Exception("ERR_TRUNCATE", text) if len(data) > into.nbytes else CommError(text)
        if not into._memory.flags.writeable:
            raise BufferError("a message cannot be received into an array that is read-only")
        into.write(data)

    def _start_barrier(self, name):
        return self._exchange(name, [], [], [], [], lambda taken: None)

    def _rule(self, name, root):
        """Return (targets, sources, words) of a collective."""
        everyone, is_root = range(self.size), self.rank == root
        base = name.lower()
        if "bcast" in base or "scatter" in base:
            return everyone if is_root else [], [root], [f"root {root}"]
        if "gather" in base and "all" not in base:
            return [root], everyone if is_root else [], [f"root {root}"]
        return everyone, everyone, []

    def _start_bcast(self, name, buf, root=0):
        return self._start_buffers(name, buf, buf, root)

    def _start_buffers(self, name, sendbuf, recvbuf, root=0):
        targets, sources, words = self._rule(name, self._among(root, "ERR_ROOT"))
        base = name.removesuffix("_init").lower()
        scattered = "scatter" in base or "alltoall" in base
        stays = "scatter" not in base and "bcast" not in base
        in_place = stays and bool(sources) and is_in_place(sendbuf)
        kept = "scatter" in base and bool(targets) and is_in_place(recvbuf)
        count = self.size if scattered else 1
        how = name.removesuffix("_init")
        takes_part = "plain" if "scatter" in base or "bcast" in base else how
        into = [] if kept or not sources else self._parts(takes_part, recvbuf, sources)
        given: Any = []
        if not targets:
            pass
        elif "bcast" in base:
            given = into
        elif not in_place:
            gives_part = how if scattered else "plain"
            given = self._parts(gives_part, sendbuf, range(count))
        if targets and not in_place:
            refuse_in_place(name, "send", sendbuf)
        if sources and not kept:
            refuse_in_place(name, "receive", recvbuf)
        if in_place:
            given = into if scattered else [into[self.rank]]

        def finish(taken):
            for (data, kind, lines), part, source in zip(taken, into, sources, strict=False):
                own = source == self.rank and (in_place or "bcast" in base)
                if not own:
                    self._store(name, data, kind, lines, part)

        reads = None if in_place or "bcast" in base else _memory_of(given)
        return self._exchange(
            name,
            words,
            [(part.read(), part.kind) for part in given],
            targets,
            sources,
            finish,
            reads,
            _memory_of(into) if "bcast" not in base or not targets else None,
        )

    def _parts(self, how, spec, ranks):
        return read_parts(how, spec, len(ranks))

    def _objects(self, name, sendobj=None, root=0, obj=None):
        sendobj = obj if sendobj is None else sendobj
        targets, sources, words = self._rule(name, self._among(root, "ERR_ROOT"))
        values = [sendobj] if targets else []
        if targets and name in ("scatter", "alltoall"):
            values = [sendobj] * self.size if sendobj is None else [*sendobj]
            if len(values) != self.size:
                raise ValueError(
                    f"{name} has {len(values)} objects for {self.size} ranks; give one for each"
                )

        def finish(taken):
            result = [unpack(data) for data, _, _ in taken]
            return result[0] if name in ("bcast", "scatter") else result or None

        parts = [(pack(value), PICKLED) for value in values]
        return self._exchange(name, words, parts, targets, sources, finish).wait()

    def _sources(self, name, root):
        """Return (sources, words) of a reduction."""
        base = name.lower()
        if "scan" in base:
            return range(self.rank + ("ex" not in base)), []
        if base.removeprefix("i").startswith("reduce") and "scatter" not in base:
            return range(self.size) if self.rank == root else [], [f"root {root}"]
        return range(self.size), []

    def _combine(self, name, sendobj, op=DEFAULT, root=0):
        op = Op._find(local().SUM if op is DEFAULT else op)
        sources, words = self._sources(name, self._among(root, "ERR_ROOT"))

        def finish(taken):
            return fold(op, [unpack(data) for data, _, _ in taken]) if taken else None

        part = [(pack(sendobj), PICKLED)]
        everyone = range(self.size)
        return self._exchange(name, [*words, repr(op)], part, everyone, sources, finish).wait()

    def _start_reduce(self, name, sendbuf, recvbuf, op=DEFAULT, root=0, recvcounts=None):
        op = Op._of_arrays(local().SUM if op is DEFAULT else op)
        root = self._among(root, "ERR_ROOT")
        sources, words = self._sources(name, root)
        scattered = "scatter" in name
        takes = "scan" in name.lower() or bool(sources)  # whether the rank's result is looked at
        in_place = takes and is_in_place(sendbuf)
        into: Any = read(recvbuf) if takes else None
        mine = into if in_place else read(sendbuf)
        if into is not None and into.kind != mine.kind:
            raise ValueError(
                f"{name} sends {mine.kind} and receives {into.kind}; give both one datatype"
            )
        width, counts = mine.kind.itemsize, None
        if scattered:
            counts = self._counts(name, mine, into, in_place, recvcounts, width)
        elif into is not None and into.nbytes != mine.nbytes:
            raise ValueError(
                f"{name} sends {mine.nbytes} bytes and receives {into.nbytes}; give both one length"
            )
        if not in_place:
            refuse_in_place(name, "send", sendbuf)
        if takes:
            refuse_in_place(name, "receive", recvbuf)
        op._check(mine.kind)

        def finish(taken):
            if not taken:
                return
            arrays = [data.view(mine.kind) for data, _, _ in taken]
            total = fold(lambda x, y: op._combine(x, y, mine.datatype), arrays)
            if counts is not None:
                begin = sum(counts[: self.rank])
                total = total[begin:][: counts[self.rank]]
            into.write(total)

        if counts is not None:
            words = [*words, tuple(counts)]
        words = [*words, repr(op), mine.nbytes // width, mine.kind]
        return self._exchange(
            name,
            words,
            [(mine.read(), mine.kind)],
            range(self.size),
            sources,
            finish,
            None if in_place else mine.bytes,
            None if into is None or not sources else into.bytes,
        )

    def _counts(self, name, mine, into, in_place, recvcounts, width):
        """Return the elements that each rank receives of a reduction."""
        total, own = mine.nbytes // width, into.nbytes // width
        if "block" in name:
            each, rest = divmod(total, self.size)
            if rest:
                raise ValueError(f"{name} cannot divide {total} elements by {self.size} ranks")
            own = each if in_place else own
            counts = [each] * self.size
        elif recvcounts is None and in_place:
            raise TypeError(f"{name} with MPI.IN_PLACE needs recvcounts")
        elif recvcounts is None:
            counts = [*self.allgather(own)]
        else:
            counts = [int(item) for item in recvcounts]
        if (
            len(counts) != self.size
            or sum(counts) != total
            or (not in_place and counts[self.rank] != own)
        ):
            raise ValueError(
                f"{name} has {total} elements for counts {counts}, and receives {own}; counts add"
                " up to what is sent"
            )
        return counts

    def _start_reduce_scatter(self, name, sendbuf, recvbuf, recvcounts=None, op=DEFAULT):
        return self._start_reduce(name, sendbuf, recvbuf, op, 0, recvcounts)

    # ---- other communicators ----

    def _split(self, color, key):
        wire = self._wire.split(color, key)
        return Intracomm._of(None if color == UNDEFINED else wire)

    def Split(self, color=0, key=0):
        """Return the communicator of the ranks with one color; COMM_NULL for UNDEFINED."""
        if color < 0 and color != UNDEFINED:
            raise Exception("ERR_ARG", f"the color is {color}; give 0 or more, or MPI.UNDEFINED")
        return self._split(color, key)

    def Split_type(self, split_type, key=0, info=None):
        """Return the communicator of this rank's node; COMM_NULL for a type that has none."""
        if split_type not in (UNDEFINED, SHARED, HW_UNGUIDED, HW_GUIDED, RESOURCE_GUIDED):
            raise Exception("ERR_ARG", f"{split_type} is no type of MPI.COMM_TYPE_...")
        hints = (info._value if info is not None else None) or {}
        shared = split_type == SHARED or (
            split_type in (HW_GUIDED, RESOURCE_GUIDED) and hints.get(RESOURCE) == NODE
        )
        node = self._wire._board.nodes[self._wire._local.number]
        return self._split(node if shared else UNDEFINED, key)

    def Dup(self, info=None):
        """Return another communicator of the same ranks."""
        wire = self._wire.duplicate()
        wire.topology = self._wire.topology
        return type(self)._of(wire)

    Clone = Dup_with_info = Dup

    def Idup(self, info=None):
        """Return it, and a request that is complete."""
        return self.Dup(), Request._of(Operation(self._wire))

    Idup_with_info = Idup

    def Create(self, group):
        """Return the communicator of a group's ranks; COMM_NULL on other ranks."""
        rank = FrontGroup._checked(group)._find(self._wire._local.number)
        return self._split(UNDEFINED if rank == UNDEFINED else 0, max(rank, 0))

    def Create_group(self, group, tag=0):
        """Return the communicator of a group's ranks, which alone call this."""
        tag = check_tag("Create_group", tag, 0)
        return make_from_group(self._wire, group, ("group", self._wire._number, tag))

    Disconnect = FrontHandle.Free


class Intracomm(FrontComm):
    """A communicator of one group; here, of all there are."""

    @classmethod
    def Create_from_group(cls, group, stringtag="", info=None, errhandler=None):
        """Return the communicator of a group's ranks, which alone call this."""
        return make_from_group(local().COMM_WORLD._wire, group, ("from group", stringtag))

    def _with_topology(self, topology, inside=True):
        wire = self._wire.split(0 if inside else 1, self.rank)
        if not inside:
            return topology.kind()
        wire.topology = topology
        return topology.kind._of(wire)

    def Create_cart(self, dims, periods=None, reorder=False):
        """Return a grid of the first ranks, row by row; COMM_NULL on the other ranks."""
        dims = whole(dims)
        periods = [] if periods is None and not dims else False if periods is None else periods
        if np.ndim(periods) and len(periods) != len(dims):
            raise ValueError(f"{len(periods)} periods are given for {len(dims)} dimensions")
        periods = [int(bool(item)) for item in np.broadcast_to(periods, len(dims))]
        cells = prod(dims)
        if min(dims, default=1) < 0 or not 0 < cells <= self.size:
            raise Exception(
                "ERR_ARG", f"a grid of {dims} does not fit a communicator of {self.size} ranks"
            )
        return self._with_topology(Cart(dims, periods), self.rank < cells)

    def Cart_map(self, dims, periods=None):
        """Return this rank's number in such a grid."""
        if np.ndim(periods) and len(periods) != len(dims):
            raise ValueError(f"{len(periods)} periods are given for {len(dims)} dimensions")
        return self.rank if self.rank < prod(whole(dims)) else UNDEFINED

    def Create_graph(self, index, edges, reorder=False):
        """Return a graph; see MPI_Graph_create."""
        index = [*index]
        index, edges = whole(index[1:] if index and index[0] == 0 else index), whole(edges)
        last = index[-1] if index else 0
        if (
            len(index) > self.size
            or any(after < before for before, after in pairwise([0, *index]))
            or len(edges) < last
            or not all(0 <= edge < len(index) for edge in edges[:last])
        ):
            raise Exception(
                "ERR_ARG", f"index {index} and edges {edges} are no graph of {self.size} ranks"
            )
        return self._with_topology(Graph(index, edges[:last]), self.rank < len(index))

    def Graph_map(self, index, edges):
        """Return this rank's number in such a graph."""
        return self.rank

    def Create_dist_graph_adjacent(
        self, sources, destinations, sourceweights=None, destweights=None, info=None, reorder=False
    ):
        """Return a graph of which each rank knows its own neighbours."""
        sides = []
        for ranks, weights in ((sources, sourceweights), (destinations, destweights)):
            ranks = [] if ranks is None else [*ranks]
            if weights == WEIGHTS_EMPTY:
                if ranks:
                    raise ValueError("WEIGHTS_EMPTY is for no neighbours")
                weights = []
            sides.append((ranks, _weights(weights, len(ranks))))
        (sources, first), (destinations, last) = sides
        weighted = first is not None or last is not None
        weights = ([] if first is None else first, [] if last is None else last)
        return self._with_topology(DistGraph(sources, destinations, weights if weighted else None))

    def Create_dist_graph(
        self, sources, degrees, destinations, weights=None, info=None, reorder=False
    ):
        """Return a graph of which each rank knows some edges."""
        degrees, destinations = whole(degrees), whole(destinations)
        if min(degrees, default=0) < 0 or sum(degrees) != len(destinations):
            raise ValueError(f"{len(destinations)} destinations are given for degrees {degrees}")
        for rank in (*sources, *destinations):
            if not 0 <= rank < self.size:
                raise Exception("ERR_ARG", f"there is no rank {rank} for an edge of a graph")
        numbers = _weights(weights, len(destinations))
        begins = [sum(degrees[:at]) for at in range(len(degrees) + 1)]
        edges = [
            (source, destinations[at], None if numbers is None else numbers[at])
            for source, span in zip(sources, pairwise(begins), strict=True)
            for at in range(*span)
        ]
        everything = [edge for some in self.allgather(edges) for edge in some]
        into = [edge for edge in everything if edge[1] == self.rank]
        out = [edge for edge in everything if edge[0] == self.rank]
        weighted = any(self.allgather(numbers is not None))
        weights = [edge[2] for edge in into], [edge[2] for edge in out]
        return self._with_topology(
            DistGraph(
                [edge[0] for edge in into],
                [edge[1] for edge in out],
                weights if weighted else None,
            )
        )


def _weights(weights, number):
    if weights is None or isinstance(weights, type(UNWEIGHTED)) and weights == UNWEIGHTED:
        return None
    if len(weights) != number:
        raise ValueError(f"{len(weights)} weights are given for {number} neighbours")
    return [*weights]


class Intercomm(FrontComm):
    """A communicator of two groups, which the simulated MPI cannot make."""

    Get_remote_size, remote_size = FrontComm.Get_size, FrontComm.size


UNWEIGHTED, WEIGHTS_EMPTY = "UNWEIGHTED", "WEIGHTS_EMPTY"


class Topocomm(Intracomm):
    """Ranks with neighbours."""

    _topology: Any = ()  # its subclasses have one
    _turn = 0  # a neighbour takes block k for its edge k ^ _turn

    inedges = property(lambda self: self._edges()[0])
    outedges = property(lambda self: self._edges()[1])
    inoutedges = property(lambda self: self._edges())
    indegree = property(lambda self: len(self.inedges))
    outdegree = property(lambda self: len(self.outedges))
    degrees = property(lambda self: (self.indegree, self.outdegree))

    def _edges(self):
        return self._wire.topology.find_edges(self.rank)

    def _start_neighbors(self, name, sendbuf, recvbuf):
        sources, targets = self._edges()
        how = name.removesuffix("_init")
        to_all = "all" in how and "gather" in how
        vector = how if how[-1] in "vw" else "plain"
        if to_all:
            given = [read(sendbuf)] * len(targets)
        else:
            given = read_parts(vector, sendbuf, len(targets)) if targets else []
        into = read_parts(vector, recvbuf, len(sources)) if sources else []
        refuse_in_place(name, "send", sendbuf)
        refuse_in_place(name, "receive", recvbuf)
        return self._neighbor_messages(given, into)

    def _neighbor_messages(self, given, into):
        """Start messages to and from all neighbours; the k-th between two ranks has tag k."""
        sources, targets = self._edges()
        wire = self._wire.shadow()
        tag = _counter()
        received = [
            start_receive(wire, part, source, tag(source))
            for part, source in zip(into, sources, strict=True)
        ]
        tag = _counter()
        order = sorted(range(len(targets)), key=self._turn.__xor__)
        sent = [start_send(wire, given[k], targets[k], tag(targets[k])) for k in order]

        def finish():
            return [item.finish() if item.finish else None for item in received]

        return Operation(wire, [one for item in [*received, *sent] for one in item.started], finish)

    def _neighbor_objects(self, name, sendobj):
        sources, targets = self._edges()
        values = [sendobj] * len(targets) if "gather" in name else [*(sendobj or ())]
        if len(values) != len(targets):
            raise ValueError(f"{name} has {len(values)} objects for {len(targets)} neighbours")
        return self._neighbor_messages([*map(pack, values)], [None] * len(sources)).wait()


def _counter():
    """Return a function that counts how often it was called with a value."""
    seen: dict[int, int] = {}

    def count(value):
        seen[value] = seen.get(value, -1) + 1
        return seen[value]

    return count


class Cart:
    """A grid: its lengths, and whether each axis is a ring."""

    number = CART

    def __init__(self, dims, periods):
        self.dims, self.periods, self.kind = dims, periods, Cartcomm

    def find_coords(self, rank):
        """Return a rank's coordinates."""
        return [int(item) for item in np.unravel_index(rank, self.dims)] if self.dims else []

    def find_rank(self, coords):
        """Return the rank at these coordinates; PROC_NULL outside of the grid."""
        rank = 0
        for at, length, ring in zip(coords, self.dims, self.periods, strict=True):
            if not (ring or 0 <= at < length):
                return PROC_NULL
            rank = rank * length + at % length
        return rank

    def shift(self, rank, axis, step):
        """Return the rank some steps away."""
        coords = self.find_coords(rank)
        coords[axis] += step
        return self.find_rank(coords)

    def find_edges(self, rank):
        """Return a rank's neighbours: (sources, targets)."""
        found = [self.shift(rank, axis, step) for axis in range(len(self.dims)) for step in (-1, 1)]
        return found, [*found]


class Graph:
    """Neighbours of all ranks; see MPI_Graph_create."""

    number = GRAPH

    def __init__(self, index, edges):
        self.index, self.edges, self.kind = index, edges, Graphcomm

    def find_edges(self, rank):
        """Return a rank's neighbours: (sources, targets)."""
        begin = self.index[rank - 1] if rank else 0
        found = self.edges[begin : self.index[rank]]
        return found, [*found]


class DistGraph:
    """Neighbours of this rank, and their weights or None."""

    number = DIST_GRAPH

    def __init__(self, sources, targets, weights):
        self.sources, self.targets, self.weights = sources, targets, weights
        self.kind = Distgraphcomm

    def find_edges(self, rank):
        """Return this rank's neighbours: (sources, targets)."""
        return [*self.sources], [*self.targets]


class Cartcomm(Topocomm):
    """Ranks on a grid."""

    _topology = Cart
    _turn = 1  # what goes up comes from below, also on a ring of one or two ranks

    dims = property(lambda self: [*self._wire.topology.dims])
    periods = property(lambda self: [*self._wire.topology.periods])
    coords = property(lambda self: self.Get_coords(self.rank))
    dim = ndim = property(lambda self: len(self.dims))
    topo = property(lambda self: self.Get_topo())

    def Get_dim(self):
        """Return the number of axes."""
        return self.dim

    def Get_topo(self):
        """Return lengths, rings, and this rank's coordinates."""
        return self.dims, self.periods, self.coords

    def Get_coords(self, rank):
        """Return a rank's coordinates."""
        return self._wire.topology.find_coords(self._among(rank))

    def Get_cart_rank(self, coords):
        """Return the rank at these coordinates."""
        coords = whole(coords)
        rank = self._wire.topology.find_rank(coords)
        if rank == PROC_NULL:
            raise Exception("ERR_ARG", f"{coords} is outside of a grid of {self.dims} ranks")
        return rank

    def Shift(self, direction, disp):
        """Return the source and the target of a shift along an axis."""
        find, direction = self._wire.topology.shift, as_int(direction)
        if not 0 <= direction < self.dim:
            raise Exception("ERR_DIMS", f"there is no axis {direction} in a grid of {self.dims}")
        return find(self.rank, direction, -disp), find(self.rank, direction, disp)

    def Sub(self, remain_dims):
        """Return the grid of the ranks that differ along the axes that remain."""
        kept = [bool(item) for item in remain_dims]
        color = 0
        for at, length, keep in zip(self.coords, self.dims, kept, strict=True):
            color = color if keep else color * length + at
        wire = self._wire.split(color, self.rank)
        wire.topology = Cart(
            *(
                [item for item, keep in zip(items, kept, strict=True) if keep]
                for items in (self.dims, self.periods)
            )
        )
        return Cartcomm._of(wire)


class Graphcomm(Topocomm):
    """Ranks in a graph that all know."""

    _topology = Graph

    index = property(lambda self: [*self._wire.topology.index])
    edges = property(lambda self: [*self._wire.topology.edges])
    dims = property(lambda self: self.Get_dims())
    nnodes = property(lambda self: len(self.index))
    nedges = property(lambda self: len(self.edges))
    topo = property(lambda self: self.Get_topo())
    neighbors = property(lambda self: self.Get_neighbors(self.rank))
    nneighbors = property(lambda self: len(self.neighbors))

    def Get_dims(self):
        """Return the numbers of ranks and of edges."""
        return self.nnodes, self.nedges

    def Get_topo(self):
        """Return where each rank's neighbours end, and all neighbours."""
        return self.index, self.edges

    def Get_neighbors(self, rank):
        """Return a rank's neighbours."""
        return self._wire.topology.find_edges(self._among(rank))[0]

    def Get_neighbors_count(self, rank):
        """Return the number of a rank's neighbours."""
        return len(self.Get_neighbors(rank))


class Distgraphcomm(Topocomm):
    """Ranks of which each knows its neighbours."""

    _topology = DistGraph

    def Get_dist_neighbors_count(self):
        """Return the numbers of sources and targets, and whether they have weights."""
        return *self.degrees, self._wire.topology.weights is not None

    def Get_dist_neighbors(self):
        """Return the sources, the targets, and their weights or None."""
        return *self._edges(), self._wire.topology.weights


def make_from_group(wire, group, key):
    """Return a communicator of a group's ranks, which find its number by their order of calls."""
    board, members = wire._board, group._ranks()
    mine = wire._local.number
    if mine not in members:
        return Intracomm()
    times = board.made.setdefault((*key, members, mine, "times"), [])
    times.append(None)
    number = board.made.setdefault((*key, members, len(times)), next(board.numbers))
    return Intracomm._of(type(wire)(board, wire.world, wire._local, members, number))


def attach(buf):
    """Give memory to buffered sends.

    Raises:
        Exception: if they have memory already, or get none.
    """
    buf = BUFFER_AUTOMATIC if buf is None else buf
    if buf is not BUFFER_AUTOMATIC:
        memory, _ = find_bytes(buf)
        if not memory.flags.writeable:
            raise BufferError("the memory for buffered sends is read-only")
        if not memory.size:
            raise Exception("ERR_BUFFER", "the memory for buffered sends is empty")
    if local()._attached is not None:
        raise Exception("ERR_BUFFER", "buffered sends have memory; MPI.Detach_buffer takes it back")
    local()._attached = buf


def check_room(nbytes):
    """Refuse a buffered send without memory for it.

    Raises:
        Exception: if none is attached, or less than the message takes alone.
    """
    buf = local()._attached
    if buf is None:
        raise Exception("ERR_BUFFER", "a buffered send needs MPI.Attach_buffer before")
    if buf is not BUFFER_AUTOMATIC:
        room, needed = find_bytes(buf)[0].size, nbytes + local().BSEND_OVERHEAD
        if needed > room:
            raise Exception(
                "ERR_BUFFER",
                f"a buffered message takes {needed} bytes, of {room} that are attached",
            )


def detach():
    """Take the memory back, and return it.

    Raises:
        Exception: if there is none.
    """
    buf, local()._attached = local()._attached, None
    if buf is None:
        raise Exception("ERR_BUFFER", "buffered sends have no memory that could be taken back")
    return buf


def _memory_of(parts):
    """Return the memory that parts span, if none of them has gaps; else None."""
    if not parts or any(part.bytes is None for part in parts):
        return None
    memory = parts[0]._memory
    if any(part._memory is not memory for part in parts):
        return None
    spans = [part._where for part in parts]
    return memory[min(span.start for span in spans) : max(span.stop for span in spans)]


def _blocking(name, start):
    positions = start.__code__.co_argcount - 2  # without self and the name; then comes the status

    def call(self, *args, status=None, **named):
        args, (status, *_) = args[:positions], (*args[positions:], status)
        return Request._of(start(self, name, *args, **named))._finish(status) and None

    return call


def _started(name, start):
    return lambda self, *args, **named: Request._of(start(self, name, *args, **named))


def _persistent(name, start):
    prepare = _PREPARED.get(start)

    def call(self, *args, info=None, **named):
        begin = partial(start, self, name, *args, **named)
        if prepare is not None:  # a wrong argument is refused here
            begin = prepare(self, name, *args, **named)
        return Prequest._of(Operation(self._wire, start=begin))

    return call


def _plain(name, function):
    return partialmethod(function, name)


_PREPARED = {
    FrontComm._start_send: FrontComm._prepare_send,
    FrontComm._start_receive: FrontComm._prepare_receive,
}
# Operations that have a blocking, a non-blocking and a persistent form, and these calls of each.
FORMS = (
    (FrontComm, FrontComm._start_send, "Send Ssend Bsend Rsend"),
    (FrontComm, FrontComm._start_both, "Sendrecv"),
    (FrontComm, FrontComm._start_replace, "Sendrecv_replace"),
    (FrontComm, FrontComm._start_barrier, "Barrier"),
    (FrontComm, FrontComm._start_bcast, "Bcast"),
    (
        FrontComm,
        FrontComm._start_buffers,
        "Scatter Scatterv Gather Gatherv Allgather Allgatherv Alltoall Alltoallv Alltoallw",
    ),
    (FrontComm, FrontComm._start_reduce, "Reduce Allreduce Scan Exscan Reduce_scatter_block"),
    (FrontComm, FrontComm._start_reduce_scatter, "Reduce_scatter"),
    (
        Topocomm,
        Topocomm._start_neighbors,
        "Neighbor_allgather Neighbor_allgatherv Neighbor_alltoall Neighbor_alltoallv"
        " Neighbor_alltoallw",
    ),
)
for kind, start, names in FORMS:
    for name in names.split():
        setattr(kind, name, _blocking(name, start))
        setattr(kind, f"I{name.lower()}", _started(f"I{name.lower()}", start))
        setattr(kind, f"{name}_init", _persistent(f"{name}_init", start))
# Calls of one form.
CALLS = (
    (FrontComm, _blocking, FrontComm._start_send, "send ssend bsend"),
    (FrontComm, _started, FrontComm._start_send, "isend issend ibsend"),
    (FrontComm, _plain, FrontComm._receive, "recv Recv"),
    (FrontComm, _started, FrontComm._start_receive, "irecv Irecv"),
    (FrontComm, _persistent, FrontComm._start_receive, "Recv_init"),
    (FrontComm, _blocking, FrontComm._start_barrier, "barrier"),
    (FrontComm, _plain, FrontComm._objects, "bcast scatter gather allgather alltoall"),
    (FrontComm, _plain, FrontComm._combine, "reduce allreduce scan exscan"),
    (Topocomm, _plain, Topocomm._neighbor_objects, "neighbor_allgather neighbor_alltoall"),
)
for kind, form, function, names in CALLS:
    for name in names.split():
        setattr(kind, name, form(name, function))
