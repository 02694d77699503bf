"""Long short-term memory: packed, padded and one by one; the state passed on."""

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, nn, ops
from nnmpi.base.errors import ShapeError
from tests.device.here import here

BATCH, TIME, INPUTS, FEATURES = 5, 7, 3, 4
LENGTHS = np.array([3, 7, 1, 7, 5])
DRAW = np.random.default_rng(0)
X = DRAW.standard_normal((BATCH, TIME, INPUTS))


def layer(**options):
    return nn.LSTM(INPUTS, FEATURES, num_layers=2, **options).initialize(1, "float64")


def run(model, x, lengths):
    """Return the result, and the gradients of some function of what is real of it."""
    model.zero_grad()
    y = model(Tensor(here(x)), lengths)
    weights = np.random.default_rng(3).standard_normal((TIME, y.shape[2]))[: x.shape[1]]
    (y * Tensor(here(np.broadcast_to(weights, y.shape).copy()))).sum().backward()
    return y.numpy(), [Tensor(p.grad).numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_and_one_by_one_are_the_same(bidirectional):
    """Results and gradients; NaN as padding is never read."""
    model, padded = layer(bidirectional=bidirectional), X.copy()
    for row, length in enumerate(LENGTHS):
        padded[row, length:] = np.nan
    y, grads = run(model, padded, LENGTHS)
    sums = [np.zeros_like(grad) for grad in grads]
    for row, length in enumerate(LENGTHS):
        alone, local = run(model, X[row : row + 1, :length], None)
        np.testing.assert_allclose(y[row, :length], alone[0], rtol=0, atol=1e-14)
        assert not y[row, length:].any()
        for total, grad in zip(sums, local, strict=True):
            total += grad
    for grad, total in zip(grads, sums, strict=True):
        np.testing.assert_allclose(grad, total, rtol=0, atol=1e-12)


def test_padding_behind_the_end_changes_nothing_forwards():
    """Without lengths: what comes later is not seen."""
    model = layer()
    assert np.array_equal(run(model, X, None)[0][:, :4], run(model, X[:, :4], None)[0])


@pytest.mark.parametrize("padded", [False, True])
def test_compiled(padded):
    """A recorded step replays with other values and other lengths."""
    model = layer(bidirectional=True)

    def eager(x, lengths):
        model.zero_grad()
        loss = (model(x, lengths) ** 2).sum()
        loss.backward()
        return loss

    step = nnmpi.compile(eager)
    for turn, scale in enumerate((1.0, 0.5, 2.0, 0.3)):
        x, lengths = Tensor(here(scale * X)), np.roll(LENGTHS, turn) if padded else None
        result = step(x, lengths).item()
        grads = [Tensor(p.grad).numpy().copy() for p in model.parameters()]
        assert result == eager(x, lengths).item()
        assert all(
            np.array_equal(a, Tensor(p.grad).numpy())
            for a, p in zip(grads, model.parameters(), strict=True)
        )
    assert step.recordings == 1 and not step.refusal
    if padded:
        with pytest.raises(ShapeError, match=r"length 8 of sequence 1 is outside 1\.\.7"):
            step(x, LENGTHS + 1)


@pytest.mark.parametrize("shorter", [True, False])
def test_compiled_with_constant_lengths(shorter):
    """On a device they are copied from the host, so no graph contains the operation."""
    one, lengths = layer().layers[0], here(LENGTHS) if shorter else None

    @nnmpi.compile
    def step(x):
        one.weight.grad = None
        y = ops.lstm(x, one.weight, one.recurrent, one.bias, lengths=lengths, ends=True)
        (y * y).sum().backward()
        return y

    for scale in (1.0, 0.5, 2.0, 3.0):
        x = Tensor(here(scale * X))
        y, grad = step(x).numpy(), Tensor(one.weight.grad).numpy().copy()
        one.weight.grad = None
        right = ops.lstm(x, one.weight, one.recurrent, one.bias, lengths=lengths, ends=True)
        (right * right).sum().backward()
        assert np.array_equal(y, right.numpy())
        assert np.array_equal(grad, Tensor(one.weight.grad).numpy())
    assert step.refusal == ""
