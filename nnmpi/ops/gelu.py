"""GELU, x times a distribution's cumulative function (Hendrycks and Gimpel, 2016), alone or on a linear layer's result.

The derivative is computed together with the value, while a block lies in the cache; backward is then one product.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.casting import device_kernels, widened
from nnmpi.backend.kernels.active import kernels_for
from nnmpi.backend.special import erf
from nnmpi.errors import UsageError
from nnmpi.ops.blocks import row_blocks
from nnmpi.ops.linear import Linear, ProductLinear, check_linear, is_plain
from nnmpi.tensor.convert import widely
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real
from nnmpi.tensor.tensor import Tensor

if TYPE_CHECKING:
    from nnmpi.backend.kernels.table import Kernel, Kernels

# (xp, x, y, slope, scratch): writes the value and, where there is a place for it, the derivative at some elements of x.
# y may be x. scratch is two arrays like x.
Form: TypeAlias = Callable[[Any, Array, Array, Array | None, Array], None]


class Gelu(Function):
    """GELU in one of its forms."""

    __slots__ = ("form",)

    replayable = True

    def __init__(self, form: Form) -> None:
        self.form = form

    def forward(self, x: Array) -> Array:
        xp = self.xp
        flat, y = xp.reshape(x, (x.size,)), xp.empty((x.size,), x.dtype)
        slope = xp.empty((x.size,), x.dtype) if self.needs[0] else None
        blocks = row_blocks(flat)
        scratch = xp.empty((2, blocks[0].stop), x.dtype)
        for part in blocks:
            here = None if slope is None else slope[part]
            self.form(xp, flat[part], y[part], here, scratch[:, : part.stop - part.start])
        self.saved = (None if slope is None else slope.reshape(x.shape),)
        result: Array = y.reshape(x.shape)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (slope,) = self.saved
        return (self.xp.multiply(grad, slope),)


class LinearGelu(Linear):
    """GELU of x W + b. The bias is added, and GELU computed in place, block by block."""

    __slots__ = ("form",)

    replayable = True

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        xp, y = self.xp, super().forward(x, weight, None)
        rows, _, shape, _ = self.saved
        z = y.reshape(len(rows), weight.shape[1])  # a view, as y is new
        slope = xp.empty(z.shape, z.dtype) if True in self.needs else None
        self.activate(z, bias, slope)
        self.saved = (rows, weight, shape, slope)
        return y

    def activate(self, z: Array, bias: Array | None, slope: Array | None) -> None:
        """Turn z into GELU(z + bias), and write the derivative, if there is a place for it."""
        xp, blocks = self.xp, row_blocks(z)
        scratch = xp.empty((2, blocks[0].stop, z.shape[1]), z.dtype)
        for part in blocks:
            block, here = z[part], None if slope is None else slope[part]
            if bias is not None:
                xp.add(block, bias, out=block)
            self.form(xp, block, block, here, scratch[:, : part.stop - part.start])

    def through(self, grad: Array, kept: Array) -> Array:
        """Return the gradient of x W + b, given that of the result, and the slope that was kept."""
        result: Array = self.xp.multiply(grad, kept)
        return result


class _CompiledGelu(Function):
    """GELU by compiled kernels, forward and backward in one pass each.

    Args:
        run: (x, y) writes the value.
        back: (x, grad, out) writes the gradient.
    """

    __slots__ = ("back", "run")

    replayable = True

    def __init__(self, run: Kernel, back: Kernel) -> None:
        self.run, self.back = run, back

    def forward(self, x: Array) -> Array:
        xp = self.xp
        flat, y = xp.ascontiguousarray(xp.reshape(x, (x.size,))), xp.empty((x.size,), x.dtype)
        self.invoke(self.run, flat, y)
        self.saved = (flat,)
        result: Array = y.reshape(x.shape)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (flat,), xp = self.saved, self.xp
        to_x = xp.empty(flat.shape, flat.dtype)
        self.invoke(self.back, flat, xp.ascontiguousarray(xp.reshape(grad, flat.shape)), to_x)
        return (to_x.reshape(grad.shape),)


class _CompiledLinearGelu(LinearGelu):
    """GELU's tanh form of x W + b; bias, GELU and its derivative in one pass."""

    __slots__ = ("kernels",)

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(by_tanh)
        self.kernels = kernels

    def activate(self, z: Array, bias: Array | None, slope: Array | None) -> None:
        """Turn z into GELU(z + bias), and write the derivative."""
        xp, n = self.xp, z.shape[1]
        shift = xp.zeros((n,), z.dtype) if bias is None else xp.ascontiguousarray(bias)
        self.invoke(self.kernels.bias_gelu_tanh_slope, z, shift, xp.empty(z.shape, z.dtype) if slope is None else slope)


