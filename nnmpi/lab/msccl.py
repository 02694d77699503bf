"""Collectives as MSCCL's XML: read as steps, and written.

A program has for each rank several thread blocks, each with its own sequence of operations, and
dependencies between them. It is walked through once, in one order that its dependencies allow. With
that order come its causes and effects (a clock for each thread block), so that two accesses to a
chunk which nothing orders are found, whatever the order of the walk. Without such a race every
order gives the same result, and the steps of one order stand for all.

    s, r        send, receive                        re, cpy     add, copy within the rank
    rcs         receive, and send on                 nop         wait for others
    rrc, rrs    receive and add: keep it, or send the sum on; rrcs both

Chunks are numbered from the input's on: then output, scratch, and what a walk needs for messages
whose chunk is overwritten before they arrive, and for sums that are sent and not kept. Messages go
by rounds: in one a rank sends at most one and receives at most one.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.parsers import expat

import numpy as np

from nnmpi.base.errors import ScheduleError, UsageError
from nnmpi.base.files import foreign
from nnmpi.comm.collective import Collective, Contract, Step, Steps, parts_of, runs
from nnmpi.comm.prove import proved_steps
from nnmpi.lab.goal import MOST_BYTES, check_length

# Larger files would take minutes or gigabytes. MSCCL's own, of 16 ranks, have a tenth of it.
MOST = 200_000  # chunks of all operations
MOST_CHUNKS = 1 << 16  # of all ranks
MOST_INPUTS = 1 << 13  # of all ranks: digits of a sum
MOST_CLOCKS = 50_000_000  # a number for each operation and thread block
OPERATIONS = {  # g: gets a message; r, w: reads, writes chunks; a: adds; s: sends
    "s": "rs",
    "r": "gw",
    "rcs": "gws",
    "rrc": "garw",
    "rrs": "gars",
    "rrcs": "garws",
    "re": "arw",
    "cpy": "rw",
    "nop": "",
}
NAMES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
}


@dataclass
class BlockOperation:
    """One operation of a thread block: what it does, its chunks, and what it waits for."""

    does: str
    source: range
    target: range
    after: tuple[int, int]
    place: str


@dataclass
class ThreadBlock:
    """A thread block: its rank, its place among all, its partners, its clock after each act."""

    rank: int
    index: int
    ends: tuple[int, int, int]  # send, recv, chan
    operations: list[BlockOperation] = field(default_factory=list)
    clocks: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class SentChunks:
    """A sent message: its chunks, its sender's clock, and where it comes from."""

    chunks: range
    clock: Any
    place: str
    is_kept: bool  # in chunks that are its own


