"""Kernels that are plain loops, each few passes over the data.

Over rows: around the products of dense layers, layer normalization, GELU, attention, LSTM. Max-pooling over 2 x 2
pixels, the windows side by side: the first of equal elements wins, and a NaN wins over numbers, so that it is seen.
Optimizers' updates in one pass over a block; arguments are those of `backend.kernels.base.UpdateKernels`.
"""

import math

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.jit.scalar import empty_into, exp, largest, log, product, tanh

ZERO = np.float32(0)
ONE = np.float32(1)
ROWS = 64  # that are added up before they are added to the rest: one long sum would round worse


def bias_relu(y: Array, bias: Array) -> None:
    """y = max(y + bias, 0), in place."""
    for r in range(y.shape[0]):
        row = y[r]
        for i in range(row.size):
            value = row[i] + bias[i]
            row[i] = ZERO if value < ZERO else value  # NaN stays


def relu_grad_bias(grad: Array, y: Array, out: Array, to_bias: Array) -> None:
    """out = grad where y > 0, else 0; to_bias = its sum over the rows."""
    to_bias[:] = ZERO
    part = np.zeros(to_bias.size, np.float32)
    for r in range(grad.shape[0]):
        above, below, row = grad[r], y[r], out[r]
        for i in range(row.size):
            value = above[i] if below[i] > ZERO else ZERO
            row[i] = value
            part[i] += value
        if r % ROWS == ROWS - 1 or r == grad.shape[0] - 1:
            empty_into(part, to_bias)


def slope_grad_bias(grad: Array, slope: Array, out: Array, to_bias: Array) -> None:
    """out = grad * slope; to_bias = its sum over the rows."""
    to_bias[:] = ZERO
    part = np.zeros(to_bias.size, np.float32)
    for r in range(grad.shape[0]):
        above, steep, row = grad[r], slope[r], out[r]
        for i in range(row.size):
            value = above[i] * steep[i]
            row[i] = value
            part[i] += value
        if r % ROWS == ROWS - 1 or r == grad.shape[0] - 1:
            empty_into(part, to_bias)


def softmax_loss(logits: Array, labels: Array, losses: Array, gradient: Array) -> None:
    """losses[r] = -log softmax(logits[r])[labels[r]]; gradient[r] = softmax(logits[r]), less 1 at the label."""
    for r in range(logits.shape[0]):
        row, result, label = logits[r], gradient[r], labels[r]
        top, chosen, total = largest(row), row[label], ZERO  # before the gradient takes the logits' place
        for i in range(row.size):
            value = exp(row[i] - top)
            result[i] = value
            total += value
        losses[r] = log(total) - (chosen - top)
        share = ONE / total
        for i in range(row.size):
            result[i] *= share
        result[label] -= ONE


# Layer normalization, row by row.


MOST, NAN = np.float32(np.inf), np.float32(np.nan)


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


# GELU in the form of GPT-2, in one pass: x (1 + tanh(u)) / 2 is x times the sigmoid of 2 u. Far out the sigmoid is
# exactly 0 or 1, and the slope is, too: x s (1 - s) is multiplied out first, and then 2 u', which is held finite. At
# -infinity both are NaN, and the slope also at infinity, as in plain code.


MINUS_TWO_C = np.float32(-2 * np.sqrt(2 / np.pi))
CUBIC = np.float32(0.044715)
THREE = np.float32(3 * 0.044715)
STEEPEST = np.float32(200)  # 1 + THREE x^2 at 38; s (1 - s) is 0 from 11 on


def gelu_tanh(x: Array, y: Array) -> None:
    """y = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). y may be x."""
    for i in range(x.size):
        value = x[i]
        y[i] = value / (ONE + exp(MINUS_TWO_C * (value + CUBIC * value * value * value)))


def bias_gelu_tanh_slope(x: Array, bias: Array, slope: Array) -> None:
    """x += bias; then slope is the derivative at x, and x becomes the value, in place."""
    for r in range(x.shape[0]):
        row, steep = x[r], slope[r]
        for i in range(row.size):
            row[i] += bias[i]
        for i in range(row.size):
            value = row[i]
            square = value * value
            s = ONE / (ONE + exp(MINUS_TWO_C * (value + CUBIC * value * square)))
            result = product(value, s)
            u = ONE + THREE * square
            u = STEEPEST if u > STEEPEST else u
            steep[i] = s - product(result, ONE - s) * MINUS_TWO_C * u
            row[i] = result


def gelu_tanh_grad(x: Array, grad: Array, out: Array) -> None:
    """out = grad (s + x s (1 - s) 2 u'), s = sigmoid(2 u). out may be grad."""
    for i in range(x.size):
        value = x[i]
        square = value * value
        s = ONE / (ONE + exp(MINUS_TWO_C * (value + CUBIC * value * square)))
        u = ONE + THREE * square
        u = STEEPEST if u > STEEPEST else u
        out[i] = grad[i] * (s - product(product(value, s), ONE - s) * MINUS_TWO_C * u)


# Softmax of attention's scores, and its derivative, on the bands of queries that `backend.kernels.attention` has.
# Arrays are (batch, heads, keys, queries), a row per key; loops run along the queries.


