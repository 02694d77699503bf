"""Activations and softmax: far from zero, and at NaN."""

import math

import numpy as np
import pytest

from nnmpi import Tensor, jit, ops
from nnmpi.backend.activations import FORMS
from nnmpi.backend.kernels import kernels_of
from nnmpi.tensor import maximum

FUNCTIONS = {
    "relu": (ops.relu, lambda x: max(x, 0.0)),
    "leaky_relu": (ops.leaky_relu, lambda x: x if x > 0 else 0.01 * x),
    "tanh": (ops.tanh, math.tanh),
    "sigmoid": (ops.sigmoid, lambda x: 1 / (1 + math.exp(-x)) if x > -700 else 0.0),
    "silu": (ops.silu, lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0),
    "gelu": (ops.gelu, lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2))),
    "gelu tanh": (
        lambda x: ops.gelu(x, "tanh"),
        lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
}


EACH_DTYPE = pytest.mark.parametrize("dtype", ["float32", "float64"])


@pytest.mark.parametrize("name", FUNCTIONS)
@EACH_DTYPE
def test_values(name, dtype):
    """What the standard library gives, from 0 to where the function is flat, without overflow on
    either side.
    """
    function, expected = FUNCTIONS[name]
    points = np.array([0.0, 1e-3, 0.5, 1, 3, 8, 30, 1e3, 1e4], dtype)
    x = Tensor(np.concatenate([points, -points]), requires_grad=True)
    y = function(x)
    exact = 1e-6 if dtype == "float32" else 1e-15
    np.testing.assert_allclose(
        y.data, [expected(float(v)) for v in x.data], rtol=4 * exact, atol=4 * exact
    )
    y.sum().backward()
    assert np.isfinite(x.grad).all()


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu tanh"])
@EACH_DTYPE
def test_slope_far_out(name, dtype):
    """It is 0 or 1, and the value 0 or x, as long as the square of x is finite."""
    points = np.array([1e3, 1e10, 1e13, 1e15, 1e19], dtype)
    x = Tensor(np.concatenate([points, -points]), requires_grad=True)
    with np.errstate(over="ignore"):  # of the cube
        y = FUNCTIONS[name][0](x)
    y.backward(np.ones(10, dtype))
    np.testing.assert_allclose(y.data, np.where(x.data > 0, x.data, 0), rtol=0, atol=1e-36)
    np.testing.assert_allclose(x.grad, x.data > 0, rtol=0, atol=1e-36)


@pytest.mark.parametrize("name", ["silu", "gelu"])
@EACH_DTYPE
@pytest.mark.parametrize("compiled", [False, True])
def test_digits_of_small_tails(name, dtype, compiled):
    """Far below 0 values have a relative error of 1e-3 in float32, of 1e-9 in float64."""
    if compiled:
        pytest.importorskip("numba")
    function, expected = FUNCTIONS[name]
    x = np.array([-2.0, -3, -4.5, -6 if name == "gelu" else -16], dtype)
    with jit(compiled):
        y = function(Tensor(x)).data
    limit = 1e-3 if dtype == "float32" else 1e-9
    np.testing.assert_allclose(y, [expected(float(v)) for v in x], rtol=limit)


ALIKE = {
    f"{form.name} {kind}": (formula, form)
    for form in FORMS
    for kind, formula in (("forward", form.forward), ("backward", form.backward))
    if getattr(formula, "rounds_alike", False)
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_rounds_alike_has_the_same_bits_in_loops(name):
    """So that few elements may be left to NumPy: on numbers of every size and sign."""
    pytest.importorskip("numba")
    formula, form = ALIKE[name]
    bits = np.random.default_rng(0).integers(0, 2**32, (2, 2**14), "u4")
    x, y = (item.view("f4").reshape(64, 256) for item in bits)
    given = (x,) if formula is form.forward else (x, y)
    with np.errstate(all="ignore"), jit(True):
        kernels = kernels_of(x)
        assert kernels.found(formula, (*given, *form.settings), (), False) is not None
        (loop,) = kernels.rows(formula, *given, *form.settings)
        (plain,) = formula(*given, *form.settings)
    np.testing.assert_array_equal(loop, plain)


def test_kinks():
    """The derivative at 0 is that of the negative side."""
    for function, expected in (
        (ops.relu, [0, 0, 1]),
        (lambda x: ops.leaky_relu(x, 0.5), [0.5, 0.5, 1]),
    ):
        x = Tensor(np.array([-1.0, 0.0, 1.0]), requires_grad=True)
        function(x).sum().backward()
        np.testing.assert_array_equal(x.grad, expected)


@pytest.mark.parametrize(
    "function",
    [
        ops.relu,
        lambda x: ops.conv_relu_pool(x.reshape(1, 1, 3, 1), Tensor(np.ones((1, 1, 1, 1))), pool=1),
        lambda x: x.clip(0),
        lambda x: maximum(x, 0.0),
    ],
)
def test_infinite_gradient(function):
    """Where a derivative is 0 the gradient is 0, also that of the square root at 0."""
    x = Tensor(np.array([[-1.0, -2.0, 4.0]]), requires_grad=True)
    with np.errstate(divide="ignore"):
        function(x).sqrt().sum().backward()
    assert x.grad.tolist() == [[0, 0, 0.25]]


@EACH_DTYPE
def test_softmax_of_large_logits(dtype):
    """At 1e4 it is 0 or 1, its logarithm -2e4 or 0, and gradients are finite; rows add up to 1."""
    for function, expected in (
        (ops.softmax, [[1, 0], [0.5, 0.5]]),
        (ops.log_softmax, [[0, -2e4], [-math.log(2)] * 2]),
    ):
        x = Tensor(np.array([[1e4, -1e4], [-1e4, -1e4]], dtype), requires_grad=True)
        y = function(x)
        np.testing.assert_allclose(y.data, expected, rtol=1e-6)
        (y * np.array([1, 2], dtype)).sum().backward()
        assert np.isfinite(x.grad).all()
    rng = np.random.default_rng(0)
    y = ops.softmax(Tensor(rng.standard_normal((3, 4, 5)).astype(dtype)), 1)
    np.testing.assert_allclose(y.data.sum(1), np.ones((3, 5)), rtol=1e-6)


def test_a_number_stays_a_number():
    """A slope, which has an axis, gives none to a result or a gradient."""
    x, slope = Tensor(np.float32(-3), requires_grad=True), Tensor(np.float32([0.25]), True)
    y = ops.prelu(x, slope)
    y.backward(np.float32(2))
    assert y.shape == () and y.numpy() == -0.75
    assert (x.grad, slope.grad.tolist()) == (0.5, [-6])
