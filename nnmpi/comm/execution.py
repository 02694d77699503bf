"""Running collectives, step by step or by the communicator's native calls, without blocking.

    Execution          the steps of one of nnmpi's algorithms
    NativeExecution    the communicator's native collective (MPI's), for use and for comparison

Each is bound to one array and can be started many times: slices and messages are computed once. It
advances when it is polled, so that it overlaps with computation, and several can be in flight.

    for each step:   post its receives, post its sends      (receives first: MPI writes an arriving
                     not all complete: return until the next poll     message in place, unbuffered)
                     add the arrivals in scratch

A thread per collective would advance without polls, but it would contend with the computation for
Python's interpreter lock at every step.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.base.errors import CommError, UsageError, name_ranks
from nnmpi.base.shard import split
from nnmpi.comm.buffers import (
    CommBuffer,
    as_bytes,
    check_buffer,
    fetch,
    is_device,
    pieces,
    put,
    room_like,
)
from nnmpi.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    REDUCE_SCATTER,
    ROOT,
    Chunks,
    Step,
    runs,
)
from nnmpi.comm.world import Comm, RequestHandle


class Pending(Protocol):
    """Restartable work that is started, polled and waited for, such as a bound collective."""

    def start(self) -> None:
        """Start it. Do not touch its array until it is finished."""

    def poll(self) -> bool:
        """Advance as far as possible without waiting; return whether it is finished."""

    def wait(self) -> Any:
        """Return when it is finished."""

    def run(self) -> None:
        """Start and wait."""


class MessageRequest:
    """Started messages. Until they end, do not change a sent array or read a received one.

    Args:
        comm: their communicator.
        requests: their requests.
        array: their array, kept alive until they end.
        filled: (host, array) pairs to copy at the end, for device arrays that go through host
            memory.
    """

    __slots__ = ("_comm", "_filled", "_requests", "array")

    def __init__(
        self,
        comm: Comm,
        requests: list[RequestHandle],
        array: Any,
        filled: Sequence[tuple[CommBuffer, CommBuffer]] = (),
    ) -> None:
        self._comm, self._requests, self.array, self._filled = comm, requests, array, filled

    def poll(self) -> bool:
        """Return True if the messages have completed, without blocking; polling drives progress."""
        if self._requests and self._comm.test_all(self._requests):
            self._requests = []
        return not self._requests

    def wait(self) -> Any:
        """Return the array when all messages have completed."""
        self._comm.wait_all(self._requests)
        self._requests = []
        for host, array in self._filled:
            put(host, array)
        return self.array


class Calls(MessageRequest):
    """Calls of a communicator that are started together, again and again; see `Pending`.

    Args:
        comm: the communicator.
        starts: the non-blocking calls.
        blocks: the same calls in MPI's blocking form, which is faster, for `run`.
        waits_for: describes the wait in reports of stalls; by default the world's own text.
    """

    def __init__(
        self,
        comm: Comm,
        starts: Sequence[Callable[[], RequestHandle]],
        blocks: Sequence[Callable[[], Any]] = (),
        waits_for: Callable[[], str] = str,
    ) -> None:
        super().__init__(comm, [], None)
        self._starts, self._blocks, self.waits_for = starts, blocks, waits_for

    def start(self) -> None:
        """Begin all calls."""
        self._comm.check_open()
        self._requests = [begin() for begin in self._starts]

    def wait(self) -> None:
        """Return when all are complete."""
        self._comm.world.waiter = self
        try:
            super().wait()
        finally:
            self._comm.world.waiter = None

    def run(self) -> None:
        """Do all calls."""
        self._comm.check_open()
        for block in self._blocks:
            block()
        if not self._blocks:
            self.start()
            self.wait()


PendingStage: TypeAlias = Pending | Callable[[], Any]
"""Work that is started and waited for; or a function, for this rank's computation."""


class Stages:
    """A collective of stages, one after the other; see `Pending` for the methods.

    Args:
        stages: such as a copy, a sum and a copy back.
        name: for errors.
    """

    def __init__(self, stages: Sequence[PendingStage], name: str = "the collective") -> None:
        self._stages: Sequence[Any] = stages
        self._name = name
        self._runs = [stage if callable(stage) else stage.run for stage in stages]
        self._at = len(stages)

    def start(self) -> None:
        """Start on the array's values now. Do not touch the array until `poll` or `wait` ends it.

        Raises:
            CommError: when it is running already.
        """
        if self._at < len(self._stages):
            raise CommError(f"{self._name} is still running; wait for it before the next start")
        self._at = -1
        self._next()

    def poll(self) -> bool:
        """Advance as far as possible without waiting; return whether it is finished."""
        while self._at < len(self._stages):
            if not self._stages[self._at].poll():
                return False
            self._next()
        return True

    def wait(self) -> None:
        """Return when it is finished and no other rank reads the array."""
        while self._at < len(self._stages):
            self._stages[self._at].wait()
            self._next()

    def run(self) -> None:
        """Start and wait by blocking calls, which take MPI half the time of start and wait."""
        if self._at < len(self._stages):
            self.start()  # raises
        for run in self._runs:
            run()

    def _next(self) -> None:
        """Run the functions up to the next stage with a wait, and start that stage."""
        self._at += 1
        while self._at < len(self._stages):
            stage = self._stages[self._at]
            if not callable(stage):
                return stage.start()
            stage()
            self._at += 1
        return None


