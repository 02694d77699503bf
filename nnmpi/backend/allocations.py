"""What arrays take, to the byte: every allocation between two places of a program, as it comes and goes.

NumPy lets a program say where its arrays' memory comes from (NEP 49). Here it comes from where it always does, and is
counted on the way. CuPy has hooks for the same. That costs about 2 us for each array: it is for measuring, not for
training.

    with counting(backend) as count:
        y = f(x)
        count.used, count.peak          bytes since the beginning: now, and at most
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np

from nnmpi.backend.backend import Backend

LEAST_BYTES = 16  # a single number is not worth an account

_SET_HANDLER = 304  # `PyDataMem_SetHandler` in NumPy's table of C functions, see numpy/_core/code_generators
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_MALLOC = ctypes.CFUNCTYPE(_POINTER, _POINTER, _SIZE)
_CALLOC = ctypes.CFUNCTYPE(_POINTER, _POINTER, _SIZE, _SIZE)
_REALLOC = ctypes.CFUNCTYPE(_POINTER, _POINTER, _POINTER, _SIZE)
_FREE = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _SIZE)


_counting: ContextVar[AllocationCount | None] = ContextVar("nnmpi_counting", default=None)


def count_in(count: AllocationCount | None) -> AllocationCount | None:
    """Let what this thread makes be in an account, or in none, from now on; return the one before.

    So what is no rank's, such as a simulated message's copy, is in nobody's account.
    """
    before = _counting.get()
    if before is not count:
        _counting.set(count)
    return before


class AllocationCount:
    """Bytes in arrays, counted from the beginning.

    Attributes:
        used: now; arrays from before the beginning that have gone since are not in it.
        peak: the most there were since the last `reset_peak`.
    """

    def __init__(self) -> None:
        self.used = self.peak = self._before = 0

    @property
    def most(self) -> int:
        """The most there were since the beginning."""
        return max(self.peak, self._before)

    def reset_peak(self) -> None:
        """Look for the peak from now on."""
        self.peak, self._before = self.used, self.most

    def add(self, size: int) -> None:
        """Count an array in, or out."""
        self.used += size
        self.peak = max(self.peak, self.used)


class _Owners:
    """Which count each array is in, by its address: another thread may be the one that frees it."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[AllocationCount, int]] = {}

    def add(self, address: int | None, size: int, count: AllocationCount | None) -> None:
        """Count an array in."""
        if count is not None and address and size >= LEAST_BYTES:
            self._counts[address] = count, size
            count.add(size)

    def remove(self, address: int | None) -> None:
        """Count an array out, if it was counted in."""
        if address in self._counts:
            count, size = self._counts.pop(address)
            count.add(-size)


@contextmanager
def counting(backend: Backend) -> Iterator[AllocationCount]:
    """Count the arrays of a backend that this thread makes in the block; one block at a time."""
    count = AllocationCount()
    outside = count_in(count)
    hook = _hook(backend, count) if backend.is_device else _numpy_hook()
    try:
        with hook:
            yield count
    finally:
        count_in(outside)


def _hook(backend: Backend, count: AllocationCount) -> Any:
    """Return CuPy's hook that counts."""
    owners = _Owners()

    class Hook(backend.xp.cuda.MemoryHook):  # type: ignore[misc,name-defined]
        """Counts what is asked of the pool and given back; its pieces of 512 bytes may be longer."""

        name = "nnmpi"

        def malloc_postprocess(self, **call: Any) -> None:
            """Count an array in."""
            owners.add(call["mem_ptr"], call["size"], count)

        def free_postprocess(self, **call: Any) -> None:
            """Count it out."""
            owners.remove(call["mem_ptr"])

    return Hook()


class _Allocator(ctypes.Structure):
    _fields_ = (("context", _POINTER), ("malloc", _MALLOC), ("calloc", _CALLOC), ("realloc", _REALLOC), ("free", _FREE))


class _HandlerRecord(ctypes.Structure):
    """NumPy's `PyDataMem_Handler`."""

    _fields_ = (("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("allocator", _Allocator))


class _Handler:
    """NumPy's way to memory, past the thread's count. It is never freed: arrays that came this way go this way."""

    def __init__(self) -> None:
        library, owners = ctypes.CDLL(None), _Owners()
        for name in ("malloc", "calloc", "realloc"):
            getattr(library, name).restype = _POINTER

        def malloc(_: Any, size: int) -> Any:
            address = library.malloc(_SIZE(size))
            owners.add(address, size, _counting.get())
            return address

        def calloc(_: Any, elements: int, size: int) -> Any:
            address = library.calloc(_SIZE(elements), _SIZE(size))
            owners.add(address, elements * size, _counting.get())
            return address

        def realloc(_: Any, old: Any, size: int) -> Any:
            address = library.realloc(_POINTER(old), _SIZE(size))
            owners.remove(old)
            owners.add(address, size, _counting.get())
            return address

        def free(_: Any, address: Any, __: int) -> None:
            owners.remove(address)
            library.free(_POINTER(address))

        allocator = _Allocator(None, _MALLOC(malloc), _CALLOC(calloc), _REALLOC(realloc), _FREE(free))
        self._record, self._name = _HandlerRecord(b"nnmpi", 1, allocator), b"mem_handler"
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (_POINTER, ctypes.c_char_p, _POINTER)
        self.capsule = new(ctypes.addressof(self._record), self._name, None)
        # When Python ends, arrays of this handler go after all that could give them back has gone: then nothing is to
        # be done (any function of C's that looks at nothing will do), and the handler is to stay where it is.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        nothing = ctypes.cast(library.getpid, _POINTER).value
        atexit.register(setattr, self._record.allocator, "free", _FREE(nothing or 0))


@cache
def _handler() -> _Handler:
    return _Handler()


@contextmanager
def _numpy_hook() -> Iterator[None]:
    before = _use(_handler().capsule)
    try:
        yield
    finally:
        _use(before)


def _use(capsule: Any) -> Any:
    """Let NumPy take memory by this handler from now on, in this thread; return the one before."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = _POINTER, (ctypes.py_object, ctypes.c_char_p)
    core: Any = np._core  # type: ignore[attr-defined]
    table = ctypes.cast(get(core.multiarray._ARRAY_API, None), ctypes.POINTER(_POINTER))
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[_SET_HANDLER] or 0)(capsule)
