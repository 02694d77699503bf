"""The one place that decides which operations run compiled kernels, for which arrays.

arrays                                          kernels                                   switched by
NumPy's                                         none: the operation's own arithmetic
NumPy's, float32, inside `with jit():`          `jit.kernels`, numba's                    jit(), jit(False)
a device's, floating point                      `cuda.kernels`, CUDA C++                  always on, but for jit(False)

An operation's arithmetic stands in its Function, through the array library's functions, which
compute anywhere. Before it, the Function asks here for something faster:

    kernels = kernels_for(x, "layer_norm")      what has a function of that name, or None
    if kernels is not None:
        y, residuals = kernels.layer_norm(...)

To add a compiled kernel: a function in `jit/kernels.py` or `cuda/kernels.py`, with the kernel
itself beside it, and these lines in the Function. Compiled functions go through
`recording.perform`, which notes each as one call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.cuda.kernels import device_kernels, works_on
from nnmpi.backend.precision import FLOAT32, to_float32
from nnmpi.backend.sums import row_sum
from nnmpi.errors import UsageError

# Whether kernels are in use: None where nobody has said so, which is a device's alone.
_enabled: ContextVar[bool | None] = ContextVar("nnmpi_kernels", default=None)


def kernels_for(array: Array, name: str) -> Any:
    """Return the compiled kernels with this function for such an array here, or None."""
    result: Any = None
    if type(array) is np.ndarray:
        if not _enabled.get() or array.dtype != FLOAT32:
            return None
        result = load()
    elif _enabled.get() is not False and works_on(array.dtype):
        result = device_kernels(namespace(array))
    return result if hasattr(result, name) else None


def bias_grad(xp: Any, grad: Array, to_bias: Array) -> None:
    """Write the sum over rows of a gradient (rows, n), in at least float32."""
    kernels = kernels_for(grad, "bias_grad")
    if kernels is not None:
        kernels.bias_grad(xp, xp.ascontiguousarray(grad), to_bias)  # that of a sum has gaps
    else:
        grad = to_float32(xp, grad)
        if grad.dtype == to_bias.dtype:
            row_sum(xp, grad, out=to_bias)
        else:  # a device's, without its kernels
            xp.copyto(to_bias, row_sum(xp, grad), casting="unsafe")


def compiled_kernels() -> Any:
    """Return numba's kernels, or None where they are switched off."""
    return load() if _enabled.get() else None


def setting() -> bool | None:
    """Return what `jit` has set in this context, by which a recorded step is told from another."""
    return _enabled.get()


@contextmanager
def jit(enabled: bool = True) -> Iterator[None]:
    """Compute with compiled kernels inside the block; `jit(False)` without them.

    Results differ from the plain ones in the last bits. float32 on the CPU is compiled, all else
    there stays as it is. On a device kernels are in use anyway, and `jit(False)` does without them.
    A kernel is compiled when it is first used, which takes up to some seconds, and then kept on
    disk: beside the package, in the user's cache folder where that cannot be written to, or in
    NUMBA_CACHE_DIR. Of several processes on a node one compiles, and the others wait and load what
    it has made.

    Raises:
        UsageError: when numba is not installed or does not work.

    Example:
        >>> layer = nn.Linear(3, 2).initialize(seed=0)
        >>> with nnmpi.jit(False):  # plain NumPy, even within an outer `with nnmpi.jit():`
        ...     layer(np.ones((1, 3), "float32")).shape
        (1, 2)
    """
    if enabled:
        load()
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


@cache
def load() -> ModuleType:
    """Return numba's kernels; nothing is compiled yet.

    Raises:
        UsageError: when numba is not installed or does not work.
    """
    try:
        import nnmpi.backend.jit.kernels as kernels
    except ImportError as error:
        raise UsageError(
            f"compiled kernels need numba, which cannot be imported ({error}); pip install numba,"
            " or leave jit out"
        ) from error
    return kernels
