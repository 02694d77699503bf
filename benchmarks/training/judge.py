"""Compares every contestant with a reference in float64 before anything is timed.

A gradient is read off the weights: a step of plain SGD with an enormous learning rate leaves w - lr g, of which w is a
millionth. So what is looked at is what the step has done, exchange and update included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.contestants import NNMPI, TORCH, nnmpi_field, reference
from benchmarks.training.subject import Subject
from benchmarks.training.team import Team, Teams
from nnmpi.errors import NnmpiError

PROBE_LR = 2.0**20
TRAIN_LR, TRAIN_STEPS = 0.01, 5
TOLERANCE = 2e-6  # of the largest element
Arrays = Sequence[NDArray[np.float64]]


class WrongResultError(NnmpiError):
    """A contestant whose step is not the reference's."""


@dataclass(frozen=True)
class Finding:
    """How far a contestant is from the reference.

    Attributes:
        loss: relative error of the first loss; NaN for one that computes none.
        gradient: largest error of a gradient's element, as a share of the largest of all elements.
        parameter: the same, with each parameter's own largest element; the worst parameter's.
        weights: largest difference from nnmpi's on one rank after some steps, as a share of the largest weight.
    """

    loss: float
    gradient: float
    parameter: float
    weights: float


class Judge:
    """Knows a case's right loss and gradients, and nnmpi's weights on one rank after some steps.

    Args:
        torch: whether PyTorch computes the reference, else nnmpi in float64.
    """

    def __init__(self, subject: Subject, torch: bool) -> None:
        self.subject = subject
        exact, plain = reference(subject.case, torch), nnmpi_field(subject.case, 1, False, False)[0]
        with Teams([exact, plain], subject.folder) as teams:
            (loss,), (self._gradients,) = self._probe(teams[exact.name])
            self._loss: float = loss
            (self._weights,) = self._train(teams[plain.name])

    def examine(self, team: Team) -> Finding:
        """Compare a contestant.

        Raises:
            WrongResultError: when it is further off than the tolerance, and not PyTorch's.
        """
        losses, gradients = self._probe(team)
        trained = self._train(team)
        loss = fmean(losses)
        found = Finding(
            loss=abs(loss - self._loss) / abs(self._loss),
            gradient=max(error(each, self._gradients) for each in gradients),
            parameter=max(error([a], [b]) for each in gradients for a, b in zip(each, self._gradients, strict=True)),
            weights=max(error(each, self._weights) for each in trained),
        )
        if team.contestant.side != TORCH:
            for name in ("loss", "gradient", "weights") if team.contestant.side == NNMPI else ("gradient", "weights"):
                value = getattr(found, name)
                if isnan(value) or value > TOLERANCE:
                    raise WrongResultError(
                        f"{team.contestant.name} on {team.contestant.ranks} ranks, case {self.subject.case.name}: its "
                        f"{name} is off by {value:.1e} of the largest, more than {TOLERANCE:g}"
                    )
        return found

    def _probe(self, team: Team) -> tuple[list[float], list[Arrays]]:
        """Return each rank's loss and gradients."""
        answers = team.tell("probe", lr=PROBE_LR)
        gradients = [
            [(before - after) / PROBE_LR for before, after in zip(self.subject.weights, left, strict=True)]
            for left in self._read(team, answers)
        ]
        return [answer["loss"] for answer in answers], gradients

    def _train(self, team: Team) -> list[Arrays]:
        """Return each rank's weights after some steps."""
        return self._read(team, team.tell("train", lr=TRAIN_LR, steps=TRAIN_STEPS))

    def _read(self, team: Team, answers: Sequence[dict[str, str]]) -> list[Arrays]:
        return [self.subject.read(Path(answer["file"]), team.contestant) for answer in answers]


def error(found: Arrays, right: Arrays) -> float:
    """Return the largest difference between elements, as a share of the largest of the right ones; NaN if one is."""
    largest = max(float(abs(b).max()) for b in right)
    differences = [float(abs(a - b).max()) for a, b in zip(found, right, strict=True)]
    worst = float(np.max(differences))
    return worst if worst == 0 else worst / largest if largest else float("inf")
