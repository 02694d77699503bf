"""Bias, ReLU, GELU and column sums on the emulator: each against float64."""

import numpy as np
import pytest

from tests.backend.cuda.host import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    blank,
    close,
    draw,
    held,
    kernels,
    needs_emulator,
    parameters_of,
    wide,
)

pytestmark = [needs_emulator, pytest.mark.usefixtures("strict")]

SHAPES = pytest.mark.parametrize("shape", [(0, 5), (1, 1), (5, 3), (7, 8), (33, 40), (3, 130), (700, 24), (2500, 10)])


@DTYPES
@SHAPES
def test_bias(dtype, shape):
    """With and without ReLU, in place; parameters of the activations' dtype, and in float32 beside 16 bits."""
    for parameters in parameters_of(dtype):
        x, bias = draw(*shape, dtype=dtype), draw(shape[1], dtype=parameters, seed=1)
        expected = wide(x) + wide(bias)
        for function, result in ((kernels().bias_add, expected), (kernels().bias_relu, np.maximum(expected, 0))):
            y = x.copy()
            function(y, bias)
            close(y, result)


@DTYPES
@SHAPES
def test_gradients_of_relu_and_gelu(dtype, shape):
    """What goes on, and the bias's gradient; the first may lie where the gradient was."""
    grad, kept = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    for name, passed in (
        ("relu_grad_bias", wide(grad) * (wide(kept) > 0)),
        ("slope_grad_bias", wide(grad) * wide(kept)),
    ):
        for parameters in parameters_of(dtype):
            out, to_bias = blank(shape, dtype), blank(shape[1], parameters)
            getattr(kernels(), name)(grad, kept, out, to_bias)
            close(out, passed)
            close(to_bias, wide(out).sum(axis=0), 8, np.abs(passed).sum(axis=0))
        same, without = grad.copy(), blank(shape, dtype)
        getattr(kernels(), name)(same, kept, same, to_bias)
        getattr(kernels(), name)(grad, kept, without, None)
        np.testing.assert_array_equal(same, out)
        np.testing.assert_array_equal(without, out)


@DTYPES
@SHAPES
@pytest.mark.parametrize("add", [False, True])
def test_column_sums(dtype, shape, add):
    """Over rows that several blocks share, too; the result is the same each time."""
    x = draw(*shape, dtype=dtype)
    for parameters in parameters_of(dtype):
        before = draw(shape[1], dtype=parameters, seed=2)
        out, again = before.copy(), before.copy()
        kernels().column_sum(x, out, add)
        kernels().column_sum(x, again, add)
        close(out, wide(x).sum(axis=0) + add * wide(before), 8, np.abs(wide(x)).sum(axis=0) + 1)
        np.testing.assert_array_equal(out, again)


def test_many_blocks_share_the_rows():
    """Images' pixels: few columns, and a sum that float32 would not hold if it were one long one."""
    x = held(np.ones((60000, 8), np.float32))
    out = blank(8, F32)
    kernels().column_sum(x, out)
    np.testing.assert_array_equal(out, 60000)
    low = blank(8, F32)
    kernels().column_sum(held(np.ones((60000, 8)), BF16), low)
    np.testing.assert_array_equal(low, 60000)


@DTYPES
def test_relu_keeps_nan(dtype):
    """A run that diverges shows it; a NaN of the activation passes no gradient, as in NumPy."""
    y = held(np.full((3, 20), np.nan), dtype)
    kernels().bias_relu(y, draw(20, dtype=dtype))
    assert np.isnan(wide(y)).all()
    out, to_bias = blank((3, 20), dtype), blank(20, dtype)
    kernels().relu_grad_bias(draw(3, 20, dtype=dtype), y, out, to_bias)
    assert (wide(out) == 0).all()


