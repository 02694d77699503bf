"""GELU in the form of GPT-2, in one pass: x (1 + tanh(u)) / 2 is x times the sigmoid of 2 u.

Far out the sigmoid is exactly 0 or 1, and the slope is, too: x s (1 - s) is multiplied out first, and then 2 u', which
is held finite. At -infinity both are NaN, and the slope also at infinity, as in plain code.
"""

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.jit.scalar import exp, product

ONE = np.float32(1)
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
