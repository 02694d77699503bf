"""What a training is made of, to write: pipeline schedules, who may go on, what a pass keeps.

Schedules are checked, then timed and counted beside the package's; rules are held against `synchrony` on drawn cases;
plans are run on numbers by `memory.plan.price_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any, TypeAlias

from nnmpi.errors import ScheduleError, UsageError
from nnmpi.exercise.exercise import Exercise, Function, WrongAnswer, call
from nnmpi.memory.optimal import OptimalPlans
from nnmpi.memory.plan import Costs, LayerCost, parse_plan, price_plan
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


# ---- memory plans ----

LENGTHS = (1, 2, 4, 6, 9)


def _even(layers: int) -> Costs:
    """Return the costs of equal layers: a value takes a byte, what is kept four more and what came in."""
    return [LayerCost(f"{i}", 1, 1, 4, True, False, 1.0, 1.0, 2.0) for i in range(layers)]


def check_plan(budget: Callable[[OptimalPlans], float], again: Callable[[int], int], function: Function) -> str:
    """Return what a right plan takes.

    Args:
        budget: the bytes that it may take at any moment.
        again: layers -> how many forwards may be done once more.

    Raises:
        WrongAnswer: naming the action that lacks what it needs, or the one at which there is too much.
    """
    for layers in LENGTHS:
        costs = _even(layers)
        text = call(function, layers)
        if not isinstance(text, str):
            raise WrongAnswer(f"with {layers} layers it gives {text!r}; give a text such as 'K0 B0'")
        try:
            plan = parse_plan(text)
            price = price_plan(costs, plan)
        except UsageError as error:
            raise WrongAnswer(f"with {layers} layers, {text!r}: {error}") from None
        most = budget(OptimalPlans(costs))
        over = [at for at, peak in enumerate(price.peaks) if peak > most]
        if over:
            raise WrongAnswer(
                f"with {layers} layers, {text!r} takes {price.peaks[over[0]]} bytes in action {plan[over[0]]}, number "
                f"{over[0]}, and {most:g} are allowed"
            )
        if price.again > again(layers):
            raise WrongAnswer(
                f"with {layers} layers, {text!r} goes through {price.again} layers again, "
                f"and {again(layers)} are enough"
            )
    return f"right for {LENGTHS[0]} to {layers} layers; for {layers}: {price.peak} bytes, {price.again} layers again"


_ACTIONS = """

A chain of layers. Value i comes to layer i, and layer i makes value i + 1 of it; the last layer is the loss. Actions:
    F0  forward through layer 0; nothing stays but value 1        K0  the same, and what its backward needs stays
    B0  backward through layer 0, which was kept                  D1  value 1 goes (value 0, the batch, stays)
Return the plan for so many layers as a text, such as "K0 K1 D1 B1 B0". A value takes a byte, what is kept four more."""

_PLANS: tuple[tuple[str, str, Callable[[OptimalPlans], float], Callable[[int], int]], ...] = (
    ("plan-all-kept", "An ordinary pass: everything is kept, nothing is computed again.", lambda p: p.all, lambda n: 0),
    (
        "plan-half",
        "Half the way from an ordinary pass to the least memory; each layer at most once more.",
        lambda plans: (plans.all + plans.least) / 2,
        lambda n: n,
    ),
    (
        "plan-least",
        "The least memory that any plan takes, however long it lasts.",
        lambda plans: plans.least,
        lambda n: n * n,
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
        "memory plans": tuple(
            Exercise(name, f"{title}{_ACTIONS}", "layers", partial(check_plan, budget, again))
            for name, title, budget, again in _PLANS
        ),
    }
)
