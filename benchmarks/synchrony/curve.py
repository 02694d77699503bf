"""A run's curve of evaluations, and the point at which it reaches an accuracy."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

# evaluations in a mean: the noise of a single one is 0.2 points, the progress of 100 batches
TOGETHER = 5


class Evaluation(NamedTuple):
    """One evaluation: batches of gradients until then, time, and result."""

    batches: float
    seconds: float
    loss: float
    accuracy: float


class GoalReached(NamedTuple):
    """The point at which an accuracy was reached."""

    batches: float
    seconds: float


def reach_goal(points: Sequence[Evaluation], goal: float) -> GoalReached | None:
    """Return the point at which the accuracy reaches a goal, or None.

    The accuracy is a moving mean of TOGETHER evaluations, centred. The point is interpolated
    linearly between the last mean below the goal and the first one at or above it.
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
    """Return a curve as one short text, with the significant digits."""
    return "; ".join(
        f"{p.batches:.7g} {p.seconds:.7g} {p.loss:.4g} {p.accuracy:.4f}" for p in points
    )


def read(text: str) -> list[Evaluation]:
    """Return the curve of a text by `write`."""
    return [
        Evaluation(*(float(word) for word in item.split()))
        for item in text.split(";")
        if item.strip()
    ]
