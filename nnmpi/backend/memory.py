"""Memory: what a backend uses and may use, and how the host process reuses freed memory.

A training step frees arrays of megabytes and asks for them again a moment later. glibc by default
maps each such array afresh, and the kernel then zeroes it page by page: a quarter of a
convolutional network's step. `keep_freed_memory` changes that.
"""

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnmpi.units import format_bytes

_STATUS = Path("/proc/self/status")

# Numbers of glibc's malloc.h. The mapping threshold cannot be set above 32 MiB.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8


@dataclass(frozen=True)
class MemoryUse:
    """Memory in bytes: a device's use by this process's arrays, or the host process's.

    Attributes:
        used_bytes: in arrays that are alive.
        peak_bytes: the most that the pool (on the host: the process) has held at once.
        limit_bytes: what the pool may take from the device; None without a limit.
        pool_bytes: what the pool has taken from the device, in use or kept for later; 0 on the
            host, which has none.
        note: where the limit comes from, as text.
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


def host_memory() -> MemoryUse:
    """Return what this process has of the host's memory; zeros where the system does not tell."""
    used = _read("VmRSS")
    return MemoryUse(
        used, max(used, _read("VmHWM")), None, 0, "of the host's memory, the whole process"
    )


def keep_freed_memory() -> bool:
    """Make malloc keep freed blocks of up to 32 MiB; True where it can (glibc).

    The process then holds on to the most memory that it ever used.
    """
    return _set_malloc(
        (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20), (_MMAP_THRESHOLD, 32 * 2**20)
    )


def share_freed_memory() -> bool:
    """Make all later threads share one malloc arena; True where it can (glibc).

    Else a thread keeps what it has freed for itself: some MiB for each, where only one of many
    computes at a time.
    """
    return _set_malloc((_ARENA_MAX, 1))


def return_freed_memory() -> None:
    """Give what malloc keeps, and nobody uses, back to the system now (glibc)."""
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
