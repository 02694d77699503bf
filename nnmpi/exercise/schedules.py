"""Pipeline schedules to write: what a rank computes, in order. Checked, then timed and counted beside the package's."""

from functools import partial

from nnmpi.errors import ScheduleError
from nnmpi.exercise.exercise import Exercise, Function, WrongAnswer, call
from nnmpi.schedule.check import check as check_schedule
from nnmpi.schedule.lower import lower
from nnmpi.schedule.schedule import Instruction, Schedule
from nnmpi.schedule.schedules import make
from nnmpi.schedule.simulate import even_costs, simulate_schedule

VIRTUAL = 2  # stages on each rank of the interleaved one
SHAPES = ((2, 2), (2, 4), (3, 6), (4, 4), (4, 8))  # ranks and microbatches


def check(name: str, virtual: int, function: Function) -> str:
    """Return what a right schedule takes.

    Args:
        name: the package's schedule that is wanted; another one that is as good passes, too.
        virtual: stages on each rank.

    Raises:
        WrongAnswer: showing the programs with the fault marked, or saying which rank keeps too much, or what is slow.
    """
    for ranks, microbatches in SHAPES:
        where = f"with {ranks} ranks and {microbatches} microbatches"
        programs = tuple(_program(function, rank, ranks, microbatches) for rank in range(ranks))
        try:
            schedule = lower(Schedule(name, ranks, ranks * virtual, microbatches, programs))
            check_schedule(schedule)
        except ScheduleError as error:
            raise WrongAnswer(f"{where}: {error}") from None
        costs = even_costs(ranks * virtual)
        found = simulate_schedule(schedule, costs)
        best = simulate_schedule(lower(make(name, ranks, microbatches, virtual)), costs)
        right = f"{where}: everything is done, in a possible order, but"
        for rank, (kept, enough) in enumerate(zip(found.peak_activations, best.peak_activations, strict=True)):
            if kept > enough:
                raise WrongAnswer(f"{right} rank {rank} keeps {kept} activations at once, and {enough} are enough")
        if found.makespan_s > best.makespan_s + 1e-9:
            raise WrongAnswer(
                f"{right} it takes {found.makespan_s:g} units of time, where {best.makespan_s:g} are enough; a forward "
                f"takes one, a backward two"
            )
    return f"right; {where} it takes {found.makespan_s:g} units, bubble {found.bubble:.0%}"


def _program(function: Function, rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
    program = call(function, rank, ranks, microbatches)
    if not isinstance(program, tuple | list) or not all(isinstance(each, Instruction) for each in program):
        raise WrongAnswer(f"rank {rank} of {ranks} gives {program!r}; give a list such as [Kind.F.at(rank, 0)]")
    return tuple(program)


_HOW = "\n\nReturn what the rank computes, in order: Kind.F.at(stage, microbatch) and Kind.B.at(stage, microbatch)."
_TABLE = (
    ("naive-pipeline", "naive", 1, f"One microbatch after another: forward through all ranks, and back.{_HOW}"),
    ("gpipe", "gpipe", 1, f"GPipe: all forwards, then all backwards.{_HOW}"),
    (
        "one-f-one-b",
        "1f1b",
        1,
        f"1F1B: as soon as a backward can be done it is done; rank r keeps at most ranks - r activations.{_HOW}",
    ),
    (
        "interleaved",
        "interleaved",
        VIRTUAL,
        f"Interleaved 1F1B: rank r has the stages r and r + ranks.{_HOW}\nMicrobatches are a multiple of ranks; a "
        "round is as many of them as there are ranks.",
    ),
    (
        "zero-bubble",
        "zero-bubble",
        1,
        "Zero bubble (ZB-H1): a backward in two halves, the second when there is time.\n\nReturn what the rank "
        "computes, in order: Kind.F.at(rank, m), then Kind.I.at(rank, m) for the gradient of the input,\n"
        "which the rank before waits for, and Kind.W.at(rank, m) for those of the weights, which nobody waits for.",
    ),
    (
        "inference-pipeline",
        "inference",
        VIRTUAL,
        "Forwards only: rank r has the stages r and r + ranks.\n\nReturn what the rank computes, in order: "
        "Kind.F.at(stage, microbatch). Microbatches are a multiple of ranks.",
    ),
)

EXERCISES = tuple(
    Exercise(
        name,
        statement,
        "rank, ranks, microbatches",
        partial(check, schedule, virtual),
        "from nnmpi.schedule.schedule import Kind",
    )
    for name, schedule, virtual, statement in _TABLE
)
