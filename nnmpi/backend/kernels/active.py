"""Whether compiled kernels are in use: on a device always, on the CPU where `jit()` switches them on for a context.

An operation asks once per call:

    compiled = kernels_for(x)
    if compiled is not None and ...:
        return CompiledFunction(compiled)(x)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.cuda.table import device_kernels, works_on
from nnmpi.errors import UsageError

if TYPE_CHECKING:
    from nnmpi.backend.kernels.table import Kernels

_FLOAT32 = np.dtype("float32")

_active: ContextVar[Kernels | None] = ContextVar("nnmpi_kernels", default=None)
_refused: ContextVar[bool] = ContextVar("nnmpi_kernels_refused", default=False)


def kernels() -> Kernels | None:
    """Return the compiled kernels for NumPy's arrays, or None where they are switched off."""
    return _active.get()


def setting() -> tuple[Kernels | None, bool]:
    """Return what `jit` has set in this context, by which a recorded step is told from another."""
    return _active.get(), _refused.get()


def kernels_for(array: Array) -> Any:
    """Return the kernels that work on arrays of this kind, or None.

    For NumPy's float32 those of `kernels.table` where they are switched on; for a device's arrays of any floating
    point those of `cuda.table`, which has the same names and arguments (and more), unless switched off by `jit(False)`.
    """
    if type(array) is np.ndarray:
        compiled = _active.get()
        return compiled if compiled is not None and array.dtype == _FLOAT32 else None
    if _refused.get() or not works_on(array.dtype):
        return None
    return device_kernels(namespace(array))


@contextmanager
def jit(enabled: bool = True) -> Iterator[None]:
    """Compute with compiled kernels inside the block (or without them, within such a block: `jit(False)`).

    Results differ from the plain ones in the last bits. float32 on the CPU is compiled, all else there stays as it is.
    On a device kernels are in use anyway, and `jit(False)` does without them.
    A kernel is compiled when it is first used, which takes up to some seconds, and then kept on disk: beside the
    package, in the user's cache folder where that cannot be written to, or in NUMBA_CACHE_DIR. Of several processes
    on a node one compiles, and the others wait and load what it has made.

    Raises:
        UsageError: when numba is not installed or does not work.
    """
    token, refused = _active.set(load() if enabled else None), _refused.set(not enabled)
    try:
        yield
    finally:
        _active.reset(token)
        _refused.reset(refused)


@cache
def load() -> Kernels:
    """Return this process's kernels; nothing is compiled yet.

    Raises:
        UsageError: when numba is not installed or does not work.
    """
    try:
        from nnmpi.backend.kernels.table import Kernels
    except ImportError as error:
        raise UsageError(
            f"compiled kernels need numba, which cannot be imported ({error}); install nnmpi[jit], or leave jit out"
        ) from error
    return Kernels()
