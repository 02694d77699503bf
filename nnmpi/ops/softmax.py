"""Softmax and its logarithm along an axis, shifted by each row's largest element so that nothing overflows."""

from typing import Any

from nnmpi.aliases import also
from nnmpi.backend.array import Array
from nnmpi.backend.kernels.base import Kernels
from nnmpi.backend.kernels.lookup import kernels_for
from nnmpi.errors import ShapeError
from nnmpi.tensor.convert import in_float32, with_kernels
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.placement import Placement, uncut
from nnmpi.tensor.tensor import Tensor


class SoftmaxFunction(Function):
    """e^x / sum(e^x) along an axis.

    Args:
        axis: along which the results add up to 1.
        kernels: those for x.
    """

    __slots__ = ("axis", "kernels")

    replayable = True

    def __init__(self, axis: int, kernels: Kernels) -> None:
        self.axis, self.kernels = axis, kernels

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as before, where the axis is another one."""
        return uncut(self, inputs[0], (self.axis,), "adds up all of its axis")

    def forward(self, x: Array) -> Array:
        y = self.kernels.softmax(self.xp, x, self.axis)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,) = self.saved
        return (self.kernels.softmax_grad(self.xp, grad, y, self.axis),)


class LogSoftmax(Function):
    """x - log(sum(e^x)) along an axis."""

    __slots__ = ("axis",)

    replayable = True

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as before, where the axis is another one."""
        return uncut(self, inputs[0], (self.axis,), "adds up all of its axis")

    def forward(self, x: Array) -> Array:
        xp = self.xp
        y: Array = xp.subtract(x, xp.max(x, axis=self.axis, keepdims=True))
        xp.subtract(y, xp.log(xp.sum(xp.exp(y), axis=self.axis, keepdims=True)), out=y)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,), xp = self.saved, self.xp
        share = xp.exp(y)
        xp.multiply(share, xp.sum(grad, axis=self.axis, keepdims=True), out=share)
        return (xp.subtract(grad, share, out=share),)


@also(input="x", dim="axis")
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return e^x / sum(e^x) along `axis`: positive numbers that add up to 1.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    _check(x, axis)
    kernels = kernels_for(require_floating("softmax", x).data)
    function = SoftmaxFunction(axis, kernels)
    return with_kernels(kernels, function, x) if axis % x.ndim == x.ndim - 1 else in_float32(function, x)


@also(input="x", dim="axis")
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
