"""Two-level all-reduce: to a leader in each node, around a ring of leaders, and back.

The link of a node is slower than its memory and serves all its ranks. So only one rank of each node
uses it, for a ring over the nodes. Three nodes with two ranks each:

    node 0        node 1        node 2
    0 <-- 1       2 <-- 3       4 <-- 5          tree to the leader: whole buffer, inside
    0 --------->  2 --------->  4 ------> (0)    ring of leaders, across, 2 (K-1) steps:
                                                 chunks 0 1 | 2 3 | 4 5
    0 --> 1       2 --> 3       4 --> 5          tree from the leader: whole buffer, inside

Nodes may have different numbers of ranks, and a node's ranks need not be neighbours.

Cost with K nodes of n ranks, M bytes, inside alpha, beta, across alpha', beta', time per added byte
gamma:

    2 ceil(log2 n) (alpha + M beta)  +  2 (K-1) alpha'  +  2 (K-1)/K M beta'
                                     +  (ceil(log2 n) + (K-1)/K) M gamma

Source: Jia et al., Highly scalable deep learning training system with mixed-precision, 2018; Mikami
et al., Massively distributed SGD, 2018, for the idea.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isqrt

from nnmpi.base.errors import group_ranks
from nnmpi.base.shard import part
from nnmpi.comm.algorithms.ring import ring
from nnmpi.comm.algorithms.tree import tree_broadcast, tree_reduce
from nnmpi.comm.collective import Chunks, Step, Steps
from nnmpi.comm.machine import blocks


def hierarchical(rank: int, size: int, nodes: Sequence[int] | None = None) -> Steps:
    """Return this rank's steps.

    Args:
        nodes: the node of each rank; by default ranks 0, 1 ... fill nodes of about the square root
            of size.
    """
    if size == 1:
        return ()
    nodes = blocks(size, max(1, isqrt(size))) if nodes is None else tuple(nodes)
    members = _members(nodes)
    node, everything = members[nodes[rank]], range(size)
    local_rank = node.index(rank)
    up, down = (
        _among(node, steps(local_rank, len(node)), lambda chunks: everything if chunks else ())
        for steps in (tree_reduce, tree_broadcast)
    )
    if rank != node[0]:
        return up + down
    leaders = [ranks[0] for ranks in members.values()]
    across = ring(leaders.index(rank), len(leaders))
    return up + _among(leaders, across, lambda chunks: part(size, len(leaders), chunks[0])) + down


@lru_cache(maxsize=1)  # thousands of ranks call it in turn
def _members(nodes: tuple[int, ...]) -> dict[int, list[int]]:
    """Return each node's ranks; nodes in order of their first ranks."""
    return group_ranks(enumerate(nodes))


def _among(ranks: Sequence[int], steps: Sequence[Step], share: Callable[[Chunks], Chunks]) -> Steps:
    """Return steps with their ranks 0, 1 ... replaced by `ranks`, and chunks by `share(chunks)`."""
    return tuple(
        Step(
            None if step.to is None else ranks[step.to],
            share(step.send),
            None if step.from_ is None else ranks[step.from_],
            share(step.recv),
            step.reduce,
        )
        for step in steps
    )