def powers(p: Array, top: Array, total: Array, before: Array, has_before: bool, corner: int) -> None:
    """Turn scores into e^(score - top), in place, top being the largest of a query's scores and of those before."""
    count = p.shape[3]
    most = np.empty(count, np.float32)
    sums = np.empty(count, np.float32)
    for b in range(p.shape[0]):
        for h in range(p.shape[1]):
            for i in range(count):
                most[i] = before[b, h, i] if has_before else p[b, h, 0, i]  # every query sees the first key
                sums[i] = ZERO
            for k in range(p.shape[2]):
                hidden = max(k - corner, 0)
                scores, tops = p[b, h, k, hidden:], most[hidden:]
                for i in range(scores.size):
                    tops[i] = scores[i] if scores[i] > tops[i] else tops[i]
            for k in range(p.shape[2]):
                hidden = max(k - corner, 0)
                p[b, h, k, :hidden] = ZERO
                scores, tops, totals = p[b, h, k, hidden:], most[hidden:], sums[hidden:]
                for i in range(scores.size):
                    value = exp(scores[i] - tops[i])
                    scores[i] = value
                    totals[i] += value
            for i in range(count):
                top[b, h, i] = most[i]
                total[b, h, i] = sums[i]


def score_gradients(d: Array, p: Array, inner: Array) -> None:
    """d = (d - inner) * p."""
    count = d.shape[3]
    less = np.empty(count, np.float32)
    for b in range(d.shape[0]):
        for h in range(d.shape[1]):
            for i in range(count):
                less[i] = inner[b, h, i]
            for k in range(d.shape[2]):
                slopes, own = d[b, h, k], p[b, h, k]
                for i in range(count):
                    slopes[i] = (slopes[i] - less[i]) * own[i]


# A step of long short-term memory beside its product, see `backend.kernels.recurrent`: the gates are i, f, o, g.


def lstm_step(g: Array, product: Array, c: Array, new_c: Array, new_h: Array) -> None:
    """g += product, and becomes the gates; new_c = f c + i g; new_h = o tanh(new_c)."""
    n = c.shape[1]
    for r in range(c.shape[0]):
        gates, more = g[r], product[r]
        sigmoids, candidate = gates[: 3 * n], gates[3 * n :]
        for j in range(sigmoids.size):
            sigmoids[j] = ONE / (ONE + exp(-(sigmoids[j] + more[j])))
        more = more[3 * n :]
        for j in range(candidate.size):
            candidate[j] = tanh(candidate[j] + more[j])
        i, f, o = gates[:n], gates[n : 2 * n], gates[2 * n : 3 * n]
        old, cell, hidden = c[r], new_c[r], new_h[r]
        for j in range(cell.size):
            value = f[j] * old[j] + i[j] * candidate[j]
            cell[j] = value
            hidden[j] = o[j] * tanh(value)


def lstm_step_grad(g: Array, slopes: Array, h: Array, grad: Array, cell: Array, last_c: Array, to_c: Array) -> None:
    """slopes = the gradient of what goes into the gates, given those of h, h + grad, and of c; to_c then goes on."""
    n = cell.shape[1]
    for r in range(cell.shape[0]):
        gates, steep = g[r], slopes[r]
        i, f, o, candidate = gates[:n], gates[n : 2 * n], gates[2 * n : 3 * n], gates[3 * n :]
        to_i, to_f, to_o, to_g = steep[:n], steep[n : 2 * n], steep[2 * n : 3 * n], steep[3 * n :]
        one, other, after, before, total = h[r], grad[r], cell[r], last_c[r], to_c[r]
        for j in range(total.size):
            t, to_h = tanh(after[j]), one[j] + other[j]
            to_cell = total[j] + to_h * o[j] * (ONE - t * t)
            to_o[j] = to_h * t * o[j] * (ONE - o[j])
            to_i[j] = to_cell * candidate[j] * i[j] * (ONE - i[j])
            to_f[j] = to_cell * before[j] * f[j] * (ONE - f[j])
            to_g[j] = to_cell * i[j] * (ONE - candidate[j] * candidate[j])
            total[j] = to_cell * f[j]


def sgd(data: Array, grad: Array, lr: float, decay: float) -> None:
    """data -= lr * (grad + decay * data)."""
    rate, shrink = np.float32(lr), np.float32(decay)
    for i in range(data.size):
        data[i] -= rate * (grad[i] + shrink * data[i])


def sgd_momentum(
    data: Array, grad: Array, momentum: Array, lr: float, keep: float, decay: float, nesterov: bool
) -> None:
    """momentum = keep * momentum + g, g = grad + decay * data; data -= lr * momentum, or what Nesterov's takes."""
    rate, kept, shrink = np.float32(lr), np.float32(keep), np.float32(decay)
    if nesterov:
        for i in range(data.size):
            g = grad[i] + shrink * data[i]
            b = kept * momentum[i] + g
            momentum[i] = b
            data[i] -= rate * (g + kept * b)
        return
    for i in range(data.size):
        b = kept * momentum[i] + (grad[i] + shrink * data[i])
        momentum[i] = b
        data[i] -= rate * b


def adam(
    data: Array,
    grad: Array,
    m: Array,
    v: Array,
    rate: float,
    eps: float,
    beta1: float,
    beta2: float,
    decay: float,
    factor: float,
) -> None:
    """m and v move towards g and its square; data = factor * data - rate * m / (sqrt(v) + eps)."""
    step, small, shrink, kept = np.float32(rate), np.float32(eps), np.float32(decay), np.float32(factor)
    move1, keep2, move2 = np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)
    for i in range(data.size):
        g = grad[i] + shrink * data[i]
        mean = m[i] + (g - m[i]) * move1
        square = keep2 * v[i] + move2 * g * g
        m[i] = mean
        v[i] = square
        data[i] = kept * data[i] - step * mean / (np.float32(math.sqrt(square)) + small)


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
