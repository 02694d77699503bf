"""The choice of compiled kernels for operations: this module alone decides it.

    arrays                                     kernels                     switched by
    NumPy's                                    none
    NumPy's, float32, inside `with jit():`     numba's, `jit.kernels`      jit(), jit(False)
    a device's, floating point                 CUDA C++, `cuda.kernels`    on, except in jit(False)
                                               and cuDNN's, `cuda.cudnn`

An operation's arithmetic is in its Function, written in the array library's functions, which run
anywhere. The Function first looks for a faster kernel here:

    kernels = kernels_for(x, "layer_norm")      an object with a function of that name, or None
    if kernels is not None:
        y, residuals = kernels.layer_norm(...)

To add a compiled kernel, write a function in `jit/kernels.py` or `cuda/kernels.py`, with the kernel
itself beside it, and these lines in the Function. Compiled functions run through
`recording.record_launch`, which records each as one call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Dtype, namespace
from nnmpi.backend.cuda.cudnn import TYPES, Cudnn, cudnn_of
from nnmpi.backend.cuda.kernels import device_kernels, works_on
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.backend.sums import repeated, row_sum
from nnmpi.base.errors import UsageError

# Whether kernels are in use. The default None means: on devices alone.
_enabled: ContextVar[bool | None] = ContextVar("nnmpi_kernels", default=None)


def kernels_for(array: Array, name: str) -> Any:
    """Return the compiled kernels for arrays like this, if they have this function; else None."""
    result: Any = None
    if isinstance(array, np.ndarray):
        if not _enabled.get() or array.dtype != FLOAT32:
            return None
        result = load()
    elif _enabled.get() is not False and works_on(array.dtype):
        result = device_kernels(namespace(array))
    return result if hasattr(result, name) else None


def cudnn_for(array: Array) -> Cudnn | None:
    """Return cuDNN's operations for arrays like this, or None."""
    known = not isinstance(array, np.ndarray) and array.dtype.name in TYPES
    return cudnn_of(namespace(array)) if known and _enabled.get() is not False else None


def copy(xp: Any, target: Array, x: Array) -> None:
    """Write x to `target`, rounded to its dtype. Both may have any strides."""
    kernels = kernels_for(target, "copy")
    if kernels is None or not kernels.copy(target, x):
        # NumPy's casting rules do not cover bfloat16
        xp.copyto(target, x, casting="unsafe")


def cast(xp: Any, x: Array, dtype: Dtype) -> Array:
    """Return x in another dtype, rounded to the nearest; x itself if it has that dtype.

    Args:
        xp: the array's module, or a recorder's stand-in for it.
        x: any shape and strides.
        dtype: of the result; bfloat16 is allowed.
    """
    if x.dtype == dtype:
        return x
    result = xp.empty(x.shape, dtype)
    copy(xp, result, x)
    return result


def to_float32(xp: Any, x: Array) -> Array:
    """Return float16 and bfloat16 converted to float32, any other x itself."""
    return cast(xp, x, FLOAT32) if is_low(x.dtype) else x


def _pair(name: str, xp: Any, a: Any, b: Any, out: Array | None = None) -> Array:
    """Return xp.NAME(a, b); a device's kernel computes it for arrays of one shape and dtype.

    CuPy converts every element of bfloat16 by itself.
    """
    if not isinstance(a, np.ndarray) and hasattr(a, "flags"):
        kernels = kernels_for(a, name)
        result = None if kernels is None else getattr(kernels, name)(xp, a, b, out)
        if result is not None:
            return result
    function = getattr(xp, name)
    return function(a, b) if out is None else function(a, b, out=out)


add, multiply = partial(_pair, "add"), partial(_pair, "multiply")


def add_bias(xp: Any, y: Array, bias: Array) -> None:
    """Add bias (n,) to y (..., n), contiguous, in place; images are rows with all their pixels."""
    kernels = kernels_for(y, "add_bias")
    if kernels is not None:
        kernels.add_bias(xp, y, bias)
    elif y.ndim == 2:
        xp.add(y, bias, out=y, casting="unsafe")
    else:
        rows = y.reshape(len(y), prod(y.shape[1:]))
        xp.add(rows, repeated(xp, bias, prod(y.shape[1:-1])), out=rows, casting="unsafe")


def bias_grad(xp: Any, grad: Array, to_bias: Array) -> None:
    """Write the sum over rows of a gradient (rows, n), in at least float32."""
    kernels = kernels_for(grad, "bias_grad")
    if kernels is not None:
        kernels.bias_grad(xp, grad, to_bias)
    else:
        grad = to_float32(xp, grad)
        if grad.dtype == to_bias.dtype:
            row_sum(xp, grad, out=to_bias)
        else:  # on a device, in jit(False): the sum is in float32, the bias may not be
            copy(xp, to_bias, row_sum(xp, grad))


def setting() -> bool | None:
    """Return `jit`'s setting in this context; it is a part of the key of recorded steps."""
    return _enabled.get()


@contextmanager
def jit(enabled: bool = True) -> Iterator[None]:
    """Compute with compiled kernels inside the block; `jit(False)` without them.

    Results differ from NumPy's in the last bits. On the CPU there are kernels for float32 only. On
    a device kernels are in use by default; `jit(False)` disables them.

    A kernel is compiled at its first use, which takes up to some seconds, and cached on disk: in
    NUMBA_CACHE_DIR, else beside the package, else (if that is not writable) in the user's cache
    folder. Of several processes on a node one compiles; the others wait and load its result.

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
