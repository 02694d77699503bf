"""Max-pooling over 2 x 2 pixels, the windows side by side. The first of equal elements wins.

A NaN wins over numbers, so that it is seen.
"""

import numpy as np

from nnmpi.backend.array import Array

ZERO = np.float32(0)


def max_pool2(x: Array, y: Array, corner: Array) -> None:
    """Write the largest of each window, and which of its pixels that was. Odd rows and columns are left out.

    Args:
        x: (n, h, w, c).
        y: out, (n, h // 2, w // 2, c).
        corner: out, like y, uint8: 0 and 1 above, 2 and 3 below.
    """
    c = x.shape[3]
    for b in range(y.shape[0]):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                x0, x1, x2, x3 = (
                    x[b, 2 * i, 2 * j],
                    x[b, 2 * i, 2 * j + 1],
                    x[b, 2 * i + 1, 2 * j],
                    x[b, 2 * i + 1, 2 * j + 1],
                )
                best, place = y[b, i, j], corner[b, i, j]
                for k in range(c):
                    top, which = x0[k], 0
                    if x1[k] > top or x1[k] != x1[k]:
                        top, which = x1[k], 1
                    if x2[k] > top or x2[k] != x2[k]:
                        top, which = x2[k], 2
                    if x3[k] > top or x3[k] != x3[k]:
                        top, which = x3[k], 3
                    best[k] = top
                    place[k] = which


def max_pool2_grad(grad: Array, corner: Array, out: Array) -> None:
    """Write each window's gradient at its winner, and else 0.

    Args:
        grad: (n, h // 2, w // 2, c).
        corner: like grad, as `max_pool2` wrote it.
        out: (n, h, w, c).
    """
    if out.shape[1] % 2 or out.shape[2] % 2:
        out[...] = ZERO
    c = grad.shape[3]
    for b in range(grad.shape[0]):
        for i in range(grad.shape[1]):
            for j in range(grad.shape[2]):
                above, place = grad[b, i, j], corner[b, i, j]
                for a in range(4):
                    row = out[b, 2 * i + a // 2, 2 * j + a % 2]
                    for k in range(c):
                        row[k] = above[k] if place[k] == a else ZERO
