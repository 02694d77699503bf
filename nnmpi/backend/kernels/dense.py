"""What stands around the matrix products of dense layers: conversion, bias, ReLU and GELU, and their gradients."""

from math import pi, sqrt
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Residuals, namespace, zero
from nnmpi.backend.kernels.sums import row_blocks, row_sum
from nnmpi.backend.matrices import HALF_BYTES

_FLOAT32: np.dtype[Any] = np.dtype(np.float32)

# erfc(x) = t exp(-x^2 + P(t)) for x >= 0, t = 2 / (2 + x): P is smooth, and this is its Chebyshev series in 2 t - 1,
# computed with 60 digits. In float64 the result is within 4e-16 of the true value.
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


class DenseKernels:
    """Bias and activations by the array library's functions.

    `xp` is the arrays' module, or a recorder's stand-in for it. Results of products may be float16 or bfloat16 beside
    a bias of float32; a bias's gradient is then added up in float32.
    """

    __slots__ = ()

    def cast(self, xp: Any, x: Array, dtype: np.dtype[Any]) -> Array:
        """Return x in another dtype, rounded to the nearest; x itself where it has that dtype.

        Args:
            xp: the array's module, or a recorder's stand-in for it.
            x: any shape and strides.
            dtype: of the result, also bfloat16, which NumPy and CuPy know by name alone.
        """
        if x.dtype == dtype:
            return x
        result: Array = xp.empty(x.shape, dtype)
        xp.copyto(result, x, casting="unsafe")  # NumPy's rules of safety know nothing of bfloat16
        return result

    # ---- bias

    def bias_add(self, xp: Any, y: Array, bias: Array) -> None:
        """Add the bias to each row of y, in place.

        Args:
            xp: see the class.
            y: (rows, n), which is written.
            bias: (n,).
        """
        xp.add(y, bias, out=y)

    def bias_grad(self, xp: Any, grad: Array, to_bias: Array) -> None:
        """Write the bias's gradient, the sum over the rows.

        Args:
            xp: see the class.
            grad: (rows, n), the gradient of the result.
            to_bias: (n,), which is written.
        """
        wide = self.cast(xp, grad, _FLOAT32) if grad.dtype.itemsize == HALF_BYTES else grad
        row_sum(xp, wide, out=to_bias)

    # ---- ReLU

    def bias_relu(self, xp: Any, y: Array, bias: Array | None) -> None:
        """Replace y by max(y + bias, 0), in place; NaN stays.

        Args:
            xp: see the class.
            y: (rows, n).
            bias: (n,), or None.
        """
        if bias is not None:
            xp.add(y, bias, out=y)
        xp.maximum(y, zero(xp, y.dtype), out=y)

    def relu_grad_bias(self, xp: Any, grad: Array, y: Array, to_bias: Array | None) -> Array:
        """Return the gradient of what ReLU was given, and write its sum over the rows.

        Args:
            xp: see the class.
            grad: (rows, n), the gradient of the result.
            y: (rows, n), the result of `bias_relu`.
            to_bias: (n,), where the bias's gradient goes; None where nobody wants it.

        Returns:
            (rows, n), grad where y is positive, and 0 elsewhere.
        """
        result: Array
        if grad.dtype.itemsize == HALF_BYTES:
            result = xp.empty(grad.shape, grad.dtype)
            xp.greater(y, 0, out=result, casting="unsafe")  # 0 and 1 in the gradient's dtype
            xp.multiply(grad, result, out=result)
        else:
            result = xp.multiply(grad, xp.greater(y, zero(xp, y.dtype)))
        if to_bias is not None:
            self.bias_grad(xp, result, to_bias)
        return result

    # ---- GELU

    def gelu(self, xp: Any, x: Array, tanh: bool, keep: bool) -> tuple[Array, Residuals]:
        """Return GELU of x, of its shape, and what the gradient needs.

        The derivative is computed together with the value, while a block lies in the cache; `gelu_grad` is then one
        product.

        Args:
            xp: see the class.
            x: any shape and strides.
            tanh: whether GPT-2's form by the hyperbolic tangent is meant, and not the exact one by the error function.
            keep: whether `gelu_grad` will be called.
        """
        form = _by_tanh if tanh else _exact
        flat, y = xp.reshape(x, (x.size,)), xp.empty((x.size,), x.dtype)
        slope = xp.empty((x.size,), x.dtype) if keep else None
        blocks = row_blocks(flat)
        scratch = xp.empty((2, blocks[0].stop), x.dtype)
        for part in blocks:
            here = None if slope is None else slope[part]
            form(xp, flat[part], y[part], here, scratch[:, : part.stop - part.start])
        return y.reshape(x.shape), (None if slope is None else slope.reshape(x.shape),)

    def gelu_grad(self, xp: Any, grad: Array, residuals: Residuals, tanh: bool) -> Array:
        """Return the gradient of x, of its shape.

        Args:
            xp: see the class.
            grad: of the shape of x, the gradient of the result.
            residuals: what `gelu` returned.
            tanh: as it was given to `gelu`.
        """
        (slope,) = residuals
        result: Array = xp.multiply(grad, slope)
        return result

    def bias_gelu(self, xp: Any, y: Array, bias: Array | None, tanh: bool, keep: bool) -> Array | None:
        """Replace y by GELU(y + bias), in place, and return the derivative there.

        Args:
            xp: see the class.
            y: (rows, n).
            bias: (n,), or None.
            tanh: as for `gelu`.
            keep: whether the derivative is wanted.

        Returns:
            (rows, n), of the dtype of y, for `slope_grad_bias`; maybe None if it is not wanted.
        """
        form = _by_tanh if tanh else _exact
        slope: Array | None = None
        if y.dtype.itemsize == HALF_BYTES:  # in float32, rounded once
            z = self.cast(xp, y, _FLOAT32)
            if bias is not None:
                xp.add(z, bias, out=z)
            wide, slope = xp.empty(y.shape, z.dtype), xp.empty(y.shape, y.dtype)
            form(xp, z, z, wide, xp.empty((2, *y.shape), z.dtype))
            for result, values in ((y, z), (slope, wide)):
                xp.copyto(result, values, casting="unsafe")
            return slope
        if keep:
            slope = xp.empty(y.shape, y.dtype)
        blocks = row_blocks(y)
        scratch = xp.empty((2, blocks[0].stop, y.shape[1]), y.dtype)
        for part in blocks:
            block, here = y[part], None if slope is None else slope[part]
            if bias is not None:
                xp.add(block, bias, out=block)
            form(xp, block, block, here, scratch[:, : part.stop - part.start])
        return slope

    def slope_grad_bias(self, xp: Any, grad: Array, slope: Array, to_bias: Array | None) -> Array:
        """Return grad * slope, (rows, n), and write its sum over the rows.

        Args:
            xp: see the class.
            grad: (rows, n), the gradient of the result.
            slope: (rows, n), the derivative at each element.
            to_bias: (n,), where the bias's gradient goes; None where nobody wants it.
        """
        result: Array = xp.multiply(grad, slope)
        if to_bias is not None:
            self.bias_grad(xp, result, to_bias)
        return result


