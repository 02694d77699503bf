"""Pictures of collectives: in text, rounds down and ranks across, in each cell what goes where and what comes.

For a page, an animation, round by round: what travels, and what is in every chunk when it has come.

    {"begins": [["1", "1"], ["10", "10"]],                    by rank and chunk: rank 0's part, rank 1's part
     "rounds": 2,
     "messages": [{"round": 0, "from": 0, "to": 1, "chunks": [1], "reduce": True, "after": ["11"], "clock": [1, 0.5]},
                  ...]}

What is in a chunk is a hexadecimal number with a digit for each rank (see `collective`). The clock at a message's end
is [latencies, buffers] along the path that led to it: latencies x alpha + buffers x bytes x beta seconds.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from nnmpi.comm.collective import Algorithm, Chunks, Collective, Step, as_collective, runs
from nnmpi.comm.machine import Machine
from nnmpi.comm.prove import PartialSums, finish, prove
from nnmpi.comm.simulate import price
from nnmpi.errors import ScheduleError, UsageError, counted

_LEGEND = """\
2 -> 1  chunk 2 goes to rank 1     2 <- 1  chunk 2 comes from rank 1     2 <+ 1  it comes and is added     .  idle"""


def render(collective: Collective | Algorithm, size: int) -> str:
    """Return a picture of a collective on `size` ranks, when every message takes one round.

        all-reduce by tree, 4 ranks

                 rank 0    rank 1    rank 2    rank 3
        round 0  all <+ 1  all -> 0  all <+ 3  all -> 2
        round 1  all <+ 2  .         all -> 0  .
        round 2  all -> 2  .         all <- 0  .
        round 3  all -> 1  all <- 0  all -> 3  all <- 2

    A rank that sends and receives in one round has two lines.

    Raises:
        UsageError: for no ranks.
        ScheduleError: when the ranks wait for one another for ever.
    """
    if size < 1:
        raise UsageError(f"there is no picture of {size} ranks; give at least 1")
    collective = as_collective(collective)
    picture = _Picture(size)
    finish([collective(rank, size) for rank in range(size)], [0] * size, picture)
    lines = [["", *(f"rank {rank}" for rank in range(size))]]
    for number, cells in sorted(picture.rounds.items()):
        for index, line in enumerate(zip_longest(*(cells[rank] for rank in range(size)), fillvalue="")):
            lines.append(["" if index else f"round {number}", *(text or "." * (index == 0) for text in line)])
    title = f"{collective.contract.name} by {collective.name}, {counted(size, 'rank')}"
    if not picture.rounds:
        return f"{title}: nothing to do"
    return "\n".join([title, "", *_columns(lines), "", _LEGEND])


@dataclass(slots=True)
class _Picture:
    """Writes down who sends what to whom in each round."""

    size: int
    rounds: defaultdict[int, defaultdict[int, list[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def carry(self, sender: int, receiver: int, out: Step, into: Step, ready: int) -> int:
        """Note a message at both its ends; it is there after one round."""
        cells = self.rounds[ready]
        cells[sender].insert(0, f"{self._name(out.send)} -> {receiver}")
        cells[receiver].append(f"{self._name(into.recv)} {'<+' if into.reduce else '<-'} {sender}")
        return ready + 1

    def turn(self, ready: int) -> int:
        """Return the round."""
        return ready

    def add(self, rank: int, step: Step, over: int) -> int:
        """Return the same round: adding takes no time here."""
        return over

    def _name(self, chunks: Chunks) -> str:
        """Return chunk numbers in short: "all", "3", "0-3", "4,0-1"."""
        if len(chunks) == self.size:
            return "all"
        return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs(chunks))


def _columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines with their cells under one another."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


DRAWN = 8  # ranks up to which every number is drawn
MOST = 16  # ranks that fit a page
PRICED = (*range(2, MOST + 1), 24, 32, 48, 64)
_ITEMS = 840  # elements in a chunk, so that chunks are even


@dataclass(frozen=True, slots=True, order=True)
class _Moment:
    """What led to it: messages one after another, and the chunks that they carried."""

    latencies: int
    chunks: int


class _Recorder:
    """Carries messages as `prove` does, and writes them down."""

    def __init__(self, collective: Collective, size: int) -> None:
        self.sums, self.size = PartialSums(collective.contract, size), size
        self.messages: list[dict[str, Any]] = []
        self._last: dict[int, dict[str, Any]] = {}  # by receiver

    def carry(self, sender: int, receiver: int, out: Step, into: Step, ready: _Moment) -> _Moment:
        """Take a message along, and note it."""
        self.sums.carry(sender, receiver, out, into, 0)
        end = _Moment(ready.latencies + 1, ready.chunks + len(out.send))
        noted = {"round": ready.latencies, "from": sender, "to": receiver, "chunks": list(out.send)}
        noted |= {"reduce": into.reduce, "after": [], "clock": [end.latencies, end.chunks / self.size]}
        self.messages.append(noted)
        self._last[receiver] = noted
        return end

    def turn(self, ready: _Moment) -> int:
        """Return the round."""
        return ready.latencies

    def add(self, rank: int, step: Step, over: _Moment) -> _Moment:
        """Store what came, and note what is in its chunks now."""
        self.sums.add(rank, step, 0)
        if step.recv:
            self._last[rank]["after"] = [f"{self.sums.held[rank][chunk]:x}" for chunk in step.recv]
        return over


def animation(collective: Collective, size: int) -> dict[str, Any]:
    """Return the animation of a collective that is right, as JSON values.

    Raises:
        ScheduleError: for one that is not; see `prove`.
    """
    prove(collective, size)
    recorder = _Recorder(collective, size)
    begins = [[f"{parts:x}" if parts else "" for parts in held] for held in recorder.sums.held]
    finish([collective(rank, size) for rank in range(size)], [_Moment(0, 0)] * size, recorder)
    messages = sorted(recorder.messages, key=lambda message: (message["round"], message["from"]))
    rounds = 1 + max((message["round"] for message in messages), default=-1)
    return {"begins": begins, "rounds": rounds, "messages": messages}


def coefficients(collective: Collective, size: int) -> tuple[int, float]:
    """Return (latencies, buffers): the seconds on a uniform link are latencies x alpha + buffers x bytes x beta."""
    nbytes = 4 * _ITEMS * size
    latencies, buffers = (price(collective, size, nbytes, Machine.uniform(*cost)) for cost in ((1, 0), (0, 1 / nbytes)))
    return round(latencies), buffers


def compare(collectives: Mapping[str, Collective], first: str, ranks: int) -> dict[str, Any]:
    """Return what a page needs to show one collective beside the others of its kind.

    Args:
        collectives: those with one contract, by name.
        first: the one that is shown first; the next one stands beside it.
        ranks: with which the page begins.

    Raises:
        UsageError: for ranks that do not fit a page.
        ScheduleError: for a collective that is not right on these ranks; others are left out where it is not.
    """
    if not 2 <= ranks <= MOST:
        raise UsageError(f"a page draws 2 to {MOST} ranks, not {ranks}; draw it as text")
    drawn: Sequence[int] = sorted({*range(2, DRAWN + 1), ranks})
    names = list(collectives)
    return {
        "operation": collectives[first].contract.name,
        "ranks": ranks,
        "drawn": max(drawn),
        "first": first,
        "second": names[(names.index(first) + 1) % len(names)],
        "algorithms": {
            name: {
                "animations": {size: animation(one, size) for size in drawn if size in right},
                "costs": {size: coefficients(one, size) for size in PRICED if size in right},
            }
            for name, one in collectives.items()
            for right in [{ranks, *(size for size in PRICED if _is_right(one, size))}]
        },
    }


def _is_right(collective: Collective, size: int) -> bool:
    """Return whether it can be proved for so many ranks: one of the user's may want a power of two."""
    try:
        prove(collective, size)
    except ScheduleError:
        return False
    return True
