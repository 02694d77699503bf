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

# Larger files would take minutes or gigabytes. MSCCL's own, of 16 ranks, have a tenth of it.
MOST = 200_000  # chunks of all operations
MOST_BYTES = 1 << 26
MOST_CHUNKS = 1 << 16  # of all ranks
MOST_INPUTS = 1 << 13  # of all ranks: digits of a sum
MOST_CLOCKS = 50_000_000  # a number for each operation and thread block
OPERATIONS = {"s", "r", "rcs", "rrc", "rrs", "rrcs", "re", "cpy", "nop"}
NAMES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
}


class Attributes(dict[str, str]):
    """An element's attributes."""

    def number(self, name: str, least: int = 0) -> int:
        """Return a number of at least `least`."""
        value = self.get(name, "")
        if not value.lstrip("-").isdecimal() or len(value) > 9 or int(value) < least:
            raise UsageError(f"{name}={value!r} is no whole number of {least} or more")
        return int(value)


@dataclass
class BlockOperation:
    """One operation of a thread block: its kind, its chunks, and what it waits for."""

    kind: str
    source: range
    target: range
    after: tuple[int, int]
    place: str


@dataclass
class ThreadBlock:
    """A thread block: its rank, its id there, its place among all, its partners, its progress."""

    rank: int
    id: int
    index: int
    ends: tuple[int, int, int]  # send, recv, chan
    operations: list[BlockOperation] = field(default_factory=list)
    at: int = 0


@dataclass
class SentChunks:
    """A sent message: its chunks, its sender's clock, and where it comes from."""

    chunks: range
    clock: Any
    place: str
    is_kept: bool  # in chunks that are its own


