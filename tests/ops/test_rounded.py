"""bf16 on the host: each operand of a product is rounded by itself, in both passes, and nothing
else; by oneDNN, and by NumPy where there is none.
"""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, nn, ops
from nnmpi.backend import gemm, onednn
from nnmpi.backend.precision import round_to_bfloat16, use_precision
from nnmpi.models import gpt

pytestmark = pytest.mark.host_only("a device's activations are bfloat16")


def rounded(x):
    """Return float32 values rounded to bfloat16."""
    with np.errstate(invalid="ignore", over="ignore"):
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def draw(*shape):
    """Return normal numbers."""
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def test_rounding_is_to_the_nearest_even():
    """Of numbers of any size, infinities, what is none, and halves of the last bit."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[:1000] = bits[:1000] & 0xFFFF0000 | 0x8000
    bits[1000:1004] = 0x7FFFFFFF, 0x7F7FFFFF, 0x7F800000, 0x80000000
    x = bits.view(np.float32)
    x = x[(np.abs(x) > 1e-37) | (x == 0) | np.isnan(x)]  # units take smaller ones for 0
    np.testing.assert_array_equal(round_to_bfloat16(x), rounded(x))
    for part in (x[:1000], x[1000:1003]):  # which NumPy rounds
        np.testing.assert_array_equal(round_to_bfloat16(part), rounded(part))


@pytest.fixture(params=["here", "NumPy"])
def means(request, monkeypatch):
    """Multiply by what is here, or by NumPy as if there was nothing."""
    if request.param == "NumPy":
        monkeypatch.setattr(onednn, "installed", lambda: None)
    monkeypatch.setattr(gemm, "LOW", 0)


def passes(function, *inputs, mode="bf16"):
    """Return a function's result and the gradients of its inputs."""
    given = [Tensor(x, requires_grad=True) for x in inputs]
    with use_precision(mode):
        y = function(*given)
    y.backward(draw(*y.shape))  # outside of the block: an operation keeps its mode
    assert all(item.dtype == np.float32 for item in (y, *(x.grad for x in given)))
    return [y.numpy(), *(x.grad for x in given)]


X, W, B = draw(37, 20), draw(20, 24), draw(24)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w, b: ops.linear(x, w, b),
        lambda x, w, b: ops.linear_transposed(x, w.T) + b,
        lambda x, w, b: x @ w + b,
        lambda x, w, b: (x.reshape(37, 1, 20) @ w.reshape(1, 20, 24)).reshape(37, 24) + b,
        lambda x, w, b: ops.conv2d(x.reshape(37, 1, 1, 20), w.reshape(1, 1, 20, 24), b).reshape(
            37, 24
        ),
        lambda x, w, b: ops.conv_transpose2d(
            x.reshape(37, 1, 1, 20), w.T.reshape(1, 1, 24, 20), b
        ).reshape(37, 24),
    ],
    ids=["linear", "transposed", "matmul", "stacks", "conv2d", "conv_transpose2d"],
)
def test_operands_are_rounded_in_both_passes(means, product):
    y, to_x, to_w, to_b = passes(product, X, W, B)
    d = draw(37, 24)
    near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    near(y, rounded(X) @ rounded(W) + B)
    near(to_x, rounded(d) @ rounded(W).T)
    near(to_w, rounded(X).T @ rounded(d))
    near(to_b, d.sum(0))
    assert np.abs(y - (X @ W + B)).max() > 1e-3  # which the tolerance tells apart


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(means, layer):
    """The gates' products are rounded, the states are not: as steps of linear layers are."""
    model = layer(5, 6).initialize(seed=0)
    x = draw(3, 1, 5)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data[...] = draw(*parameter.shape)
    with use_precision("bf16"):
        low = model(Tensor(x))
    low = low[0] if isinstance(low, tuple) else low
    for parameter in parameters.values():
        if parameter.ndim == 2:
            parameter.data[...] = rounded(parameter.data)
    exact = model(Tensor(rounded(x)))
    exact = exact[0] if isinstance(exact, tuple) else exact
    np.testing.assert_allclose(low.numpy(), exact.numpy(), rtol=1e-5, atol=1e-5)


def test_experts(means):
    """Their rows and weights are rounded; NumPy's and oneDNN's results are the same."""
    with use_precision("bf16"):
        assert np.isfinite(_loss_of_experts())
    assert abs(_loss_of_experts() - _in_bf16(_loss_of_experts)) > 1e-6


def _in_bf16(function):
    with use_precision("bf16"):
        return function()


def _loss_of_experts():
    model = gpt(11, 8, features=16, layers=1, heads=2, experts=4, top_k=2).initialize(seed=0)
    tokens = np.arange(24).reshape(3, 8) % 11
    return ops.cross_entropy(model(tokens), tokens).item()


def test_the_means_differ_by_float32_sums_alone(monkeypatch):
    """A network with all kinds of products, its loss and gradients."""

    def step():
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.Flatten(),
            nn.Linear(16 * 7 * 7, 32), nn.Tanh(), nn.Linear(32, 10),
        ).initialize(seed=0)  # fmt: skip
        with use_precision("bf16"):
            loss = ops.cross_entropy(model(Tensor(draw(32, 16, 16, 3))), np.arange(32) % 10)
            loss.backward()
        return loss.item(), [parameter.grad.copy() for parameter in model.parameters()]

    loss, grads = step()
    monkeypatch.setattr(onednn, "installed", lambda: None)
    by_numpy, others = step()
    assert abs(loss - by_numpy) < 1e-5
    for ours, theirs in zip(grads, others, strict=True):
        assert np.abs(ours - theirs).max() <= 2e-3 * np.abs(theirs).max()


def test_a_replay_has_the_eager_bits(means):
    """Of a convolution, a recurrent layer, experts' products and a linear layer in one step; the
    block is within the step or around it.
    """
    conv, rnn, last = nn.Conv2d(2, 4, 3), nn.LSTM(24, 12), nn.Linear(12, 3)
    model = nn.Sequential(conv, rnn, last).initialize(seed=0)

    def step(x):
        with use_precision("bf16"):
            y = conv(x)
            y = rnn(y.reshape(len(x), y.shape[1], 24))
            y = y[0] if isinstance(y, tuple) else y
            loss = (last(y) ** 2).sum()
            loss.backward()
        return loss

    compiled, seen = nnmpi.compile(step), []
    for function in (step, compiled, compiled, compiled, compiled):
        model.zero_grad()
        value = function(draw(4, 8, 8, 2)).item()
        seen.append((value, *(parameter.grad.tobytes() for parameter in model.parameters())))
    assert all(item == seen[0] for item in seen)
    assert compiled.recordings and not compiled.refusal
