"""Numba's kernels for NumPy's float32 arrays, as operations call them (see `backend.kernels`).

A kernel is compiled, or read from disk, at its first call. Arrays are float32, unless another dtype
stands here, and C-contiguous. Kernels return nothing: they write to arrays, which must not overlap
the others.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import float64, types

from nnmpi.backend.array import Array, Residuals
from nnmpi.backend.jit import conv3x3, loops
from nnmpi.backend.jit.build import build, read, write
from nnmpi.backend.jit.conv3x3 import has_products as has_products
from nnmpi.backend.jit.conv3x3 import sizes as sizes
from nnmpi.backend.recording import record_launch

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
    "relu_grad": (read(1), read(1), write(1)),
    "norm": (read(2), *(read(1),) * 3, write(2)),
    "norm_products": (read(2), read(1), read(2), read(1), write(1)),
    "norm_grad": (read(2), read(1), read(2), *(read(1),) * 3, write(2)),
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


def _record_loop(name: str, *args: Any) -> None:
    record_launch(loop(name), *args)


# Adam's update of a block, see `optim.adaptive`; a step without its product, see `ops.lstm`; the
# others see `ops.activation` and `ops.norm`.
adam, lstm_step, lstm_step_grad, relu_grad, norm, norm_products, norm_grad = (
    partial(_record_loop, name)
    for name in (
        "adam",
        "lstm_step",
        "lstm_step_grad",
        "relu_grad",
        "norm",
        "norm_products",
        "norm_grad",
    )
)


def bias_relu(xp: Any, y: Array, bias: Array | None) -> None:
    """y = max(y + bias, 0), in place."""
    record_launch(loop("bias_relu"), y, _shift(xp, y, bias))


def _bias_slope(name: str, xp: Any, y: Array, bias: Array | None, slope: Array) -> None:
    """y = the activation of y + bias, in place; write its derivative."""
    record_launch(loop(name), y, _shift(xp, y, bias), slope)


bias_gelu, bias_gelu_tanh, bias_silu = (
    partial(_bias_slope, name) for name in ("bias_gelu", "bias_gelu_tanh", "bias_silu")
)


def _shift(xp: Any, y: Array, bias: Array | None) -> Any:
    return xp.zeros((y.shape[1],), y.dtype) if bias is None else xp.ascontiguousarray(bias)


def _grad_bias(name: str, xp: Any, grad: Array, kept: Array, to_bias: Array | None) -> Array:
    """Return the gradient of an activation's input, and write its sum over the rows."""
    result = xp.empty(grad.shape, grad.dtype)
    sums = xp.empty(grad.shape[1:], grad.dtype) if to_bias is None else to_bias
    record_launch(loop(name), xp.ascontiguousarray(grad), kept, result, sums)
    return result


relu_grad_bias = partial(_grad_bias, "relu_grad_bias")
slope_grad_bias = partial(_grad_bias, "slope_grad_bias")


def softmax_loss(
    xp: Any, logits: Array, labels: Array, ignore_index: int | None, smoothing: float
) -> tuple[Array, Residuals] | None:
    """Return losses and their gradients; None if labels are ignored or smoothed."""
    if ignore_index is not None or smoothing or labels.dtype != "int64":
        return None
    logits, labels = xp.ascontiguousarray(logits), xp.ascontiguousarray(labels)
    losses, gradients = xp.empty((len(logits),), logits.dtype), xp.empty(logits.shape, logits.dtype)
    record_launch(loop("softmax_loss"), logits, labels, losses, gradients)
    return losses, (gradients,)


def softmax_loss_grad(
    xp: Any, grad: Array, residuals: Residuals, ignore_index: int | None, smoothing: float
) -> Array:
    """Return the gradient of the logits for the losses' gradient, (1,) or (rows,)."""
    return xp.multiply(residuals[0], xp.reshape(grad, (grad.size, 1)))
