"""Pooling of device arrays over any windows: one kernel forward and one back, with NumPy's winners."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.windows import Pair, out_size
from nnmpi.tensor.function import Function


class _DevicePool(Function):
    """What both kinds share."""

    __slots__ = ("kernels", "windows")

    replayable = True

    def __init__(self, kernels: Any, kernel: Pair, stride: Pair, padding: Pair) -> None:
        self.kernels, self.windows = kernels, (kernel, stride, padding)

    def _result(self, x: Array) -> Array:
        """Return memory for the result; a part of an image may be smaller than a window, and then has none."""
        (n, h, w, c), (kernel, stride, padding) = x.shape, self.windows
        rows, columns = (max(0, out_size(*sizes)) for sizes in zip((h, w), kernel, stride, padding, strict=True))
        result: Array = self.xp.empty((n, rows, columns, c), x.dtype)
        return result


class DeviceMaxPool(_DevicePool):
    """The largest element of each window; the first of equal ones gets the gradient."""

    __slots__ = ()

    def forward(self, x: Array) -> Array:
        xp, y = self.xp, self._result(x)
        winner = xp.empty(y.shape, np.min_scalar_type(prod(self.windows[0]))) if self.needs[0] else None
        self.invoke(self.kernels.max_pool, xp.ascontiguousarray(x), y, winner, *self.windows)
        self.saved = (winner, x.shape)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        winner, shape = self.saved
        to_x = self.xp.empty(shape, grad.dtype)
        self.invoke(self.kernels.max_pool_grad, self.xp.ascontiguousarray(grad), winner, to_x, *self.windows)
        return (to_x,)


class DeviceAvgPool(_DevicePool):
    """The mean of each window, the border's zeros included."""

    __slots__ = ()

    def forward(self, x: Array) -> Array:
        y = self._result(x)
        self.invoke(self.kernels.avg_pool, self.xp.ascontiguousarray(x), y, *self.windows)
        self.saved = (x.shape,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (shape,) = self.saved
        to_x = self.xp.empty(shape, grad.dtype)
        self.invoke(self.kernels.avg_pool_grad, self.xp.ascontiguousarray(grad), to_x, *self.windows)
        return (to_x,)
