"""A 3 x 3 convolution of images with few channels, then bias, ReLU and 2 x 2 max-pooling: no products of matrices.

The four outputs of a pooling window see 4 x 4 pixels of the images with a border of zeros. For each row of the kernel
two rows of these pixels are kept as numbers, and its three elements taken for many outputs at a time:

    p0  p1  p2  p3           output 0 is the sum of p0 .. p2 times the row, 1 of p1 .. p3,
    q0  q1  q2  q3           2 of q0 .. q2, 3 of q1 .. q3

All arrays are flat, and the sizes constants of each kernel: see `winograd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.jit.build import inlined
from nnmpi.backend.jit.winograd import DEAD, ZERO, images_in, largest_of, winner_of


@inlined
def _add_row(patch: Any, below: Any, c: Any, weight: Any, s: Any, o: Any, sums: Any) -> None:
    """Add one channel's and one kernel row's share to the four outputs of a window; s from element to element."""
    p0, p1, p2, p3 = patch[0], patch[c], patch[2 * c], patch[3 * c]
    q0, q1, q2, q3 = below[0], below[c], below[2 * c], below[3 * c]
    for i in range(o):
        a, b, d = weight[i], weight[i + s], weight[i + 2 * s]
        sums[i] += p0 * a + p1 * b + p2 * d
        sums[i + o] += p1 * a + p2 * b + p3 * d
        sums[i + 2 * o] += q0 * a + q1 * b + q2 * d
        sums[i + 3 * o] += q1 * a + q2 * b + q3 * d


@inlined
def _add_products(patch: Any, below: Any, c: Any, above: Any, place: Any, s: Any, o: Any, to_weight: Any) -> None:
    """Add one window's share, of one channel, to the gradient of a row of the kernel."""
    p0, p1, p2, p3 = patch[0], patch[c], patch[2 * c], patch[3 * c]
    q0, q1, q2, q3 = below[0], below[c], below[2 * c], below[3 * c]
    for i in range(o):
        y = winner_of(above[i], np.int32(place[i]))
        to_weight[i] += p0 * y[0] + p1 * y[1] + q0 * y[2] + q1 * y[3]
        to_weight[i + s] += p1 * y[0] + p2 * y[1] + q1 * y[2] + q2 * y[3]
        to_weight[i + 2 * s] += p2 * y[0] + p3 * y[1] + q2 * y[2] + q3 * y[3]


def forward(h: int, w: int, c: int, o: int) -> Callable[..., None]:
    """Return the kernel of the pooled convolution; its arguments are in `kernels.direct`.

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
                        for k in range(3):
                            patch = border[(2 * r + k) * step + 2 * t * c + channel :]
                            _add_row(patch, patch[step:], c, weight[(3 * k * c + channel) * o :], c * o, o, sums)
                    at = ((b * (h // 2) + r) * (w // 2) + t) * o
                    out, place = y[at:], corner[at:]
                    for i in range(o):
                        out[i], place[i] = largest_of((sums[i], sums[i + o], sums[i + 2 * o], sums[i + 3 * o]), bias[i])
                    sums[:] = ZERO

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
                        for k in range(3):
                            patch, row = border[(2 * r + k) * step + 2 * t * c + channel :], 3 * k * c + channel
                            _add_products(patch, patch[step:], c, above, place, c * o, o, part[row * o :])
                    for i in range(o):
                        part_bias[i] += above[i] if place[i] < DEAD else ZERO
            for i in range(9 * c * o):
                to_weight[i] += part[i]
            for i in range(o):
                to_bias[i] += part_bias[i]

    return direct_grad
