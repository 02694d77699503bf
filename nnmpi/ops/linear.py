"""The linear layer's operation, x W + b."""

from math import prod
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape
from nnmpi.backend.gemm import empty_rows, gemm, in_rows, rounded_once
from nnmpi.backend.kernels import cast, kernels_of
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.tensor.dtypes import product_dtype
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import given, refuse_parts
from nnmpi.tensor.placement import Placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import WRITTEN, Channels, NotExported, Sample, Traits

__all__ = ["linear", "linear_transposed"]


class LinearFunction(Function):
    """x W + b. The leading axes of x are flattened into one, so that each product is one GEMM.

        x (rows, in)   W (in, out)     y = x W + b
        dW = x^T d     db = 1^T d      dx = d W^T      d: the gradient of y

    On a device, in mixed precision, the GEMM reads x and W as float16 or bfloat16, accumulates in
    float32 and writes y in half precision. dW and db have the dtypes of W and b (float32); the GEMM
    writes dW, or adds it, in the flat gradients.

    On the host, in bf16, the GEMM reads x, W and d rounded to bfloat16; all arrays are float32. Of
    the three products two read x, and two d: both are rounded once, and the rounded x is kept.
    """

    __slots__ = ()

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.LAST,
        products=lambda f, y, x, *_: y.size * x.shape[-1],
        samples=(
            Sample("linear", lambda *given: linear(*given), ((3, 4), (4, 2), (2,)), parameters=2),
            Sample(
                "linear stack", lambda *given: linear(*given), ((3, 2, 4), (4, 5)), parameters=1
            ),
        ),
    )

    computes = "product"

    def placed(self, *inputs: Any) -> Placement:
        """Return the placement of x, which may be sharded along any axis but the last."""
        x, *parameters = inputs
        refuse_parts(self, *parameters, why="needs a whole weight and bias")
        return placement_if_uncut(self, x, (-1,), "adds up all of that axis")

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        xp, shape, dtypes = self.xp, x.shape, None
        flat = len(shape) == 2
        # not -1, which NumPy cannot infer for an empty array
        flat_shape = shape if flat else (prod(shape[:-1]), shape[-1])
        if self.rounds:
            x = rounded_once(x, x.size * weight.shape[1])
        rows = x if flat else xp.reshape(x, flat_shape)
        dtype = self.product_dtype
        if dtype is None:
            y = gemm(rows, weight, rounds=self.rounds)
        else:
            dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
            rows, weight = cast(rows, dtype), cast(weight, dtype)
            out, dtype = None, FLOAT32 if self.returns and is_low(dtype) else dtype
            if bias is None:  # whose kernels need contiguous arrays
                out = empty_rows(xp, len(rows), weight.shape[1], dtype)
            y = gemm(rows, weight, out, dtype=dtype)
        kernels = kernels_of(y)
        if bias is not None:
            kernels.add_bias(y, bias)
        kept = rows if self.needs[1] else None, weight if self.needs[0] else None
        self.saved = (*kept, shape, flat_shape[0], kernels, dtypes)
        return y if flat else y.reshape(*shape[:-1], weight.shape[1])  # a view, as y is new

    def backward(self, grad: Array) -> Grads:
        rows, weight, shape, count, kernels, dtypes = self.saved
        if self.product_dtype is not None:
            grad = cast(grad, self.product_dtype)
        if len(shape) != 2:
            grad = np.reshape(grad, (count, grad.shape[-1]))
        if dtypes is not None:
            grad = in_rows(grad)
        to_x = to_weight = to_bias = None
        if self.needs[2]:
            to_bias = place_for(
                self, 2, grad.shape[1:], grad.dtype if dtypes is None else dtypes[2]
            )
            kernels.bias_grad(grad, to_bias)
        if self.rounds:
            grad = rounded_once(grad, grad.size * shape[-1])
        if self.needs[1]:
            factors, (target, add) = self.weight_factors(rows, grad), self.sum_into(1)
            dtype = None if dtypes is None else dtypes[1]
            to_weight = gemm(*factors, target, add, dtype, self.rounds)
        if self.needs[0]:
            to_x = gemm(grad, weight.T, rounds=self.rounds)
            to_x = to_x if dtypes is None else cast(to_x, dtypes[0])
            if len(shape) != 2:
                to_x = to_x.reshape(shape)
        return to_x, to_weight, to_bias

    def weight_factors(self, rows: Array, grad: Array) -> tuple[Array, Array]:
        """Return the two matrices whose product is the gradient of W."""
        return rows.T, grad


class TransposedLinearFunction(LinearFunction):
    """x W^T, for a weight (out, in), such as an embedding's table."""

    __slots__ = ()

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.LAST,
        products=lambda f, y, x, *_: y.size * x.shape[-1],
        samples=(
            Sample(
                "linear_transposed",
                lambda x, weight: linear_transposed(x, weight),
                ((3, 2, 4), (5, 4)),
                parameters=1,
            ),
        ),
    )

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        return super().forward(x, weight.T, bias)

    def weight_factors(self, rows: Array, grad: Array) -> tuple[Array, Array]:
        """Return the two matrices whose product is the gradient of W."""
        return grad.T, rows


class PartialLinear(LinearFunction):
    """x W as a partial sum over ranks: half precision would round it."""

    __slots__ = ()

    traits = Traits(
        onnx=NotExported(),
        channels=Channels.LAST,
        products=lambda f, y, x, *_: y.size * x.shape[-1],
        tested_in="tests/parallel/sharded/test_layers.py",
    )

    returns = "float32"


