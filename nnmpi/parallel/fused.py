"""The update fused into the sum of gradients: parameters stand once per node, each rank updates its slice of them.

                  slice 0     slice 1     slice 2
    gradients   | a0        | a1        | a2        |  rank 0's own      barrier: all gradients are final
                | b0        | b1        | b2        |  rank 1's own      rank r adds up column r, block by block, and
                | c0        | c1        | c2        |  rank 2's own        updates the parameters there from it
    parameters  | w0        | w1        | w2        |  of all            barrier: all parameters are new
    state       | m0        | m1        | m2        |  of all
                  by rank 0   by rank 1   by rank 2

Each rank uses the sum of its slice right where it computed it, while it is in the cache, and does not send it to the
other ranks. So it updates only its slice of the parameters, and needs only its slice of the optimizer's state. The new
parameters are, bit for bit, those of a shared-memory all-reduce (`comm.shared_sum`) and an ordinary update.

Clipping and the check for divergence need the length of the gradient before the update. Then it takes two passes:
`reduce`, then `update`. `reduce` also adds up a few numbers, such as the loss, which need no message of their own. Over
several nodes, the ranks with the same number on their nodes add up their slices in between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from nnmpi import clock
from nnmpi.backend.array import Array
from nnmpi.comm.algorithms.ring import ring
from nnmpi.comm.execution import Execution
from nnmpi.comm.group import Group
from nnmpi.comm.node import SharedMemory
from nnmpi.comm.shared_sum import own_slice
from nnmpi.errors import DeviceError, LayoutError, NnmpiError, UsageError
from nnmpi.nn.module import Module
from nnmpi.optim.blocks import BufferBlock, pieces
from nnmpi.optim.clip import scale, sum_of_squares, trusted
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.replication import check_same_model
from nnmpi.tensor.parameter import FlatStorage

# Measured with 2 ranks (Zen 4, 1 MiB L2, Open MPI | MPICH, SGD, buffers refilled, microseconds for 4 MB): blocks of 128
# and 256 KiB take 411, 323 | 471, 367.
BLOCK_BYTES = 256 * 1024
NUMBERS = 8  # a sum of squares, and up to 7 numbers of the caller's


def attach_shared_parameters(storage: FlatStorage, memory: SharedMemory) -> None:
    """Move a model's parameters to arrays that its node has once, and its gradients to shared ones. Collective.

    The parameters become those of the node's first rank.

    Raises:
        UsageError: for a model that is not in host memory.
        DeviceError: on all ranks, when there is no room for it.
    """
    if not all(isinstance(array, np.ndarray) for array in storage.data):
        raise UsageError("a fused update works on arrays in host memory; use the NumPy backend, or leave it out")
    data = memory.common_all((array.size, array.dtype) for array in storage.data)
    grads = [memory.allocate(array.size, array.dtype) for array in storage.grads]
    if memory.rank == 0:
        for new, old in zip(data, storage.data, strict=True):
            new[...] = old
    memory.barrier()
    storage.move(data, grads)
    storage.common = True


def detach_shared_parameters(storage: FlatStorage, optimizer: Optimizer, memory: SharedMemory) -> None:
    """Move a model and its optimizer's state back to memory that each rank has for itself. Collective.

    Args:
        storage: the model's.
        optimizer: of that storage.
        memory: the one that `attach_shared_parameters` was given.
    """
    data = [array.copy() for array in storage.data]
    storage.move(data, [np.zeros_like(array) for array in storage.grads])
    storage.common = False
    optimizer.move(np.zeros)
    memory.barrier()  # nobody may write where others still read


class FusedUpdate:
    """Sums gradients over the ranks and updates parameters in one go. Making one, and all it does, is collective.

    Args:
        optimizer: over 1-D buffers that stand once per node (`SharedMemory.common`), with gradients that each rank
            has for itself (`SharedMemory.allocate`); see `attach_shared_parameters`. Its state is moved to memory of
            the node.
        memory: of the group whose ranks take part.
        tag: of its barrier, see `SharedMemory.barrier_of`.
        block_bytes: how much of each buffer is summed and updated at a time.

    Attributes:
        waited_s: how long this rank waited for the others at the end of the last `update`.

    Raises:
        UsageError: for gradients that do not lie in the memory.
        LayoutError: on all ranks, for several nodes with different numbers of ranks.
        DeviceError: on all ranks, when there is no room for the optimizer's state.
    """

    def __init__(
        self, optimizer: Optimizer, memory: SharedMemory, tag: int = 0, block_bytes: int = BLOCK_BYTES
    ) -> None:
        storage = optimizer.storage
        if not all(memory.holds(grad) for grad in storage.grads):
            raise UsageError(
                "a fused update needs gradients in shared memory; move the model there first: "
                "attach_shared_parameters()"
            )
        _check_nodes(memory)
        slots = [array for arrays in optimizer.slots().values() for array in arrays]
        numbers, *places = memory.common_all(
            [(memory.size * NUMBERS, np.float64), *((array.size, array.dtype) for array in slots)]
        )  # all in one allocation: making one takes the ranks longer than filling it
        following = iter(places)
        optimizer.move(lambda *_: next(following))
        memory.barrier()  # every rank copies its state there; nobody may write before the last has
        self.optimizer, self._memory = optimizer, memory
        self._own = [own_slice(data, memory.size, memory.rank) for data in storage.data]
        self._parts = [memory.parts(grad) for grad in storage.grads]
        self._sums = [parts[0][own] for parts, own in zip(self._parts, self._own, strict=True)]
        self._blocks, self._others = self._cut(block_bytes)
        # `update` may overwrite its gradients: nothing reads them afterwards.
        self._spent = tuple(replace(block, is_spent=True) for block in self._blocks)
        self._passes = _passes(self._blocks, self._others)
        self._across = self._bind_across(tag)
        # One cache line for each rank, which writes it alone; all ranks read all of them after a barrier.
        self._numbers = numbers.reshape(memory.size, NUMBERS)
        self._barrier = memory.barrier_of(tag)
        self.waited_s = 0.0

    def step(self) -> None:
        """Do one update from the sum of all ranks' gradients, which hold anything afterwards.

        Raises:
            UsageError: see `Optimizer.step`.
            CommError: when another rank does not come in time.
        """
        self.optimizer.storage.finish_gradients()
        self._barrier.run()
        if self._across:
            self._add()
            self.optimizer.update(self._blocks, self._frozen())
        else:
            self.optimizer.update(self._adding(), self._frozen())
        self._barrier.run()

    def reduce(self, numbers: Sequence[float] = ()) -> tuple[float, list[float]]:
        """Add up the gradients of all ranks, and some numbers: the first half of an update.

        Args:
            numbers: at most 7.

        Returns:
            The length of the sum of the gradients, and the sums of the numbers; the same bits on all ranks. The blocks
            of the sum of squares are cut at other places than `optim.clip` cuts them, so the last bits of the length
            may differ from what it gives.

        Raises:
            CommError: when another rank does not come in time.
        """
        self.optimizer.storage.finish_gradients()
        # Columns 1.. are written before the first barrier and read before the second; column 0 is written between the
        # two and read after the second. So two barriers are enough: whoever writes columns 1.. for the next update has
        # passed the second one, before which all have read them, and column 0 waits for the next update's first.
        own, several = self._numbers[self._memory.rank], bool(self._across)
        own[1 : 1 + len(numbers)] = numbers
        self._barrier.run()  # all gradients are final
        if several:
            sums = self._memory.group.sum_floats(numbers)
        else:
            sums = self._numbers[:, 1 : 1 + len(numbers)].sum(0).tolist()
        own[0] = self._add()
        self._barrier.run()
        return sqrt(sum(self._numbers[:, 0].tolist())), sums

    def update(self, factor: float = 1.0) -> None:
        """Update the parameters from the gradients times a factor: the second half, after `reduce`.

        Raises:
            UsageError: see `Optimizer.step`.
            CommError: when another rank does not come in time.
        """
        scale(self._sums, factor)
        self.optimizer.update(self._spent, self._frozen())
        begin = clock.now()
        self._barrier.run()
        self.waited_s = clock.now() - begin

    def _add(self) -> float:
        """Add up this rank's slices of all gradients, into the first rank's; return the sum of their squares."""
        total, add = 0.0, np.add
        with np.errstate(over="ignore", invalid="ignore"):  # the caller sees it in the result, and acts on it
            for block, others in zip(self._blocks, self._others, strict=True):
                grad = block.grad
                for other in others:
                    add(grad, other, grad)
                total += float(grad.dot(grad))  # now, while the block is in the cache
        for execution in self._across:
            execution.run()
        return sum_of_squares(self._sums) if self._across or not trusted(total) else total

    def _adding(self) -> Iterator[BufferBlock]:
        """Yield this rank's blocks, each as soon as its gradients are added up, so that they are still in the cache."""
        add = np.add
        for block, pairs in self._passes:
            total = block.grad
            for first, second in pairs:
                add(first, second, total)
            yield block

    def _cut(self, limit_bytes: int) -> tuple[tuple[BufferBlock, ...], list[tuple[Array, ...]]]:
        """Return this rank's blocks, with the first rank's gradients, and the other ranks' gradients for each."""
        firsts, *others = zip(*self._parts, strict=True)
        first = self.optimizer.cut(self._own, firsts, limit_bytes)
        rest = [list(self._cut_grads(grads, limit_bytes)) for grads in others]
        return first, [tuple(grads[i] for grads in rest) for i in range(len(first))]

    def _cut_grads(self, grads: Sequence[Array], limit_bytes: int) -> Iterator[Array]:
        """Yield a rank's gradients for this rank's blocks."""
        for grad, own in zip(grads, self._own, strict=True):
            for (piece,) in pieces([grad[own]], max(1, limit_bytes // grad.dtype.itemsize)):
                yield piece

    def _bind_across(self, tag: int) -> list[Execution]:
        """Return the sums over the ranks that have this one's slices on the other nodes."""
        across = self._memory.across
        if across is None:
            return []
        steps = ring(across.rank, across.size)
        return [Execution(steps, own, across, tag) for own in self._sums]

    def _frozen(self) -> Sequence[Array]:
        """Return what of the frozen parameters this rank would update."""
        storage = self.optimizer.storage
        frozen = storage.frozen()
        return frozen and [
            part
            for array in frozen
            for data, own in zip(storage.data, self._own, strict=True)
            for part in _overlap(array, data[own])
        ]


def _check_nodes(memory: SharedMemory) -> None:
    counts = sorted({memory.node_of.count(node) for node in memory.node_of})
    if len(counts) > 1:
        raise LayoutError(
            f"a fused update over several nodes needs as many ranks on each, not {counts[0]} and {counts[-1]}; start "
            "as many on each, or update without it"
        )


def _passes(
    blocks: Sequence[BufferBlock], others: Sequence[Sequence[Array]]
) -> list[tuple[BufferBlock, list[tuple[Array, Array]]]]:
    """Return each block with the pairs of arrays that add up to its gradient.

    All blocks of one dtype get their sum in the same array, which so stays in the cache.

    Args:
        blocks: of the first rank's gradients.
        others: for each block the other ranks' gradients.
    """
    longest: dict[str, Array] = {}
    for block in blocks:
        kind = str(block.grad.dtype)
        if kind not in longest or longest[kind].size < block.grad.size:
            longest[kind] = np.empty(block.grad.size, block.grad.dtype)
    result = []
    for block, rest in zip(blocks, others, strict=True):
        total = longest[str(block.grad.dtype)][: block.grad.size] if rest else block.grad
        pairs = [(total if i else block.grad, other) for i, other in enumerate(rest)]
        result.append((replace(block, grad=total, is_spent=True), pairs))
    return result


def _overlap(array: Array, part: Array) -> Iterator[Array]:
    """Yield the view of a C-contiguous array that lies in `part`, if any of it does."""
    start = (part.ctypes.data - array.ctypes.data) // array.itemsize
    found = array.reshape(-1)[max(start, 0) : max(start + part.size, 0)]
    if found.size:
        yield found


@dataclass(frozen=True)
class SharedParameters:
    """A fused update and the shared memory that was taken for it."""

    fused: FusedUpdate
    storage: FlatStorage
    memory: SharedMemory
    allocations: range

    def release(self, model: Module, optimizer: Optimizer) -> None:
        """Give the model and the optimizer memory of their own, and the shared memory back. Collective."""
        detach_shared_parameters(self.storage, optimizer, self.memory)
        if model.storage is not self.storage:  # it was initialized again, and keeps its new values
            model.storage.move()
        self.memory.drop_allocations(self.allocations)
        self.memory.close()


def fusing_pays(model: Module, group: Group) -> bool:
    """Return whether a fused update is the quickest for replicas of a whole model. Collective.

    It is on one node. Between nodes the sum of gradients is better hidden under the backward pass. Measured on 2 cores
    of an Intel Xeon with AVX-512 and Open MPI 5.0.11, against a shared all-reduce and each rank's own update, SGD, time
    of a step: 0.92 (2 ranks) and 0.96 (4 ranks, two to a core) with 109 thousand parameters, 0.92 and 0.79 with 5.8
    million; against MPI's own all-reduce 0.94 and 0.86 with 403 parameters.
    """
    in_host_memory = all(isinstance(array, np.ndarray) for array in model.storage.data)
    return group.size > 1 and in_host_memory and len(set(group.nodes())) == 1


def fuse_update(model: Module, optimizer: Optimizer, group: Group) -> tuple[SharedParameters | None, str]:
    """Move the model and its optimizer to shared memory; return the fused update, or None and why there is none.

    Raises:
        CommError: on all ranks, when their models differ.
        LayoutError: on all ranks, see `FusedUpdate`; the model is then where it was.
    """
    check_same_model(group, model.storage)
    try:
        memory = SharedMemory(group)  # apart from the group's, which may stay when this one goes
    except DeviceError as error:
        return None, f"the update is not fused: {error}"
    first = memory.allocations
    try:
        attach_shared_parameters(model.storage, memory)
        fused = FusedUpdate(optimizer, memory)
    except NnmpiError as error:  # on all ranks
        if model.storage.common:
            detach_shared_parameters(model.storage, optimizer, memory)
        memory.drop_allocations(range(first, memory.allocations))
        memory.close()
        if not isinstance(error, DeviceError):
            raise
        return None, f"the update is not fused: {error}"
    return SharedParameters(fused, model.storage, memory, range(first, memory.allocations)), ""
