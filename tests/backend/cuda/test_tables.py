"""Embedding, dropout, conversion, sums of squares and updates on the emulator."""

import numpy as np
import pytest

from nnmpi.backend.random import random_bits
from tests.backend.cuda.host import (
    BF16,
    DTYPES,
    EPSILON,
    F16,
    F32,
    F64,
    blank,
    close,
    draw,
    held,
    kernels,
    needs_emulator,
    sums_of,
    wide,
)

pytestmark = [needs_emulator, pytest.mark.usefixtures("strict")]

ALL = (F32, F64, F16, BF16)


@DTYPES
@pytest.mark.parametrize("features", [1, 7, 16, 100])
@pytest.mark.parametrize("kind", ["int64", "uint8", "int16"])
def test_embedding(dtype, features, kind):
    """Rows of a table of another dtype are rounded; an index out of range gives NaN."""
    indices = held(np.random.default_rng(0).integers(0, 20, (3, 5)), kind)
    for table_dtype in (dtype, F32):
        table, out = draw(20, features, dtype=table_dtype), blank((3, 5, features), dtype)
        kernels().embedding(table, indices, out)
        np.testing.assert_array_equal(out, np.asarray(table)[np.asarray(indices)].astype(dtype))
    indices[1, 2] = 20
    indices[2, 0] = 255 if kind == "uint8" else -1
    kernels().embedding(table, indices, out)
    assert np.isnan(wide(out[1, 2])).all()
    assert np.isnan(wide(out[2, 0])).all()
    assert np.isnan(wide(out)).sum() == 2 * features


@DTYPES
@pytest.mark.parametrize(("count", "features"), [(0, 4), (1, 1), (50, 33), (300, 8)])
@pytest.mark.parametrize("add", [False, True])
def test_gradients_of_an_embedding(dtype, count, features, add):
    """Rows picked many times, once and never; an index out of range counts for nothing."""
    grad = draw(count, features, dtype=dtype)
    indices = held(np.random.default_rng(1).integers(0, 9, count) ** 2 // 8, "int32")
    indices[: count // 10] = np.arange(count // 10) % 2 * 200 - 100
    inside = (np.asarray(indices) >= 0) & (np.asarray(indices) < 12)
    for place in dict.fromkeys([dtype, sums_of(dtype)]):
        before = draw(12, features, dtype=place, seed=4)
        expected = wide(before) * add
        np.add.at(expected, np.asarray(indices)[inside], wide(grad)[inside])
        out = before.copy()
        kernels().embedding_grad(grad, indices, out, add)
        close(out, expected, 20, np.abs(wide(grad)).sum(initial=1.0))


@DTYPES
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 3), (6, 4, 8), (3, 1001)])
def test_dropout(dtype, shape):
    """The bits are those of `random_bits`, for the first rows of a batch and for others, and for parts of rows."""
    x, key = draw(*shape, dtype=dtype), (0xFEDCBA98, 0xFFFFFFF0)
    rows = shape[0] if shape else 1
    each = x.size // rows if rows else 3
    factor = wide(np.asarray(1 / (1 - 0.3)).astype(sums_of(dtype)))
    for first_row, columns in ((0, None), (123456789012, None), (7, held(np.arange(each)[::-1] * 3 + 5, "uint32"))):
        bits = random_bits(np, first_row, rows, each if columns is None else np.asarray(columns), key)
        expected = wide(x) * (bits >= round(0.3 * 2**32)).reshape(shape) * factor
        y = blank(shape, dtype)
        kernels().dropout(x, 0.3, key, first_row, columns, y)
        close(y, expected)
        np.testing.assert_array_equal(wide(y) == 0, expected == 0)
        same = x.copy()
        kernels().dropout(same, 0.3, key, first_row, columns, same)
        np.testing.assert_array_equal(same, y)


@pytest.mark.parametrize("source", ALL, ids=lambda each: each.name)
@pytest.mark.parametrize("target", ALL, ids=lambda each: each.name)
def test_conversions(source, target):
    """To the nearest, ties to even, like NumPy's; infinity, NaN, zeros with a sign and subnormal numbers."""
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-8, 6e-8, 3e-5, 65504.0, 65519.0, 65520.0, 1e39, 3.3e38, 1 + 2**-8]
    values = np.concatenate([special, 1 + np.arange(64) / 512, np.random.default_rng(0).standard_normal(1000) * 100])
    with np.errstate(over="ignore"):
        x = held(values.astype(source))
        expected = (
            np.asarray(x).astype(target) if source == F32 or target != F16 else np.asarray(x).astype(F32).astype(F16)
        )
    for n in (0, 1, 17, len(x)):
        y = blank(n, target)
        kernels().cast(x[:n], y)
        np.testing.assert_array_equal(wide(y), wide(expected[:n]))
        np.testing.assert_array_equal(np.signbit(wide(y)), np.signbit(wide(expected[:n])))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda each: each.name)
