"""Convolution against plain loops over its definition."""

import itertools

import numpy as np
import pytest

from nnmpi import Tensor
from nnmpi.ops import conv2d, conv_transpose2d
from nnmpi.ops.conv import depthwise, im2col


def reference(x, weight, grad, stride, padding, dilation, groups):
    """Return the convolution and, for a gradient of it, those of x and weight: one product after
    another.
    """
    n, h, w, c = x.shape
    kh, kw, per_group, o = weight.shape
    size = [
        (s + 2 * p - d * (k - 1) - 1) // t + 1
        for s, k, t, p, d in zip((h, w), (kh, kw), stride, padding, dilation, strict=True)
    ]
    y, to_x, to_weight = np.zeros((n, *size, o)), np.zeros_like(x), np.zeros_like(weight)
    for b, i, j, out, ki, kj, ci in itertools.product(
        *map(range, (n, *size, o, kh, kw, per_group))
    ):
        row, column = (
            i * stride[0] + ki * dilation[0] - padding[0],
            j * stride[1] + kj * dilation[1] - padding[1],
        )
        channel = out // (o // groups) * per_group + ci
        if 0 <= row < h and 0 <= column < w:
            y[b, i, j, out] += x[b, row, column, channel] * weight[ki, kj, ci, out]
            if grad is not None:
                to_x[b, row, column, channel] += grad[b, i, j, out] * weight[ki, kj, ci, out]
                to_weight[ki, kj, ci, out] += grad[b, i, j, out] * x[b, row, column, channel]
    return y, to_x, to_weight


def compare(sizes, kernel, stride, padding, dilation, groups):
    """Compare conv2d with the reference, forward and backward."""
    rng = np.random.default_rng(0)
    n, h, w, c, o = sizes
    arrays = (
        rng.standard_normal((n, h, w, c)),
        rng.standard_normal((*kernel, c // groups, o)),
        rng.standard_normal(o),
    )
    x, weight, bias = (Tensor(a, requires_grad=True) for a in arrays)
    y = conv2d(x, weight, bias, stride, padding, dilation, groups)
    grad = rng.standard_normal(y.shape)
    y.backward(grad)
    expected, to_x, to_weight = reference(
        x.data, weight.data, grad, stride, padding, dilation, groups
    )
    np.testing.assert_allclose(y.data, expected + bias.data, atol=1e-12)
    np.testing.assert_allclose(x.grad, to_x, atol=1e-12)
    np.testing.assert_allclose(weight.grad, to_weight, atol=1e-12)
    np.testing.assert_allclose(bias.grad, grad.sum((0, 1, 2)), atol=1e-12)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 3)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (3, 0)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_against_loops(kernel, stride, padding, dilation, groups):
    """Every option with every other, different for rows and columns; borders wider than the kernel
    are among them.
    """
    compare((2, 5, 6, 2, 4), kernel, stride, padding, dilation, groups)


@pytest.mark.parametrize(
    "sizes, kernel, padding, groups",
    [
        ((1, 3, 4, 1, 2), (3, 4), (0, 0), 1),  # the kernel is the whole image
        ((1, 2, 2, 1, 1), (5, 5), (2, 2), 1),  # the kernel is larger than the image
        ((2, 4, 4, 3, 3), (3, 3), (1, 1), 3),  # each channel alone
        ((0, 4, 4, 3, 3), (3, 3), (1, 1), 3),  # the same without images
        ((2, 3, 5, 3, 3), (1, 12), (0, 4), 3),  # elements that see the border alone
        ((2, 4, 4, 2, 6), (3, 3), (1, 1), 2),  # each channel alone, made into three
        ((3, 1, 1, 2, 2), (1, 1), (0, 0), 1),  # single pixels
        ((0, 4, 4, 2, 2), (3, 3), (1, 1), 1),  # no images
    ],
)
def test_corners(sizes, kernel, padding, groups):
    """Sizes at the edge of what works."""
    compare(sizes, kernel, (1, 1), padding, (1, 1), groups)
    compare(sizes, kernel, (2, 2), padding, (1, 1), groups)


@pytest.mark.parametrize("images_each", [1, 2, 3, 100])
def test_blocks_of_images(images_each, monkeypatch):
    """However many images' columns are made at a time, and when the last block is shorter."""
    monkeypatch.setattr(im2col, "COLUMNS_BYTES", images_each * 4 * 4 * 9 * 2 * 8)
    compare((5, 4, 4, 2, 2), (3, 3), (1, 1), (1, 1), (1, 1), 1)


@pytest.mark.parametrize("elements", [1, 20, 50, 10**6])
@pytest.mark.parametrize("stride", [(1, 1), (2, 1)])
def test_blocks_and_strips_of_each_channel_alone(elements, stride, monkeypatch):
    """A row at a time, some rows of an image, some images, all of them; with a kernel of two
    sizes.
    """
    monkeypatch.setattr(depthwise, "ELEMENTS", elements)
    compare((5, 6, 4, 3, 3), (2, 3), stride, (1, 2), (2, 1), 3)


@pytest.mark.parametrize(
    "kernel, stride, padding, extra, dilation, groups, size",
    [
        ((3, 2), (1, 1), (0, 0), (0, 0), (1, 1), 1, (6, 4)),
        ((4, 4), (2, 2), (1, 1), (0, 0), (1, 1), 2, (8, 6)),
        ((3, 2), (2, 3), (1, 0), (1, 2), (2, 1), 2, (10, 10)),
    ],
)
def test_a_transposed_convolution_is_the_gradient_of_the_images(
    kernel, stride, padding, extra, dilation, groups, size
):
    """Of (2, 4, 3, 4) images, against loops; a larger result by output_padding."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 4, 3, 4)), rng.standard_normal((*kernel, 6 // groups, 4))
    bias = rng.standard_normal(6)
    y = conv_transpose2d(*map(Tensor, (x, weight, bias)), stride, padding, extra, dilation, groups)
    assert y.shape == (2, *size, 6)
    _, expected, _ = reference(np.zeros(y.shape), weight, x, stride, padding, dilation, groups)
    np.testing.assert_allclose(y.data, expected + bias, atol=1e-12)
