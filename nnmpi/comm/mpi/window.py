"""Memory that all ranks of a node see: one MPI-3 shared window, with a part for each rank.

    file in /dev/shm   | rank 0's bytes  pad | rank 1's bytes  pad | ...     each part begins on a page of its own

Both Open MPI and MPICH keep a window in a file in /dev/shm that has no name any more: it goes with the last process,
however that ends. Its pages are taken when they are first touched, and touching one for which there is no room kills
the process (SIGBUS). So the ranks look at the room before, together, and each one writes all of its part at once.

Source: Hoefler et al., "MPI + MPI: a new hybrid approach to parallel programming with MPI plus shared memory" (2013).
"""

import os
from pathlib import Path
from typing import Any, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from nnmpi.comm.world import PAGE_BYTES
from nnmpi.errors import DeviceError

MARGIN_BYTES = 2**17  # what MPI takes for itself beside the ranks' parts; were it missing, one rank would fail alone
SHM = Path("/dev/shm")
ENDLESS = 2**62
FAILED = -1


class Window:
    """Some bytes of every rank of a node, zeros at first: see `comm.world.SharedPages`. Making one is collective.

    Args:
        node: a communicator of ranks that share memory.
        own_bytes: the length of this rank's part; the ranks' lengths may differ, and be 0.
        folder: where this MPI keeps its windows; None for a place that cannot be looked at.

    Raises:
        DeviceError: on all ranks, when there is no room, or MPI cannot make the window.
    """

    def __init__(self, node: MPI.Intracomm, own_bytes: int, folder: Path | None = SHM) -> None:
        room_bytes = window_bytes(own_bytes)
        # The ranks' lengths, and what each finds free, so that all come to the same conclusion.
        needs = np.empty((node.Get_size(), 2), np.int64)
        node.Allgather(np.array([room_bytes, free_bytes(folder)], np.int64), needs)
        check_room(folder, int(needs[:, 0].sum()), int(needs[:, 1].min()))
        rank, start, problem = node.Get_rank(), FAILED, ""
        try:
            self._window = MPI.Win.Allocate_shared(room_bytes, 1, comm=node)
            self._window.Lock_all(MPI.MODE_NOCHECK)
            start = -self._query(rank).ctypes.data % PAGE_BYTES
        except MPI.Exception as error:
            problem = error.Get_error_string()
        # The system may put the file anywhere in this process, but always on pages, so all ranks see one alignment.
        places = np.empty((node.Get_size(), 2), np.int64)
        node.Allgather(np.array([start, own_bytes], np.int64), places)
        if FAILED in places[:, 0]:
            raise DeviceError(
                f"MPI cannot share {room_bytes} bytes among the ranks of a node ({problem or 'another rank failed'}); "
                "use another all-reduce than shared"
            )
        self.parts: tuple[NDArray[Any], ...] = tuple(
            self._query(other)[skip : skip + length] for other, (skip, length) in enumerate(places.tolist())
        )
        self.parts[rank][...] = 0
        node.Barrier()

    def _query(self, rank: int) -> NDArray[np.uint8]:
        """Return all that MPI gave to a rank."""
        memory, _ = self._window.Shared_query(rank)
        return np.frombuffer(cast(memoryview, memory), np.uint8)

    def sync(self) -> None:
        """Order this rank's reads and writes of the window before against those after; for weak store order."""
        self._window.Sync()

    def free(self) -> None:
        """Give the memory back. Collective over the node; touching the parts afterwards ends the process."""
        self.parts = ()
        self._window.Unlock_all()
        self._window.Free()


def window_bytes(own_bytes: int) -> int:
    """Return what a rank's part of this length takes: whole pages, and one for its alignment."""
    return (-(-own_bytes // PAGE_BYTES) + 1) * PAGE_BYTES


def find_folder(address: int) -> Path | None:
    """Return the folder of the file in which this address of the process lies; None where there is none (Linux)."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split(maxsplit=5)  # low-high, permissions, offset, device, inode, path
        low, high = (int(bound, 16) for bound in fields[0].split("-"))
        if low <= address < high:
            path = fields[5].removesuffix(" (deleted)") if len(fields) > 5 else ""
            return Path(path).parent if path.startswith("/") else None
    return None


def free_bytes(folder: Path | None) -> int:
    """Return what is free in a folder's file system; no end of it where there is no folder to look at."""
    if folder is None or not folder.is_dir():
        return ENDLESS
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def check_room(folder: Path | None, need: int, free: int) -> None:
    """Refuse what does not fit.

    Args:
        folder: where it would be, for the error.
        need: bytes that are to be shared.
        free: bytes that are free there.

    Raises:
        DeviceError: when `need`, and a little for MPI itself, is more than `free`.
    """
    if need + MARGIN_BYTES > free:
        raise DeviceError(
            f"the ranks of this node want to share {need} bytes, and MPI needs {MARGIN_BYTES} beside them, but "
            f"{folder or SHM} has only {free} free; enlarge it (docker run --shm-size), or use another all-reduce than "
            "shared"
        )
