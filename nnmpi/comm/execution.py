"""Running collectives: by their steps, or by the communicator's own calls, without ever waiting unless asked to.

    Execution          the steps of an algorithm of nnmpi's
    NativeExecution    the communicator's own collective (MPI's), to work with and to compare with

Each is bound to one array and may be started again and again: which bytes go where is worked out once. It moves on when
it is polled, so that it can run while something else is computed, and several can be in flight at once.

    started:  for each step   post its receives, post its sends      (receives first: a message finds its place)
                              all done?  no: come back at the next poll
                              add what arrived in scratch; next step
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.buffers import Buffer, as_bytes, check_buffer, fetch, is_device, pieces, put, room_like
from nnmpi.comm.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, ROOT, Chunks, Step, runs
from nnmpi.comm.world import Comm, Request
from nnmpi.errors import CommError, UsageError, name_ranks
from nnmpi.shard import split

# Counts in MPI messages are 32-bit in most libraries; half of that leaves room, and nobody can tell the difference.
MAX_MESSAGE_BYTES = 2**30


class Pending(Protocol):
    """What is started, polled or waited for, and may be started again: a collective bound to one array, a barrier."""

    def start(self) -> None:
        """Start it. Leave its array alone until it is finished."""

    def poll(self) -> bool:
        """Go on as far as possible without waiting; return whether it is finished."""

    def wait(self) -> Any:
        """Return when it is finished."""

    def run(self) -> None:
        """Start and wait."""


class MessageRequest:
    """Messages that were started: out of an array, to be changed when they have left, or into one, to be read then.

    Args:
        comm: that they go through.
        requests: theirs.
        array: that they are in, which stays until they are through.
        filled: (host, array) what is copied then, to a device for which the messages go through host memory.
    """

    __slots__ = ("_comm", "_filled", "_requests", "array")

    def __init__(
        self, comm: Comm, requests: list[Request], array: Any, filled: Sequence[tuple[Buffer, Buffer]] = ()
    ) -> None:
        self._comm, self._requests, self.array, self._filled = comm, requests, array, filled

    def poll(self) -> bool:
        """Return whether they are through, without waiting; messages move on while they are asked for."""
        if self._requests and self._comm.test_all(self._requests):
            self._requests = []
        return not self._requests

    def wait(self) -> Any:
        """Return the array when they are through."""
        self._comm.wait_all(self._requests)
        self._requests = []
        for host, array in self._filled:
            put(host, array)
        return self.array


# ---- by the steps of an algorithm ----


class _Bound(NamedTuple):
    """One step with its places in memory: messages with their partners, and what is to be added to what."""

    receives: tuple[tuple[Buffer, int], ...]
    sends: tuple[tuple[Buffer, int], ...]
    sums: tuple[tuple[Buffer, Buffer], ...]


class Execution:
    """One rank's part of a collective, as a state machine that goes from step to step.

    Args:
        steps: this rank's steps over comm.size chunks.
        array: (n,) the buffer, worked on in place; n may be 0 or less than the number of ranks. One of a device is
            given to MPI as it is, when it was computed.
        comm: the communicator; its ranks are those in the steps.
        tag: tells the messages of this execution from those of others in flight between the same ranks.
        max_message_bytes: longer messages are cut into pieces of at most that.

    Raises:
        ShapeError: see `check_buffer`.
        DtypeError: see `check_buffer`.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        array: Buffer,
        comm: Comm,
        tag: int = 0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._comm, self._tag = comm, tag
        checked, self._current = _check(array)
        self._add = namespace(checked).add
        self._bound = _bind(steps, checked, comm.size, max_message_bytes)
        self._at = len(self._bound)
        self._requests: list[Request] = []

    def start(self) -> None:
        """Start it, with what the array holds now. Leave the array alone until `poll` returns True or `wait` returns.

        Raises:
            CommError: when it is running already.
        """
        if self._at < len(self._bound):
            raise CommError(f"the collective with tag {self._tag} is still running; wait for it before the next start")
        self._at = 0
        self._post()

    def poll(self) -> bool:
        """Go as far as possible without waiting; return whether it is finished."""
        while self._at < len(self._bound):
            if not self._comm.test_all(self._requests):
                return False
            self._next()
        return True

    def wait(self) -> None:
        """Return when this rank's part is finished and the array holds the result."""
        self._comm.world.waiter = self
        try:
            while self._at < len(self._bound):
                self._comm.wait_all(self._requests)
                self._next()
        finally:
            self._comm.world.waiter = None

    def waits_for(self) -> str:
        """Return what it waits for, in words."""
        at = min(self._at, len(self._bound) - 1)
        partners = [rank for _, rank in (*self._bound[at].receives, *self._bound[at].sends)]
        return f"a collective of {len(self._bound)} steps (tag {self._tag}), for {name_ranks(partners)}"

    def run(self) -> None:
        """Start and wait."""
        self.start()
        self.wait()

    def _post(self) -> None:
        """Start the messages of the step it has come to."""
        if self._current is not None:
            self._current().synchronize()
        self._requests = []
        if self._at < len(self._bound):
            comm, tag, (receives, sends, _) = self._comm, self._tag, self._bound[self._at]
            self._requests = [comm.irecv(message, source, tag) for message, source in receives]
            self._requests += [comm.isend(message, to, tag) for message, to in sends]

    def _next(self) -> None:
        """Finish the step it is in, whose messages are through, and begin the next."""
        for target, arrived in self._bound[self._at].sums:
            self._add(target, arrived, out=target)
        self._at += 1
        self._post()


