"""The interface to the carrier of messages, of which there are two: MPI and the simulation.

    the rest of nnmpi             groups, collectives as steps, pipelines, servers, shared memory,
                                  training
    Comm, World                   the calls below, about thirty                  <- this module
    two worlds                    MPI          processes, by mpi4py
                                  simulated    threads of one process, one of which runs at a time

No code above this line depends on the world it runs in. So a test, a forecast or a lesson on a
laptop runs the code of a cluster, and nothing is written a second time for it. The calls are MPI's,
in lower case, reduced to those in use: messages are bytes, sums are in place, and the ranks' parts
follow one another without gaps. With mpi4py's communicator as the interface, the simulation would
have to imitate all of MPI.

A request stands for a started message or collective. It is opaque: pass it to the calls below only.
A complete request stays complete and may be passed again. Until then, do not change a buffer that
it reads, and do not touch one that it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from math import inf
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, Self, TypeAlias, TypeVar

from numpy.typing import NDArray

from nnmpi.backend.program.record import active_calls
from nnmpi.base.errors import UsageError
from nnmpi.comm.buffers import CommBuffer
from nnmpi.comm.machine import Machine

T = TypeVar("T")

PAGE_BYTES = 4096
WARNING_S, LIMIT_S = 10.0, 300.0  # a wait in training is reported; the job is aborted

RequestHandle: TypeAlias = Any
"""A started message or collective."""


class Traffic(NamedTuple):
    """The communication of one or more steps.

    Attributes:
        hidden_s: seconds of computation overlapped with messages, estimated at each poll.
        bytes: bytes of the summed arrays (the bytes on a link depend on the algorithm).
        calls: number of collectives.
        predicted_s: predicted seconds of the collectives, back to back and with all ranks on time;
            NaN without a fit.
    """

    hidden_s: float = 0.0
    bytes: int = 0
    calls: int = 0
    predicted_s: float = 0.0

    def plus(self, other: Traffic) -> Traffic:
        """Return the sums of both."""
        return Traffic._make(map(add, self, other))


class SharedPages(Protocol):
    """Shared memory of a node's ranks, a part for each rank; zeros at first.

    Attributes:
        parts: (bytes,) uint8 in rank order; each begins at a multiple of `PAGE_BYTES`.
    """

    parts: tuple[NDArray[Any], ...]

    def sync(self) -> None:
        """Memory fence: order this rank's earlier reads and writes before its later ones."""

    def free(self) -> None:
        """Free the memory. Collective; do not touch the parts afterwards."""


class World(Protocol):
    """The processes of a job, and their carrier of messages.

    Attributes:
        comm: the communicator of all ranks.
        library: name and version of the carrier, such as "Open MPI 5.0.11".
        keeps_order: whether other ranks see this rank's writes to shared memory in program order,
            so that a counter there may guard the data written before it.
        step: this rank's current step of training, for reports of stalls; the trainer sets it.
        collective_s: this rank's seconds in collectives so far.
        traffic: this rank's communication since the trainer last reset it.
        machine: the costs of messages in a simulation, else None.
        waiter: the object that waits for other ranks now, whose `waits_for()` describes the wait;
            it sets and clears this attribute itself.
    """

    comm: Comm
    library: str
    keeps_order: bool
    step: int | None
    collective_s: float
    traffic: Traffic
    machine: Machine | None
    waiter: object

    def wait_until(self, ready: Callable[[], bool], until_s: float = inf) -> bool:
        """Poll `ready()` until it is true, yielding the core in between; return True.

        Args:
            until_s: return False at this time of `nnmpi.base.clock`.
        """

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, made once per key for ranks that share a process.

        Do not change the result. `make` must not communicate; its exception is raised on every
        rank.
        """

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Run work such as disk writes in the background, in order; it ends before the program.

        It must not communicate, nor touch data that the rank changes meanwhile. Use `done` and
        `result` alone: a simulated world, in which one thread runs at a time, runs the work in
        `result`.
        """

    def watch(self, warning_s: float, limit_s: float, folder: str | Path | None = None) -> None:
        """Set the time limit of waits for other ranks; a simulated world detects stalls itself.

        Args:
            warning_s: after this, print the missing rank and the wait of each other rank.
            limit_s: after this, abort the job with an exit status of its own; 0 for never.
            folder: the run's folder, for a record of each rank at the abort; None for none.
        """


