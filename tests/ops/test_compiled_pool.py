"""Pooling by compiled kernels gives what the plain pooling does, bit for bit."""

import numpy as np
import pytest

from nnmpi.backend.kernels.lookup import jit
from nnmpi.ops.pool import max_pool2d
from nnmpi.tensor.tensor import Tensor

pytest.importorskip("numba")
pytestmark = pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")


def run(array, grad, compiled, **settings):
    """Return the result and the gradient."""
    x = Tensor(array, requires_grad=True)
    with jit(compiled):
        y = max_pool2d(x, 2, **settings)
        y.backward(grad)
    return y.data, x.grad


@pytest.mark.parametrize("shape", [(3, 6, 4, 5), (2, 7, 5, 17), (1, 2, 2, 1), (0, 4, 4, 2)])
def test_as_the_plain_one(shape, compiled_calls):
    """With many ties, rows and columns that are left over, and arrays with gaps."""
    n, h, w, c = shape
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (n, h, w, 2 * c)).astype(np.float32)[..., ::2]
    grad = rng.standard_normal((n, h // 2, w // 2, 2 * c), dtype=np.float32)[..., ::2]
    found = run(x, grad, True)
    assert compiled_calls == ["max_pool2", "max_pool2_grad"]
    expected = run(x, grad, False)
    assert len(compiled_calls) == 2
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("settings", [{"stride": 1}, {"padding": 1}])
def test_other_windows_are_plain(settings, compiled_calls):
    """Windows that overlap, and a border."""
    x = np.zeros((1, 4, 4, 1), np.float32)
    shape = max_pool2d(Tensor(x), 2, **settings).shape
    run(x, np.ones(shape, np.float32), True, **settings)
    run(x.astype(np.float64), np.ones((1, 2, 2, 1)), True)
    assert compiled_calls == []
