"""Reductions along axes: sum, mean, variance, maximum, minimum, running sums; and the matrix
product.
"""

from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape
from nnmpi.backend.gemm import gemm
from nnmpi.backend.precision import precision, rounds_products
from nnmpi.backend.sums import sum_over
from nnmpi.base.errors import ShapeError
from nnmpi.tensor.function import Function, Grads, unbroadcast
from nnmpi.tensor.operand import values_of
from nnmpi.tensor.placement import (
    Placement,
    elementwise_placement,
    is_sharded,
    placement_if_uncut,
    with_axis,
)
from nnmpi.tensor.traits import WRITTEN, Channels, Sample, Traits

Axes: TypeAlias = tuple[int, ...]


def _keep_axes(shape: Shape, axes: Axes) -> Shape:
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


class _Reduction(Function):
    """A reduction over `axes`; `keepdims` keeps them with length 1."""

    __slots__ = ("axes", "keepdims")

    computes = "float32"

    def __init__(self, axes: Axes, keepdims: bool) -> None:
        self.axes, self.keepdims = axes, keepdims

    @property
    def returns(self) -> str:  # type: ignore[override]
        """See `Function.returns`: mixed precision keeps float32."""
        return "" if precision() == "float32" else "float32"

    def count(self, x: Array) -> int:
        """Return how many elements of x become one."""
        return prod(x.shape[i] for i in self.axes)

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; a reduction over the sharded axis is refused."""
        (x,) = inputs
        placement = placement_if_uncut(
            self, x, self.axes, "needs all elements of the axes that it reduces"
        )
        removed = 0 if self.keepdims else sum(axis < placement.axis for axis in self.axes)
        return replace(placement, axis=placement.axis - removed)


class Sum(_Reduction):
    """The sum over axes, or the mean if `averages`."""

    __slots__ = ("averages",)

    traits = Traits(
        onnx=WRITTEN,
        samples=(
            Sample("sum", lambda x: Sum((1,), False)(x), ((3, 4, 2),)),
            Sample("mean", lambda x: Sum((1, 2), True, True)(x), ((3, 4, 2),)),
        ),
    )

    def __init__(self, axes: Axes, keepdims: bool, averages: bool = False) -> None:
        super().__init__(axes, keepdims)
        self.averages = averages  # type: ignore[misc]

    @property
    def summands(self) -> tuple[int, ...]:
        """See `Function.summands`."""
        shape, count = self.saved
        return (shape[0], shape[0], count) if shape and count == prod(shape) else ()

    def forward(self, x: Array) -> Array:
        count = self.count(x)
        self.saved = (x.shape, count)
        total = sum_over(x, self.axes, self.keepdims)
        if not self.averages:
            return total
        if count == 0:
            raise ShapeError(
                f"the mean over axes {self.axes} of an array of shape {x.shape} has no elements"
            )
        return total / count

    def backward(self, grad: Array) -> Grads:
        shape, count = self.saved
        item = grad.reshape(_keep_axes(shape, self.axes))
        return (np.broadcast_to(item / count if self.averages else item, shape),)


class Variance(_Reduction):
    """Variance over `axes`, with denominator n - correction; `keepdims` keeps axes of length 1."""

    __slots__ = ("correction",)

    traits = Traits(
        onnx=WRITTEN,
        samples=(
            Sample("var", lambda x: Variance((1,), False, 0)(x), ((3, 4),)),
            Sample("var unbiased", lambda x: Variance((1, 2), True, 1)(x), ((3, 2, 2),)),
        ),
    )

    def __init__(self, axes: Axes, keepdims: bool, correction: int) -> None:
        super().__init__(axes, keepdims)
        self.correction = correction

    def forward(self, x: Array) -> Array:
        count = self.count(x)
        divisor = count - self.correction
        if divisor <= 0:
            raise ShapeError(
                f"the variance over axes {self.axes} of an array of shape {x.shape} has too few"
                f" elements for correction {self.correction}"
            )
        centred = x - sum_over(x, self.axes, True) / count
        self.saved = (centred, divisor)
        squares = sum_over(centred * centred, self.axes, self.keepdims)
        return squares / divisor

    def backward(self, grad: Array) -> Grads:
        centred, divisor = self.saved
        share = grad.reshape(_keep_axes(centred.shape, self.axes)) * (2 / divisor)
        return (centred * share,)


class Largest(_Reduction):
    """Maximum over `axes`, or minimum without `largest`; ties share the gradient evenly."""

    __slots__ = ("largest",)

    traits = Traits(
        onnx=WRITTEN,
        samples=(
            Sample("max", lambda x: Largest((1,), False, True)(x), ((3, 4),), values="distinct"),
            Sample("min", lambda x: Largest((1,), True, False)(x), ((3, 4),), values="distinct"),
        ),
    )

    returns = ""

    def __init__(self, axes: Axes, keepdims: bool, largest: bool) -> None:
        super().__init__(axes, keepdims)
        self.largest = largest

    def forward(self, x: Array) -> Array:
        if self.count(x) == 0:
            raise ShapeError(
                f"an array of shape {x.shape} has no largest or smallest element over axes"
                f" {self.axes}"
            )
        find = np.max if self.largest else np.min
        result = find(x, axis=self.axes, keepdims=self.keepdims)
        self.saved = (x, result)
        return result

    def backward(self, grad: Array) -> Grads:
        x, result = self.saved
        shape = _keep_axes(x.shape, self.axes)
        ties = np.empty(x.shape, grad.dtype, like=x)
        np.equal(x, result.reshape(shape), out=ties)
        share = grad.reshape(shape) / self.xp.add.reduce(ties, axis=self.axes, keepdims=True)
        return (ties * share,)


def _running_sum(x: Array, axis: int) -> Array:
    """Return the sums of the elements up to each one along an axis.

    On a device by Hillis and Steele's steps (1986): each adds what stands 1, 2, 4 ... before.
    CuPy's own scan waits at barriers that not all of its threads reach.
    """
    if isinstance(x, np.ndarray):
        return np.cumsum(x, axis, dtype=x.dtype)
    result, length, shift = x.copy(), x.shape[axis], 1
    before = (slice(None),) * (axis % x.ndim)
    while shift < length:
        sums = result.copy()
        earlier = result[(*before, slice(length - shift))]
        sums[(*before, slice(shift, None))] += earlier
        result, shift = sums, 2 * shift
    return result


class CumSum(Function):
    """The sums of an axis's elements up to each one."""

    __slots__ = ("axis",)

    traits = Traits(
        onnx=lambda f, y, x: x.add("CumSum", np.array(f.axis, np.int64)),
        samples=(
            Sample("cumsum", lambda x: x.cumsum(1), ((2, 4, 3),)),
            Sample("cumsum last axis", lambda x: x.cumsum(-1), ((3, 4),)),
        ),
    )

    computes = "float32"

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; sums along the sharded axis are refused."""
        return placement_if_uncut(self, inputs[0], (self.axis,), "adds up along all of that axis")

    def forward(self, x: Array) -> Array:
        return _running_sum(x, self.axis)

    def backward(self, grad: Array) -> Grads:
        # an element is in its own sum and in all that follow
        following = _running_sum(np.flip(grad, self.axis), self.axis)
        return (np.flip(following, self.axis),)


class MatMul(Function):
    """a @ b for operands of one, two or more dimensions."""

    traits = Traits(
        onnx=lambda f, y, a, b: a @ b,
        channels=Channels.LAST,
        products=lambda f, y, a, b: y.size * a.shape[-1],
        samples=(
            Sample("matmul", lambda a, b: a @ b, ((3, 4), (4, 2)), parameters=1),
            Sample("matmul stacks", lambda a, b: a @ b, ((3, 2, 4), (3, 4, 2))),
        ),
    )

    computes = "float32"

    def raised(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Dtype | None]:
        """See `Function.raised`; a device's products add up in float32 anyway."""
        values = values_of(inputs[0])
        self.rounds = rounds_products(values)
        return super().raised(inputs) if isinstance(values, np.ndarray) else (inputs, None)

    def placed(self, *inputs: Any) -> Placement:
        """Return the result's placement: that of the stacks, the rows of a, or the columns of b.

            (..., n, k) @ (..., k, m) -> (..., n, m)

        Operands sharded along k are refused: their products would have to be summed over the ranks.
        """
        a, b = inputs
        for x, inner in ((a, -1), (b, -2 if b.ndim > 1 else -1)):
            if is_sharded(x):
                placement_if_uncut(self, x, (inner,), "adds up along all of that axis")
        x = a if is_sharded(a) else b
        behind = x.ndim - x.shard.axis
        if behind > 2:  # an axis of the stacks
            return elementwise_placement(self, inputs)
        if is_sharded(a) and is_sharded(b):
            raise x.shard.error(self, "needs every pair of parts")
        return with_axis(x, max(a.ndim, b.ndim, 2) - behind - (a.ndim == 1))

    def forward(self, a: Array, b: Array) -> Array:
        self.saved = (a, b)
        y = self.multiply(a[None, :] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b)
        y = y[..., 0, :] if a.ndim == 1 else y
        return y[..., 0] if b.ndim == 1 else y

    def backward(self, grad: Array) -> Grads:
        a, b = self.saved
        # a vector on the left is a row, one on the right a column: add the missing axes here, and
        # remove them from the gradients at the end
        rows = a[None, :] if a.ndim == 1 else a
        columns = b[:, None] if b.ndim == 1 else b
        if a.ndim == 1:
            grad = grad[..., None, :] if b.ndim > 1 else grad[None]  # (..., 1, m)
        if b.ndim == 1:
            grad = grad[..., None]  # (..., n, 1)
        to_a = to_b = None
        if self.needs[0]:
            # (..., n, m) @ (..., m, k) -> (..., n, k); gradients of broadcast stacks are summed
            to_a = self.multiply(grad, columns.swapaxes(-1, -2))
            to_a = unbroadcast(to_a, rows.shape).reshape(a.shape)
        if self.needs[1]:
            # (..., k, n) @ (..., n, m) -> (..., k, m)
            to_b = self.multiply(rows.swapaxes(-1, -2), grad)
            to_b = unbroadcast(to_b, columns.shape).reshape(b.shape)
        return to_a, to_b

    def multiply(self, a: Array, b: Array) -> Array:
        """Return the product of two stacks of matrices."""
        if b.ndim > 2 or a.ndim == 2:
            return gemm(a, b, rounds=self.rounds)
        rows = prod(a.shape[:-1])  # a stack times a single matrix is one product of more rows
        y = gemm(a.reshape(rows, a.shape[-1]), b, rounds=self.rounds)
        return y.reshape(*a.shape[:-1], b.shape[-1])
