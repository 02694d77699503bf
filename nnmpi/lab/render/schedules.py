"""Pictures of schedules: as text (`render`), and as an animation of a page (`compare`).

In text, ranks go down and time across, and each cell names its instruction.

Time is counted in units: a forward takes one, a whole backward two and each of its halves one, as
in the papers' figures, since a backward multiplies twice as many matrices; messages, reductions and
updates take none, unless `costs` say other times. A cell is as wide as its time.

A page's animation has each rank's computation and its number of saved activations over time, and
what comes to its memory or leaves it, for ZeRO and offloading:

{"spans": [[rank, "F", stage, microbatch, begin, end], ...],      in milliseconds
 "held": [[rank, "weights gathered" or "saved, away", stage, microbatch, begin, end], ...]
 "kept": [[[0.0, 1], [1.0, 2], ...], ...],                        by rank: from this time, this many
 "makespan": 12.0, "bubble": 0.33, "peaks": [2, 1]}
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from nnmpi.base.errors import UsageError, counted
from nnmpi.base.picture import Bar, Picture
from nnmpi.base.units import format_seconds
from nnmpi.schedule.check import check
from nnmpi.schedule.lower import lower
from nnmpi.schedule.schedule import COMPUTE, Instruction, Kind, Schedule
from nnmpi.schedule.schedules import Generator, make
from nnmpi.schedule.simulate import Costs, Simulation, even_costs, simulate_schedule

_SUMMED, _UPDATED, _IDLE = "+", "|", "."
MOST_COLUMNS = 512  # of a picture whose forwards are much shorter than the rest


WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward to the input",
    Kind.W: "backward to the weights",
}


class _Cell(NamedTuple):
    """An instruction in the grid."""

    begin: int
    columns: int
    label: str
    mark: str


def render(
    schedule: Schedule, costs: Costs | None = None, simulation: Simulation | None = None
) -> str:
    """Return the grid of a schedule, and a legend; one that only computes is lowered first.

        time    0  1  2  3  4  5  6  7  8
        rank 0  F0 F1 .  .  B0--- .  B1---|
        rank 1  .  F0 B0--- F1 B1---|.  .

    With several stages per rank the cells name the stage, too: 2F0 is stage 2, microbatch 0.

    Args:
        schedule: any.
        costs: of its instructions; by default a forward takes 1, a backward 2, a message nothing.
            Cells begin and end at the nearest columns, and have at least one.
        simulation: with these costs, on a machine.

    Raises:
        ScheduleError: on a deadlock; `check` names its place.
    """
    schedule = _lowered(schedule)
    costs = costs or even_costs(schedule.stages)
    result = simulation or simulate_schedule(schedule, costs)
    end_s = result.makespan_s
    unit_s = max(costs[Kind.F][0], end_s / MOST_COLUMNS) or 1.0
    times = {span.instruction: span for span in result.spans}
    rows: list[list[_Cell]] = []
    for rank in range(schedule.ranks):
        rows.append([])
        at = 0
        for item, label, mark in _labels(schedule, rank):
            begin = max(at, round(times[item].begin_s / unit_s))
            at = max(begin + 1, round(times[item].end_s / unit_s))
            rows[-1].append(_Cell(begin, at - begin, label, mark))
    columns = max(round(end_s / unit_s), *(row[-1].begin + row[-1].columns for row in rows if row))
    width = 1 + max(2, len(str(columns - 1)), *(len(cell.label) for row in rows for cell in row))
    head = "".join(str(column).ljust(width) for column in range(columns))
    names = [f"rank {rank}" for rank in range(schedule.ranks)]
    lines = [("time", head), *zip(names, (_line(row, columns, width) for row in rows), strict=True)]
    edge = max(len(name) for name, _ in lines) + 2
    return "\n".join(
        [
            *((name.ljust(edge) + line).rstrip() for name, line in lines),
            "",
            _legend(schedule, costs, unit_s),
        ]
    )


def programs(schedule: Schedule) -> list[str]:
    """Return a line for each rank: its instructions in order; those in brackets posted together.

    rank 0  0F0 0SEND_ACT0 0F1 (0SEND_ACT1 0RECV_GRAD0) 0B0 ...
    """
    lowered = _lowered(schedule)
    return [
        f"rank {rank}  {' '.join(map(str, program))}"
        for rank, program in enumerate(lowered.programs)
    ]


def _lowered(schedule: Schedule) -> Schedule:
    return lower(schedule) if schedule.kinds <= COMPUTE | {Kind.STEP} else schedule


def _labels(schedule: Schedule, rank: int) -> Iterator[tuple[Instruction, str, str]]:
    """Yield a rank's computation: instruction, label, and the mark of the update after it."""
    result: list[tuple[Instruction, str]] = []
    for item in schedule.instructions(rank):
        if item.kind in COMPUTE:
            result.append((item, " "))
        elif result and item.kind in (Kind.REDUCE, Kind.STEP):
            result[-1] = result[-1][0], _UPDATED if item.kind is Kind.STEP else _SUMMED
    for item, mark in result:
        yield item, str(item) if schedule.virtual > 1 else f"{item.kind}{item.microbatch}", mark


