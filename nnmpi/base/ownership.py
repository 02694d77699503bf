"""Which simulated rank an object belongs to: a model that two ranks train is refused.

Simulated ranks are threads of one process, so what a program makes outside of the function that
they run belongs to all of them. Under mpirun each process has its own.
"""

from contextvars import ContextVar
from typing import NamedTuple
from weakref import WeakKeyDictionary

from nnmpi.base.errors import UsageError


class SimulatedOwner(NamedTuple):
    """A simulated rank of one run.

    Attributes:
        rank: its number.
        owners: the rank of each object that was claimed in this run; the ranks share it.
    """

    rank: int
    owners: WeakKeyDictionary[object, int]


owner: ContextVar[SimulatedOwner | None] = ContextVar("nnmpi_owner", default=None)


def claim(item: object, what: str) -> None:
    """Note that an object belongs to this simulated rank; outside of a simulation do nothing.

    Args:
        item: that only one rank may use.
        what: to call it in the error, such as "model".

    Raises:
        UsageError: if it belongs to another rank.
    """
    here = owner.get()
    if here is None:
        return
    rank = here.owners.setdefault(item, here.rank)
    if rank != here.rank:
        raise UsageError(
            f"simulated ranks {rank} and {here.rank} were given one {what}: what is made outside of"
            f" the function that they run belongs to all of them; make the {what} in it"
        )
