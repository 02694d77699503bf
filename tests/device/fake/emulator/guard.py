"""Running a kernel on copies of its arrays, each between pages that may not be touched.

at the end      |  no access  | ........ 0xA5 | array |  no access  |        one byte too far is a fault
near the end    |  no access  | ..... 0xA5 | array | 0xA5 |  no access  |    the address modulo 16 is what it was
near the start  |  no access  | 0xA5 | array | 0xA5 ..... |  no access  |    so here, for a run in reverse order
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
PATTERN = 0xA5
_guarding: ContextVar[bool | None] = ContextVar("guarding", default=None)
_libc = ctypes.CDLL(None)


def guarding() -> bool | None:
    """Return True inside `guarded()`, else None."""
    return _guarding.get()


@contextmanager
def guarded() -> Iterator[None]:
    """Run every kernel three times in this block, on arrays between guard pages, once with all threads reversed.

    A launch then raises for an access outside of its arrays, and for results that depend on the threads' order.
    """
    token = _guarding.set(True)
    try:
        yield
    finally:
        _guarding.reset(token)


class Guarded:
    """Copies of arrays between guard pages; what begins at the same address is one array."""

    def __init__(self, arrays: Sequence[tuple[int, int]], where: str) -> None:
        sizes: dict[int, int] = {}
        for address, size in arrays:
            sizes[address] = max(size, sizes.get(address, 0))
        self._copies: dict[int, tuple[mmap.mmap, int, int]] = {}
        for address, size in sizes.items():
            self._copies[address] = self._copied(address, size, where)

    @staticmethod
    def _copied(address: int, size: int, where: str) -> tuple[mmap.mmap, int, int]:
        inner = -(-(size + 16) // PAGE) * PAGE
        memory = mmap.mmap(-1, inner + 2 * PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(base + PAGE, PATTERN, inner)
        start = base + PAGE
        if where == "near the start":
            start += address % 16
        else:
            start += inner - size
            start -= 0 if where == "at the end" else (start - address) % 16
        ctypes.memmove(start, address, size)
        for page in (base, base + PAGE + inner):
            if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
                raise OSError("mprotect failed")
        return memory, start, size

    def moved(self, values: list[Any]) -> list[Any]:
        """Return the arguments with addresses of the copies in the places of the arrays'."""
        return [
            ctypes.c_uint64(self._copies[value.value][1])
            if isinstance(value, ctypes.c_uint64) and value.value in self._copies
            else value
            for value in values
        ]

    def same(self, other: Guarded) -> bool:
        """Return whether both hold the same bytes."""
        return all(
            np.array_equal(_bytes(start, size), _bytes(*other._copies[address][1:]))
            for address, (_, start, size) in self._copies.items()
        )

    def overrun(self) -> bool:
        """Return whether anything beside an array was written to."""
        for memory, start, size in self._copies.values():
            base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            before, after = start - base - PAGE, base + len(memory) - PAGE - start - size
            if (_bytes(base + PAGE, before) != PATTERN).any() or (_bytes(start + size, after) != PATTERN).any():
                return True
        return False

    def copy_back(self) -> None:
        """Write the copies to where they are from."""
        for address, (_, start, size) in self._copies.items():
            ctypes.memmove(address, start, size)


def _bytes(address: int, size: int) -> np.ndarray[Any, Any]:
    return np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)
