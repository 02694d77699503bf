"""Windows, borders and taps against plain indexing."""

import itertools

import numpy as np
import pytest

from nnmpi.backend.windows import out_size, tap, windows

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