class MscclProgram:
    """A program as it is read; `steps` walks through it."""

    def __init__(self) -> None:
        self.head = Attributes()
        self.blocks: list[ThreadBlock] = []
        self.by_id: dict[tuple[int, int], ThreadBlock] = {}
        self.rank, self.block, self.count = -1, -1, 0
        self.sizes: list[int] = []
        self.is_measured = False
        self.awaited: set[tuple[int, int, int]] = set()  # rank, thread block, step

    def begin(self, name: str, values: dict[str, str]) -> None:
        """Take an element."""
        given = Attributes(values)
        if name == "algo":
            self.head, coll = given, given.get("coll", "")
            if coll not in NAMES:
                raise UsageError(f"its collective is {coll!r}; it can be {', '.join(NAMES)}")
            self.ranks, self.parts = given.number("ngpus", 1), given.number("nchunksperloop", 1)
            self.limit(self.ranks * self.parts, MOST_INPUTS, "chunks of input")
            if self.parts % self.ranks and coll not in ("allreduce", "broadcast"):
                raise UsageError(f"{self.parts} chunks are not as many for each rank")
            self.inplace, self.each = given.get("inplace") == "1", self.parts // self.ranks
            self.coll = coll
        elif name == "gpu":
            self.rank = given.number("id")
            sizes = [given.number(f"{which}_chunks") for which in "ios"]
            self.sizes = [max(pair) for pair in zip(self.sizes or sizes, sizes, strict=True)]
            self.limit(self.ranks * sum(self.sizes), MOST_CHUNKS, "chunks")
        elif not self.is_measured:
            return  # places of chunks follow from the largest buffers
        elif name == "tb":
            ends = given.number("send", -1), given.number("recv", -1), given.number("chan")
            if not 0 <= self.rank < self.ranks or max(ends[:2]) >= self.ranks:
                raise UsageError(f"rank {self.rank} or one that it names is none of its ranks")
            self.block = given.number("id")
            block = ThreadBlock(self.rank, self.block, len(self.blocks), ends)
            self.blocks.append(block)
            self.by_id[self.rank, self.block] = block
        elif name == "step":
            self.count += max(given.number("cnt"), 1)
            self.limit(self.count, MOST, "chunks in its steps")
            self.limit(self.count * len(self.blocks), MOST_CLOCKS, "steps times thread blocks")
            kind, block = given.get("type", ""), self.blocks[-1]
            if kind not in OPERATIONS:
                raise UsageError(f"its operation {kind!r} is none of {', '.join(OPERATIONS)}")
            after = given.number("depid", -1), given.number("deps", -1)
            self.awaited.add((self.rank, *after))
            place = f"thread block {self.block}, step {len(block.operations)}"
            source, target = self.span(given, "src"), self.span(given, "dst")
            block.operations.append(BlockOperation(kind, source, target, after, place))

    def limit(self, number: int, most: int, what: str) -> None:
        """Refuse a number above its limit."""
        if number > most:
            raise UsageError(f"it has more than {most} {what}")

    def span(self, given: Attributes, which: str) -> range:
        """Return an operation's chunks: (buffer, offset) as one number."""
        first, count = given.number(f"{which}off", -1), given.number("cnt")
        if first < 0:
            return range(0)
        buffer, shift = "ios".find(given.get(f"{which}buf", "?")), self.rank * self.each
        if buffer < 0 or first + count > max(self.sizes[buffer], self.parts):
            raise UsageError(f"rank {self.rank} has no chunks {first}+{count} of that buffer")
        if self.inplace and buffer < 2:  # one is a part of the other, or both are the same
            first += shift * (self.coll == ("allgather", "reduce_scatter")[buffer])
            buffer = 0
        lengths = [self.extent] * 2
        return range(first + sum(lengths[:buffer]), first + sum(lengths[:buffer]) + count)

    @property
    def extent(self) -> int:
        """The number of chunks of the input, which is that of the output."""
        return max(*self.sizes[:2], self.parts)

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
            k, own = chunk - result, rank * each
            match coll:
                case "reduce_scatter":
                    k += own * (not self.inplace)
                    is_open = not own <= k < own + each or chunk >= self.extent + result
                case _:
                    is_open = not 0 <= k < parts
            if is_open:
                return None
            match coll:
                case "allgather" | "broadcast":
                    return parts_of(k)
                case "alltoall":
                    return parts_of(k // each * inputs + own + k % each)
            return sum(parts_of(r * inputs + k) for r in range(ranks))

        room = parts, result
        return Contract(NAMES[coll], begins, ends, 1, lambda _: chunks, inputs, room)

    def steps(self) -> tuple[list[Steps], int]:
        """Return the steps of each rank, and the number of chunks.

        Raises:
            ScheduleError: for a deadlock or a race.
        """
        walk = ProgramWalk(self)
        return [tuple(map(_step, rank)) for rank in walk.run()], walk.chunks


class ProgramWalk:
    """One order of a program's operations."""

    def __init__(self, program: MscclProgram) -> None:
        self.program, self.blocks = program, program.blocks
        self.clocks = np.zeros((len(self.blocks), len(self.blocks)), np.int32)
        self.queues: defaultdict[tuple[int, int, int], deque[SentChunks]] = defaultdict(deque)
        # by rank and chunk: what is on its way from there; who wrote it last, and who has read it
        # since, as (block, clock, place)
        self.sent: defaultdict[tuple[int, int], list[SentChunks]] = defaultdict(list)
        self.written: dict[tuple[int, int], tuple[int, int, str]] = {}
        self.readers: defaultdict[tuple[int, int], dict[int, tuple[int, str]]] = defaultdict(dict)
        self.ended: dict[tuple[int, int], Any] = {}
        self.chunks = 2 * program.extent + program.sizes[2]
        self.free: list[dict[int, list[range]]] = [defaultdict(list) for _ in range(program.ranks)]
        self.tops = [self.chunks] * program.ranks
        self.rows: list[list[dict[str, Any]]] = [[] for _ in range(program.ranks)]
        self.rounds = [0] * program.ranks

    def run(self) -> list[list[dict[str, Any]]]:
        """ProgramWalk to the end."""
        waiting = deque(self.blocks)
        idle = 0
        while waiting and idle < len(waiting):
            block = waiting.popleft()
            done = block.at < len(block.operations) and self.act(block)
            block.at += done  # one operation a turn, so that messages arrive in their order
            idle = 0 if done else idle + 1
            if block.at < len(block.operations):
                waiting.append(block)
        if waiting:
            raise ScheduleError(f"deadlock: {'; '.join(map(self.waits, list(waiting)[:4]))}")
        for (source, target, _), queue in self.queues.items():
            if queue:
                where = f"rank {source}, {queue[0].place}"
                raise ScheduleError(f"{where} sends a message that rank {target} never receives")
        self.chunks = max(self.tops)
        return self.rows

    def waits(self, block: ThreadBlock) -> str:
        """Return what a block waits for."""
        operation = block.operations[block.at]
        what = (
            f"a message of rank {block.ends[1]}"
            if self.dependency(block) is not None
            else f"thread block {operation.after[0]}, step {operation.after[1]}"
        )
        return f"rank {block.rank}, {operation.place} waits for {what}"

    def dependency(self, block: ThreadBlock) -> Any:
        """Return the clock of what the next operation waits for; None if that is not over."""
        other, step = block.operations[block.at].after
        if other < 0:
            return 0
        awaited = self.program.by_id.get((block.rank, other))
        if awaited is None or not 0 <= step < len(awaited.operations):
            place = block.operations[block.at].place
            raise ScheduleError(
                f"rank {block.rank}, {place} depends on thread block {other}, step {step}, which is"
                " not there"
            )
        return self.ended[awaited.index, step] if awaited.at > step else None

    def act(self, block: ThreadBlock) -> bool:
        """Do the next operation, if it can be done."""
        operation, rank, clock = block.operations[block.at], block.rank, self.clocks[block.index]
        kind, place = operation.kind, operation.place
        known = self.dependency(block)
        send, recv, channel = block.ends
        queue = self.queues[recv, rank, channel]
        if known is None or (kind[0] == "r" and kind != "re" and not queue):
            return False
        np.maximum(clock, known, out=clock)
        clock[block.index] += 1
        source, target = operation.source, operation.target
        if kind in ("re", "cpy"):
            self.touch(block, place, source, target)
            self.local(rank, source, target, kind == "re", place)
        elif kind != "nop":
            target = source if kind == "s" else target or source
            if kind != "s":
                target = self.receive(block, queue.popleft(), operation, target)
            if kind.endswith("s"):
                if send < 0:
                    raise ScheduleError(f"rank {rank}, {place} sends, but its block sends to none")
                if kind == "s":
                    self.touch(block, place, source, range(0))
                message = SentChunks(target, clock.copy(), place, kind == "rrs")
                self.queues[rank, send, channel].append(message)
                for chunk in target:
                    self.sent[rank, chunk].append(message)
        if (rank, block.id, block.at) in self.program.awaited:
            self.ended[block.index, block.at] = clock.copy()
        return True

    def receive(
        self, block: ThreadBlock, message: SentChunks, operation: BlockOperation, target: range
    ) -> range:
        """Receive a message; return the chunks where it, or the sum, is."""
        rank, kind, place = block.rank, operation.kind, operation.place
        sender = block.ends[1]
        np.maximum(self.clocks[block.index], message.clock, out=self.clocks[block.index])
        if len(message.chunks) != len(target):
            raise ScheduleError(
                f"rank {sender}, {message.place} sends {len(message.chunks)} chunks to rank {rank},"
                f" {place}, which expects {len(target)}"
            )
        adds = kind.startswith("rr")
        if kind == "rrs":
            self.touch(block, place, operation.source, range(0))
            target = self.take(rank, len(target))
        else:
            self.touch(block, place, operation.source if adds else range(0), target)
        if adds and operation.source != target:
            self.local(rank, operation.source, target, False, place)
        self.save(rank, target)
        self.message(sender, rank, message, target, adds, place)
        if message.is_kept:
            self.free[sender][len(message.chunks)].append(message.chunks)
        message.is_kept = True  # nobody needs its chunks any more
        return target

    def touch(self, block: ThreadBlock, place: str, reads: range, writes: range) -> None:
        """Note accesses to chunks; refuse a race."""
        clock, mine = self.clocks[block.index], block.index
        for chunk in (*reads, *writes):
            at = block.rank, chunk
            before = [self.written[at]] if at in self.written else []
            if chunk in writes:
                before += [(other, *item) for other, item in self.readers[at].items()]
            for other, time, there in before:
                if clock[other] < time:
                    raise ScheduleError(
                        f"race: rank {block.rank}, {place} and {there} use chunk {chunk}, one of"
                        " them writes it, and no dependency orders them"
                    )
            if chunk in writes:
                self.written[at] = mine, int(clock[mine]), place
                self.readers[at].clear()
            else:
                self.readers[at][mine] = int(clock[mine]), place

    def take(self, rank: int, count: int) -> range:
        """Return chunks of the walk's own."""
        if self.free[rank][count]:
            return self.free[rank][count].pop()
        self.tops[rank] += count
        return range(self.tops[rank] - count, self.tops[rank])

    def save(self, rank: int, target: range) -> None:
        """Copy what is on its way from chunks that are about to change."""
        for chunk in target:
            for message in self.sent.pop((rank, chunk), ()):
                if not message.is_kept:
                    kept = self.take(rank, len(message.chunks))
                    self.append(rank, send=message.chunks, recv=kept, place=message.place)
                    message.chunks, message.is_kept = kept, True

    def local(self, rank: int, source: range, target: range, adds: bool, place: str) -> None:
        """Add a step within the rank."""
        self.save(rank, target)
        self.append(rank, send=source, recv=target, reduce=adds, place=place)

    def append(self, rank: int, **step: Any) -> None:
        """Add a step within the rank, before the last message if it has nothing to do with it."""
        rows, made = self.rows[rank], {"round": self.rounds[rank], **step}
        if rows and rows[-1]["round"] == self.rounds[rank]:
            sent, come = ({*rows[-1].get(name, ())} for name in ("send", "recv"))
            if not (sent | come) & {*step["recv"]} | come & {*step["send"]}:
                rows.insert(-1, made)
                return
        rows.append(made)
        self.rounds[rank] += 1

    def message(
        self, sender: int, receiver: int, message: SentChunks, target: range, adds: bool, place: str
    ) -> None:
        """Add a message to the steps of both ranks, in the first round in which both can."""
        sent = {"to": receiver, "send": message.chunks, "into": target}
        got = {"from_": sender, "recv": target, "reduce": adds}
        time = max(
            self.earliest(sender, sent, message.chunks), self.earliest(receiver, got, target)
        )
        for rank, part, there in ((sender, sent, message.place), (receiver, got, place)):
            last = self.rows[rank][-1:]
            if last and last[0]["round"] == time:
                both = dict.fromkeys((last[0]["place"], there))
                last[0].update(part, place=" and ".join(both))
            else:
                self.rows[rank].append({"round": time, **part, "place": there})
            self.rounds[rank] = time

    def earliest(self, rank: int, part: dict[str, Any], chunks: range) -> int:
        """Return the first round in which a rank can send or receive a message."""
        if not self.rows[rank] or self.rows[rank][-1]["round"] < self.rounds[rank]:
            return self.rounds[rank]
        last = self.rows[rank][-1]
        others = {x for name in ("send", "recv") for x in last.get(name, ())}
        is_free = not part.keys() & last.keys() - {"place"} and not others & set(chunks)
        return int(last["round"]) + (not is_free)


def _step(row: dict[str, Any]) -> Step:
    return Step(**{name: value for name, value in row.items() if name != "round"})


def read_program(file: Path) -> Collective:
    """Return the collective in a file of MSCCL.

    Raises:
        UsageError: for a file that is none.
        ScheduleError: for a deadlock or a race, by rank, thread block and step.
    """
    program = MscclProgram()

    def no_entities(*_: Any) -> None:
        raise UsageError("it declares a document type, which no program needs")

    with foreign(file, UsageError, "no program of MSCCL"):
        try:
            if file.stat().st_size > MOST_BYTES:
                raise UsageError(f"it is longer than {MOST_BYTES >> 20} MiB")
            for program.is_measured in (False, True):
                parser = expat.ParserCreate()
                parser.StartElementHandler = program.begin
                parser.StartDoctypeDeclHandler = no_entities
                with file.open("rb") as opened:
                    parser.ParseFile(opened)
            if not program.blocks:
                raise UsageError("it has no thread block")
        except (AttributeError, IndexError):
            raise UsageError(f"{file}: no program of MSCCL (its elements are misplaced)") from None
        except UsageError as error:
            raise UsageError(f"{file}: no program of MSCCL ({error})") from None
    try:
        steps, chunks = program.steps()
    except ScheduleError as error:
        raise ScheduleError(f"{file}: {error}") from None

    def phase(rank: int, size: int) -> Steps:
        if size != program.ranks:
            raise UsageError(f"{file} is for {program.ranks} ranks, not for {size}")
        return steps[rank]

    return Collective(file.stem, program.contract(chunks), (phase,), program.ranks)


def write_program(collective: Collective, ranks: int) -> str:
    """Return a collective's steps as a program of MSCCL, in place.

    A rank has a thread block for each rank that it sends to, and one for each that it receives
    from. Each step waits for the one before it.

    Raises:
        UsageError: for a collective whose chunks have other places there.
        ScheduleError: for one without proof.
    """
    contract = collective.contract
    coll = next((coll for coll, name in NAMES.items() if name == contract.name), "alltoall")
    if coll == "alltoall" or contract.room:
        raise UsageError(f"{contract.name} by {collective.name} is not written as a program")
    buffer, count = "o" if coll == "allgather" else "i", str(ranks)
    head = {"name": collective.name, "proto": "Simple", "nchannels": "1", "inplace": "1"}
    algo = ElementTree.Element("algo", head, nchunksperloop=count, ngpus=count, coll=coll)
    sizes = {f"{which}_chunks": count if which == buffer else "0" for which in "ios"}
    for rank, steps in enumerate(proved_steps(collective, ranks)):
        gpu = ElementTree.SubElement(algo, "gpu", sizes, id=str(rank))
        blocks: dict[tuple[str, int | None], ElementTree.Element] = {}
        before: list[tuple[ElementTree.Element, ElementTree.Element]] = []  # block and operation
        for step in steps:
            over, before = before, []
            sides = (
                ("send", step.to, "s", step.send),
                (
                    "recv",
                    step.from_,
                    "rrc" if step.reduce else "r",
                    step.recv,
                ),
            )
            for way, partner, kind, chunks in sides:
                for run in runs(chunks):
                    if (way, partner) not in blocks:
                        ends = {"send": "-1", "recv": "-1", way: str(partner), "chan": "0"}
                        made = ElementTree.SubElement(gpu, "tb", ends, id=str(len(blocks)))
                        blocks[way, partner] = made
                    block = blocks[way, partner]
                    # also for this step's own sends: what is added arrives where they read
                    waits: list[Any]
                    waits = [*(item for item in over + before if item[0] is not block)] or [None]
                    for awaited in waits:
                        last = awaited is waits[-1]
                        values = {"s": str(len(block)), "type": kind if last else "nop"}
                        values |= dict.fromkeys(("srcbuf", "dstbuf"), buffer)
                        values |= dict.fromkeys(
                            ("srcoff", "dstoff"), str(run.start if last else -1)
                        )
                        values |= {"cnt": str(len(run) * last), "hasdep": "0"}
                        values |= dict.fromkeys(("depid", "deps"), "-1")
                        if awaited is not None:
                            awaited[1].set("hasdep", "1")
                            values |= {"depid": awaited[0].attrib["id"]}
                            values |= {"deps": awaited[1].attrib["s"]}
                        operation = ElementTree.SubElement(block, "step", values)
                    before.append((block, operation))
    ElementTree.indent(algo)
    return ElementTree.tostring(algo, "unicode")
