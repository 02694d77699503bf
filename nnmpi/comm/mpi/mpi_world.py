"""MPI as a world: the calls of `comm.world`, by those of mpi4py.

Most are mpi4py's own functions with the same arguments, without a layer in between. Importing this
module starts MPI unless `start.load_mpi` has done so before.

MPI's waits poll for messages at full speed. That is right for ranks that arrive together. But on a
crowded machine a rank that waits long for a slow one slows it down even more. So `wait_until`
sleeps between polls:

    poll . poll .. poll .... poll ........ poll ........ poll        sleeps of 50 us up to 1 ms

Measured processor seconds of each waiting rank, with 4 ranks on 2 cores of which one comes 2 s late
(1.33 is all that three ranks can take of two cores in 2 s):

                       MPI's wait    asleep
    Open MPI 5.0.11    1.33          0.04
    MPICH 5.0.2        1.33          0.05
"""

from __future__ import annotations

import functools
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from math import inf
from mmap import mmap
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import nnmpi.base.clock as clock
from nnmpi.base.errors import CommError, DeviceError
from nnmpi.comm.buffers import CommBuffer
from nnmpi.comm.mpi.watchdog import Watchdog
from nnmpi.comm.world import PAGE_BYTES, Closing, Comm, Traffic, World

# Memory shared by the ranks of a node: one MPI-3 shared window, with a part for each rank.
#
#     file in /dev/shm   | rank 0's bytes  pad | rank 1's bytes  pad | ...     each part begins on
#                                                                              a page
#
# Both Open MPI and MPICH keep a window in an unlinked file in /dev/shm: it disappears with the last
# process, however that ends. Its pages are allocated at the first touch, and a touch without free
# space kills the process (SIGBUS). So the ranks first compare their needs with the free space, and
# then each writes all of its part at once.
#
# Source: Hoefler et al., "MPI + MPI: a new hybrid approach to parallel programming with MPI plus
# shared memory" (2013).

# MPI's own bytes beside a rank's part. Without them in the sum, one rank could fail alone.
MARGIN_BYTES = 2**17
SHM = Path("/dev/shm")
ENDLESS = 2**62
FAILED = -1


