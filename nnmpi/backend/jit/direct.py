"""A 3 x 3 convolution of images with few channels, then bias, ReLU and 2 x 2 max-pooling: no products of matrices.

The four outputs of a pooling window see 4 x 4 pixels of the images with a border of zeros. These pixels of one channel
are kept as 16 numbers, and the nine kernel elements are taken for many outputs at a time:

    p0  p1  p2  p3
    p4  p5  p6  p7           output 0 is the sum of the nine top left pixels times the kernel,
    p8  p9  p10 p11          1 of the top right, 2 of the bottom left, 3 of the bottom right ones
    p12 p13 p14 p15

All arrays are flat, and the sizes constants of each kernel: see `winograd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.jit.build import inlined
from nnmpi.backend.jit.winograd import DEAD, ZERO, images_in


@inlined
def _add_channel(patch: Any, step: Any, c: Any, weight: Any, o: Any, sums: Any) -> None:
    """Add one channel's share to the four outputs of a window; `step` elements from row to row of the patch."""
    s = c * o  # from one element of the kernel to the next
    p0, p1, p2, p3 = patch[0], patch[c], patch[2 * c], patch[3 * c]
    p4, p5, p6, p7 = patch[step], patch[step + c], patch[step + 2 * c], patch[step + 3 * c]
    below = patch[2 * step :]
    p8, p9, p10, p11 = below[0], below[c], below[2 * c], below[3 * c]
    p12, p13, p14, p15 = below[step], below[step + c], below[step + 2 * c], below[step + 3 * c]
    for i in range(o):
        a, b, d = weight[i], weight[i + s], weight[i + 2 * s]
        y0, y1 = sums[i] + p0 * a + p1 * b + p2 * d, sums[i + o] + p1 * a + p2 * b + p3 * d
        y2, y3 = sums[i + 2 * o] + p4 * a + p5 * b + p6 * d, sums[i + 3 * o] + p5 * a + p6 * b + p7 * d
        a, b, d = weight[i + 3 * s], weight[i + 4 * s], weight[i + 5 * s]
        y0, y1 = y0 + p4 * a + p5 * b + p6 * d, y1 + p5 * a + p6 * b + p7 * d
        y2, y3 = y2 + p8 * a + p9 * b + p10 * d, y3 + p9 * a + p10 * b + p11 * d
        a, b, d = weight[i + 6 * s], weight[i + 7 * s], weight[i + 8 * s]
        sums[i], sums[i + o] = y0 + p8 * a + p9 * b + p10 * d, y1 + p9 * a + p10 * b + p11 * d
        sums[i + 2 * o], sums[i + 3 * o] = y2 + p12 * a + p13 * b + p14 * d, y3 + p13 * a + p14 * b + p15 * d


@inlined
def _choose(sums: Any, bias: Any, out: Any, place: Any, o: Any) -> None:
    """out = ReLU(bias + the largest of the four sums), place = which that was, or DEAD; sums become 0."""
    for i in range(o):
        # A NaN stays: one pixel's spreads to some window's first output, which no comparison replaces.
        top, which, value = sums[i], np.int32(0), sums[i + o]
        which, top = np.int32(1) if value > top else which, value if value > top else top
        value = sums[i + 2 * o]
        which, top = np.int32(2) if value > top else which, value if value > top else top
        value = sums[i + 3 * o]
        which, top = np.int32(3) if value > top else which, (value if value > top else top) + bias[i]
        out[i] = ZERO if top <= ZERO else top
        place[i] = DEAD if top <= ZERO else which
    for i in range(4 * o):
        sums[i] = ZERO


