"""Optimizers' updates in one pass over a block; arguments are those of `backend.kernels.updates.UpdateKernels`."""

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
