"""What takes part at one size: each way to do the operation, bound to buffers, ready to be timed.

    private    | gradients | parameters |      every rank's own memory: messages, and MPI's own call
    shared     | gradients |                   every rank's own part of a window that the node's ranks see
    common                 | parameters |      one array per node, for the fused update

Contestants of one kind share their buffers, which are refilled before each call.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.collectives.gloo import gloo_sum
from benchmarks.collectives.options import FUSED, GLOO, UPDATE
from benchmarks.collectives.pattern import Pattern, Wrong
from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.comm.algorithms.registry import AUTO, COLLECTIVES, NATIVE, SHARED
from nnmpi.comm.choose import choose
from nnmpi.comm.fitting.fit import Fit
from nnmpi.comm.group import Group
from nnmpi.comm.shared_memory.memory import SharedMemory
from nnmpi.comm.shared_memory.shared_sum import SharedSum, own_slice
from nnmpi.errors import DeviceError, UsageError
from nnmpi.optim.sgd import SGD
from nnmpi.optim.storage import Arrays
from nnmpi.parallel.fused import FusedUpdate

SHARED_TAG, AUTO_TAG, FUSED_TAG = range(3)
LR = 1.0  # the parameters are then minus the sum, exactly


class CollectiveCall:
    """One contestant at one size: a `timing.TimedCall` on real buffers.

    Args:
        name: as on the command line.
        pattern: what `array` is filled with, and what must come out.
        array: the buffer that is refilled; on the device, if that is what is timed.
        run: the call that is timed.
        result: returns the host array that holds the pattern's result after a call; None for `array` itself.
        prepare: what else must be put back before each call.
        free: what MPI keeps for it is given back by this.
    """

    def __init__(
        self,
        name: str,
        pattern: Pattern,
        array: Array,
        run: Callable[[], Any],
        result: Callable[[], NDArray[Any]] | None = None,
        prepare: Callable[[], None] | None = None,
        free: Callable[[], Any] | None = None,
    ) -> None:
        self.name, self.run = name, run
        self._pattern, self._array = pattern, array
        self._result, self._prepare, self._free = result, prepare, free

    def refill(self, call: int) -> None:
        """Write the values of this call."""
        self._pattern.fill(self._array, call)
        if self._prepare is not None:
            self._prepare()

    def first_wrong(self, call: int) -> Wrong | None:
        """Return the first element of the result that is wrong, None if all are right."""
        return self._pattern.first_wrong(self._array if self._result is None else self._result(), call)

    def free(self) -> None:
        """Give back what MPI keeps."""
        if self._free is not None:
            self._free()


def staged(run: Callable[[], Any], host: NDArray[Any], device: Array, backend: Backend) -> Callable[[], None]:
    """Return the call that does the same on a device array: down to the host array, `run`, and up again.

    It ends when the device holds the result.

    Args:
        run: works on `host`.
        host: of the same length and dtype as `device`.
        device: before the call this rank's values, afterwards the result.
        backend: of the device.
    """

    def down_run_up() -> None:
        host[...] = backend.to_host(device)
        run()
        device[...] = backend.asarray(host)
        backend.synchronize()

    return down_run_up


class Field:
    """All contestants of one size, with the buffers that they share: made together and freed together. Collective.

    Args:
        options: what is measured.
        group: the ranks.
        backend: where the buffers lie.
        fit: what "auto" chooses by; None without one.
        nbytes: the length of each rank's buffer.

    Attributes:
        calls: in the order of the options' algorithms.
        chosen: by name, what stands behind one that chooses.
        missing: why some of them are left out, a sentence each.

    Raises:
        DeviceError: on all ranks, when there is no shared memory for a contestant that was asked for by name.
    """

    def __init__(
        self, options: argparse.Namespace, group: Group, backend: Backend, fit: Fit | None, nbytes: int
    ) -> None:
        self._options, self._group, self._backend = options, group, backend
        self._nbytes, self._fit = nbytes, fit
        self._elements = nbytes // np.dtype(options.dtype).itemsize
        contract = next(each.contract for (what, _), each in COLLECTIVES.items() if what == options.operation)
        self._pattern = Pattern(contract, group.rank, group.size, self._elements, options.dtype, backend)
        self._private: NDArray[Any] | None = None
        self._device: Array | None = None
        self._memory: SharedMemory | None = None
        self._window: NDArray[Any] | None = None
        self.chosen: dict[str, str] = {}
        self.missing: list[str] = []
        self.calls: list[CollectiveCall] = []
        for name in options.algorithms:
            try:
                self.calls.append(self._make(name))
            except (DeviceError, UsageError) as error:  # on all ranks
                if not options.everything:
                    raise
                self.missing.append(f"{name} is left out: {error}")

    def free(self) -> None:
        """Give back what MPI keeps. Collective."""
        for call in self.calls:
            call.free()
        if self._memory is not None:
            self._memory.free()

    def _make(self, name: str) -> CollectiveCall:
        if self._backend.is_device and name not in (GLOO, UPDATE, FUSED):
            return self._on_device(name)
        if name == AUTO:
            return self._auto()
        if name == UPDATE:
            return self._native_update()
        if name == FUSED:
            return self._fused_update()
        if name == GLOO:
            return self._entry(name, self._own(), gloo_sum(self._own()))
        if name == SHARED:
            return self._entry(name, self._shared(), SharedSum(self._shared(), self._share(), SHARED_TAG).run)
        return self._bound(name, name, self._own())

    def _auto(self) -> CollectiveCall:
        """Return what is chosen for gradients in the node's memory; in private memory, where there is none."""
        try:
            array, is_shared = self._shared(), True
        except DeviceError:
            array, is_shared = self._own(), False
        choice = choose(self._nbytes, self._group.size, self._fit, shared=is_shared)
        self.chosen[AUTO] = choice.algorithm
        if choice.algorithm == SHARED:
            return self._entry(AUTO, array, SharedSum(array, self._share(), AUTO_TAG).run)
        return self._bound(AUTO, choice.algorithm, array)

    def _bound(self, name: str, algorithm: str, array: NDArray[Any]) -> CollectiveCall:
        """Return what works by messages."""
        pending = self._group.bind(array, algorithm, operation=self._options.operation)
        return self._entry(name, array, pending.run, pending.free)

    def _on_device(self, name: str) -> CollectiveCall:
        """Return what works on device arrays, however they travel; a call ends when the device has the result."""
        device, group = self._device_buffer(), self._group
        if name == AUTO:
            group.fit = self._fit
            self.chosen[AUTO] = group.choose(device).algorithm
        pending = group.bind(device, name, operation=self._options.operation)

        def run() -> None:
            pending.run()
            self._backend.synchronize()

        return CollectiveCall(
            name, self._pattern, device, run, lambda: self._backend.to_host(device), free=pending.free
        )

    def _device_buffer(self) -> Array:
        """Return this rank's buffer on the device."""
        if self._device is None:
            self._device = self._backend.zeros(self._elements, self._options.dtype)
        return self._device

    def _entry(
        self, name: str, host: NDArray[Any], run: Callable[[], Any], free: Callable[[], Any] | None = None
    ) -> CollectiveCall:
        """Return a contestant that works on a host array, by way of it if the buffers are on a device."""
        if self._backend.xp is np:
            return CollectiveCall(name, self._pattern, host, run, free=free)
        device = self._device_buffer()
        call = staged(run, host, device, self._backend)
        return CollectiveCall(
            name, self._pattern, device, call, result=lambda: self._backend.to_host(device), free=free
        )

    def _native_update(self) -> CollectiveCall:
        """Return MPI's all-reduce with the update of all parameters on every rank."""
        self._check_update(UPDATE)
        grads, params = self._own(), np.zeros(self._elements, self._options.dtype)
        pending = self._group.bind(grads, NATIVE)
        optimizer = SGD(Arrays([params], [grads]), lr=LR)

        def run() -> None:
            pending.run()
            optimizer.step()

        return CollectiveCall(UPDATE, self._pattern, grads, run, lambda: -params, self._zeros(params), pending.free)

    def _fused_update(self) -> CollectiveCall:
        """Return the sum over shared memory in which each rank updates its slice of the node's parameters."""
        self._check_update(FUSED)
        grads, memory = self._shared(), self._share()
        params = memory.common(self._elements, self._options.dtype)
        fused = FusedUpdate(SGD(Arrays([params], [grads]), lr=LR), memory, FUSED_TAG)
        own = params[own_slice(params, memory.size, memory.rank)]
        return CollectiveCall(FUSED, self._pattern, grads, fused.step, lambda: -params, self._zeros(own))

    def _zeros(self, params: NDArray[Any]) -> Callable[[], None] | None:
        """Return what puts parameters back before a call, so that the sum can be read from them; None unless checked.

        Unchecked, they lie where the update before has left them, as they do in training.
        """
        return (lambda: params.fill(0)) if self._options.check else None

    def _check_update(self, name: str) -> None:
        """Refuse an update of what no optimizer works on."""
        if np.dtype(self._options.dtype).kind != "f" or self._backend.xp is not np:
            raise UsageError(
                f"{name} updates float32 or float64 parameters in host memory, not {self._options.dtype} on "
                f"{self._backend.name}; leave it out"
            )

    def _own(self) -> NDArray[Any]:
        """Return this rank's private buffer."""
        if self._private is None:
            self._private = np.zeros(self._elements, self._options.dtype)
        return self._private

    def _shared(self) -> NDArray[Any]:
        """Return this rank's buffer in the node's memory. Collective the first time."""
        if self._window is None:
            self._window = self._share().allocate(self._elements, self._options.dtype)
        return self._window

    def _share(self) -> SharedMemory:
        """Return what the node's ranks share. Collective the first time."""
        if self._memory is None:
            self._memory = SharedMemory(self._group)
        return self._memory
