"""A case as arrays: its batch, and its first weights in nnmpi's order, which every contestant gets."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.cases import Case
from benchmarks.training.ours import build


class Subject:
    """A case in host memory.

    Attributes:
        case: it.
        x, y: the batch, see `Case.data`.
        weights: the first ones, float32, in nnmpi's order and layout.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.x, self.y = case.data()
        model = build(case).initialize(seed=case.seed)
        self.weights: list[NDArray[np.float32]] = [np.array(parameter.data) for parameter in model.parameters()]

    def batch(self, dtype: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the batch with floating-point numbers of a dtype."""
        return self.x.astype(dtype, copy=False), self.y.astype(dtype if self.y.dtype.kind == "f" else self.y.dtype)
