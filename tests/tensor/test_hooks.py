"""Hooks: called once in a pass, when a leaf's gradient is final."""

import numpy as np
import pytest

from nnmpi import Tensor
from nnmpi.tensor import Function


class Passes(Function):
    """x, whose backward notes its name."""

    def __init__(self, name, log, gives=True):
        self.name, self.log, self.gives = name, log, gives

    def forward(self, x):
        return x * 1.0

    def backward(self, grad):
        self.log.append(self.name)
        return (grad if self.gives else None,)


@pytest.fixture
def log():
    """Return the list in which a test notes what happens."""
    return []


@pytest.fixture
def leaves(log):
    """Return leaves a, b, c whose hooks note the name and the gradient's first element."""
    made = {}
    for name in "abc":
        x = made[name] = Tensor(np.array([1.0, 2.0]), requires_grad=True)
        x.hook = lambda leaf, name=name: log.append((name, float(leaf.grad[0])))
    return made.values()


def test_once_and_as_early_as_possible(leaves, log):
    """A layer's hook is called before the layers below it go backward."""
    a, b, c = leaves
    h = Passes("first", log)(a)
    h = Passes("second", log)(h * b)
    (h * c).sum().backward()
    assert log == [("c", 1), "second", ("b", 1), "first", ("a", 1)]


def test_used_twice(leaves, log):
    """Called after the last of its contributions, with their sum."""
    a, b, _ = leaves
    y = Passes("above", log)(Passes("below", log)(a * 1.0) * b)
    (y * 5.0 + b * 7.0).sum().backward()
    assert log == ["above", ("b", 12), "below", ("a", 5)]


def test_where_no_gradient_comes_at_all(leaves, log):
    """A leaf without a gradient has nothing to report; what its buffer holds is not this pass's."""
    a, b, _ = leaves
    (Passes("stops", log, gives=False)(a * 2.0) + b).sum().backward()
    assert log == [("b", 1), "stops"]
    assert a.grad is None


def test_graphs_that_meet(leaves, log):
    """Hooks of both are known after they have met, whichever tape was the longer one."""
    a, b, c = leaves
    plain = Tensor(np.ones(2), requires_grad=True)
    long = plain * 1.0 * 1.0 * 1.0
    ((a * 2.0) + long + (b * 3.0)).sum().backward()
    assert sorted(log) == [("a", 2), ("b", 3)]
    log.clear()
    (plain * 1.0 + c).sum().backward()
    assert log == [("c", 1)]
