"""Pictures of schedules in text: ranks down, time across, in each cell what is computed.

Time is counted in units: a forward takes one, a whole backward two and each of its halves one, as in the figures of
the papers, since a backward multiplies twice as many matrices; messages, reductions and updates take none. A cell is
as wide as the time that it takes. (`units.EQUAL` gives a backward one as well.)
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nnmpi.errors import ScheduleError
from nnmpi.schedule.instruction import COMPUTE, Instruction, Kind
from nnmpi.schedule.play import Play
from nnmpi.schedule.schedule import Schedule
from nnmpi.schedule.units import PAPERS

_SUMMED, _UPDATED, _IDLE = "+", "|", "."


class _Cell(NamedTuple):
    """A piece of work in the grid."""

    begin: int
    columns: int
    label: str
    mark: str


def render(schedule: Schedule, units: Mapping[Kind, int] = PAPERS) -> str:
    """Return the grid of a lowered schedule, and a legend.

        time    0  1  2  3  4  5  6  7  8
        rank 0  F0 F1 .  .  B0--- .  B1---|
        rank 1  .  F0 B0--- F1 B1---|.  .

    With several stages on a rank the cells name the stage as well: 2F0 is stage 2, microbatch 0.

    Args:
        units: how many columns each kind is wide, at least 1.

    Raises:
        ScheduleError: when the ranks wait for one another for ever; `check` says where.
    """
    play = Play(schedule, lambda one: float(units.get(one.kind, 0)), rendezvous=False)
    if play.stuck:
        raise ScheduleError(f"rank {play.stuck[0].rank} waits for ever; check the schedule before it is drawn")
    columns = int(max(player.clock_s for player in play.players))
    begins = {span.instruction: int(span.begin_s) for span in play.spans if span.instruction.kind in COMPUTE}
    rows = [
        [_Cell(begins[one], units[one.kind], label, mark) for one, label, mark in _labels(schedule, rank)]
        for rank in range(schedule.ranks)
    ]
    width = 1 + max(2, len(str(columns - 1)), *(len(cell.label) for row in rows for cell in row))
    head = "".join(str(column).ljust(width) for column in range(columns))
    names = [f"rank {rank}" for rank in range(schedule.ranks)]
    lines = [("time", head), *zip(names, (_line(row, columns, width) for row in rows), strict=True)]
    edge = max(len(name) for name, _ in lines) + 2
    return "\n".join([*((name.ljust(edge) + line).rstrip() for name, line in lines), "", _legend(schedule, units)])


def _labels(schedule: Schedule, rank: int) -> Iterator[tuple[Instruction, str, str]]:
    """Yield what a rank computes, its label, and the mark of what follows it."""
    found: list[tuple[Instruction, str]] = []
    for one in schedule.instructions(rank):
        if one.kind in COMPUTE:
            found.append((one, " "))
        elif found and one.kind in (Kind.REDUCE, Kind.STEP):
            found[-1] = found[-1][0], _UPDATED if one.kind is Kind.STEP else _SUMMED
    for one, mark in found:
        yield one, str(one) if schedule.virtual > 1 else f"{one.kind}{one.microbatch}", mark


def _line(cells: Sequence[_Cell], columns: int, width: int) -> str:
    """Return a rank's row."""
    line, at = "", 0
    for cell in cells:
        room = cell.columns * width - 1
        line += _IDLE.ljust(width) * (cell.begin - at)
        line += cell.label.ljust(room, " " if cell.columns == 1 else "-") + cell.mark
        at = cell.begin + cell.columns
    return line + _IDLE.ljust(width) * (columns - at)


def _legend(schedule: Schedule, units: Mapping[Kind, int]) -> str:
    """Explain what is in the picture."""
    used = {one.kind for rank in range(schedule.ranks) for one in schedule.instructions(rank)}
    stage = "0" if schedule.virtual > 1 else ""
    words = {
        Kind.F: f"forward {'of stage 0 ' if stage else ''}on microbatch 0",
        Kind.B: "backward",
        Kind.I: "backward to the input",
        Kind.W: "backward to the weights",
    }
    told = [f"{stage}{kind}0 {text}" for kind, text in words.items() if kind in used]
    told += [f"{_IDLE} idle"]
    told += [f"{_SUMMED} gradients are final"] * (Kind.REDUCE in used and schedule.virtual > 1)
    told += [f"{_UPDATED} update"] * (Kind.STEP in used)
    wide = f"; a backward takes {units[Kind.B]}" if Kind.B in used else ""
    return f"{'    '.join(told)}\nA column is the time of one forward of a stage{wide}."
