"""Normalization over the features and GELU by compiled kernels: float64's numbers, where kernels fit and where not."""

import numpy as np
import pytest

from nnmpi.backend.kernels import jit, kernels_for
from nnmpi.ops.lstm import lstm
from nnmpi.tensor.tensor import Tensor

pytest.importorskip("numba")

pytestmark = pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")


def run(function, arrays, grad, wanted=None):
    """Return the result and the gradients."""
    leaves = [Tensor(a, requires_grad=wanted is None or i == wanted) for i, a in enumerate(arrays)]
    y = function(*leaves)
    y.backward(grad)
    return [y.data, *[leaf.grad for leaf in leaves]]


@pytest.mark.parametrize("lengths", [None, [1, 4, 3]])
def test_lstm(lengths):
    """Forward and backward, with gates near their ends, and sequences of several lengths; by other bits than NumPy."""
    rng = np.random.default_rng(0)
    shapes = (3, 4, 5), (5, 24), (6, 24), (24,)
    arrays = [rng.standard_normal(shape).astype("float32") * 2 for shape in shapes]
    grad = rng.standard_normal((3, 4, 6)).astype("float32")

    def function(*leaves):
        return lstm(*leaves, lengths=None if lengths is None else np.array(lengths))

    exact = run(function, [a.astype("float64") for a in arrays], grad.astype("float64"))
    with jit():
        ours = run(function, arrays, grad)
    plain = run(function, arrays, grad)
    assert not np.array_equal(ours[0], plain[0]) and not np.array_equal(ours[1], plain[1])
    for one, other in zip(ours, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-6 * abs(other).max())


def test_tanh():
    """Within 3 units of the last place of float64's, near 0 and far from it."""
    x = np.float32([0.0, -0.0, 1e-20, 3e-4, -0.1, 0.62, 0.63, -1.5, 5.0, -9.0, 50.0, np.inf, -np.inf, np.nan])
    gates = np.zeros((1, 4 * x.size), np.float32)
    gates[0, -x.size :] = x
    zeros = np.zeros((1, x.size), np.float32)
    with jit():
        kernels_for(x, "lstm_step").lstm_step(gates, np.zeros_like(gates), zeros, zeros.copy(), zeros.copy())
    np.testing.assert_allclose(gates[0, -x.size :], np.tanh(x.astype("float64")), rtol=4e-7)
