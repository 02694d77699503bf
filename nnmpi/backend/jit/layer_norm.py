"""Layer normalization, row by row."""

import math

import numpy as np

from nnmpi.backend.array import Array

ZERO = np.float32(0)
ONE = np.float32(1)
MOST, NAN = np.float32(np.inf), np.float32(np.nan)
ROWS = 64  # that are added up before they are added to the rest: one long sum would round worse


def layer_norm(x: Array, scale: Array, shift: Array, eps: float, y: Array, normal: Array, inverse: Array) -> None:
    """normal = (x - mean) * inverse, inverse = 1 / sqrt(variance + eps) per row; y = normal * scale + shift.

    A row whose variance is infinite is NaN.
    """
    count = np.float32(x.shape[1])
    for r in range(x.shape[0]):
        row, middle, result = x[r], normal[r], y[r]
        base = row[0]  # differences from it: a constant row gives exactly 0, and large numbers do not cancel
        total = ZERO
        for i in range(row.size):
            total += row[i] - base
        mean = total / count
        squares = ZERO
        for i in range(row.size):
            difference = row[i] - base - mean
            squares += difference * difference
        variance = squares / count + np.float32(eps)
        factor = np.float32(ONE / math.sqrt(variance)) if variance < MOST else NAN  # 1 / sqrt of infinity would be 0
        inverse[r] = factor
        for i in range(row.size):
            middle[i] = (row[i] - base - mean) * factor
        for i in range(row.size):
            result[i] = middle[i] * scale[i] + shift[i]


def layer_norm_grad(
    grad: Array, normal: Array, inverse: Array, scale: Array, to_x: Array, to_scale: Array, to_shift: Array
) -> None:
    """The gradients of layer_norm; to_scale and to_shift are sums over the rows.

    Args:
        grad: (rows, n), the gradient of the result.
        normal: (rows, n), the rows before scale and shift, from `layer_norm`.
        inverse: (rows,), 1 / the standard deviation, from `layer_norm`.
        scale: (n,).
        to_x: (rows, n), which is written.
        to_scale, to_shift: (n,), which are written.
    """
    share = ONE / np.float32(grad.shape[1])
    to_scale[:] = ZERO
    to_shift[:] = ZERO
    scales, shifts = np.zeros_like(to_scale), np.zeros_like(to_shift)
    for r in range(grad.shape[0]):
        above, middle, result = grad[r], normal[r], to_x[r]
        total = ZERO
        along = ZERO
        for i in range(above.size):
            inner = above[i] * scale[i]
            total += inner
            along += inner * middle[i]
        for i in range(above.size):
            scales[i] += above[i] * middle[i]
        for i in range(above.size):
            shifts[i] += above[i]
        total *= share
        along *= share
        factor = inverse[r]
        for i in range(above.size):
            result[i] = (above[i] * scale[i] - total - middle[i] * along) * factor
        if r % ROWS == ROWS - 1 or r == grad.shape[0] - 1:
            to_scale += scales
            to_shift += shifts
            scales[:] = ZERO
            shifts[:] = ZERO
