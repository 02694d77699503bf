"""Contestants that take turns, and what is made of their times.

round 0    A  C  B       one step, call or block of each contestant, in another order every round;
round 1    B  A  C       whoever does not run sleeps
round 2    C  B  A

What else the machine does then meets all of them alike; a ratio is the median of the rounds'
ratios.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from nnmpi.errors import NnmpiError

if TYPE_CHECKING:  # most users of this module have no MPI in their own process
    from nnmpi.comm.group import Group
    from nnmpi.compose.worker import Worker
    from nnmpi.data.loader import Batch

T = TypeVar("T")
Times: TypeAlias = Sequence[float] | NDArray[np.float64]
WARM_UP = 2  # rounds of `take_turns` that are not kept


class WrongResultError(NnmpiError):
    """A contestant that does not compute what the reference does: it is found out before anything
    is timed.
    """


def shuffled(contestants: Iterable[T], number: int) -> list[T]:
    """Return the contestants in the order of a round, which every rank finds for itself.

    Args:
        contestants: the same in every round.
        number: of the round.
    """
    result = list(contestants)
    return random.Random(number).sample(result, len(result))


def in_turns(contestants: Sequence[T], rounds: int, warm_up: int = 1) -> Iterator[tuple[T, bool]]:
    """Yield each contestant once in each round, and whether the round counts; the first ones warm
    up.
    """
    for number in range(-warm_up, rounds):
        for contestant in shuffled(contestants, number):
            yield contestant, number >= 0


def quartiles(values: Times) -> list[float]:
    """Return the first and the third quartile, which lie among the values; of one value, itself."""
    if len(values) == 1:
        return [float(values[0])] * 2
    first, _, third = quantiles(map(float, values), n=4, method="inclusive")
    return [first, third]


def summary(name: str, seconds: Times) -> dict[str, Any]:
    """Return the median and the quartiles of some times, as fields of a row: "NAME_s" and
    "NAME_quartiles_s".
    """
    return {f"{name}_s": float(median(seconds)), f"{name}_quartiles_s": quartiles(seconds)}


def ratio(name: str, over: Times, under: Times) -> dict[str, Any]:
    """Return the median and the quartiles of the rounds' ratios, as fields of a row: "NAME" and
    "NAME_quartiles".

    Args:
        name: of the field.
        over, under: the times of two contestants, round by round; of `over` / `under` the ratio is.
    """
    result = [a / max(b, 1e-12) for a, b in zip(over, under, strict=True)]
    return {name: float(median(result)), f"{name}_quartiles": quartiles(result)}


def steps_in_block(block_s: float, step_s: Sequence[float], most: int | None = None) -> int:
    """Return how many steps make a block of about so many seconds, for all contestants the same.

    Args:
        block_s: how long a block of the contestant in the middle should take.
        step_s: the time of one step of each contestant.
        most: steps.
    """
    steps = max(1, round(block_s / max(median(step_s), 1e-6)))
    return steps if most is None else min(steps, most)


def rest_until(group: Group) -> None:
    """Return when all ranks have come here; collective.

    Whoever comes early sleeps: MPI's own waiting would take a core from those who compute.
    """
    group.sum_floats([0.0], asleep=True)


class StepContestant:
    """A worker and its batch, whose steps are timed. Making one is collective over the worker's
    ranks.

    Args:
        name: of the contestant.
        worker: does the steps.
        batch: of every step.
        runs: whether this rank has a part in what is timed; the ranks of the others sleep
            meanwhile.

    Attributes:
        spans_s: begin and end of each kept step on this rank's clock.
    """

    def __init__(self, name: str, worker: Worker, batch: Batch, runs: bool = True) -> None:
        self.name, self.worker, self.batch, self.runs = name, worker, batch, runs
        self.spans_s: list[list[float]] = []

    def step(self, keep: bool) -> None:
        """Do a step, if this rank has a part in it."""
        if not self.runs:
            return
        begin = time.perf_counter()
        report = self.worker.step(self.batch)
        end = time.perf_counter()
        if keep:
            self.spans_s.append([begin, end])
            self.note(report)

    def note(self, report: Any) -> None:
        """Look at the report of a step that is kept; nothing is done with it here."""

    def seconds(self, group: Group) -> NDArray[np.float64]:
        """Return (steps,) the time of each kept step, from when the last rank began to when the
        last one ended.

        Collective; the ranks of the group must share a clock.
        """
        spans = np.array([item for item in group.gather(self.spans_s) if item])  # (ranks, steps, 2)
        return np.asarray(spans[..., 1].max(axis=0) - spans[..., 0].max(axis=0))


C = TypeVar("C", bound=StepContestant)


def take_turns(
    contestants: Sequence[C],
    group: Group,
    rounds: int,
    after: Callable[[C, bool], None] | None = None,
) -> None:
    """Let every contestant do a step in each round, and some rounds before, which are not kept.
    Collective.

    Args:
        contestants: the same on all ranks.
        group: all ranks.
        rounds: that are kept.
        after: (contestant, whether the round is kept), called after each step, when all ranks have
            ended it.
    """
    for contestant, keep in in_turns(contestants, rounds, WARM_UP):
        rest_until(group)
        group.barrier()
        contestant.step(keep)
        rest_until(group)
        if after is not None:
            after(contestant, keep)
