"""Convolution of device arrays as products of matrices: windows copied into the rows of a matrix, and back.

    forward            columns(x) @ W                    W seen as (kh kw c, o)
    kernels' gradient  columns(x)^T @ dy                 added up over the blocks of images by the product itself
    images' gradient   columns(dy) @ flipped W           for stride 1: a convolution too, rounded once
                       col2im(dy @ W^T)                  otherwise: each pixel gathers what windows that saw it send

A few images at a time, so that their columns take no more than COLUMNS_BYTES, and one at least. A 1 x 1
convolution needs no columns: its images are the matrix. Groups are put one behind the other first, so that all of them
are one product of stacks:

    (count, h, w, groups, c)  -->  (groups, count, h, w, c)  -->  columns (groups, pixels, kh kw c)

float16 and bfloat16 are added up in float32, and the kernels' gradient stays float32.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.cuda.kernels import DeviceFunctions
from nnmpi.backend.gemm import gemm
from nnmpi.backend.kernels import cast
from nnmpi.backend.precision import is_low
from nnmpi.backend.recording import perform
from nnmpi.ops.conv.algorithm import NO_POOL, Algorithm, ConvSpec, Gradients

COLUMNS_BYTES = 1 << 28  # of one block's columns


class DeviceIm2col(Algorithm):
    """The three products of a convolution, by the device's kernels and cuBLAS; each is recorded as a whole.

    Args:
        spec: what is computed.
        dtype: in which inputs are read, and of the result; parameters and their gradients keep theirs.
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
        spec, grad = self.spec, cast(xp, xp.ascontiguousarray(grad), x.dtype)
        if spec.pool != NO_POOL:
            dz: Array = xp.empty((len(grad), *spec.conv_size(*x.shape[1:3]), grad.shape[3]), grad.dtype)
            perform(self.functions.bias_relu_pool_grad, grad, kept, dz, out.bias, spec.pool)
        elif spec.relu:
            dz = xp.empty(grad.shape, grad.dtype)
            perform(self.functions.relu_grad_bias, grad, kept, dz, out.bias)
        else:
            dz = grad
            if out.bias is not None:
                perform(self.functions.column_sum, grad, out.bias)
        if out.weight is not None:
            perform(self.weight_gradient, x, dz, out.weight, out.add_weight)
        if out.x is not None:
            perform(self.input_gradient, dz, weight, out.x)

    def convolve(self, x: Array, weight: Array, bias: Array | None, relu: bool, y: Array) -> None:
        """Write conv(x) + bias, and its positive part if there is a ReLU, to y."""
        if y.size:
            self._multiply_columns(x, self._stacked(weight, x.dtype), self.spec, y)
            xp = namespace(y)
            if relu:
                self.functions.bias_relu(y, xp.zeros((y.shape[-1],), y.dtype) if bias is None else bias)
            elif bias is not None:
                xp.add(y, bias, out=y, casting="unsafe")

    def input_gradient(self, grad: Array, weight: Array, out: Array) -> None:
        """Write the images' gradient."""
        if grad.size == 0:
            out.fill(0)
        elif out.size == 0:
            return
        elif self.spec.reversible:
            self._multiply_columns(grad, self._flipped(weight, grad.dtype), self.spec.backwards(), out)
        else:
            self._scatter(grad, weight, out)

    def weight_gradient(self, x: Array, grad: Array, out: Array, add: bool) -> None:
        """Write the kernels' gradient, or add it."""
        xp, groups, (kh, kw, c, o) = namespace(x), self.spec.groups, out.shape
        total, begun = out.reshape(1, kh * kw * c, o), add
        if grad.size == 0 or x.size == 0:
            if not add:
                out.fill(0)
            return
        if groups > 1:
            total, begun = xp.empty((groups, kh * kw * c, o // groups), out.dtype), False
        for images in _blocks(grad.shape, kh * kw * x.shape[3] * x.dtype.itemsize):
            columns = self._columns(x[images], self.spec)  # (groups, pixels, kh kw c)
            sent = self._by_group(grad[images]).reshape(groups, columns.shape[1], o // groups)
            _multiply(xp, columns.swapaxes(1, 2), sent, total, begun)
            begun = True
        if groups > 1:
            place = out.reshape(kh * kw * c, groups, o // groups)
            found = total.transpose(1, 0, 2)
            if add:
                xp.add(place, found, out=place)
            else:
                xp.copyto(place, found)

    def _multiply_columns(self, x: Array, kernel: Array, spec: ConvSpec, y: Array) -> None:
        """Write the convolution of images with stacked kernels (groups, kh kw c, o) to y."""
        xp, groups, o = namespace(x), self.spec.groups, y.shape[3]
        for images in _blocks(y.shape, kernel.shape[1] * groups * x.dtype.itemsize):
            columns, part = self._columns(x[images], spec), y[images]
            pixels = columns.shape[1]
            if groups == 1:
                _multiply(xp, columns, kernel, part.reshape(1, pixels, o))
                continue
            result = xp.empty((groups, pixels, o // groups), y.dtype)
            _multiply(xp, columns, kernel, result)
            xp.copyto(part.reshape(pixels, groups, o // groups), result.transpose(1, 0, 2))

    def _columns(self, x: Array, spec: ConvSpec) -> Array:
        """Return what each window over a block of images sees, (groups, pixels, kh kw c)."""
        (n, h, w, c), groups = x.shape, self.spec.groups
        height, width = spec.conv_size(h, w)
        images, terms = self._by_group(x), prod(spec.kernel) * c // groups
        if spec[:3] == ((1, 1), (1, 1), (0, 0)):  # a 1 x 1 convolution: the images are the matrix
            return images.reshape(groups, n * h * w, terms)
        columns: Array = namespace(x).empty((groups * n * height * width, terms), x.dtype)
        self.functions.im2col(images, columns, *spec[:4])
        return columns.reshape(groups, n * height * width, terms)

    def _by_group(self, x: Array) -> Array:
        """Return images (n, h, w, c) with a group's channels side by side: (groups n, h, w, c / groups)."""
        groups, (n, h, w, c) = self.spec.groups, x.shape
        if groups == 1:
            return x
        xp = namespace(x)
        memory: Array = xp.empty((groups, n, h, w, c // groups), x.dtype)
        xp.copyto(memory, x.reshape(n, h, w, groups, c // groups).transpose(3, 0, 1, 2, 4))
        return memory.reshape(groups * n, h, w, c // groups)

    def _stacked(self, weight: Array, dtype: np.dtype[Any]) -> Array:
        """Return the kernels as matrices (groups, kh kw c, o / groups)."""
        xp, groups, (kh, kw, c, o) = namespace(weight), self.spec.groups, weight.shape
        if groups == 1:
            return cast(xp, weight, dtype).reshape(1, kh * kw * c, o)
        kernel: Array = xp.empty((groups, kh * kw * c, o // groups), dtype)
        columns = xp.reshape(weight, (kh * kw * c, groups, o // groups))
        xp.copyto(kernel, columns.transpose(1, 0, 2), casting="unsafe")
        return kernel

    def _flipped(self, weight: Array, dtype: np.dtype[Any]) -> Array:
        """Return the stacked kernels (groups, kh kw o, c) that take the result's gradient back to the images."""
        xp, groups, (kh, kw, c, o) = namespace(weight), self.spec.groups, weight.shape
        kernel: Array = xp.empty((groups, kh, kw, o // groups, c), dtype)
        turned = xp.reshape(weight, (kh, kw, c, groups, o // groups))[::-1, ::-1].transpose(3, 0, 1, 4, 2)
        xp.copyto(kernel, turned, casting="unsafe")
        return kernel.reshape(groups, kh * kw * (o // groups), c)

    def _scatter(self, grad: Array, weight: Array, out: Array) -> None:
        """Write the images' gradient of a convolution with strides: products first, then sums over the windows."""
        xp, groups, (kh, kw, c, o) = namespace(grad), self.spec.groups, weight.shape
        (_, h, w, _), spec = out.shape, self.spec
        kernel = self._stacked(weight, grad.dtype).swapaxes(1, 2)
        wide = np.dtype(np.float32) if is_low(grad.dtype) else grad.dtype
        for images in _blocks(grad.shape, kh * kw * c * groups * wide.itemsize):
            count = images.stop - images.start
            sent = self._by_group(grad[images]).reshape(groups, -1, o // groups)  # (groups, pixels, o / groups)
            columns = xp.empty((groups, sent.shape[1], kh * kw * c), wide)
            _multiply(xp, sent, kernel, columns)
            columns = columns.reshape(groups * sent.shape[1], kh * kw * c)
            if groups == 1 and out.dtype == wide:
                self.functions.col2im(columns, out[images], *spec[:4])
                continue
            place = xp.empty((groups * count, h, w, c), wide)
            self.functions.col2im(columns, place, *spec[:4])
            target = out[images].reshape(count, h, w, groups, c)
            xp.copyto(target, place.reshape(groups, count, h, w, c).transpose(1, 2, 3, 0, 4), casting="unsafe")


def _multiply(xp: Any, a: Array, b: Array, out: Array, add: bool = False) -> None:
    """Write, or add, the product of stacks of matrices to out; stacks of one are matrices, which libraries like."""
    if len(a) == 1:
        a, b, out = a[0], b[0], out[0]
    gemm(xp, a, b, out, add)


def _blocks(shape: tuple[int, ...], each: int) -> Iterator[slice]:
    """Yield which images are computed at a time.

    Args:
        shape: of all windows, (n, out_h, out_w, any).
        each: bytes of a window's columns.
    """
    n, height, width = shape[:3]
    count = max(1, min(n, COLUMNS_BYTES // max(1, each * height * width)))
    for start in range(0, n, count):
        yield slice(start, min(start + count, n))
