"""A case as files: its data and first weights, which every contestant reads, in both sides' order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.cases import Case
from benchmarks.training.contestants import NNMPI, Contestant
from benchmarks.training.layouts import from_torch, split, to_torch
from benchmarks.training.ours import build


class Subject:
    """A case in a folder.

    Attributes:
        case, folder: these.
        weights: the first ones, float32, in nnmpi's order and layout.
        names: of them.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        model = build(case).initialize(seed=case.seed)
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = [np.array(parameter.data) for parameter in model.parameters()]
        x, y = case.data()
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        _write(folder / "nnmpi.weights", self.weights)
        _write(folder / "torch.weights", to_torch(case, self.weights))

    def read(self, file: Path, contestant: Contestant) -> list[NDArray[np.float64]]:
        """Return the weights that a contestant has left in a file, which is removed, in nnmpi's order and layout."""
        flat = np.fromfile(file, contestant.dtype).astype(np.float64)
        file.unlink()
        return split(flat, self.weights) if contestant.side == NNMPI else from_torch(self.case, flat, self.weights)


def _write(file: Path, arrays: list[NDArray[Any]]) -> None:
    with open(file, "wb") as values:
        for array in arrays:
            array.tofile(values)