def _exact(xp: Any, x: Array, y: Array, slope: Array | None, scratch: Array) -> None:
    """Write x Phi(x), Phi being the normal distribution's cumulative function, and Phi(x) + x density(x).

    Args:
        xp: the arrays' module, or a recorder's stand-in for it.
        x: any shape.
        y: like x, for the value; it may be x.
        slope: like x, for the derivative, or None.
        scratch: two arrays like x.
    """
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


def _by_tanh(xp: Any, x: Array, y: Array, slope: Array | None, scratch: Array) -> None:
    """Write the form of GPT-2, in which Phi is approximated, and its derivative; arguments as for `_exact`.

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


def erf(x: Array, xp: Any = None, out: Array | None = None) -> Array:
    """Return the error function of x, elementwise, in the dtype of x. NumPy has none.

    It is computed by Clenshaw's recurrence for the series above.

    Args:
        x: any shape.
        xp: the module whose functions are called; by default that of x.
        out: where to write the result; it may be x.
    """
    xp = namespace(x) if xp is None else xp
    size, t, u, high, higher, spare = (xp.empty(x.shape, x.dtype) for _ in range(6))
    xp.absolute(x, out=size)
    xp.minimum(size, 100, out=size)  # it is 1 long before; the square of a larger number may be beyond the range
    xp.divide(2, xp.add(size, 2, out=t), out=t)
    xp.subtract(xp.multiply(t, 4, out=u), 2, out=u)  # twice the point, as the recurrence wants it
    terms = _ERFC_SERIES if x.dtype.itemsize > 4 else _ERFC_SERIES[:13]  # float32 ends at 1e-8
    xp.copyto(high, terms[-1])
    xp.copyto(higher, 0)
    for coefficient in reversed(terms[1:-1]):
        xp.multiply(u, high, out=spare)
        xp.subtract(spare, higher, out=spare)
        xp.add(spare, coefficient, out=spare)
        high, higher, spare = spare, high, higher
    series = xp.multiply(u, high, out=spare)
    xp.multiply(series, 0.5, out=series)
    xp.subtract(series, higher, out=series)
    xp.add(series, terms[0], out=series)
    xp.subtract(series, xp.multiply(size, size, out=size), out=series)
    xp.multiply(t, xp.exp(series, out=series), out=t)
    xp.subtract(1, t, out=t)
    result: Array = xp.multiply(xp.sign(x, out=u), t, out=t if out is None else out)
    return result
