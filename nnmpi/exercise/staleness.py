"""Who may go on, and how old gradients are, to write as rules; held against `synchrony` on drawn cases."""

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any, TypeAlias

from nnmpi.exercise.exercise import Exercise, Function, WrongAnswer, call
from nnmpi.synchrony.consistency import WorkerClocks

Cases: TypeAlias = Callable[[Random], Iterator[tuple[str, tuple[Any, ...], Any]]]
"""Yields (the case in words, the values that are given, what must come out)."""


def check(cases: Cases, function: Function) -> str:
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


_TABLE: tuple[tuple[str, str, str, Cases], ...] = (
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

EXERCISES = tuple(
    Exercise(name, statement, arguments, partial(check, cases)) for name, statement, arguments, cases in _TABLE
)
