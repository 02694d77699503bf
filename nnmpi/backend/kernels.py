"""The choice of kernels for operations: this module alone decides it.

    arrays                                     kernels                          switched by
    NumPy's                                    `plain.PlainKernels`
    NumPy's, float32, with oneDNN              `onednn_kernels.OnednnKernels`   on, without jit()
    NumPy's, float32, inside `with jit():`     `jit.kernels.NumbaKernels`       on within jit()
    a device's, floating point                 `cuda.kernels.DeviceKernels`,    on, except in
                                               cuDNN's in `cuda.cudnn`          jit(False)

The first class is complete, in the array library's functions, which run anywhere. The others derive
from it and override what they have faster, so an operation need not ask which it got. Two ask
what they can do: a convolution (`convolves`), to choose its algorithm, and `Function.raised`
(`of_device`):

    kernels = kernels_of(x)
    y, residuals = kernels.layer_norm(xp, x, scale, shift, eps)

Backward uses the forward pass's kernels: only they know what they saved. Compiled functions run
through `recording.call`, which records each as one call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np

from nnmpi.backend import onednn
from nnmpi.backend.array import Array, Dtype, namespace
from nnmpi.backend.cuda.cudnn import TYPES, Cudnn, cudnn_of
from nnmpi.backend.cuda.kernels import device_kernels, works_on
from nnmpi.backend.onednn_kernels import OnednnKernels
from nnmpi.backend.plain import PlainKernels
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.base.errors import UsageError

# Whether kernels are in use. The default None means: on devices alone.
_enabled: ContextVar[bool | None] = ContextVar("nnmpi_kernels", default=None)
PLAIN = PlainKernels()


def kernels_of(array: Array) -> Any:
    """Return the kernels for arrays like this, in use here: a `PlainKernels`."""
    enabled = _enabled.get()
    if isinstance(array, np.ndarray):
        if array.dtype != FLOAT32:
            return PLAIN
        return load() if enabled else _on_host()
    if enabled is False or not works_on(array.dtype):
        return PLAIN
    return device_kernels(namespace(array)) or PLAIN


def cudnn_for(array: Array) -> Cudnn | None:
    """Return cuDNN's operations for arrays like this, or None."""
    known = not isinstance(array, np.ndarray) and array.dtype.name in TYPES
    return cudnn_of(namespace(array)) if known and _enabled.get() is not False else None


def copy(target: Array, x: Array) -> None:
    """Write x to `target`, rounded to its dtype. Both may have any strides."""
    kernels_of(target).copy(target, x)


def cast(x: Array, dtype: Dtype) -> Array:
    """Return x in another dtype, rounded to the nearest; x itself if it has that dtype.

    Args:
        x: any shape and strides.
        dtype: of the result; bfloat16 is allowed.
    """
    return x if x.dtype == dtype else kernels_of(x).cast(x, dtype)


def to_float32(x: Array) -> Array:
    """Return float16 and bfloat16 converted to float32, any other x itself."""
    return cast(x, FLOAT32) if is_low(x.dtype) else x


def add(a: Any, b: Any, out: Array | None = None) -> Array:
    """Return a + b; a may be a number."""
    return _of(a).add(a, b, out)


def multiply(a: Any, b: Any) -> Array:
    """Return a * b; a may be a number."""
    return _of(a).multiply(a, b)


def _of(a: Any) -> Any:
    return PLAIN if isinstance(a, np.ndarray) or not hasattr(a, "flags") else kernels_of(a)


def add_bias(y: Array, bias: Array) -> None:
    """Add bias (n,) to y (..., n), contiguous, in place; images are rows with all their pixels."""
    kernels_of(y).add_bias(y, bias)


def bias_grad(grad: Array, to_bias: Array) -> None:
    """Write the sum over rows of a gradient (rows, n), in at least float32."""
    kernels_of(grad).bias_grad(grad, to_bias)


def setting() -> bool | None:
    """Return `jit`'s setting in this context; it is a part of the key of recorded steps."""
    return _enabled.get()


@cache
def _on_host() -> PlainKernels:
    """Return the kernels of float32 arrays of the host without `jit`."""
    return PLAIN if onednn.find().library is None else OnednnKernels()


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
        >>> with nnmpi.jit(False):  # nothing compiled, even within an outer `with nnmpi.jit():`
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
def load() -> Any:
    """Return numba's kernels; nothing is compiled yet.

    Raises:
        UsageError: when numba is not installed or does not work.
    """
    try:
        from nnmpi.backend.jit.kernels import NumbaKernels
    except ImportError as error:
        raise UsageError(
            f"compiled kernels need numba, which cannot be imported ({error}); pip install numba,"
            " or leave jit out"
        ) from error
    return NumbaKernels()
