"""The update fused into the all-reduce: each rank updates its slice of the node's parameters.

                  slice 0   slice 1   slice 2
    gradients   | a0      | a1      | a2      |  rank 0's      barrier: all gradients are final
                | b0      | b1      | b2      |  rank 1's      rank r sums column r, block by block,
                | c0      | c1      | c2      |  rank 2's        and updates the parameters there
    parameters  | w0      | w1      | w2      |  of all        barrier: all parameters are new
    state       | m0      | m1      | m2      |  of all
                  by rank 0 by rank 1 by rank 2

Each rank uses the sum of its slice at once, while it is in the cache, and does not send it to the
other ranks. So it updates only its slice of the parameters, and needs only its slice of the
optimizer's state. The new parameters are, bit for bit, those of a shared-memory all-reduce
(`comm.node_sum`) and an ordinary update.

Clipping and the check for divergence need the gradient norm before the update, so there are two
calls: `reduce`, then `update`. `reduce` also sums a few numbers, such as the loss: they need no
message of their own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import sqrt
from typing import Any, ClassVar, Self

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.base.errors import NnmpiError, UsageError
from nnmpi.comm.algorithms.registry import SHARED
from nnmpi.comm.group import Group
from nnmpi.comm.node import SharedMemory
from nnmpi.comm.node_sum import NodeSum
from nnmpi.nn.module import Module
from nnmpi.optim.clip import scale, sum_of_squares, trusted
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.data import Replicas, StrategySetting
from nnmpi.parallel.replication import check_same_model
from nnmpi.tensor.parameter import FlatStorage

# Measured for 4 MB in microseconds, 2 ranks, Zen 4, 1 MiB L2, SGD, buffers refilled:
#   blocks of         128 KiB   256 KiB
#   Open MPI          411       323
#   MPICH             471       367
BLOCK_BYTES = 256 * 1024
NUMBERS = 8  # the sum of squares, and at most 7 numbers of the caller


class FusedUpdate:
    """Sums gradients and updates parameters in one pass. Collective throughout.

    The parameters and the optimizer's state move to arrays that exist once per node; the
    parameters become those of its first rank. Each rank's gradients move to arrays that the other
    ranks can read. `release` moves all of them back.

    Args:
        storage: the model's.
        optimizer: of that storage.
        group: the ranks, all on one node.
        memory: shared memory of these ranks, for this update alone; made by default.
        block_bytes: the length of the blocks that are summed at a time.

    Attributes:
        memory: the shared memory.

    Raises:
        UsageError: for a model that is not in host memory, and for ranks of several nodes.
        DeviceError: on all ranks, without room for the arrays; nothing was moved then.
        CommError: on all ranks, when their models differ.

    Example:
        >>> def program(group):
        ...     model = nn.Linear(3, 2).initialize(seed=0)
        ...     sgd = optim.SGD(model.storage, lr=0.1)
        ...     fused = nnmpi.parallel.FusedUpdate(model.storage, sgd, group)
        ...     x, y = np.ones((group.rank + 1, 3), "float32"), np.zeros(group.rank + 1, int)
        ...     ops.cross_entropy(model(x), y, reduction="sum").backward()
        ...     norm, (rows,) = fused.reduce([len(y)])
        ...     fused.update(1 / rows)  # the mean over all ranks' rows
        ...     fused.release()
        ...     return rows, round(norm / rows, 2)
        >>> nnmpi.simulate(program, 2)
        [(3.0, 2.05), (3.0, 2.05)]
    """

    def __init__(
        self,
        storage: FlatStorage,
        optimizer: Optimizer,
        group: Group,
        memory: SharedMemory | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        check_same_model(group, storage)
        if memory is None:  # not the group's, which may outlive this update
            memory = SharedMemory(group)
        slots = [array for arrays in optimizer.held_slots().values() for array in arrays]
        try:
            _check(storage, memory)
            numbers, *arrays = memory.common_all(
                [
                    (memory.size * NUMBERS, np.float64),
                    *((item.size, item.dtype) for item in [*storage.data, *slots]),
                ]
            )  # one allocation: a window takes the ranks longer to make than to fill
            grads = [memory.allocate(array.size, array.dtype) for array in storage.grads]
        except NnmpiError:
            memory.free()
            raise
        self.storage, self.optimizer, self.memory, self._group = storage, optimizer, memory, group
        data = arrays[: len(storage.data)]
        if memory.rank == 0:
            for new, old in zip(data, storage.data, strict=True):
                new[...] = old
        memory.barrier()
        storage.node_shared, storage.version.meet = True, memory.barrier
        storage.move(data, grads)
        following = iter(arrays[len(data) :])
        optimizer.move(lambda *_: next(following))
        memory.barrier()  # all ranks have copied their optimizer state before any rank updates it
        self._node = NodeSum(grads, memory, block_bytes=block_bytes)
        self._blocks = optimizer.cut(self._node.owns, [memory.parts(grad)[0] for grad in grads])
        # One cache line per rank, written by that rank alone; all ranks read all lines after a
        # barrier.
        self._numbers = numbers.reshape(memory.size, NUMBERS)

    def reduce(self, numbers: Sequence[float] = ()) -> tuple[float, list[float]]:
        """Sum the gradients and some numbers over all ranks: the first half of an update.

        Args:
            numbers: at most 7.

        Returns:
            The norm of the summed gradient, and the sums of the numbers; the same bits on all
            ranks. `optim.clip` cuts its blocks for the sum of squares at other offsets, so its norm
            may differ in the last bits.

        Raises:
            CommError: when another rank is missing for too long.
        """
        self.storage.finish_gradients()
        # Two barriers suffice. Columns 1.. are written before barrier 1 and read before barrier 2;
        # the next update writes them only after its ranks have passed barrier 2. Column 0 is
        # written between the barriers and read after barrier 2; the next update writes it only
        # after the next barrier 1.
        local, barrier = self._numbers[self.memory.rank], self._node.barrier
        local[1 : 1 + len(numbers)] = numbers
        barrier.run()  # all gradients are final
        sums = self._numbers[:, 1 : 1 + len(numbers)].sum(0).tolist()
        local[0] = self._add()
        barrier.run()
        return sqrt(sum(self._numbers[:, 0].tolist())), sums

    def update(self, factor: float = 1.0) -> None:
        """Update the parameters from the gradients times a factor: the second half, after `reduce`.

        Raises:
            UsageError: see `Optimizer.step`.
            CommError: when another rank is missing for too long.
        """
        scale(self._node.totals, factor)
        self.optimizer.update(self._blocks, self._frozen())
        self.storage.finish_update()
        with self._group.collective("other ranks"):
            self._node.barrier.run()

    def averaged(self) -> AbstractContextManager[None]:
        """Put the average of the parameters in their place within a block. Collective."""
        return self.optimizer.averaged(self._node.owns)

    def _add(self) -> float:
        """Sum this rank's slices into the node's gradients; return the sum of their squares."""
        total, node = 0.0, self._node
        with np.errstate(over="ignore", invalid="ignore"):
            # an overflow shows in the result, and the caller handles it
            for i in range(len(node.owns)):
                for grad, _ in node.sums(i):
                    total += float(grad.dot(grad))  # now, while the block is in the cache
        return total if trusted(total) else sum_of_squares(node.totals)

    def _frozen(self) -> list[tuple[int, slice]]:
        """Return the frozen parameters' ranges in this rank's slices."""
        owns = self._node.owns
        return [
            (buffer, slice(max(part.start, owns[buffer].start), min(part.stop, owns[buffer].stop)))
            for buffer, part in self.storage.frozen()
        ]

    def release(self) -> None:
        """Give model and optimizer private memory again, and free the shared memory. Collective."""
        storage, memory = self.storage, self.memory
        storage.check_weights("release()")
        data = [array.copy() for array in storage.data]
        storage.node_shared, storage.version.meet = False, int
        storage.move(data, [np.zeros_like(array) for array in storage.grads])
        self.optimizer.move(np.zeros)
        memory.barrier()  # no rank writes while another still reads
        memory.free()


class FusedReplicas(Replicas):
    """Replicas on one node whose sums are fused with the update.

    Args:
        model, group: see `Replicas`.
        optimizer: of the model.

    Raises:
        DeviceError: see `FusedUpdate`.
    """

    is_fused = True
    unused: ClassVar[str] = "the update is not fused"

    @classmethod
    def is_asked(cls, options: Any) -> bool:
        """See `Replicas.is_asked`."""
        return options.fused_update is True

    @classmethod
    def why_not(cls, setting: StrategySetting) -> str:
        """See `Replicas.why_not`. It is asked for, or pays and no option speaks against it."""
        options = setting.options
        if options.fused_update is False:
            return "fused_update is False"
        if options.fused_update is None and not options.leaves_choice:
            return "options choose how buckets are summed"
        if not setting.is_plain:
            return "it needs replicas of a full model, whose sums have no fixed order"
        if setting.model.storage.state_store is not None:
            return "the optimizer's state is out of memory"
        if setting.on_device:
            return "the weights are on a device, not in a node's shared memory"
        if not setting.optimizer.elementwise:
            kind = type(setting.optimizer).__name__
            return f"{kind} updates whole matrices, not a rank's part of them"
        if options.fused_update is None and not fusing_pays(setting.model, setting.world):
            return "it would not be faster"
        return ""

    @classmethod
    def made_for(cls, setting: StrategySetting) -> Self:
        """See `Replicas.made_for`.

        Raises:
            DeviceError: on all ranks, as a node may have no such memory.
        """
        return cls(setting.model, setting.group, setting.optimizer)

    def __init__(self, model: Module, group: Group, optimizer: Optimizer) -> None:
        self._fused = FusedUpdate(model.storage, optimizer, group)
        self.holders = self._fused.memory.size
        try:
            super().__init__(model, group)
        except NnmpiError:  # on all ranks
            self._fused.release()
            raise

    def meet(
        self, numbers: Sequence[float], group: Group, norm: Callable[[], float]
    ) -> tuple[list[float], float]:
        """See `Replicas.meet`; the numbers are summed with the gradients."""
        with group.collective("gradients"):
            length, sums = self._fused.reduce(numbers)
        # priced as a shared all-reduce, which writes more, and reads as much
        group.count_sum(sum(grad.nbytes for grad in self.storage.grads), SHARED)
        return sums, length

    def update(self, optimizer: Optimizer, factor: float | Array) -> None:
        """See `Replicas.update`."""
        self._fused.update(float(factor))
        self.storage.clear_gradients()  # what is left is no gradient

    def averaged(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """See `Replicas.averaged`."""
        return self._fused.averaged()

    def describe(self) -> str:
        """See `Replicas.describe`."""
        return "fused with the update, through shared memory"

    def release(self) -> None:
        """See `Replicas.release`."""
        if not self.released:
            super().release()
            self._fused.release()


def _check(storage: FlatStorage, memory: SharedMemory) -> None:
    if not all(isinstance(array, np.ndarray) for array in storage.data):
        raise UsageError(
            "a fused update works on arrays in host memory; use the NumPy backend, or leave it out"
        )
    if memory.across is not None:
        raise UsageError(
            "a fused update is for the ranks of one node; over several, sums overlap with the"
            " backward pass: leave it out"
        )


def fusing_pays(model: Module, group: Group) -> bool:
    """Return whether a fused update is the fastest for replicas of a full model. Collective.

    It is on one node. Between nodes the sum of gradients hides better under the backward pass.
    Measured step time with SGD, relative to a shared all-reduce and an update on each rank, on 2
    cores of an Intel Xeon with AVX-512, Open MPI 5.0.11 (4 ranks: two to a core):

        parameters    2 ranks   4 ranks
        109 thousand  0.92      0.96
        5.8 million   0.92      0.79

    Relative to MPI's own all-reduce, with 403 parameters, it is 0.94 (2 ranks) and 0.86 (4 ranks).
    """
    in_host_memory = all(isinstance(array, np.ndarray) for array in model.storage.data)
    return group.size > 1 and in_host_memory and group.on_one_node()
