"""Sums inside a node without messages: each rank sums its slice of all ranks' arrays.

                  slice 0     slice 1     slice 2
    rank 0      | a0        | a1        | a2        |     barrier: all arrays are final
    rank 1      | b0        | b1        | b2        |     rank r adds column r, block by block, and
    rank 2      | c0        | c1        | c2        |       uses the sum while it is in its cache
                  by rank 0   by rank 1   by rank 2       barrier: all columns are done

The users differ in what they do with a sum. `SharedSum` copies it to all arrays, `parallel.fused`
updates the slice's parameters with it, `parallel.zero` keeps it at the slice's owner. Sums are
taken in rank order, so all ranks have the same bits.

Each byte of a shared all-reduce is read once and written once: 2 M bytes per rank. A ring touches
4 (N-1)/N M bytes and sends 2 (N-1) messages. With several nodes the sum of each node goes into its
leader's array, the leaders sum theirs with the steps of a ring, and the ranks copy:

    node sum -> leader   |   leaders: ring   |   every rank copies its leader's array

The arrays must lie in the shared memory (`SharedMemory.allocate`), at equal offsets on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

import nnmpi.base.shard as shard
from nnmpi.base.errors import DeviceError
from nnmpi.comm.agreement import refuse_different
from nnmpi.comm.algorithms.ring import ring
from nnmpi.comm.buffers import CommBuffer, check_buffer
from nnmpi.comm.execution import Execution, PendingStage, Stages
from nnmpi.comm.node import LINE_BYTES, SharedMemory

# The blocks of all ranks' arrays together should fit a core's cache; but blocks below the least
# cost more in calls than the cache saves. Measured microseconds for 4 MB (Zen 4, 1 MiB L2, buffers
# refilled):
#
#     block, KiB             64    128    256
#     2 ranks, Open MPI     232    132    110
#     2 ranks, MPICH        340    251    231
#     4 ranks, Open MPI    1278   1002   1227
#     4 ranks, MPICH       1328   1061   1222
CACHED_BYTES = 512 * 1024
LEAST_BLOCK_BYTES = 128 * 1024


class NodeSum:
    """Sums this rank's slices of the arrays of a node's ranks. Collective to make.

    Args:
        arrays: this rank's arrays, each (n,), in the memory.
        memory: the memory of the group's nodes.
        tag: of its barrier, see `SharedMemory.barrier_of`.
        owns: the slice of each array that this rank sums; `own_slice` by default.
        totals: arrays for the sums, as long as the slices; by default the first rank's slices.
        block_bytes: bytes of each array that are added at a time; by default to fit a cache.

    Attributes:
        memory, owns: as given.
        barrier: to be crossed when all arrays are final, and when all sums are done.
        totals: the arrays of the sums.
    """

    def __init__(
        self,
        arrays: Sequence[CommBuffer],
        memory: SharedMemory,
        tag: int = 0,
        owns: Sequence[slice] | None = None,
        totals: Sequence[CommBuffer] | None = None,
        block_bytes: int | None = None,
    ) -> None:
        size = memory.size
        self.memory, self.barrier = memory, memory.barrier_of(tag)
        self.owns = (
            [own_slice(array, size, memory.rank) for array in arrays]
            if owns is None
            else list(owns)
        )
        by_array = [memory.parts(array) if size > 1 else [array] for array in arrays]
        columns = [
            [array[owned] for array in ranks]
            for ranks, owned in zip(by_array, self.owns, strict=True)
        ]
        self.totals = [parts[0] for parts in columns] if totals is None else list(totals)
        limit = max(CACHED_BYTES // size, LEAST_BLOCK_BYTES) if block_bytes is None else block_bytes
        self._room, self._blocks = np.empty(0), []
        for total, parts in zip(self.totals, columns, strict=True):
            summands = parts if totals is None else [total, *parts]
            self._blocks.append(list(_blocks(summands, max(1, limit // total.itemsize))))

    def sums(
        self, i: int, replace: bool = False
    ) -> Iterator[tuple[CommBuffer, Sequence[CommBuffer]]]:
        """Sum array i in place; yield each block's sum and addends while they are in the cache.

        Args:
            i: its number.
            replace: whether to overwrite the old values of `totals` instead of adding to them; only
                with `totals` given, which may be this rank's slices then.
        """
        add = np.add
        for total, parts in self._blocks[i]:
            so_far, rest = (parts[0], parts[1:]) if replace else (total, parts)
            # the total is written last if it may be one of the parts
            partial = self._scratch(total) if replace and len(rest) > 1 else total
            for part in rest[:-1]:
                add(so_far, part, partial)
                so_far = partial
            for part in rest[-1:]:
                add(so_far, part, total)
            yield total, parts

    def _scratch(self, like: CommBuffer) -> CommBuffer:
        """Return room for a block's partial sums."""
        if self._room.size < like.size or self._room.dtype != like.dtype:
            self._room = np.empty(like.size, like.dtype)
        return self._room[: like.size]


