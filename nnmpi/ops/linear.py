"""The linear layer's operation, x W + b, alone or with ReLU on top."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.casting import FLOAT32, cast, device_kernels, widened
from nnmpi.backend.constants import ones, zero
from nnmpi.backend.gemm import gemm
from nnmpi.backend.kernels.active import kernels_for
from nnmpi.backend.precision import is_floating, is_low
from nnmpi.errors import ShapeError
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import read_as
from nnmpi.tensor.tensor import Tensor

if TYPE_CHECKING:
    from nnmpi.backend.kernels.table import Kernels


class Linear(Function):
    """x W + b, or max(x W + b, 0), with the leading axes of x made into one, so that each product is one GEMM.

        x (rows, in)   W (in, out)         y = x W + b                  ReLU works on y where it lies
        dW = x^T d     db = 1^T d          dx = d W^T                   d: the gradient of y, 0 where ReLU gave 0

    The bias gradient is a product with ones, which BLAS does twice as fast as NumPy adds up rows.
    """

    __slots__ = ("relu",)

    replayable = True

    def __init__(self, relu: bool = False) -> None:
        self.relu = relu

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        xp, shape = self.xp, x.shape
        flat = len(shape) == 2
        rows = x if flat else xp.reshape(x, (prod(shape[:-1]), shape[-1]))  # not -1, which nothing can be divided by
        y: Array = xp.dot(rows, weight)
        self.finish(y, bias)
        self.saved = (rows, weight, shape, y if self.relu else None)
        return y if flat else y.reshape(*shape[:-1], weight.shape[1])

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        rows, weight, shape, y = self.saved
        xp = self.xp
        if len(shape) != 2:
            grad = xp.reshape(grad, (len(rows), weight.shape[1]))
        if y is not None:
            grad = self.through(grad, y)
        to_x = to_weight = to_bias = None
        if self.needs[2]:
            to_bias = self.bias_gradient(grad)
        if self.needs[1]:
            to_weight = self._product(rows.T, grad, 1)
        if self.needs[0]:
            to_x = xp.dot(grad, weight.T)
            if len(shape) != 2:
                to_x = to_x.reshape(shape)
        return to_x, to_weight, to_bias

    def finish(self, y: Array, bias: Array | None) -> None:
        """Turn x W into the result, in place."""
        if bias is not None:
            self.xp.add(y, bias, out=y)
        if self.relu:
            self.xp.maximum(y, zero(self.xp, y.dtype), out=y)

    def through(self, grad: Array, kept: Array) -> Array:
        """Return the gradient of x W + b, given that of the result, and the result, which was kept."""
        result: Array = self.xp.multiply(grad, self.xp.greater(kept, zero(self.xp, kept.dtype)))
        return result

    def bias_gradient(self, grad: Array) -> Array:
        """Return the gradient of b, given that of x W + b."""
        return self._product(ones(self.xp, len(grad), grad.dtype), grad, 2)

    def _product(self, a: Array, b: Array, i: int) -> Array:
        """Return a b, computed where the gradient of input i belongs, if that place is known."""
        place = self.into(i)
        result: Array = self.xp.dot(a, b) if place is None else self.xp.dot(a, b, out=place)
        return result


class _CompiledLinearRelu(Linear):
    """max(x W + b, 0) by compiled kernels: bias and ReLU in one pass, and both their gradients."""

    __slots__ = ("kernels", "to_bias")

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(relu=True)
        self.kernels = kernels

    def finish(self, y: Array, bias: Array | None) -> None:
        """Turn x W into the result, in place."""
        self.invoke(self.kernels.bias_relu, y, self.xp.ascontiguousarray(bias))

    def through(self, grad: Array, kept: Array) -> Array:
        """Return the gradient of x W + b, and compute that of b."""
        xp, place = self.xp, self.into(2) if self.needs[2] else None
        self.to_bias = xp.empty(grad.shape[1:], grad.dtype) if place is None else place
        result: Array = xp.empty(grad.shape, grad.dtype)
        self.invoke(self.kernels.relu_grad_bias, xp.ascontiguousarray(grad), kept, result, self.to_bias)
        return result

    def bias_gradient(self, grad: Array) -> Array:
        """Return the gradient of b, which is there already."""
        result = self.to_bias
        del self.to_bias
        return result


class ProductLinear(Linear):
    """x W + b, or max(x W + b, 0), of arrays on a device, and in half precision anywhere.

        x, W --read as float16 or bfloat16-->  GEMM, adds up in float32  -->  y, in half precision, + b, ReLU
        dW, db in the dtypes of W and b (float32): the GEMM writes, or adds, dW where it belongs

    Args:
        reads: the dtype in which the product reads x and W, and gives the result.
        table: the device's kernels; None for none.
        gives: the dtype of the result, if it is float32 instead.
    """

    __slots__ = ("dtypes", "gives", "kept_bias", "reads", "table")

    kept_bias: Array | None

    def __init__(
        self, reads: np.dtype[Any], table: Any, relu: bool = False, gives: np.dtype[Any] | None = None
    ) -> None:
        super().__init__(relu)
        self.reads, self.table, self.gives = reads, table, gives

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        xp, shape = self.xp, x.shape
        self.dtypes = (x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        rows = xp.reshape(x, (prod(shape[:-1]), shape[-1]))
        rows, weight = cast(xp, rows, self.reads), cast(xp, weight, self.reads)
        y = gemm(xp, rows, weight, dtype=self.gives)
        self.saved = (rows, weight, shape, self.end(y, bias))
        result: Array = y.reshape(*shape[:-1], weight.shape[1])  # a view, as y is new
        return result

    def end(self, y: Array, bias: Array | None) -> Array | None:
        """Turn x W into the result, in place; return what `through` needs of it."""
        if self.table is not None and (bias is not None or self.relu):
            shift = self.xp.zeros((y.shape[1],), y.dtype) if bias is None else self.xp.ascontiguousarray(bias)
            self.invoke(self.table.bias_relu if self.relu else self.table.bias_add, y, shift)
        else:
            self.finish(y, bias)
        return y if self.relu else None

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        rows, weight, shape, kept = self.saved
        xp = self.xp
        grad = xp.ascontiguousarray(xp.reshape(cast(xp, grad, self.reads), (len(rows), weight.shape[1])))
        self.kept_bias = None
        if kept is not None:
            grad = self.through(grad, kept)
        to_x = to_weight = to_bias = None
        if self.needs[2]:
            to_bias = self.bias_gradient(grad) if self.kept_bias is None else self.kept_bias
        self.kept_bias = None
        if self.needs[1]:
            to_weight = self.weight_gradient(rows, grad)
        if self.needs[0]:
            to_x = cast(xp, gemm(xp, grad, weight.T), self.dtypes[0]).reshape(shape)
        return to_x, to_weight, to_bias

    def through(self, grad: Array, kept: Array) -> Array:
        """Return the gradient of x W + b, given that of the result, and the result, which was kept."""
        xp = self.xp
        if self.table is not None:
            return self.with_bias(self.table.relu_grad_bias, grad, kept)
        result: Array = xp.empty(grad.shape, grad.dtype)
        xp.greater(kept, 0, out=result, casting="unsafe")  # 0 and 1 in the gradient's dtype
        return xp.multiply(grad, result, out=result)  # type: ignore[no-any-return]

    def with_bias(self, kernel: Any, grad: Array, kept: Array) -> Array:
        """Return what a kernel makes of the gradient and what was kept; it sums the bias's gradient, too."""
        result: Array = self.xp.empty(grad.shape, grad.dtype)
        if self.needs[2]:
            self.kept_bias = self.place(2, grad.shape[1:])
        self.invoke(kernel, grad, kept, result, self.kept_bias)
        return result

    def weight_gradient(self, rows: Array, grad: Array) -> Array:
        """Return the gradient of W, in the dtype of W."""
        place, add = self.sum_into(1)
        if place is None or not place.flags.c_contiguous:
            return gemm(self.xp, rows.T, grad, dtype=self.dtypes[1])
        return gemm(self.xp, rows.T, grad, out=place, add=add)

    def bias_gradient(self, grad: Array) -> Array:
        """Return the gradient of b, in the dtype of b."""
        result = self.place(2, grad.shape[1:])
        if self.table is not None:
            self.invoke(self.table.column_sum, grad, result)
        else:
            self.xp.add.reduce(widened(self.xp, grad), axis=0, out=result)
        return result

    def place(self, i: int, shape: tuple[int, ...]) -> Array:
        """Return where the gradient of input i is computed."""
        place = self.into(i)
        result: Array = self.xp.empty(shape, self.dtypes[i]) if place is None else place
        return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W + b.

    Args:
        x: (..., in).
        weight: (in, out): BLAS reads it as it lies.
        bias: (out,), or None.

    Returns:
        (..., out), in the dtype of x; in a mode of mixed precision (see `backend.precision`) in the lower one.

    Raises:
        ShapeError: when x has another number of features than the weight has rows.
        DtypeError: when x, weight and bias differ in dtype (and none is float32 in a mode of mixed precision).
        UsageError: for tf32 with NumPy's arrays.
    """
    reads = check_linear("linear", x, weight, bias)
    if is_plain(x, reads):
        return Linear()(x, weight, bias)
    return ProductLinear(reads, device_kernels(x.data))(x, weight, bias)


def linear_part(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W, of which the sum with others is wanted: float32 where a product of half precision would be rounded.

    Arguments and errors are those of `linear`.
    """
    reads = check_linear("linear", x, weight, None)
    if is_plain(x, reads):
        return Linear()(x, weight, None)
    return ProductLinear(reads, device_kernels(x.data), gives=FLOAT32 if is_low(reads) else None)(x, weight, None)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return max(x W + b, 0), bit for bit what `relu(linear(...))` gives, in one operation and one array.

    Arguments and errors are those of `linear`. (By compiled kernels the bias's gradient differs in the last bits.)
    """
    reads = check_linear("linear_relu", x, weight, bias)
    if not is_plain(x, reads):
        return ProductLinear(reads, device_kernels(x.data), relu=True)(x, weight, bias)
    compiled = None if bias is None else kernels_for(x.data)
    if compiled is not None:
        return _CompiledLinearRelu(compiled)(x, weight, bias)
    return Linear(relu=True)(x, weight, bias)


def is_plain(x: Tensor, reads: np.dtype[Any]) -> bool:
    """Return whether the library's own product serves: for NumPy's arrays, unless they are of half precision."""
    return not is_low(reads) if type(x.data) is np.ndarray else not is_floating(reads)


def check_linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> np.dtype[Any]:
    """Refuse what `linear` cannot multiply, in the name of an operation; return the dtype that the product reads.

    Raises:
        ShapeError, DtypeError, UsageError: see `linear`.
    """
    inputs, matrix = x.data, weight.data
    if inputs.ndim == 0 or matrix.ndim != 2 or inputs.shape[-1] != matrix.shape[0]:
        raise ShapeError(
            f"{name} needs (..., {weight.shape[0]}) for a weight of shape {weight.shape}, not {x.shape}; "
            "flatten images first"
        )
    if bias is not None and bias.data.shape != matrix.shape[1:]:
        raise ShapeError(
            f"{name}'s bias has shape {bias.shape}; the weight of shape {weight.shape} needs {weight.shape[1:]}"
        )
    return read_as(name, x, weight, bias)