@DTYPES
@pytest.mark.parametrize("n", [0, 1, 15, 16, 100, 3001])
def test_gelu(dtype, n):
    """Both forms and their derivatives, alone and with a bias; far out too."""
    from math import erf

    x, grad = draw(n, dtype=dtype, scale=3), draw(n, dtype=dtype, seed=1)
    x[:6] = np.array([-100, 100, -1e4, 3e4, 0, -0.0])[:n]
    v, c = wide(x), np.sqrt(2 / np.pi)
    tanh = np.tanh(c * (v + 0.044715 * v**3))
    phi = np.array([0.5 * (1 + erf(each / np.sqrt(2))) for each in v])
    forms = {
        "gelu_tanh": (0.5 * v * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * v * (1 - tanh**2) * c * (1 + 3 * 0.044715 * v**2)),
        "gelu": (v * phi, phi + v * np.exp(-0.5 * v * v) / np.sqrt(2 * np.pi)),
    }
    for name, (value, slope) in forms.items():
        y, out = blank(n, dtype), grad.copy()
        getattr(kernels(), name)(x, y)
        close(y, value, 8, 1 + np.abs(value))
        getattr(kernels(), f"{name}_grad")(x, out, out)
        close(out, wide(grad) * slope, 100, np.abs(wide(grad)))  # 1 - tanh^2 of float64 is not exact, either
        if n:
            rows = x.reshape(1, n).copy() if n % 2 else x.reshape(2, n // 2).copy()
            steep = blank(rows.shape, dtype)
            zero = held(np.zeros(rows.shape[1]), dtype)
            getattr(kernels(), f"bias_{name}_slope")(rows, zero, steep)
            close(rows.reshape(n), value, 8, 1 + np.abs(value))
            close(steep.reshape(n), slope, 100, 1)


@DTYPES
@pytest.mark.parametrize("name", ["gelu_tanh", "gelu"])
def test_gelu_far_out(dtype, name):
    """The value is 0 or x and the slope 0 or 1 up to the largest number; -infinity and NaN give NaN."""
    most = 300 if dtype == F64 else 4.7 if dtype == F16 else 38
    far = np.logspace(np.log10(40), most, 21)
    x = held(np.concatenate([far, -far, [np.nan, -np.inf]]), dtype)
    zero, y, slope = held(np.zeros(x.size), dtype), blank(x.size, dtype), held(np.ones(x.size), dtype)
    expected = np.where(wide(x) < 0, 0, wide(x))
    expected[-1] = np.nan
    getattr(kernels(), name)(x, y)
    np.testing.assert_array_equal(wide(y), expected)
    getattr(kernels(), f"{name}_grad")(x, slope, slope)
    np.testing.assert_array_equal(wide(slope[:-2]), wide(x[:-2]) > 0)
    assert np.isnan(wide(slope[-2]))
    rows, steep = x[None].copy(), blank((1, x.size), dtype)
    getattr(kernels(), f"bias_{name}_slope")(rows, zero, steep)
    np.testing.assert_array_equal(wide(rows[0]), expected)
    np.testing.assert_array_equal(wide(steep[0]), wide(slope))


@DTYPES
def test_the_bias_before_gelu(dtype):
    """It is added in the wider dtype: what the kernel gives is GELU of the sum, rounded once."""
    for parameters in parameters_of(dtype):
        x, bias = draw(9, 21, dtype=dtype), draw(21, dtype=parameters, seed=1)
        v = wide(x) + wide(bias)
        y, slope = x.copy(), blank(x.shape, dtype)
        kernels().bias_gelu_tanh_slope(y, bias, slope)
        close(y, 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))), 8, 1)


def test_views_of_flat_storage():
    """Parameters lie anywhere in a buffer: addresses that are no multiple of 16 bytes."""
    storage = draw(1000)
    for start in range(1, 5):
        bias, to_bias = storage[start : start + 24], storage[100 + start : 124 + start]
        y = draw(30, 24, seed=3)
        expected = np.maximum(wide(y) + wide(bias), 0)
        kernels().bias_relu(y, bias)
        close(y, expected)
        out = blank(y.shape, F32)
        kernels().relu_grad_bias(y, y, out, to_bias)
        close(to_bias, wide(out).sum(axis=0), 8)