class SharedSum(Stages):
    """An array's sum over a group, through each node's memory. Collective to make.

    It has the methods of `Execution`. Several with different tags may be in flight at once, started
    and polled in any order.

    Args:
        array: (n,) the buffer, summed in place; it may be a slice of an allocated one, also empty.
        memory: the memory of the group's nodes.
        tag: 0..32767, the same on all ranks.

    Raises:
        ShapeError, DtypeError: see `check_buffer`.
        CommError: on all ranks, when their arrays differ in length or dtype.
        DeviceError: on all ranks, when one of their arrays was not allocated in the shared memory.
    """

    def __init__(self, array: CommBuffer, memory: SharedMemory, tag: int = 0) -> None:
        stages: list[PendingStage] = [memory.check_open]
        if _is_to_add(check_buffer(array), memory):
            stages += _stages(array, memory, tag, NodeSum([array], memory, tag))
        super().__init__(stages, f"the shared sum with tag {tag}")


def _stages(
    array: CommBuffer, memory: SharedMemory, tag: int, node: NodeSum
) -> Iterator[PendingStage]:
    across = memory.across
    leaders = array if memory.size == 1 else memory.parts(array)[0]

    def add() -> None:
        for total, others in node.sums(0):
            if across is None:
                for other in others:
                    other[...] = total  # the call takes a third of np.copyto's

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


def own_slice(array: CommBuffer, size: int, rank: int) -> slice:
    """Return the slice of an array that one rank sums, at multiples of 64 bytes.

    Whole cache lines: two ranks that write one line would pass it to and fro (false sharing).

    Args:
        array: (n,) the array.
        size: number of ranks.
        rank: the owner of the slice.
    """
    step = LINE_BYTES // array.itemsize
    units = shard.part(-(-array.size // step), size, rank)
    return slice(min(units.start * step, array.size), min(units.stop * step, array.size))


def _blocks(
    parts: Sequence[CommBuffer], limit: int
) -> Iterator[tuple[CommBuffer, tuple[CommBuffer, ...]]]:
    """Yield (view of the first array, views of the others) of the same up to `limit` elements."""
    for start in range(0, parts[0].size, limit):
        yield (
            parts[0][start : start + limit],
            tuple(part[start : start + limit] for part in parts[1:]),
        )


def _is_to_add(array: CommBuffer, memory: SharedMemory) -> bool:
    """Return whether there is anything to add; refuse arrays that differ in length or offset."""
    location = memory.locate(array)
    where = location and list(location)
    by_rank = memory.group.gather([array.size, array.dtype.name, where])
    described = [[f"{size} elements of {dtype}"] for size, dtype, _ in by_rank]
    refuse_different(
        described, "the ranks would sum different arrays", "give all the same length and dtype"
    )
    if array.size == 0 or len(by_rank) == 1:
        return False
    if len(set(memory.node_of)) == len(by_rank):
        # a rank on each node: none reads another's array
        return True
    if any(other != where or other is None for _, _, other in by_rank):
        raise DeviceError(
            "an array summed through shared memory must be there, at the same offset on all ranks;"
            " allocate it with group.memory().allocate(), or sum it with native"
        )
    return True
