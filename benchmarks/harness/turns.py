"""Interleaved contestants, and statistics of their times.

round 0    A  C  B       one step, call or block of each contestant, in a new order every round;
round 1    B  A  C       contestants that do not run sleep
round 2    C  B  A

Other load on the machine then hits all contestants alike, and a slow minute cancels out of a
round's ratio. A ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from nnmpi.base.errors import NnmpiError

if TYPE_CHECKING:  # most users of this module have no MPI in their own process
    from nnmpi.comm.group import Group
    from nnmpi.compose.worker import Worker
    from nnmpi.data.loader import Batch

T = TypeVar("T")
Times: TypeAlias = Sequence[float] | NDArray[np.float64]
WARM_UP = 2  # uncounted rounds of `take_turns`


class WrongResultError(NnmpiError):
    """A contestant whose result differs from the reference's, found before anything is timed."""


def shuffled(contestants: Iterable[T], number: int) -> list[T]:
    """Return the contestants in the order of round `number`, the same on every rank."""
    result = list(contestants)
    return random.Random(number).sample(result, len(result))


def in_turns(contestants: Sequence[T], rounds: int, warm_up: int = 1) -> Iterator[tuple[T, bool]]:
    """Yield each contestant once in each round, and whether the round counts or only warms up."""
    for number in range(-warm_up, rounds):
        for contestant in shuffled(contestants, number):
            yield contestant, number >= 0


def quartiles(values: Times) -> list[float]:
    """Return the first and third quartile, by linear interpolation; of one value, itself."""
    if len(values) == 1:
        return [float(values[0])] * 2
    first, _, third = quantiles(map(float, values), n=4, method="inclusive")
    return [first, third]


def summary(name: str, seconds: Times) -> dict[str, Any]:
    """Return median and quartiles of times, as fields of a row: "NAME_s", "NAME_quartiles_s"."""
    return {f"{name}_s": float(median(seconds)), f"{name}_quartiles_s": quartiles(seconds)}


def ratio(name: str, over: Times, under: Times) -> dict[str, Any]:
    """Return median and quartiles of the rounds' ratios over / under, as fields of a row: "NAME",
    "NAME_quartiles".

    Args:
        name: of the field.
        over, under: the times of two contestants, round by round.
    """
    result = [a / max(b, 1e-12) for a, b in zip(over, under, strict=True)]
    return {name: float(median(result)), f"{name}_quartiles": quartiles(result)}


def steps_in_block(block_s: float, step_s: Sequence[float], most: int | None = None) -> int:
    """Return the steps of a block of about `block_s` seconds, the same for all contestants.

    Args:
        block_s: seconds of a block of the median contestant.
        step_s: the time of one step of each contestant.
        most: limit on the steps.
    """
    steps = max(1, round(block_s / max(median(step_s), 1e-6)))
    return steps if most is None else min(steps, most)


def rest_until(group: Group) -> None:
    """Wait for all ranks, asleep. Collective.

    MPI's own barrier spins, which would take a core from the ranks that compute.
    """
    group.sum_floats([0.0], asleep=True)


class StepContestant:
    """A worker and its batch, whose steps are timed. Construction is collective over the worker's
    ranks.

    Args:
        name: of the contestant.
        worker: does the steps.
        batch: of every step.
        runs: False on ranks that only sleep while the others are timed.

    Attributes:
        spans_s: begin and end of each counted step on this rank's clock.
    """

    def __init__(self, name: str, worker: Worker, batch: Batch, runs: bool = True) -> None:
        self.name, self.worker, self.batch, self.runs = name, worker, batch, runs
        self.spans_s: list[list[float]] = []

    def step(self, keep: bool) -> None:
        """Do a step on the ranks that run; record its span if it counts."""
        if not self.runs:
            return
        begin = time.perf_counter()
        report = self.worker.step(self.batch)
        end = time.perf_counter()
        if keep:
            self.spans_s.append([begin, end])
            self.note(report)

    def note(self, report: Any) -> None:
        """Hook: receives the report of each counted step."""

    def seconds(self, group: Group) -> NDArray[np.float64]:
        """Return (steps,) the seconds of each counted step, from the last rank's begin to the last
        rank's end.

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
    """Run a step of every contestant in each round, after uncounted rounds to warm up. Collective.

    Args:
        contestants: the same on all ranks.
        group: all ranks.
        rounds: that count.
        after: (contestant, whether the round counts), called once all ranks have ended a step.
    """
    for contestant, keep in in_turns(contestants, rounds, WARM_UP):
        rest_until(group)
        group.barrier()
        contestant.step(keep)
        rest_until(group)
        if after is not None:
            after(contestant, keep)
