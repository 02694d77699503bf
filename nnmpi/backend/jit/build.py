"""Compilation: flags, argument types, the cache on disk, and one compiler per node.

Numba caches machine code per function, argument types, sizes and processor, and compiles again when
the function's file changes. This module makes it compile again when any file of this folder
changes, because kernels inline helpers of other files.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import types
from numba.core.caching import FunctionCache

from nnmpi.base.errors import UsageError
from nnmpi.base.files import cache_folder, locked, private

config: Any = numba.config

F = TypeVar("F", bound=Callable[..., Any])

# Sums in any order, without which they are not vectorized. NaN and infinity are kept (no "nnan" and
# "ninf"), so that a run that diverges shows it.
FAST = frozenset({"contract", "reassoc", "nsz", "arcp", "afn"})
OPTIONS: dict[str, Any] = {"fastmath": set(FAST), "error_model": "numpy", "nogil": True}

# A compilation takes seconds. A process that waits longer for another's, such as one that was
# stopped, compiles for itself from then on: to wait for each of 30 kernels took an hour.
patience_s = ContextVar("patience_s", default=60.0)


def read(ndim: int, dtype: Any = types.float32) -> Any:
    """Return the type of a C-contiguous array that a kernel reads; read-only arrays fit, too."""
    return types.Array(dtype, ndim, "C", readonly=True)


def write(ndim: int, dtype: Any = types.float32) -> Any:
    """Return the type of a C-contiguous array that a kernel writes to."""
    return types.Array(dtype, ndim, "C")


def build(function: F, *arguments: Any) -> F:
    """Return the function compiled for these argument types, from the cache on disk if there."""
    compiled = numba.njit(**OPTIONS)(function)
    with suppress(RuntimeError, UsageError):
        # where no folder can be written to, each process compiles for itself
        compiled._cache = _Cache(function)
    with ExitStack() as held:
        # Other processes wait, and then load this one's machine code. Where no folder can be
        # written, or another takes too long, each compiles for itself.
        try:
            held.enter_context(locked(kernels_folder(), patience_s.get()))
        except UsageError:
            patience_s.set(0.0)
        compiled.compile(types.void(*arguments))
    compiled.disable_compile()
    return compiled


def inlined(function: F) -> F:
    """Return a helper that is inlined into kernels, with their constant sizes."""
    return numba.njit(inline="always", **OPTIONS)(function)


class _Cache(FunctionCache):
    """Numba's cache, with the state of this folder in the key."""

    def __init__(self, function: Callable[..., Any]) -> None:
        before, config.CACHE_DIR = config.CACHE_DIR, str(kernels_folder())
        try:
            super().__init__(function)  # type: ignore[no-untyped-call]
        finally:
            config.CACHE_DIR = before

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), sources())  # type: ignore[no-untyped-call]


def kernels_folder() -> Path:
    """Return the folder of machine code: $NUMBA_CACHE_DIR, or a private one in nnmpi's cache.

    Its name has the user: several may share $NNMPI_DATA.
    """
    if config.CACHE_DIR:
        return Path(config.CACHE_DIR)
    return private(cache_folder() / f"kernels-{os.getuid()}")


@cache
def sources() -> str:
    """Return a hash of all files of this folder."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
