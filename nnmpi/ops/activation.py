"""Activations with their derivatives: ReLU, leaky ReLU, sigmoid, tanh, SiLU, GELU, softmax.

GELU is x times the normal distribution's cumulative function (Hendrycks and Gimpel, 2016), alone or
fused with a linear layer. There are two forms: the exact one with the error function, and GPT-2's
approximation with the hyperbolic tangent. Softmax and its logarithm are shifted by each row's
largest element, so that nothing overflows.
"""

from functools import partial
from math import pi, sqrt
from typing import Any, Never

from nnmpi.backend.array import Array, Dtype, constant
from nnmpi.backend.kernels import cast, kernels_for, to_float32
from nnmpi.backend.normal import TAIL_DOUBLE, TAIL_SINGLE
from nnmpi.backend.sums import in_blocks
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.base.words import refuse_words
from nnmpi.ops.linear import LinearFunction, check_linear, multiply, with_kernels
from nnmpi.ops.planes import flattened, rectify_grad
from nnmpi.tensor.elementwise import activated
from nnmpi.tensor.function import Elementwise, Function, Grads
from nnmpi.tensor.operand import checked_axes, in_float32, operands, require_floating
from nnmpi.tensor.placement import Placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor


class ReluFunction(Elementwise):
    """max(x, 0); the derivative at 0 is 0."""

    def forward(self, x: Array) -> Array:
        y: Array = self.xp.maximum(x, constant(self.xp, 0, x.dtype))
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> Grads:
        (y,), xp = self.saved, self.xp
        grad, to_x = xp.ascontiguousarray(grad), xp.empty(y.shape, y.dtype)
        kernels = kernels_for(y, "relu_grad")
        if kernels is not None:
            kernels.relu_grad(*map(flattened, (grad, y, to_x)))
        else:
            rectify_grad(xp, grad, y, to_x)
        return (to_x,)


class LeakyReluFunction(Elementwise):
    """x where positive, slope * x elsewhere."""

    __slots__ = ("slope",)

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def forward(self, x: Array) -> Array:
        self.saved = (self.xp.greater(x, 0),)
        return self._scaled(x)

    def backward(self, grad: Array) -> Grads:
        return (self._scaled(grad),)

    def _scaled(self, x: Array) -> Array:
        """Return x times 1 or the slope: NumPy's `where` takes four times as long on random signs,
        which mislead the processor's branch prediction.
        """
        (above,) = self.saved
        return (self.xp.logical_not(above) * x.dtype.type(self.slope) + above) * x


class SigmoidFunction(Elementwise):
    """1 / (1 + e^-x), as e^min(x, 0) / (1 + e^-|x|), in which no exponential overflows."""

    def forward(self, x: Array) -> Array:
        xp = self.xp
        y: Array = xp.exp(xp.minimum(x, 0)) / (xp.exp(-xp.absolute(x)) + 1)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> Grads:
        (y,) = self.saved
        return ((1 - y) * y * grad,)


def relu(x: Tensor, **words: Never) -> Tensor:
    """Return max(x, 0), elementwise."""
    if words:
        refuse_words("relu", words)
    return activated("relu", ReluFunction(), require_floating("relu", x))


