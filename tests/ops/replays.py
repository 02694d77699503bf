"""A recorded step gives, bit for bit, what the eager one gives."""

import numpy as np

import nnmpi
from nnmpi.tensor.tensor import Tensor


def check_replays(function, leaves, values):
    """Record a function of leaves, forward and backward, and compare its replays with it, for each list of arrays."""

    def step():
        for leaf in leaves:
            leaf.grad = None
        y = function(*leaves)
        y.backward(np.linspace(1, 2, y.size, dtype=y.dtype).reshape(y.shape))
        return y

    def run(function):
        return [function().data.copy(), *[None if leaf.grad is None else leaf.grad.copy() for leaf in leaves]]

    compiled = nnmpi.compile(step)
    compiled()
    for arrays in values:
        for leaf, array in zip(leaves, arrays, strict=True):
            leaf.data[...] = Tensor(array).data
        for replayed, eager in zip(run(compiled), run(step), strict=True):
            assert (replayed is None) == (eager is None)
            if eager is not None:
                np.testing.assert_array_equal(replayed, eager)
    assert compiled.recordings == 1
