"""Numba's kernels for NumPy's float32 arrays, as operations call them (see `backend.kernels`).

A loop is compiled, or read from disk, at its first call. Its arrays are float32, unless another
dtype stands here, and C-contiguous. It returns nothing: it writes to arrays, which must not overlap
the others.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import boolean, float64, types

from nnmpi.backend.array import Array, Residuals
from nnmpi.backend.jit import conv3x3, loops
from nnmpi.backend.jit.build import build, read, write
from nnmpi.backend.plain import (
    Activation,
    PlainKernels,
    fold,
    inverse_root,
    repeated_in,
    widened,
)
from nnmpi.backend.planes import Planes, flattened
from nnmpi.backend.program.record import record_launch
from nnmpi.backend.sums import WIDE

Kernel: TypeAlias = Callable[..., None]
CORNER = types.uint8  # the largest pixel of a window, 0 to 3
SIZES = types.UniTuple(types.int64, 12)  # type: ignore[no-untyped-call]

ACTIVATION = write(2), read(1), write(2)  # y, bias, slope
ACTIVATION_GRAD = read(2), read(2), write(2), write(1)  # grad, kept, result, gradient of the bias

LOOPS = {
    "bias_relu": (write(2), read(1)),
    "bias_gelu": ACTIVATION,
    "bias_gelu_tanh": ACTIVATION,
    "bias_silu": ACTIVATION,
    "relu_grad_bias": ACTIVATION_GRAD,
    "slope_grad_bias": ACTIVATION_GRAD,
    "norm": (read(2), *(read(1),) * 3, write(2)),
    "norm_products": (read(2), read(1), read(2), read(1), write(1)),
    "norm_grad": (read(2), read(1), read(2), *(read(1),) * 3, write(2)),
    "layer_norm": (read(2), read(1), read(1), write(2), write(2), write(1), float64, boolean),
    "layer_norm_grad": (read(2), read(2), read(1), read(1), write(2), write(1), write(1), boolean),
    "relu_grad": (read(1), read(1), write(1)),
    "planes_largest": (read(2), write(1), write(1, types.uint8)),
    "planes_bias_relu": (read(1), write(1), write(1, types.uint8)),
    "planes_grad": (read(1), read(1, types.uint8), write(2)),
    "softmax_loss": (read(2), read(1, types.int64), write(1), write(2)),
    "lstm_step": (write(2), read(2), read(1), read(2), write(2), write(2)),
    "adam": (write(1), read(1), write(1), write(1), *(float64,) * 6),
    "lstm_step_grad": (read(2), write(2), *(read(2),) * 4, write(2)),
}


class KernelPair(NamedTuple):
    """A kernel and the one of its gradients."""

    forward: Kernel
    backward: Kernel


@cache
def loop(name: str) -> Kernel:
    """Return a function of `loops`."""
    return build(getattr(loops, name), *LOOPS[name])


@cache
def winograd(z: conv3x3.Sizes, pooled: bool, relu: bool) -> KernelPair:
    """Return the 3 x 3 convolution and its gradients for images and channels of these sizes.

    forward: (x, weight, bias, y: out, corner: out, u: out, scratch: tuple). `corner` is like y if
    pooled, and empty otherwise; u, of 16 c o elements, is for backward. backward: (grad, x, y,
    corner, u, to: gradients of x, weight and bias, empty if not needed, scratch). All arrays are
    flat, `corner` of uint8; `z.scratch` gives the lengths of the scratch arrays.

    Args:
        pooled: followed by ReLU and max-pooling over 2 x 2 pixels.
        relu: followed by ReLU alone.
    """
    return _convolution(*conv3x3.winograd(z, pooled, 0.0 if relu else -np.inf), 3, 7)


@cache
def direct(h: int, w: int, c: int, o: int) -> KernelPair:
    """Return the pooled convolution and its gradients for images (h, w, c) with small c.

    Same arguments as `winograd`; u and the images' gradient have no elements, and there are
    two scratch arrays, of 9 c o + o elements and for one image with its border.
    """
    return _convolution(*conv3x3.direct(h, w, c, o), 2, 2)


@cache
def depthwise(kernel_h: int, kernel_w: int) -> KernelPair:
    """Return the depthwise convolution, and the sum of products that is its weight's gradient.

    Both: (images, the other operand, out, border: an image with zeros around it, sizes).
    """
    arrays = read(1), read(1), write(1), write(1), SIZES
    functions = loops.depthwise(kernel_h, kernel_w)  # type: ignore[no-untyped-call]
    return KernelPair(*(build(function, *arrays) for function in functions))


def _convolution(forward: Kernel, backward: Kernel, *scratch: int) -> KernelPair:
    """Return the two compiled; `scratch` has the number of scratch arrays of each."""
    several = [types.UniTuple(write(1), count) for count in (*scratch, 3)]  # type: ignore[no-untyped-call]
    return KernelPair(
        build(forward, *(read(1),) * 3, write(1), write(1, CORNER), write(1), several[0]),
        build(backward, *(read(1),) * 3, read(1, CORNER), read(1), several[2], several[1]),
    )


class CompiledPlanes(Planes):
    """Max-pooling by planes, with a loop for each pass of a training step."""

    __slots__ = ()

    def largest(self, planes: Array, h: Array, winner: Array | None) -> None:
        """See `Planes.largest`."""
        if winner is None or winner.dtype != np.uint8:
            return super().largest(planes, h, winner)
        return record_launch(loop("planes_largest"), planes, h, winner)

    def bias_relu(self, bias: Array | None, h: Array, winner: Array | None) -> None:
        """See `Planes.bias_relu`."""
        if bias is None or winner is None or winner.dtype != np.uint8:
            return super().bias_relu(bias, h, winner)
        return record_launch(loop("planes_bias_relu"), bias, h, winner)

    def gradient(self, grad: Array, winner: Array, out: Array) -> None:
        """See `Planes.gradient`."""
        if winner.dtype != np.uint8:
            return super().gradient(grad, winner, out)
        return record_launch(loop("planes_grad"), grad, winner, out)


class NumbaKernels(PlainKernels):
    """The kernels that numba compiles, for NumPy's float32 arrays; the others are plain."""

    convolves = True

    # ---- convolutions; see the functions above

    winograd, direct = staticmethod(winograd), staticmethod(direct)
    depthwise = staticmethod(depthwise)
    has_products, sizes = staticmethod(conv3x3.has_products), staticmethod(conv3x3.sizes)

    planes = CompiledPlanes

    # ---- optimizers

    def adam(self, block: Any, *numbers: Any) -> None:
        record_launch(loop("adam"), block.data, block.grad, *block.slots, *numbers[:-1])

    # ---- activations and dense layers

    def _own(self, rows: Array) -> Array:
        return rows.copy()

    def activate_grad(
        self, xp: Any, form: Activation, grad: Array, saved: Any, number: float
    ) -> Array:
        if form is not Activation.RELU:
            return super().activate_grad(xp, form, grad, saved, number)
        grad, result = xp.ascontiguousarray(grad), xp.empty(saved.shape, saved.dtype)
        record_launch(loop("relu_grad"), *map(flattened, (grad, saved, result)))
        return result

    def bias_activate(
        self, xp: Any, y: Array, bias: Array | None, form: Activation, keep: bool
    ) -> tuple[Array, Array | None]:
        shift = xp.zeros(y.shape[1:], y.dtype) if bias is None else xp.ascontiguousarray(bias)
        if form is Activation.RELU:
            record_launch(loop("bias_relu"), y, shift)
            return y, y
        slope = xp.empty(y.shape, y.dtype)
        record_launch(loop(f"bias_{form}"), y, shift, slope)
        return y, slope

    def bias_activate_grad(
        self, xp: Any, grad: Array, saved: Array, form: Activation, to_bias: Array | None
    ) -> Array:
        result: Array = xp.empty(grad.shape, grad.dtype)
        sums = xp.empty(grad.shape[1:], grad.dtype) if to_bias is None else to_bias
        name = "relu_grad_bias" if form is Activation.RELU else "slope_grad_bias"
        record_launch(loop(name), xp.ascontiguousarray(grad), saved, result, sums)
        return result

    # ---- recurrent layers

    def lstm_step(self, *arrays: Array) -> None:
        record_launch(loop("lstm_step"), *arrays)

    def lstm_step_grad(self, *arrays: Array) -> None:
        record_launch(loop("lstm_step_grad"), *arrays)

    # ---- rows

    def softmax_loss(
        self, xp: Any, logits: Array, labels: Array, *settings: Any
    ) -> tuple[Array, Residuals]:
        """See `PlainKernels.softmax_loss`; the gradients are saved, unless it is computed there."""
        if settings != (None, 0):
            return super().softmax_loss(xp, logits, labels, *settings)
        logits, labels = xp.ascontiguousarray(logits), xp.ascontiguousarray(labels)
        losses, gradients = (
            xp.empty((len(logits),), logits.dtype),
            xp.empty(logits.shape, logits.dtype),
        )
        labels = labels if labels.dtype == "int64" else labels.astype("int64")
        record_launch(loop("softmax_loss"), logits, labels, losses, gradients)
        return losses, (gradients,)

    def softmax_loss_grad(self, xp: Any, grad: Array, saved: Residuals, *settings: Any) -> Array:
        if settings != (None, 0):
            return super().softmax_loss_grad(xp, grad, saved, *settings)
        return xp.multiply(saved[0], xp.reshape(grad, (grad.size, 1)))

    def layer_norm(
        self, xp: Any, x: Array, eps: float, scale: Array, shift: Array | None = None
    ) -> tuple[Array, Residuals]:
        n = scale.size
        rows = xp.ascontiguousarray(xp.reshape(x, (x.size // n, n)))
        scale, shifts = (
            xp.zeros((n,), x.dtype) if item is None else xp.ascontiguousarray(item.reshape(n))
            for item in (scale, shift)
        )
        y, normal = (xp.empty(rows.shape, x.dtype) for _ in range(2))
        inverse = xp.empty((len(rows),), x.dtype)
        numbers = scale, shifts, y, normal, inverse, eps, shift is not None
        record_launch(loop("layer_norm"), rows, *numbers)
        return y, (normal, inverse, scale)

    def layer_norm_grad(
        self, xp: Any, grad: Array, saved: Residuals, needs: tuple[bool, ...], *targets: Array
    ) -> Array | None:
        normal, inverse, scale = saved
        grad = xp.ascontiguousarray(xp.reshape(grad, normal.shape))
        sums = [xp.empty(scale.shape, grad.dtype) for _ in range(2)]
        for i, target in enumerate(targets):
            if needs[i + 1]:
                sums[i] = target.reshape(scale.shape)
        to_x = xp.empty(grad.shape, grad.dtype)
        last = to_x, *sums, len(targets) == 2
        record_launch(loop("layer_norm_grad"), grad, normal, inverse, scale, *last)
        return to_x if needs[0] else None

    # ---- batch normalization: x is read three times, for the mean, the squares, and the result

    def channel_rows(self, xp: Any, x: Array, channels: int) -> Array:
        return xp.ascontiguousarray(widened(xp, x, channels, WIDE))

    def batch_moments(self, xp: Any, x: Array, channels: int) -> tuple[Array, Array, Array, Array]:
        """See `PlainKernels.batch_moments`; x itself is saved."""
        kept = self.channel_rows(xp, x, channels)
        mean, variance = (xp.empty((channels,), x.dtype) for _ in range(2))
        self._sum_blocks(xp, kept, lambda part, _: (kept[part],), mean)
        mean /= max(x.size // channels, 1)
        (means,) = repeated_in(xp, kept, mean)
        _sum_products(xp, kept, means, kept, means, variance)
        variance /= max(x.size // channels, 1)
        return kept, mean.copy(), variance, mean

    def normalize(self, xp: Any, moments: Residuals, scale: Array, shift: Array) -> Array:
        kept, offset, variance, eps, *_ = moments
        factor, y = inverse_root(xp, variance, eps) * scale, xp.empty(kept.shape, kept.dtype)
        record_launch(loop("norm"), kept, *repeated_in(xp, kept, offset, factor, shift), y)
        return y

    def norm_sums(
        self, xp: Any, grad: Array, moments: Residuals, targets: tuple[Array, Array]
    ) -> None:
        (kept, offset, variance, eps, *_), (to_shift, to_scale) = moments, targets
        (offsets,) = repeated_in(xp, kept, offset)
        _sum_products(xp, kept, offsets, grad, xp.zeros_like(offsets), to_scale)
        self._sum_blocks(xp, grad, lambda part, _: (grad[part],), to_shift)
        xp.multiply(to_scale, inverse_root(xp, variance, eps), out=to_scale)

    def norm_grad(
        self,
        xp: Any,
        grad: Array,
        moments: Residuals,
        scale: Array,
        sums: tuple[Array, Array],
        count: float,
    ) -> Array:
        kept, offset, variance, eps, *_ = moments
        inverse, to_x = inverse_root(xp, variance, eps), xp.empty(kept.shape, kept.dtype)
        center, slope = (item / count for item in sums)
        numbers = repeated_in(xp, kept, offset, slope * inverse, center, scale * inverse)
        record_launch(loop("norm_grad"), kept, numbers[0], grad, *numbers[1:], to_x)
        return to_x


def _sum_products(xp: Any, x: Array, means: Array, grad: Array, less: Array, out: Array) -> None:
    """Write each channel's sum of (x - means) * (grad - less)."""
    parts = xp.empty((1, x.shape[1]), x.dtype)
    record_launch(loop("norm_products"), x, means, grad, less, parts[0])
    fold(xp, parts, out)