def leaky_relu(x: Tensor, negative_slope: float = 0.01, **words: Never) -> Tensor:
    """Return x where it is positive and negative_slope * x elsewhere."""
    if words:
        refuse_words("leaky_relu", words)
    require_floating("leaky_relu", x)
    slope = float(operands("leaky_relu", x, negative_slope)[1])
    return activated("leaky_relu", LeakyReluFunction(slope), x, slope)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), elementwise, without overflow."""
    y = activated("sigmoid", SigmoidFunction(), require_floating("sigmoid", x))
    y.made_by = "sigmoid"
    return y


def silu(x: Tensor, **words: Never) -> Tensor:
    """Return SiLU, x * sigmoid(x), elementwise (swish; Elfwing, Uchibe and Doya, 2017)."""
    if words:
        refuse_words("silu", words)
    return _smooth("silu", require_floating("silu", x))


tanh = Tensor.tanh


class SmoothActivation(Elementwise):
    """An activation, elementwise; value and derivative are computed while a block is in the cache.

    Args:
        form: a key of `FORMS`.
    """

    __slots__ = ("form",)

    def __init__(self, form: str) -> None:
        self.form = form

    def forward(self, x: Array) -> Array:
        xp, width = self.xp, x.shape[-1] if x.ndim else 1
        rows = xp.reshape(x, (x.size // max(width, 1), width))
        if kernels_for(x, f"bias_{self.form}") is not None:
            rows = rows.copy()
        y, slope = activate(xp, rows, None, self.form, self.needs[0])
        self.saved = (slope,)
        return y.reshape(x.shape)

    def backward(self, grad: Array) -> Grads:
        return (self.xp.multiply(grad, self.saved[0].reshape(grad.shape)),)


class LinearGeluFunction(LinearFunction):
    """GELU of x W + b; the derivative is computed together with the value, and saved.

    Args:
        form: "gelu" or "gelu_tanh", see `FORMS`.
        reads: as for `LinearFunction`.
    """

    __slots__ = ("form",)

    kernel = "slope_grad_bias"

    def __init__(self, form: str, reads: Dtype | None) -> None:
        super().__init__(reads)
        self.form = form

    def activate(self, y: Array, bias: Array | None) -> tuple[Array, Array | None]:
        """Return GELU(x W + b) and its derivative."""
        return activate(self.xp, y, bias, self.form, True in self.needs)


def activate(
    xp: Any, x: Array, bias: Array | None, form: str, keep: bool
) -> tuple[Array, Array | None]:
    """Return the activation of x + bias for rows (rows, n), and its derivative or None.

    Args:
        x: may be overwritten.
        keep: whether the derivative is needed. Compiled kernels compute it in any case.
    """
    name = f"bias_{form}"
    kernels = kernels_for(x, name)
    if kernels is not None:
        slope = xp.empty(x.shape, x.dtype)
        getattr(kernels, name)(xp, x, bias, slope)
        return x, slope
    compute, dtype = FORMS[form], x.dtype
    x = to_float32(xp, x)  # on a device without kernels it may be in half precision
    y, *rest = in_blocks(lambda x: compute(xp, x if bias is None else x + bias, keep), x)
    return cast(xp, y, dtype), cast(xp, rest[0], dtype) if keep else None


def _gelu(xp: Any, x: Array, keep: bool) -> tuple[Array, ...]:
    """Return x Phi(x), and Phi(x) + x density(x) if that is to be kept.

    Phi is the normal distribution's cumulative function. With s = |x| and the tail q = 1 - Phi(s),
    x Phi(x) = max(x, 0) - s q, which preserves the digits of small tails. The derivative is 1/2 +
    sign(x) (1/2 - q + s density(s)).
    """
    # the tail is 0 long before 100; infinity would become NaN, as infinity * 0
    size = xp.minimum(xp.absolute(x), 100)
    power = size * size
    power *= -0.5
    power = xp.exp(power)
    u = 10 / (size + 5)
    u -= 1.25
    terms = TAIL_DOUBLE if x.dtype.itemsize > 4 else TAIL_SINGLE
    tail = u * terms[-1]
    for term in terms[-2:0:-1]:
        tail += term
        tail *= u
    tail += terms[0]
    tail *= power
    y = xp.maximum(x, 0)
    y -= size * tail
    if not keep:
        return (y,)
    power *= size
    power *= 1 / sqrt(2 * pi)
    power -= tail
    power += 0.5
    return y, xp.copysign(power, x) + 0.5


def _gelu_tanh(xp: Any, x: Array, keep: bool) -> tuple[Array, ...]:
    """Return GPT-2's approximation of GELU, and its derivative if that is to be kept.

        y = x s     s = (1 + tanh(x p)) / 2     p = c (1 + 0.044715 x^2)     c = sqrt(2 / pi)
        dy/dx = s + y (1 - s) (6 p - 4 c)

    If x^2 is too large for the dtype (in float32 from |x| = 1.9e19 on), dy/dx is NaN. A pass that
    bounds x^2 would cost a tenth of the time.
    """
    c = sqrt(2 / pi)
    p = x * x
    p *= 0.044715 * c
    p += c
    s = xp.tanh(p * x)
    s *= 0.5
    s += 0.5
    y = x * s
    if not keep:
        return (y,)
    p *= 6
    p -= 4 * c
    # y comes last: p y may overflow, and infinity * (1 - s) is NaN if 1 - s is 0
    p *= 1 - s
    p *= y
    p += s
    return y, p


def _silu(xp: Any, x: Array, keep: bool) -> tuple[Array, ...]:
    """Return y = x s, s = 1 / (1 + e^-x), and s + y (1 - s) if that is to be kept."""
    # e^-x of a smaller x would be infinite; there |x s| is below 1e-36 anyway
    x = xp.maximum(x, -708 if x.dtype.itemsize > 4 else -88)
    s = 1 / (xp.exp(-x) + 1)
    y = x * s
    return (y, (1 - s) * y + s) if keep else (y,)


# Functions of a block that return values and derivatives. The compiled kernel of a form is named
# "bias_" and the form's name.
FORMS = {"gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}


def _smooth(form: str, x: Any) -> Tensor:
    return activated(form, SmoothActivation(form), x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x Phi(x), elementwise; Phi is the normal distribution's (Hendrycks and Gimpel, 2016).

    Args:
        approximate: "none" for the exact form by the error function, "tanh" for the form of GPT-2.

    Raises:
        UsageError: for another value of `approximate`.
    """
    return _smooth(_form(approximate), require_floating("gelu", x))


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none"
) -> Tensor:
    """Return GELU(x W + b), bit for bit what `gelu(linear(...))` gives, in one operation.

    Same arguments and errors as `linear` and `gelu`.
    """
    reads = check_linear("linear_gelu", x, weight, bias)
    require_floating("linear_gelu", x)
    return multiply(partial(LinearGeluFunction, _form(approximate)), reads, x, weight, bias)


