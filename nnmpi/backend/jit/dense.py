"""Kernels around the matrix products of dense layers: bias and ReLU, softmax and cross-entropy."""

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.jit.scalar import exp, largest, log

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
            for i in range(part.size):
                to_bias[i] += part[i]
                part[i] = ZERO


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
            for i in range(part.size):
                to_bias[i] += part[i]
                part[i] = ZERO


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
