"""Sums of numbers of 16 bits: added up in float32, and rounded once at the end.

MPI has no dependable sum of them, and adding them two by two would round at every rank on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.buffers import Buffer
from nnmpi.comm.device.script import Awaited, Script

if TYPE_CHECKING:
    from nnmpi.comm.group import Pending


class Widened(Script):
    """A sum of an array of float16 or bfloat16, by that of a float32 one.

    Args:
        array: (n,) worked on in place.
        bind: returns the sum of a float32 array.
    """

    def __init__(self, array: Array, bind: Callable[[Buffer], Pending]) -> None:
        super().__init__(f"sum of {array.dtype}")
        self._array = array
        self._wide: Array = namespace(array).empty(array.shape, dtype=np.float32)
        self._sum = bind(self._wide)

    def play(self) -> Iterator[Awaited]:
        """Convert, sum, convert."""
        self._wide[...] = self._array
        self._sum.start()
        yield self._sum
        self._array[...] = self._wide

    def free(self) -> None:
        """Give back what the sum of float32 keeps."""
        self._sum.free()
