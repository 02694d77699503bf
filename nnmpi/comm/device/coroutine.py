"""A collective as a generator: it yields what it waits for, and goes on when that is there.

So the stages of a transport stand in one function, in order, and are run blocking, or in parts whenever somebody polls:

    def stages(self):
        yield copied          # an event of the device, messages, another collective
        start the messages
        yield messages
        ...
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.device import has_passed
from nnmpi.comm.buffers import Buffer
from nnmpi.comm.execution import MessageRequest, Pending
from nnmpi.comm.world import Comm
from nnmpi.errors import CommError


class Awaited(Protocol):
    """Something that is there at some time."""

    def poll(self) -> bool:
        """Return whether it is there, without waiting."""

    def wait(self) -> Any:
        """Return when it is there."""


class EventWait:
    """An event of the device that the host waits for."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def poll(self) -> bool:
        """Return whether the device has come to the event."""
        return has_passed(self._event)

    def wait(self) -> None:
        """Return when it has."""
        self._event.synchronize()


def start_barrier(comm: Comm, tag: int) -> MessageRequest:
    """Start a barrier, by empty messages of one tag: every rank to every other one.

    Between the same ranks and with the same tag they are paired in order, so that one may follow the other.

    Args:
        comm: whose ranks wait for one another.
        tag: different for all that are under way at the same time.
    """
    nothing, others = np.empty(0, np.uint8), [other for other in range(comm.size) if other != comm.rank]
    requests = [comm.irecv(nothing, other, tag) for other in others]
    return MessageRequest(comm, requests + [comm.isend(nothing, other, tag) for other in others], nothing)


class CoroutineCollective:
    """A collective written as a generator; see `execution.Pending` for the methods.

    Args:
        name: in words, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._flow: Iterator[Awaited] | None = None
        self._awaited: Awaited | None = None

    def stages(self) -> Iterator[Awaited]:
        """Do all of it, yielding what must be there before it can go on."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it. Leave the array alone until it is finished.

        Raises:
            CommError: when it is running already.
        """
        if self._flow is not None:
            raise CommError(f"the {self._name} is still running; wait for it before the next start")
        self._flow = self.stages()
        self._next()

    def poll(self) -> bool:
        """Go on as far as possible without waiting; return whether it is finished."""
        while self._awaited is not None:
            if not self._awaited.poll():
                return False
            self._next()
        return True

    def wait(self) -> None:
        """Return when it is finished: what is given to the current stream from then on sees the result."""
        while self._awaited is not None:
            self._awaited.wait()
            self._next()

    def run(self) -> None:
        """Start and wait."""
        self.start()
        self.wait()

    def free(self) -> None:
        """Give back what is kept for it; it cannot be started again."""

    def _next(self) -> None:
        assert self._flow is not None
        self._awaited = next(self._flow, None)
        if self._awaited is None:
            self._flow = None


class Widened(CoroutineCollective):
    """A sum of an array of float16 or bfloat16, by that of a float32 one, rounded once at the end.

    MPI has no dependable sum of 16-bit numbers, and adding them two by two would round at every rank on the way.

    Args:
        array: (n,) worked on in place.
        bind: returns the sum of a float32 array.
    """

    def __init__(self, array: Array, bind: Callable[[Buffer], Pending]) -> None:
        super().__init__(f"sum of {array.dtype}")
        self._array = array
        self._wide: Array = namespace(array).empty(array.shape, dtype=np.float32)
        self._sum = bind(self._wide)

    def stages(self) -> Iterator[Awaited]:
        """Convert, sum, convert."""
        self._wide[...] = self._array
        self._sum.start()
        yield self._sum
        self._array[...] = self._wide

    def free(self) -> None:
        """Give back what the sum of float32 keeps."""
        self._sum.free()
