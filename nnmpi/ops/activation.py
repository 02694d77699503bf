"""Activations with their derivatives: ReLU, leaky ReLU, sigmoid, tanh, SiLU, GELU, softmax.

GELU is x times the normal distribution's cumulative function (Hendrycks and Gimpel, 2016), alone or
fused with a linear layer. There are two forms: the exact one with the error function, and GPT-2's
approximation with the hyperbolic tangent. Softmax and its logarithm are shifted by each row's
largest element, so that nothing overflows.
"""

from functools import partial
from math import pi, sqrt
from typing import Any

from nnmpi.backend.array import Array, Dtype, constant
from nnmpi.backend.kernels import kernels_for
from nnmpi.backend.normal import TAIL_DOUBLE, TAIL_SINGLE
from nnmpi.backend.sums import row_blocks
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.ops.linear import LinearFunction, check_linear, multiply, with_kernels
from nnmpi.ops.planes import flattened, rectify_grad
from nnmpi.tensor.elementwise import activated
from nnmpi.tensor.function import Elementwise, Function, Grads
from nnmpi.tensor.operand import checked_axes, in_float32, operands, require_floating
from nnmpi.tensor.placement import Placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor


class ReluFunction(Elementwise):
    """max(x, 0); the derivative at 0 is 0."""

    replayable = True

    def forward(self, x: Array) -> Array:
        xp = self.xp
        y = xp.maximum(x, constant(xp, 0, x.dtype), out=xp.empty(x.shape, x.dtype))
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

    replayable = True

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
        xp, (above,) = self.xp, self.saved
        factors = xp.empty(x.shape, x.dtype)
        xp.multiply(xp.logical_not(above), x.dtype.type(self.slope), out=factors)
        return xp.multiply(xp.add(factors, above, out=factors), x, out=factors)