def _line(cells: Sequence[_Cell], columns: int, width: int) -> str:
    line, at = "", 0
    for cell in cells:
        room = cell.columns * width - 1
        line += _IDLE.ljust(width) * (cell.begin - at)
        line += cell.label.ljust(room, " " if cell.columns == 1 else "-") + cell.mark
        at = cell.begin + cell.columns
    return line + _IDLE.ljust(width) * (columns - at)


def _legend(schedule: Schedule, costs: Costs, unit_s: float) -> str:
    """Return the explanation of the picture's signs."""
    used = schedule.kinds
    stage = "0" if schedule.virtual > 1 else ""
    behind = {Kind.F: f" {'of stage 0 ' if stage else ''}on microbatch 0"}
    message = [
        f"{stage}{kind}0 {text}{behind.get(kind, '')}"
        for kind, text in WORDS.items()
        if kind in used
    ]
    message.append(f"{_IDLE} idle")
    if Kind.REDUCE in used and schedule.virtual > 1:
        message.append(f"{_SUMMED} gradients are final")
    if Kind.STEP in used:
        message.append(f"{_UPDATED} update")
    times = [
        (text, costs[kind][0] / unit_s)
        for kind, text in (
            (Kind.B, "a backward"),
            (Kind.I, "half a backward"),
            (Kind.W, "its other half"),
        )
        if kind in used and (kind is Kind.B or costs[kind][0] != unit_s)
    ]
    times.append(("a message", costs[Kind.SEND_ACT][0] / unit_s))
    verbs = ["takes ", *[""] * len(times)]
    told = (
        f"{what} {verb}{f'{n:.3g}' if n else 'none'}"
        for (what, n), verb in zip(times, verbs, strict=False)
    )
    is_forward = costs[Kind.F][0] == unit_s
    column = "the time of one forward of a stage" if is_forward else format_seconds(unit_s)
    is_whole = is_forward and all(n == int(n) for _, n in times)
    return (
        f"{'    '.join(message)}\nA column is {column}; {', '.join(told)}"
        f"{'' if is_whole else '; drawn to the nearest column'}."
    )


# ---- as an animation ----

STAGES, MICROBATCHES = (2, 3, 4, 6, 8), (2, 4, 8, 16)
MOST_RANKS, MOST_MICROBATCHES = 16, 32  # that a page has room for
_DIGITS = 6


def animation(schedule: Schedule, simulation: Simulation) -> dict[str, Any]:
    """Return the animation of a simulated schedule, as JSON values."""
    spans = [
        [span.rank, str(item.kind), item.stage, item.microbatch, _ms(span.begin_s), _ms(span.end_s)]
        for span in simulation.spans
        if (item := span.instruction).kind in COMPUTE
        or (item.kind is Kind.STEP and span.end_s > span.begin_s)
    ]
    return {
        "spans": spans,
        "held": list(_held(simulation)),
        "kept": [_saved_curve(schedule, simulation, rank) for rank in range(schedule.ranks)],
        "makespan": _ms(simulation.makespan_s),
        "bubble": round(simulation.bubble, _DIGITS),
        "peaks": list(simulation.peak_activations),
    }


