"""Kernels that are plain loops, each few passes over the data.

They win where steps are small or many: around the products of dense layers, the loss, a step of LSTM, Adam's update
(without it a step of iris takes 1.13 and one of a small MLP 1.19 times as long; of SGD's, under 1.03).
"""

import math

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.jit.scalar import empty_into, exp, largest, log, tanh

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


# A step of long short-term memory beside its product, see `ops.lstm`: the gates are i, f, o, g.


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
