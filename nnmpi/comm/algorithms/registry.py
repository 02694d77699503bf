"""The collectives by the names on the command line and in `Group`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Final, TypeAlias

from nnmpi.base.errors import UsageError
from nnmpi.comm.algorithms.bruck import (
    bruck_all_gather,
    bruck_all_to_all,
    bruck_reduce_scatter,
)
from nnmpi.comm.algorithms.doubling import doubling_all_gather, halving_reduce_scatter
from nnmpi.comm.algorithms.gossip import gossip
from nnmpi.comm.algorithms.halving import HALVED, halving_doubling, recursive_doubling
from nnmpi.comm.algorithms.hierarchical import hierarchical
from nnmpi.comm.algorithms.pairwise import pairwise
from nnmpi.comm.algorithms.ring import ring_all_gather, ring_reduce_scatter
from nnmpi.comm.algorithms.tree import star, tree_broadcast, tree_reduce, tree_scatter
from nnmpi.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    NEIGHBOUR_AVERAGE,
    REDUCE_SCATTER,
    Algorithm,
    Collective,
    as_collective,
)

HIERARCHICAL = "hierarchical"

_ALL = (
    Collective("ring", ALL_REDUCE, (ring_reduce_scatter, ring_all_gather)),
    Collective("tree", ALL_REDUCE, (tree_reduce, tree_broadcast)),
    Collective("ps", ALL_REDUCE, (star,)),
    Collective("halving-doubling", HALVED, (halving_doubling,)),
    Collective(HIERARCHICAL, ALL_REDUCE, (hierarchical,)),
    Collective("ring", REDUCE_SCATTER, (ring_reduce_scatter,)),
    Collective("tree", REDUCE_SCATTER, (bruck_reduce_scatter,)),
    Collective("recursive-halving", REDUCE_SCATTER, (halving_reduce_scatter,)),
    Collective("ring", ALL_GATHER, (ring_all_gather,)),
    Collective("tree", ALL_GATHER, (bruck_all_gather,)),
    Collective("recursive-doubling", ALL_GATHER, (doubling_all_gather,)),
    Collective("ring", BROADCAST, (tree_scatter, ring_all_gather)),
    Collective("tree", BROADCAST, (tree_broadcast,)),
    Collective("recursive-doubling", BROADCAST, (tree_scatter, doubling_all_gather)),
    Collective("pairwise", ALL_TO_ALL, (pairwise,)),
    Collective("bruck", ALL_TO_ALL, (bruck_all_to_all,)),
    Collective("gossip", NEIGHBOUR_AVERAGE, (gossip,)),
)

COLLECTIVES: Mapping[tuple[str, str], Collective] = {(c.contract.name, c.name): c for c in _ALL}
"""All collectives by (operation, algorithm), such as ("all-gather", "ring")."""

ALGORITHMS: Mapping[str, Collective] = {
    c.name: c for c in _ALL if c.contract.name == ALL_REDUCE.name
}
"""The all-reduces made of steps."""

NATIVE = "native"  # MPI's own all-reduce: a library call without steps
AUTO: Final = "auto"  # chosen by size: see `comm.fit.choose`
SHARED = "shared"  # loads and stores in shared memory of a node
NAMES = (AUTO, NATIVE, SHARED, *ALGORITHMS)
AllReduceName: TypeAlias = Annotated[str, NAMES]


def native_algorithms(operation: str) -> list[Collective]:
    """Return the algorithms whose fastest one MPI's own collective is, in the cost model."""
    return [
        item
        for item in (*_ALL, Collective("doubling", ALL_REDUCE, (recursive_doubling,)))
        if item.contract.name == operation
        and item.name in ("ring", "tree", "halving-doubling", "doubling")
    ]


AlgorithmLike: TypeAlias = str | Algorithm
"""The algorithm of a collective: a name, or a user's function of (rank, size)."""


def find_collective(
    operation: str, name: AlgorithmLike, nodes: Sequence[int] | None = None
) -> Collective:
    """Return an operation's collective by its algorithm's name, or wrap a user's algorithm.

    Args:
        nodes: the node of each rank, for the hierarchical all-reduce.

    Raises:
        UsageError: for an unknown operation, an algorithm that the operation lacks, or a user's
            collective with another contract.
    """
    contracts = {item.contract.name: item.contract for item in _ALL}
    if operation not in contracts:
        raise UsageError(
            f"there is no collective {operation!r}; choose one of {', '.join(contracts)}"
        )
    if not isinstance(name, str):
        result = as_collective(name, contracts[operation])
        if result.contract.name != operation:
            raise UsageError(
                f"{result.name} is an algorithm for {result.contract.name}, not for {operation}"
            )
        return result
    if (operation, name) not in COLLECTIVES:
        names = ", ".join(item for what, item in COLLECTIVES if what == operation)
        stepless = (
            f", and without steps {AUTO}, {NATIVE}, {SHARED}"
            if operation == ALL_REDUCE.name
            else ""
        )
        raise UsageError(f"{operation} has no algorithm {name!r}; choose one of {names}{stepless}")
    if name == HIERARCHICAL and nodes is not None:
        return Collective(name, ALL_REDUCE, (partial(hierarchical, nodes=tuple(nodes)),))
    return COLLECTIVES[operation, name]
