"""Reductions over axes: sum, mean, variance, largest and smallest.

float16 and bfloat16 are added up in float32. In a mode of mixed precision sums and means stay float32, as losses do,
since a sum may be beyond what float16 holds; else they are rounded to the dtype that they are of.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import to_float32
from nnmpi.backend.precision import precision
from nnmpi.backend.sums import sum_over
from nnmpi.errors import ShapeError, UsageError
from nnmpi.tensor.convert import in_float32
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.placement import Placement, uncut

if TYPE_CHECKING:
    from nnmpi.tensor.tensor import Tensor

Axis: TypeAlias = int | tuple[int, ...] | list[int] | None


def _axes(axis: Axis, ndim: int, keepdims: bool) -> tuple[int, ...]:
    """Return the axes as non-negative numbers.

    Raises:
        ShapeError: for an axis that the array does not have, or one named twice.
        UsageError: where a second axis stands in the place of keepdims.
    """
    if not isinstance(keepdims, bool):
        raise UsageError(f"keepdims is True or False, not {keepdims!r}; several axes are a tuple, such as (0, 1)")
    given = tuple(range(ndim)) if axis is None else tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    if any(not -ndim <= i < ndim for i in given) or len({i % ndim for i in given}) != len(given):
        raise ShapeError(f"axis {axis} does not fit an array of {ndim} dimensions")
    return tuple(i % ndim for i in given)


def _mean(xp: Any, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    """Return the mean; that of half precision is the array library's, which adds up in float32."""
    wide = x.dtype.kind == "f" and x.dtype.itemsize >= 4
    mean: Array = (
        xp.divide(sum_over(xp, x, axes, keepdims), prod(x.shape[i] for i in axes))
        if wide
        else xp.mean(x, axis=axes, keepdims=keepdims)
    )
    return mean


def _kept(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


class _Reduction(Function):
    """What reductions share: the axes, and whether they stay as axes of length 1."""

    __slots__ = ("axes", "keepdims")

    def __init__(self, axes: tuple[int, ...], keepdims: bool) -> None:
        self.axes, self.keepdims = axes, keepdims

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as before, where the cut axis stays."""
        (x,) = inputs
        placement = uncut(self, x, self.axes, "needs all elements of the axes that it reduces")
        gone = 0 if self.keepdims else sum(axis < placement.axis for axis in self.axes)
        return replace(placement, axis=placement.axis - gone)


class Sum(_Reduction):
    """The sum over axes."""

    replayable = True

    def forward(self, x: Array) -> Array:
        self.saved = (x.shape,)
        return sum_over(self.xp, x, self.axes, self.keepdims)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (shape,), xp = self.saved, self.xp
        spread: Array = xp.broadcast_to(xp.reshape(grad, _kept(shape, self.axes)), shape)
        return (spread,)


class Mean(_Reduction):
    """The mean over axes."""

    replayable = True

    def forward(self, x: Array) -> Array:
        count = prod(x.shape[i] for i in self.axes)
        if count == 0:
            raise ShapeError(f"the mean over axes {self.axes} of an array of shape {x.shape} has no elements")
        self.saved = (x.shape, count)
        return _mean(self.xp, x, self.axes, self.keepdims)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (shape, count), xp = self.saved, self.xp
        spread: Array = xp.broadcast_to(xp.divide(xp.reshape(grad, _kept(shape, self.axes)), count), shape)
        return (spread,)


class Variance(_Reduction):
    """The variance over `axes`, which stay as axes of length 1 with `keepdims`; the denominator is n - correction."""

    __slots__ = ("correction",)

    replayable = True

    def __init__(self, axes: tuple[int, ...], keepdims: bool, correction: int) -> None:
        super().__init__(axes, keepdims)
        self.correction = correction

    def forward(self, x: Array) -> Array:
        divisor = prod(x.shape[i] for i in self.axes) - self.correction
        if divisor <= 0:
            raise ShapeError(
                f"the variance over axes {self.axes} of an array of shape {x.shape} has too few elements "
                f"for correction {self.correction}"
            )
        xp = self.xp
        centred = xp.subtract(x, _mean(xp, x, self.axes, keepdims=True))
        self.saved = (centred, divisor)
        squares = sum_over(xp, xp.multiply(centred, centred), self.axes, self.keepdims)
        result: Array = xp.divide(squares, divisor)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (centred, divisor), xp = self.saved, self.xp
        share = xp.multiply(xp.reshape(grad, _kept(centred.shape, self.axes)), 2 / divisor)
        return (xp.multiply(centred, share),)


class Largest(_Reduction):
    """The largest element over `axes`, or the smallest without `largest`; ties share the gradient evenly."""

    __slots__ = ("largest",)

    replayable = True

    def __init__(self, axes: tuple[int, ...], keepdims: bool, largest: bool) -> None:
        super().__init__(axes, keepdims)
        self.largest = largest

    def forward(self, x: Array) -> Array:
        if prod(x.shape[i] for i in self.axes) == 0:
            raise ShapeError(f"an array of shape {x.shape} has no largest or smallest element over axes {self.axes}")
        find = self.xp.max if self.largest else self.xp.min
        result: Array = find(x, axis=self.axes, keepdims=self.keepdims)
        self.saved = (x, result)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (x, result), xp = self.saved, self.xp
        kept = _kept(x.shape, self.axes)
        ties = xp.empty(x.shape, grad.dtype)
        xp.equal(x, xp.reshape(result, kept), out=ties)
        share = xp.divide(xp.reshape(grad, kept), xp.add.reduce(ties, axis=self.axes, keepdims=True))
        return (xp.multiply(ties, share),)


def _narrow() -> bool:
    """Return whether sums of float16 and bfloat16 are rounded to that dtype."""
    return precision() == "float32"


def total(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the sum over the given axes.

    Args:
        x: any shape; half precision is summed in float32.
        axis: one axis or several, all of them by default.
        keepdims: whether the axes stay, with length 1.
    """
    return in_float32(Sum(_axes(axis, x.data.ndim, keepdims), keepdims), x, narrow=_narrow())


def mean(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean over the given axes; arguments are those of `total`.

    Raises:
        ShapeError: when there is nothing to average.
    """
    return in_float32(Mean(_axes(axis, x.data.ndim, keepdims), keepdims), require_floating("mean", x), narrow=_narrow())


def variance(x: Tensor, axis: Axis = None, keepdims: bool = False, correction: int = 0) -> Tensor:
    """Return the variance over the given axes; the other arguments are those of `total`.

    Args:
        correction: what is taken off the number of elements in the denominator; 1 gives the unbiased estimate.

    Raises:
        ShapeError: when there are not more elements than `correction`.
    """
    return in_float32(
        Variance(_axes(axis, x.data.ndim, keepdims), keepdims, correction),
        require_floating("variance", x),
        narrow=_narrow(),
    )


def largest(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the largest element over the given axes; ties share the gradient evenly. Arguments: see `total`."""
    return in_float32(Largest(_axes(axis, x.data.ndim, keepdims), keepdims, largest=True), x)


def smallest(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the smallest element over the given axes; ties share the gradient evenly. Arguments: see `total`."""
    return in_float32(Largest(_axes(axis, x.data.ndim, keepdims), keepdims, largest=False), x)


def argmax(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Any:
    """Return the index array of the first largest element; not differentiable."""
    values: Any = to_float32(namespace(x.data), x.data)  # of bfloat16 not every library finds the largest
    return values.argmax(axis=axis, keepdims=keepdims)
