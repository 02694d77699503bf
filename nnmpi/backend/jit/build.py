"""Compiling: the flags, the types of arguments, the cache on disk, and who compiles while others wait.

Numba keeps machine code per function, argument types, sizes and processor, and notices when the function's own file
changes. Here it also notices when a helper in another file of this folder does.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import types
from numba.core.caching import FunctionCache

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be taken in any order, which is what lets them be vectorized. NaN and infinity stay what they are, so that a
# run that diverges shows it.
FAST = frozenset({"contract", "reassoc", "nsz", "arcp", "afn"})
OPTIONS: dict[str, Any] = {"fastmath": set(FAST), "error_model": "numpy", "nogil": True}

# A compilation takes seconds; who waits longer than this for another process's compiles for itself.
WAIT_S = 120.0
POLL_S = 0.02

int64, float64, boolean = types.int64, types.float64, types.boolean


def read(ndim: int, dtype: Any = types.float32) -> Any:
    """Return the type of a C-contiguous array that a kernel only reads (NumPy may have it marked as read-only)."""
    return types.Array(dtype, ndim, "C", readonly=True)


def write(ndim: int, dtype: Any = types.float32) -> Any:
    """Return the type of a C-contiguous array that a kernel writes to."""
    return types.Array(dtype, ndim, "C")


def strided(ndim: int) -> Any:
    """Return the type of a float32 array with any strides, a view of some of another one's elements."""
    return types.Array(types.float32, ndim, "A")


def build(function: F, *arguments: Any) -> F:
    """Return the function compiled for arguments of these types, from the cache on disk if it is there."""
    compiled = numba.njit(**OPTIONS)(function)
    with suppress(RuntimeError):  # where no folder can be written to, each process compiles for itself
        compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
    with _one_at_a_time():
        compiled.compile(types.void(*arguments))
    compiled.disable_compile()
    result: F = compiled
    return result


def inlined(function: F) -> F:
    """Return a helper whose text is put into each kernel that calls it, so that sizes known there are known in it."""
    helper: F = numba.njit(inline="always", **OPTIONS)(function)
    return helper


class _Cache(FunctionCache):
    """Numba's cache, which here tells apart machine code from different states of this folder."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), sources())  # type: ignore[no-untyped-call]


@cache
def sources() -> str:
    """Return a hash of all files of this folder."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep this user's other processes with the same cache waiting; they then find there what is compiled here.

    A lock of the operating system's, which ends with the process that holds it.
    """
    descriptor = _lock_file()
    if descriptor is None:
        yield
        return
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock_file() -> int | None:
    """Return a descriptor of the file to lock, or None where there can be none."""
    if not hasattr(os, "getuid"):
        return None
    cached = f"{os.environ.get('NUMBA_CACHE_DIR', '')} {Path(__file__).parent}"
    number = hashlib.blake2b(cached.encode(), digest_size=4).hexdigest()
    path = Path(tempfile.gettempdir()) / f"nnmpi-compile-{os.getuid()}-{number}.lock"
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None


def _lock(descriptor: int) -> None:
    import fcntl

    end = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return
            time.sleep(POLL_S)
        except OSError:  # a file system without locks
            return
        else:
            return
