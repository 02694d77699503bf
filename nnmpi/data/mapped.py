"""FileArray: an array in a file, mapped, so that the ranks of a node share one copy of its pages.

Where the file is not on a local disk, its rows are read by calls in place of a mapping: a page that
a server has lost ends a process by SIGBUS, without a word. On a local disk the file is compared,
before each read, with what it was when it was opened: one that was cut meanwhile is an error in a
sentence. Rows that follow one another, which may be many, are read by calls there, too; single ones
are copied from the mapping at once.

At first, and while rows come as slowly as from a disk, those of a batch are asked for all at once
before the first is copied: so the disk reads them side by side.
"""

import os
import sys
import weakref
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from nnmpi.backend.array import Integers, Shape
from nnmpi.base.errors import DataError
from nnmpi.data.lazy import LazyRows, row_bytes

MOUNTS = Path("/proc/self/mountinfo")
# File systems whose pages cannot be lost while a file is open; any other may be a server's.
LOCAL = (
    *("bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3"),
    *("overlay", "ramfs", "reiserfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs"),
)
# Longer than a row in memory takes, and shorter than one from a disk.
SLOW_ROW_S, SLOW_BYTE_S = 2e-6, 5e-10
FileState: TypeAlias = tuple[int, int]


def state_of(path: Path) -> FileState:
    """Return what a changed file has another one of: its size, and its time in nanoseconds.

    Raises:
        DataError: when it cannot be examined.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read any more ({error.strerror or error})") from None
    return found.st_size, found.st_mtime_ns


@cache
def _mounts() -> tuple[tuple[str, str], ...]:
    """Return each mounted folder with the type of its file system, the longest path first."""
    lines = MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    found = [(line.split()[4], line.partition(" - ")[2].split()[0]) for line in lines]
    found.reverse()  # of two mounts on one folder the later one is seen
    return tuple(sorted(found, key=lambda pair: -len(pair[0])))


def check_unchanged(path: Path, before: FileState) -> None:
    """Refuse a file that was changed since its state was taken.

    Raises:
        DataError: with what has changed.
    """
    if (now := state_of(path)) != before:
        sizes = f"it had {before[0]} bytes, and has {now[0]}"
        what = sizes if now[0] != before[0] else "it was written at another time"
        raise DataError(
            f"{path} was changed while it was in use ({what}); bring it back and resume, or train"
            " anew"
        )


def is_local(path: Path) -> bool:
    """Return whether a file is on a disk of this machine, as far as the system says."""
    if sys.platform == "darwin" or not MOUNTS.exists():
        return True
    place = os.path.realpath(path)
    for folder, kind in _mounts():
        if place.startswith(folder.rstrip("/") + "/"):
            return kind in LOCAL
    return False


class FileArray(LazyRows):
    """An array in C order that a file holds from a byte on.

    Args:
        path: of the file.
        dtype, shape: of the array.
        offset: of its first byte.
        checksum: of its bytes, if it is known.
        is_ours: whether nobody else writes the file, as in the cache, so that it is not compared.
        by_calls: whether to read rows by calls; None for those that are not on a local disk.

    Raises:
        DataError: for a file that is too short; and, when rows are read, for one that was changed
            or lost meanwhile.
    """

    def __init__(
        self,
        path: Path,
        dtype: DTypeLike,
        shape: Shape,
        offset: int = 0,
        checksum: int | None = None,
        is_ours: bool = False,
        by_calls: bool | None = None,
    ) -> None:
        self.path, self.dtype, self.shape, self.offset = path, np.dtype(dtype), shape, offset
        self.checksum, self._is_ours = checksum, is_ours
        self._state, needed = state_of(path), offset + self.size * self.dtype.itemsize
        if self._state[0] < needed:
            raise DataError(
                f"{path}: truncated: it has {self._state[0]} bytes, but its header promises"
                f" {needed}; get it again"
            )
        self._mapped: NDArray[Any] | None = None
        if (is_local(path) if by_calls is None else not by_calls) and self.size:
            # as an ndarray: indexing a memmap takes 10 times as long
            self._mapped = np.memmap(path, self.dtype, "r", offset, shape).view(np.ndarray)
        self._number, self._is_slow = os.open(path, os.O_RDONLY), True
        weakref.finalize(self, os.close, self._number)

    def reshape(self, *shape: int) -> "FileArray":
        """Return the same elements in another shape."""
        return FileArray(self.path, self.dtype, shape, self.offset, self.checksum, self._is_ours)

    @property
    def place(self) -> dict[str, Any]:
        """Where it is in the file, as JSON values: arguments of the class."""
        about = {name: getattr(self, name) for name in ("shape", "offset", "checksum")}
        return {**about, "dtype": self.dtype.str}

    def _check(self) -> None:
        """Refuse a file that was changed since it was opened."""
        if not self._is_ours:
            check_unchanged(self.path, self._state)

    def take(self, indices: Integers, axis: int = 0) -> NDArray[Any]:
        """See `LazyRows`."""
        self._check()
        begin = perf_counter()
        if self._is_slow:
            self._ask_for(indices)
        if self._mapped is not None:
            result = self._mapped.take(indices, axis=0)
        else:
            result = np.empty((len(indices), *self.shape[1:]), self.dtype)
            for row, index in zip(result, indices.tolist(), strict=True):
                self._read(row, index)
        slow_s = SLOW_ROW_S * len(indices) + SLOW_BYTE_S * result.nbytes
        self._is_slow = perf_counter() - begin > slow_s
        return result

    def _ask_for(self, indices: Integers) -> None:
        """Let the system begin to read rows."""
        nbytes = row_bytes(self)
        if hasattr(os, "posix_fadvise"):
            for index in indices.tolist():
                place = self.offset + index * nbytes
                os.posix_fadvise(self._number, place, nbytes, os.POSIX_FADV_WILLNEED)

    def part(self, start: int, stop: int) -> NDArray[Any]:
        """See `LazyRows`."""
        self._check()
        if self._mapped is not None and self._is_ours:
            return self._mapped[start:stop]
        result = np.empty((stop - start, *self.shape[1:]), self.dtype)
        self._read(result, start)
        return result

    def _read(self, result: NDArray[Any], first: int) -> None:
        """Fill an array by the rows from `first` on."""
        left, at = result.reshape(-1).view(np.uint8), self.offset
        at += first * row_bytes(self)
        while left.size:
            try:
                count = os.preadv(self._number, [left.data], at)
            except OSError as error:
                reason = error.strerror or error
                raise DataError(f"{self.path}: cannot be read any more ({reason})") from error
            if not count:
                raise DataError(f"{self.path} was cut while it was in use; get it again")
            left, at = left[count:], at + count


def read_header(stream: IO[bytes]) -> tuple[Shape, np.dtype[Any], bool]:
    """Return the shape and the dtype of .npy content, and whether its rows follow one another.

    Raises:
        ValueError: for content that is no .npy, or holds objects.
    """
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded: they are pickled")
    return shape, dtype, bool(shape) and not (is_fortran and len(shape) > 1)
