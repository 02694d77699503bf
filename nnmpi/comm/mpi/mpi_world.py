"""MPI as a world: the calls of `comm.world`, by those of mpi4py.

Most have the same arguments as mpi4py's and are mpi4py's own functions, with nothing in between. Importing this module
starts MPI where `library.load_mpi` has not done so before.

MPI's own waits look for messages as fast as they can. That is right for ranks that come at the same time; a rank that
waits long for a slow one on a crowded machine slows it down even more. So `wait_until` sleeps between looks:

    look . look .. look .... look ........ look ........ look        sleeps of 50 us, growing to 1 ms

Measured with 4 ranks on 2 cores and one that comes 2 s late, the processor time that each of the others took, in s:

                       MPI's own wait    asleep
    Open MPI 5.0.11    1.33              0.04         (1.33 is all that three ranks can take of two cores in 2 s)
    MPICH 5.0.2        1.33              0.05
"""

from __future__ import annotations

import functools
import platform
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar, cast

from mpi4py import MPI

from nnmpi import clock
from nnmpi.comm.buffers import Buffer
from nnmpi.comm.mpi.watchdog import OPERATIONS, Operations, Watchdog
from nnmpi.comm.mpi.window import SHM, Window, find_folder
from nnmpi.comm.world import Comm, World

T = TypeVar("T")

FIRST_S, LONGEST_S = 50e-6, 1e-3
# On these a processor's stores, and its loads, are seen in the order in which the program has them.
ORDERED_MACHINES = ("x86_64", "amd64", "i686", "i386")


class MpiComm:
    """A communicator of MPI's; see `comm.world.Comm` for the calls.

    Attributes:
        mpi: mpi4py's communicator, for tests of MPI itself.
    """

    test_all = staticmethod(MPI.Request.Testall)

    def __init__(self, mpi: MPI.Comm, world: MpiWorld) -> None:
        self.mpi, self.world, self._world = mpi, cast(World, world), world
        named = partial(_named, world, mpi.Get_size())
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        self._folder: Path | None = SHM  # of the windows
        self.isend, self.issend, self.irecv = mpi.Isend, mpi.Issend, mpi.Irecv
        self.wait_all = named("messages", MPI.Request.Waitall)
        self.barrier, self.allgather = named("a barrier", mpi.Barrier), named("an all-gather", mpi.Allgather)
        self.allreduce = named("an all-reduce", partial(mpi.Allreduce, MPI.IN_PLACE))
        self.iallreduce = partial(mpi.Iallreduce, MPI.IN_PLACE)
        self.broadcast, self.ibroadcast = named("a broadcast", mpi.Bcast), mpi.Ibcast
        self.reduce_scatter, self.ireduce_scatter = named("a reduce-scatter", mpi.Reduce_scatter), mpi.Ireduce_scatter
        self._allgatherv, self._alltoallv = (
            named("an all-gather", mpi.Allgatherv),
            named("an all-to-all", mpi.Alltoallv),
        )
        self._split = named("making a communicator", mpi.Split)
        self._split_type = named("making a communicator", mpi.Split_type)
        self._dup = named("making a communicator", mpi.Dup)
        self.free = mpi.Free

    # ---- what was started ----

    def cancel(self, request: MPI.Request) -> None:
        """Give up a receive whose message will not be sent."""
        request.Cancel()
        request.Wait()

    def poke(self) -> None:
        """Let messages move on."""
        self.mpi.Iprobe()

    # ---- collectives ----

    def allreduce_max(self, array: Buffer) -> None:
        """Replace the array everywhere by the largest of each element."""
        self.allreduce(array, MPI.MAX)

    def allgatherv(self, own: Buffer | None, into: Buffer, counts: Sequence[int]) -> None:
        """Gather arrays of any lengths."""
        self._allgatherv(MPI.IN_PLACE if own is None else own, [into, list(counts)])

    def iallgatherv(self, own: Buffer | None, into: Buffer, counts: Sequence[int]) -> MPI.Request:
        """Start it."""
        return self.mpi.Iallgatherv(MPI.IN_PLACE if own is None else own, [into, list(counts)])

    def alltoallv(self, data: Buffer, counts: Sequence[int], into: Buffer, came: Sequence[int]) -> None:
        """Send every rank its part."""
        self._alltoallv([data, list(counts)], [into, list(came)])

    # ---- other communicators ----

    def duplicate(self) -> MpiComm:
        """Return another one of the same ranks."""
        return MpiComm(self._dup(), self._world)

    def split(self, color: int, key: int) -> MpiComm:
        """Return one of the ranks that gave the same color."""
        return MpiComm(self._split(color, key), self._world)

    def split_by_node(self, key: int) -> MpiComm:
        """Return one of the ranks that share this one's memory."""
        return MpiComm(self._split_type(MPI.COMM_TYPE_SHARED, key), self._world)

    def share_pages(self, own_bytes: int) -> Window:
        """Return memory that all ranks see."""
        window = Window(cast(MPI.Intracomm, self.mpi), own_bytes, self._folder)
        if self._folder is SHM:  # now it can be seen where this MPI has its windows
            self._folder = find_folder(window.parts[self.rank].ctypes.data)
        return window