def _check(array: Buffer) -> tuple[Buffer, Callable[[], Any] | None]:
    """Return an array that can be summed; and for a device's what returns the stream to wait for."""
    found = check_buffer(array, low=is_device(array))
    return found, namespace(array).cuda.get_current_stream if is_device(array) else None


def _bind(steps: Sequence[Step], array: Buffer, size: int, max_bytes: int) -> list[_Bound]:
    """Give every step its places in the array and in scratch; leave out those whose chunks are all empty."""
    chunks = split(array.size, size)
    longest = max((sum(len(chunks[c]) for c in step.recv) for step in steps if step.reduce), default=0)
    scratch = namespace(array).empty(longest, dtype=array.dtype)  # one for all steps: only one step is under way
    bound = []
    for step in steps:
        targets = list(_slices(step.recv, array, chunks))
        landing = targets
        if step.reduce:  # one behind the other
            stops = accumulate(target.size for target in targets)
            landing = [scratch[stop - target.size : stop] for target, stop in zip(targets, stops, strict=True)]
        receives = () if step.from_ is None else _messages(landing, step.from_, max_bytes)
        sends = () if step.to is None else _messages(_slices(step.send, array, chunks), step.to, max_bytes)
        if receives or sends:
            bound.append(_Bound(receives, sends, tuple(zip(targets, landing, strict=True)) if step.reduce else ()))
    return bound


def _slices(numbers: Chunks, array: Buffer, chunks: Sequence[range]) -> Iterator[Buffer]:
    """Yield a view of the array for each run of neighbouring chunks that is not empty."""
    for run in runs(numbers):
        part = array[chunks[run[0]].start : chunks[run[-1]].stop]
        if part.size:
            yield part


def _messages(
    parts: Iterator[Buffer] | Sequence[Buffer], partner: int, max_bytes: int
) -> tuple[tuple[Buffer, int], ...]:
    """Return the parts, cut to max_bytes, as bytes with the partner's rank: the dtype is nobody else's business."""
    return tuple((as_bytes(piece), partner) for part in parts for piece in pieces(part, max_bytes))


# ---- by the communicator's own calls ----

NATIVE_OPERATIONS = tuple(each.name for each in (ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER))


class NativeExecution:
    """One of MPI's own collectives on one array, again and again.

    It works in place on the same layout as those made of steps: rank r's chunk is part r of `shard.split(n, size)`.
    Unlike there, there is no tag: MPI pairs these by the order of their starts, so all ranks must start them in the
    same order.

    Args:
        array: (n,) the buffer, worked on in place; one of a device as in `Execution`.
        comm: the communicator whose ranks take part.
        operation: "all-reduce", "broadcast", "all-gather" or "reduce-scatter".
        max_message_bytes: longer arrays are worked on in pieces of at most that.
        root: whose values a broadcast spreads.

    Raises:
        UsageError: for another operation.
    """

    def __init__(
        self,
        array: Buffer,
        comm: Comm,
        operation: str = ALL_REDUCE.name,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        root: int = ROOT,
    ) -> None:
        if operation not in NATIVE_OPERATIONS:
            raise UsageError(f"MPI has no {operation} of its own here; it has {', '.join(NATIVE_OPERATIONS)}")
        self._array, self._current = _check(array)
        calls = _find_calls(self._array, comm, operation, max_message_bytes, root)
        # What is written may not overlap what is read.
        self._scratch: Buffer | None = next((given[0] for name, given in calls if name == "reduce_scatter"), None)
        self._starts = [partial(getattr(comm, f"i{name}"), *given) for name, given in calls]
        self._blocks = [partial(getattr(comm, name), *given) for name, given in calls]
        self._comm, self._requests = comm, list[Request]()

    def start(self) -> None:
        """Start it. Leave the array alone until `poll` returns True or `wait` returns.

        A device's array is done with on return: Open MPI takes device pointers in its blocking collectives, but not in
        those that are only started (https://www.open-mpi.org/faq/?category=runcuda).

        Raises:
            CommError: when it is running already.
        """
        if self._current is not None:
            return self.run()
        self._prepare()
        self._requests = [begin() for begin in self._starts]
        return None

    def poll(self) -> bool:
        """Return whether it is finished, without waiting; messages move on while they are asked for."""
        if self._requests and self._comm.test_all(self._requests):
            self._requests = []
        return not self._requests

    def wait(self) -> None:
        """Return when it is finished."""
        self._comm.wait_all(self._requests)
        self._requests = []

    def run(self) -> None:
        """Do it at once, with the blocking call: in Open MPI it takes half the time of a start and a wait.

        Raises:
            CommError: when it is running already.
        """
        self._prepare()
        if self._current is not None:
            self._current().synchronize()
        for block in self._blocks:
            block()

    def _prepare(self) -> None:
        if self._requests:
            raise CommError("this native collective is still running; wait for it before the next start")
        if self._scratch is not None:
            self._scratch[...] = self._array


