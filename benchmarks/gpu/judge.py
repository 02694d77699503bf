"""Compares every contestant with a reference in float64 before anything is timed: its losses, and
the change of its weights.

The change of the weights over several steps of SGD is the sum of their gradients, each at weights
that the earlier steps have moved: it shows a wrong gradient, or one added to the wrong parameter.
The learning rate is chosen so that a step changes the weights by a fixed share of their norm: much
more than the rounding of a float32 weight, and too little for the runs to diverge from each other.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.cases import BF16, FLOAT32, TF32
from benchmarks.gpu.trainer import Arrays, DeviceTrainer
from benchmarks.harness.turns import WrongResultError

SHARE, STEPS = 2e-3, 5
# Errors of a loss, and of the change of the weights by its norm, relative to the reference's. Those
# of a loss follow from rounding: float32 has 24 bits, TF32 11, bfloat16 8. A rounding that chooses
# another maximum of a pooling moves a whole gradient: PyTorch's change in `cnn-1024` is off by 2e-3
# in float32 (on a CPU) and 0.10 in tf32 (on an H100), nnmpi's by 2e-3 and 0.08.
TOLERANCES = {FLOAT32: (1e-5, 1e-2), TF32: (3e-4, 0.15), BF16: (1e-3, 0.15)}


@dataclass(frozen=True)
class Deviation:
    """A contestant's errors against the reference.

    Attributes:
        loss: the largest relative error of a step's loss.
        change: norm of the error of the weights' change, relative to the norm of the reference's
            change.
    """

    loss: float
    change: float


@dataclass(frozen=True)
class TrainingCourse:
    """The losses of several steps, the change of the weights, and the learning rate."""

    losses: list[float]
    change: Arrays
    lr: float


def rate(trainer: DeviceTrainer, first: Sequence[NDArray[Any]]) -> float:
    """Return the learning rate with which a step changes the weights by SHARE of their norm."""
    trainer.lr = 1.0
    trainer.restore()
    trainer.step()
    moved = sum(float(((a - b) ** 2).sum()) for a, b in zip(trainer.weights(), first, strict=True))
    return SHARE * sqrt(sum(float((np.asarray(b, np.float64) ** 2).sum()) for b in first) / moved)


def course(trainer: DeviceTrainer, first: Sequence[NDArray[Any]], lr: float) -> TrainingCourse:
    """Train for STEPS steps from the first weights, after one uncounted step: a compiled one then
    replays its recording.

    Args:
        trainer: any.
        first: the first weights.
        lr: the learning rate.
    """
    trainer.lr = lr
    trainer.restore()
    trainer.step()
    trainer.restore()
    losses = [trainer.read(trainer.step()) for _ in range(STEPS)]
    return TrainingCourse(
        losses, [after - before for after, before in zip(trainer.weights(), first, strict=True)], lr
    )


def compare(mine: TrainingCourse, right: TrainingCourse) -> Deviation:
    """Return the errors of a course against the reference's."""
    losses = [abs(a - b) / abs(b) for a, b in zip(mine.losses, right.losses, strict=True)]
    error = sum(float(((a - b) ** 2).sum()) for a, b in zip(mine.change, right.change, strict=True))
    length = sum(float((b**2).sum()) for b in right.change)
    return Deviation(float(np.max(losses)), sqrt(error / length) if length else float("inf"))


def examine(
    trainer: DeviceTrainer, first: Sequence[NDArray[Any]], right: TrainingCourse
) -> Deviation:
    """Compare a contestant of nnmpi's or PyTorch's with the reference.

    Args:
        trainer: the contestant.
        first: the first weights.
        right: the reference's course.

    Raises:
        WrongResultError: for an error above its mode's tolerance.
    """
    result = compare(course(trainer, first, right.lr), right)
    for (name, value), limit in zip(asdict(result).items(), TOLERANCES[trainer.mode], strict=True):
        if not (isfinite(value) and value <= limit):
            raise WrongResultError(
                f"{trainer.name}, case {trainer.case.name} in {trainer.mode}: its {name} is off by"
                f" {value:.1e} of the reference's, more than {limit:g}"
            )
    return result
