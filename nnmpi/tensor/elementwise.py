"""Elementwise operations of one or more operands, with broadcasting.

The tape sums the gradients of inputs that were broadcast (see `Function.broadcasts`), so no
operation here does.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.activations import FORMS, Activation
from nnmpi.backend.array import Array, Dtype, masked
from nnmpi.backend.kernels import add, cast, kernels_of, multiply
from nnmpi.backend.precision import is_low
from nnmpi.tensor.dtypes import mixes
from nnmpi.tensor.function import Elementwise, Grads, Variable
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.traits import OTHERWISE, NotExported, Sample, Traits


class Rule(NamedTuple):
    """The derivative rule of a function of the array library.

    Attributes:
        saves: the values that the derivatives read: inputs by number, -1 for the result.
        to_first, to_second: (gradient, *saved) -> the gradient of an input.
        onnx: the operator's name there; "" if it has none.
        values: where it has derivatives, see `Sample`.
    """

    saves: tuple[int, ...]
    to_first: Callable[..., Array]
    to_second: Callable[..., Array] | None = None
    onnx: str = ""
    values: str = "any"


def _same(grad: Array) -> Array:
    return grad


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "add": Rule((), _same, _same, onnx="Add"),
        "subtract": Rule((), _same, lambda grad: -grad, onnx="Sub"),
        "multiply": Rule(
            (0, 1),
            lambda grad, a, b: multiply(grad, b),
            lambda grad, a, b: multiply(grad, a),
            onnx="Mul",
        ),
        "divide": Rule(
            (1, -1),
            lambda grad, b, y: grad / b,
            lambda grad, b, y: -(grad / b) * y,
            onnx="Div",
            values="nonzero",
        ),
        "negative": Rule((), lambda grad: -grad, onnx="Neg"),
        "exp": Rule((-1,), lambda grad, y: grad * y, onnx="Exp"),
        "log": Rule((0,), lambda grad, x: grad / x, onnx="Log", values="positive"),
        "sqrt": Rule((-1,), lambda grad, y: grad / (2 * y), onnx="Sqrt", values="positive"),
        # its derivative at 0 is 0
        "absolute": Rule((0,), lambda grad, x: grad * np.sign(x), onnx="Abs", values="nonzero"),
        "sin": Rule((0,), lambda grad, x: grad * np.cos(x), onnx="Sin"),
        "cos": Rule((0,), lambda grad, x: -grad * np.sin(x), onnx="Cos"),
    }
)


# Functions of two arrays that a device may have kernels for.
PAIRS = MappingProxyType({"add": add, "multiply": multiply})


class Pointwise(Elementwise):
    """The array library's function of this name, differentiated by `RULES`."""

    __slots__ = ("name", "rule")

    computes = "float32"
    traits = Traits(
        onnx=lambda f, y, x, *others: (
            x.each(f.rule.onnx, *others) if f.rule.onnx else NotExported(OTHERWISE, f.name)
        ),
        samples=tuple(
            Sample(
                name,
                lambda *inputs, name=name: Pointwise(name)(*inputs),
                None if rule.to_second is None else ((3, 4), (3, 4)),
                values=rule.values,
            )
            for name, rule in RULES.items()
        ),
    )

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
        rule, needs, saved = self.rule, self.needs, self.saved
        first = rule.to_first(grad, *saved) if needs[0] else None
        if rule.to_second is None:
            return (first,)
        return first, rule.to_second(grad, *saved) if needs[1] else None


class AddLow(Elementwise):
    """a + b of float32 and half precision, of one shape, read as they are by a device's kernel."""

    traits = Traits(onnx=NotExported(), tested_in="tests/gpu/table.py")

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


def _activated_onnx(f: Any, y: Array, x: Any) -> Any:
    value = f.form.nodes(x, *f.settings)
    return NotExported(OTHERWISE, f"the activation {f.form.name}") if value is None else value


class ActivationFunction(Elementwise):
    """An activation.

    Args:
        form: which one.
        settings: the further arguments of its formulas.
    """

    __slots__ = ("form", "settings")

    computes = "kernels"
    traits = Traits(
        onnx=_activated_onnx,
        samples=tuple(
            Sample(
                form.name,
                lambda x, form=form: activated(form, x, *form.settings),
                values=form.values,
            )
            for form in FORMS
        ),
    )

    def __init__(self, form: Activation, *settings: float) -> None:
        self.form, self.settings = form, settings

    def forward(self, x: Array) -> Array:
        kernels = kernels_of(x)
        y, saved = kernels.activation(self.form, x, self.needs[0], *self.settings)
        self.saved = (saved, kernels)
        return y

    def backward(self, grad: Array) -> Grads:
        saved, kernels = self.saved
        return (kernels.activation_grad(self.form, grad, saved, *self.settings),)


def activated(form: Activation, x: Any, *settings: float) -> Any:
    """Apply an activation."""
    return ActivationFunction(form, *settings)(require_floating(form.name, x))


class Power(Elementwise):
    """a ** b. Its derivative in b is taken as 0 at a = 0, and is NaN at a < 0."""

    computes = "float32"
    traits = Traits(
        onnx="Pow",
        samples=(Sample("power", lambda a, b: Power()(a, b), ((3, 4), (3, 4)), values="positive"),),
    )

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
    traits = Traits(
        onnx=lambda f, y, x, other: x.each("Max" if f.largest else "Min", other),
        samples=(
            Sample(
                "maximum",
                lambda a, b: Extremum(True)(a, b * 1.01),
                ((3, 4), (3, 4)),
                values="distinct",
            ),
            Sample(
                "minimum",
                lambda a, b: Extremum(False)(a, b * 1.01),
                ((3, 4), (3, 4)),
                values="distinct",
            ),
        ),
    )

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
    traits = Traits(
        onnx=lambda f, y, condition, a, b: condition.each("Where", a, b),
        samples=(
            Sample(
                "where",
                lambda a, b, condition: Where()(condition, a, b),
                ((2, 3), (2, 3)),
                (np.array([[True, False, True], [False, True, True]]),),
            ),
        ),
    )

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
    traits = Traits(
        onnx=lambda f, y, x: x.add("Clip", f.low, f.high),
        samples=(
            Sample("clip", lambda x: Clip(-0.2, 0.2)(x), values="nonzero"),
            Sample("clip low", lambda x: Clip(0.1, None)(x), values="nonzero"),
            Sample("clip high", lambda x: Clip(None, 0.0)(x), values="nonzero"),
        ),
    )

    def __init__(self, low: float | None, high: float | None) -> None:
        self.low, self.high = low, high

    def forward(self, x: Array) -> Array:
        y = np.clip(x, self.low, self.high)
        self.saved = (x == y,) if self.needs[0] else ()
        return y

    def backward(self, grad: Array) -> Grads:
        return (masked(self.saved[0], grad),)
