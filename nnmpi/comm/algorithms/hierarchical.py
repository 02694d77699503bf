"""All-reduce in two levels: inside each node to its leader, around a ring of leaders, and back inside each node.

The links between nodes are slower than memory, and a node has one for all its ranks. So only one rank of each node uses
it, and what crosses it is what a ring over nodes needs. Three nodes with two ranks each:

    node 0        node 1        node 2
    0 <-- 1       2 <-- 3       4 <-- 5          tree to the leader: whole buffer, inside
    0 --------->  2 --------->  4 ------> (0)    ring of leaders: chunks 0 1 | 2 3 | 4 5, 2 (K-1) steps, across
    0 --> 1       2 --> 3       4 --> 5          tree from the leader: whole buffer, inside

Nodes may have different numbers of ranks, and a node's ranks need not be neighbours.

Cost with K nodes of n ranks, M bytes, inside alpha, beta, across alpha', beta', time per added byte gamma:

    2 ceil(log2 n) (alpha + M beta)  +  2 (K-1) alpha'  +  2 (K-1)/K M beta'  +  (ceil(log2 n) + (K-1)/K) M gamma

Source: Jia et al., Highly scalable deep learning training system with mixed-precision, 2018; Mikami et al., Massively
distributed SGD, 2018, for the idea.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

from nnmpi.comm.algorithms.ring import ring
from nnmpi.comm.algorithms.tree import tree_broadcast, tree_reduce
from nnmpi.comm.collective import Chunks, Step
from nnmpi.comm.machine import blocks
from nnmpi.shard import part


def hierarchical(rank: int, size: int, nodes: Sequence[int] | None = None) -> tuple[Step, ...]:
    """Return this rank's steps.

    Args:
        nodes: the node of each rank; by default ranks 0, 1 ... fill nodes of about the square root of size.
    """
    if size == 1:
        return ()
    layout = _find_layout(blocks(size, max(1, isqrt(size))) if nodes is None else tuple(nodes))
    mine, place = layout.ranks[layout.node_of[rank]], layout.place_of[rank]
    everything = range(size)
    up = _renamed(tree_reduce(place, len(mine)), mine, everything)
    down = _renamed(tree_broadcast(place, len(mine)), mine, everything)
    if rank != mine[0]:
        return up + down
    leaders = [ranks[0] for ranks in layout.ranks]
    across = ring(layout.node_of[rank], len(leaders))
    return up + tuple(_on_shares(step, leaders, size) for step in across) + down


@dataclass(frozen=True, slots=True)
class _Layout:
    """Who is where: each node's ranks, and each rank's node and place there; nodes in order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]
    node_of: tuple[int, ...]
    place_of: tuple[int, ...]


@lru_cache(maxsize=1)  # thousands of ranks ask for it one after another
def _find_layout(nodes: tuple[int, ...]) -> _Layout:
    members: dict[int, list[int]] = {}
    places = []
    for rank, node in enumerate(nodes):
        places.append(len(members.setdefault(node, [])))
        members[node].append(rank)
    number = {node: index for index, node in enumerate(members)}
    ranks = tuple(tuple(own) for own in members.values())
    return _Layout(ranks, tuple(number[node] for node in nodes), tuple(places))


def _renamed(steps: Sequence[Step], ranks: Sequence[int], everything: Chunks) -> tuple[Step, ...]:
    """Return steps over the whole buffer among these ranks, which were numbered 0, 1 ... in them."""
    return tuple(
        Step(
            to=None if step.to is None else ranks[step.to],
            send=everything if step.send else (),
            from_=None if step.from_ is None else ranks[step.from_],
            recv=everything if step.recv else (),
            reduce=step.reduce,
        )
        for step in steps
    )


def _on_shares(step: Step, leaders: Sequence[int], size: int) -> Step:
    """Return a ring's step among the leaders, each of its chunks a share of the `size` chunks."""
    assert step.to is not None and step.from_ is not None
    send, recv = (part(size, len(leaders), chunks[0]) for chunks in (step.send, step.recv))
    return Step(leaders[step.to], send, leaders[step.from_], recv, step.reduce)
