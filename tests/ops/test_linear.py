"""The linear operation and the embedding: one parameter in two places, and repeated rows."""

import numpy as np
import pytest

from nnmpi import Tensor, ops


def test_linear_is_x_times_w_plus_b():
    """For leading axes of any kind, and a single row."""
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((3, 2)), rng.standard_normal(2)
    for leading in ((), (4,), (4, 5), (0,), (2, 0)):
        x = rng.standard_normal((*leading, 3))
        y = ops.linear(Tensor(x), Tensor(weight), Tensor(bias))
        np.testing.assert_allclose(y.data, x @ weight + bias, rtol=1e-13)


def test_a_tied_embedding():
    """One table to read words and to score them."""
    rng = np.random.default_rng(0)
    table = Tensor(rng.standard_normal((4, 3)), requires_grad=True)
    table.buffer = table.data * np.nan
    words = np.array([1, 1, 3])
    grad = rng.standard_normal((3, 4))
    ops.linear(ops.embedding(table, words), table.T).backward(grad)
    expected = grad.T @ table.data[words]
    np.add.at(expected, words, grad @ table.data)
    np.testing.assert_allclose(table.grad, expected)


@pytest.mark.parametrize("features", [2, 200])
def test_repeated_rows_get_every_gradient(features):
    """As many times as they are picked; the others get zeros, also where old values lay in the
    buffer.
    """
    table = Tensor(np.zeros((4, features)), requires_grad=True)
    table.buffer = table.data * np.nan
    ops.embedding(table, [[0, 2], [2, 2]]).sum().backward()
    np.testing.assert_array_equal(table.grad, np.outer([1, 0, 3, 0], np.ones(features)))
    assert table.grad is table.buffer


def test_indices_of_any_kind():
    """Lists, tensors, any integers, none at all."""
    table = Tensor(np.arange(6.0).reshape(3, 2))
    for indices in ([2, 0], Tensor([2, 0]), np.array([2, 0], "uint8")):
        np.testing.assert_array_equal(ops.embedding(table, indices).data, [[4, 5], [0, 1]])
    assert ops.embedding(table, np.zeros((0, 3), int)).shape == (0, 3, 2)
    assert ops.embedding(table, 1).shape == (2,)
