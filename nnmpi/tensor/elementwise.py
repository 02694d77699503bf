"""Elementwise operations of one operand: each is a function and its derivative, in terms of x or the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.precision import dtype_named, is_floating
from nnmpi.errors import DtypeError, UsageError
from nnmpi.tensor.convert import AsType, in_float32
from nnmpi.tensor.function import Elementwise
from nnmpi.tensor.operand import operands, require_floating

if TYPE_CHECKING:
    from nnmpi.tensor.tensor import Tensor


class Negate(Elementwise):
    """-x"""

    replayable = True

    def forward(self, x: Array) -> Array:
        y: Array = self.xp.negative(x)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.negative(grad),)


class _Named(Elementwise):
    """The array library's function of this name. The derivative is in terms of the result, or of x."""

    name: ClassVar[str]
    of_result: ClassVar[bool] = False
    replayable = True

    def forward(self, x: Array) -> Array:
        y: Array = getattr(self.xp, self.name)(x)
        self.saved = (y if self.of_result else x,)
        return y


class Exp(_Named):
    """e ** x"""

    name, of_result = "exp", True

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.multiply(grad, self.saved[0]),)


class Log(_Named):
    """The natural logarithm."""

    name = "log"

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.divide(grad, self.saved[0]),)


class Sqrt(_Named):
    """The square root."""

    name, of_result = "sqrt", True

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.divide(grad, self.xp.multiply(2, self.saved[0])),)


class Absolute(_Named):
    """|x|; the derivative at 0 is taken as 0."""

    name = "absolute"

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.multiply(grad, self.xp.sign(self.saved[0])),)


class Sin(_Named):
    """sin x"""

    name = "sin"

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.multiply(grad, self.xp.cos(self.saved[0])),)


class Cos(_Named):
    """cos x"""

    name = "cos"

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.multiply(self.xp.negative(grad), self.xp.sin(self.saved[0])),)


class TanhFunction(_Named):
    """tanh x"""

    name, of_result = "tanh", True

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,), xp = self.saved, self.xp
        return (xp.multiply(grad, xp.subtract(1, xp.multiply(y, y))),)


class Clip(Elementwise):
    """x kept between two bounds; outside them the derivative is 0."""

    __slots__ = ("high", "low")

    replayable = True

    def __init__(self, low: float | None, high: float | None) -> None:
        self.low, self.high = low, high

    def forward(self, x: Array) -> Array:
        y: Array = self.xp.clip(x, self.low, self.high)
        self.saved = (self.xp.equal(x, y),) if self.needs[0] else ()
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.multiply(grad, self.saved[0]),)


def negate(x: Tensor) -> Tensor:
    """Return -x.

    Raises:
        DtypeError: for booleans.
    """
    if x.data.dtype.kind == "b":
        raise DtypeError("negate of a bool tensor means nothing; convert with astype('float32')")
    return in_float32(Negate(), x)


def exp(x: Tensor) -> Tensor:
    """Return e to the power of x, elementwise."""
    return in_float32(Exp(), require_floating("exp", x))


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm, elementwise."""
    return in_float32(Log(), require_floating("log", x))


def sqrt(x: Tensor) -> Tensor:
    """Return the square root, elementwise."""
    return in_float32(Sqrt(), require_floating("sqrt", x))


def absolute(x: Tensor) -> Tensor:
    """Return |x|, elementwise; the derivative at 0 is 0."""
    return in_float32(Absolute(), x)


def sin(x: Tensor) -> Tensor:
    """Return sin x, elementwise."""
    return in_float32(Sin(), require_floating("sin", x))


def cos(x: Tensor) -> Tensor:
    """Return cos x, elementwise."""
    return in_float32(Cos(), require_floating("cos", x))


def tanh(x: Tensor) -> Tensor:
    """Return tanh x, elementwise."""
    return in_float32(TanhFunction(), require_floating("tanh", x))


def clip(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Return x kept between `low` and `high`; None is no bound.

    Raises:
        UsageError: when neither bound is given, or low > high.
        DtypeError: for a bound with a fraction and a tensor of integers.
    """
    if low is None and high is None:
        raise UsageError("clip needs at least one of low and high")
    if low is not None and high is not None and low > high:
        raise UsageError(f"clip with low {low} above high {high} leaves nothing")
    bounds = [None if bound is None else operands("clip", x, bound)[1] for bound in (low, high)]
    return in_float32(Clip(*bounds), x)


def astype(x: Tensor, dtype: Any) -> Tensor:
    """Return x converted to a dtype; x itself when it has that dtype already.

    Raises:
        DtypeError: for a dtype that holds no numbers, and for a tensor that needs a gradient and a dtype that can have
            none (integers, booleans).
    """
    try:
        wanted = dtype_named(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except TypeError:
        raise DtypeError(f"there is no dtype {dtype!r}; choose one such as 'float32' or 'int64'") from None
    if wanted.kind not in "fiub" and not is_floating(wanted):
        raise DtypeError(f"a tensor holds numbers, not {wanted}")
    if wanted == x.data.dtype:
        return x
    if x.requires_grad and not is_floating(wanted):
        raise DtypeError(f"a tensor that needs a gradient cannot become {wanted}; use detach() first")
    return AsType(wanted)(x)
