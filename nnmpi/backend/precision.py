"""The precision of products: a mode of the context, float32 by default.

    mode       a GEMM or a convolution reads          accumulates in    writes
    float32    float32                                float32           float32
    tf32       float32, 10 bits of the fraction       float32           float32
    bf16       bfloat16: range of float32, 7 bits     float32           bfloat16
    fp16       float16: 6e-8 to 65504, 10 bits        float32           float16

Parameters, their gradients and the optimizer's state are float32 in every mode ("master weights",
Micikevicius et al., "Mixed precision training", 2018). Operations round parameters as they read
them. Activations have the low precision. Recurrent layers compute in float32 inside, with products
in tf32 on a device in bf16 and fp16, too. A parameter's gradient accumulates in float32 in the flat
storage, so that optimizers and exchanges never meet the low precision.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import numpy as np

from nnmpi.backend.array import Dtype
from nnmpi.base.errors import UsageError

FLOAT32: Dtype = np.dtype(np.float32)

MODES = ("float32", "tf32", "bf16", "fp16")
_mode: ContextVar[str] = ContextVar("nnmpi_precision", default="float32")


def precision() -> str:
    """Return the mode of this context, one of MODES."""
    return _mode.get()


@contextmanager
def use_precision(mode: str) -> Iterator[None]:
    """Compute in this precision inside the block.

    Raises:
        UsageError: for an unknown mode, or bf16 without the package ml_dtypes.

    Example:
        >>> layer = nn.Linear(4, 2).initialize(seed=0)
        >>> with nnmpi.use_precision("fp16"):  # weights stay float32
        ...     print(layer(np.ones((1, 4), "float32")).dtype)
        float16
    """
    if mode not in MODES:
        raise UsageError(f"precision {mode!r} is unknown; choose one of {', '.join(MODES)}")
    low_dtype(mode)
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def low_dtype(mode: str) -> Dtype | None:
    """Return the low dtype of activations in this mode; None for float32 and tf32.

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
