"""Leaves and long graphs, of which the tests of the tape are made."""

import numpy as np

from nnmpi import Tensor


def leaf(values, dtype="float64"):
    """Return a leaf that wants a gradient."""
    return Tensor(np.array(values, dtype), requires_grad=True)


def chain(x, length):
    """Return x + 1 + 1 ..., `length` operations long."""
    for _ in range(length):
        x = x + 1.0
    return x
