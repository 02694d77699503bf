"""The ranks under MPI, as `timing` needs them."""

import numpy as np
from numpy.typing import NDArray

from nnmpi.comm.group import Group


class MpiRanks:
    """The ranks of a group."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self._comm = group.comm
        self.barrier = group.comm.Barrier

    def gather_floats(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return every rank's (n,) numbers on every rank: (ranks, n)."""
        everyones = np.empty((self.size, values.size))
        self._comm.Allgather(np.ascontiguousarray(values), everyones)
        return everyones
