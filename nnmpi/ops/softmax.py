"""Softmax and its logarithm along an axis, shifted by each row's largest element so that nothing overflows."""

from __future__ import annotations

from nnmpi.backend.array import Array, namespace
from nnmpi.errors import ShapeError
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real
from nnmpi.tensor.tensor import Tensor


class Softmax(Function):
    """e^x / sum(e^x) along an axis."""

    __slots__ = ("axis",)

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, x: Array) -> Array:
        y: Array = namespace(x).exp(x - x.max(axis=self.axis, keepdims=True))
        y /= y.sum(axis=self.axis, keepdims=True)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,) = self.saved
        weighted = grad * y
        return (weighted - y * weighted.sum(axis=self.axis, keepdims=True),)


class LogSoftmax(Function):
    """x - log(sum(e^x)) along an axis."""

    __slots__ = ("axis",)

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, x: Array) -> Array:
        xp = namespace(x)
        y: Array = x - x.max(axis=self.axis, keepdims=True)
        y -= xp.log(xp.exp(y).sum(axis=self.axis, keepdims=True))
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,) = self.saved
        return (grad - namespace(y).exp(y) * grad.sum(axis=self.axis, keepdims=True),)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return e^x / sum(e^x) along `axis`: positive numbers that add up to 1.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    _check(x, axis)
    return Softmax(axis)(real("softmax", x))


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return the logarithm of softmax along `axis`, computed without overflow or log of 0.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    _check(x, axis)
    return LogSoftmax(axis)(real("log_softmax", x))


def _check(x: Tensor, axis: int) -> None:
    if not -x.ndim <= axis < x.ndim or x.shape[axis] == 0:
        raise ShapeError(f"softmax along axis {axis} of shape {x.shape} has no elements")
