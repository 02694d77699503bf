"""Sums over many rows in float32 keep their digits: one long sum of 100,000 equal numbers would be
off by 5e-4.
"""

import numpy as np
import pytest

from nnmpi import Tensor, nn, ops
from nnmpi.backend.sums import ROWS, row_sum
from nnmpi.nn import training

pytestmark = pytest.mark.host_only(
    "NumPy's long sums are cut into blocks; a device's threads add up parts"
)

COUNT = 100_000
VALUE = np.float32(0.1)
CLOSE = 1e-5  # relative

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (COUNT, 4)),
    "layer norm": (lambda: nn.LayerNorm(8), (COUNT, 8)),
    "batch norm": (lambda: nn.BatchNorm(8), (COUNT, 8)),
    "convolution": (lambda: nn.Conv2d(4, 3, 3), (70, 40, 40, 4)),
}


def tenths(*shape):
    """Return a tensor full of 0.1."""
    return Tensor(np.full(shape, VALUE), requires_grad=True)


def exact(count, power=1):
    """Return the sum of so many powers of the value."""
    return count * float(VALUE) ** power


@pytest.mark.parametrize("name", LAYERS)
def test_a_bias_gradient_over_many_rows(name):
    make, shape = LAYERS[name]
    layer = make()
    layer.initialize(seed=1)
    with training():
        y = layer(tenths(*shape))
    y.backward(tenths(*y.shape).data)
    np.testing.assert_allclose(layer.bias.grad, exact(y.size // y.shape[-1]), rtol=CLOSE)


@pytest.mark.parametrize(
    "reduce, expected",
    [
        (lambda x: x.sum(axis=0), exact(COUNT)),
        (lambda x: x.mean(axis=0), exact(1)),
        (lambda x: x.sum(), exact(3 * COUNT)),
        (lambda x: ops.mse(x, np.zeros(x.shape, np.float32)), exact(1, 2)),
    ],
    ids=["sum of rows", "mean of rows", "sum", "mse"],
)
def test_a_result_over_many_rows(reduce, expected):
    np.testing.assert_allclose(reduce(tenths(COUNT, 3)).data, expected, rtol=CLOSE)


def test_the_gradient_of_what_was_broadcast():
    x, shift = tenths(COUNT, 3), tenths(3)
    y = x + shift
    y.backward(x.data)
    np.testing.assert_allclose(shift.grad, exact(COUNT), rtol=CLOSE)


@pytest.mark.parametrize("count", [0, 1, ROWS, ROWS + 1, 3 * ROWS, 3 * ROWS + 7])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_blocks_of_rows(count, dtype):
    a = np.random.default_rng(count).normal(size=(count, 5)).astype(dtype)
    close = {"rtol": 0, "atol": 1e-4 if dtype == "float32" else 1e-12}
    np.testing.assert_allclose(row_sum(a), a.sum(0, dtype="float64"), **close)
    np.testing.assert_allclose(row_sum(a[:, ::2]), a[:, ::2].sum(0, dtype="float64"), **close)
