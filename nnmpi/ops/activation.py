"""Activations with their derivatives: ReLU, leaky ReLU, sigmoid, tanh, SiLU, GELU, softmax.

GELU is x times a distribution's cumulative function (Hendrycks and Gimpel, 2016), alone or on a
linear layer's result. There are two forms: the exact one by the error function, and that of GPT-2
by the hyperbolic tangent (`tanh`). Softmax and its logarithm are shifted by each row's largest
element, so that nothing overflows.
"""

from functools import partial
from math import pi, sqrt
from typing import Any

from nnmpi.backend.array import Array, Dtype, zero
from nnmpi.backend.kernels import kernels_for
from nnmpi.backend.sums import row_blocks
from nnmpi.errors import ShapeError, UsageError
from nnmpi.ops.linear import LinearFunction, check_linear, multiply, with_kernels
from nnmpi.tensor.function import Elementwise, Function, Grads
from nnmpi.tensor.operand import in_float32, require_floating
from nnmpi.tensor.placement import Placement, uncut
from nnmpi.tensor.tensor import Tensor


class Relu(Elementwise):
    """max(x, 0); the derivative at 0 is 0."""

    replayable = True

    def forward(self, x: Array) -> Array:
        y: Array = self.xp.maximum(x, zero(self.xp, x.dtype))
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> Grads:
        (y,), xp = self.saved, self.xp
        values, grads, to_x = (
            xp.reshape(y, (y.size,)),
            xp.reshape(grad, (y.size,)),
            xp.empty((y.size,), y.dtype),
        )
        kernels, least = kernels_for(y, "relu_grad"), zero(xp, y.dtype)
        if kernels is not None:
            kernels.relu_grad(xp.ascontiguousarray(grads), values, to_x)
            return (to_x.reshape(y.shape),)
        for part in row_blocks(values):
            # 0 and 1 in the gradient's dtype: a product with booleans would convert them
            block = xp.greater(values[part], least, out=to_x[part])
            xp.multiply(grads[part], block, out=block)
        return (to_x.reshape(y.shape),)