class Comm(Protocol):
    """A communicator: ranks 0..size-1 with a private message context.

    Attributes:
        rank: this process's number.
        size: number of ranks.
        world: the job's world.
    """

    rank: int
    size: int
    world: World

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks' numbers in the world, in order. Local: no communication."""

    # ---- messages between two ranks ----
    # C-contiguous arrays on the host, or on a device if the world supports it. Both ends pass
    # arrays of one dtype, one of NumPy's (pass other ones as bytes). Messages with the same sender,
    # receiver and tag arrive in the order of sending.

    def isend(self, data: CommBuffer, to: int, tag: int, /) -> RequestHandle:
        """Start sending an array."""

    def issend(self, data: CommBuffer, to: int, tag: int, /) -> RequestHandle:
        """Start sending; complete only when the other end has begun to receive."""

    def irecv(self, into: CommBuffer, source: int, tag: int, /) -> RequestHandle:
        """Start receiving into an array of the message's length."""

    # ---- requests ----

    def test_all(self, requests: Sequence[RequestHandle], /) -> bool:
        """Return True if all requests are complete, without blocking; drives progress."""

    def wait_all(self, requests: Sequence[RequestHandle], /) -> Any:
        """Return when all are complete."""

    def progress(self) -> None:
        """Drive the progress of pending messages; MPI moves them only inside its calls."""

    # ---- collectives: all ranks call them, in the same order, with arrays of the same dtype ----

    def barrier(self) -> None:
        """Return when all ranks have entered the barrier."""

    def allreduce(self, array: CommBuffer, /) -> None:
        """Replace the array everywhere by the sum over the ranks."""

    def iallreduce(self, array: CommBuffer, /) -> RequestHandle:
        """Start a sum."""

    def broadcast(self, data: CommBuffer, root: int, /) -> None:
        """Replace the array everywhere by root's."""

    def ibroadcast(self, data: CommBuffer, root: int, /) -> RequestHandle:
        """Start a broadcast."""

    def allgather(self, local: CommBuffer, into: CommBuffer, /) -> None:
        """Write every rank's array, all of one length, one after another in rank order."""

    def allgatherv(self, local: CommBuffer | None, into: CommBuffer, counts: Sequence[int]) -> None:
        """Write every rank's array, of `counts` elements, one after another in rank order.

        Args:
            local: this rank's array; None if it already lies at its offset in `into`.
            into: (sum of counts,) written.
            counts: elements of each rank, the same on all ranks.
        """

    def iallgatherv(
        self, local: CommBuffer | None, into: CommBuffer, counts: Sequence[int]
    ) -> RequestHandle:
        """Start an `allgatherv`."""

    def reduce_scatter(
        self, array: CommBuffer, local: CommBuffer, counts: Sequence[int], /
    ) -> None:
        """Write the sum over the ranks of this rank's part of the array.

        Args:
            array: (sum of counts,) the ranks' parts in rank order.
            local: (counts[rank],) written; must not overlap `array`.
            counts: elements of each rank, the same on all ranks.
        """

    def ireduce_scatter(
        self, array: CommBuffer, local: CommBuffer, counts: Sequence[int], /
    ) -> RequestHandle:
        """Start a `reduce_scatter`."""

    # ---- other communicators ----

    def duplicate(self) -> Self:
        """Return another communicator of the same ranks. Collective."""

    def split(self, color: int, key: int) -> Self:
        """Return the communicator of ranks with one color (0 or more), by key, rank. Collective."""

    def split_by_node(self, key: int) -> Self:
        """Return the communicator of ranks that share memory, by key, then rank. Collective."""

    def free(self) -> None:
        """Free the communicator. Collective."""

    def check_open(self) -> None:
        """Raise UsageError if it was freed: before calls that were looked up earlier, or none."""

    def share_pages(self, own_bytes: int) -> SharedPages:
        """Return memory that all ranks of this communicator, on one node, share. Collective.

        Args:
            own_bytes: the length of this rank's part; the ranks' lengths may differ and may be 0.

        Raises:
            DeviceError: on all ranks of the communicator, when the allocation fails.
        """


class Closing:
    """What a communicator of either world does once it is freed: it refuses every call.

    MPI knows only a number by then (MPI_ERR_COMM), and a simulation would go on.
    """

    def check_open(self) -> None:
        """Refuse a step that is only rehearsed; see `Comm`."""
        recorder = active_calls.get()  # not by a function: each collective asks
        if recorder is not None and recorder.is_rehearsal:
            raise UsageError("a step that is rehearsed exchanges nothing")

    def close(self) -> None:
        """Let each call that begins something be refused from now on."""
        for name in set(vars(Comm)) & set(dir(self)) - {"members", "test_all", "wait_all"}:
            if name[0] != "_":
                setattr(self, name, _refuse)


def _refuse(*arguments: Any, **named: Any) -> NoReturn:
    raise UsageError(
        "this group was freed, so its ranks cannot exchange anything over it; free it after its"
        " last use, or make another one by split or duplicate"
    )
