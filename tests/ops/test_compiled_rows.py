"""Normalization over the features and GELU by compiled kernels: float64's numbers, where kernels fit and where not."""

import numpy as np
import pytest

import nnmpi
from nnmpi import nn, ops
from nnmpi.backend.kernels import attention
from nnmpi.backend.kernels.lookup import jit, kernels_for
from nnmpi.ops.lstm import lstm
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor

pytest.importorskip("numba")

pytestmark = pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")

CASES = {
    "layer_norm": (lambda x, a, b: ops.layer_norm(x, a, b, 0.1), lambda n: [(n,), (n,)]),
    "gelu": (lambda x: ops.gelu(x, "tanh"), lambda n: []),
    "linear_gelu": (lambda x, w, b: ops.linear_gelu(x, w, b, "tanh"), lambda n: [(n, 3), (3,)]),
    "linear_gelu without bias": (lambda x, w: ops.linear_gelu(x, w, None, "tanh"), lambda n: [(n, 3)]),
    "exact gelu": (ops.gelu, lambda n: []),
    "exact linear_gelu": (ops.linear_gelu, lambda n: [(n, 3), (3,)]),
}


def run(function, arrays, grad, wanted=None):
    """Return the result and the gradients."""
    leaves = [Tensor(a, requires_grad=wanted is None or i == wanted) for i, a in enumerate(arrays)]
    y = function(*leaves)
    y.backward(grad)
    return [y.data, *[leaf.grad for leaf in leaves]]


def draw(name, size):
    """Return a case's function, float32 arrays and the result's gradient."""
    function, shapes = CASES[name]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in (size, *shapes(size[-1]))]
    shape = (*size[:-1], 3) if "linear" in name else size
    return function, arrays, rng.standard_normal(shape).astype("float32")


@pytest.mark.parametrize("size", [(4, 6), (1, 1), (0, 5), (2, 3, 17), (60, 33), (5,)])
@pytest.mark.parametrize("name", CASES)
def test_float64_says_the_same(name, size, compiled_calls):
    """Within 2e-6 of the largest, and which of them is compiled; without gradients too."""
    function, arrays, grad = draw(name, size)
    exact = run(function, [a.astype("float64") for a in arrays], grad.astype("float64"))
    with jit():
        ours = run(function, arrays, grad)
        with no_grad():
            np.testing.assert_array_equal(function(*map(Tensor, arrays)).data, ours[0])
        assert bool(compiled_calls) == (name != "exact gelu")  # of the exact linear_gelu the gradient is
        compiled_calls.clear()
        run(function, [a.astype("float64") for a in arrays], grad.astype("float64"))
    assert compiled_calls == []
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * max(1, abs(other).max(initial=0)))


@pytest.mark.parametrize("name", CASES)
def test_gaps_and_single_gradients(name):
    """Arrays with gaps between their elements, of which any one alone needs a gradient."""
    function, arrays, grad = draw(name, (7, 10))
    gaps = [np.repeat(a, 2, axis=-1)[..., ::2] for a in arrays]
    wide = np.repeat(grad, 2, axis=-1)[..., ::2]
    with jit():
        whole = run(function, arrays, grad)
        for wanted in range(len(arrays)):
            ours = run(function, gaps, wide, wanted)
            np.testing.assert_array_equal(ours[0], whole[0])
            assert [each is None for each in ours[1:]] == [i != wanted for i in range(len(arrays))]
            np.testing.assert_allclose(ours[1 + wanted], whole[1 + wanted], rtol=1e-5, atol=1e-6)


def test_gradients_in_their_place():
    """Parameters' gradients are computed in flat storage; several backward passes add up; a compiled step replays."""
    x = np.random.default_rng(0).standard_normal((2, 5, 12)).astype("float32")
    model = nn.TransformerBlock(12, 3).initialize(seed=0)

    def gradients(times):
        model.zero_grad()
        for _ in range(times):
            model(x).sum().backward()
        return {name: p.grad.copy() for name, p in model.named_parameters()}

    with jit():
        once, twice = gradients(1), gradients(2)

        def step(x):
            model.zero_grad()
            y = model(x).sum()
            y.backward()
            return y

        compiled = nnmpi.compile(step)
        compiled(0 * x)
        compiled(x)
        replayed = {name: p.grad.copy() for name, p in model.named_parameters()}
    plain = gradients(1)
    for name in plain:
        np.testing.assert_allclose(twice[name], 2 * once[name], rtol=1e-6)
        np.testing.assert_array_equal(replayed[name], once[name])
        np.testing.assert_allclose(once[name], plain[name], rtol=0, atol=2e-6 * max(1, abs(plain[name]).max()))


def test_infinite_variance_is_nan():
    """As in plain code, in the row alone."""
    x = Tensor(np.array([[1, 2, 3, 4], [1, 2, 1e30, 4], [-3e38, 3e38, 0, 1]], "float32"), requires_grad=True)
    ones = Tensor(np.ones(4, "float32"))
    with jit():
        y = ops.layer_norm(x, ones, ones)
        y.backward(np.ones((3, 4), "float32"))
    for found in (y.data, x.grad):
        np.testing.assert_array_equal(np.isnan(found), np.array([[False], [True], [True]]) & np.ones(4, bool))


def test_nan_is_not_hidden():
    """It comes out in its row, or its element."""
    x = np.zeros((3, 4), "float32")
    x[1, 2] = np.nan
    ones = Tensor(np.ones(4, "float32"))
    with jit():
        np.testing.assert_array_equal(np.isnan(ops.gelu(Tensor(x), "tanh").data), np.isnan(x))
        assert np.isnan(ops.layer_norm(Tensor(x), ones, ones).data).any(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("time", [1, 64, 150, 300])
def test_attention(time, causal, compiled_calls, monkeypatch):
    """In blocks and bands that do not divide; scores are large."""
    monkeypatch.setattr(attention, "ELEMENTS", 2**14)
    rng = np.random.default_rng(time)
    qkv, grad = (rng.standard_normal((3, time, width)).astype("float32") * 2 for width in (45, 15))
    exact = run(lambda x: ops.attention(x, 3, causal), [qkv.astype("float64")], grad.astype("float64"))
    with jit():
        ours = run(lambda x: ops.attention(x, 3, causal), [qkv], grad)
        with no_grad():
            np.testing.assert_array_equal(ops.attention(Tensor(qkv), 3, causal).data, ours[0])
    assert compiled_calls
    for one, other in zip(ours, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-6 * abs(other).max())


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
        kernels_for(x).lstm_step(np, gates, np.zeros_like(gates), zeros, zeros.copy(), zeros.copy())
    np.testing.assert_allclose(gates[0, -x.size :], np.tanh(x.astype("float64")), rtol=4e-7)
