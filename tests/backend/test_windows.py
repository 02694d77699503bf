"""Windows, borders and taps against plain indexing."""

import itertools

import numpy as np
import pytest

from nnmpi.backend.windows import bordered, out_size, tap, windows

X = np.random.default_rng(0).standard_normal((2, 7, 6, 3))


@pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (3, 3)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
@pytest.mark.parametrize("order", ["C", "F", "reversed", "sliced"])
def test_windows_and_taps(kernel, stride, dilation, order):
    """Each element is the one that the definition names, whatever the strides of x, and none is copied."""
    x = {"C": X, "F": np.asfortranarray(X), "reversed": X[:, ::-1, ::-1], "sliced": np.repeat(X, 2, 2)[:, :, ::2]}[
        order
    ]
    view = windows(x, kernel, stride, dilation)
    out = tuple(out_size(s, k, t, 0, d) for s, k, t, d in zip(x.shape[1:3], kernel, stride, dilation, strict=True))
    assert view.shape == (2, *out, *kernel, 3)
    assert np.shares_memory(view, x)
    for i, j, a, b in itertools.product(*map(range, (*out, *kernel))):
        expected = x[:, i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]]
        np.testing.assert_array_equal(view[:, i, j, a, b], expected)
        np.testing.assert_array_equal(tap(x, (a, b), out, stride, dilation)[:, i, j], expected)


def test_windows_of_nothing():
    """No images, or no channels."""
    assert windows(np.zeros((0, 5, 5, 2)), (3, 3), (1, 1)).shape == (0, 3, 3, 3, 3, 2)
    assert windows(np.zeros((2, 5, 5, 0)), (3, 3), (1, 1)).shape == (2, 3, 3, 3, 3, 0)


def test_out_size():
    """As many windows as can be counted."""
    for size, kernel, stride, padding, dilation in itertools.product(
        range(1, 7), range(1, 4), (1, 2, 3), (0, 1), (1, 2)
    ):
        last = size + 2 * padding - dilation * (kernel - 1) - 1
        starts = range(0, last + 1, stride)
        assert max(out_size(size, kernel, stride, padding, dilation), 0) == len(starts)


def test_borders():
    """The value around, the images inside; without a border the same array."""
    wide = bordered(X, (1, 2), -5.0)
    assert wide.shape == (2, 9, 10, 3)
    np.testing.assert_array_equal(wide[:, 1:-1, 2:-2], X)
    assert (wide.sum() - X.sum()) == pytest.approx(-5 * (wide.size - X.size))
    assert bordered(X, (0, 0)) is X
    assert bordered(X.astype("float32"), (1, 0)).dtype == np.float32
