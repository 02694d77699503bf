"""Elementwise operations of one operand: each is a function and its derivative, in terms of x or the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.errors import DtypeError, UsageError
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import operands, real

if TYPE_CHECKING:
    from nnmpi.tensor.tensor import Tensor


class Negate(Function):
    """-x"""

    def forward(self, x: Array) -> Array:
        return -x

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (-grad,)


class Exp(Function):
    """e ** x"""

    def forward(self, x: Array) -> Array:
        y: Array = namespace(x).exp(x)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad * self.saved[0],)


class Log(Function):
    """The natural logarithm."""

    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        y: Array = namespace(x).log(x)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad / self.saved[0],)


class Sqrt(Function):
    """The square root."""

    def forward(self, x: Array) -> Array:
        y: Array = namespace(x).sqrt(x)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad / (2 * self.saved[0]),)


class Absolute(Function):
    """|x|; the derivative at 0 is taken as 0."""

    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        return abs(x)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad * namespace(grad).sign(self.saved[0]),)


class Sin(Function):
    """sin x"""

    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        y: Array = namespace(x).sin(x)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad * namespace(grad).cos(self.saved[0]),)


class Cos(Function):
    """cos x"""

    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        y: Array = namespace(x).cos(x)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (-grad * namespace(grad).sin(self.saved[0]),)


class Tanh(Function):
    """tanh x"""

    def forward(self, x: Array) -> Array:
        y: Array = namespace(x).tanh(x)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,) = self.saved
        return (grad * (1 - y * y),)


class Clip(Function):
    """x kept between two bounds; outside them the derivative is 0."""

    __slots__ = ("high", "low")

    def __init__(self, low: float | None, high: float | None) -> None:
        self.low, self.high = low, high

    def forward(self, x: Array) -> Array:
        y: Array = namespace(x).clip(x, self.low, self.high)
        self.saved = (x == y,) if self.needs[0] else ()
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad * self.saved[0],)


class AsType(Function):
    """x in another dtype; the gradient goes back in the dtype of x."""

    __slots__ = ("wanted",)

    def __init__(self, wanted: Any) -> None:
        self.wanted = wanted

    def forward(self, x: Array) -> Array:
        self.saved = (x.dtype,)
        return x.astype(self.wanted)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad.astype(self.saved[0]),)


def negate(x: Tensor) -> Tensor:
    """Return -x."""
    return Negate()(x)


def exp(x: Tensor) -> Tensor:
    """Return e to the power of x, elementwise."""
    return Exp()(real("exp", x))


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm, elementwise."""
    return Log()(real("log", x))


def sqrt(x: Tensor) -> Tensor:
    """Return the square root, elementwise."""
    return Sqrt()(real("sqrt", x))


def absolute(x: Tensor) -> Tensor:
    """Return |x|, elementwise; the derivative at 0 is 0."""
    return Absolute()(x)


def sin(x: Tensor) -> Tensor:
    """Return sin x, elementwise."""
    return Sin()(real("sin", x))


def cos(x: Tensor) -> Tensor:
    """Return cos x, elementwise."""
    return Cos()(real("cos", x))


def tanh(x: Tensor) -> Tensor:
    """Return tanh x, elementwise."""
    return Tanh()(real("tanh", x))


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
    return Clip(*bounds)(x)


def astype(x: Tensor, dtype: Any) -> Tensor:
    """Return x converted to a dtype; x itself when it has that dtype already.

    Raises:
        DtypeError: for a dtype that holds no numbers, and for a tensor that needs a gradient and a dtype that can have
            none (integers, booleans).
    """
    try:
        wanted = np.dtype(dtype)
    except TypeError:
        raise DtypeError(f"there is no dtype {dtype!r}; choose one such as 'float32' or 'int64'") from None
    if wanted.kind not in "fiub":
        raise DtypeError(f"a tensor holds numbers, not {wanted}")
    if wanted == x.data.dtype:
        return x
    if x.requires_grad and wanted.kind != "f":
        raise DtypeError(f"a tensor that needs a gradient cannot become {wanted}; use detach() first")
    return AsType(wanted)(x)
