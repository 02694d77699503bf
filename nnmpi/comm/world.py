"""The interface to a world: everything nnmpi needs from what carries its messages.

    everything else in nnmpi      groups, collectives as steps, pipelines, servers, shared memory,
                                  training
    Comm, World                   the calls below, about thirty                  <- this module
    two worlds behind them        MPI          processes, by mpi4py
                                  simulated    threads of one process, one of which runs at a time

Nobody above knows which of the two it is in. The calls are those of MPI, by its names in small
letters, cut down to what is used: messages are bytes, sums are in place, the ranks' parts lie one
behind the other.

A request stands for something that was started. What it is, is the world's own business: it is
given to the calls below and to nothing else, and may be given to them again when it is complete: it
stays complete. Until then, a buffer that it reads must not be changed, and one that it writes must
not be touched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import inf
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from numpy.typing import NDArray

from nnmpi.comm.buffers import Buffer
from nnmpi.comm.machine import Machine

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)

PAGE_BYTES = 4096
WARNING_S, LIMIT_S = 10.0, 300.0  # of a wait in training: it is reported; the job is ended

Request: TypeAlias = Any
"""Something that was started: a message, or a collective."""


class SharedPages(Protocol):
    """Some bytes of each rank of a node, which all of them see; zeros at first.

    Attributes:
        parts: (bytes,) uint8, every rank's part, in rank order; each begins at a multiple of
            `PAGE_BYTES`.
    """

    parts: tuple[NDArray[Any], ...]

    def sync(self) -> None:
        """Order this rank's reads and writes of the memory before against those after."""

    def free(self) -> None:
        """Give the memory back. Collective; the parts must not be touched any more."""


class BackgroundWork(Protocol[Result]):
    """Something that is done beside what the rank itself does; see `World.beside`."""

    def done(self) -> bool:
        """Return whether it has come to its end."""

    def result(self) -> Result:
        """Wait for its end, and return what it returned, or raise what it raised."""


class World(Protocol):
    """What there is once for all ranks.

    Attributes:
        comm: of all ranks.
        library: the name and version of what carries the messages, such as "Open MPI 5.0.11".
        simulated: whether clocks and messages are simulated; for reports, which say so.
        keeps_order: whether what a rank writes to shared memory is seen by others in the order of
            writing, so that a counter there may guard what was written before.
        step: the step of training that this rank is in, which whoever trains sets; for reports of
            what it waits for.
        met_s: the seconds for which this rank has stood in collectives so far.
        machine: what messages cost, where that is known because they are simulated; else None.
        waiter: what waits for other ranks now, whose `waits_for()` says for what; it sets and
            clears this itself.
    """

    comm: Comm
    library: str
    simulated: bool
    keeps_order: bool
    step: int | None
    met_s: float
    machine: Machine | None
    waiter: object

    def wait_until(self, ready: Callable[[], bool], until_s: float = inf) -> bool:
        """Poll `ready()` until it is true, yielding the core in between; return True.

        Args:
            until_s: return False at this time of `nnmpi.clock`.
        """

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, made once per key for ranks that share a process.

        Nobody may change it. `make` must not communicate; what it raises is raised by every rank.
        """

    def beside(self, work: Callable[[], T]) -> BackgroundWork[T]:
        """Run work such as disk writes in the background, in order; it ends before the program.

        It must not communicate, nor touch what the rank itself changes meanwhile. A simulated
        world, in which one thread runs at a time, does it when somebody asks for its end.
        """

    def watch(self, warning_s: float, limit_s: float, folder: Path | None = None) -> None:
        """Set the time limit of waits for other ranks; a simulated world detects stalls itself.

        Args:
            warning_s: then it is told which rank is missing, and in what every other one waits.
            limit_s: then the job is ended, with a status of its own; 0 for never.
            folder: of the run, where each rank leaves a record then; None for none.
        """


class Comm(Protocol):
    """Some ranks, numbered 0..size-1 among themselves, whose messages meet nobody else's.

    Attributes:
        rank: this one's number.
        size: how many there are.
        world: that they live in.
    """

    rank: int
    size: int
    world: World

    @property
    def members(self) -> tuple[int, ...]:
        """These ranks' numbers in the world, in order; no rank has to wait for it."""

    # ---- messages between two ranks: C-contiguous arrays on the host, or on a device if the world
    # takes such ---- Both ends give arrays of one dtype, of those that NumPy itself knows (bytes
    # for others). Messages with one tag from one rank to another are received in the order in which
    # they were sent.

    def isend(self, data: Buffer, to: int, tag: int, /) -> Request:
        """Start sending an array."""

    def issend(self, data: Buffer, to: int, tag: int, /) -> Request:
        """Start sending; complete only when the other end has begun to receive."""

    def irecv(self, into: Buffer, source: int, tag: int, /) -> Request:
        """Start receiving into an array of the message's length."""

    # ---- what was started ----

    def test_all(self, requests: Sequence[Request], /) -> bool:
        """Return True if all requests are complete, without blocking; drives progress."""

    def wait_all(self, requests: Sequence[Request], /) -> Any:
        """Return when all are complete."""

    def poke(self) -> None:
        """Let messages move on."""

    # ---- collectives: all ranks call them, in the same order, with arrays of the same dtype ----

    def barrier(self) -> None:
        """Return when all ranks have come here."""

    def allreduce(self, array: Buffer, /) -> None:
        """Replace the array everywhere by the sum over the ranks."""

    def iallreduce(self, array: Buffer, /) -> Request:
        """Start a sum."""

    def broadcast(self, data: Buffer, root: int, /) -> None:
        """Replace the array everywhere by root's."""

    def ibroadcast(self, data: Buffer, root: int, /) -> Request:
        """Start a broadcast."""

    def allgather(self, own: Buffer, into: Buffer, /) -> None:
        """Write every rank's array, all of one length, one after another in rank order."""

    def allgatherv(self, own: Buffer | None, into: Buffer, counts: Sequence[int]) -> None:
        """Do the same with arrays of `counts` elements.

        Args:
            own: this rank's; None where it is at its place in `into` already.
            into: (sum of counts,) written.
            counts: elements of each rank, the same on all ranks.
        """

    def iallgatherv(self, own: Buffer | None, into: Buffer, counts: Sequence[int]) -> Request:
        """Start it."""

    def reduce_scatter(self, array: Buffer, own: Buffer, counts: Sequence[int], /) -> None:
        """Write the sum over the ranks of this rank's part of the array.

        Args:
            array: (sum of counts,) of which rank r's part follows on those of the ranks before.
            own: (counts[rank],) written; elsewhere in memory.
            counts: elements of each rank, the same on all ranks.
        """

    def ireduce_scatter(self, array: Buffer, own: Buffer, counts: Sequence[int], /) -> Request:
        """Start it."""

    # ---- other communicators ----

    def duplicate(self) -> Self:
        """Return another one of the same ranks. Collective."""

    def split(self, color: int, key: int) -> Self:
        """Return the communicator of ranks with one color (0 or more), by key, rank. Collective."""

    def split_by_node(self, key: int) -> Self:
        """Return the communicator of ranks that share memory, by key, then rank. Collective."""

    def free(self) -> None:
        """Give it back. Collective."""

    def share_pages(self, own_bytes: int) -> SharedPages:
        """Return memory that all ranks of this communicator, on one node, share. Collective.

        Args:
            own_bytes: the length of this rank's part; the ranks' lengths may differ, and be 0.

        Raises:
            DeviceError: on all ranks of the communicator, when there is none to be had.
        """
