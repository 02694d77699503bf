"""Compares every contestant with a reference in float64 before anything is timed: losses, and what the steps changed.

The change of the weights over some steps of SGD is the sum of their gradients, each at weights that the steps before
have moved: a wrong gradient, or one that is added to the wrong place, shows in it at once. The learning rate is such
that a step changes the weights by a fixed share of their length: much more than the rounding of a float32 weight, and
too little for the steps to go astray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.cases import BF16, FLOAT32, TF32
from benchmarks.gpu.side import Arrays, Side
from nnmpi.errors import NnmpiError

SHARE, STEPS = 2e-3, 5
# Of losses, relative to the reference's; of the change of the weights, as a share of its length. What rounding gives:
# float32 has 24 bits, TF32 11, bfloat16 8; a gradient comes through as many roundings as the model has layers.
TOLERANCES = {FLOAT32: (1e-5, 1e-3), TF32: (3e-4, 3e-2), BF16: (1e-3, 0.15)}


class WrongResultError(NnmpiError):
    """A contestant that does not train as the reference does."""


@dataclass(frozen=True)
class Finding:
    """How far a contestant is from the reference.

    Attributes:
        loss: the largest relative error of a step's loss.
        change: length of the error of the weights' change, as a share of the length of the reference's change.
    """

    loss: float
    change: float


@dataclass(frozen=True)
class Course:
    """What some steps gave: the losses, and the change of the weights; and their learning rate."""

    losses: list[float]
    change: Arrays
    lr: float


def rate(side: Side, first: Sequence[NDArray[Any]]) -> float:
    """Return the learning rate with which a step changes the first weights by `SHARE` of their length."""
    side.lr = 1.0
    side.restore()
    side.step()
    moved = sum(float(((a - b) ** 2).sum()) for a, b in zip(side.weights(), first, strict=True))
    return SHARE * sqrt(sum(float((np.asarray(b, np.float64) ** 2).sum()) for b in first) / moved)


def course(side: Side, first: Sequence[NDArray[Any]], lr: float) -> Course:
    """Train for some steps from the first weights; the first one is done twice, so that a recorded one is replayed."""
    side.lr = lr
    side.restore()
    side.step()
    side.restore()
    losses = [side.read(side.step()) for _ in range(STEPS)]
    return Course(losses, [after - before for after, before in zip(side.weights(), first, strict=True)], lr)


def compare(found: Course, right: Course) -> Finding:
    """Return how far one course is from another."""
    losses = [abs(a - b) / abs(b) for a, b in zip(found.losses, right.losses, strict=True)]
    error = sum(float(((a - b) ** 2).sum()) for a, b in zip(found.change, right.change, strict=True))
    length = sum(float((b**2).sum()) for b in right.change)
    return Finding(float(np.max(losses)), sqrt(error / length) if length else float("inf"))


def examine(side: Side, first: Sequence[NDArray[Any]], right: Course) -> Finding:
    """Compare a contestant of nnmpi's or PyTorch's with the reference.

    Raises:
        WrongResultError: when it is further off than its mode's roundings explain.
    """
    found = compare(course(side, first, right.lr), right)
    for (name, value), limit in zip(asdict(found).items(), TOLERANCES[side.mode], strict=True):
        if not (isfinite(value) and value <= limit):
            raise WrongResultError(
                f"{side.name}, case {side.case.name} in {side.mode}: its {name} is off by {value:.1e} of the "
                f"reference's, more than {limit:g}"
            )
    return found
