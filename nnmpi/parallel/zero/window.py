"""Sums and copies without messages, where all ranks are on one node: everybody reads everybody's arrays.

                   part 0      part 1      part 2
rank 0's scratch | a0        | a1        | a2        |       barrier: the unit's gradients are final
rank 1's scratch | b0        | b1        | b2        |       rank r adds up column r, block by block,
rank 2's scratch | c0        | c1        | c2        |         into its own gradients
                   to rank 0   to rank 1   to rank 2         barrier: scratch may be written again
"""

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.comm.node import SharedMemory
from nnmpi.shard import split

BLOCK_BYTES = 256 * 2**10  # what is summed at a time, see `comm.shared_sum`


class NodeArrays:
    """Memory that the ranks of one node share: sums and copies without messages. Making one is collective.

    Args:
        group: the ranks, all on one node.
        longest_bytes: the longest range that this rank adds up.

    Attributes:
        memory: where arrays are made.
        barrier: of the ranks.
        everyones: all ranks' whole arrays, by array and rank: of parameters (none if they stand once), and gradients.
    """

    def __init__(self, group: Group, longest_bytes: int) -> None:
        self.memory = SharedMemory(group)
        self._first = self.memory.allocations
        self.barrier = self.memory.barrier_of(0)
        self.everyones: tuple[list[list[Array]], list[list[Array]]] = ([], [])
        self._block = np.empty(min(BLOCK_BYTES, longest_bytes), np.uint8)

    def sum(self, i: int, own: range, place: Array, replaces: bool) -> None:
        """Add up all ranks' gradients in a range, in rank order and block by block, so that a block stays in the cache.

        The sum is made in its place, unless it is added to what is there, or lies among what is summed (stage 1).

        Args:
            i: of which array.
            own: the range.
            place: where the sum is written, or added.
            replaces: whether it is written.
        """
        first, second, *others = (whole[own.start : own.stop] for whole in self.everyones[1][i])
        block = self._block.view(place.dtype)
        direct = replaces and not np.may_share_memory(place, self.everyones[1][i][self.memory.rank])
        for start in range(0, len(own), len(block) or 1):
            part_of = slice(start, min(start + len(block), len(own)))
            into = place[part_of]
            total = into if direct else block[: len(into)]
            np.add(first[part_of], second[part_of], out=total)
            for other in others:
                np.add(total, other[part_of], out=total)
            if not replaces:
                np.add(into, total, out=into)
            elif not direct:
                into[...] = total

    def gather(self, i: int, whole: Array) -> None:
        """Copy the other ranks' parts of an array."""
        for rank, (chunk, theirs) in enumerate(
            zip(split(len(whole), self.memory.size), self.everyones[0][i], strict=True)
        ):
            if rank != self.memory.rank:
                whole[chunk.start : chunk.stop] = theirs[chunk.start : chunk.stop]

    @property
    def nbytes(self) -> int:
        """The bytes that a rank has for itself to sum with."""
        return int(self._block.nbytes)

    def free(self) -> None:
        """Give the memory back; nobody may use its arrays any more. Collective."""
        self.everyones = ([], [])
        self.memory.barrier()
        self.memory.drop_allocations(range(self._first, self.memory.allocations))
        self.memory.close()
