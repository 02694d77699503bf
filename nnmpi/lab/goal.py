"""Programs of all ranks as GOAL, LogGOPSim's text: collectives, schedules and training steps.

    num_ranks 2

    rank 0 {
    l0: send 512b to 1 tag 0
    l1: recv 512b from 1 tag 0
    l2: calc 40                        nanoseconds: the sum of what has come
    l2 requires l0                     l2 begins when l0 is over; `irequires`: when it has begun
    l2 requires l1
    s0F1: calc 2000000 cpu 1           stage 0, microbatch 1; beside what other processors do
    }

Messages take what they take in the cost model. A short one leaves at once, and its sender goes on;
a longer one begins when its receiver waits, too, and keeps both. A schedule's receivers wait from
the start, since its senders wait for nobody. Messages with the same ends and tag meet in the order
of their lines. A text has bytes and no chunks, so it does not say what is summed: it is simulated
and drawn, and not proved.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

from nnmpi.base.errors import ScheduleError, UsageError, raised_as, shortened
from nnmpi.base.files import foreign, read_text, write_text
from nnmpi.base.picture import Arrow, Bar, Picture
from nnmpi.comm.collective import Chunks, Collective, runs
from nnmpi.comm.duration import ITEM_BYTES
from nnmpi.comm.machine import EAGER_BYTES, Curve, Links, Machine
from nnmpi.schedule.schedule import SENDS, TRANSFERS, USES, Kind, Schedule, send_of
from nnmpi.schedule.simulate import Costs, Lengths

ENDING = ".goal"
MOST_BYTES = 1 << 26
MOST_LINES = 1_000_000  # in some 10 seconds, and a gigabyte
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
LINE = re.compile(
    r"""\s*(?:
    num_ranks\s+(?P<size>\d{1,9})
    | rank\s+(?P<next>\d{1,9})\s*{
    | (?P<close>})
    | (?P<later>\w+)\s+(?P<how>i?requires)\s+(?P<earlier>\w+)
    | (?:(?P<label>[a-zA-Z]\w*)\s*:\s*)?
      (?P<kind>calc|send(?=.*\bto\b)|recv(?=.*\bfrom\b))\s+(?P<amount>\d{1,15})
      (?:b\s+(?:to|from)\s+(?P<partner>\d{1,9})(?:\s+tag\s+(?P<tag>\d{1,9}))?)?
      (?:\s+cpu\s+(?P<cpu>\d{1,3}))?(?:\s+nic\s+\d{1,3})?
    )?\s*""",
    re.VERBOSE | re.ASCII,
)
RULES = {
    "": "is no line of GOAL",
    "size": "is not the first line",
    "next": "is not the next rank, below num_ranks, after the end of the one before",
    "close": "ends no rank",
    "later": "names a label that is not above it in its rank",
    "kind": "is outside of a rank, has the label of another, or a message not another rank",
}


class GoalText:
    """A text while it is written.

    Attributes:
        last: by rank, the labels for which its next operation waits; and the same of what it does
            beside computing.
    """

    def __init__(self, ranks: int) -> None:
        self._lines: list[list[str]] = [[] for _ in range(ranks)]
        self.last = [[list[str]() for _ in range(ranks)] for _ in range(2)]

    def __str__(self) -> str:
        """Return the text."""
        lines = [f"num_ranks {len(self._lines)}"]
        for rank, own in enumerate(self._lines):
            lines += ["", f"rank {rank} {{", *own, "}"]
        return "\n".join(lines)

    def add(self, rank: int, text: str, after: Sequence[str], label: str = "") -> str:
        """Add an operation; return its label."""
        lines = self._lines[rank]
        label = label or f"l{len(lines)}"
        lines += [f"{label}: {text}", *(f"{label} requires {other}" for other in after)]
        return label

    def compute(self, rank: int, seconds: float, label: str = "", beside: bool = False) -> None:
        """Let a rank compute after its last operations."""
        if ns := round(1e9 * seconds):
            last = self.last[beside]
            last[rank] = [self.add(rank, f"calc {ns}", last[rank], label)]

    def collective(
        self,
        item: Collective,
        group: Sequence[int],
        nbytes: int,
        add: Curve,
        beside: bool = False,
    ) -> None:
        """Let some ranks do a collective after their last operations.

        Args:
            item: the collective.
            group: the ranks.
            nbytes: of the whole buffer of a rank.
            add: seconds of adding.
            beside: whether the ranks compute meanwhile.
        """
        size, last = len(group), self.last[beside]
        short, longer = divmod(-(-nbytes // ITEM_BYTES), item.contract.parts(size))

        def lengths(chunks: Chunks) -> list[int]:
            counts = (sum(short + (chunk < longer) for chunk in run) for run in runs(chunks))
            return [ITEM_BYTES * count for count in counts if count]

        for at, rank in enumerate(group):
            last[rank] = last[rank] + self.last[0][rank] * beside
            for step in item(at, size):
                ends = (
                    ("send {}b to {} tag {}", step.to, step.into or step.send),
                    ("recv {}b from {} tag {}", step.from_, step.recv),
                )
                last[rank] = [
                    self.add(rank, text.format(length, group[partner], +beside), last[rank])
                    for text, partner, chunks in ends
                    if partner is not None
                    for length in lengths(chunks)
                ] or last[rank]
                if step.reduce:
                    self.compute(rank, sum(map(add, lengths(step.recv))), beside=beside)

    def schedule(
        self, schedule: Schedule, costs: Costs, lengths: Lengths, group: Sequence[int]
    ) -> None:
        """Let some ranks run a lowered schedule; see `simulate_schedule`."""
        for at, rank in enumerate(group):
            come: defaultdict[Any, list[str]] = defaultdict(list)
            for item in schedule.instructions(at):
                kind, last = item.kind, self.last[0][rank]
                if kind in TRANSFERS:
                    send = send_of(item)
                    source, target, _ = schedule.channel_of(item)
                    number = send.stage + schedule.stages * (send.microbatch or 0) + 1
                    for nbytes in lengths(send):
                        tag = f"tag {2 * number + (send.kind is Kind.SEND_GRAD)}"
                        if kind in SENDS:
                            self.add(rank, f"send {nbytes}b to {group[target]} {tag}", last)
                        else:
                            text = f"recv {nbytes}b from {group[source]} {tag}"
                            come[item].append(self.add(rank, text, ()))
                    continue
                if kind in USES:
                    last += come[USES[kind].at(item.stage, item.microbatch)]
                if times := costs.get(kind):
                    self.compute(rank, times[item.stage], f"s{item}")


class GoalOperation(NamedTuple):
    """One operation: nanoseconds of a `calc`, bytes of a `send` or `recv`."""

    rank: int
    line: int
    kind: str
    amount: int
    partner: int = -1
    tag: int = 0
    cpu: int = 0
    label: str = ""


Spans: TypeAlias = list[tuple[GoalOperation, float, float]]
"""Operations that take time, with their beginnings and ends in seconds; a send ends on arrival."""


class GoalProgram:
    """A text that was read.

    Attributes:
        ranks: their number.
        operations: of all ranks.
        graph: by event, the events that it waits for. An operation has two, its beginning and its
            end: twice its number, and that plus one.
    """

    def __init__(self, name: str, text: str) -> None:
        """Read a text.

        Args:
            name: of its file, for errors.

        Raises:
            UsageError: for a text that is no program, and for messages without their other end.
        """
        text = COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
        self._name, self._lines = name, text.split("\n")
        self.ranks, self.operations, self.graph = 0, list[GoalOperation](), dict[int, list[int]]()
        channels: defaultdict[Any, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        rank, is_open, labels = -1, False, dict[str, int]()
        for number, line in enumerate(self._lines):
            found, new = LINE.fullmatch(line), len(self.operations)
            given: dict[str, Any] = {
                key: int(value) if value.isdecimal() else value
                for key, value in (found.groupdict() if found else {"": line}).items()
                if value
            }
            match given:
                case {"size": size} if not self.ranks:
                    self.ranks = size
                case {"next": following} if not is_open and following == rank + 1 < self.ranks:
                    rank, is_open, labels = following, True, {}
                case {"close": _} if is_open:
                    is_open = False
                case {"later": later, "earlier": earlier} if {later, earlier} <= labels.keys():
                    before = labels[earlier]
                    before = self._over(before) if given["how"] == "requires" else 2 * before
                    self.graph[2 * labels[later]].append(before)
                case {"kind": kind} if (
                    is_open
                    and given.get("label") not in labels
                    and (kind != "calc") == ("partner" in given)
                    and rank != given.get("partner", -1) < self.ranks
                ):
                    item = GoalOperation(rank, number, **given)
                    self.operations.append(item)
                    self.graph |= {2 * new: [], 2 * new + 1: [2 * new]}
                    labels[item.label] = new
                    if kind != "calc":
                        ends = (rank, item.partner)[:: 1 if kind == "send" else -1]
                        channels[ends, item.tag][kind == "recv"].append(new)
                case _ if given:
                    self._refuse(number, next(filter(None, map(RULES.get, given))))
        if is_open or not 0 < self.ranks == rank + 1:
            self._refuse(-1, f"is the end, after {rank + 1 - is_open} of {self.ranks} ranks")
        for posted in channels.values():
            for send, recv in zip_longest(*posted):
                last = self.operations[send if recv is None else recv]
                if None in (send, recv):
                    self._refuse(last.line, f"has no other end in rank {last.partner}")
                if self.operations[send].amount > last.amount:
                    self._refuse(last.line, "is shorter than its message")
                self.graph[2 * recv + 1].append(2 * send + 1)
                if self._over(send) % 2:
                    self.graph[2 * send + 1].append(2 * recv)

    def _place(self, line: int) -> str:
        number = line % len(self._lines)
        return f"line {number + 1}: {shortened(self._lines[number].strip())!r}"

    def _refuse(self, line: int, what: str) -> NoReturn:
        raise UsageError(f"{self._name}, {self._place(line)} {what}")

    def _over(self, number: int) -> int:
        """Return the event after which an operation's rank goes on."""
        item = self.operations[number]
        return 2 * number + (item.kind != "send" or item.amount > EAGER_BYTES)

    def simulate(self, machine: Machine) -> Spans:
        """Return what takes time.

        Raises:
            ScheduleError: for a deadlock.
        """
        sorter, links = TopologicalSorter(self.graph), Links(machine, self.ranks)
        try:
            sorter.prepare()
        except CycleError as error:
            lines = dict.fromkeys(self.operations[event // 2].line for event in error.args[1])
            places = "; ".join(map(self._place, [*lines][:4]))
            raise ScheduleError(f"{self._name}: deadlock, a circle of waits: {places}") from None
        # a rank sends and receives at once what waits for the same
        both = {
            (item.rank, *self.graph[2 * number])
            for number, item in enumerate(self.operations)
            if item.kind == "recv"
        }
        over_s, free_s = dict[int, float](), defaultdict[Any, float](float)
        queue, spans = list[tuple[float, int]](), Spans()
        while sorter.is_active():
            for event in sorter.get_ready():
                ready_s = max((over_s[before] for before in self.graph[event]), default=0.0)
                heappush(queue, (ready_s, event))
            begin_s, event = heappop(queue)
            item, end_s = self.operations[event // 2], begin_s
            if item.kind == "calc":
                duration_s, processor = 1e-9 * item.amount, (item.rank, item.cpu)
                if event % 2:
                    end_s += duration_s
                else:
                    end_s = max(end_s, free_s[processor])
                    free_s[processor] = end_s + duration_s
            elif event % 2 and item.kind == "send":
                both_ways = (item.rank, *self.graph[event - 1]) in both
                end_s = links.carry(item.rank, item.partner, begin_s, (item.amount,), both_ways)
            if event % 2 and end_s > begin_s:
                spans.append((item, begin_s, end_s))
            over_s[event] = end_s
            sorter.done(event)
        return spans


def makespan(spans: Spans) -> float:
    """Return the end of the last one, in seconds."""
    return max((end_s for _, _, end_s in spans), default=0.0)


def picture(spans: Spans, ranks: int, title: str) -> Picture:
    """Return what the ranks compute and send, over time."""
    bars, arrows = [Bar(f"rank {rank}", 0, 0) for rank in range(ranks)], []
    for item, begin_s, end_s in spans:
        row, begin, end = f"rank {item.rank}", 1e3 * begin_s, 1e3 * end_s
        if item.kind == "calc":
            bars.append(Bar(row, begin, end, "computing", item.label))
        else:
            bars.append(Bar(row, begin, end, "sending", f"to {item.partner}"))
            arrows.append(Arrow(row, begin, f"rank {item.partner}", end))
    return Picture(title, "ms", bars, arrows)


def save(file: Path, text: object) -> None:
    """Write a text to a file.

    Raises:
        UsageError: for one that cannot be written.
    """
    with raised_as(UsageError, f"{file} cannot be written"):
        write_text(file, f"{text}\n")


def check_length(file: Path, most: int) -> None:
    """Refuse a file of more bytes."""
    if file.stat().st_size > most:
        raise ValueError(f"it is longer than {most >> 20} MiB")


def read_goal(file: Path) -> GoalProgram:
    """Return the program in a file.

    Raises:
        UsageError: see `GoalProgram`; for a file that is no text or too long.
    """
    with foreign(file, UsageError, "no GOAL"):
        check_length(file, MOST_BYTES)
        text = read_text(file)
        if text.count("\n") > MOST_LINES:
            raise ValueError(f"it has more than {MOST_LINES} lines")
    return GoalProgram(str(file), text)
