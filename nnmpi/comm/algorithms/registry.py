"""The collectives by the names on the command line and in `Group`."""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Annotated, Final, TypeAlias

from nnmpi.base.errors import UsageError
from nnmpi.base.glossary import Glossary
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
    CollectiveCost,
    as_collective,
)


def anywhere(nodes: Sequence[int]) -> bool:
    """Let `auto` take an algorithm on any nodes."""
    return True


def has_levels(nodes: Sequence[int]) -> bool:
    """Return whether there are several nodes, of which some have several ranks."""
    return 1 < len(set(nodes)) < len(nodes)


# ---- formulas: N ranks -> latencies, buffers sent, buffers added ----


def _levels(size: int) -> int:
    """Return the levels of a binomial tree: the logarithm of the ranks, rounded up."""
    return (size - 1).bit_length()


def _others(size: int) -> float:
    """Return the share of a buffer that is the other ranks'."""
    return 1 - 1 / size


def _power(size: int, *cost: float) -> CollectiveCost | None:
    """Return a cost that is exact for powers of two alone."""
    return None if size & (size - 1) else (cost[0], cost[1], cost[2])


def _halving_doubling(size: int) -> CollectiveCost:
    power = size.bit_length() - 1
    is_folded = 2**power < size  # the ranks above the power give their buffer to another first
    moved = 1 - 2.0**-power + is_folded
    return 2 * (power + is_folded), 2 * moved, moved


def _hierarchical(size: int) -> CollectiveCost | None:
    """Return the cost with nodes of the square root of the ranks, if they divide them."""
    inside = isqrt(size)
    if size % inside:
        return None
    levels, nodes = _levels(inside), size // inside
    across = _others(nodes)
    return 2 * levels + 2 * (nodes - 1), 2 * levels + 2 * across, levels + across


# To add a collective, write its steps in a file of this folder and its row here. What lists
# collectives reads the rows: options, help, commands, pages, measurements, tests. An all-reduce
# without `automatic` is never the choice of "auto".
_ALL = (
    Collective(
        "ring",
        ALL_REDUCE,
        (ring_reduce_scatter, ring_all_gather),
        "the fewest bytes, in twice as many messages as ranks",
        automatic=anywhere,
        formula=lambda n: (2 * n - 2, 2 * _others(n), _others(n)),
        in_mpi=True,
    ),
    Collective(
        "tree",
        ALL_REDUCE,
        (tree_reduce, tree_broadcast),
        "whole buffers up and down a binomial tree",
        automatic=anywhere,
        formula=lambda n: (2 * _levels(n), 2 * _levels(n), _levels(n)),
        in_mpi=True,
    ),
    Collective(  # last, or level with the tree, at every size; it serves comparisons
        "star",
        ALL_REDUCE,
        (star,),
        "all to rank 0, a parameter server, and back",
        formula=lambda n: (2 * n - 2, 2 * n - 2, n - 1),
    ),
    Collective(
        "halving-doubling",
        HALVED,
        (halving_doubling,),
        "the fewest bytes, in few messages",
        automatic=anywhere,
        formula=_halving_doubling,
        in_mpi=True,
    ),
    Collective(
        "hierarchical",
        ALL_REDUCE,
        (hierarchical,),
        "a tree in each node, and a ring over the nodes",
        automatic=has_levels,
        formula=_hierarchical,
        takes_nodes=True,
    ),
    Collective(
        "ring",
        REDUCE_SCATTER,
        (ring_reduce_scatter,),
        formula=lambda n: (n - 1, _others(n), _others(n)),
        in_mpi=True,
    ),
    Collective(
        "tree",
        REDUCE_SCATTER,
        (bruck_reduce_scatter,),
        formula=lambda n: (_levels(n), _others(n), _others(n)),
        in_mpi=True,
    ),
    Collective(
        "recursive-halving",
        REDUCE_SCATTER,
        (halving_reduce_scatter,),
        formula=lambda n: _power(n, _levels(n), _others(n), _others(n)),
    ),
    Collective(
        "ring",
        ALL_GATHER,
        (ring_all_gather,),
        formula=lambda n: (n - 1, _others(n), 0),
        in_mpi=True,
    ),
    Collective(
        "tree",
        ALL_GATHER,
        (bruck_all_gather,),
        formula=lambda n: (_levels(n), _others(n), 0),
        in_mpi=True,
    ),
    Collective(
        "recursive-doubling",
        ALL_GATHER,
        (doubling_all_gather,),
        formula=lambda n: _power(n, _levels(n), _others(n), 0),
    ),
    Collective(
        "ring",
        BROADCAST,
        (tree_scatter, ring_all_gather),
        formula=lambda n: _power(n, _levels(n) + n - 1, 2 * _others(n), 0),
        in_mpi=True,
    ),
    Collective(
        "tree",
        BROADCAST,
        (tree_broadcast,),
        formula=lambda n: (_levels(n), _levels(n), 0),
        in_mpi=True,
    ),
    Collective(
        "recursive-doubling",
        BROADCAST,
        (tree_scatter, doubling_all_gather),
        formula=lambda n: _power(n, 2 * _levels(n), 2 * _others(n), 0),
    ),
    Collective("pairwise", ALL_TO_ALL, (pairwise,), formula=lambda n: (n - 1, _others(n), 0)),
    Collective(
        "bruck",
        ALL_TO_ALL,
        (bruck_all_to_all,),
        formula=lambda n: (_levels(n), sum(way.bit_count() for way in range(n)) / n, 0),
    ),
    Collective(
        "gossip",
        NEIGHBOUR_AVERAGE,
        (gossip,),
        formula=lambda n: (min(n - 1, 2), min(n - 1, 2), min(n - 1, 2)),
    ),
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
_HELP = {
    AUTO: "the fastest by the fitted cost model, or by size without a fit",
    NATIVE: "MPI's own",
    SHARED: "through a node's shared memory",
    **{name: item.help for name, item in ALGORITHMS.items()},
}
NAMES = tuple(_HELP)
AllReduceName: TypeAlias = Annotated[str, NAMES, Glossary(_HELP)]


def native_algorithms(operation: str) -> list[Collective]:
    """Return the algorithms whose fastest one MPI's own collective is, in the cost model."""
    return [
        item
        for item in (*_ALL, Collective("doubling", ALL_REDUCE, (recursive_doubling,), in_mpi=True))
        if item.contract.name == operation and item.in_mpi
    ]


AlgorithmLike: TypeAlias = str | Algorithm
"""The algorithm of a collective: a name, or a user's function of (rank, size)."""


def find_collective(
    operation: str, name: AlgorithmLike, nodes: Sequence[int] | None = None
) -> Collective:
    """Return an operation's collective by its algorithm's name, or wrap a user's algorithm.

    Args:
        nodes: the node of each rank, for an algorithm that takes them; None for its own division.

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
    found = COLLECTIVES[operation, name]
    return found if nodes is None else found.on(nodes)
