"""The mean of arrays that differ from rank to rank, and how far apart they were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.group import Group
from nnmpi.optim.clip import sum_of_squares


@dataclass(frozen=True)
class Spread:
    """How far the ranks' arrays were from their mean.

    Attributes:
        distance: root of the mean over the ranks of the squared distance from the mean.
        length: of the mean.
    """

    distance: float
    length: float

    @property
    def relative(self) -> float:
        """The distance over the length; 0 where the mean is 0."""
        return self.distance / self.length if self.length != 0 else 0.0


def average(arrays: Iterable[Array], group: Group, weight: float) -> Spread:
    """Replace each array by its weighted mean over the ranks, the same bits everywhere. Collective.

    What is taken is the mean of the differences from rank 0's. So arrays that are equal already stay as they are, bit
    for bit, where a sum of N equal numbers divided by N need not be that number. It costs a broadcast more.

    Args:
        arrays: float32 or float64, any shape; the same number, shapes and dtypes on all ranks.
        weight: of this rank; those of all ranks add up to 1.
    """
    squares = length = 0.0
    for array in arrays:
        own = namespace(array).ascontiguousarray(array).reshape(-1)
        base = own.copy()
        group.broadcast(base)
        mean = own - base
        mean *= weight
        group.all_reduce(mean, check=False)
        mean += base
        squares += sum_of_squares([own - mean])
        length += sum_of_squares([mean])
        array[...] = mean.reshape(array.shape)
    return Spread(sqrt(group.sum_floats([squares])[0] / group.size), sqrt(length))