def staged(array: Array, bind: Callable[[CommBuffer], Pending]) -> Stages:
    """Return a device array's collective, run on a page-locked host copy by `bind`."""
    room = room_like(array, array.shape)
    return Stages([lambda: fetch([(array, room)]), bind(room), lambda: put(room, array)])


def widened(array: Array, bind: Callable[[CommBuffer], Pending]) -> Stages:
    """Return a 16-bit float array's sum, computed in float32 and rounded once.

    MPI has no dependable sum of such numbers, and sums in 16 bits would round at every rank on the
    way.
    """
    wide = namespace(array).empty(array.shape, np.float32)
    return Stages([partial(_copy, array, wide), bind(wide), partial(_copy, wide, array)])


def _copy(source: CommBuffer, target: CommBuffer) -> None:
    target[...] = source


def halved(array: Array, comm: Comm, tag: int) -> Stages:
    """Return the all-reduce of a 16-bit float array that sends 16 bits, and adds in float32.

        every rank:   a0 a1 a2  --all-to-all-->  chunk r of all ranks, added in their order, rounded
                      s0 s1 s2  <--all-gather--  once by rank r, which sends it to all

    A rank sends 2 (N-1)/N of the array, the least for a sum, and half of what `widened` sends. The
    sums are those of float32, rounded once, the same bits on all ranks.

    Args:
        array: (n,) float16 or bfloat16, changed in place.
        comm: the communicator of the ranks.
        tag: see `Execution`.
    """
    chunks = [array[chunk.start : chunk.stop] for chunk in split(array.size, comm.size)]
    own = chunks[comm.rank]
    arrived = [namespace(array).empty(own.size, array.dtype) for _ in chunks]
    others = [rank for rank in range(comm.size) if rank != comm.rank]

    def exchange(sent: Sequence[Array], received: Sequence[Array]) -> Calls:
        # as bytes: MPI need not have the dtype
        ways = ((comm.irecv, received), (comm.isend, sent))
        calls = [
            partial(call, piece, rank, tag)
            for call, parts in ways
            for rank in others
            if parts[rank].size
            for piece in pieces(as_bytes(parts[rank]))
        ]
        return Calls(comm, calls, waits_for=lambda: f"a sum of 16 bits (tag {tag})")

    def add() -> None:
        terms = [own if rank == comm.rank else part for rank, part in enumerate(arrived)]
        total = terms[0].astype(np.float32)
        for term in terms[1:]:
            total += term
        own[...] = total

    computed = _check(array) if is_device(array) else []
    stages: list[PendingStage] = [*computed, exchange(chunks, arrived), add]
    stages += [*computed, exchange([own] * comm.size, chunks)]
    return Stages(stages, f"the sum of 16 bits with tag {tag}")


# ---- by the steps of an algorithm ----


class Execution(Stages):
    """One rank's part of a collective: per step its messages, then the sum of arrivals.

    Args:
        steps: this rank's steps over comm.size chunks.
        array: (n,) the buffer, changed in place; n may be 0 or less than the number of ranks. A
            device array is passed to MPI itself, after pending kernels.
        comm: the communicator of the ranks in the steps.
        tag: separates the messages of executions in flight between the same ranks.
        count: the number of chunks, if it is not comm.size.

    Raises:
        ShapeError: see `check_buffer`.
        DtypeError: see `check_buffer`.
    """

    def __init__(
        self, steps: Sequence[Step], array: CommBuffer, comm: Comm, tag: int, count: int = 0
    ) -> None:
        computed = _check(array)
        chunks, xp = split(array.size, count or comm.size), namespace(array)
        longest = max(
            (sum(len(chunks[c]) for c in step.recv) for step in steps if step.reduce), default=0
        )
        # one scratch for all steps: only one step is in flight
        scratch = xp.empty(longest, array.dtype)
        stages: list[PendingStage] = []
        for step in steps:
            targets = list(_slices(step.recv, array, chunks))
            landing = targets
            if step.reduce:  # arrivals lie one after another in scratch
                stops = accumulate(target.size for target in targets)
                landing = [
                    scratch[stop - target.size : stop]
                    for target, stop in zip(targets, stops, strict=True)
                ]
            calls = []
            sent = _slices(step.send, array, chunks)
            for call, parts, partner in (
                (comm.irecv, landing, step.from_),
                (comm.isend, sent, step.to),
            ):
                if partner is None:
                    continue
                # As bytes: MPI need not have the dtype.
                messages = (as_bytes(piece) for part in parts for piece in pieces(part))
                calls += [partial(call, message, partner, tag) for message in messages]
            if calls:
                stages += [
                    *computed,
                    Calls(comm, calls, waits_for=partial(_describe, step, len(steps), tag)),
                ]
            if step.reduce:
                stages += [
                    partial(xp.add, *pair, pair[0]) for pair in zip(targets, landing, strict=True)
                ]
        super().__init__(stages, f"the collective with tag {tag}")


