"""What takes part at one size: each way to do the operation, bound to buffers, ready to be timed.

    private    | gradients | parameters |      every rank's own memory: messages, and MPI's own call
    shared     | gradients |                   every rank's own part of a window that the node's ranks see
    common                 | parameters |      one array per node, for the fused update

Contestants of one kind share their buffers, which are refilled before each call.
"""

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from benchmarks.collectives.pattern import Pattern, Wrong
from nnmpi.backend.array import Array
from nnmpi.backend.record import Backend


class Entry:
    """One contestant at one size.

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
    """

    def down_run_up() -> None:
        host[...] = backend.to_host(device)
        run()
        device[...] = backend.asarray(host)
        backend.synchronize()

    return down_run_up
