"""Softmax and its logarithm along an axis, shifted by each row's largest element so that nothing overflows."""

from __future__ import annotations

from typing import Any

from nnmpi.backend.array import Array
from nnmpi.backend.casting import device_kernels
from nnmpi.errors import ShapeError
from nnmpi.tensor.convert import widely
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real
from nnmpi.tensor.tensor import Tensor


class Softmax(Function):
    """e^x / sum(e^x) along an axis."""

    __slots__ = ("axis",)

    replayable = True

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, x: Array) -> Array:
        xp = self.xp
        y: Array = xp.subtract(x, xp.max(x, axis=self.axis, keepdims=True))
        xp.exp(y, out=y)
        xp.divide(y, xp.sum(y, axis=self.axis, keepdims=True), out=y)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,), xp = self.saved, self.xp
        weighted = xp.multiply(grad, y)
        total = xp.sum(weighted, axis=self.axis, keepdims=True)
        return (xp.subtract(weighted, xp.multiply(y, total), out=weighted),)


class _DeviceSoftmax(Function):
    """The softmax along the last axis by a device's kernels."""

    __slots__ = ("table",)

    replayable = True

    def __init__(self, table: Any) -> None:
        self.table = table

    def forward(self, x: Array) -> Array:
        xp = self.xp
        y: Array = xp.empty(x.shape, x.dtype)
        self.invoke(self.table.softmax, xp.ascontiguousarray(x), 1.0, False, y)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,), xp = self.saved, self.xp
        to_x = xp.empty(y.shape, y.dtype)
        self.invoke(self.table.softmax_grad, xp.ascontiguousarray(grad), y, 1.0, False, to_x)
        return (to_x,)


class LogSoftmax(Function):
    """x - log(sum(e^x)) along an axis."""

    __slots__ = ("axis",)

    replayable = True

    def __init__(self, axis: int) -> None:
        self.axis = axis

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


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return e^x / sum(e^x) along `axis`: positive numbers that add up to 1.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    _check(x, axis)
    table = device_kernels(real("softmax", x).data)
    if table is not None and axis % x.ndim == x.ndim - 1:
        return _DeviceSoftmax(table)(x)
    return widely(Softmax(axis), x)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return the logarithm of softmax along `axis`, computed without overflow or log of 0.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    _check(x, axis)
    return widely(LogSoftmax(axis), real("log_softmax", x))


def _check(x: Tensor, axis: int) -> None:
    if not -x.ndim <= axis < x.ndim or x.shape[axis] == 0:
        raise ShapeError(f"softmax along axis {axis} of shape {x.shape} has no elements")
