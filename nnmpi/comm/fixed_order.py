"""Sums in a fixed order: the same bits on any number of ranks.

The summands, called leaves, are numbered 0..n-1 (in training: the microbatches of a step). They are
added in a binary tree in which block (level, i) covers the leaves from i * 2^level up to (i + 1) *
2^level, as far as there are any:

    level 3   [0    1    2    3    4]  (0-3) + 4
    level 2   [0    1    2    3]  [4]  (0-1) + (2-3)
    level 1   [0    1]  [2    3]  [4]  0 + 1      2 + 3
    level 0   [0]  [1]  [2]  [3]  [4]  nothing is added to 4 below level 3: its neighbour is missing

Floating-point sums depend on their order, but this order depends on n alone. A rank adds what it
can on its own: with leaves 0-2 it keeps blocks (0-1) and (2). The rest is added where the other
blocks come: as in a reduce-scatter, rank r gets chunk r of every rank's blocks, adds them, and
gives the finished chunk to all.

Cost with N ranks, B blocks on the rank that has most, M bytes, latency alpha, time per byte beta,
per added byte gamma:

    2 N alpha  +  (B + 1) (N-1)/N M beta  +  B M gamma

With each rank's leaves in one run B is at most 2 log2 n, and 1 where the runs are blocks. The sum
is a tree rather than a row since then a rank with a run of leaves can add most of them before it
hears of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TypeAlias

import numpy as np

from nnmpi.comm.agreement import refuse_different
from nnmpi.comm.buffers import Buffer, check_buffer
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import send_and_receive
from nnmpi.errors import CommError, UsageError, name_ranks
from nnmpi.shard import split

# What one round of the exchange packs at most: enough to make latency small, little enough to stay
# in a cache.
ROUND_BYTES = 4 * 2**20


TreeBlock: TypeAlias = tuple[int, int]
"""A node of the tree, (level, index): 2^level leaves from index * 2^level on, or as many of them as
there are.
"""


def covered(block: TreeBlock, leaves: int) -> range:
    """Return the leaves of a block in a tree of this many."""
    level, index = block
    return range(index << level, min((index + 1) << level, leaves))


class SumTree:
    """One rank's part of a sum tree: the complete blocks among the leaves pushed so far.

    Leaves may come in any order. In their own order at most log2(leaves) + 1 arrays are kept.

    Args:
        leaves: how many there are on all ranks together.

    Attributes:
        leaves: the same.

    Raises:
        UsageError: for less than one leaf.
    """

    def __init__(self, leaves: int) -> None:
        if leaves < 1:
            raise UsageError(f"a sum of {leaves} leaves is nothing; give at least 1")
        self.leaves = leaves
        self._blocks: dict[TreeBlock, Buffer] = {}

    @property
    def blocks(self) -> dict[TreeBlock, Buffer]:
        """The sums so far, in the order of their leaves; only to be read, until the next push."""
        return dict(
            sorted(self._blocks.items(), key=lambda item: covered(item[0], self.leaves).start)
        )

    def push(self, leaf: int, array: Buffer) -> None:
        """Add a leaf.

        Args:
            leaf: its number, 0..leaves-1.
            array: (n,) of the same length and dtype for all leaves. It may be read-only or have
                gaps; it is copied or added, and not kept.

        Raises:
            UsageError: for a leaf that is not in the tree, or was pushed before.
        """
        if not 0 <= leaf < self.leaves:
            raise UsageError(f"leaf {leaf} is not one of 0..{self.leaves - 1}")
        if any(leaf in covered(block, self.leaves) for block in self._blocks):
            raise UsageError(
                f"leaf {leaf} was pushed before; push each leaf once, and make a tree for"
                " another sum"
            )
        _settle(self._blocks, self.leaves, (0, leaf), array, is_own=False)


def sum_in_fixed_order(group: Group, tree: SumTree, out: Buffer) -> None:
    """Write the sum of all leaves into `out`, with the bits of one rank that pushed them all.

    Collective. The trees stay as they are.

    Args:
        group: the ranks that have the leaves, each leaf on one of them; a rank may have none.
        tree: this rank's leaves, out of the same number on all ranks.
        out: (n,) of the leaves' length and dtype.

    Raises:
        CommError: on all ranks, when a leaf is missing or on two ranks, or the ranks' trees or
            arrays differ.
        ShapeError: for an array that is not 1-D, contiguous and writeable.
    """
    check_buffer(out)
    mine = tree.blocks
    everyones = _compare(group, tree, mine, out)
    most = max(len(blocks) for blocks in everyones)
    length = max(ROUND_BYTES // (most * out.itemsize), group.size)
    for start in range(0, out.size, length):
        full = slice(start, min(start + length, out.size))
        _sum_round(
            group,
            {block: array[full] for block, array in mine.items()},
            everyones,
            tree.leaves,
            out[full],
        )


def _sum_round(
    group: Group,
    mine: Mapping[TreeBlock, Buffer],
    everyones: list[list[TreeBlock]],
    leaves: int,
    out: Buffer,
) -> None:
    """Sum one piece of the arrays, short enough for one message."""
    chunks = split(out.size, group.size)
    local = chunks[group.rank]
    came = [np.empty((len(blocks), len(local)), out.dtype) for blocks in everyones]
    for array, place in zip(mine.values(), came[group.rank], strict=True):
        place[...] = array[local.start : local.stop]
    others = [(rank, chunk) for rank, chunk in enumerate(chunks) if rank != group.rank]
    sent = [
        (r, np.stack([array[chunk.start : chunk.stop] for array in mine.values()]))
        for r, chunk in others
        if mine
    ]
    send_and_receive(
        group,
        [item for item in sent if item[1].size],
        [(r, came[r]) for r, _ in others if came[r].size],
    )
    sums: dict[TreeBlock, Buffer] = {}
    for block, array in zip(chain(*everyones), chain(*came), strict=True):
        _settle(sums, leaves, block, array, is_own=True)
    (finished,) = sums.values()
    group.comm.allgatherv(finished, out, [len(chunk) for chunk in chunks])


def _settle(
    blocks: dict[TreeBlock, Buffer], leaves: int, block: TreeBlock, array: Buffer, is_own: bool
) -> None:
    """Put a block among the others and join it with its sibling as long as that is there.

    The sum of two is written into the one that was there, whichever of the two is the left one: a +
    b and b + a have the same bits. An array that is not the tree's own is copied before it is kept.
    """
    level, index = block
    while level < (leaves - 1).bit_length():
        sibling = level, index ^ 1
        if covered(sibling, leaves):
            other = blocks.pop(sibling, None)
            if other is None:
                break
            other += array
            array, is_own = other, True
        level, index = level + 1, index // 2
    blocks[level, index] = array if is_own else array.copy()


def _compare(
    group: Group, tree: SumTree, mine: Mapping[TreeBlock, Buffer], out: Buffer
) -> list[list[TreeBlock]]:
    """Return every rank's blocks, after a look whether they make up one tree of arrays like `out`;
    collective.
    """
    about = f"{tree.leaves} leaves and a result of {out.size} {out.dtype}"
    # one exchange for both, as this is done for every sum
    gathered = group.gather([about, list(mine)])
    remedy = (
        "give leaves and result of one length and dtype, and the same number of leaves, on all"
        " ranks"
    )
    refuse_different([[text] for text, _ in gathered], "the ranks' sums differ", remedy)
    everyones = [[(level, index) for level, index in blocks] for _, blocks in gathered]
    leaves = [
        {leaf for block in blocks for leaf in covered(block, tree.leaves)} for blocks in everyones
    ]
    for leaf in range(tree.leaves):
        ranks = [rank for rank, theirs in enumerate(leaves) if leaf in theirs]
        if len(ranks) != 1:
            where = f"was pushed on {name_ranks(ranks)}" if ranks else "was pushed on no rank"
            raise CommError(f"leaf {leaf} of {tree.leaves} {where}; push each leaf on one rank")
    return everyones
