"""Elementwise operations of one or more operands, with broadcasting.

The tape sums the gradients of inputs that were broadcast (see `Function.broadcasts`), so no
operation here does.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array, Dtype, masked
from nnmpi.backend.kernels import add, cast, kernels_of, multiply
from nnmpi.backend.plain import Activation
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.tensor.dtypes import mixes
from nnmpi.tensor.function import Elementwise, Grads, Variable
from nnmpi.tensor.operand import require_floating


class Rule(NamedTuple):
    """The derivative rule of a function of the array library.

    Attributes:
        saves: the values that the derivatives read: inputs by number, -1 for the result.
        to_first, to_second: (gradient, *saved) -> the gradient of an input.
    """

    saves: tuple[int, ...]
    to_first: Callable[..., Array]
    to_second: Callable[..., Array] | None = None


def _same(grad: Array) -> Array:
    return grad


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "add": Rule((), _same, _same),
        "subtract": Rule((), _same, lambda grad: -grad),
        "multiply": Rule(
            (0, 1),
            lambda grad, a, b: multiply(grad, b),
            lambda grad, a, b: multiply(grad, a),
        ),
        "divide": Rule(
            (1, -1),
            lambda grad, b, y: grad / b,
            lambda grad, b, y: -(grad / b) * y,
        ),
        "negative": Rule((), lambda grad: -grad),
        "exp": Rule((-1,), lambda grad, y: grad * y),
        "log": Rule((0,), lambda grad, x: grad / x),
        "sqrt": Rule((-1,), lambda grad, y: grad / (2 * y)),
        "absolute": Rule((0,), lambda grad, x: grad * np.sign(x)),  # 0 at 0
        "sin": Rule((0,), lambda grad, x: grad * np.cos(x)),
        "cos": Rule((0,), lambda grad, x: -grad * np.sin(x)),
    }
)


# Functions of two arrays that a device may have kernels for.
PAIRS = MappingProxyType({"add": add, "multiply": multiply})


class Pointwise(Elementwise):
    """The array library's function of this name, differentiated by `RULES`."""

    __slots__ = ("name", "rule")

    computes = "float32"

    def __init__(self, name: str) -> None:
        self.name, self.rule = name, RULES[name]

    def raised(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Dtype | None]:
        """See `Function.raised`; a single sum or product of one low dtype rounds to the same."""
        alone = self.name in ("add", "subtract", "multiply") and all(
            isinstance(x, Variable) and x._data.dtype == inputs[0]._data.dtype for x in inputs
        )
        return (inputs, None) if alone else super().raised(inputs)

    def forward(self, *inputs: Any) -> Array:
        pair = PAIRS.get(self.name)
        y = (pair or getattr(np, self.name))(*inputs)
        values = (*inputs, y)
        self.saved = tuple([values[i] for i in self.rule.saves])
        return y

    def backward(self, grad: Array) -> Grads:
        (_, to_first, to_second), needs, saved = self.rule, self.needs, self.saved
        first = to_first(grad, *saved) if needs[0] else None
        if to_second is None:
            return (first,)
        return first, to_second(grad, *saved) if needs[1] else None


class AddLow(Elementwise):
    """a + b of float32 and half precision, of one shape, read as they are by a device's kernel."""

    def forward(self, a: Array, b: Array) -> Array:
        self.saved = (b.dtype,)
        return kernels_of(b).add_low(a, b)

    def backward(self, grad: Array) -> Grads:
        return grad, cast(grad, self.saved[0]) if self.needs[1] else None


def add_low(a: Any, b: Any) -> Any:
    """Return the sum of two tensors in mixed precision in one pass; None for all others."""
    if (
        not isinstance(b, Variable)
        or a._data.dtype == b._data.dtype
        or a._data.shape != b._data.shape
    ):
        return None
    if is_low(a._data.dtype):
        a, b = b, a
    return AddLow()(a, b) if mixes(a._data.dtype, b._data.dtype) else None