class LeakyRelu(Elementwise):
    """x where positive, slope * x elsewhere."""

    __slots__ = ("slope",)

    replayable = True

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def forward(self, x: Array) -> Array:
        xp = self.xp
        self.saved = (xp.greater(x, 0),)
        return xp.where(self.saved[0], x, xp.multiply(x, self.slope))

    def backward(self, grad: Array) -> Grads:
        xp = self.xp
        return (xp.where(self.saved[0], grad, xp.multiply(grad, self.slope)),)


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
        # with a place also for a number without axes
        to_x = xp.subtract(1, y, out=xp.empty(y.shape, y.dtype))
        return (xp.multiply(xp.multiply(to_x, y, out=to_x), grad, out=to_x),)


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0), elementwise."""
    return in_float32(Relu(), require_floating("relu", x))


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive and negative_slope * x elsewhere."""
    return in_float32(LeakyRelu(float(negative_slope)), require_floating("leaky_relu", x))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), elementwise, without overflow."""
    return in_float32(SigmoidFunction(), require_floating("sigmoid", x))


def silu(x: Tensor) -> Tensor:
    """Return SiLU, x * sigmoid(x), elementwise (swish; Elfwing, Uchibe and Doya, 2017)."""
    return require_floating("silu", x) * sigmoid(x)


tanh = Tensor.tanh


# erfc(x) = t exp(-x^2 + P(t)) for x >= 0, t = 2 / (2 + x): P is smooth, and this is its Chebyshev
# series in 2 t - 1, computed with 60 digits. In float64 the result is within 4e-16 of the true
# value.
_ERFC_SERIES = (
    -0.6513268598908547,
    0.6419697923564902,
    0.019476473204185836,
    -0.009561514786808632,
    -0.0009465953444820369,
    0.00036683949785276145,
    4.252332480690777e-05,
    -2.0278578112534242e-05,
    -1.6242900046470256e-06,
    1.3036558355805232e-06,
    1.5626441722066142e-08,
    -8.523809591492654e-08,
    6.5290544390988515e-09,
    5.059343495551469e-09,
    -9.91364156493033e-10,
    -2.273651222931836e-10,
    9.646791102015527e-11,
    2.3940380830391146e-12,
    -6.886027526497553e-12,
    8.944879273090725e-13,
    3.130921399342958e-13,
    -1.1270822361367252e-13,
    3.810905255189232e-16,
    7.106097613609237e-15,
    -1.5230282014571043e-15,
    -9.457494571291233e-17,
    1.210237189224279e-16,
)


class Gelu(Elementwise):
    """GELU, elementwise; value and derivative are computed while a block is in the cache.

    Args:
        tanh: whether GPT-2's form is meant.
    """

    __slots__ = ("tanh",)

    replayable = True

    def __init__(self, tanh: bool) -> None:
        self.tanh = tanh

    def forward(self, x: Array) -> Array:
        xp, width = self.xp, x.shape[-1] if x.ndim else 1
        y: Array = xp.empty(x.shape, x.dtype)
        xp.copyto(y, x)
        rows = y.reshape(x.size // max(width, 1), width)
        self.saved = (gelu_in_place(xp, rows, None, self.tanh, self.needs[0]),)
        return y

    def backward(self, grad: Array) -> Grads:
        return (self.xp.multiply(grad, self.saved[0].reshape(grad.shape)),)


class LinearGeluFunction(LinearFunction):
    """GELU of x W + b; the derivative is computed together with the value, and kept.

    Args:
        tanh: whether GPT-2's form is meant.
        reads: as for `LinearFunction`.
    """

    __slots__ = ("tanh",)

    kernel = "slope_grad_bias"

    def __init__(self, tanh: bool, reads: Dtype | None) -> None:
        super().__init__(reads)
        self.tanh = tanh

    def activate(self, y: Array, bias: Array | None) -> Array | None:
        """Turn x W into GELU(x W + b), in place; return its derivative."""
        return gelu_in_place(self.xp, y, bias, self.tanh, True in self.needs)


def gelu_in_place(xp: Any, y: Array, bias: Array | None, tanh: bool, keep: bool) -> Array | None:
    """Turn y, (rows, n), into GELU of y + bias; return its derivative, where it is to be kept."""
    kernels = kernels_for(y, "bias_gelu")
    slope: Array | None = xp.empty(y.shape, y.dtype) if kernels is not None or keep else None
    if kernels is not None:
        kernels.bias_gelu(xp, y, bias, slope, tanh)
        return slope
    form, blocks = _by_tanh if tanh else _exact, row_blocks(y)
    scratch = xp.empty((2, blocks[0].stop, y.shape[1]), y.dtype)
    for part in blocks:
        block = y[part]
        if bias is not None:
            xp.add(block, bias, out=block)
        form(
            xp, block, None if slope is None else slope[part], scratch[:, : part.stop - part.start]
        )
    return slope


def _exact(xp: Any, x: Array, slope: Array | None, scratch: Array) -> None:
    """Turn x into x Phi(x), Phi being the normal distribution's cumulative function; write Phi(x) +
    x density(x).

    Args:
        xp: the arrays' module, or a recorder's stand-in for it.
        x: any shape.
        slope: like x, for the derivative, or None.
        scratch: two arrays like x.
    """
    phi, rest = scratch
    _erf(xp, xp.multiply(x, 1 / sqrt(2), out=rest), out=phi)
    xp.multiply(xp.add(phi, 1, out=phi), 0.5, out=phi)
    if slope is not None:
        xp.multiply(xp.multiply(x, x, out=slope), -0.5, out=slope)
        xp.multiply(xp.exp(slope, out=slope), 1 / sqrt(2 * pi), out=slope)
        xp.add(xp.multiply(slope, x, out=slope), phi, out=slope)
    xp.multiply(x, phi, out=x)


def _by_tanh(xp: Any, x: Array, slope: Array | None, scratch: Array) -> None:
    """The same in the form of GPT-2, in which Phi is approximated; arguments as for `_exact`.

    y = x s, s = (1 + tanh(x p)) / 2, p = c (1 + 0.044715 x^2), c = sqrt(2 / pi); dy/dx = s + y (1 -
    s) (6 p - 4 c)

    Where x^2 is too large for the dtype (from 1.9e19 on in float32) dy/dx is NaN: another pass to
    hold x^2 finite would cost a tenth of the time.
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
        # last: where 1 - s is 0, p y may be too large, and infinity * 0 is NaN
        xp.multiply(p, y, out=p)
        xp.add(s, p, out=slope)