def _form(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise UsageError(f"gelu's approximate is 'none' or 'tanh', not {approximate!r}")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


class SoftmaxFunction(Function):
    """e^x / sum(e^x) along an axis.

    Args:
        axis: along which the results add up to 1.
    """

    __slots__ = ("axis",)

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; refuse an input that is sharded along the axis."""
        return placement_if_uncut(self, inputs[0], (self.axis,), "adds up all of its axis")

    def forward(self, x: Array) -> Array:
        xp = self.xp
        kernels = kernels_for(x, "softmax") if self.axis == x.ndim - 1 else None
        if kernels is not None:
            y = kernels.softmax(xp, x)
        else:
            y = xp.exp(self._below_largest(x))
            y /= self._sum(y)
        self.saved = (y, kernels)
        return y

    def backward(self, grad: Array) -> Grads:
        (y, kernels), xp = self.saved, self.xp
        if kernels is not None:
            return (kernels.softmax_grad(xp, grad, y),)
        weighted = grad * y
        return (weighted - y * self._sum(weighted),)

    def _below_largest(self, x: Array) -> Array:
        return x - x.max(axis=self.axis, keepdims=True)

    def _sum(self, x: Array) -> Array:
        return x.sum(axis=self.axis, keepdims=True)


class LogSoftmax(SoftmaxFunction):
    """x - log(sum(e^x)) along an axis."""

    __slots__ = ()

    def forward(self, x: Array) -> Array:
        xp, y = self.xp, self._below_largest(x)
        y -= xp.log(self._sum(xp.exp(y)))
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> Grads:
        (y,) = self.saved
        return (grad - self.xp.exp(y) * self._sum(grad),)


def softmax(x: Tensor, axis: int = -1, **words: Never) -> Tensor:
    """Return e^x / sum(e^x) along `axis`: positive numbers that add up to 1.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    if words:
        refuse_words("softmax", words)
    at = _checked_axis("softmax", x, axis)
    apply = partial(with_kernels, "softmax") if at == x.ndim - 1 else in_float32
    y = apply(SoftmaxFunction(at), x)
    y.made_by = "softmax"
    return y


def log_softmax(x: Tensor, axis: int = -1, **words: Never) -> Tensor:
    """Return the logarithm of softmax along `axis`, computed without overflow or log of 0.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    if words:
        refuse_words("log_softmax", words)
    return in_float32(LogSoftmax(_checked_axis("log_softmax", x, axis)), x)


def _checked_axis(name: str, x: Tensor, axis: int) -> int:
    (at,) = checked_axes(require_floating(name, x).data.ndim, axis)
    if x.shape[at] == 0:
        raise ShapeError(f"{name} along axis {axis} of shape {x.shape} has no elements")
    return at
