"""Kernels that are plain loops, with few passes over the data.

NumPy passes over memory once per operation, and its calls take a microsecond each. These loops pay
neither, so they win in long chains of operations that are no row formulas, whose loops `rows`
prints: in a step of LSTM, whose gates lie side by side, and in depthwise convolutions.

exp, tanh, log and maxima are written without calls and branches, because only then are the loops
around them vectorized.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from nnmpi.backend.jit.build import inlined

_unsigned = np.uint64
ROWS = 64  # summed before they are added to the total: one long sum would round worse

_ZERO, _HALF, _ONE, _ABOVE = map(np.float32, (0, 0.5, 1, 128.5))
_INFINITY, _NAN = np.float32(np.inf), np.float32(np.nan)
_LEAST, _MOST, _END = map(np.float32, (-87.3, 89, 8))
# log2 e, and ln 2 in two parts, the first short enough that its products with whole numbers are
# exact
_LOG2E, _LN2_HIGH, _LN2_LOW = map(np.float32, (1.44269504088896341, 0.693359375, -2.12194440e-4))
_P0, _P1, _P2, _P3, _P4, _P5 = map(
    np.float32,
    (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ),
)
# log: 2 / 3, 2 / 5 ... of its series; the numbers below which floats are not normal; sqrt(1 / 2)
_L1, _L2, _L3, _L4 = map(np.float32, (2 / 3, 2 / 5, 2 / 7, 2 / 9))
_NORMAL, _SCALE, _ROOT_HALF = np.float32(2.0**-126), np.float32(2.0**23), np.int32(0x3F3504F3)
_QUARTER, _LOG_NEAR = np.float32(0.25), np.float32(0.41)
# tanh: x P(x^2) / Q(x^2), of the least relative error on 0 to 9.02 (fitted for this file)
_T0, _T1, _T2, _T3, _T4 = map(
    np.float32, (1.332006357e-8, 2.058427321e-5, 3.494085756e-3, 0.1337976199, 0.999999979)
)
_Q0, _Q1, _Q2, _Q3 = map(np.float32, (7.762448214e-7, 3.283174456e-4, 2.587127094e-2, 0.4671307726))


def _reinterpret(source: Any, target: Any) -> Any:
    """Return a function from a number to the one of another type with the same 32 bits."""

    def typing(context: Any, bits: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), generate

    return intrinsic(typing)


_as_float = _reinterpret(types.int32, types.float32)
_as_int = _reinterpret(types.float32, types.int32)


@inlined
def _power(x):
    """Return e^r - 1 and 2^n in float32, for x = n ln 2 + r with a whole n.

    e^r by the polynomial of the Cephes library's expf (Moshier, 1989), and 2^n by writing n into
    the exponent's bits.
    """
    x = _LEAST if x < _LEAST else x  # in this order NaN stays
    x = _MOST if x > _MOST else x
    # rounds to the nearest: the argument of int32 is positive, so truncation rounds down
    n = np.int32(x * _LOG2E + _ABOVE) - np.int32(128)
    full = np.float32(n)
    r = x - full * _LN2_HIGH - full * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    return p * r * r + r, _as_float((n + np.int32(127)) << np.int32(23))


@inlined
def exp(x):
    """Return e^x in float32, within 2 units of the last place; NaN stays, e^-inf is 1e-38.

    Above 88.37 the result is infinity, since the exponent bits of 2^128 are those of infinity. Then
    1 / e^x is exactly 0.
    """
    more, power = _power(x)
    return (more + _ONE) * power


@inlined
def expm1(x):
    """Return e^x - 1 in float32, near 0 to the last places, too."""
    more, power = _power(x)
    return more * power + (power - _ONE)


@inlined
def _log1p(s):
    """Return log((1 + s) / (1 - s)) for |s| below 0.18, by its series."""
    z = s * s
    return (((_L4 * z + _L3) * z + _L2) * z + _L1) * z * s + (s + s)


@inlined
def log(x):
    """Return the logarithm of a float32; -infinity of 0, NaN below it."""
    tiny = x < _NORMAL
    bits = _as_int(x * _SCALE if tiny else x)
    # x = 2^n m with m between sqrt(1 / 2) and sqrt(2)
    n = (bits - _ROOT_HALF) >> np.int32(23)
    m = _as_float(bits - (n << np.int32(23)))
    y = np.float32(n - np.int32(23) if tiny else n)
    y = y * _LN2_HIGH + (_log1p((m - _ONE) / (m + _ONE)) + y * _LN2_LOW)
    y = y if x < _INFINITY else x
    return y if x > _ZERO else (-_INFINITY if x == _ZERO else _NAN)


@inlined
def log1p(x):
    """Return log(1 + x) in float32, near 0 to the last places, too."""
    near = _log1p(x / (x + _ONE + _ONE))
    far = log(x + _ONE)
    return near if (x > -_QUARTER) & (x < _LOG_NEAR) else far


@inlined
def tanh(x):
    """Return the hyperbolic tangent of a float32, within 6 units of the last place; NaN stays NaN.

    A quotient of polynomials takes a third of the time of 1 - 2 / (e^(2 x) + 1), which needs
    another form near 0.
    """
    z = x * x
    p = ((((_T0 * z + _T1) * z + _T2) * z + _T3) * z + _T4) * x
    y = p / ((((_Q0 * z + _Q1) * z + _Q2) * z + _Q3) * z + _ONE)
    y = _ONE if x > _END else y  # exactly, or 1 - tanh would be far off
    return -_ONE if x < -_END else y


@inlined
def order(x):
    """Return an int32 that orders as the float32, NaN above all: loops for integer maxima are
    vectorized.
    """
    bits = _as_int(x)
    key = bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
    return key if x == x else np.int32(0x7FFFFFFF)


@inlined
def ordered(key):
    """Return the float32 with this `order`."""
    return _as_float(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined
def empty_into(part, total):
    """total += part; part = 0. A loop: array statements were slower."""
    for i in range(part.size):
        total[i] += part[i]
        part[i] = _ZERO


# Depthwise convolution, see `ops.conv.depthwise`. Arrays are flat, the weight is (kh kw, c). The
# kernel's size is a constant of each function, without which the loop over a kernel row is not
# unrolled. With a stride of 1 the innermost loop runs over a row of pixels, with as many copies of
# the weight: a loop over the channels alone is often shorter than a few vectors.


@inlined
def _each_window(x, weight, y, border, sizes, kernel_h, kernel_w, forward):
    """Write y, or add to the weight's gradient, image by image: one sum over all images would
    round worse.
    """
    h, w, c, columns, top, left, out_h, out_w, step_h, step_w, far_h, far_w = sizes
    beside = out_w if step_w == 1 else 1
    run = beside * c
    # unsigned: for a signed index numba checks at each element whether it counts from the end
    length, apart = _unsigned(run), _unsigned(far_w * c)
    copies = np.zeros(kernel_h * kernel_w * run, np.float32)
    if forward:
        for tap in range(kernel_h * kernel_w):
            for j in range(beside):
                for k in range(c):
                    copies[tap * run + j * c + k] = weight[tap * c + k]
    border[:] = _ZERO
    for b in range(x.size // (h * w * c)):
        for i in range(h):
            for j in range(w):
                pixel = x[((b * h + i) * w + j) * c :]
                target = border[((top + i) * columns + left + j) * c :]
                for k in range(c):
                    target[k] = pixel[k]
        for i in range(out_h):
            for j in range(out_w // beside):
                out = y[((b * out_h + i) * out_w + j) * c :]
                if forward:
                    out[:run] = _ZERO
                for r in range(kernel_h):
                    pixel = border[((i * step_h + r * far_h) * columns + j * step_w) * c :]
                    row = copies[r * kernel_w * run :]
                    if forward:
                        for k in range(_unsigned(run)):
                            total = out[k]
                            for s in range(_unsigned(kernel_w)):
                                total += pixel[s * apart + k] * row[s * length + k]
                            out[k] = total
                    else:
                        for s in range(kernel_w):
                            seen, sums = pixel[s * far_w * c :], row[s * run :]
                            for k in range(run):
                                sums[k] += seen[k] * out[k]
        if not forward:
            for tap in range(kernel_h * kernel_w):
                for j in range(beside):
                    empty_into(copies[tap * run + j * c :][:c], weight[tap * c :])


def depthwise(kernel_h, kernel_w):
    """Return the convolution and the sum of products for kernels of this size."""

    def forward(x, weight, y, border, sizes):
        """y = the convolution of images in a border of zeros."""
        _each_window(x, weight, y, border, sizes, kernel_h, kernel_w, True)

    def products(x, y, weight, border, sizes):
        """The weight's gradient, y being that of the result."""
        weight[:] = _ZERO
        _each_window(x, weight, y, border, sizes, kernel_h, kernel_w, False)

    return forward, products


