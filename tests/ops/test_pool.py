"""Pooling against plain loops over its definition, ties, and NaN."""

import itertools

import numpy as np
import pytest

from nnmpi import Tensor, nn
from nnmpi.backend import plain as pooling
from nnmpi.ops import avg_pool2d, max_pool2d


def reference(kind, x, grad, kernel, stride, padding):
    """Return the pooled images and the gradient of x, window by window."""
    n, h, w, c = x.shape
    size = [
        (s + 2 * p - k) // t + 1 for s, k, t, p in zip((h, w), kernel, stride, padding, strict=True)
    ]
    y, to_x = np.zeros((n, *size, c)), np.zeros_like(x)
    for b, i, j, channel in itertools.product(*map(range, (n, *size, c))):
        top, left = i * stride[0] - padding[0], j * stride[1] - padding[1]
        seen = [
            (row, column)
            for row in range(top, top + kernel[0])
            for column in range(left, left + kernel[1])
            if 0 <= row < h and 0 <= column < w
        ]
        values = [x[b, row, column, channel] for row, column in seen]
        if kind is max_pool2d:
            y[b, i, j, channel] = max(values)
            row, column = seen[values.index(max(values))]
            to_x[b, row, column, channel] += grad[b, i, j, channel]
        else:
            y[b, i, j, channel] = sum(values) / (kernel[0] * kernel[1])
            for row, column in seen:
                to_x[b, row, column, channel] += grad[b, i, j, channel] / (kernel[0] * kernel[1])
    return y, to_x


@pytest.mark.parametrize("kind", [max_pool2d, avg_pool2d])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 2), (5, 4)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize("border", [False, True])
def test_against_loops(kind, kernel, stride, border):
    """Windows that overlap, touch, leave gaps, and lie half outside; values with many ties."""
    rng = np.random.default_rng(0)
    padding = (kernel[0] // 2, kernel[1] // 2) if border else (0, 0)
    x = Tensor(rng.integers(-2, 3, (2, 5, 6, 2)).astype(float), requires_grad=True)
    y = kind(x, kernel, stride, padding)
    grad = rng.standard_normal(y.shape)
    y.backward(grad)
    expected, to_x = reference(kind, x.data, grad, kernel, stride, padding)
    np.testing.assert_allclose(y.data, expected, atol=1e-14)
    np.testing.assert_allclose(x.grad, to_x, atol=1e-14)


@pytest.mark.parametrize("stride", [1, 16, 20])
@pytest.mark.parametrize("images_each", [1, 2, 100])
def test_more_places_than_a_byte_counts(stride, images_each, monkeypatch):
    """256 of them, and ties: the first wins. In blocks of some images."""
    monkeypatch.setattr(
        pooling, "PLANES_BYTES", images_each * 256 * 8 * (1 + (20 - 16) // stride) ** 2
    )
    rng = np.random.default_rng(0)
    x = Tensor(rng.integers(0, 2, (3, 20, 20, 1)).astype(float), requires_grad=True)
    x.data[0] = 1
    x.data[1, :15] = 0
    y = max_pool2d(x, 16, stride)
    grad = rng.standard_normal(y.shape)
    y.backward(grad)
    expected, to_x = reference(max_pool2d, x.data, grad, (16, 16), (stride, stride), (0, 0))
    np.testing.assert_array_equal(y.data, expected)
    np.testing.assert_allclose(x.grad, to_x, atol=1e-14)


def test_the_border_never_wins():
    """Not against negative values, nor in float32; where all values are the least possible, the
    result is that.
    """
    x = Tensor(np.full((1, 3, 3, 1), -1e30, "float32"))
    assert (max_pool2d(x, 3, 1, 1).data == np.float32(-1e30)).all()
    assert (max_pool2d(x * np.inf, 3, 1, 1).data == -np.inf).all()


@pytest.mark.parametrize("kernel, stride", [(2, 1), (2, 2), (3, 1), (3, 2), (4, 3)])
def test_a_window_of_minus_infinity_has_a_gradient(kernel, stride):
    """Its first pixel inside the image gets it, as in PyTorch."""
    padding = kernel // 2
    x = Tensor(np.full((2, 5, 4, 3), -np.inf, "float32"), requires_grad=True)
    y = max_pool2d(x, kernel, stride, padding)
    grad = np.arange(1, y.size + 1, dtype="float32").reshape(y.shape)
    y.backward(grad)
    expected = np.zeros(x.shape, "float32")
    for i, j in np.ndindex(*y.shape[1:3]):
        expected[:, max(i * stride - padding, 0), max(j * stride - padding, 0)] += grad[:, i, j]
    np.testing.assert_array_equal(y.data, -np.inf)
    np.testing.assert_array_equal(x.grad, expected)


def test_infinite_gradient():
    """It reaches the largest element alone."""
    x = Tensor(np.array([1.0, 2, 3, 4]).reshape(1, 1, 4, 1), requires_grad=True)
    max_pool2d(x, (1, 2)).backward(np.array([np.inf, 1]).reshape(1, 1, 2, 1))
    assert x.grad.ravel().tolist() == [0, np.inf, 0, 1]


def test_nan_is_not_hidden():
    """Every window that holds it is NaN, and no other; on a device, too."""
    for dtype, value in itertools.product(("float32", "float64"), (np.nan, np.inf)):
        values = np.zeros((1, 4, 4, 1), dtype)
        values[0, 1, 1, 0] = value
        for kind in (
            lambda x: max_pool2d(x, 2),
            lambda x: avg_pool2d(x, 2),
            nn.AdaptiveAvgPool2d(2),
            lambda x: nn.AdaptiveAvgPool2d(3)(x)[:, ::2, ::2],
        ):
            result = np.isfinite(kind(Tensor(values)).numpy()).ravel()
            np.testing.assert_array_equal(result, [False, True, True, True])