class MscclProgram:
    """A program as it is read: `begin` takes its elements, first to measure the buffers."""

    def __init__(self) -> None:
        self.blocks: list[ThreadBlock] = []
        self.by_id: dict[tuple[int, int], ThreadBlock] = {}
        self.rank, self.block, self.count = -1, -1, 0
        self.sizes: list[int] = []
        self.is_measured = False  # places of chunks follow from the largest buffers

    def begin(self, name: str, values: dict[str, str]) -> None:
        """Take an element."""
        self.given, number = values, self.number
        if name == "algo":
            self.coll = self.given.get("coll", "")
            if self.coll not in NAMES:
                raise ValueError(f"its collective is {self.coll!r}; it can be {', '.join(NAMES)}")
            self.ranks, self.parts = number("ngpus", 1), number("nchunksperloop", 1)
            self.limit(self.ranks * self.parts, MOST_INPUTS, "chunks of input")
            if self.parts % self.ranks and self.coll not in ("allreduce", "broadcast"):
                raise ValueError(f"{self.parts} chunks are not as many for each rank")
            self.inplace, self.each = self.given.get("inplace") == "1", self.parts // self.ranks
            self.extent = max([*self.sizes[:2], self.parts])  # of the input, and of the output
        elif name == "gpu":
            self.rank = number("id")
            sizes = [number(f"{which}_chunks") for which in "ios"]
            self.sizes = [*map(max, self.sizes or sizes, sizes)]
            self.limit(self.ranks * sum(self.sizes), MOST_CHUNKS, "chunks")
        elif name == "tb" and self.is_measured:
            ends = number("send", -1), number("recv", -1), number("chan")
            if not 0 <= self.rank < self.ranks or max(ends[:2]) >= self.ranks:
                raise ValueError(f"rank {self.rank} or one that it names is none of its ranks")
            self.block = number("id")
            block = ThreadBlock(self.rank, len(self.blocks), ends)
            self.blocks.append(block)
            self.by_id[self.rank, self.block] = block
        elif name == "step" and self.is_measured:
            self.count += max(number("cnt"), 1)
            self.limit(self.count, MOST, "chunks in its steps")
            self.limit(self.count * len(self.blocks), MOST_CLOCKS, "steps times thread blocks")
            kind, operations = self.given.get("type", ""), self.blocks[-1].operations
            if kind not in OPERATIONS:
                raise ValueError(f"its operation {kind!r} is none of {', '.join(OPERATIONS)}")
            after = number("depid", -1), number("deps", -1)
            place = f"thread block {self.block}, step {len(operations)}"
            does = OPERATIONS[kind]
            spans = self.span("src", "r" in does), self.span("dst", "w" in does)
            operations.append(BlockOperation(does, *spans, after, place))

    def limit(self, number: int, most: int, what: str) -> None:
        """Refuse a number above its limit."""
        if number > most:
            raise ValueError(f"it has more than {most} {what}")

    def number(self, name: str, least: int = 0) -> int:
        """Return an attribute of the element, a number of at least `least`."""
        value = self.given.get(name, "")
        if not value.lstrip("-").isdecimal() or len(value) > 9 or int(value) < least:
            raise ValueError(f"{name}={value!r} is no whole number of {least} or more")
        return int(value)

    def span(self, which: str, is_used: bool) -> range:
        """Return an operation's chunks: (buffer, offset) as one number; -1 if they are not used."""
        first, count = self.number(f"{which}off", is_used - 1), self.number("cnt")
        if first < 0:
            return range(0)
        buffer = "ios".find(self.given.get(f"{which}buf", "?"))
        if buffer < 0 or first + count > max(self.sizes[buffer], self.parts):
            raise ValueError(f"rank {self.rank} has no chunks {first}+{count} of that buffer")
        if not self.inplace or buffer == 2:
            first += buffer * self.extent
        elif self.coll == ("allgather", "reduce_scatter")[buffer]:  # a part of the other
            first += self.rank * self.each
        return range(first, first + count)

    def contract(self, chunks: int) -> Contract:
        """Return what the program promises."""
        each, coll, parts = self.each, self.coll, self.parts
        inputs = each if coll == "allgather" else parts
        result = 0 if self.inplace else self.extent

        def begins(rank: int, chunk: int, _: int) -> int | None:
            number = chunk - (coll == "allgather" and self.inplace) * rank * each
            there = 0 <= number < inputs and (coll != "broadcast" or rank == 0)
            return parts_of(rank * inputs + number) if there else None

        def ends(rank: int, chunk: int, ranks: int) -> int | None:
            k, own, first, count = chunk - result, rank * each, 0, parts
            if coll == "reduce_scatter":
                k += own * (not self.inplace)
                first, count = own, each
            if not first <= k < first + count:
                return None
            if coll in ("allgather", "broadcast"):
                return parts_of(k)
            if coll == "alltoall":
                return parts_of(k // each * inputs + own + k % each)
            return sum(parts_of(r * inputs + k) for r in range(ranks))

        return Contract(
            NAMES[coll], begins, ends, 1, lambda _: chunks, inputs, lambda _: parts, result
        )


class ProgramWalk:
    """One order of a program's operations."""

    def __init__(self, program: MscclProgram) -> None:
        self.program, ranks = program, range(program.ranks)
        self.start = np.zeros(len(program.blocks), np.int32)  # of all clocks
        self.queues: defaultdict[Any, deque[SentChunks]] = defaultdict(deque)
        self.outgoing: list[list[SentChunks]] = [[] for _ in ranks]  # of each, in order
        # by rank and chunk: what is on its way from there; who wrote it last, and who has read it
        # since, as (block, time, place)
        self.sent: defaultdict[Any, list[SentChunks]] = defaultdict(list)
        self.written: defaultdict[Any, tuple[int, int, str]] = defaultdict(lambda: (0, 0, ""))
        self.readers: defaultdict[Any, dict[int, tuple[int, int, str]]] = defaultdict(dict)
        self.free: defaultdict[Any, list[range]] = defaultdict(list)
        self.tops = [2 * program.extent + program.sizes[2] for _ in ranks]  # numbers of chunks
        self.rows: list[list[dict[str, Any]]] = [[] for _ in ranks]
        # of each rank: the present round, and its row with a message; {} before there is one
        self.rounds, self.last = [0 for _ in ranks], [dict[str, Any]() for _ in ranks]

    def run(self) -> list[Steps]:
        """Walk to the end; return the steps of each rank.

        Raises:
            ScheduleError: for a deadlock or a race.
        """
        waiting, idle = deque(block for block in self.program.blocks if block.operations), 0
        while idle < 2 * len(waiting):
            # one operation a turn, so that messages arrive in their order, a rank's to all others
            # too unless nothing else can be done: it sends one in a round
            is_next = idle < len(waiting)
            block = waiting.popleft()
            idle = 0 if self.act(block, is_next) else idle + 1
            if len(block.clocks) < len(block.operations):
                waiting.append(block)
        if waiting:
            raise ScheduleError(f"deadlock: {'; '.join(map(self.waits, list(waiting)[:4]))}")
        for (source, target, _), queue in self.queues.items():
            if queue:
                where = f"rank {source}, {queue[0].place}"
                raise ScheduleError(f"{where} sends a message that rank {target} never receives")
        return [tuple(Step(**row) for row in rows) for rows in self.rows]

    def waits(self, block: ThreadBlock) -> str:
        """Return what a block waits for."""
        operation = block.operations[len(block.clocks)]
        what = f"a message of rank {block.ends[1]}"
        if self.known(block, operation) is None:
            what = "thread block {}, step {}".format(*operation.after)
        return f"rank {block.rank}, {operation.place} waits for {what}"

    def known(self, block: ThreadBlock, operation: BlockOperation) -> Any:
        """Return the clock of what an operation depends on; None if that is not over."""
        other, step = operation.after
        if other < 0:
            return self.start
        awaited = self.program.by_id.get((block.rank, other))
        if awaited is None or not 0 <= step < len(awaited.operations):
            raise ScheduleError(
                f"rank {block.rank}, {operation.place} depends on thread block {other}, step"
                f" {step}, which is not there"
            )
        return awaited.clocks[step] if len(awaited.clocks) > step else None

    def act(self, block: ThreadBlock, is_next: bool) -> bool:
        """Do the next operation, if it can be done; `is_next`: take a sender's first message."""
        operation, rank, clocks = block.operations[len(block.clocks)], block.rank, block.clocks
        does, source, target = operation.does, operation.source, operation.target
        (send, recv, channel), place = block.ends, operation.place
        known, queue = self.known(block, operation), self.queues[recv, rank, channel]
        gets, writes, adds = "g" in does, "w" in does, "a" in does
        if known is None or (gets and not queue):
            return False
        if gets and is_next and queue[0] is not self.outgoing[recv][0]:
            return False
        before = [known, *clocks[-1:]]
        if gets:
            message, target = queue.popleft(), target or source
            self.outgoing[recv].remove(message)
            before.append(message.clock)
            if len(message.chunks) != len(target):
                raise ScheduleError(
                    f"rank {recv}, {message.place} sends {len(message.chunks)} chunks to rank"
                    f" {rank}, {place}, which expects {len(target)}"
                )
        clock = np.maximum.reduce(before)
        clock[block.index] += 1
        clocks.append(clock)
        self.touch(block, place, source if "r" in does else (), target if writes else ())
        if gets:
            if not writes:
                target = self.take(rank, len(target))
            if adds and source != target:
                self.local(rank, source, target, False, place)
            self.message(recv, rank, message, target, adds, place)
            if message.is_kept:
                self.free[recv, len(message.chunks)].append(message.chunks)
            message.is_kept = True  # nobody needs its chunks any more
        elif writes:
            self.local(rank, source, target, adds, place)
        else:
            target = source
        if "s" in does:
            if send < 0:
                raise ScheduleError(f"rank {rank}, {place} sends, but its block sends to none")
            message = SentChunks(target, clock, place, gets and not writes)
            self.queues[rank, send, channel].append(message)
            self.outgoing[rank].append(message)
            for chunk in target:
                self.sent[rank, chunk].append(message)
        return True

    def touch(self, block: ThreadBlock, place: str, reads: Any, writes: Any) -> None:
        """Note accesses to chunks; refuse a race."""
        clock, now = block.clocks[-1], (block.index, len(block.clocks), place)
        for chunk in (*reads, *writes):
            at = block.rank, chunk
            readers = self.readers[at]
            others = readers.values() if chunk in writes else ()
            for other, time, there in (self.written[at], *others):
                if clock[other] < time:
                    raise ScheduleError(
                        f"race: rank {block.rank}, {place} and {there} use chunk {chunk}, one of"
                        " them writes it, and no dependency orders them"
                    )
            if chunk in writes:
                self.written[at] = now
                readers.clear()
            else:
                readers[block.index] = now

    def take(self, rank: int, count: int) -> range:
        """Return chunks of the walk's own."""
        if free := self.free[rank, count]:
            return free.pop()
        self.tops[rank] += count
        return range(self.tops[rank] - count, self.tops[rank])

    def save(self, rank: int, target: range) -> None:
        """Copy what is on its way from chunks that are about to change."""
        for chunk in target:
            for message in self.sent.pop((rank, chunk), ()):
                if not message.is_kept:
                    kept = self.take(rank, len(message.chunks))
                    self.local(rank, message.chunks, kept, False, message.place)
                    message.chunks, message.is_kept = kept, True

    def local(self, rank: int, source: range, target: range, adds: bool, place: str) -> None:
        """Add a step within the rank, before the last message if it has nothing to do with it."""
        self.save(rank, target)
        last, rows = self.last[rank], self.rows[rank]
        sent, come = ({*last.get(name, ())} for name in ("send", "recv"))
        is_apart = last and not ((sent | come) & {*target} or come & {*source})
        step = {"send": source, "recv": target, "reduce": adds, "place": place}
        rows.insert(len(rows) - bool(is_apart), step)
        if not is_apart:
            self.last[rank] = {}
            self.rounds[rank] += 1

    def message(
        self, sender: int, receiver: int, message: SentChunks, target: range, adds: bool, place: str
    ) -> None:
        """Add a message to the steps of both ranks, in the first round in which both can."""
        self.save(receiver, target)
        sent = {"to": receiver, "send": message.chunks, "into": target}
        got = {"from_": sender, "recv": target, "reduce": adds}
        ends = (sender, sent, message.chunks, message.place), (receiver, got, target, place)
        time = 0
        for rank, part, chunks, _ in ends:
            last = self.last[rank]
            others = {*last.get("send", ()), *last.get("recv", ())}
            is_busy = part.keys() & last.keys() or others & {*chunks}
            time = max(time, self.rounds[rank] + bool(is_busy))
        for rank, part, _, there in ends:
            if not self.last[rank] or self.rounds[rank] < time:
                self.last[rank] = {}
                self.rows[rank].append(self.last[rank])
                self.rounds[rank] = time
            last = self.last[rank]
            both = dict.fromkeys((last.get("place", there), there))
            last.update(part, place=" and ".join(both))


def read_program(file: Path) -> Collective:
    """Return the collective in a file of MSCCL.

    Raises:
        UsageError: for a file that is none.
        ScheduleError: for a deadlock or a race, by rank, thread block and step.
    """
    program = MscclProgram()

    def no_entities(*_: Any) -> None:
        raise ValueError("it declares a document type, which no program needs")

    with foreign(file, UsageError, "no program of MSCCL"):
        check_length(file, MOST_BYTES)
        try:
            for program.is_measured in (False, True):
                parser = expat.ParserCreate()
                parser.StartElementHandler = program.begin
                parser.StartDoctypeDeclHandler = no_entities
                with file.open("rb") as opened:
                    parser.ParseFile(opened)
        except (AttributeError, IndexError):
            raise ValueError("its elements are misplaced") from None
        if not program.blocks:
            raise ValueError("it has no thread block")
    walk = ProgramWalk(program)
    try:
        steps = walk.run()
    except ScheduleError as error:
        raise ScheduleError(f"{file}: {error}") from None

    def phase(rank: int, size: int) -> Steps:
        if size != program.ranks:
            raise UsageError(f"{file} is for {program.ranks} ranks, not for {size}")
        return steps[rank]

    return Collective(file.stem, program.contract(max(walk.tops)), (phase,), program.ranks)


def write_program(collective: Collective, ranks: int) -> str:
    """Return a collective's steps as a program of MSCCL, in place.

    A rank has a thread block for each rank that it sends to, and one for each that it receives
    from. Each step waits for the one before it.

    Raises:
        UsageError: for a collective whose chunks have other places there, and for one rank.
        ScheduleError: for one without proof.
    """
    contract = collective.contract
    coll = next((coll for coll, name in NAMES.items() if name == contract.name), "alltoall")
    if coll == "alltoall" or contract.result is not None:
        raise UsageError(f"{contract.name} by {collective.name} is not written as a program")
    if ranks == 1:
        raise UsageError("one rank sends nothing, so there is no program; give at least 2")
    buffer, count, add = "o" if coll == "allgather" else "i", str(ranks), ElementTree.SubElement
    parts = str(contract.parts(ranks))
    head = {"name": collective.name, "proto": "Simple", "nchannels": "1", "inplace": "1"}
    algo = ElementTree.Element("algo", head, nchunksperloop=parts, ngpus=count, coll=coll)
    sizes = {f"{which}_chunks": parts if which == buffer else "0" for which in "ios"}
    nothing = ElementTree.Element("tb", id="-1"), ElementTree.Element("step", s="-1")
    for rank, steps in enumerate(proved_steps(collective, ranks)):
        gpu = add(algo, "gpu", sizes, id=str(rank))
        before: list[Any] = []  # of the last step: blocks and operations
        for step in steps:
            over, before = before, []
            for way, partner, kind, chunks in (
                ("send", step.to, "s", step.send),
                ("recv", step.from_, "rrc" if step.reduce else "r", step.recv),
            ):
                for run in runs(chunks):
                    block = gpu.find(f"tb[@{way}='{partner}']")
                    if block is None:
                        ends = {"send": "-1", "recv": "-1", way: str(partner)}
                        block = add(gpu, "tb", ends, id=str(len(gpu)), chan="0")
                    # also for this step's own sends: what is added arrives where they read
                    waits = [item for item in over + before if item[0] is not block] or [nothing]
                    for awaited in waits:
                        last = awaited is waits[-1]
                        awaited[1].set("hasdep", "1")
                        offset = str(run.start if last else -1)
                        operation = add(
                            block,
                            "step",
                            s=str(len(block)),
                            type=kind if last else "nop",
                            srcbuf=buffer,
                            srcoff=offset,
                            dstbuf=buffer,
                            dstoff=offset,
                            cnt=str(len(run) * last),
                            depid=awaited[0].attrib["id"],
                            deps=awaited[1].attrib["s"],
                            hasdep="0",
                        )
                    before.append((block, operation))
    ElementTree.indent(algo)
    return ElementTree.tostring(algo, "unicode")