class SigmoidFunction(Elementwise):
    """1 / (1 + e^-x), as e^min(x, 0) / (1 + e^-|x|), in which no exponential overflows."""

    replayable = True

    def forward(self, x: Array) -> Array:
        xp, y, below = self.xp, *(self.xp.empty(x.shape, x.dtype) for _ in range(2))
        xp.exp(xp.negative(xp.absolute(x, out=below), out=below), out=below)
        xp.exp(xp.minimum(x, 0, out=y), out=y)
        xp.divide(y, xp.add(below, 1, out=below), out=y)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> Grads:
        (y,), xp = self.saved, self.xp
        # with `out`, so that the result of a 0-d array is an array as well
        to_x = xp.subtract(1, y, out=xp.empty(y.shape, y.dtype))
        return (xp.multiply(xp.multiply(to_x, y, out=to_x), grad, out=to_x),)


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0), elementwise."""
    return activated("relu", ReluFunction(), require_floating("relu", x))


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive and negative_slope * x elsewhere."""
    require_floating("leaky_relu", x)
    slope = float(operands("leaky_relu", x, negative_slope)[1])
    return activated("leaky_relu", LeakyReluFunction(slope), x, slope)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), elementwise, without overflow."""
    y = activated("sigmoid", SigmoidFunction(), require_floating("sigmoid", x))
    y.made_by = "sigmoid"
    return y


def silu(x: Tensor) -> Tensor:
    """Return SiLU, x * sigmoid(x), elementwise (swish; Elfwing, Uchibe and Doya, 2017)."""
    return _smooth("silu", require_floating("silu", x))


tanh = Tensor.tanh


class SmoothActivation(Elementwise):
    """An activation, elementwise; value and derivative are computed while a block is in the cache.

    Args:
        form: a key of `FORMS`.
    """

    __slots__ = ("form",)

    replayable = True

    def __init__(self, form: str) -> None:
        self.form = form

    def forward(self, x: Array) -> Array:
        xp, width = self.xp, x.shape[-1] if x.ndim else 1
        y = xp.empty(x.shape, x.dtype)
        xp.copyto(y, x)
        rows = y.reshape(x.size // max(width, 1), width)
        self.saved = (activate_in_place(xp, rows, None, self.form, self.needs[0]),)
        return y

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

    def activate(self, y: Array, bias: Array | None) -> Array | None:
        """Turn x W into GELU(x W + b), in place; return its derivative."""
        return activate_in_place(self.xp, y, bias, self.form, True in self.needs)


def activate_in_place(xp: Any, y: Array, bias: Array | None, form: str, keep: bool) -> Array | None:
    """Turn y, (rows, n), into the activation of y + bias; return its derivative, or None.

    Args:
        keep: whether the derivative is needed. Compiled kernels compute it in any case.
    """
    name = f"bias_{form}"
    kernels, blocks = kernels_for(y, name), row_blocks(y)
    slope: Array | None = xp.empty(y.shape, y.dtype) if kernels is not None or keep else None
    if kernels is not None:
        getattr(kernels, name)(xp, y, bias, slope)
        return slope
    compute, count = FORMS[form]
    scratch = xp.empty((count, blocks[0].stop, y.shape[1]), y.dtype)
    for part in blocks:
        block, rows = y[part], part.stop - part.start
        if bias is not None:
            xp.add(block, bias, out=block)
        compute(xp, block, None if slope is None else slope[part], scratch[:, :rows])
    return slope


def _gelu(xp: Any, x: Array, slope: Array | None, scratch: Array) -> None:
    """Turn x into x Phi(x); write the derivative, Phi(x) + x density(x), to `slope`.

    Phi is the normal distribution's cumulative function. With s = |x| and the tail q = 1 - Phi(s),
    x Phi(x) = max(x, 0) - s q, which preserves the digits of small tails. The derivative is 1/2 +
    sign(x) (1/2 - q + s density(s)).

    Args:
        xp: the arrays' module, or a recorder's stand-in for it.
        x: any shape.
        slope: like x, for the derivative, or None.
        scratch: arrays like x, as many as `FORMS` says.
    """
    size, power, u, tail = scratch
    # the tail is 0 long before 100; infinity would become NaN, as infinity * 0
    xp.minimum(xp.absolute(x, out=size), 100, out=size)
    xp.multiply(xp.multiply(size, size, out=power), -0.5, out=power)
    xp.exp(power, out=power)
    xp.divide(10, xp.add(size, 5, out=u), out=u)
    xp.subtract(u, 1.25, out=u)
    terms = TAIL_DOUBLE if x.dtype.itemsize > 4 else TAIL_SINGLE
    xp.multiply(u, terms[-1], out=tail)
    for term in terms[-2:0:-1]:
        xp.multiply(xp.add(tail, term, out=tail), u, out=tail)
    xp.multiply(xp.add(tail, terms[0], out=tail), power, out=tail)
    if slope is not None:
        xp.multiply(xp.multiply(power, size, out=power), 1 / sqrt(2 * pi), out=power)
        xp.add(xp.subtract(power, tail, out=power), 0.5, out=power)
        xp.add(xp.copysign(power, x, out=power), 0.5, out=slope)
    xp.maximum(x, 0, out=x)
    xp.subtract(x, xp.multiply(size, tail, out=tail), out=x)


def _gelu_tanh(xp: Any, x: Array, slope: Array | None, scratch: Array) -> None:
    """Turn x into GPT-2's approximation of GELU; write its derivative. Arguments as for `_gelu`.

        y = x s     s = (1 + tanh(x p)) / 2     p = c (1 + 0.044715 x^2)     c = sqrt(2 / pi)
        dy/dx = s + y (1 - s) (6 p - 4 c)

    If x^2 is too large for the dtype (in float32 from |x| = 1.9e19 on), dy/dx is NaN. A pass that
    bounds x^2 would cost a tenth of the time.
    """
    c, (p, rest) = sqrt(2 / pi), scratch
    s = rest if slope is None else slope
    xp.multiply(xp.multiply(x, x, out=p), 0.044715 * c, out=p)
    xp.add(p, c, out=p)
    xp.tanh(xp.multiply(p, x, out=s), out=s)
    xp.add(xp.multiply(s, 0.5, out=s), 0.5, out=s)
    y = xp.multiply(x, s, out=x)
    if slope is not None:
        xp.subtract(xp.multiply(p, 6, out=p), 4 * c, out=p)
        xp.multiply(p, xp.subtract(1, s, out=rest), out=p)
        # y comes last: p y may overflow, and infinity * (1 - s) is NaN if 1 - s is 0
        xp.multiply(p, y, out=p)
        xp.add(s, p, out=slope)


def _silu(xp: Any, x: Array, slope: Array | None, scratch: Array) -> None:
    """Turn x into y = x s, s = 1 / (1 + e^-x); write s + y (1 - s). Arguments as for `_gelu`."""
    s, rest = scratch
    # e^-x of a smaller x would be infinite; there |x s| is below 1e-36 anyway
    xp.maximum(x, -708 if x.dtype.itemsize > 4 else -88, out=x)
    xp.exp(xp.negative(x, out=s), out=s)
    xp.divide(1, xp.add(s, 1, out=s), out=s)
    y = xp.multiply(x, s, out=x)
    if slope is not None:
        xp.add(xp.multiply(xp.subtract(1, s, out=rest), y, out=rest), s, out=slope)


# Functions that turn a block into the activation's values and write its derivatives, and their
# number of scratch arrays: on a device each is as large as the input. The compiled kernel of a form
# is named "bias_" and the form's name.
FORMS = {"gelu": (_gelu, 4), "gelu_tanh": (_gelu_tanh, 2), "silu": (_silu, 2)}


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

    replayable = True

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
            y = self._below_largest(x)
            xp.exp(y, out=y)
            xp.divide(y, self._sum(y), out=y)
        self.saved = (y, kernels)
        return y

    def backward(self, grad: Array) -> Grads:
        (y, kernels), xp = self.saved, self.xp
        if kernels is not None:
            return (kernels.softmax_grad(xp, grad, y),)
        weighted = xp.multiply(grad, y)
        return (xp.subtract(weighted, xp.multiply(y, self._sum(weighted)), out=weighted),)

    def _below_largest(self, x: Array) -> Array:
        return self.xp.subtract(x, self.xp.max(x, axis=self.axis, keepdims=True))

    def _sum(self, x: Array) -> Array:
        return self.xp.sum(x, axis=self.axis, keepdims=True)


class LogSoftmax(SoftmaxFunction):
    """x - log(sum(e^x)) along an axis."""

    __slots__ = ()

    def forward(self, x: Array) -> Array:
        xp, y = self.xp, self._below_largest(x)
        xp.subtract(y, xp.log(self._sum(xp.exp(y))), out=y)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> Grads:
        (y,), xp = self.saved, self.xp
        share = xp.exp(y)
        xp.multiply(share, self._sum(grad), out=share)
        return (xp.subtract(grad, share, out=share),)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return e^x / sum(e^x) along `axis`: positive numbers that add up to 1.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    at = _checked_axis("softmax", x, axis)
    apply = partial(with_kernels, "softmax") if at == x.ndim - 1 else in_float32
    y = apply(SoftmaxFunction(at), x)
    y.made_by = "softmax"
    return y


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return the logarithm of softmax along `axis`, computed without overflow or log of 0.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    return in_float32(LogSoftmax(_checked_axis("log_softmax", x, axis)), x)


def _checked_axis(name: str, x: Tensor, axis: int) -> int:
    (at,) = checked_axes(require_floating(name, x).data.ndim, axis)
    if x.shape[at] == 0:
        raise ShapeError(f"{name} along axis {axis} of shape {x.shape} has no elements")
    return at