class ActivationFunction(Elementwise):
    """An activation.

    Args:
        form: which one.
        slope: of a leaky ReLU below 0.
    """

    __slots__ = ("form", "slope")

    computes = "kernels"

    def __init__(self, form: Activation, slope: float) -> None:
        self.form, self.slope = form, slope

    def forward(self, x: Array) -> Array:
        kernels, (formula, *derivative) = kernels_of(x), self.form.value
        if derivative:
            (y,) = kernels.rows(formula, x, self.slope, blocks=False)
            self.saved = (x if self.form is Activation.LEAKY_RELU else y, kernels)
            return y
        dtype, width = x.dtype, x.shape[-1] if x.ndim else 1
        rows = np.reshape(x, (x.size // max(width, 1), width))
        if is_low(dtype):  # of a device without its kernels
            rows = kernels.cast(rows, FLOAT32)
        results = kernels.rows(formula, rows, self.needs[0])
        y, saved = (kernels.cast(results[i], dtype) for i in (0, -1))
        self.saved = (saved, kernels)
        return y.reshape(x.shape)

    def backward(self, grad: Array) -> Grads:
        (saved, kernels), (_, *derivative) = self.saved, self.form.value
        if not derivative:
            return (kernels.multiply(grad, saved.reshape(grad.shape)),)
        (to_x,) = kernels.rows(derivative[0], grad, saved, self.slope, blocks=False)
        return (to_x,)


def activated(form: Activation, x: Any, slope: float = 0.0) -> Any:
    """Apply an activation."""
    return ActivationFunction(form, slope)(require_floating(form.name.lower(), x))


class Power(Elementwise):
    """a ** b. Its derivative in b is taken as 0 at a = 0, and is NaN at a < 0."""

    computes = "float32"

    def forward(self, a: Any, b: Any) -> Array:
        result = a**b
        self.saved = (a, b, result)
        return result

    def backward(self, grad: Array) -> Grads:
        a, b, result = self.saved
        to_a = to_b = None
        if self.needs[0]:
            to_a = grad * self._slope(a, b, result)
        if self.needs[1]:
            base = self.xp.asarray(a)
            logarithm = np.where(base < 0, np.nan, np.log(np.where(base > 0, base, 1))).astype(
                result.dtype
            )
            to_b = grad * np.where(base == 0, 0, result) * logarithm
        return to_a, to_b

    def _slope(self, a: Any, b: Any, result: Array) -> Any:
        """Return the derivative in a; that of a ** 0 is 0, also where a is 0."""
        if not hasattr(b, "dtype"):
            return b * a ** (b - 1) if b else np.zeros_like(result)
        zero = b == 0
        lowered = a ** np.where(zero, 1, b - 1).astype(result.dtype)
        return np.where(zero, np.zeros_like(result), b * lowered)


class Extremum(Elementwise):
    """The larger (or smaller) of a and b; where they are equal each gets half of the gradient."""

    __slots__ = ("largest",)

    computes = "float32"

    def __init__(self, largest: bool) -> None:
        self.largest = largest

    def forward(self, a: Any, b: Any) -> Array:
        self.saved = (a, b)
        return (np.maximum if self.largest else np.minimum)(a, b)

    def backward(self, grad: Array) -> Grads:
        a, b = self.saved
        loses = np.less if self.largest else np.greater
        share = np.where(a == b, grad * 0.5, grad)
        return tuple(masked(~loses(*pair), share) for pair in ((a, b), (b, a)))


class Where(Elementwise):
    """a where the condition holds, b elsewhere."""

    computes = "float32"

    def forward(self, condition: Array, a: Any, b: Any) -> Array:
        self.saved = (condition,)
        return np.where(condition, a, b)

    def backward(self, grad: Array) -> Grads:
        (condition,) = self.saved
        return None, masked(condition, grad), masked(np.logical_not(condition), grad)


class Clip(Elementwise):
    """x clipped to two bounds; outside them the derivative is 0."""

    __slots__ = ("high", "low")

    computes = "float32"

    def __init__(self, low: float | None, high: float | None) -> None:
        self.low, self.high = low, high

    def forward(self, x: Array) -> Array:
        y = np.clip(x, self.low, self.high)
        self.saved = (x == y,) if self.needs[0] else ()
        return y

    def backward(self, grad: Array) -> Grads:
        return (masked(self.saved[0], grad),)
