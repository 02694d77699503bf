"""What every contestant's process can do, nnmpi's and PyTorch's: a step, and its parameters as arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.cases import CASES, Case
from benchmarks.training.contestants import Contestant


class Trainer(ABC):
    """One rank of a contestant. Making one is collective over its ranks.

    Attributes:
        case, contestant: what it runs.
        rank: its own.
        lr: the learning rate of the next step.
    """

    def __init__(self, contestant: Contestant, rank: int) -> None:
        self.contestant, self.rank, self.lr = contestant, rank, 0.0
        self.case: Case = CASES[contestant.case]

    @abstractmethod
    def step(self) -> float:
        """Do forward, backward, exchange and update. Return the loss; its mean over the ranks is the global one."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come here."""

    @abstractmethod
    def arrays(self) -> list[NDArray[np.floating]]:
        """Return views of the parameters in order of definition, in the side's own layout."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Return what computes here, by name."""

    @abstractmethod
    def close(self) -> None:
        """Take apart what was made collectively."""

    def load(self, folder: Path) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return this rank's part of the global batch, in the contestant's dtype where it is floating point."""
        part = self.case.share(self.rank, self.contestant.ranks)
        x, y = (np.load(folder / f"{name}.npy", mmap_mode="r")[part] for name in ("x", "y"))
        dtype = self.contestant.dtype
        x, y = (np.array(each, dtype if each.dtype.kind == "f" else each.dtype) for each in (x, y))
        return x, y

    def restore(self, file: Path) -> None:
        """Give all parameters the values of a file of float32 numbers."""
        with open(file, "rb") as values:
            for array in self.arrays():
                array[...] = np.fromfile(values, np.float32, array.size).reshape(array.shape)

    def save(self, file: Path) -> None:
        """Write all parameters, in their dtype, one after another."""
        with open(file, "wb") as values:
            for array in self.arrays():
                array.tofile(values)
