"""Optimizers' updates in one pass over a block: the formulas of nnmpi/optim, where the letters are explained."""

import math

import numpy as np

from nnmpi.backend.array import Array


def sgd(data: Array, grad: Array, lr: float, decay: float) -> None:
    """data -= lr * (grad + decay * data)."""
    rate, shrink = np.float32(lr), np.float32(decay)
    for i in range(data.size):
        data[i] -= rate * (grad[i] + shrink * data[i])


def sgd_momentum(
    data: Array, grad: Array, momentum: Array, lr: float, keep: float, decay: float, nesterov: bool
) -> None:
    """momentum = keep * momentum + g, g = grad + decay * data; data -= lr * momentum, or what Nesterov's takes.

    Args:
        data: the parameters, which are written; any length.
        grad: their gradients, like data.
        momentum: like data; written.
        lr: the learning rate.
        keep: the share of the momentum that stays.
        decay: the weight decay's factor, added to the gradient.
        nesterov: whether data moves by g + keep * momentum instead.
    """
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
    """m and v move towards g and its square; data = factor * data - rate * m / (sqrt(v) + eps).

    g = grad + decay * data. Adam gives factor 1; AdamW gives decay 0 and factor 1 - lr * decay. rate and eps hold the
    corrections of the first updates.

    Args:
        data: the parameters, which are written; any length.
        grad: their gradients, like data.
        m, v: running means of g and of its square, like data; written.
        rate: the learning rate, with the corrections of the first updates.
        eps: added to the root, with the same corrections.
        beta1, beta2: the shares of m and of v that stay.
        decay: the weight decay's factor, added to the gradient.
        factor: what data is multiplied by: 1, or AdamW's 1 - lr * decay.
    """
    step, small, shrink, kept = np.float32(rate), np.float32(eps), np.float32(decay), np.float32(factor)
    move1, keep2, move2 = np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)
    for i in range(data.size):
        g = grad[i] + shrink * data[i]
        mean = m[i] + (g - m[i]) * move1
        square = keep2 * v[i] + move2 * g * g
        m[i] = mean
        v[i] = square
        data[i] = kept * data[i] - step * mean / (np.float32(math.sqrt(square)) + small)