class MpiWorld:
    """The world that is MPI; see `comm.world.World` for the calls. There is one: `mpi_world`."""

    simulated = False

    def __init__(self) -> None:
        self.operations: Operations = deque(maxlen=OPERATIONS)
        self.watchdog: Watchdog | None = None
        self.comm: Comm = MpiComm(MPI.COMM_WORLD, self)
        self.library = name_library(MPI.Get_library_version())
        self.step: int | None = None
        self.waiter: object = None
        self.waiting: tuple[float, str] | None = None  # since when the main thread waits for other ranks, and for what
        self.keeps_order = platform.machine().lower() in ORDERED_MACHINES
        self._thread = ThreadPoolExecutor(1, "beside")  # it begins with the first work

    def wait_until(self, ready: Callable[[], bool], until_s: float = inf) -> bool:
        """Return when `ready()`, or at a time limit, asleep between looks at it."""
        pause_s = FIRST_S
        if ready():
            return True
        self.waiting = time.monotonic(), self.operations[-1][1] if self.operations else "the start"
        try:
            while not ready():
                left_s = until_s - clock.now()
                if left_s <= 0:
                    return False
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, LONGEST_S)
            return True
        finally:
            self.waiting = None

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make()` returns: every rank is a process of its own."""
        return make()

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Start some work on a thread."""
        return self._thread.submit(work)

    def watch_over_ranks(self) -> Callable[[], None]:
        """Start the watchdog, and return what ends it. Collective."""
        self.watchdog = Watchdog(self)
        return self.watchdog.close

    def watch(self, warning_s: float, limit_s: float, folder: Path | None = None) -> None:
        """Say for how long a wait for other ranks may last; see `watchdog`."""
        if self.watchdog is not None:
            self.watchdog.warning_s, self.watchdog.limit_s = warning_s, limit_s
            self.watchdog.folder = None if folder is None else folder.absolute()


def _named(world: MpiWorld, size: int, name: str, call: Callable[..., T]) -> Callable[..., T]:
    """Return a call that says while it runs what it waits for, and since when."""
    append, now, since, what = world.operations.append, time.perf_counter, time.monotonic, f"{name} of {size} ranks"

    def named(*arguments: Any) -> T:
        append((now(), what))
        world.waiting = since(), what
        try:
            return call(*arguments)
        finally:
            world.waiting = None

    return named


@functools.cache
def mpi_world() -> MpiWorld:
    """Return the world of this process."""
    return MpiWorld()


def wrap(comm: MPI.Comm) -> MpiComm:
    """Return a communicator of mpi4py's as one of this world."""
    return MpiComm(comm, mpi_world())


def name_library(version: str) -> str:
    """Return name and version from the text that MPI gives, which is a page long for some libraries."""
    first = version.strip().splitlines()[0]
    words = first.replace("Version:", " ").split(",")[0].split()
    return " ".join(word[1:] if word[:1] == "v" and word[1:2].isdigit() else word for word in words)