class _ProductLinearGelu(ProductLinear):
    """GELU of x W + b, on a device and in half precision; the derivative is kept in the dtype of the result."""

    __slots__ = ("form",)

    def __init__(self, reads: np.dtype[Any], table: Any, form: Form) -> None:
        super().__init__(reads, table)
        self.form = form

    def end(self, y: Array, bias: Array | None) -> Array | None:
        """Turn x W into GELU(x W + b), in place; return its derivative."""
        xp = self.xp
        slope: Array = xp.empty(y.shape, y.dtype)
        if self.table is not None:
            shift = xp.zeros((y.shape[1],), y.dtype) if bias is None else xp.ascontiguousarray(bias)
            kernel = self.table.bias_gelu_slope if self.form is exact else self.table.bias_gelu_tanh_slope
            self.invoke(kernel, y, shift, slope)
            return slope
        z = widened(xp, y) if bias is None else xp.add(widened(xp, y), bias)
        wide = xp.empty(z.shape, z.dtype)
        self.form(xp, z, z, wide, xp.empty((2, *z.shape), z.dtype))
        for result, values in ((y, z), (slope, wide)):
            xp.copyto(result, values, casting="unsafe")
        return slope

    def through(self, grad: Array, kept: Array) -> Array:
        """Return the gradient of x W + b, given that of the result, and the derivative."""
        if self.table is not None:
            return self.with_bias(self.table.slope_grad_bias, grad, kept)
        result: Array = self.xp.multiply(grad, kept)
        return result


def exact(xp: Any, x: Array, y: Array, slope: Array | None, scratch: Array) -> None:
    """x Phi(x), Phi being the normal distribution's cumulative function; the derivative is Phi(x) + x density(x)."""
    phi, rest = scratch
    if slope is not None:
        xp.multiply(x, x, out=slope)
        xp.multiply(slope, -0.5, out=slope)
        xp.exp(slope, out=slope)
        xp.multiply(slope, 1 / sqrt(2 * pi), out=slope)
        xp.multiply(slope, x, out=slope)
    xp.multiply(x, 1 / sqrt(2), out=rest)
    erf(rest, xp, out=phi)
    xp.add(phi, 1, out=phi)
    xp.multiply(phi, 0.5, out=phi)
    if slope is not None:
        xp.add(slope, phi, out=slope)
    xp.multiply(x, phi, out=y)


def by_tanh(xp: Any, x: Array, y: Array, slope: Array | None, scratch: Array) -> None:
    """The form of GPT-2, in which Phi is approximated.

    y = x s, s = (1 + tanh(x p)) / 2, p = c (1 + 0.044715 x^2), c = sqrt(2 / pi); dy/dx = s + y (1 - s) (6 p - 4 c)

    Where x^2 is too large for the dtype (from 1.9e19 on in float32) dy/dx is NaN: another pass to hold x^2 finite would
    cost a tenth of the time.
    """
    c, (p, rest) = sqrt(2 / pi), scratch
    s = rest if slope is None else slope
    xp.multiply(x, x, out=p)
    xp.multiply(p, 0.044715 * c, out=p)
    xp.add(p, c, out=p)
    xp.multiply(p, x, out=s)
    xp.tanh(s, out=s)
    xp.multiply(s, 0.5, out=s)
    xp.add(s, 0.5, out=s)
    xp.multiply(x, s, out=y)
    if slope is None:
        return
    xp.multiply(p, 6, out=p)
    xp.subtract(p, 4 * c, out=p)
    xp.subtract(1, s, out=rest)
    xp.multiply(p, rest, out=p)
    xp.multiply(p, y, out=p)  # last: where 1 - s is 0, p y may be too large, and infinity * 0 is NaN
    xp.add(s, p, out=slope)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x Phi(x), elementwise.

    Args:
        approximate: "none" for the exact form by the error function, "tanh" for the form of GPT-2.

    Raises:
        UsageError: for another value of `approximate`.
    """
    form, compiled = _form(approximate), kernels_for(real("gelu", x).data)
    table = device_kernels(x.data)
    if table is not None and form is exact:
        return _CompiledGelu(table.gelu, table.gelu_grad)(x)
    if compiled is None or form is exact:
        return widely(Gelu(form), x)
    return _CompiledGelu(compiled.gelu_tanh, compiled.gelu_tanh_grad)(x)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return GELU(x W + b), bit for bit what `gelu(linear(...))` gives, in one operation.

    Arguments and errors are those of `linear` and `gelu`.
    """
    reads = check_linear("linear_gelu", x, weight, bias)
    form, compiled = _form(approximate), kernels_for(real("linear_gelu", x).data)
    if not is_plain(x, reads):
        return _ProductLinearGelu(reads, device_kernels(x.data), form)(x, weight, bias)
    function = LinearGelu(form) if compiled is None or form is exact else _CompiledLinearGelu(compiled)
    return function(x, weight, bias)


def _form(approximate: str) -> Form:
    if approximate not in ("none", "tanh"):
        raise UsageError(f"gelu's approximate is 'none' or 'tanh', not {approximate!r}")
    return exact if approximate == "none" else by_tanh
