"""Whether all ranks have come to a collective with the same array: MPI does not say so, it hangs or mixes bytes up."""

from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from nnmpi.backend.array import is_array
from nnmpi.comm.buffers import check_any
from nnmpi.comm.wording import name_ranks
from nnmpi.errors import CommError, DtypeError, ShapeError


class Ranks(Protocol):
    """What of a `Group` is needed here."""

    comm: MPI.Comm
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank."""


def check_same(group: Ranks, array: object) -> None:
    """Make sure that all ranks have an array of the same length and dtype that can be summed. Collective.

    If all is well that is one exchange of 16 bytes.

    Raises:
        CommError: on all ranks, with each different array and the ranks that have it.
        ShapeError, DtypeError: on all ranks, when all have the same wrong one.
    """
    wrong = _describe_error(array)
    own = np.array([-1, -1], np.int64)
    if not wrong:
        found_array: Any = array
        own[:] = found_array.size, found_array.dtype.num
    everyones = np.empty((group.size, 2), np.int64)
    group.comm.Allgather(own, everyones)
    if (everyones == everyones[0]).all() and everyones[0, 0] >= 0:
        return
    found: dict[str, list[int]] = {}
    for rank, have in enumerate(group.gather(wrong or _describe(array))):
        found.setdefault(have, []).append(rank)
    if len(found) > 1:
        listed = "; ".join(f"{name_ranks(ranks)}: {have}" for have, ranks in found.items())
        raise CommError(f"a collective needs the same array on every rank, but these differ: {listed}")
    check_any(array)


def _describe(array: Any) -> str:
    """Return length and dtype in words."""
    return f"{array.size} elements of {array.dtype}" if is_array(array) else type(array).__name__


def _describe_error(array: object) -> str:
    """Return what keeps the array from being summed, nothing if nothing does."""
    try:
        check_any(array)
    except (ShapeError, DtypeError) as error:
        return str(error)
    return ""
