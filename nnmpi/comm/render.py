"""Pictures of collectives in text: rounds down, ranks across, in each cell what goes where and what comes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from nnmpi.comm.collective import Collective, as_collective
from nnmpi.comm.simulation.engine import finish
from nnmpi.comm.steps import Algorithm, Chunks, Step, runs
from nnmpi.errors import UsageError, counted

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
