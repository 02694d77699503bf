"""The collectives by the names on the command line and in `Group`."""

from collections.abc import Mapping, Sequence
from functools import partial
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

# The last argument is the cost with N ranks: the factors of (alpha, M beta, M gamma).
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

COLLECTIVES: Mapping[tuple[str, str], Collective] = {(c.contract.name, c.name): c for c in _ALL}
"""All collectives by (operation, algorithm), such as ("all-gather", "ring")."""

ALGORITHMS: Mapping[str, Collective] = {c.name: c for c in _ALL if c.contract is ALL_REDUCE}
"""The all-reduces made of steps."""

NATIVE = "native"  # MPI's own all-reduce: a library call without steps
AUTO = "auto"  # chosen by size: see `comm.fit.choose`
SHARED = "shared"  # loads and stores in shared memory of a node
NAMES = (AUTO, NATIVE, SHARED, *ALGORITHMS)


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