class Window:
    """Zeroed bytes for each rank of a node; see `comm.world.SharedPages`. Collective.

    Args:
        node: a communicator of ranks that share memory.
        own_bytes: the length of this rank's part; the ranks' lengths may differ and may be 0.

    Raises:
        DeviceError: on all ranks, when the space is missing or MPI cannot make the window.
    """

    def __init__(self, node: MPI.Intracomm, own_bytes: int) -> None:
        # whole pages, and one for the part's alignment
        room_bytes = (own_bytes // PAGE_BYTES + 2) * PAGE_BYTES
        need = np.array(room_bytes + MARGIN_BYTES)
        node.Allreduce(MPI.IN_PLACE, need)
        free = np.array(free_bytes(int(need)))
        node.Allreduce(MPI.IN_PLACE, free, MPI.MIN)  # all ranks come to the same conclusion
        if need > free:
            raise DeviceError(
                f"the ranks of this node need to share {need} bytes, with MPI's, but one has only"
                f" {free} free in {SHM} or below its limit (ulimit -v); enlarge them (docker run"
                " --shm-size), or use an all-reduce other than shared"
            )
        rank, start, problem = node.Get_rank(), FAILED, ""
        try:
            self._window = MPI.Win.Allocate_shared(room_bytes, 1, comm=node)
            self._window.Lock_all(MPI.MODE_NOCHECK)
            start = -self._query(rank).ctypes.data % PAGE_BYTES
        except MPI.Exception as error:
            problem = error.Get_error_string()
        # The system may map the file at any address, but always at a page, so a part's offset to
        # the next page is the same for all ranks.
        ranges = np.empty((node.Get_size(), 2), np.int64)
        node.Allgather(np.array([start, own_bytes], np.int64), ranges)
        if FAILED in ranges[:, 0]:
            raise DeviceError(
                f"MPI cannot share {room_bytes} bytes among the ranks of a node"
                f" ({problem or 'another rank failed'}); use an all-reduce other than shared"
            )
        self.parts: tuple[NDArray[Any], ...] = tuple(
            self._query(other)[skip : skip + length]
            for other, (skip, length) in enumerate(ranges.tolist())
        )
        self.parts[rank][...] = 0
        node.Barrier()

    def _query(self, rank: int) -> NDArray[np.uint8]:
        memory, _ = self._window.Shared_query(rank)
        return np.frombuffer(cast(memoryview, memory), np.uint8)

    def sync(self) -> None:
        """Memory fence: order this rank's earlier accesses to the window before its later ones."""
        self._window.Sync()

    def free(self) -> None:
        """Free the memory, collectively over the node; later accesses crash the process."""
        self.parts = ()
        if mpi_world().has_ended:  # MPI's end frees all
            return
        self._window.Unlock_all()
        self._window.Free()


def free_bytes(need: int) -> int:
    """Return the free bytes in the folder of MPI's windows; endless without such a folder.

    0 if this process cannot map the needed ones: in Open MPI the other ranks would wait for ever.
    """
    try:
        mmap(-1, need).close()
    except OSError:
        return 0
    return shutil.disk_usage(SHM).free if SHM.is_dir() else ENDLESS


T = TypeVar("T")

FIRST_S, LONGEST_S = 50e-6, 1e-3
OPERATIONS = 200  # in a flight record
TOO_LATE = (
    "{} after the end of the program, as in __del__: the other ranks may not take part; communicate"
    " before it ends"
)
# Processors that keep the program order of stores, and of loads.
ORDERED_MACHINES = ("x86_64", "amd64", "i686", "i386")


class MpiComm(Closing):
    """A communicator of MPI; see `comm.world.Comm` for the calls.

    Attributes:
        mpi: mpi4py's communicator, for tests of MPI itself.
    """

    test_all = staticmethod(MPI.Request.Testall)

    def __init__(self, mpi: MPI.Comm, world: MpiWorld) -> None:
        self.mpi, self.world, self._world = mpi, cast(World, world), world
        named = partial(_named, world, mpi.Get_size())
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        self.isend, self.issend, self.irecv = mpi.Isend, mpi.Issend, mpi.Irecv
        self.wait_all = named("messages", MPI.Request.Waitall)
        self.barrier = named("a barrier", mpi.Barrier)
        self.allgather = named("an all-gather", mpi.Allgather)
        self.allreduce = named("an all-reduce", partial(mpi.Allreduce, MPI.IN_PLACE))
        self.iallreduce = partial(mpi.Iallreduce, MPI.IN_PLACE)
        self.broadcast, self.ibroadcast = named("a broadcast", mpi.Bcast), mpi.Ibcast
        self.reduce_scatter = named("a reduce-scatter", mpi.Reduce_scatter)
        self.ireduce_scatter = mpi.Ireduce_scatter
        self.allgatherv = named("an all-gather", partial(_gather, mpi.Allgatherv))
        self.iallgatherv = partial(_gather, mpi.Iallgatherv)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks' numbers in the world."""
        return tuple(
            MPI.Group.Translate_ranks(self.mpi.Get_group(), None, MPI.COMM_WORLD.Get_group())
        )

    def progress(self) -> None:
        """Drive the progress of pending messages, by a probe: any MPI call does."""
        self.mpi.Iprobe()

    # ---- other communicators ----

    def _make(self, call: Callable[..., MPI.Comm], *args: int) -> MpiComm:
        comm = _named(self._world, self.size, "making a communicator", call)(*args)
        return MpiComm(comm, self._world)

    def duplicate(self) -> MpiComm:
        """Return another communicator of the same ranks."""
        return self._make(self.mpi.Dup)

    def split(self, color: int, key: int) -> MpiComm:
        """Return the communicator of the ranks with the same color."""
        return self._make(self.mpi.Split, color, key)

    def split_by_node(self, key: int) -> MpiComm:
        """Return the communicator of the ranks on this rank's node."""
        return self._make(self.mpi.Split_type, MPI.COMM_TYPE_SHARED, key)

    def free(self) -> None:
        """Free MPI's communicator."""
        if not self._world.has_ended:  # MPI's end frees all
            self.mpi.Free()
        self.close()

    def share_pages(self, own_bytes: int) -> Window:
        """Return memory shared by all ranks."""
        share = _named(self._world, self.size, "sharing memory", Window)
        return share(cast(MPI.Intracomm, self.mpi), own_bytes)


class MpiWorld:
    """The world of MPI processes; see `comm.world.World` for the calls. Singleton: `mpi_world`.

    Attributes:
        waiting: (`time.monotonic` at the begin, description) of the main thread's present wait for
            other ranks; None without one.
        operations: the same of the last calls.
        has_ended: whether this rank's program has ended, by the other ranks' knowledge: no rank
            takes part in another call.
    """

    machine = None

    def __init__(self) -> None:
        self.step: int | None = None
        self.waiter: object = None
        self.collective_s, self.traffic = 0.0, Traffic()
        self.has_ended = False
        self.waiting: tuple[float, str] | None = None
        self.operations: deque[tuple[float, str]] = deque(maxlen=OPERATIONS)
        self.watchdog: Watchdog | None = None
        self.comm: Comm = MpiComm(MPI.COMM_WORLD, self)
        vendor, version = MPI.get_vendor()
        self.library = f"{vendor} {'.'.join(map(str, version))}"
        self.keeps_order = platform.machine().lower() in ORDERED_MACHINES
        self._thread = ThreadPoolExecutor(1, "beside")  # starts with the first work

    def wait_until(self, ready: Callable[[], bool], until_s: float = inf) -> bool:
        """Return when `ready()`, or at a time limit; sleep between polls."""
        pause_s = FIRST_S
        if ready():
            return True
        self.waiting = time.monotonic(), self.operations[-1][1] if self.operations else "the start"
        try:
            while not ready():
                if self.has_ended:
                    raise CommError(TOO_LATE.format("a message"))
                left_s = until_s - clock.now()
                if left_s <= 0:
                    return False
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, LONGEST_S)
            return True
        finally:
            self.waiting = None

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`: every rank is a process."""
        return make()

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Queue work for the background thread."""
        return self._thread.submit(work)

    def watch_over_ranks(self) -> Callable[[], None]:
        """Start the watchdog, and return its `close`. Collective."""
        self.watchdog = Watchdog(self)
        return self.watchdog.close

    def watch(self, warning_s: float, limit_s: float, folder: str | Path | None = None) -> None:
        """Set the time limits of waits for other ranks; see `watchdog`."""
        if self.watchdog is not None:
            self.watchdog.warning_s, self.watchdog.limit_s = warning_s, limit_s
            self.watchdog.folder = None if folder is None else Path(folder).absolute()


def _gather(
    call: Callable[..., T], local: CommBuffer | None, into: CommBuffer, counts: Sequence[int]
) -> T:
    return call(MPI.IN_PLACE if local is None else local, [into, list(counts)])


def _named(world: MpiWorld, size: int, name: str, call: Callable[..., T]) -> Callable[..., T]:
    """Return a call that sets `world.waiting` while it runs; it is refused after the job's end."""
    append, now, what = world.operations.append, time.monotonic, f"{name} of {size} ranks"

    def named(*arguments: Any) -> T:
        if world.has_ended:
            raise CommError(TOO_LATE.format(what))
        world.waiting = begun = now(), what
        append(begun)
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
    """Return mpi4py's communicator as one of this world."""
    return MpiComm(comm, mpi_world())
