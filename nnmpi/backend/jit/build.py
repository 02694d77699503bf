"""Compilation: flags, argument types, the cache on disk, and one compiler per node.

Numba keeps machine code per function, argument types, sizes and processor, and notices when the
function's own file changes. Here it also notices when a helper in another file of this folder does.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import types
from numba.core.caching import FunctionCache

from nnmpi.errors import UsageError
from nnmpi.files import cache_folder, locked

config: Any = numba.config

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be taken in any order, which is what lets them be vectorized. NaN and infinity stay what
# they are, so that a run that diverges shows it.
FAST = frozenset({"contract", "reassoc", "nsz", "arcp", "afn"})
OPTIONS: dict[str, Any] = {"fastmath": set(FAST), "error_model": "numpy", "nogil": True}

# A compilation takes seconds; who waits longer than this for another process's compiles for itself.
WAIT_S = 120.0


def read(ndim: int, dtype: Any = types.float32) -> Any:
    """Return the type of a C-contiguous array that a kernel reads, maybe marked read-only."""
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
    with _one_at_a_time():
        compiled.compile(types.void(*arguments))
    compiled.disable_compile()
    return compiled


def inlined(function: F) -> F:
    """Return a helper inlined into each calling kernel, whose constant sizes it then sees."""
    return numba.njit(inline="always", **OPTIONS)(function)


class _Cache(FunctionCache):
    """Numba's cache, which here tells apart machine code from different states of this folder."""

    def __init__(self, function: Callable[..., Any]) -> None:
        before, config.CACHE_DIR = config.CACHE_DIR, str(kernels_folder())
        try:
            super().__init__(function)  # type: ignore[no-untyped-call]
        finally:
            config.CACHE_DIR = before

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), sources())  # type: ignore[no-untyped-call]


def kernels_folder() -> Path:
    """Return where machine code is kept: $NUMBA_CACHE_DIR, or in nnmpi's folder for such."""
    return Path(config.CACHE_DIR) if config.CACHE_DIR else cache_folder() / "kernels"


@cache
def sources() -> str:
    """Return a hash of all files of this folder."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep this user's other processes waiting; they then find there what is compiled here."""
    with ExitStack() as held:
        with suppress(
            UsageError
        ):  # where no folder can be written, or another takes too long, each compiles for itself
            held.enter_context(locked(kernels_folder(), WAIT_S))
        yield
