"""Pooling and convolution's columns on the emulator: each against plain loops in NumPy."""

import numpy as np
import pytest

from nnmpi.backend.windows import out_size
from tests.backend.cuda.host import (
    BF16,
    DTYPES,
    F32,
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

GEOMETRIES = pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding"),
    [
        ((2, 4, 6, 5), (2, 2), (2, 2), (0, 0)),
        ((3, 5, 7, 16), (2, 2), (2, 2), (0, 0)),
        ((2, 7, 9, 8), (3, 3), (2, 2), (1, 1)),
        ((2, 6, 5, 3), (3, 2), (1, 1), (1, 1)),
        ((1, 9, 8, 4), (2, 3), (3, 4), (0, 1)),
        ((0, 4, 4, 2), (2, 2), (2, 2), (0, 0)),
        ((1, 20, 20, 1), (17, 16), (1, 2), (0, 0)),
    ],
)


def taps(x, kernel, stride, padding, border, dilation=(1, 1)):
    """Return an array (places, n, out_h, out_w, c) of what each place in the windows sees."""
    out = [out_size(x.shape[i + 1], kernel[i], stride[i], padding[i], dilation[i]) for i in (0, 1)]
    wider = np.pad(x, ((0, 0), (padding[0],) * 2, (padding[1],) * 2, (0, 0)), constant_values=border)
    seen = [
        wider[:, i * dilation[0] :: stride[0], j * dilation[1] :: stride[1]][:, : out[0], : out[1]]
        for i in range(kernel[0])
        for j in range(kernel[1])
    ]
    return np.stack(seen), (len(x), *out, x.shape[3])


def spread(values, shape, kernel, stride, padding, dilation=(1, 1)):
    """Add values (places, n, out_h, out_w, c) up where `taps` takes them from."""
    n, h, w, c = shape
    wider = np.zeros((n, h + 2 * padding[0], w + 2 * padding[1], c))
    for k, value in enumerate(values):
        i, j = k // kernel[1] * dilation[0], k % kernel[1] * dilation[1]
        out_h, out_w = value.shape[1:3]
        rows = slice(i, i + stride[0] * (out_h - 1) + 1, stride[0])
        wider[:, rows, j : j + stride[1] * (out_w - 1) + 1 : stride[1]] += value
    return wider[:, padding[0] : padding[0] + h, padding[1] : padding[1] + w]


@DTYPES
@GEOMETRIES
def test_max_pool(dtype, shape, kernel, stride, padding):
    """The first of equal elements wins, and gets the gradient; overlapping windows add theirs up."""
    x = held(np.random.default_rng(0).integers(-3, 3, shape), dtype)
    seen, size = taps(wide(x), kernel, stride, padding, -np.inf)
    number = np.uint8 if kernel[0] * kernel[1] < 256 else np.uint16
    y, winner = blank(size, dtype), blank(size, number)
    kernels().max_pool(x, y, winner, kernel, stride, padding)
    np.testing.assert_array_equal(wide(y), seen.max(axis=0))
    np.testing.assert_array_equal(winner, seen.argmax(axis=0))
    again = blank(size, dtype)
    kernels().max_pool(x, again, None, kernel, stride, padding)
    np.testing.assert_array_equal(again, y)
    grad, out = draw(*size, dtype=dtype), blank(shape, dtype)
    kernels().max_pool_grad(grad, winner, out, kernel, stride, padding)
    places = np.arange(kernel[0] * kernel[1]).reshape(-1, 1, 1, 1, 1)
    expected = spread(np.where(places == np.asarray(winner), wide(grad), 0), shape, kernel, stride, padding)
    close(out, expected, 30, 1)


@DTYPES
@GEOMETRIES
def test_avg_pool(dtype, shape, kernel, stride, padding):
    """The border counts as zeros."""
    x = draw(*shape, dtype=dtype)
    seen, size = taps(wide(x), kernel, stride, padding, 0)
    y = blank(size, dtype)
    kernels().avg_pool(x, y, kernel, stride, padding)
    close(y, seen.mean(axis=0), 20, 1)
    grad, out = draw(*size, dtype=dtype), blank(shape, dtype)
    kernels().avg_pool_grad(grad, out, kernel, stride, padding)
    share = np.broadcast_to(wide(grad) / len(seen), seen.shape)
    close(out, spread(share, shape, kernel, stride, padding), 30, 1)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 4, 6, 5), (3, 5, 7, 16), (1, 2, 2, 1), (0, 4, 4, 2), (40, 16, 16, 8)])
