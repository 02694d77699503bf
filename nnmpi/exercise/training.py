"""What a training is made of, to write: pipeline schedules, and who may go on.

Schedules are checked, then timed and counted beside the package's; rules are held against `synchrony` on drawn cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any, TypeAlias

from nnmpi.errors import ScheduleError
from nnmpi.exercise.exercise import Exercise, Function, WrongAnswer, call
from nnmpi.schedule.check import check
from nnmpi.schedule.lower import lower
from nnmpi.schedule.schedule import Instruction, Schedule
from nnmpi.schedule.schedules import make
from nnmpi.schedule.simulate import even_costs, simulate_schedule
from nnmpi.synchrony.consistency import WorkerClocks

# ---- pipeline schedules ----

VIRTUAL = 2  # stages on each rank of the interleaved one
SHAPES = ((2, 2), (2, 4), (3, 6), (4, 4), (4, 8))  # ranks and microbatches


def check_order(name: str, virtual: int, function: Function) -> str:
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
            check(schedule)
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


_ORDER = "\n\nReturn what the rank computes, in order: Kind.F.at(stage, microbatch) and Kind.B.at(stage, microbatch)."
_SCHEDULES = (
    ("naive-pipeline", "naive", 1, f"One microbatch after another: forward through all ranks, and back.{_ORDER}"),
    ("gpipe", "gpipe", 1, f"GPipe: all forwards, then all backwards.{_ORDER}"),
    (
        "one-f-one-b",
        "1f1b",
        1,
        f"1F1B: as soon as a backward can be done it is done; rank r keeps at most ranks - r activations.{_ORDER}",
    ),
    (
        "interleaved",
        "interleaved",
        VIRTUAL,
        f"Interleaved 1F1B: rank r has the stages r and r + ranks.{_ORDER}\nMicrobatches are a multiple of ranks; a "
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


# ---- who may go on ----

Cases: TypeAlias = Callable[[Random], Iterator[tuple[str, tuple[Any, ...], Any]]]
"""Yields (the case in words, the values that are given, what must come out)."""


def check_rule(cases: Cases, function: Function) -> str:
    """Return in how many cases the rule is right.

    Raises:
        WrongAnswer: showing the first case in which it is not.
    """
    tried = 0
    for case, values, wanted in cases(Random(0)):
        tried += 1
        found = call(function, *values)
        if type(found) is not type(wanted) or found != wanted:
            raise WrongAnswer(f"{case}: it gives {found!r}, and must give {wanted!r}")
    return f"right in {tried} cases"


def _ssp(draw: Random) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    for _ in range(100):
        clocks = WorkerClocks(draw.randint(1, 5))
        clocks.steps[:] = [draw.randint(3, 6) for _ in clocks.steps]
        worker, bound = draw.randrange(len(clocks.steps)), draw.randint(0, 3)
        lead = f"it leads the slowest by {clocks.lead(worker)}"
        case = f"workers have done {clocks.steps} steps, and worker {worker} asks under the bound {bound} ({lead})"
        yield case, (list(clocks.steps), worker, bound), clocks.may_start(worker, bound)


def _gradients(draw: Random) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    for length in range(1, 40):
        events: list[tuple[str, int]] = []
        read: dict[int, int] = {}
        wanted: list[int] = []
        for _ in range(length):
            worker = draw.randrange(3)
            if worker in read:
                wanted.append(len(wanted) - read.pop(worker))
                events.append(("push", worker))
            else:
                read[worker] = len(wanted)
                events.append(("read", worker))
        yield f"events {events}", (list(events),), wanted


_RULES: tuple[tuple[str, str, str, Cases], ...] = (
    (
        "ssp-rule",
        "Stale synchronous: may a worker begin a step?\n\nsteps[w] is how many steps worker w has done. It may, if it "
        "leads the slowest by at most bound.\nReturn True or False.",
        "steps, worker, bound",
        _ssp,
    ),
    (
        "gradient-staleness",
        'How stale is each gradient?\n\nevents are in order: ("read", worker) takes the weights, ("push", worker) '
        "gives the "
        "gradient made with them,\nwhich is one update. Return a list: for each push, how many updates there were "
        "between the worker's read and it.",
        "events",
        _gradients,
    ),
)


KINDS: Mapping[str, tuple[Exercise, ...]] = MappingProxyType(
    {
        "pipeline schedules": tuple(
            Exercise(
                name,
                statement,
                "rank, ranks, microbatches",
                partial(check_order, schedule, virtual),
                "from nnmpi.schedule.schedule import Kind",
            )
            for name, schedule, virtual, statement in _SCHEDULES
        ),
        "who may go on": tuple(
            Exercise(name, statement, arguments, partial(check_rule, cases))
            for name, statement, arguments, cases in _RULES
        ),
    }
)