def _erf(xp: Any, x: Array, out: Array) -> None:
    """Write the error function of x, elementwise. NumPy has none.

    It is computed by Clenshaw's recurrence for the series above.
    """
    size, t, u, high, higher, spare = (xp.empty(x.shape, x.dtype) for _ in range(6))
    xp.minimum(
        xp.absolute(x, out=size), 100, out=size
    )  # it is 1 long before; the square of a larger number may be beyond the range
    xp.divide(2, xp.add(size, 2, out=t), out=t)
    xp.subtract(xp.multiply(t, 4, out=u), 2, out=u)  # twice the point, as the recurrence wants it
    terms = _ERFC_SERIES if x.dtype.itemsize > 4 else _ERFC_SERIES[:13]  # float32 ends at 1e-8
    xp.copyto(high, terms[-1])
    xp.copyto(higher, 0)
    for coefficient in reversed(terms[1:-1]):
        xp.subtract(xp.multiply(u, high, out=spare), higher, out=spare)
        xp.add(spare, coefficient, out=spare)
        high, higher, spare = spare, high, higher
    series = xp.multiply(xp.multiply(u, high, out=spare), 0.5, out=spare)
    xp.add(xp.subtract(series, higher, out=series), terms[0], out=series)
    xp.subtract(series, xp.multiply(size, size, out=size), out=series)
    xp.multiply(t, xp.exp(series, out=series), out=t)
    xp.multiply(xp.sign(x, out=u), xp.subtract(1, t, out=t), out=out)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x Phi(x), elementwise; Phi is the normal distribution's (Hendrycks and Gimpel, 2016).

    Args:
        approximate: "none" for the exact form by the error function, "tanh" for the form of GPT-2.

    Raises:
        UsageError: for another value of `approximate`.
    """
    tanh = _is_tanh(approximate)
    return with_kernels("bias_gelu", Gelu(tanh), require_floating("gelu", x))


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none"
) -> Tensor:
    """Return GELU(x W + b), bit for bit what `gelu(linear(...))` gives, in one operation.

    Arguments and errors are those of `linear` and `gelu`.
    """
    reads = check_linear("linear_gelu", x, weight, bias)
    require_floating("linear_gelu", x)
    return multiply(partial(LinearGeluFunction, _is_tanh(approximate)), reads, x, weight, bias)


def _is_tanh(approximate: str) -> bool:
    if approximate not in ("none", "tanh"):
        raise UsageError(f"gelu's approximate is 'none' or 'tanh', not {approximate!r}")
    return approximate == "tanh"


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
        """Return how the result lies on the ranks: as before, where the axis is another one."""
        return uncut(self, inputs[0], (self.axis,), "adds up all of its axis")

    def forward(self, x: Array) -> Array:
        xp, kernels = (
            self.xp,
            kernels_for(x, "softmax") if self.axis % x.ndim == x.ndim - 1 else None,
        )
        y: Array
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
    _check(x, axis)
    apply = partial(with_kernels, "softmax") if axis % x.ndim == x.ndim - 1 else in_float32
    return apply(SoftmaxFunction(axis), require_floating("softmax", x))


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return the logarithm of softmax along `axis`, computed without overflow or log of 0.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    _check(x, axis)
    return in_float32(LogSoftmax(axis), require_floating("log_softmax", x))


def _check(x: Tensor, axis: int) -> None:
    if not -x.ndim <= axis < x.ndim or x.shape[axis] == 0:
        raise ShapeError(f"softmax along axis {axis} of shape {x.shape} has no elements")
