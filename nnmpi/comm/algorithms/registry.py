"""The collectives by the names that the command line and `Group` know."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from nnmpi.comm.algorithms.bruck import bruck_all_gather, bruck_reduce_scatter
from nnmpi.comm.algorithms.gossip import gossip
from nnmpi.comm.algorithms.halving import halving_cost, halving_doubling
from nnmpi.comm.algorithms.hierarchical import hierarchical
from nnmpi.comm.algorithms.pairwise import pairwise
from nnmpi.comm.algorithms.ring import ring_all_gather, ring_reduce_scatter
from nnmpi.comm.algorithms.tree import levels, star, tree_broadcast, tree_reduce, tree_scatter
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
from nnmpi.errors import UsageError

HIERARCHICAL = "hierarchical"

# The last column is the cost with N ranks: (alpha, M beta, M gamma), each so many times.
_ALL = (
    Collective(
        "ring",
        ALL_REDUCE,
        (ring_reduce_scatter, ring_all_gather),
        lambda N: (2 * N - 2, 2 - 2 / N, 1 - 1 / N),
    ),
    Collective(
        "tree",
        ALL_REDUCE,
        (tree_reduce, tree_broadcast),
        lambda N: (2 * levels(N), 2 * levels(N), levels(N)),
    ),
    Collective("ps", ALL_REDUCE, (star,), lambda N: (2 * N - 2, 2 * N - 2, N - 1)),
    Collective("halving-doubling", ALL_REDUCE, (halving_doubling,), halving_cost),
    Collective(HIERARCHICAL, ALL_REDUCE, (hierarchical,)),
    Collective(
        "ring", REDUCE_SCATTER, (ring_reduce_scatter,), lambda N: (N - 1, 1 - 1 / N, 1 - 1 / N)
    ),
    Collective(
        "tree", REDUCE_SCATTER, (bruck_reduce_scatter,), lambda N: (levels(N), 1 - 1 / N, 1 - 1 / N)
    ),
    Collective("ring", ALL_GATHER, (ring_all_gather,), lambda N: (N - 1, 1 - 1 / N, 0)),
    Collective("tree", ALL_GATHER, (bruck_all_gather,), lambda N: (levels(N), 1 - 1 / N, 0)),
    Collective(
        "ring",
        BROADCAST,
        (tree_scatter, ring_all_gather),
        lambda N: (levels(N) + N - 1, 2 - 2 / N, 0),
    ),
    Collective("tree", BROADCAST, (tree_broadcast,), lambda N: (levels(N), levels(N), 0)),
    Collective("pairwise", ALL_TO_ALL, (pairwise,), lambda N: (N - 1, 1 - 1 / N, 0)),
    Collective("gossip", NEIGHBOUR_AVERAGE, (gossip,), lambda N: (min(N - 1, 2),) * 3),
)

COLLECTIVES: Mapping[tuple[str, str], Collective] = MappingProxyType(
    {(c.contract.name, c.name): c for c in _ALL}
)
"""All collectives by (what, how), such as ("all-gather", "ring")."""

ALGORITHMS: Mapping[str, Collective] = MappingProxyType(
    {c.name: c for c in _ALL if c.contract is ALL_REDUCE}
)
"""The all-reduces that are made of steps."""

NATIVE = "native"  # MPI's own all-reduce: there are no steps to look at
AUTO = "auto"  # chosen by size: see `comm.fit.choose`
SHARED = "shared"  # loads and stores in memory that the ranks of a node share
NAMES = (AUTO, NATIVE, SHARED, *ALGORITHMS)


How: TypeAlias = str | Algorithm
"""How a collective is done: a name, or a function of (rank, size) that a user wrote."""


def find_collective(operation: str, name: How, nodes: Sequence[int] | None = None) -> Collective:
    """Return the collective that does this operation in this way, or a user's algorithm as one.

    Args:
        nodes: the node of each rank, for all-reduces that look at it.

    Raises:
        UsageError: for an operation that there is not, a way in which it cannot be done, or a
            user's collective that promises something else.
    """
    contracts = {item.contract.name: item.contract for item in _ALL}
    if operation not in contracts:
        raise UsageError(f"there is no collective {operation!r}; there are {', '.join(contracts)}")
    if not isinstance(name, str):
        result = as_collective(name, contracts[operation])
        if result.contract.name != operation:
            raise UsageError(
                f"{result.name} is a collective for {result.contract.name}, not for {operation}"
            )
        return result
    if (operation, name) not in COLLECTIVES:
        ways = ", ".join(how for what, how in COLLECTIVES if what == operation)
        stepless = (
            f", and without steps {AUTO}, {NATIVE}, {SHARED}"
            if operation == ALL_REDUCE.name
            else ""
        )
        raise UsageError(f"there is no {operation} by {name!r}; the names are {ways}{stepless}")
    if name == HIERARCHICAL and nodes is not None:
        return Collective(name, ALL_REDUCE, (partial(hierarchical, nodes=tuple(nodes)),))
    return COLLECTIVES[operation, name]
