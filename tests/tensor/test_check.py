"""The gradient check finds what is wrong, and does not pass where there is nothing to check."""

import numpy as np
import pytest

from nnmpi import Tensor
from nnmpi.base.errors import DtypeError
from nnmpi.tensor import Function, GradientError, check_gradients
from tests.harness.refusals import refuses


class Scaled(Function):
    """3 x, with a derivative that may be wrong by a factor or missing."""

    def __init__(self, derivative):
        self.derivative = derivative

    def forward(self, x):
        return 3 * x

    def backward(self, grad):
        return (None if self.derivative is None else self.derivative * grad,)


X = np.array([[1.0, -2.0], [30.0, 0.0]])


def test_a_right_derivative_passes():
    """Also of several inputs, with any strides, of which some have no influence."""
    check_gradients(lambda x: Scaled(3.0)(x), [X])
    check_gradients(lambda x, y, z: (x * y).exp() * 0.1 + y, [X.T / 10, X[::-1, ::-1] / 10, X])


@pytest.mark.parametrize("derivative", [3.001, -3.0, 0.0, None, np.nan])
def test_a_wrong_derivative_does_not(derivative):
    """The input, the element and both numbers are in the message."""
    refuses(
        GradientError,
        r"backward gives .* for input 0 element \(0, 0\) .* central differences",
        check_gradients,
        lambda x: Scaled(derivative)(x),
        [X],
    )


def test_one_wrong_element_is_found():
    """And named."""

    class Spoils(Scaled):
        def backward(self, grad):
            spoilt = 3 * grad
            spoilt[1, 0] *= 1.01
            return (spoilt,)

    refuses(
        GradientError,
        r"input 1 element \(1, 0\)",
        check_gradients,
        lambda x, y: x + Spoils(None)(y),
        [X, X],
    )


def test_a_step_is_no_pass():
    """A function that jumps has no derivative there, though both slopes beside it are 0."""
    refuses(
        GradientError,
        "no derivative",
        check_gradients,
        lambda x: Tensor(1.0 * (x.data > 0)) + x * 0.0,
        [np.array([0.0])],
    )


def test_float32_is_refused():
    """Differences of float32 are noise."""
    refuses(
        DtypeError,
        "input 1 is float32",
        lambda: check_gradients(lambda x, y: x, [X, X.astype("float32")]),
    )
