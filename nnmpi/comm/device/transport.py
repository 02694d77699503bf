"""How the device arrays of a group travel: which transport does a collective of one, and why.

staged     through page-locked host memory: any MPI, any algorithm; the default
direct     MPI is given the device's memory: where it is known to take it (see `cuda_aware`)
ipc        ranks of a node read one another's device memory; by name
nccl       NVIDIA's library, a rank for each card; by name
"""

from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.precision import is_low
from nnmpi.comm.algorithms.registry import AUTO, IPC, NATIVE, NCCL, SHARED, How
from nnmpi.comm.buffers import Buffer, as_bytes
from nnmpi.comm.choose import Choice, choose
from nnmpi.comm.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, ROOT
from nnmpi.comm.communicator import Communicator
from nnmpi.comm.device.coroutine import Awaited, CoroutineCollective, Widened
from nnmpi.comm.device.cuda_aware import Awareness, detect
from nnmpi.comm.device.ipc import IpcSum, ipc_problem
from nnmpi.comm.device.nccl import Nccl, NcclCollective
from nnmpi.comm.device.staged import PIECE_BYTES, Queue, SharedBlocks, Staged
from nnmpi.comm.execution import NativeExecution, Pending
from nnmpi.comm.fitting.fit import Fit
from nnmpi.comm.shared_memory.memory import SharedMemory
from nnmpi.comm.world import Comm
from nnmpi.errors import DeviceError, UsageError

Host = Callable[[Buffer], Pending]


class Alone(CoroutineCollective):
    """A collective of one rank, for which there is nothing to do."""

    def stages(self) -> Iterator[Awaited]:
        """Do nothing."""
        return iter(())


class Devices:
    """What a group knows about device arrays. Making one is collective, and so are its methods.

    Args:
        group: the ranks.
        memory: returns the memory that the ranks of each node share.
        awareness: whether MPI takes device pointers, if that is known already.

    Attributes:
        awareness: the same, for all ranks of the group.
    """

    def __init__(
        self, group: Communicator, memory: Callable[[], SharedMemory], awareness: Awareness | None = None
    ) -> None:
        self._group, self._memory = group, memory
        self.awareness = detect(group) if awareness is None else awareness
        self._nccl: Nccl | None = None
        self._ipc: str | None = "unknown"
        self._queue = Queue()
        self._comm: Comm | None = None

    def describe(self) -> str:
        """Return how arrays travel without a name asked for, in a line."""
        if self.awareness.aware:
            return f"given to MPI as they are ({self.awareness.reason})"
        return f"staged through page-locked host memory ({self.awareness.reason})"

    def choose(self, array: Array, fit: Fit | None = None, started: bool = False, persistent: bool = True) -> Choice:
        """Return what "auto" means for a device array: the algorithm for its pieces on the host, or MPI's own.

        Shared memory is among what is chosen from for sums that are bound for long, as its buffers take time to make.

        Args:
            array: (n,) on the device.
            fit: predicts the host's algorithms on these ranks; None for a rule of thumb.
            started: whether it will be started and polled, and not be a blocking call.
            persistent: whether the collective is bound for many starts.
        """
        group = self._group
        if self.awareness.aware or group.size == 1:
            return Choice(NATIVE, "MPI takes device arrays" if group.size > 1 else "one rank has nothing to add")
        shared = persistent and len(set(group.nodes())) < group.size and self._has_shared_memory()
        width = 4 if is_low(array.dtype) else array.itemsize
        return choose(min(array.size * width, PIECE_BYTES), group.size, fit, shared, started)

    def bind(
        self, array: Array, algorithm: How, tag: int, operation: str, persistent: bool, host: Host, direct: Host
    ) -> Pending:
        """Return a collective on a device array.

        Args:
            array: checked.
            algorithm: see `registry`; "auto" for all-reduces only.
            host: binds the same collective on host arrays.
            direct: binds it on a device array that MPI is given.

        Raises:
            DeviceError: on all ranks, where "ipc" or "nccl" cannot work.
            UsageError: for an operation that they have not.
        """
        if is_low(array.dtype):
            only_copies = operation in (ALL_GATHER.name, BROADCAST.name)
            if only_copies and algorithm == NCCL:
                return NcclCollective(array, self.nccl(namespace(array)), operation)
            if only_copies:
                return self.bind(array.view(np.uint16), algorithm, tag, operation, persistent, host, direct)
            return Widened(array, lambda wide: self.bind(wide, algorithm, tag, operation, persistent, host, direct))
        if algorithm == NCCL:
            return NcclCollective(array, self.nccl(namespace(array)), operation)
        if algorithm == IPC:
            return self._bind_ipc(array, tag, operation)
        if self._group.size == 1:
            return Alone(operation)
        if self.awareness.aware and algorithm != SHARED:
            return direct(array)
        memory = queue = None
        if persistent and algorithm == SHARED:
            memory = SharedBlocks(self._memory(), namespace(array))
        if algorithm == NATIVE:
            host, queue = self._native(operation), self._queue
        return Staged(array, host, operation, self._group.rank, self._group.size, memory=memory, queue=queue)

    def broadcast(self, array: Array, root: int) -> None:
        """Replace a device array on every rank by what `root` has.

        Args:
            array: any shape, C-contiguous; shape and dtype the same on all ranks.
        """
        group, flat = self._group, as_bytes(array)
        if self.awareness.aware:
            return NativeExecution(flat, group.comm, BROADCAST.name, on_device=True, root=root).run()
        staged = Staged(
            flat,
            self._native(BROADCAST.name, root),
            BROADCAST.name,
            group.rank,
            group.size,
            root=root,
            queue=self._queue,
        )
        staged.run()
        return staged.free()

    def nccl(self, xp: ModuleType) -> Nccl:
        """Return the group's communicator of NCCL, the same one each time.

        Raises:
            DeviceError: on all ranks, when NCCL is missing or two ranks are on one GPU.
        """
        if self._nccl is None:
            self._nccl = Nccl(self._group, xp)
        return self._nccl

    def free(self) -> None:
        """Give back what NCCL keeps, and the communicator of staged collectives."""
        if self._nccl is not None:
            self._nccl.free()
            self._nccl = None
        if self._comm is not None:
            self._comm.free()
            self._comm = None

    def _native(self, operation: str, root: int = ROOT) -> Host:
        """Return what binds one of MPI's own collectives on the host's end of a staged one. Collective the first time.

        They have a communicator of their own, as MPI pairs the collectives of one by their order. A staged one comes to
        MPI when its copy has arrived, on one rank before the next call of the program and on another after it, and must
        not meet there what is not staged: sums of host arrays, values, barriers. Among themselves they have the queue.
        """
        if self._comm is None and self._group.size > 1:
            self._comm = self._group.comm.duplicate()
        comm = self._group.comm if self._comm is None else self._comm
        return lambda part: NativeExecution(part, comm, operation, root=root)

    def _bind_ipc(self, array: Array, tag: int, operation: str) -> Pending:
        if operation != ALL_REDUCE.name:
            raise UsageError(f"CUDA IPC has no {operation}; it has {ALL_REDUCE.name}")
        if self._ipc == "unknown":
            self._ipc = ipc_problem(self._group, namespace(array))
        if self._ipc is not None:
            raise DeviceError(f"CUDA IPC cannot be used: {self._ipc}; the all-reduce {AUTO} works everywhere")
        return IpcSum(array, self._group, tag)

    def _has_shared_memory(self) -> bool:
        try:
            self._memory()
        except DeviceError:
            return False
        return True