def _check(array: CommBuffer) -> list[PendingStage]:
    """Refuse an array that cannot be summed; return the wait for a device's pending kernels."""
    check_buffer(array, low=is_device(array))
    current = namespace(array).cuda.get_current_stream if is_device(array) else None
    return [] if current is None else [lambda: current().synchronize()]


def _slices(numbers: Chunks, array: CommBuffer, chunks: Sequence[range]) -> Iterator[CommBuffer]:
    """Yield a view of the array for each run of neighbouring chunks that is not empty."""
    for run in runs(numbers):
        part = array[chunks[run[0]].start : chunks[run[-1]].stop]
        if part.size:
            yield part


def _describe(step: Step, steps: int, tag: int) -> str:
    partners = name_ranks([rank for rank in (step.from_, step.to) if rank is not None])
    return f"a collective of {steps} steps (tag {tag}), for {partners}"


# ---- by the communicator's native calls ----

NATIVE_OPERATIONS = tuple(item.name for item in (ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER))


class NativeExecution(Stages):
    """One of MPI's native collectives on one array, again and again.

    It works in place on the same layout as a collective of steps: rank r's chunk is part r of
    `shard.split(n, size)`. It has no tag: MPI pairs collectives by the order of their starts, so
    all ranks must start them in the same order. On a device array, `start` already completes the
    collective: Open MPI takes device pointers in blocking collectives only
    (https://www.open-mpi.org/faq/?category=runcuda).

    Args:
        array: (n,) the buffer, changed in place; a device array as in `Execution`.
        comm: the communicator.
        operation: "all-reduce", "broadcast" (from rank 0), "all-gather" or "reduce-scatter".

    Raises:
        UsageError: for another operation.
    """

    def __init__(self, array: CommBuffer, comm: Comm, operation: str = ALL_REDUCE.name) -> None:
        if operation not in NATIVE_OPERATIONS:
            raise UsageError(
                f"MPI has no native {operation} here; choose one of {', '.join(NATIVE_OPERATIONS)}"
            )
        stages = _check(array)
        calls = _find_calls(array, comm, operation)
        # MPI's reduce-scatter must not write into its input: read a copy, refreshed at each start.
        stages += [
            partial(_copy, array, args[0]) for name, args in calls if name == "reduce_scatter"
        ]
        blocks = [partial(getattr(comm, name), *args) for name, args in calls]
        # by MPI's rule of names: iallreduce, ibroadcast, iallgatherv, ireduce_scatter
        starts = [partial(getattr(comm, f"i{name}"), *args) for name, args in calls]
        stages += blocks if is_device(array) else [Calls(comm, starts, blocks)]
        super().__init__(stages, "this native collective")


def _find_calls(array: CommBuffer, comm: Comm, operation: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the operation's calls of the communicator, by name, with their arguments."""
    whole = [*pieces(array)]
    if operation == ALL_REDUCE.name:
        return [("allreduce", (piece,)) for piece in whole]
    if operation == BROADCAST.name:
        return [("broadcast", (piece, ROOT)) for piece in whole]
    parts = [array[chunk.start : chunk.stop] for chunk in split(array.size, comm.size)]
    counts, at_once = [part.size for part in parts], len(whole) < 2
    if operation == ALL_GATHER.name and at_once:
        return [("allgatherv", (None, array, counts))]
    if operation == ALL_GATHER.name:  # each owner broadcasts its chunk, piece by piece
        owned = ((owner, piece) for owner, part in enumerate(parts) for piece in pieces(part))
        return [("broadcast", (piece, owner)) for owner, piece in owned]
    if operation == REDUCE_SCATTER.name and at_once:
        return [("reduce_scatter", (array.copy(), parts[comm.rank], counts))]
    # A reduce-scatter too long for one message: its pieces would each need counts of their own, so
    # every rank gets the complete sum.
    return [("allreduce", (piece,)) for piece in whole]
