"""Convolution of device arrays, with the bias, ReLU and max-pooling that follow it, as one operation.

    forward     z = conv(x)                         by cuDNN or by im2col and cuBLAS (see `use_convolution`)
                y = relu(z + b)                     in place, or in cuDNN's graph
                y = relu(max of windows of z + b)   in one pass, which notes the winners; z is given back
    backward    dz                                  in one pass, with db = sum of dz
                dW = columns(x)^T dz, dx            likewise by cuDNN or by im2col

In float16 and bfloat16 x, y and their gradients are of that dtype, parameters and theirs stay float32.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from nnmpi.backend import cudnn
from nnmpi.backend.array import Array, namespace
from nnmpi.backend.casting import cast
from nnmpi.backend.kernels.active import kernels_for
from nnmpi.backend.precision import precision
from nnmpi.ops.columns import Frame
from nnmpi.ops.device_cudnn import CudnnConv
from nnmpi.ops.device_im2col import Im2col
from nnmpi.tensor.function import Function
from nnmpi.tensor.variable import Variable


def device_kernels(x: Variable) -> Any:
    """Return the kernels of the device that x lies on, or None where it lies on none, or they are switched off."""
    if type(x.data) is np.ndarray:
        return None
    kernels: Any = kernels_for(x.data)
    return kernels


class DeviceConv(Function):
    """max_pool(relu(conv2d(x))) of device arrays whose shapes fit one another.

    Args:
        kernels: the device's.
        working: the dtype in which inputs are read, and of the result.
        frame: the windows, and the pooling, (1, 1) for none. Before a pooling there must be a ReLU.
        groups: that channels are cut into.
        relu: whether there is one.
    """

    __slots__ = ("frame", "groups", "kernels", "relu", "way", "working")

    replayable = True

    def __init__(self, kernels: Any, working: np.dtype[Any], frame: Frame, groups: int, relu: bool) -> None:
        self.kernels, self.working, self.frame, self.groups, self.relu = kernels, working, frame, groups, relu
        self.way: Im2col | CudnnConv | None = None

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        xp, frame, o = self.xp, self.frame, weight.shape[3]
        self.way = way = self._way(x)
        dtype, given = self.working, x.dtype
        x, weight = cast(xp, xp.ascontiguousarray(x), dtype), xp.ascontiguousarray(weight)
        bias = None if bias is None else xp.ascontiguousarray(bias)
        z: Array = xp.empty((len(x), *frame.out(*x.shape[1:3]), o), dtype)
        if frame.pool == (1, 1):
            self.invoke(way.forward, x, weight, bias, self.relu, z)
            self.saved = (x, weight, z if self.relu else None, given)
            return z
        self.invoke(way.forward, x, weight, None, False, z)
        y: Array = xp.empty((len(x), *frame.pooled(*x.shape[1:3]), o), dtype)
        winner = xp.empty(y.shape, np.min_scalar_type(prod(frame.pool))) if True in self.needs else None
        self.invoke(self.kernels.bias_relu_pool, z, bias, y, winner, frame.pool)
        self.saved = (x, weight, winner, given)
        return y

    def _way(self, x: Array) -> Im2col | CudnnConv:
        library = cudnn.chosen(namespace(x))
        if library is None:
            return Im2col(self.kernels, self.frame, self.groups)
        exact, tuned = precision() == "float32", cudnn.convolution() == "tuned"
        return CudnnConv(library, self.kernels, self.frame, self.groups, exact, tuned)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, weight, kept, given = self.saved
        xp, way, o = self.xp, self.way, weight.shape[3]
        assert way is not None  # forward chose it
        grad = cast(xp, xp.ascontiguousarray(grad), x.dtype)
        to_bias = self._place(2, (o,), weight.dtype) if self.needs[2] else None
        to_weight, add = self._sum(weight) if self.needs[1] else (None, False)
        to_x = xp.empty(x.shape, given) if self.needs[0] else None
        dz = self._before(grad, kept, x.shape, to_bias)
        if to_weight is not None:
            self.invoke(way.weight_gradient, x, dz, to_weight, add)
        if to_x is not None:
            self.invoke(way.input_gradient, dz, weight, to_x)
        return to_x, to_weight, to_bias

    def _before(self, grad: Array, kept: Array | None, shape: tuple[int, ...], to_bias: Array | None) -> Array:
        """Return the gradient of the convolution alone, and write that of the bias."""
        xp, frame = self.xp, self.frame
        if frame.pool != (1, 1):
            dz: Array = xp.empty((len(grad), *frame.out(*shape[1:3]), grad.shape[3]), grad.dtype)
            self.invoke(self.kernels.bias_relu_pool_grad, grad, kept, dz, to_bias, frame.pool)
        elif self.relu:
            dz = xp.empty(grad.shape, grad.dtype)
            self.invoke(self.kernels.relu_grad_bias, grad, kept, dz, to_bias)
        else:
            dz = grad
            if to_bias is not None:
                self.invoke(self.kernels.column_sum, grad, to_bias)
        return dz

    def _sum(self, weight: Array) -> tuple[Array, bool]:
        """Return where the kernels' gradient goes, and whether it is added there."""
        place, add = self.sum_into(1)
        if place is None or not place.flags.c_contiguous:
            return self.xp.empty(weight.shape, weight.dtype), False
        return place, add

    def _place(self, i: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return where the gradient of input i goes: its own place, if kernels can write there."""
        place = self.into(i)
        result: Array = place if place is not None and place.flags.c_contiguous else self.xp.empty(shape, dtype)
        return result