class WideLinear(LinearFunction):
    """x W + b of float32 arrays, in every precision.

    Args:
        rounds: whether the host rounds operands to bfloat16.
    """

    __slots__ = ()

    traits = Traits(
        onnx=NotExported(),
        channels=Channels.LAST,
        products=lambda f, y, x, *_: y.size * x.shape[-1],
        tested_in="tests/nn/test_experts.py",
    )

    computes = "float32"
    product_dtype = None

    def __init__(self, rounds: bool) -> None:
        self.rounds = rounds


class KeptWeight(LinearFunction):
    """A product with the weight of a base that is kept in half precision (see `Parameter.kept`).

    Each pass widens the weight anew, so that no wide copy of it stays between the two.
    """

    __slots__ = ()

    traits = Traits(
        onnx=NotExported("export the model with its adapters merged, see nn.merge"),
        channels=Channels.LAST,
        products=lambda f, y, x, *_: y.size * x.shape[-1],
        tested_in="tests/nn/test_lora.py",
    )

    def raised(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Dtype | None]:
        """Return x and b as a product's inputs, and the weight as it is kept."""
        x, weight, bias = inputs
        (x, bias), low = super().raised((x, bias))
        # of shards it is called again, with the tensor that is kept
        return (x, weight if weight.kept is None else weight.kept, bias), low

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        y = super().forward(x, cast(weight, self.product_dtype or x.dtype), bias)
        rows, used, *others = self.saved
        self.saved = (rows, None if used is None else weight, *others)
        return y

    def backward(self, grad: Array) -> Grads:
        rows, weight, *others = self.saved
        if weight is not None:
            weight = self.matrix(cast(weight, self.product_dtype or grad.dtype))
        self.saved = (rows, weight, *others)
        return super().backward(grad)

    def matrix(self, weight: Array) -> Array:
        """Return the matrix (in, out) of a weight."""
        return weight


class KeptTable(KeptWeight, TransposedLinearFunction):
    """x W^T, likewise."""

    __slots__ = ()

    traits = KeptWeight.traits

    def matrix(self, weight: Array) -> Array:
        """Return the matrix (in, out) of a weight."""
        return weight.T


class KeptPart(KeptWeight, PartialLinear):
    """x W as a partial sum over ranks, likewise."""

    __slots__ = ()

    traits = KeptWeight.traits


def place_for(function: Function, i: int, shape: Shape, dtype: Dtype) -> Array:
    """Return an array for input i's gradient: the parameter's buffer if it is contiguous."""
    target = function.into(i)
    if target is not None and target.flags.c_contiguous:
        return target
    return function.xp.empty(shape, dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W + b.

    Args:
        x: (..., in).
        weight: (in, out), the order in which BLAS reads it without a copy.
        bias: (out,), or None.

    Returns:
        (..., out), in the dtype of x; in mixed precision (see `backend.precision`) in the low one.

    Raises:
        ShapeError: when x has another number of features than the weight has rows.
        DtypeError: when x, weight and bias differ in dtype, except by mixed precision's rules.
        UsageError: for tf32 with NumPy's arrays, and for an embedding's table.
    """
    check_linear("linear", x, weight, bias)
    function = LinearFunction if weight.kept is None else KeptWeight
    return function()(x, weight, bias)


def linear_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T, such as the logits of an output that is tied to an embedding's table W.

    Args:
        x: (..., in).
        weight: (out, in).

    Returns:
        (..., out), in the dtype of x; in mixed precision in the low one.

    Same errors as `linear`.
    """
    product_dtype("linear_transposed", x, weight)
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"linear_transposed of {x.shape} and a weight {weight.shape} needs (..., in) and"
            " (out, in)"
        )
    function = TransposedLinearFunction if weight.kept is None else KeptTable
    return function()(x, weight, None)


def linear_part(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W as a partial sum over ranks: float32 if half precision would round it.

    Same arguments and errors as `linear`.
    """
    check_linear("linear", x, weight, None)
    function = PartialLinear if weight.kept is None else KeptPart
    return function()(x, weight, None)


def check_linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuse operands that `linear` cannot multiply.

    Raises:
        ShapeError, DtypeError, UsageError: see `linear`.
    """
    product_dtype(name, x, weight, *given(bias))
    if getattr(weight, "is_table", False):
        raise UsageError(
            f"{name} reads a weight (in, out), but this one is an embedding's table (rows,"
            " features); call nnmpi.nn.TiedLinear(embedding), or ops.linear_transposed(x, weight)"
        )
    inputs = x._data
    matrix = weight._data if weight.kept is None else weight.kept._data
    if inputs.ndim == 0 or matrix.ndim != 2 or inputs.shape[-1] != matrix.shape[0]:
        refuse_parts(name, x, weight, bias, why="adds up all of x's last axis")
        raise ShapeError(
            f"{name} needs (..., {weight.shape[0]}) for a weight of shape {weight.shape}, not"
            f" {x.shape}; flatten images first"
        )
    if bias is not None and bias._data.shape != matrix.shape[1:]:
        refuse_parts(name, x, weight, bias)
        raise ShapeError(
            f"{name}'s bias has shape {bias.shape}; the weight of shape {weight.shape} needs"
            f" {weight.shape[1:]}"
        )
