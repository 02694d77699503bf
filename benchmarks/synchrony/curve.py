"""What was seen of a run, and when it had learnt enough."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

# evaluations whose mean counts: one alone is off by 0.2 points, as much as is learnt in 100 batches
TOGETHER = 5


class Evaluation(NamedTuple):
    """One evaluation: after how many batches' worth of gradients, at what time, with what
    result.
    """

    batches: float
    seconds: float
    loss: float
    accuracy: float


class GoalReached(NamedTuple):
    """Where an accuracy was reached."""

    batches: float
    seconds: float


def reach_goal(points: Sequence[Evaluation], goal: float) -> GoalReached | None:
    """Return where the accuracy reaches a goal, or None.

    It is where the mean of five evaluations in succession, put at the place of the middle one, is
    on the line between the last that is below the goal and the first that is not.
    """
    half = TOGETHER // 2
    before: tuple[Evaluation, float] | None = None
    for middle in range(half, len(points) - half):
        point = points[middle]
        mean = fmean(item.accuracy for item in points[middle - half : middle + half + 1])
        if mean >= goal:
            if before is None:
                return GoalReached(point.batches, point.seconds)
            last, lower = before
            share = (goal - lower) / (mean - lower)
            batches = last.batches + share * (point.batches - last.batches)
            return GoalReached(batches, last.seconds + share * (point.seconds - last.seconds))
        before = (point, mean)
    return None


def write(points: Sequence[Evaluation]) -> str:
    """Return a curve as one short text, with as many digits as mean anything."""
    return "; ".join(
        f"{p.batches:.7g} {p.seconds:.7g} {p.loss:.4g} {p.accuracy:.4f}" for p in points
    )


def read(text: str) -> list[Evaluation]:
    """Return what `write` wrote."""
    return [
        Evaluation(*(float(word) for word in item.split()))
        for item in text.split(";")
        if item.strip()
    ]
