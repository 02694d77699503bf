"""Kernels that are plain loops, each few passes over the data.

They win where steps are small or many: in the loss (without it a step of iris takes 1.25 times as long) and in Adam's
update (1.2 times, and 1.34 of a small MLP). Around the products of dense layers and in a step of LSTM they did not:
0.95 to 1.03. What they need of single numbers is written so that loops over them are vectorized.
"""

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from nnmpi.backend.jit.build import inlined

_ZERO, _ONE, _ABOVE, _LEAST, _MOST = map(np.float32, (0, 1, 128.5, -87.3, 89))
# log2 e, and ln 2 in two parts, the first short enough that its products with whole numbers are exact
_LOG2E, _LN2_HIGH, _LN2_LOW = map(np.float32, (1.44269504088896341, 0.693359375, -2.12194440e-4))
_P0, _P1, _P2, _P3, _P4, _P5 = map(
    np.float32,
    (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)


def _reinterpret(source: Any, target: Any) -> Any:
    """Return a function that gives the number of another type with the same 32 bits: no instruction at all."""

    def typing(context: Any, bits: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), generate

    return intrinsic(typing)


_as_float = _reinterpret(types.int32, types.float32)
_as_int = _reinterpret(types.float32, types.int32)


@inlined
def exp(x):
    """Return e^x for a float32, within 2 units of the last place; NaN stays NaN, and e^-inf is 1e-38.

    Above 88.37 it is infinity, as 2^128 written so is: 1 / e^x is then exactly 0, whatever that is multiplied by.

    x = n ln 2 + r with a whole n; e^r by the polynomial of the Cephes library's expf (Moshier, 1989), and 2^n by
    writing n into the exponent's bits.
    """
    x = _LEAST if x < _LEAST else x  # in this order NaN stays
    x = _MOST if x > _MOST else x
    n = np.int32(x * _LOG2E + _ABOVE) - np.int32(128)  # rounded: what is converted is positive, so cut off is down
    whole = np.float32(n)
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    return (p * r * r + r + _ONE) * _as_float((n + np.int32(127)) << np.int32(23))


@inlined
def order(x):
    """Return an int32 for a float32, larger for a larger one: loops for the largest int are vectorized."""
    bits = _as_int(x)
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@inlined
def ordered(key):
    """Return the float32 with this `order`."""
    return _as_float(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined
def largest(row):
    """Return the largest of at least one number. Of NaN among them nothing is known."""
    top = order(row[0])
    for i in range(1, row.size):
        key = order(row[i])
        top = key if key > top else top
    return ordered(top)


def softmax_loss(logits, labels, losses, gradient):
    """losses[r] = -log softmax(logits[r])[labels[r]]; gradient[r] = softmax(logits[r]), less 1 at the label."""
    for r in range(logits.shape[0]):
        row, result, label = logits[r], gradient[r], labels[r]
        top, chosen, total = largest(row), row[label], _ZERO  # before the gradient takes the logits' place
        for i in range(row.size):
            value = exp(row[i] - top)
            result[i] = value
            total += value
        losses[r] = np.float32(math.log(total)) - (chosen - top)
        share = _ONE / total
        for i in range(row.size):
            result[i] *= share
        result[label] -= _ONE


def adam(
    data,
    grad,
    m,
    v,
    rate,
    eps,
    beta1,
    beta2,
    decay,
    factor,
):
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
