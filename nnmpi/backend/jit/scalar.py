"""What kernels need of single numbers, written so that loops over them are vectorized."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from nnmpi.backend.jit.build import inlined

_LOG2E = np.float32(1.44269504088896341)
# ln 2 in two parts, the first short enough that its products with whole numbers are exact
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-87.3), np.float32(89)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ZERO, _ONE, _TWO, _ABOVE = np.float32(0), np.float32(1), np.float32(2), np.float32(128.5)
_T0, _T1, _T2 = np.float32(-5.70498872745e-3), np.float32(2.06390887954e-2), np.float32(-5.37397155531e-2)
_T3, _T4, _NEAR = np.float32(1.33314422036e-1), np.float32(-3.33332819422e-1), np.float32(0.625)


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
def exp(x: Any) -> Any:
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
def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of a float32, within 2 units of the last place; NaN stays NaN.

    Near 0 by the polynomial of the Cephes library's tanhf (Moshier, 1989), else by e^(2 |x|).
    """
    size = -x if x < _ZERO else x
    z = x * x
    near = ((((_T0 * z + _T1) * z + _T2) * z + _T3) * z + _T4) * z * x + x
    far = _ONE - _TWO / (exp(size + size) + _ONE)
    far = -far if x < _ZERO else far
    return near if size < _NEAR else far


@inlined
def log(x: Any) -> Any:
    """Return the natural logarithm of a float32."""
    return np.float32(math.log(x))


@inlined
def order(x: Any) -> Any:
    """Return an int32 for a float32, larger for a larger one: loops for the largest int are vectorized."""
    bits = _as_int(x)
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@inlined
def ordered(key: Any) -> Any:
    """Return the float32 with this `order`."""
    return _as_float(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined
def largest(row: Any) -> Any:
    """Return the largest of at least one number. Of NaN among them nothing is known."""
    top = order(row[0])
    for i in range(1, row.size):
        key = order(row[i])
        top = key if key > top else top
    return ordered(top)


@inlined
def empty_into(part: Any, total: Any) -> None:
    """total += part, which becomes 0. A loop, since array statements were slower."""
    for i in range(part.size):
        total[i] += part[i]
        part[i] = _ZERO
