"""Checking each result: one wrong element on one rank is the same sentence and the same end on all ranks."""

from dataclasses import asdict

import numpy as np

from benchmarks.collectives.contestants import Entry
from benchmarks.collectives.ranks import MpiRanks
from nnmpi.comm.group import Group
from nnmpi.comm.sizes import name_bytes
from nnmpi.errors import CommError


class Verifier:
    """Compares what each call leaves in the buffers with what it must be. Collective, like the calls."""

    def __init__(self, group: Group, nbytes: int, dtype: str) -> None:
        self._group, self._ranks = group, MpiRanks(group)
        self._buffer = f"{name_bytes(nbytes)} of {dtype}"

    def __call__(self, contestant: Entry, call: int) -> None:
        """Return if all ranks have the right result.

        Raises:
            CommError: on all ranks, with the first rank that has not, the algorithm, the size and the first element.
        """
        wrong = contestant.first_wrong(call)
        if not self._ranks.gather_floats(np.array([wrong is not None], np.float64)).any():
            return
        everyones = self._group.gather(None if wrong is None else asdict(wrong))
        rank, first = next((rank, each) for rank, each in enumerate(everyones) if each is not None)
        raise CommError(
            f"rank {rank} of {self._group.size} has a wrong result of {contestant.name} with {self._buffer}, call "
            f"{call}: element {first['index']} is {first['found']:.9g} and must be {first['expected']:.9g}"
        )
