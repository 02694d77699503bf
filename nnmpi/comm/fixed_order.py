"""Sums in a fixed order: the same bits on any number of ranks.

The summands, called leaves, are numbered 0..n-1 (in training: the microbatches of a step). They are
added in a binary tree. Block (level, i) covers the existing leaves from i * 2^level up to
(i + 1) * 2^level:

    level 3   [0    1    2    3    4]  (0-3) + 4
    level 2   [0    1    2    3]  [4]  (0-1) + (2-3)
    level 1   [0    1]  [2    3]  [4]  0 + 1      2 + 3
    level 0   [0]  [1]  [2]  [3]  [4]  nothing is added to 4 below level 3: its neighbour is missing

Floating-point sums depend on their order, but this order depends on n alone. A rank first adds its
own leaves as far as possible: with leaves 0-2 it has blocks (0-1) and (2). The rest is added as in
a reduce-scatter: rank r receives chunk r of every rank's blocks, adds them, and sends the complete
chunk to all.

Cost with N ranks, B blocks on the rank that has most, M bytes, latency alpha, time per byte beta,
per added byte gamma:

    2 N alpha  +  (B + 1) (N-1)/N M beta  +  B M gamma

With consecutive leaves on each rank B is at most 2 log2 n, and 1 if they make up a block. A sum
from left to right would also have fixed bits. But then a rank could not start before it had
received the sum of all earlier leaves; in the tree it adds most of its leaves by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TypeAlias

import numpy as np

from nnmpi.base.errors import CommError, UsageError, check_int, name_ranks
from nnmpi.base.shard import split
from nnmpi.comm.agreement import refuse_different
from nnmpi.comm.buffers import CommBuffer, check_buffer
from nnmpi.comm.group import Group

# Bytes of one round of the exchange: long enough to make latency small, short enough for a cache.
ROUND_BYTES = 4 * 2**20


TreeBlock: TypeAlias = tuple[int, int]
"""A node of the tree, (level, index): up to 2^level leaves, beginning at index * 2^level."""


def covered(block: TreeBlock, leaves: int) -> range:
    """Return the leaves of a block in a tree of this many."""
    level, index = block
    return range(index << level, min((index + 1) << level, leaves))


class SumTree:
    """One rank's part of a sum tree: the complete blocks among the leaves pushed so far.

    Leaves may come in any order. Pushed in ascending order they need at most log2(leaves) + 1
    arrays.

    Args:
        leaves: their number on all ranks together.

    Attributes:
        leaves: as given.

    Raises:
        UsageError: for less than one leaf.
    """

    def __init__(self, leaves: int) -> None:
        self.leaves = check_int("a sum's leaves", leaves)
        self._blocks: dict[TreeBlock, CommBuffer] = {}

    @property
    def blocks(self) -> dict[TreeBlock, CommBuffer]:
        """The sums so far, in the order of their leaves; read-only, valid until the next push."""
        return dict(
            sorted(self._blocks.items(), key=lambda item: covered(item[0], self.leaves).start)
        )

    def push(self, leaf: int, array: CommBuffer) -> None:
        """Add a leaf.

        Args:
            leaf: its number, 0..leaves-1.
            array: (n,) of the same length and dtype for all leaves. It may be read-only or have
                gaps; the tree keeps no reference to it.

        Raises:
            UsageError: for a leaf outside the tree, or one pushed before.
        """
        if not 0 <= leaf < self.leaves:
            raise UsageError(f"leaf {leaf} is not one of 0..{self.leaves - 1}")
        if any(leaf in covered(block, self.leaves) for block in self._blocks):
            raise UsageError(
                f"leaf {leaf} was already pushed; push each leaf once, and make a new tree for"
                " another sum"
            )
        _insert(self._blocks, self.leaves, (0, leaf), array, owned=False)


def sum_in_fixed_order(group: Group, tree: SumTree, out: CommBuffer) -> None:
    """Write the sum of all leaves into `out`, with the same bits as if one rank had pushed all.

    Collective. The trees do not change.

    Args:
        group: the ranks; each leaf is on one of them, and a rank may have none.
        tree: this rank's tree, with the same number of leaves on all ranks.
        out: (n,) of the leaves' length and dtype.

    Raises:
        CommError: on all ranks, when a leaf is missing or on two ranks, or the ranks' trees or
            arrays differ.
        ShapeError: for an array that is not 1-D, contiguous and writeable.
    """
    check_buffer(out)
    local = tree.blocks
    by_rank = _compare(group, tree, local, out)
    most = max(len(blocks) for blocks in by_rank)
    # at least an element per rank and round, except in the last round
    length = max(ROUND_BYTES // (most * out.itemsize), group.size)
    for start in range(0, out.size, length):
        full = slice(start, min(start + length, out.size))
        _sum_round(
            group,
            {block: array[full] for block, array in local.items()},
            by_rank,
            tree.leaves,
            out[full],
        )


def _sum_round(
    group: Group,
    blocks: Mapping[TreeBlock, CommBuffer],
    by_rank: list[list[TreeBlock]],
    leaves: int,
    out: CommBuffer,
) -> None:
    """Sum one piece of the arrays, short enough for one message."""
    chunks = split(out.size, group.size)
    local = np.array(list(blocks.values()), out.dtype).reshape(len(blocks), out.size)
    received = group.all_to_all_v(
        [local[:, chunk.start : chunk.stop] for chunk in chunks],
        [(len(theirs), len(chunks[group.rank])) for theirs in by_rank],
        check=False,
    )
    sums: dict[TreeBlock, CommBuffer] = {}
    for block, array in zip(chain(*by_rank), chain(*received), strict=True):
        _insert(sums, leaves, block, array, owned=True)
    (total,) = sums.values()
    group.comm.allgatherv(total, out, [len(chunk) for chunk in chunks])


def _insert(
    blocks: dict[TreeBlock, CommBuffer],
    leaves: int,
    block: TreeBlock,
    array: CommBuffer,
    owned: bool,
) -> None:
    """Insert a block; while its sibling is present, merge both into their parent.

    The sum is written into the sibling, left or right: a + b and b + a have the same bits. An array
    that is not `owned` by the blocks is copied before it is kept.
    """
    level, index = block
    while level < (leaves - 1).bit_length():
        sibling = level, index ^ 1
        if covered(sibling, leaves):
            other = blocks.pop(sibling, None)
            if other is None:
                break
            other += array
            array, owned = other, True
        level, index = level + 1, index // 2
    blocks[level, index] = array if owned else array.copy()


def _compare(
    group: Group, tree: SumTree, local: Mapping[TreeBlock, CommBuffer], out: CommBuffer
) -> list[list[TreeBlock]]:
    """Return every rank's blocks, after a check that together they hold each leaf exactly once.

    Also refuses trees or results that differ in size or dtype. Collective.
    """
    about = f"{tree.leaves} leaves and a result of {out.size} {out.dtype}"
    # one collective for the check and the blocks, as every sum pays its latency
    gathered = group.gather([about, list(local)])
    remedy = (
        "give leaves and result of one length and dtype, and the same number of leaves, on all"
        " ranks"
    )
    refuse_different([[text] for text, _ in gathered], "the ranks' sums differ", remedy)
    by_rank = [[(level, index) for level, index in blocks] for _, blocks in gathered]
    leaves = [
        {leaf for block in blocks for leaf in covered(block, tree.leaves)} for blocks in by_rank
    ]
    for leaf in range(tree.leaves):
        ranks = [rank for rank, pushed in enumerate(leaves) if leaf in pushed]
        if len(ranks) != 1:
            where = f"was pushed on {name_ranks(ranks)}" if ranks else "was pushed on no rank"
            raise CommError(f"leaf {leaf} of {tree.leaves} {where}; push each leaf on one rank")
    return by_rank
