"""Sums inside a node without messages: each rank sums its slice of all ranks' arrays.

                  slice 0     slice 1     slice 2
    rank 0's    | a0        | a1        | a2        |       barrier: all arrays are final
    rank 1's    | b0        | b1        | b2        |       rank r adds column r, block by block, and uses the sum
    rank 2's    | c0        | c1        | c2        |         while it is in its cache
                  by rank 0   by rank 1   by rank 2         barrier: all columns are done

What becomes of a sum is its user's: it is copied to all arrays (`SharedSum`), the slice's owner
updates the parameters there (`parallel.fused`), or keeps it (`parallel.zero`). The sum is taken in
rank order whoever takes it, so all ranks have the same bits.

Each byte of a shared all-reduce is read once and written once: 2 M bytes per rank. A ring touches 4
(N-1)/N M bytes and sends 2 (N-1) messages. With several nodes the sum of each goes into its
leader's array, the leaders add theirs up with the steps of a ring, and the ranks copy:

    node sum -> leader   |   leaders: ring   |   every rank copies its leader's array

The arrays must lie in the shared memory (`SharedMemory.allocate`), at the same place on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

import nnmpi.shard as shard
from nnmpi.comm.agreement import refuse_different
from nnmpi.comm.algorithms.ring import ring
from nnmpi.comm.buffers import Buffer, check_buffer
from nnmpi.comm.execution import Execution, Stage, Stages
from nnmpi.comm.node import LINE_BYTES, SharedMemory
from nnmpi.errors import DeviceError

# What is added at a time of all ranks' arrays together should lie in a core's cache, but shorter
# blocks than this cost more in calls than the cache saves. Measured (Zen 4, 1 MiB L2, Open MPI |
# MPICH, buffers refilled, microseconds for 4 MB): 2 ranks with blocks of 64, 128, 256 KiB 232, 132,
# 110 | 340, 251, 231; 4 ranks 1278, 1002, 1227 | 1328, 1061, 1222.
CACHED_BYTES = 512 * 1024
LEAST_BLOCK_BYTES = 128 * 1024


class NodeSum:
    """Sums this rank's slices of the arrays of a node's ranks. Collective to make.

    Args:
        arrays: this rank's, each (n,), in the memory.
        memory: of the group whose ranks take part.
        tag: of its barrier, see `SharedMemory.barrier_of`.
        owns: the slice of each array that this rank adds up; `own_slice` by default.
        places: where the sums go, as long as the slices; by default into the first rank's arrays.
        block_bytes: how much of each array is added at a time, if not what suits a cache.

    Attributes:
        memory, owns: as given.
        barrier: to be crossed when all arrays are final, and when all sums are done.
        places: where the sums go.
    """

    def __init__(
        self,
        arrays: Sequence[Buffer],
        memory: SharedMemory,
        tag: int = 0,
        owns: Sequence[slice] | None = None,
        places: Sequence[Buffer] | None = None,
        block_bytes: int | None = None,
    ) -> None:
        size = memory.size
        self.memory, self.barrier = memory, memory.barrier_of(tag)
        self.owns = (
            [own_slice(array, size, memory.rank) for array in arrays]
            if owns is None
            else list(owns)
        )
        everyones = [memory.parts(array) if size > 1 else [array] for array in arrays]
        seen = [
            [full[local] for full in wholes]
            for wholes, local in zip(everyones, self.owns, strict=True)
        ]
        self.places = [parts[0] for parts in seen] if places is None else list(places)
        suits = max(CACHED_BYTES // size, LEAST_BLOCK_BYTES) if block_bytes is None else block_bytes
        self._blocks = []
        for place, parts in zip(self.places, seen, strict=True):
            summands = parts if places is None else [place, *parts]
            self._blocks.append(list(_blocks(summands, max(1, suits // place.itemsize))))

    def sums(self, i: int, replace: bool = False) -> Iterator[tuple[Buffer, Sequence[Buffer]]]:
        """Sum array i in place; yield each block's sum and addends while they are in the cache.

        Args:
            i: its number.
            replace: whether the sum takes the place of what is there; not in the first rank's
                arrays.
        """
        add = np.add
        for total, parts in self._blocks[i]:
            so_far, rest = (parts[0], parts[1:]) if replace else (total, parts)
            for part in rest:
                add(so_far, part, total)
                so_far = total
            yield total, parts


class SharedSum(Stages):
    """An array's sum over a group, through each node's memory. Collective to make.

    It has the methods of `Execution`. Several may be in flight at once if their tags differ, and be
    started and polled in any order.

    Args:
        array: (n,) the buffer, summed in place; it may be a slice of an allocated one, of any
            length, 0 too.
        memory: of the group whose ranks take part.
        tag: 0..32767, the same on all ranks.

    Raises:
        ShapeError, DtypeError: see `check_buffer`.
        CommError: on all ranks, when their arrays differ in length or dtype.
        DeviceError: on all ranks, when one of their arrays was not allocated in the shared memory.
    """

    def __init__(self, array: Buffer, memory: SharedMemory, tag: int = 0) -> None:
        stages: list[Stage] = []
        if _is_to_add(check_buffer(array), memory):
            stages += _stages(array, memory, tag, NodeSum([array], memory, tag))
        super().__init__(stages, f"the shared sum with tag {tag}")


def _stages(array: Buffer, memory: SharedMemory, tag: int, node: NodeSum) -> Iterator[Stage]:
    across = memory.across
    leaders = array if memory.size == 1 else memory.parts(array)[0]

    def add() -> None:
        for total, others in node.sums(0):
            if across is None:
                for other in others:
                    other[...] = total  # a third of what the call of np.copyto takes

    def copy() -> None:
        array[...] = leaders

    yield node.barrier
    yield add
    yield node.barrier
    if across is not None:
        if memory.rank == 0:
            yield Execution(ring(across.rank, across.size), leaders, across, tag)
        yield node.barrier
        if memory.rank > 0:
            yield copy
        yield node.barrier


def own_slice(array: Buffer, size: int, rank: int) -> slice:
    """Return the slice of an array that one rank sums, at multiples of 64 bytes.

    Args:
        array: (n,) of the sum.
        size: the number of ranks that add up a part each.
        rank: the one in question.
    """
    step = LINE_BYTES // array.itemsize
    units = shard.part(-(-array.size // step), size, rank)
    return slice(min(units.start * step, array.size), min(units.stop * step, array.size))


def _blocks(parts: Sequence[Buffer], limit: int) -> Iterator[tuple[Buffer, tuple[Buffer, ...]]]:
    """Yield views of the same elements of each array, `limit` at a time: of the first one, and of
    the others.
    """
    for start in range(0, parts[0].size, limit):
        yield (
            parts[0][start : start + limit],
            tuple(part[start : start + limit] for part in parts[1:]),
        )


def _is_to_add(array: Buffer, memory: SharedMemory) -> bool:
    """Return whether there is anything to add; refuse ranks whose arrays differ, or lie at
    different places.
    """
    place = memory.place(array)
    where = place and list(place)
    everyones = memory.group.gather([array.size, array.dtype.name, where])
    described = [[f"{size} elements of {dtype}"] for size, dtype, _ in everyones]
    refuse_different(
        described, "the ranks would sum different arrays", "give all the same length and dtype"
    )
    if array.size == 0 or len(everyones) == 1:
        return False
    if len(set(memory.node_of)) == len(everyones):
        # a rank on each node: nobody has to see another's array
        return True
    if any(other != where or other is None for _, _, other in everyones):
        raise DeviceError(
            "an array to be summed through shared memory does not lie there, at one place on all"
            " ranks; make it with group.memory().allocate(), or sum it with native"
        )
    return True
