"""Operations on each element alone, of one operand or several, with broadcasting.

Of inputs that are broadcast the tape sums the gradients (see `Function.broadcasts`).
"""

from typing import Any, ClassVar

from nnmpi.backend.array import Array
from nnmpi.tensor.function import Elementwise


class Add(Elementwise):
    """a + b"""

    replayable = True

    def forward(self, a: Any, b: Any) -> Array:
        return self.xp.add(a, b)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return grad, grad


class Subtract(Elementwise):
    """a - b"""

    replayable = True

    def forward(self, a: Any, b: Any) -> Array:
        return self.xp.subtract(a, b)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return grad, self.xp.negative(grad) if self.needs[1] else None


class Multiply(Elementwise):
    """a * b"""

    replayable = True

    def forward(self, a: Any, b: Any) -> Array:
        self.saved = (a, b)
        return self.xp.multiply(a, b)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (a, b), needs, xp = self.saved, self.needs, self.xp
        return xp.multiply(grad, b) if needs[0] else None, xp.multiply(grad, a) if needs[1] else None


class Divide(Elementwise):
    """a / b"""

    replayable = True

    def forward(self, a: Any, b: Any) -> Array:
        quotient = self.xp.divide(a, b)
        self.saved = (quotient, b)
        return quotient

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (quotient, b), xp = self.saved, self.xp
        share = xp.divide(grad, b)
        return share, xp.multiply(xp.negative(share), quotient) if self.needs[1] else None


class Power(Elementwise):
    """a ** b; the derivative in b is taken as 0 at a = 0, and is NaN at a < 0, where there is none."""

    def forward(self, a: Any, b: Any) -> Array:
        result = a**b
        self.saved = (a, b, result)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (a, b, result), xp = self.saved, self.xp
        to_a = to_b = None
        if self.needs[0]:
            to_a = grad * self._slope(a, b, result)
        if self.needs[1]:
            base = xp.asarray(a)
            logarithm = xp.where(base < 0, xp.nan, xp.log(xp.where(base > 0, base, 1))).astype(result.dtype)
            to_b = grad * xp.where(base == 0, 0, result) * logarithm
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
        self.saved = (a, b)
        return self.xp.maximum(a, b) if self.largest else self.xp.minimum(a, b)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (a, b), xp = self.saved, self.xp
        first = xp.greater(a, b) if self.largest else xp.less(a, b)
        share = xp.add(first, xp.multiply(xp.equal(a, b), grad.dtype.type(0.5)))
        return xp.multiply(grad, share), xp.multiply(grad, xp.subtract(1, share))


class Where(Elementwise):
    """a where the condition holds, b elsewhere."""

    replayable = True

    def forward(self, condition: Array, a: Any, b: Any) -> Array:
        self.saved = (condition,)
        return self.xp.where(condition, a, b)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (condition,), xp = self.saved, self.xp
        return None, xp.where(condition, grad, 0), xp.where(condition, 0, grad)  # no product: 0 * inf would be NaN


class Negate(Elementwise):
    """-x"""

    replayable = True

    def forward(self, x: Array) -> Array:
        return self.xp.negative(x)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.negative(grad),)


class _Named(Elementwise):
    """The array library's function of this name. The derivative is in terms of the result, or of x."""

    name: ClassVar[str]
    of_result: ClassVar[bool] = False
    replayable = True

    def forward(self, x: Array) -> Array:
        y = getattr(self.xp, self.name)(x)
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
        y = self.xp.clip(x, self.low, self.high)
        self.saved = (self.xp.equal(x, y),) if self.needs[0] else ()
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.xp.multiply(grad, self.saved[0]),)
