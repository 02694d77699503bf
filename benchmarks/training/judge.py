"""Compares every contestant with a reference in float64 before anything is timed.

A gradient is read off the weights: a step of plain SGD with a learning rate of 2^20 leaves
w - lr g, of which w is a millionth. So exchange and update are judged as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.turns import WrongResultError
from benchmarks.training.cases import Case
from benchmarks.training.contestants import EAGER, NNMPI, Contestant, reference
from benchmarks.training.layouts import from_torch, split, to_torch
from benchmarks.training.team import Team, Teams
from benchmarks.training.trainer_nnmpi import first_weights

PROBE_LR = 2.0**20
TRAIN_LR, TRAIN_STEPS, LARGE_STEPS = 0.01, 5, 2  # the last for cases whose step takes a second
TOLERANCE = 2e-6  # relative to the largest element
Arrays = Sequence[NDArray[np.float64]]


class CaseFiles:
    """A case as files in a folder, for every contestant: its data, and its first weights in both
    sides' order.

    Attributes:
        case, folder: the arguments.
        weights: the first ones, float32, in nnmpi's order and layout.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.weights = first_weights(case)
        x, y = case.data()
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        _write(folder / "nnmpi.weights", self.weights)
        _write(folder / "torch.weights", to_torch(case, self.weights))

    def read(self, file: Path, contestant: Contestant) -> list[NDArray[np.float64]]:
        """Return a contestant's weights in nnmpi's order and layout; remove their file."""
        flat = np.fromfile(file, contestant.dtype).astype(np.float64)
        file.unlink()
        return (
            split(flat, self.weights)
            if contestant.side == NNMPI
            else from_torch(self.case, flat, self.weights)
        )


def _write(file: Path, arrays: list[NDArray[Any]]) -> None:
    with open(file, "wb") as values:
        for array in arrays:
            array.tofile(values)


@dataclass(frozen=True)
class GradientErrors:
    """A contestant's errors against the reference.

    Attributes:
        loss: relative error of the first loss.
        gradient: largest error of a gradient's element, relative to the largest of all elements.
        weights: largest difference from nnmpi's on one rank after some steps, relative to the
            largest weight.
    """

    loss: float
    gradient: float
    weights: float


class Judge:
    """Holds a case's reference: loss, gradients, and nnmpi's weights on one rank after some steps.

    Args:
        torch: True: PyTorch computes loss and gradients; False: nnmpi in float64.
    """

    def __init__(self, files: CaseFiles, torch: bool) -> None:
        self.files = files
        exact, plain = reference(files.case, torch), Contestant(NNMPI, files.case.name, way=EAGER)
        with Teams([exact, plain], files.folder) as teams:
            (loss,), (self._gradients,) = self._probe(teams[exact.name])
            self._loss: float = loss
            (self._weights,) = self._train(teams[plain.name])

    def examine(self, team: Team) -> GradientErrors:
        """Compare a contestant.

        Raises:
            WrongResultError: for an error of nnmpi's above the tolerance; PyTorch's are reported.
        """
        losses, gradients = self._probe(team)
        trained = self._train(team)
        loss = fmean(losses)
        result = GradientErrors(
            loss=abs(loss - self._loss) / abs(self._loss),
            gradient=max(error(gradient, self._gradients) for gradient in gradients),
            weights=max(error(item, self._weights) for item in trained),
        )
        if team.contestant.side == NNMPI:
            for name, value in vars(result).items():
                if isnan(value) or value > TOLERANCE:
                    raise WrongResultError(
                        f"{team.contestant.name} on {team.contestant.ranks} ranks, case"
                        f" {self.files.case.name}: its {name} is off by {value:.1e} of the largest,"
                        f" more than {TOLERANCE:g}"
                    )
        return result

    def _probe(self, team: Team) -> tuple[list[float], list[Arrays]]:
        """Return each rank's loss and gradients."""
        answers = team.ask("probe", lr=PROBE_LR)
        gradients = [
            [
                (before - after) / PROBE_LR
                for before, after in zip(self.files.weights, left, strict=True)
            ]
            for left in self._read(team, answers)
        ]
        return [answer["loss"] for answer in answers], gradients

    def _train(self, team: Team) -> list[Arrays]:
        """Return each rank's weights after some steps."""
        steps = LARGE_STEPS if self.files.case.large else TRAIN_STEPS
        return self._read(team, team.ask("train", lr=TRAIN_LR, steps=steps))

    def _read(self, team: Team, answers: Sequence[dict[str, str]]) -> list[Arrays]:
        return [self.files.read(Path(answer["file"]), team.contestant) for answer in answers]


def error(arrays: Arrays, right: Arrays) -> float:
    """Return the largest difference of elements, relative to the largest right one; NaN for NaN."""
    largest = max(float(abs(b).max()) for b in right)
    differences = [float(abs(a - b).max()) for a, b in zip(arrays, right, strict=True)]
    worst = float(np.max(differences))
    return worst if worst == 0 else worst / largest if largest else float("inf")