@pytest.mark.parametrize("kernel", [(2, 2), (1, 1), (2, 1)])
def test_bias_relu_and_pooling(dtype, shape, kernel):
    """No place wins where the ReLU gives 0; the bias's gradient is the sum of what passes."""
    x = draw(*shape, dtype=dtype)
    for parameters in parameters_of(dtype):
        bias = draw(shape[3], dtype=parameters, seed=1)
        seen, size = taps(wide(x), kernel, kernel, (0, 0), -np.inf)
        top = seen.max(axis=0) + wide(bias)
        y, winner, to_bias = blank(size, dtype), blank(size, np.uint8), blank(shape[3], parameters)
        kernels().bias_relu_pool(x, bias, y, winner, kernel)
        close(y, np.maximum(top, 0))
        np.testing.assert_array_equal(winner, np.where(top > 0, seen.argmax(axis=0), 255))
        grad, out = draw(*size, dtype=dtype, seed=2), blank(shape, dtype)
        kernels().bias_relu_pool_grad(grad, winner, out, to_bias, kernel)
        places = np.arange(len(seen)).reshape(-1, 1, 1, 1, 1)
        passed = np.where(places == np.asarray(winner), wide(grad), 0)
        close(out, spread(passed, shape, kernel, kernel, (0, 0)))
        close(to_bias, passed.sum(axis=(0, 1, 2, 3)), 20, 1 + np.abs(passed).sum(axis=(0, 1, 2, 3)))
        plain, also = blank(size, dtype), blank(size, np.uint8)
        kernels().bias_relu_pool(x, None, plain, also, kernel)
        close(plain, np.maximum(seen.max(axis=0), 0))


@DTYPES
@pytest.mark.parametrize("place", range(4))
def test_a_nan_wins(dtype, place):
    """Wherever it stands in the window, with ReLU too."""
    x = held(np.ones((1, 2, 2, 8)), dtype)
    x[0, place // 2, place % 2] = np.nan
    y, winner = blank((1, 1, 1, 8), dtype), blank((1, 1, 1, 8), np.uint8)
    kernels().max_pool(x, y, winner, (2, 2), (2, 2), (0, 0))
    assert np.isnan(wide(y)).all()
    assert (winner == place).all()
    kernels().bias_relu_pool(x, held(np.zeros(8), dtype), y, winner, (2, 2))
    assert np.isnan(wide(y)).all()
    assert (winner == 255).all()


@DTYPES
@GEOMETRIES
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
def test_columns(dtype, shape, kernel, stride, padding, dilation):
    """There and back; of all channels, and of a group of them."""
    if out_size(shape[1], kernel[0], stride[0], padding[0], dilation[0]) < 1:
        shape, kernel = (2, 9, 9, shape[3]), (3, 3)
    x, n_places = draw(*shape, dtype=dtype), kernel[0] * kernel[1]
    for first, c in {(0, shape[3]), (shape[3] // 2, shape[3] - shape[3] // 2)}:
        part = wide(x)[..., first : first + c]
        seen, size = taps(part, kernel, stride, padding, 0, dilation)
        columns = blank((size[0] * size[1] * size[2], n_places * c), dtype)
        kernels().im2col(x, columns, kernel, stride, padding, dilation, first)
        np.testing.assert_array_equal(wide(columns), seen.transpose(1, 2, 3, 0, 4).reshape(columns.shape))
        values = draw(*columns.shape, dtype=dtype, seed=3)
        back = x.copy()
        kernels().col2im(values, back, kernel, stride, padding, dilation, first)
        there = wide(values).reshape(*size[:3], n_places, c).transpose(3, 0, 1, 2, 4)
        close(back[..., first : first + c].copy(), spread(there, part.shape, kernel, stride, padding, dilation), 300, 1)
        rest = [i for i in range(shape[3]) if not first <= i < first + c]
        np.testing.assert_array_equal(back[..., rest], x[..., rest])


def test_a_part_of_the_images():
    """Slices of a batch are arrays without gaps, at any address."""
    x = draw(5, 4, 4, 3)
    for part in (x[1:4], x[3:]):
        columns = blank((len(part) * 4, 27), F32)
        kernels().im2col(part, columns, (3, 3), (1, 1), (0, 0))
        seen, _ = taps(np.asarray(part), (3, 3), (1, 1), (0, 0), 0)
        np.testing.assert_array_equal(columns, seen.transpose(1, 2, 3, 0, 4).reshape(columns.shape))


def test_low_precision_adds_up_in_float32():
    """64 windows that share a pixel: bfloat16 would stop at 256."""
    columns = held(np.full((64, 64), 8.0), BF16)
    x = blank((1, 15, 15, 1), BF16)
    kernels().col2im(columns, x, (8, 8), (1, 1), (0, 0))
    assert float(x[0, 7, 7, 0]) == 512
