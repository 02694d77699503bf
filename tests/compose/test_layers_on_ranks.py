"""Layers in training: eager on one rank, and recorded and replayed on ranks with uneven rows."""

from math import prod

import numpy as np
import pytest

import nnmpi
from nnmpi import Layout, nn, ops
from nnmpi.base.shard import split
from nnmpi.nn.activation import ACTIVATIONS
from nnmpi.tensor import stack
from tests.worker_options import arranged, sgd

STEPS, ROWS = 5, 7
TIMES = np.random.default_rng(0).standard_normal((STEPS, ROWS, 6, 4))
LABELS = np.random.default_rng(1).integers(0, 3, (STEPS, ROWS))


class Unrolled(nn.Module):
    """A cell over time."""

    def __init__(self, cell):
        self.cell = cell

    def forward(self, x):
        """Return its outputs side by side."""
        state, result = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            result.append(state[0] if isinstance(state, tuple) else state)
        return stack(result, 1)


class Volumes(nn.Module):
    """Times as volumes of six planes."""

    def __init__(self):
        self.conv = nn.Conv3d(1, 2, (3, 2, 1), padding=1, groups=1)

    def forward(self, x):
        """Return the convolution."""
        return self.conv(x.reshape(len(x), 6, 2, 2, 1))


LAYERS = {
    **{name: (kind, 24) for name, kind in ACTIVATIONS.items()},
    "prelu": (nn.PReLU, 24),
    "prelu channels": (lambda: nn.PReLU(4), 24),
    "max pool": (lambda: nn.MaxPool1d(2), 12),
    "avg pool": (lambda: nn.AvgPool1d(2, 1), 20),
    "instance": (lambda: nn.InstanceNorm1d(4, affine=True), 24),
    "rnn": (lambda: nn.RNN(4, 5, 2), 30),
    "relu": (lambda: nn.RNN(4, 5, nonlinearity="relu"), 30),
    "rnn cell": (lambda: Unrolled(nn.RNNCell(4, 5)), 30),
    "gru cell": (lambda: Unrolled(nn.GRUCell(4, 5)), 30),
    "lstm cell": (lambda: Unrolled(nn.LSTMCell(4, 5)), 30),
    "conv3d": (Volumes, 6 * 3 * 4 * 2),
}  # fmt: skip


def model_of(name):
    make, features = LAYERS[name]
    model = nn.Sequential(make(), nn.Flatten(), nn.Linear(features, 3))
    model.sharding = {"2": nn.Sharding.COLUMN}
    return model


def by_hand(name):
    model, found = model_of(name).initialize(seed=0, dtype="float64"), []
    optimizer = sgd(model)
    for x, y in zip(TIMES, LABELS, strict=True):
        model.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(dp=3), Layout(dp=1, pp=2, split=(1, 2)), Layout(dp=1, tp=2)]
)
def test_a_layer_learns_the_same(name, layout):
    """Layers without a rule for tensor parallelism are whole on every rank."""

    def train(group):
        worker = arranged(model_of(name), group, layout, TIMES[0][:1], "float64")
        where = worker.arrangement
        part = split(ROWS, where.data_ranks)[where.data_rank]
        rows = slice(part.start, part.stop)
        return [worker.step(x[rows], y[rows]).loss for x, y in zip(TIMES, LABELS, strict=True)]

    ranks = prod(layout.shape)
    for found in nnmpi.simulate(train, ranks):
        np.testing.assert_allclose(found, by_hand(name), rtol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_step_is_the_eager_one(name):
    model, found = model_of(name).initialize(seed=0, dtype="float64"), []
    optimizer = sgd(model)

    @nnmpi.compile
    def step(x, y):
        model.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for x, y in zip(TIMES, LABELS, strict=True):
        found.append(step(x, y).item())
    assert not step.refusal
    np.testing.assert_allclose(found, by_hand(name), rtol=1e-9)