def test_every_16_bit_number(dtype):
    """There and back."""
    bits = np.arange(65536, dtype=np.uint16)
    x, y, again = held(bits.view(dtype)), blank(65536, F32), blank(65536, dtype)
    kernels().cast(x, y)
    np.testing.assert_array_equal(wide(y), wide(x))
    kernels().cast(y, again)
    np.testing.assert_array_equal(wide(again), wide(x))


@DTYPES
@pytest.mark.parametrize("n", [0, 1, 33, 5000, 70001])
def test_sum_of_squares(dtype, n):
    """In float64, whatever the dtype; it adds to what is there on request, and is the same at any address."""
    x, out = draw(n, dtype=dtype), blank(1, F64)
    kernels().sum_of_squares(x, out)
    expected = (wide(x) ** 2).sum()
    np.testing.assert_allclose(out, expected, rtol=1e-13)
    kernels().sum_of_squares(x, out, True)
    np.testing.assert_allclose(out, 2 * expected, rtol=1e-13)
    moved = np.concatenate([x[:1], x]).view(type(x))[1:]
    other = blank(1, F64)
    kernels().sum_of_squares(moved, other)
    kernels().sum_of_squares(x, out)
    assert out[0] == other[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_squares_beyond_float32(bad):
    """What is not finite is seen; large numbers do not overflow."""
    x, out = held(np.full(5000, 2.0), F32), blank(1, F64)
    x[4321] = bad
    kernels().sum_of_squares(x, out)
    np.testing.assert_allclose(out[0], np.float64(np.float32(bad)) ** 2 + 4 * 4999)


@DTYPES
@pytest.mark.parametrize("n", [0, 1, 31, 5003])
def test_updates(dtype, n):
    """In place, in one pass, at any address; each as the formulas have it."""
    start = 1 if n > 1 else 0
    arrays = [draw(n, dtype=dtype, seed=i)[start:] for i in range(3)]
    square = held(np.abs(wide(draw(n, dtype=dtype, seed=3)))[start:], dtype)
    w, g, m, v = (wide(each) for each in (*arrays, square))

    def copies():
        return [each.copy() for each in (*arrays, square)]

    data, grad, first, second = copies()
    kernels().sgd(data, grad, 0.1, 0.01)
    close(data, w - 0.1 * (g + 0.01 * w), 4, 1 + np.abs(w))
    for nesterov in (False, True):
        data, grad, first, second = copies()
        kernels().sgd_momentum(data, grad, first, 0.1, 0.9, 0.01, nesterov)
        direction = g + 0.01 * w
        speed = 0.9 * m + direction
        close(first, speed, 4, 1 + np.abs(m))
        close(data, w - 0.1 * (direction + 0.9 * speed if nesterov else speed), 8, 1 + np.abs(w))
    data, grad, first, second = copies()
    kernels().adam(data, grad, first, second, 0.1, 1e-3, 0.9, 0.99, 0.01, 0.98)
    direction = g + 0.01 * w
    mean, squares = m + (direction - m) * 0.1, 0.99 * v + 0.01 * direction**2
    close(first, mean, 4, 1 + np.abs(m))
    close(second, squares, 8, 1 + squares)
    root = np.sqrt(squares) + 1e-3
    close(data, 0.98 * w - 0.1 * mean / root, 10, 1 + np.abs(w) + np.abs(mean) / root)
    np.testing.assert_array_equal(grad, arrays[1])


def test_updates_like_the_compiled_ones_for_numpy():
    """The same formulas in the same dtype: within a few units in the last place."""
    pytest.importorskip("numba")
    from nnmpi.backend.kernels.lookup import load

    host = [np.asarray(draw(1000, seed=i)) ** (2 if i == 3 else 1) for i in range(4)]
    there, here = [held(each) for each in host], [each.copy() for each in host]
    numbers = (0.01, 1e-8, 0.9, 0.999, 0.01, 1.0)
    load().functions.adam(*here, *numbers)
    kernels().adam(*there, *numbers)
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(other, one, rtol=4 * EPSILON[F32], atol=4 * EPSILON[F32])