def _find_calls(array: Buffer, comm: Comm, operation: str, limit: int, root: int) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the calls of the communicator that do it, by name, with their arguments."""
    parts = [array[chunk.start : chunk.stop] for chunk in split(array.size, comm.size)]
    counts, at_once = [part.size for part in parts], array.nbytes <= limit
    if operation == BROADCAST.name:
        return [("broadcast", (piece, root)) for piece in pieces(array, limit)]
    if operation == ALL_GATHER.name and at_once:
        return [("allgatherv", (None, array, counts))]
    if operation == ALL_GATHER.name:  # each owner broadcasts its chunk, piece by piece
        return [("broadcast", (piece, owner)) for owner, part in enumerate(parts) for piece in pieces(part, limit)]
    if operation == REDUCE_SCATTER.name and at_once:
        return [("reduce_scatter", (array.copy(), parts[comm.rank], counts))]
    return [("allreduce", (piece,)) for piece in pieces(array, limit)]  # a long reduce-scatter sums for all


# ---- in stages ----


class LocalWork:
    """A stage in which this rank has something to compute, and nothing to wait for."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = self.start = run

    def poll(self) -> bool:
        """Return True: it was finished when it was started."""
        return True

    def wait(self) -> None:
        """Do nothing."""


class Stages:
    """A collective that is done in stages, one after the other; see `Pending` for the methods.

    Args:
        stages: such as a copy, a sum and a copy back.
        name: for errors.
    """

    def __init__(self, stages: Sequence[Pending], name: str = "the collective") -> None:
        self._stages, self._name = stages, name
        self._runs = tuple(stage.run for stage in stages)
        self._at = len(stages)

    def start(self) -> None:
        """Start it, with what the array holds now. Leave the array alone until `poll` returns True or `wait` returns.

        Raises:
            CommError: when it is running already.
        """
        if self._at < len(self._stages):
            raise CommError(f"{self._name} is still running; wait for it before the next start")
        self._at = -1
        self._next()

    def poll(self) -> bool:
        """Go as far as possible without waiting for others; return whether it is finished."""
        while self._at < len(self._stages):
            if not self._stages[self._at].poll():
                return False
            self._next()
        return True

    def wait(self) -> None:
        """Return when it is finished, and no other rank needs the array any more."""
        while self._at < len(self._stages):
            self._stages[self._at].wait()
            self._next()

    def run(self) -> None:
        """Start and wait, by the stages' blocking calls: MPI's are quicker than a start and a wait."""
        if self._at < len(self._stages):
            self.start()  # raises
        for run in self._runs:
            run()

    def _next(self) -> None:
        self._at += 1
        if self._at < len(self._stages):
            self._stages[self._at].start()


def staged(array: Array, bind: Callable[[Buffer], Pending]) -> Stages:
    """Return a collective of a device array, (n,), by the one of a page-locked host array that `bind` returns."""
    room = room_like(array, array.shape)
    return Stages([LocalWork(lambda: fetch([(array, room)])), bind(room), LocalWork(lambda: put(room, array))])


def widened(array: Array, bind: Callable[[Buffer], Pending]) -> Stages:
    """Return a sum of an array of 16-bit floating point, (n,), by that of a float32 one, rounded once at the end.

    MPI has no dependable sum of such numbers, and adding them two by two would round at every rank on the way.
    """
    wide: Array = namespace(array).empty(array.shape, dtype=np.float32)

    def widen() -> None:
        wide[...] = array

    def narrow() -> None:
        array[...] = wide

    return Stages([LocalWork(widen), bind(wide), LocalWork(narrow)])
