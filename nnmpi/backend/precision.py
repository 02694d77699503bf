"""The precision of products: a mode of the context, float32 by default.

    mode       a GEMM or a convolution reads          accumulates in    writes
    float32    float32                                float32           float32
    tf32       float32, 10 bits of the fraction       float32           float32
    bf16       bfloat16: range of float32, 7 bits     float32           bfloat16; host: float32
    fp16       float16: 6e-8 to 65504, 10 bits        float32           float16

Parameters, their gradients and the optimizer's state are float32 in every mode ("master weights",
Micikevicius et al., "Mixed precision training", 2018). Operations round parameters as they read
them. A parameter's gradient accumulates in float32 in the flat storage, so that optimizers and
exchanges never meet the low precision.

On a device activations have the low precision. Recurrent layers compute in float32 inside, with
products in tf32 in bf16 and fp16, too.

On the host, bf16 rounds each operand of a product by itself: of linear layers, experts,
convolutions, recurrent layers and `@`, in both passes. Everything else is float32, activations and
the products inside of attention included. So a layout has the serial run's products, up to the
order of float32's sums. Which instructions multiply changes no more than that order, either: oneDNN
where the processor has some for bfloat16 (see `onednn`), else NumPy, of rounded operands.
fp16 is computed in float32 there, and each result is rounded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np

from nnmpi.backend import onednn
from nnmpi.backend.array import Array, Dtype
from nnmpi.backend.recording import call
from nnmpi.base.errors import UsageError

FLOAT32: Dtype = np.dtype(np.float32)

MODES = ("float32", "tf32", "bf16", "fp16")
ON_HOST = ("float32", "bf16")  # of which commands compute on the host
LOW = {"bf16": "bfloat16", "fp16": "float16"}
ROUNDED_AT_ONCE = 1 << 15  # elements
_mode: ContextVar[str] = ContextVar("nnmpi_precision", default="float32")


# Returns the mode of this context, one of MODES. Every product asks: a C function, not Python's.
precision: Callable[[], str] = _mode.get


@contextmanager
def use_precision(mode: str) -> Iterator[None]:
    """Compute in this precision inside the block.

    Raises:
        UsageError: for an unknown mode.

    Example:
        >>> layer = nn.Linear(4, 2).initialize(seed=0)
        >>> with nnmpi.use_precision("fp16"):  # weights stay float32
        ...     print(layer(np.ones((1, 4), "float32")).dtype)
        float16
    """
    if mode not in MODES:
        raise UsageError(f"precision {mode!r} is unknown; choose one of {', '.join(MODES)}")
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def rounds_products(x: Any) -> bool:
    """Whether operands of products of such arrays are rounded to bfloat16 here, one by one."""
    return precision() == "bf16" and isinstance(x, np.ndarray)


def describe_products() -> str:
    """Return what multiplies in bf16 on the host, as text."""
    library, reason = onednn.find()
    if not reason:
        return str(library)
    return f"products of rounded operands by NumPy, slower than float32: oneDNN {reason}"


def round_to_bfloat16(x: Array) -> Array:
    """Return float32 values of the host rounded to the nearest bfloat16, as a float32 array."""
    out = np.empty(x.shape, x.dtype, like=x)
    call(_round, (x,), (out,))
    return out


def _round(x: Array, out: Array) -> None:
    """Write the nearest bfloat16 to `out`, of ties the even one, in blocks that fit the cache."""
    if x.size > ROUNDED_AT_ONCE // 8 and onednn.installed() is not None:
        onednn.round_into(x, out)
        return
    flat, rounded = np.ascontiguousarray(x).reshape(-1), out.reshape(-1)
    for i in range(0, len(flat), ROUNDED_AT_ONCE):
        values = flat[i : i + ROUNDED_AT_ONCE]
        # half of the last bit that stays, or one less where that bit is 0; then the rest is cut off
        bits = values.view(np.uint32) >> np.uint32(16)
        bits &= np.uint32(1)
        bits += np.uint32(0x7FFF)
        bits += values.view(np.uint32)
        bits &= np.uint32(0xFFFF0000)
        np.copyto(bits.view(np.float32), values, where=np.isnan(values))  # some would be numbers
        rounded[i : i + ROUNDED_AT_ONCE] = bits.view(np.float32)


def low_dtype(mode: str) -> Dtype | None:
    """Return a mode's low dtype, which a device's activations have; None for float32 and tf32.

    Raises:
        UsageError: when bfloat16 is needed and ml_dtypes is not installed.
    """
    if mode == "fp16":
        return np.dtype(np.float16)
    return bfloat16() if mode == "bf16" else None


@cache
def bfloat16() -> Dtype:
    """Return NumPy's dtype for bfloat16, which the package ml_dtypes provides.

    Raises:
        UsageError: when it is not installed.
    """
    try:
        import ml_dtypes
    except ImportError as error:
        raise UsageError(
            f"bfloat16 needs ml_dtypes, which cannot be imported ({error}); pip install ml_dtypes,"
            " or use float32"
        ) from error
    return np.dtype(ml_dtypes.bfloat16)


def is_floating(dtype: Dtype) -> bool:
    """True for floating-point dtypes, including bfloat16, whose `kind` is not "f"."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def is_low(dtype: Dtype) -> bool:
    """True for float16 and bfloat16, in which nothing accumulates."""
    return dtype.itemsize == 2 and is_floating(dtype)


def dtype_named(name: str) -> Dtype:
    """Return the dtype of this name; "bfloat16" needs ml_dtypes.

    Raises:
        UsageError: for bfloat16 without ml_dtypes.
    """
    return bfloat16() if name == "bfloat16" else np.dtype(name)
