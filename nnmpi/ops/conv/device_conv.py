"""Convolution of device arrays: what im2col and cuDNN share, which is all around the convolution itself.

    forward     z = conv(x)                         by a subclass: im2col and cuBLAS, or cuDNN
                y = relu(z + b)                     in place, or in cuDNN's graph
                y = relu(max of windows of z + b)   in one pass, which notes the winners; z is given back
    backward    dz                                  in one pass, with db = sum of dz
                dW = columns(x)^T dz, dx            likewise by the subclass

In float16 and bfloat16 x, y and their gradients are of that dtype, parameters and theirs stay float32.
"""

from math import prod
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.cuda.kernels import DeviceFunctions
from nnmpi.backend.kernels.lookup import cast
from nnmpi.backend.recording import perform
from nnmpi.ops.conv.algorithm import NO_POOL, Algorithm, ConvSpec, Gradients


class DeviceAlgorithm(Algorithm):
    """A convolution of device arrays. Subclasses compute the convolution alone.

    While a step is recorded each of a subclass's three operations is noted as a whole.

    Args:
        spec: what is computed.
        dtype: in which inputs are read, and of the result.
        functions: the device's kernels.
    """

    __slots__ = ("dtype", "functions")

    adds = True

    def __init__(self, spec: ConvSpec, dtype: np.dtype[Any], functions: DeviceFunctions) -> None:
        super().__init__(spec)
        self.dtype, self.functions = dtype, functions

    def prepare(self, xp: Any, x: Array, weight: Array, bias: Array | None) -> tuple[Array, Array, Array | None]:
        """Return all inputs without gaps, and images in the dtype of the result; parameters keep theirs."""
        bias = None if bias is None else xp.ascontiguousarray(bias)
        return cast(xp, xp.ascontiguousarray(x), self.dtype), xp.ascontiguousarray(weight), bias

    def forward(self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> Array | None:
        spec = self.spec
        if spec.pool == NO_POOL:
            perform(self.convolve, x, weight, bias, spec.relu, y)
            return y if spec.relu else None
        z: Array = xp.empty((len(x), *spec.conv_size(*x.shape[1:3]), weight.shape[3]), x.dtype)
        perform(self.convolve, x, weight, None, False, z)
        winner: Array | None = xp.empty(y.shape, np.min_scalar_type(prod(spec.pool))) if keep else None
        perform(self.functions.bias_relu_pool, z, bias, y, winner, spec.pool)
        return winner

    def backward(self, xp: Any, grad: Array, x: Array, weight: Array, kept: Array | None, out: Gradients) -> None:
        grad = cast(xp, xp.ascontiguousarray(grad), x.dtype)
        dz = self._before_relu_pool(xp, grad, x.shape, kept, out.bias)
        if out.weight is not None:
            perform(self.weight_gradient, x, dz, out.weight, out.add_weight)
        if out.x is not None:
            perform(self.input_gradient, dz, weight, out.x)

    def _before_relu_pool(
        self, xp: Any, grad: Array, shape: tuple[int, ...], kept: Array | None, to_bias: Array | None
    ) -> Array:
        """Return the gradient of the convolution alone, and write that of the bias.

        Args:
            xp: the array library.
            grad: of the result.
            shape: of the images, (n, h, w, c).
            kept: what `forward` returned.
            to_bias: out, (o,), or None.
        """
        spec = self.spec
        if spec.pool != NO_POOL:
            dz: Array = xp.empty((len(grad), *spec.conv_size(*shape[1:3]), grad.shape[3]), grad.dtype)
            perform(self.functions.bias_relu_pool_grad, grad, kept, dz, to_bias, spec.pool)
        elif spec.relu:
            dz = xp.empty(grad.shape, grad.dtype)
            perform(self.functions.relu_grad_bias, grad, kept, dz, to_bias)
        else:
            dz = grad
            if to_bias is not None:
                perform(self.functions.column_sum, grad, to_bias)
        return dz

    def convolve(self, x: Array, weight: Array, bias: Array | None, relu: bool, y: Array) -> None:
        """Write conv(x) + bias, and its positive part if there is a ReLU, to y.

        Args:
            x: (n, h, w, c), C-contiguous.
            weight: (kh, kw, c / groups, o), rounded to x's dtype here.
            bias: (o,) or None.
            relu: whether a ReLU follows.
            y: out, (n, out_h, out_w, o), of x's dtype.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no convolve")

    def input_gradient(self, grad: Array, weight: Array, out: Array) -> None:
        """Write the images' gradient.

        Args:
            grad: of the convolution, (n, out_h, out_w, o), C-contiguous.
            weight: (kh, kw, c / groups, o), rounded to grad's dtype here.
            out: (n, h, w, c), of grad's dtype or float32.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no input_gradient")

    def weight_gradient(self, x: Array, grad: Array, out: Array, add: bool) -> None:
        """Write the kernels' gradient, or add it.

        Args:
            x: (n, h, w, c), C-contiguous.
            grad: of the convolution, (n, out_h, out_w, o), likewise.
            out: (kh, kw, c / groups, o), of x's dtype or float32.
            add: whether it is added to what `out` holds.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no weight_gradient")
