"""Memory use and limits of a backend, and reuse of freed memory in the host process.

A training step frees arrays of megabytes and allocates them again a moment later. By default glibc
maps each such array anew, and the kernel zeroes its pages: a quarter of a convolutional network's
step. `keep_freed_memory` avoids that.
"""

import ctypes
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from nnmpi.base.units import format_bytes

T = TypeVar("T")
_STATUS = Path("/proc/self/status")

# Numbers of glibc's malloc.h. The mapping threshold cannot be set above 32 MiB.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8


@dataclass(frozen=True)
class MemoryUse:
    """Memory in bytes: a device's use by this process's arrays, or the host process's.

    Attributes:
        used_bytes: in live arrays.
        peak_bytes: the largest size of the pool (on the host: of the process) so far.
        limit_bytes: the largest size that the pool may have; None without a limit.
        pool_bytes: the size of the pool, used and free; 0 on the host, which has none.
        note: the origin of the limit, as text.
    """

    used_bytes: int
    peak_bytes: int
    limit_bytes: int | None
    pool_bytes: int
    note: str

    def __str__(self) -> str:
        limit = (
            "no limit" if self.limit_bytes is None else f"limit {format_bytes(self.limit_bytes)}"
        )
        used, peak = format_bytes(self.used_bytes), format_bytes(self.peak_bytes)
        return f"{used} in use, {peak} at the peak, {limit} ({self.note})"


class Meter(Protocol):
    """Counts the memory that this thread's arrays take, within `with`."""

    def __enter__(self) -> "Meter": ...

    def __exit__(self, *error: object) -> None: ...

    def measure(self, call: Callable[[], T]) -> tuple[T, int, int]:
        """Return a call's result, and the bytes beyond those before it: the most, those left."""


class HostMeter:
    """The host's: Python's tracing of memory, to which NumPy reports its arrays.

    It traces the process, so other threads' arrays count, too. Simulated ranks compute one at a
    time, and leave out what others do in their turns (see `leaving_out_others`).
    """

    _open: ClassVar[int] = 0
    _is_ours: ClassVar[bool] = False

    def __enter__(self) -> "HostMeter":
        if not tracemalloc.is_tracing():
            tracemalloc.start()
            HostMeter._is_ours = True
        HostMeter._open += 1
        self._token = _meter.set(self)
        self._base = self._most = 0
        return self

    def __exit__(self, *error: object) -> None:
        _meter.reset(self._token)
        HostMeter._open -= 1
        if HostMeter._is_ours and not HostMeter._open:
            tracemalloc.stop()
            HostMeter._is_ours = False

    def measure(self, call: Callable[[], T]) -> tuple[T, int, int]:
        """See `Meter`."""
        self._most = 0
        self.resume(0)
        result = call()
        left = self.pause()
        return result, self._most, left

    def pause(self) -> int:
        """Return the bytes now, beyond those before."""
        now, most = tracemalloc.get_traced_memory()
        self._most = max(self._most, most - self._base)
        return now - self._base

    def resume(self, now: int) -> None:
        """Count on from these bytes."""
        self._base = tracemalloc.get_traced_memory()[0] - now
        tracemalloc.reset_peak()


_meter: ContextVar[HostMeter | None] = ContextVar("nnmpi_meter", default=None)


@contextmanager
def leaving_out_others() -> Iterator[None]:
    """Let this thread's meter leave out what happens in the block, in other threads."""
    meter = _meter.get()
    now = 0 if meter is None else meter.pause()
    try:
        yield
    finally:
        if meter is not None:
            meter.resume(now)


def host_memory() -> MemoryUse:
    """Return this process's use of the host's memory; zeros on systems without /proc."""
    used = _read("VmRSS")
    return MemoryUse(
        used, max(used, _read("VmHWM")), None, 0, "of the host's memory, the whole process"
    )


def keep_freed_memory() -> bool:
    """Make malloc keep freed blocks of up to 32 MiB; return True with glibc.

    The process's memory then stays at its peak. The import of `nnmpi.backend` calls it, since any
    loop has the page faults of the train command: 4,500 in a step of a character LSTM.
    """
    return _set_malloc(
        (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20), (_MMAP_THRESHOLD, 32 * 2**20)
    )


def share_freed_memory() -> bool:
    """Make all later threads share one malloc arena; return True with glibc.

    For simulated ranks: many threads, of which one computes at a time. Otherwise each thread keeps
    some MiB of freed memory that the others cannot use.
    """
    return _set_malloc((_ARENA_MAX, 1))


def return_freed_memory() -> None:
    """Return malloc's free memory to the system now (glibc)."""
    trim = _find("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _set_malloc(*settings: tuple[int, int]) -> bool:
    mallopt = _find("mallopt")
    return mallopt is not None and all(
        mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in settings
    )


def _find(name: str) -> Any:
    """Return a function of glibc's; None elsewhere."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def _read(name: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
