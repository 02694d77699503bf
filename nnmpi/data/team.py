"""Team: the processes that prepare a data set together; one by itself, or the ranks of a node."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array, Shape
from nnmpi.base.shard import part

SAY_S = 5.0  # between two sentences about what takes long


def quiet(sentence: str) -> None:
    """Say nothing."""


class Team:
    """One process by itself, which keeps arrays in memory; others override what differs.

    All methods but `share` are collective: all ranks call them, in the same order.

    Args:
        say: called with a sentence about what takes long.

    Attributes:
        rank, size: this process's number, and how many there are.
    """

    rank, size = 0, 1

    def __init__(self, say: Callable[[str], None] = quiet) -> None:
        self.say = say

    def share(self, count: int) -> range:
        """Return this rank's part of the numbers below `count`."""
        return part(count, self.size, self.rank)

    def counted(self, count: int, what: str) -> Iterator[int]:
        """Yield the numbers of this rank's share; rank 0 says now and then how far it is."""
        share, said = self.share(count), perf_counter()
        for done, number in enumerate(share):
            if self.rank == 0 and perf_counter() - said > SAY_S:
                said = perf_counter()
                self.say(f"{what}: {done / len(share):.0%}")
            yield number

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, in rank order."""
        return [value]

    def agreed(self) -> AbstractContextManager[None]:
        """Return a context whose error is raised on all ranks if it is on one."""
        return nullcontext()

    def first(self, work: Callable[[], Any]) -> Any:
        """Return the JSON value of what rank 0 does for all."""
        result = None
        with self.agreed():
            if self.rank == 0:
                result = work()
        return self.gather(result)[0]

    def spool(self) -> "Spool":
        """Return numbers that are added one after the other; not collective."""
        return Spool()

    def array(self, shape: Shape, dtype: Any) -> Array:
        """Return an array that all ranks fill, each its part."""
        return np.empty(shape, dtype)


class Spool:
    """Numbers in float64 that are added one after the other, in memory."""

    def __init__(self) -> None:
        self._added = array("d")

    def extend(self, values: Sequence[float] | NDArray[np.float64]) -> None:
        """Add numbers, (n,)."""
        if isinstance(values, np.ndarray):
            self._added.frombytes(np.ascontiguousarray(values).view(np.uint8).data)
        else:
            self._added.extend(values)

    @property
    def numbers(self) -> NDArray[np.float64]:
        """All numbers, when none is added any more."""
        return np.frombuffer(self._added)


ALONE = Team()
