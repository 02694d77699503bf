"""Convolution on a device: the choice of an algorithm, and cuDNN's.

    a group for each channel                   Depthwise, by kernels of nnmpi's own
    1 x 1 alone                                Im2col: a product that reads images where they are
    float32, float16, bfloat16, with cuDNN     ByCudnn; Im2col computes what it has no plan for
    otherwise                                  Im2col

    weight (kh, kw, c / groups, o) --a copy, in the images' dtype--> kernels (o, kh, kw, c / groups)

cuDNN reads and writes images where they are, and kernels with the input channels last. The copy
would be one in half precision anyway, whose weights are float32; it serves forward and backward.
The weight's gradient is written in float32, also in half precision, and copied back.
"""

from functools import partial
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.cuda.cudnn import Cudnn, is_aligned
from nnmpi.backend.kernels import add_bias, bias_grad, cast, copy, cudnn_for, kernels_of
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.ops.conv.algorithm import ConvAlgorithm, ConvSpec, Gradients
from nnmpi.ops.conv.depthwise import Depthwise
from nnmpi.ops.conv.im2col import Im2col, pixel_rows

PIXELS: ConvSpec = ConvSpec((1, 1))  # each window is one pixel


def on_device(x: Array, spec: ConvSpec, outputs: int) -> ConvAlgorithm:
    """Return the algorithm for a device's images x (n, h, w, c), without ReLU and pooling."""
    each = 1 < spec.groups == x.shape[3] == outputs
    kernels = kernels_of(x)
    if each and kernels.convolves:
        return DeviceDepthwise(spec, kernels)
    if each and x.dtype.kind == "f":
        return Depthwise(spec)
    library = cudnn_for(x)
    if library is None or spec == PIXELS:
        return Im2col(spec)
    return ByCudnn(spec, library, Im2col(spec))


class DeviceDepthwise(Depthwise):
    """A depthwise convolution by a device's kernels."""

    def __init__(self, spec: ConvSpec, kernels: Any) -> None:
        super().__init__(spec)
        steps = kernels.depthwise_conv, kernels.depthwise_input_grad, kernels.depthwise_weight_grad
        self.convolve, self.input_grad, self.weight_grad = (  # type: ignore[method-assign]
            partial(step, spec=spec) for step in steps
        )


class ByCudnn(ConvAlgorithm):
    """Any convolution without ReLU and pooling.

    Args:
        spec: the convolution.
        library: cuDNN's operations.
        other: computes what they do not; it saves nothing for its backward pass.
    """

    def __init__(self, spec: ConvSpec, library: Cudnn, other: ConvAlgorithm) -> None:
        super().__init__(spec)
        self._library, self._other, self._windows = library, other, spec[1:4]

    def forward(
        self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool
    ) -> Array | None:
        x, kernels = _aligned(x), _turned(weight, x)
        if not self._library.convolve(x, kernels, y, self._windows):
            self._other.forward(x, weight, bias, y, keep)
            return None
        if bias is not None:
            add_bias(y, bias)
        return kernels if keep else None

    def backward(
        self, grad: Array, x: Array, weight: Array, kept: Array | None, out: Gradients
    ) -> None:
        xp = namespace(grad)
        grad = _aligned(cast(xp.ascontiguousarray(grad), x.dtype))
        if out.bias is not None:
            bias_grad(pixel_rows(grad), out.bias)
        if out.x is not None:
            kernels = _turned(weight, grad) if kept is None else kept
            if not self._library.input_gradient(grad, kernels, out.x, self._windows):
                self._other.backward(grad, x, weight, None, Gradients(out.x, None, None))
        if out.weight is not None:
            x, (kh, kw, c, o) = _aligned(x), weight.shape
            for dtype in (FLOAT32, x.dtype) if is_low(x.dtype) else (x.dtype,):
                place = xp.empty((o, kh, kw, c), dtype)
                if self._library.weight_gradient(x, grad, place, self._windows):
                    copy(out.weight, place.transpose(1, 2, 3, 0))
                    return
            self._other.backward(grad, x, weight, None, Gradients(None, out.weight, None))


def _aligned(x: Array) -> Array:
    """Return a contiguous array where cuDNN may read it: a view may begin anywhere."""
    if is_aligned(x):
        return x
    result = np.empty_like(x, order="C")
    copy(result, x)
    return result


def _turned(weight: Array, like: Array) -> Array:
    """Return kernels (o, kh, kw, c / groups) of a weight, in the dtype of `like`."""
    kh, kw, c, o = weight.shape
    kernels = np.empty((o, kh, kw, c), like.dtype, like=weight)
    copy(kernels, weight.transpose(3, 0, 1, 2))
    return kernels