# A step of LSTM without its product, see `ops.recurrent`: the gates are i, f, o, g.


@inlined
def gates_of(row):
    """Return the four gates, side by side in a row."""
    n = row.size // 4
    return row[:n], row[n : 2 * n], row[2 * n : 3 * n], row[3 * n :]


def lstm_step(g, product, bias, c, new_c, new_h):
    """g = tanh(g + bias + product), i = (1 + g_i) / 2 and so on; new_c = f c + i g; new_h = o
    tanh(new_c).
    """
    for r in range(c.shape[0]):
        gates, more = g[r], product[r]
        for j in range(gates.size):
            gates[j] = tanh(gates[j] + bias[j] + more[j])
        i, f, o, candidate = gates_of(gates)
        old, cell, hidden = c[r], new_c[r], new_h[r]
        for j in range(cell.size):
            value = _HALF * ((_ONE + f[j]) * old[j] + (_ONE + i[j]) * candidate[j])
            cell[j] = value
            hidden[j] = _HALF * (_ONE + o[j]) * tanh(value)


def lstm_step_grad(g, slopes, h, grad, cell, last_c, to_c):
    """slopes = the gradient of the tanh's arguments; to_c = the gradient of c a step earlier."""
    for r in range(cell.shape[0]):
        (i, f, o, candidate), (to_i, to_f, to_o, to_g) = gates_of(g[r]), gates_of(slopes[r])
        first, other, after, before, total = h[r], grad[r], cell[r], last_c[r], to_c[r]
        for j in range(total.size):
            t, to_h = tanh(after[j]), _HALF * (first[j] + other[j])
            to_cell = _HALF * (total[j] + to_h * (_ONE + o[j]) * (_ONE - t * t))
            to_o[j] = _HALF * to_h * t * (_ONE - o[j] * o[j])
            to_i[j] = _HALF * to_cell * candidate[j] * (_ONE - i[j] * i[j])
            to_f[j] = _HALF * to_cell * before[j] * (_ONE - f[j] * f[j])
            to_g[j] = to_cell * (_ONE + i[j]) * (_ONE - candidate[j] * candidate[j])
            total[j] = to_cell * (_ONE + f[j])
