"""Activations by oneDNN: NumPy's values and gradients, in all cases in which they are chosen."""

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, ops
from nnmpi.backend import kernels, onednn
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.onednn_kernels import FEWEST, OnednnKernels

pytestmark = [
    pytest.mark.host_only("the processor's functions"),
    pytest.mark.skipif(onednn.find().library is None, reason=f"oneDNN {onednn.find().reason}"),
]
FORMS = {
    "gelu": ops.gelu,
    "gelu tanh": lambda x: ops.gelu(x, "tanh"),
    "silu": ops.silu,
    "sigmoid": ops.sigmoid,
    "elu": lambda x: ops.elu(x, 0.7),
    "leaky_relu": lambda x: ops.leaky_relu(x, 0.2),
    "swiglu": lambda x: ops.swiglu(x, x * 0.5 + 1),
}
SHAPES = (131, 127), (FEWEST,), (3, 70, 81)


def draw(*shape, seed=0):
    """Return normal numbers, some of them large."""
    return 3 * np.random.default_rng([seed, *shape]).standard_normal(shape).astype("f4")


@pytest.fixture
def calls(monkeypatch):
    """Return a list of the library's calls."""
    made = []
    for name in ("activate", "activation_gradient"):
        function = getattr(onednn, name)

        def counted(*args, name=name, function=function):
            made.append(name)
            function(*args)

        monkeypatch.setattr(onednn, name, counted)
    return made


def both_passes(function, x, grad):
    """Return a function's values and the gradient of x."""
    x = Tensor(x, requires_grad=True)
    y = function(x)
    y.backward(grad)
    return y.numpy(), x.grad


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_float64(name, shape, calls):
    x, grad = draw(*shape), draw(*shape, seed=1)
    found = both_passes(FORMS[name], x, grad)
    assert set(calls) == {"activate", "activation_gradient"}
    calls.clear()
    exact = both_passes(FORMS[name], x.astype("f8"), grad.astype("f8"))
    assert not calls
    for ours, right in zip(found, exact, strict=True):
        assert ours.dtype == np.float32
        assert np.abs(ours - right).max() < 5e-7 * np.abs(right).max()


@pytest.mark.parametrize("name", FORMS)
def test_rows_and_strides_change_no_bit(name):
    """Shards have the whole array's bits, and so has a view that is not contiguous."""
    x, grad = draw(300, 200), draw(300, 200, seed=1)
    whole = both_passes(FORMS[name], x, grad)
    for part in (slice(0, 83), slice(83, 300)):
        for ours, right in zip(both_passes(FORMS[name], x[part], grad[part]), whole, strict=True):
            np.testing.assert_array_equal(ours, right[part])
    turned = both_passes(FORMS[name], np.asfortranarray(x), np.asfortranarray(grad))
    for ours, right in zip(turned, whole, strict=True):
        np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize("name", FORMS)
def test_large_numbers_are_as_by_numpy_and_nan_is_not_lost(name, monkeypatch):
    """What is infinite may become NaN, as PyTorch's GELU and SiLU of -infinity do."""
    x = draw(FEWEST)
    x[:6] = 1e6, -1e6, 0, np.inf, -np.inf, np.nan
    grad = np.ones_like(x)
    with np.errstate(invalid="ignore", over="ignore"):
        (y, to_x) = both_passes(FORMS[name], x, grad)
        monkeypatch.setattr(kernels, "_on_host", lambda: kernels.PLAIN)
        right, slope = both_passes(FORMS[name], x, grad)
    np.testing.assert_allclose(y[:3], right[:3], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(to_x[:3], slope[:3], rtol=1e-6, atol=1e-6)
    assert np.isnan(y[5])
    limits = y[3:5]
    np.testing.assert_allclose(limits[~np.isnan(limits)], right[3:5][~np.isnan(limits)], atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_replays_have_the_eager_bits(name):
    x, grad = draw(200, 100), draw(200, 100, seed=1)

    @nnmpi.compile
    def step(x, grad):
        leaf = Tensor(x.data, requires_grad=True)
        y = FORMS[name](leaf * 1)
        y.backward(grad.data)
        return y, Tensor(leaf.grad)

    for _ in range(3):
        for ours, right in zip(step(x, grad), both_passes(FORMS[name], x, grad), strict=True):
            np.testing.assert_array_equal(ours.numpy(), right)


def test_where_it_is_chosen():
    """For float32 on the host, where no kernels are compiled."""
    x = draw(FEWEST)
    assert type(kernels_of(x)) is OnednnKernels
    assert type(kernels_of(x.astype("f8"))) is not OnednnKernels
    with nnmpi.jit(False):
        assert type(kernels_of(x)) is OnednnKernels
    with nnmpi.jit():
        assert type(kernels_of(x)) is not OnednnKernels


def test_few_elements_are_numpys(calls):
    both_passes(ops.gelu, draw(FEWEST - 1), draw(FEWEST - 1))
    assert not calls


def test_simulated_ranks_at_once():
    x, grad = draw(200, 100), draw(200, 100, seed=1)
    right = both_passes(ops.gelu, x, grad)
    for found in nnmpi.simulate(lambda _: both_passes(ops.gelu, x, grad), ranks=3):
        for ours, expected in zip(found, right, strict=True):
            np.testing.assert_array_equal(ours, expected)
