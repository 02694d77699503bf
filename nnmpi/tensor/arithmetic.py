"""Elementwise operations of two operands, with broadcasting: add, subtract, multiply, divide, power, extrema, where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnmpi.backend.array import Array
from nnmpi.errors import DtypeError
from nnmpi.tensor.convert import in_float32
from nnmpi.tensor.function import Elementwise, Function
from nnmpi.tensor.operand import check_broadcast, operands, require_floating, unbroadcast
from nnmpi.tensor.placement import is_cut
from nnmpi.tensor.variable import Variable

if TYPE_CHECKING:
    from nnmpi.tensor.tensor import Tensor


def _shape(x: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = getattr(x, "shape", ())
    return shape


class Add(Elementwise):
    """a + b"""

    replayable = True

    def forward(self, a: Any, b: Any) -> Array:
        self.saved = (_shape(a), _shape(b))
        result: Array = self.xp.add(a, b)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (a, b), xp = self.saved, self.xp
        return (
            unbroadcast(xp, grad, a) if self.needs[0] else None,
            unbroadcast(xp, grad, b) if self.needs[1] else None,
        )


class Subtract(Elementwise):
    """a - b"""

    replayable = True

    def forward(self, a: Any, b: Any) -> Array:
        self.saved = (_shape(a), _shape(b))
        result: Array = self.xp.subtract(a, b)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (a, b), xp = self.saved, self.xp
        return (
            unbroadcast(xp, grad, a) if self.needs[0] else None,
            unbroadcast(xp, xp.negative(grad), b) if self.needs[1] else None,
        )


class Multiply(Elementwise):
    """a * b"""

    replayable = True

    def forward(self, a: Any, b: Any) -> Array:
        self.saved = (a, b)
        result: Array = self.xp.multiply(a, b)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (a, b), xp = self.saved, self.xp
        return (
            unbroadcast(xp, xp.multiply(grad, b), _shape(a)) if self.needs[0] else None,
            unbroadcast(xp, xp.multiply(grad, a), _shape(b)) if self.needs[1] else None,
        )


class Divide(Elementwise):
    """a / b"""

    replayable = True

    def forward(self, a: Any, b: Any) -> Array:
        result: Array = self.xp.divide(a, b)
        self.saved = (result, _shape(a), b)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (quotient, shape, b), xp = self.saved, self.xp
        share = xp.divide(grad, b)
        return (
            unbroadcast(xp, share, shape) if self.needs[0] else None,
            unbroadcast(xp, xp.multiply(xp.negative(share), quotient), _shape(b)) if self.needs[1] else None,
        )


class Power(Elementwise):
    """a ** b; the derivative in b is taken as 0 at a = 0, and is NaN at a < 0, where there is none."""

    def forward(self, a: Any, b: Any) -> Array:
        result: Array = a**b
        self.saved = (a, b, result)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        a, b, result = self.saved
        xp = self.xp
        to_a = to_b = None
        if self.needs[0]:
            to_a = unbroadcast(xp, grad * self._slope(a, b, result), _shape(a))
        if self.needs[1]:
            base = xp.asarray(a)
            logarithm = xp.where(base < 0, xp.nan, xp.log(xp.where(base > 0, base, 1))).astype(result.dtype)
            to_b = unbroadcast(xp, grad * xp.where(base == 0, 0, result) * logarithm, _shape(b))
        return to_a, to_b

    def _slope(self, a: Any, b: Any, result: Array) -> Any:
        """Return the derivative in a; that of a ** 0 is 0, also where a is 0."""
        xp = self.xp
        if not hasattr(b, "dtype"):
            return b * a ** (b - 1) if b else xp.zeros_like(result)
        zero = b == 0
        lowered = a ** xp.where(zero, 1, b - 1).astype(result.dtype)
        return xp.where(zero, xp.zeros_like(result), b * lowered)


class Extremum(Elementwise):
    """The larger (or smaller) of a and b; where they are equal each gets half of the gradient."""

    __slots__ = ("largest",)

    replayable = True

    def __init__(self, largest: bool) -> None:
        self.largest = largest

    def forward(self, a: Any, b: Any) -> Array:
        xp = self.xp
        self.saved = (a, b)
        result: Array = xp.maximum(a, b) if self.largest else xp.minimum(a, b)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        a, b = self.saved
        xp = self.xp
        first = xp.greater(a, b) if self.largest else xp.less(a, b)
        share = xp.add(first, xp.multiply(xp.equal(a, b), grad.dtype.type(0.5)))
        return (
            unbroadcast(xp, xp.multiply(grad, share), _shape(a)) if self.needs[0] else None,
            unbroadcast(xp, xp.multiply(grad, xp.subtract(1, share)), _shape(b)) if self.needs[1] else None,
        )


class Where(Elementwise):
    """a where the condition holds, b elsewhere."""

    replayable = True

    def forward(self, condition: Array, a: Any, b: Any) -> Array:
        self.saved = (condition, _shape(a), _shape(b))
        result: Array = self.xp.where(condition, a, b)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        condition, a, b = self.saved
        xp = self.xp
        return (  # no product with the condition: 0 * inf would be NaN
            None,
            unbroadcast(xp, xp.where(condition, grad, 0), a) if self.needs[1] else None,
            unbroadcast(xp, xp.where(condition, 0, grad), b) if self.needs[2] else None,
        )


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool) or getattr(x, "dtype", None) == "bool"


def _apply(function: Function, a: Any, b: Any) -> Tensor:
    """Apply a sum or product; of two tensors of one dtype in that dtype, which rounds as float32 and back would."""
    if isinstance(a, Variable) and isinstance(b, Variable) and a.data.dtype == b.data.dtype:
        return function(a, b)
    return in_float32(function, a, b)


def add(a: Any, b: Any) -> Tensor:
    """Return a + b."""
    return _apply(Add(), *operands("add", a, b))


def subtract(a: Any, b: Any) -> Tensor:
    """Return a - b.

    Raises:
        DtypeError: for two booleans.
    """
    a, b = operands("subtract", a, b)
    if _is_bool(a) and _is_bool(b):
        raise DtypeError("subtract of bool and bool means nothing; convert one with astype('float32')")
    return _apply(Subtract(), a, b)


def multiply(a: Any, b: Any) -> Tensor:
    """Return a * b."""
    return _apply(Multiply(), *operands("multiply", a, b))


def divide(a: Any, b: Any) -> Tensor:
    """Return a / b.

    Raises:
        DtypeError: for integers, whose quotient would be of another dtype.
    """
    for x in (a, b):
        if isinstance(x, Variable):
            require_floating("divide", x)
    return in_float32(Divide(), *operands("divide", a, b))


def power(a: Any, b: Any) -> Tensor:
    """Return a ** b, a or b being a number or a tensor."""
    for x in (a, b):
        if isinstance(x, Variable):
            require_floating("power", x)
    return in_float32(Power(), *operands("power", a, b))


def maximum(a: Any, b: Any) -> Tensor:
    """Return the larger of a and b, elementwise; equal elements share the gradient."""
    return in_float32(Extremum(largest=True), *operands("maximum", a, b))


def minimum(a: Any, b: Any) -> Tensor:
    """Return the smaller of a and b, elementwise; equal elements share the gradient."""
    return in_float32(Extremum(largest=False), *operands("minimum", a, b))


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """Return a where `condition` (a boolean array or tensor) is True, b elsewhere.

    Raises:
        DtypeError: when the condition is not boolean, or a and b differ in dtype.
        ShapeError: when the three do not broadcast.
    """
    values = condition.data if isinstance(condition, Variable) else condition
    if not hasattr(values, "dtype") or values.dtype.kind != "b":
        raise DtypeError(f"where needs a boolean condition, not {getattr(values, 'dtype', type(values).__name__)}")
    a, b = operands("where", a, b)
    if any(map(is_cut, (condition, a, b))):  # the operation says what lies alike
        return in_float32(Where(), condition, a, b)
    check_broadcast("where", values.shape, *(x.shape for x in (a, b) if hasattr(x, "shape")))
    return in_float32(Where(), values, a, b)
