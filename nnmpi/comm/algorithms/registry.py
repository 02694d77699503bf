"""The collectives by the names that the command line and `Group` know."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from nnmpi.comm.algorithms.bruck import (
    bruck_all_gather,
    bruck_gather_seconds,
    bruck_reduce_scatter,
    bruck_scatter_seconds,
)
from nnmpi.comm.algorithms.gossip import gossip, gossip_seconds
from nnmpi.comm.algorithms.halving import halving_doubling, halving_seconds
from nnmpi.comm.algorithms.hierarchical import hierarchical
from nnmpi.comm.algorithms.ring import (
    ring_all_gather,
    ring_gather_seconds,
    ring_reduce_scatter,
    ring_scatter_seconds,
    ring_seconds,
)
from nnmpi.comm.algorithms.tree import (
    broadcast_seconds,
    scatter_broadcast_seconds,
    star,
    star_seconds,
    tree_broadcast,
    tree_reduce,
    tree_scatter,
    tree_seconds,
)
from nnmpi.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    NEIGHBOUR_AVERAGE,
    REDUCE_SCATTER,
    Algorithm,
    Collective,
    Contract,
    as_collective,
)
from nnmpi.errors import UsageError

HIERARCHICAL = "hierarchical"

_ALL = (
    Collective("ring", ALL_REDUCE, (ring_reduce_scatter, ring_all_gather), ring_seconds),
    Collective("tree", ALL_REDUCE, (tree_reduce, tree_broadcast), tree_seconds),
    Collective("ps", ALL_REDUCE, (star,), star_seconds),
    Collective("halving-doubling", ALL_REDUCE, (halving_doubling,), halving_seconds),
    Collective(HIERARCHICAL, ALL_REDUCE, (hierarchical,)),
    Collective("ring", REDUCE_SCATTER, (ring_reduce_scatter,), ring_scatter_seconds),
    Collective("tree", REDUCE_SCATTER, (bruck_reduce_scatter,), bruck_scatter_seconds),
    Collective("ring", ALL_GATHER, (ring_all_gather,), ring_gather_seconds),
    Collective("tree", ALL_GATHER, (bruck_all_gather,), bruck_gather_seconds),
    Collective("ring", BROADCAST, (tree_scatter, ring_all_gather), scatter_broadcast_seconds),
    Collective("tree", BROADCAST, (tree_broadcast,), broadcast_seconds),
    Collective("gossip", NEIGHBOUR_AVERAGE, (gossip,), gossip_seconds),
)

COLLECTIVES: Mapping[tuple[str, str], Collective] = MappingProxyType({(c.contract.name, c.name): c for c in _ALL})
"""All collectives by (what, how), such as ("all-gather", "ring")."""

ALGORITHMS: Mapping[str, Collective] = MappingProxyType({c.name: c for c in _ALL if c.contract is ALL_REDUCE})
"""The all-reduces that are made of steps."""

NATIVE = "native"  # MPI's own all-reduce: there are no steps to look at
AUTO = "auto"  # chosen by size: see `comm.fit.choose`
SHARED = "shared"  # loads and stores in memory that the ranks of a node share
NAMES = (AUTO, NATIVE, SHARED, *ALGORITHMS)


How: TypeAlias = str | Algorithm
"""How a collective is done: a name, or a function of (rank, size) that a user wrote."""


def name_of(how: How) -> str:
    """Return the name of an algorithm; of a user's own that of the function."""
    return how if isinstance(how, str) else as_collective(how).name


def find_algorithm(name: How, nodes: Sequence[int] | None = None) -> Collective:
    """Return the all-reduce of this name, or one's own as a collective; some look at the node of each rank.

    Raises:
        UsageError: for a name that is not one of `ALGORITHMS`.
    """
    if not isinstance(name, str):
        return _own(name, ALL_REDUCE)
    if name not in ALGORITHMS:
        raise UsageError(f"there is no all-reduce algorithm {name!r}; the names are {', '.join(NAMES)}")
    if name == HIERARCHICAL and nodes is not None:
        return Collective(name, ALL_REDUCE, (partial(hierarchical, nodes=tuple(nodes)),))
    return ALGORITHMS[name]


def _own(algorithm: Algorithm, contract: Contract) -> Collective:
    """Return a user's algorithm as a collective.

    Raises:
        UsageError: for a collective that promises something else.
    """
    found = as_collective(algorithm, contract)
    if found.contract.name != contract.name:
        raise UsageError(f"{found.name} is a collective for {found.contract.name}, not for {contract.name}")
    return found


def find_collective(operation: str, name: How, nodes: Sequence[int] | None = None) -> Collective:
    """Return the collective that does this operation in this way.

    Args:
        nodes: the node of each rank, for all-reduces that look at it.

    Raises:
        UsageError: for an operation that there is not, or a way in which it cannot be done.
    """
    if operation == ALL_REDUCE.name and (not isinstance(name, str) or name in ALGORITHMS):
        return find_algorithm(name, nodes)
    if isinstance(name, str) and (operation, name) in COLLECTIVES:
        return COLLECTIVES[operation, name]
    contracts = {found.contract.name: found.contract for found in _ALL}
    if not isinstance(name, str) and operation in contracts:
        return _own(name, contracts[operation])
    operations = list(dict.fromkeys(what for what, _ in COLLECTIVES))
    if operation not in operations:
        raise UsageError(f"there is no collective {operation!r}; there are {', '.join(operations)}")
    ways = ", ".join(how for what, how in COLLECTIVES if what == operation)
    raise UsageError(f"there is no {operation} by {name!r}; the names are {ways}")
