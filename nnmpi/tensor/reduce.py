"""Reductions over axes: sum, mean, variance, largest and smallest."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from nnmpi.backend.array import Array, namespace
from nnmpi.errors import ShapeError
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real

if TYPE_CHECKING:
    from nnmpi.tensor.tensor import Tensor

Axis: TypeAlias = int | tuple[int, ...] | None


def _axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return the axes as non-negative numbers.

    Raises:
        ShapeError: for an axis that the array does not have, or one named twice.
    """
    given = tuple(range(ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    if any(not -ndim <= i < ndim for i in given) or len({i % ndim for i in given}) != len(given):
        raise ShapeError(f"axis {axis} does not fit an array of {ndim} dimensions")
    return tuple(i % ndim for i in given)


def _kept(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


class _Reduction(Function):
    """What reductions share: the axes, and whether they stay as axes of length 1."""

    __slots__ = ("axes", "keepdims")

    def __init__(self, axes: tuple[int, ...], keepdims: bool) -> None:
        self.axes, self.keepdims = axes, keepdims


class Sum(_Reduction):
    """The sum over axes."""

    def forward(self, x: Array) -> Array:
        self.saved = (x.shape,)
        result: Array = x.sum(axis=self.axes, keepdims=self.keepdims, dtype=x.dtype if x.dtype.kind == "f" else None)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (shape,) = self.saved
        spread: Array = namespace(grad).broadcast_to(grad.reshape(_kept(shape, self.axes)), shape)
        return (spread,)


class Mean(_Reduction):
    """The mean over axes."""

    def forward(self, x: Array) -> Array:
        count = prod(x.shape[i] for i in self.axes)
        if count == 0:
            raise ShapeError(f"the mean over axes {self.axes} of an array of shape {x.shape} has no elements")
        self.saved = (x.shape, count)
        result: Array = x.mean(axis=self.axes, keepdims=self.keepdims)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        shape, count = self.saved
        spread: Array = namespace(grad).broadcast_to(grad.reshape(_kept(shape, self.axes)) / count, shape)
        return (spread,)


class Variance(_Reduction):
    """The variance over axes, with n - correction in the denominator."""

    __slots__ = ("correction",)

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
        centred = x - x.mean(axis=self.axes, keepdims=True)
        self.saved = (centred, divisor)
        result: Array = (centred * centred).sum(axis=self.axes, keepdims=self.keepdims) / divisor
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        centred, divisor = self.saved
        return (centred * (grad.reshape(_kept(centred.shape, self.axes)) * (2 / divisor)),)


class Largest(_Reduction):
    """The largest (or, negated, smallest) element over axes; elements that tie share the gradient evenly."""

    __slots__ = ("largest",)

    def __init__(self, axes: tuple[int, ...], keepdims: bool, largest: bool) -> None:
        super().__init__(axes, keepdims)
        self.largest = largest

    def forward(self, x: Array) -> Array:
        if prod(x.shape[i] for i in self.axes) == 0:
            raise ShapeError(f"an array of shape {x.shape} has no largest or smallest element over axes {self.axes}")
        result: Array = (x.max if self.largest else x.min)(axis=self.axes, keepdims=self.keepdims)
        self.saved = (x, result)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, result = self.saved
        kept = _kept(x.shape, self.axes)
        ties = (x == result.reshape(kept)).astype(grad.dtype)
        return (ties * (grad.reshape(kept) / ties.sum(axis=self.axes, keepdims=True)),)


def total(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the sum over the given axes (all of them by default)."""
    return Sum(_axes(axis, x.data.ndim), keepdims)(x)


def mean(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean over the given axes (all of them by default).

    Raises:
        ShapeError: when there is nothing to average.
    """
    return Mean(_axes(axis, x.data.ndim), keepdims)(real("mean", x))


def variance(x: Tensor, axis: Axis = None, keepdims: bool = False, correction: int = 0) -> Tensor:
    """Return the variance over the given axes; correction 1 gives the unbiased estimate.

    Raises:
        ShapeError: when there are not more elements than `correction`.
    """
    return Variance(_axes(axis, x.data.ndim), keepdims, correction)(real("variance", x))


def largest(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the largest element over the given axes; ties share the gradient evenly."""
    return Largest(_axes(axis, x.data.ndim), keepdims, largest=True)(x)


def smallest(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the smallest element over the given axes; ties share the gradient evenly."""
    return Largest(_axes(axis, x.data.ndim), keepdims, largest=False)(x)


def argmax(x: Tensor, axis: int | None = None) -> Any:
    """Return the index array of the first largest element; not differentiable."""
    return x.data.argmax(axis=axis)
