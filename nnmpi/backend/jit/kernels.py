"""Numba's kernels for NumPy's float32 arrays, as operations call them (see `backend.kernels`).

A loop is compiled, or read from disk, at its first call. Its arrays are float32, unless another
dtype stands here, and C-contiguous. It returns nothing: it writes to arrays, which must not overlap
the others.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import types

from nnmpi.backend.array import Array, Residuals, namespace
from nnmpi.backend.jit import conv3x3, loops
from nnmpi.backend.jit.build import build, read, write
from nnmpi.backend.jit.rows import RowLoop
from nnmpi.backend.plain import (
    fold,
    group_means,
    inverse_root,
    repeated_in,
    wide_for,
    widened,
)
from nnmpi.backend.precision import FLOAT32
from nnmpi.backend.printed import PrintedKernels, itself
from nnmpi.backend.recording import call
from nnmpi.backend.sums import WIDE, row_blocks, row_sum
from nnmpi.backend.trace import VECTOR, kinds_of

Kernel: TypeAlias = Callable[..., None]
CORNER = types.uint8  # the largest pixel of a window, 0 to 3
SIZES = types.UniTuple(types.int64, 12)  # type: ignore[no-untyped-call]

LOOPS = {
    "lstm_step": (write(2), read(2), read(1), read(2), write(2), write(2)),
    "lstm_step_grad": (read(2), write(2), *(read(2),) * 4, write(2)),
}


# Elements of a block of images; and of a batch that is not left to NumPy, which takes 0.4 of the
# time of loops on 1,000 elements, 0.9 on 32,000, 1.5 on a million.
ELEMENTS, FEW = 2**18, 2**16


FEWEST = 2**13  # elements for which a loop is looked for, see `found`


class KernelPair(NamedTuple):
    """A kernel and the one of its gradients."""

    forward: Kernel
    backward: Kernel


@cache
def loop(name: str) -> Kernel:
    """Return a function of `loops`."""
    return build(getattr(loops, name), *LOOPS[name])


@cache
def winograd(z: conv3x3.Sizes, pooled: bool) -> KernelPair:
    """Return the 3 x 3 convolution and its gradients for images and channels of these sizes.

    forward: (x, weight, bias, y: out, corner: out, u: out, scratch: tuple). `corner` is like y if
    pooled, and empty otherwise; u, of 16 c o elements, is for backward. backward: (grad, x, corner,
    u, to: gradients of x, weight and bias, empty if not needed, scratch). All arrays are flat,
    `corner` of uint8; `z.scratch` gives the lengths of the scratch arrays.

    Args:
        pooled: followed by ReLU and max-pooling over 2 x 2 pixels.
    """
    to, forward_scratch, backward_scratch = (
        types.UniTuple(write(1), count)  # type: ignore[no-untyped-call]
        for count in (3, 3, 7)
    )
    forward, backward = conv3x3.winograd(z, pooled)
    outs = write(1), write(1, CORNER), write(1)
    return KernelPair(
        build(forward, *(read(1),) * 3, *outs, forward_scratch),
        build(backward, *(read(1),) * 2, read(1, CORNER), read(1), to, backward_scratch),
    )


@cache
def depthwise(kernel_h: int, kernel_w: int) -> KernelPair:
    """Return the depthwise convolution, and the sum of products that is its weight's gradient.

    Both: (images, the other operand, out, border: an image with zeros around it, sizes).
    """
    arrays = read(1), read(1), write(1), write(1), SIZES
    functions = loops.depthwise(kernel_h, kernel_w)  # type: ignore[no-untyped-call]
    return KernelPair(*(build(function, *arrays) for function in functions))


class NumbaKernels(PrintedKernels):
    """The kernels that numba compiles, for NumPy's float32 arrays; the others are plain."""

    convolves = True

    # ---- convolutions; see the functions above

    winograd = staticmethod(winograd)
    depthwise = staticmethod(depthwise)
    has_products, sizes = staticmethod(conv3x3.has_products), staticmethod(conv3x3.sizes)

    # ---- row formulas

    def kinds_of(self, operands: tuple[Any, ...], sums: Sequence[Array]) -> tuple[Any, ...]:
        """See `PrintedKernels`."""
        kinds = kinds_of(operands, sampled=True) if operands[0].size else ()
        if not kinds:
            return ()
        vectors = (x for x, kind in zip(operands, kinds, strict=True) if kind == VECTOR)
        return kinds, operands[0].ndim == 3 and any(x.ndim > 1 for x in (*vectors, *sums))

    printed = RowLoop

    def found(self, formula: Any, operands: Any, *settings: Any) -> Any:
        """See `PrintedKernels`; few elements are left to NumPy, by formulas of the same bits.

        To find a loop takes 7 us. If results differed in the last bit, bits would depend on the
        batch (see `trace.rounds_alike`).
        """
        if operands[0].size < FEWEST and getattr(formula, "rounds_alike", False):
            return None
        return super().found(formula, operands, *settings)

    # ---- optimizers

    def update(self, loop: Any, arrays: Sequence[Array]) -> Callable[..., None]:
        rows = [x.reshape(1, -1) for x in arrays]
        reads = [x for i, x in enumerate(rows) if i not in loop.written]
        writes = [rows[i] for i in loop.written]

        def run(numbers: Sequence[Any], guard: Any) -> None:
            compiled = [x for x in numbers if type(x) is not bool]  # bools chose the kernel
            call(loop.kernel, (*reads, *compiled), writes)

        return run

    # ---- dense layers

    def add_bias(self, y: Array, bias: Array) -> None:
        # below 2**16 elements NumPy's call costs less: 1.2 us for 4.7 on 32 x 16, even on 128 x 512
        if y.ndim == 2 and bias.dtype == FLOAT32 and y.size >= 2**16:
            self.rows(_plus, y, bias, reuse=True)
        else:
            super().add_bias(y, bias)

    # ---- recurrent layers

    def lstm_step(self, *arrays: Array) -> None:
        call(loop("lstm_step"), (), arrays)

    def lstm_step_grad(self, *arrays: Array) -> None:
        call(loop("lstm_step_grad"), (), arrays)

    # ---- batch normalization: x is read three times, for the mean, the squares, and the result

    def channel_rows(self, x: Array, channels: int) -> Array:
        return np.ascontiguousarray(widened(x, channels, WIDE), like=x)

    def batch_moments(self, x: Array, channels: int) -> tuple[Array, Array, Array, Array]:
        """See `PlainKernels.batch_moments`; x itself is saved."""
        kept = self.channel_rows(x, channels)
        mean, variance = (np.empty((channels,), x.dtype, like=x) for _ in range(2))
        self._sum_blocks(kept, lambda part, _: (kept[part],), mean)
        mean /= max(x.size // channels, 1)
        (means,) = repeated_in(kept, mean)
        self._sums(_squares, (kept, means), variance)
        variance /= max(x.size // channels, 1)
        return kept, mean.copy(), variance, mean

    def norm_sums(self, grad: Array, moments: Residuals, targets: tuple[Array, Array]) -> None:
        (kept, offset, variance, eps, *_), to_scale = moments, targets[1]
        self._sums(_products, (kept, grad, *repeated_in(kept, offset)), *targets)
        np.multiply(to_scale, inverse_root(variance, eps), out=to_scale)

    # ---- group normalization, by blocks of images: each while it is in the cache

    def group_norm(
        self, x: Array, eps: float, count: int, scale: Array, shift: Array
    ) -> tuple[Array, Residuals]:
        """See `PlainKernels.group_norm`; x itself is saved, and the means."""
        xp = namespace(x)
        if x.dtype != FLOAT32 or x.size < FEW:
            return super().group_norm(x, eps, count, scale, shift)
        shape, images = (len(x), scale.size), _images(x, scale.size)
        means, inverse, sums = (xp.empty(shape, FLOAT32) for _ in range(3))
        y, pixels = xp.empty(images.shape, FLOAT32), x[0].size // scale.size
        for part in row_blocks(images, ELEMENTS):
            image, each = images[part], sums[part]
            self._image_sums(itself, (image,), each)
            means[part] = group_means(each, pixels, count)
            self._image_sums(_squares, (image, wide_for(means[part], image)), each)
            inverse[part] = inverse_root(group_means(each, pixels, count), eps)
            numbers = means[part], inverse[part] * scale, np.broadcast_to(shift, each.shape)
            self.rows(_scale_into, y[part], image, *(wide_for(item, image) for item in numbers))
        return y, (images, inverse, scale, pixels, count, means)

    def group_norm_grad(
        self, grad: Array, saved: Residuals, needs: tuple[bool, ...], *targets: Array
    ) -> Array | None:
        """See `PlainKernels.group_norm_grad`."""
        xp = namespace(grad)
        if grad.dtype != FLOAT32 or grad.size < FEW:
            return super().group_norm_grad(grad, saved, needs, *targets)
        images, inverse, scale, pixels, count, means = saved
        sums, products = (xp.empty(means.shape, FLOAT32) for _ in range(2))
        given = xp.ascontiguousarray(grad).reshape(images.shape)
        to_x = xp.empty(images.shape, FLOAT32)
        for part in row_blocks(images, ELEMENTS):
            image, steep, both = images[part], inverse[part], (sums[part], products[part])
            self._image_sums(_products, (image, given[part], wide_for(means[part], image)), *both)
            np.multiply(both[1], steep, out=both[1])
            if needs[0]:
                center, slope = (group_means(x * scale, pixels, count) * steep for x in both)
                numbers = means[part], steep * scale, slope * steep, center
                wide = (wide_for(item, image) for item in numbers)
                self.rows(_move_into, to_x[part], given[part], image, *wide)
        for item, target in zip((products, sums), targets, strict=True):
            row_sum(item, out=target)
        return to_x if needs[0] else None

    def _image_sums(self, formula: Any, operands: tuple[Array, ...], *outs: Array) -> None:
        """Write each image's sums of some terms over its pixels, (images, channels)."""
        xp, (count, _, width) = namespace(operands[0]), operands[0].shape
        parts = xp.empty((len(outs), count, width), FLOAT32)
        self.rows(formula, *operands, sums=[*parts])
        for part, out in zip(parts, outs, strict=True):
            each = part.reshape(count, -1, out.shape[1])
            xp.add.reduce(each, axis=1, dtype=np.float64, out=out)

    def _sums(self, formula: Any, operands: tuple[Array, ...], *outs: Array) -> None:
        """Write each channel's sums of some terms.

        As a batch of one image, by `_image_sums`, a batch norm of 1,000 elements took 1.2 times as
        long.
        """
        xp, width = namespace(operands[0]), operands[0].shape[1]
        parts = xp.empty((len(outs), width), FLOAT32)
        self.rows(formula, *operands, sums=[*parts])
        for part, out in zip(parts, outs, strict=True):
            fold(part, out)


def _images(x: Array, channels: int) -> Array:
    """Return images (n, ..., channels) with rows of several pixels, (n, rows, width)."""
    return np.ascontiguousarray(x, like=x).reshape(len(x), *widened(x[0], channels, WIDE).shape)


def _plus(y: Array, bias: Array) -> tuple[Array]:
    return (y + bias,)


def _scale_into(y: Array, x: Array, means: Array, factors: Array, shift: Array) -> None:
    np.add((x - means) * factors, shift, out=y)


def _move_into(y: Array, grad: Array, x: Array, *numbers: Array) -> None:
    means, factors, slope, center = numbers
    np.subtract(grad * factors, (x - means) * slope + center, out=y)


def _squares(x: Array, means: Array) -> tuple[Array]:
    away = x - means
    return (away * away,)


def _products(x: Array, grad: Array, means: Array) -> tuple[Array, ...]:
    return grad, (x - means) * grad