def picture(schedule: Schedule, simulation: Simulation, about: str = "") -> Picture:
    """Return a picture with each rank's computation over time; `about` is said of its costs."""
    spans = [
        Bar(
            f"rank {rank}",
            begin,
            end,
            WORDS[kind],
            f"{kind}{batch}" if schedule.virtual == 1 else f"{stage}{kind}{batch}",
        )
        for rank, kind, stage, batch, begin, end in animation(schedule, simulation)["spans"]
    ]
    spans += [
        Bar(f"stage {stage}, {what}", begin, end, what)
        for _, what, stage, _, begin, end in sorted(_held(simulation), key=itemgetter(2, 1, 4))
    ]
    return Picture(
        f"{describe(schedule)}: bubble {100 * simulation.bubble:.1f} % of all ranks'"
        f" time{about and chr(10)}{about}",
        "ms",
        spans,
    )


_ENDS = {Kind.FREE: (Kind.GATHER, "weights gathered"), Kind.IN: (Kind.DROP, "saved, away")}


def _held(simulation: Simulation) -> Iterator[list[Any]]:
    """Yield when the gathered weights of a stage are there, and when what it saved is away."""
    begun: dict[Any, float] = {}
    for span in simulation.spans:
        kind, stage, microbatch = (item := span.instruction).kind, item.stage, item.microbatch
        if kind in (Kind.GATHER, Kind.DROP):
            # weights stay for several microbatches
            begun[span.rank, kind, stage, kind is Kind.DROP and microbatch] = span.begin_s
        elif kind in _ENDS:
            first, what = _ENDS[kind]
            begin_s = begun.pop((span.rank, first, stage, kind is Kind.IN and microbatch))
            yield [span.rank, what, stage, microbatch, _ms(begin_s), _ms(span.end_s)]


def describe(schedule: Schedule) -> str:
    """Return a schedule's name, ranks, stages and microbatches."""
    stages = f" with {schedule.virtual} stages each" if schedule.virtual > 1 else ""
    microbatches = "microbatches" if schedule.microbatches > 1 else "microbatch"
    return (
        f"{schedule.name}: {counted(schedule.ranks, 'rank')}{stages},"
        f" {schedule.microbatches} {microbatches}"
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, _DIGITS)


def _saved_curve(schedule: Schedule, simulation: Simulation, rank: int) -> list[list[float]]:
    """Return a rank's number of saved activations as (time, number): one more from a forward on."""
    saved, curve = 0, [[0.0, 0.0]]
    last = (Kind.B, Kind.W) if schedule.trains else (Kind.F,)
    for span in simulation.spans:
        if span.rank == rank:
            changes = [(span.begin_s, 1)] if span.instruction.kind is Kind.F else []
            changes += [(span.end_s, -1)] if span.instruction.kind in last else []
            for at_s, change in changes:
                saved += change
                curve.append([_ms(at_s), float(saved)])
    return curve


def compare(
    schedules: Mapping[str, tuple[Generator, int]],
    first: str,
    ranks: int,
    microbatches: int,
    simulate: Callable[[Schedule], Simulation],
    sizes: tuple[Sequence[int], Sequence[int]] = (STAGES, MICROBATCHES),
    change: Callable[[Schedule], Schedule] = lower,
) -> dict[str, Any]:
    """Return a page's data: a schedule beside others, for several ranks and microbatches.

    Args:
        schedules: by name, each with its stages per rank.
        first: the schedule that the page shows first; the second schedule is shown beside it.
        ranks, microbatches: the page's first choice.
        simulate: schedule -> its times.
        sizes: other ranks and microbatches that the page has.
        change: makes a schedule executable.

    Raises:
        UsageError: for numbers too large for a page.
        ScheduleError: for a wrong schedule.
    """
    if ranks > MOST_RANKS or microbatches > MOST_MICROBATCHES:
        raise UsageError(
            f"a page draws up to {MOST_RANKS} ranks and {MOST_MICROBATCHES} microbatches, not"
            f" {ranks} and {microbatches}; draw fewer"
        )
    all_ranks, all_microbatches = sorted({*sizes[0], ranks}), sorted({*sizes[1], microbatches})
    animations: dict[str, dict[str, Any]] = {name: {} for name in schedules}
    for name, (generator, virtual) in schedules.items():
        for size in all_ranks:
            for count in all_microbatches:
                schedule = change(make(generator, size, count, virtual))
                check(schedule)
                animations[name][f"{size},{count}"] = animation(schedule, simulate(schedule))
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "all_ranks": all_ranks,
        "all_microbatches": all_microbatches,
        "first": first,
        "animations": animations,
    }
