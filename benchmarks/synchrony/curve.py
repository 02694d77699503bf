"""What was seen of a run, and when it had learnt enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """One evaluation: after how many batches' worth of gradients, at what time, with what result."""

    batches: float
    seconds: float
    loss: float
    accuracy: float

    def rounded(self) -> list[float]:
        """Return it with as many digits as mean anything."""
        return [
            round(self.batches, 2),
            float(f"{self.seconds:.7g}"),
            float(f"{self.loss:.4g}"),
            round(self.accuracy, 4),
        ]


class Crossing(NamedTuple):
    """Where an accuracy was reached."""

    batches: float
    seconds: float


def cross(points: Sequence[Point | Sequence[float]], goal: float) -> Crossing | None:
    """Return where the accuracy has come to stay for two evaluations at least, or None.

    It is the place on the line from the evaluation before to the first of two in succession that are not below the
    goal; so one lucky evaluation does not count, and the grid of evaluations does not show.
    """
    found = [Point(*point) for point in points]
    for before, first, second in zip(found, found[1:], found[2:], strict=False):
        if min(first.accuracy, second.accuracy) >= goal:
            rise = first.accuracy - before.accuracy
            share = (goal - before.accuracy) / rise if before.accuracy < goal else 0.0
            batches = before.batches + share * (first.batches - before.batches)
            return Crossing(batches, before.seconds + share * (first.seconds - before.seconds))
    return None