@inlined
def _add_products(patch: Any, step: Any, c: Any, above: Any, place: Any, o: Any, to_weight: Any) -> None:
    """Add one window's share, of one channel, to the kernel's gradient."""
    s = c * o
    p0, p1, p2, p3 = patch[0], patch[c], patch[2 * c], patch[3 * c]
    p4, p5, p6, p7 = patch[step], patch[step + c], patch[step + 2 * c], patch[step + 3 * c]
    below = patch[2 * step :]
    p8, p9, p10, p11 = below[0], below[c], below[2 * c], below[3 * c]
    p12, p13, p14, p15 = below[step], below[step + c], below[step + 2 * c], below[step + 3 * c]
    for i in range(o):
        g, which = above[i], np.int32(place[i])
        y0, y1 = g if which == 0 else ZERO, g if which == 1 else ZERO
        y2, y3 = g if which == 2 else ZERO, g if which == 3 else ZERO
        to_weight[i] += p0 * y0 + p1 * y1 + p4 * y2 + p5 * y3
        to_weight[i + s] += p1 * y0 + p2 * y1 + p5 * y2 + p6 * y3
        to_weight[i + 2 * s] += p2 * y0 + p3 * y1 + p6 * y2 + p7 * y3
        to_weight[i + 3 * s] += p4 * y0 + p5 * y1 + p8 * y2 + p9 * y3
        to_weight[i + 4 * s] += p5 * y0 + p6 * y1 + p9 * y2 + p10 * y3
        to_weight[i + 5 * s] += p6 * y0 + p7 * y1 + p10 * y2 + p11 * y3
        to_weight[i + 6 * s] += p8 * y0 + p9 * y1 + p12 * y2 + p13 * y3
        to_weight[i + 7 * s] += p9 * y0 + p10 * y1 + p13 * y2 + p14 * y3
        to_weight[i + 8 * s] += p10 * y0 + p11 * y1 + p14 * y2 + p15 * y3


def forward(h: int, w: int, c: int, o: int) -> Callable[..., None]:
    """Return the kernel of the pooled convolution; its arguments are in `table.CompiledFunctions.direct`.

    Args:
        h, w: the images' height and width, even.
        c, o: channels of the input and the output.
    """

    def direct(x: Array, weight: Array, bias: Array, y: Array, corner: Array, sums: Array, border: Array) -> None:
        step = (w + 2) * c
        border[:] = ZERO
        sums[:] = ZERO
        for b in range(x.size // (h * w * c)):
            images_in(x, border, b, 1, h, w, c)
            for r in range(h // 2):
                for t in range(w // 2):
                    for channel in range(c):
                        patch = border[2 * r * step + 2 * t * c + channel :]
                        _add_channel(patch, step, c, weight[channel * o :], o, sums)
                    at = ((b * (h // 2) + r) * (w // 2) + t) * o
                    _choose(sums, bias, y[at:], corner[at:], o)

    return direct


def backward(h: int, w: int, c: int, o: int) -> Callable[..., None]:
    """Return the kernel of the gradients of weight and bias; the arguments are those of `forward`.

    Args:
        h, w: the images' height and width, even.
        c, o: channels of the input and the output.
    """

    def direct_grad(
        grad: Array, x: Array, corner: Array, to_weight: Array, to_bias: Array, part: Array, border: Array
    ) -> None:
        step = (w + 2) * c
        border[:] = ZERO
        to_weight[:] = ZERO
        to_bias[:] = ZERO
        for b in range(x.size // (h * w * c)):
            images_in(x, border, b, 1, h, w, c)
            part[:] = ZERO  # one image's sum; a single sum over all windows would round ten times worse
            part_bias = part[9 * c * o :]
            for r in range(h // 2):
                for t in range(w // 2):
                    at = ((b * (h // 2) + r) * (w // 2) + t) * o
                    above, place = grad[at:], corner[at:]
                    for channel in range(c):
                        patch = border[2 * r * step + 2 * t * c + channel :]
                        _add_products(patch, step, c, above, place, o, part[channel * o :])
                    for i in range(o):
                        part_bias[i] += above[i] if place[i] < DEAD else ZERO
            for i in range(9 * c * o):
                to_weight[i] += part[i]
            for i in range(o):
                to_bias[i] += part_bias[i]

    return direct_grad
