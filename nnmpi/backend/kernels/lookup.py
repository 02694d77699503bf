"""Which kernels compute with an array: the one place where that is decided.

arrays                                          kernels                      switched by
NumPy's                                         `base.Kernels`
NumPy's, float32, inside `with jit():`          `jit.kernels`, numba's       jit(), jit(False)
a device's, floating point                      `cuda.kernels`               always on, but for jit(False)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.cuda.kernels import DeviceKernels, device_kernels, works_on
from nnmpi.backend.kernels.base import Kernels
from nnmpi.backend.precision import is_low
from nnmpi.errors import UsageError

if TYPE_CHECKING:
    from nnmpi.backend.jit.kernels import CompiledKernels

FLOAT32: np.dtype[Any] = np.dtype(np.float32)
_BASE = Kernels()

_compiled: ContextVar[CompiledKernels | None] = ContextVar("nnmpi_kernels", default=None)
_refused: ContextVar[bool] = ContextVar("nnmpi_kernels_refused", default=False)


def kernels_for(array: Array, dtype: np.dtype[Any] | None = None) -> Kernels:
    """Return the kernels that compute with arrays of this library and dtype, in this context.

    Args:
        array: any of the operation's.
        dtype: the one to which the operation converts its arrays first; None for that of the array.
    """
    if type(array) is np.ndarray:
        compiled = _compiled.get()
        return _BASE if compiled is None or (array.dtype if dtype is None else dtype) != FLOAT32 else compiled
    if _refused.get() or not works_on(array.dtype if dtype is None else dtype):
        return _BASE
    return device_kernels(namespace(array)) or _BASE


def device_kernels_for(array: Array) -> DeviceKernels | None:
    """Return the kernels of the device that an array lies on; None on the host, and where `jit(False)` does without."""
    kernels = kernels_for(array)
    return kernels if isinstance(kernels, DeviceKernels) else None


def compiled_kernels() -> CompiledKernels | None:
    """Return numba's kernels, or None where they are switched off."""
    return _compiled.get()


def setting() -> tuple[Kernels | None, bool]:
    """Return what `jit` has set in this context, by which a recorded step is told from another."""
    return _compiled.get(), _refused.get()


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
    token, refused = _compiled.set(load() if enabled else None), _refused.set(not enabled)
    try:
        yield
    finally:
        _compiled.reset(token)
        _refused.reset(refused)


@cache
def load() -> CompiledKernels:
    """Return this process's compiled kernels; nothing is compiled yet.

    Raises:
        UsageError: when numba is not installed or does not work.
    """
    try:
        from nnmpi.backend.jit.kernels import CompiledKernels
    except ImportError as error:
        raise UsageError(
            f"compiled kernels need numba, which cannot be imported ({error}); install nnmpi[jit], or leave jit out"
        ) from error
    return CompiledKernels()


def cast(xp: Any, x: Array, dtype: np.dtype[Any]) -> Array:
    """Return x in another dtype, rounded to the nearest; x itself where it has that dtype.

    Args:
        xp: the array's module, or a recorder's stand-in for it.
    """
    return x if x.dtype == dtype else kernels_for(x).cast(xp, x, dtype)


def to_float32(xp: Any, x: Array) -> Array:
    """Return x in float32 where it is float16 or bfloat16, else x itself."""
    return cast(xp, x, FLOAT32) if is_low(x.dtype) else x
