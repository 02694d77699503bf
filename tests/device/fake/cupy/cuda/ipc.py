"""Memory straight from the device, which other processes can open: a file in the system's shared memory.

CUDA's rules are kept: a handle is of a whole allocation, it cannot be opened by the process that made it, nor memory of
a pool through it at an address of one's own. (Memory that CuPy's pool gives has a handle in CUDA, too; here it has one
that nobody can open, as its base is not what the program believes it to be.)
"""

import mmap
import os
import tempfile
from typing import Any

import numpy as np
from cupy_backends.cuda.api.runtime import CUDARuntimeError

from cupy.cuda import memory

FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
HANDLE_BYTES = 64
FILES: dict[int, str] = {}  # address of an allocation: its file
OPENED: dict[int, Any] = {}  # address of another process's: its mapping
REFUSED: list[bool] = []  # for tests: a system that lets nobody open anything


class Memory(memory.BaseMemory):
    """An allocation by cudaMalloc.

    Args:
        size: in bytes.
    """

    __slots__ = ("_file",)

    def __init__(self, size: int) -> None:
        with tempfile.NamedTemporaryFile(prefix="nnmpi-", dir=FOLDER, delete=False) as file:
            file.write(b"\xff" * size)
            file.flush()
            self._owner = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        self.size, self.ptr, self._file = size, self._owner.ctypes.data, file.name
        memory.OWNERS[id(self._owner)] = self  # type: ignore[assignment]
        FILES[self.ptr] = file.name

    def __del__(self) -> None:
        if FILES.pop(self.ptr, None) is not None:
            os.unlink(self._file)


def handle_of(ptr: int) -> bytes:
    """Return a handle for the allocation around an address."""
    base = memory.base_of(ptr)
    if base is None:
        raise CUDARuntimeError(1)
    file = os.path.basename(FILES.get(base.ptr, ""))
    return f"{os.getpid()}:{file}:{base.size}".encode().ljust(HANDLE_BYTES, b"\0")


def open_handle(handle: bytes) -> int:
    """Map another process's allocation and return its address."""
    if len(handle) != HANDLE_BYTES:
        raise CUDARuntimeError(1)
    process, name, size = handle.rstrip(b"\0").decode().split(":")
    if int(process) == os.getpid():  # CUDA: not in the process that made the handle
        raise CUDARuntimeError(201)
    if not name or REFUSED:
        raise CUDARuntimeError(217)
    with open(os.path.join(FOLDER or tempfile.gettempdir(), name), "r+b") as file:
        mapping = np.frombuffer(mmap.mmap(file.fileno(), int(size)), np.uint8)
    OPENED[mapping.ctypes.data] = mapping
    return int(mapping.ctypes.data)


def close_handle(ptr: int) -> None:
    """Let go of it."""
    if OPENED.pop(ptr, None) is None:
        raise CUDARuntimeError(1)
