"""Recurrent layers that multiply an embedding's table: the same as those of picked rows."""

import numpy as np
import pytest

from nnmpi import Tensor, nn, ops, use_precision
from nnmpi.nn.container import runs
from nnmpi.ops.embedding import TokenRows
from tests.device.here import here

BATCH, TIME, ENTRIES, FEATURES = 6, 5, 4, 7
TOKENS = np.random.default_rng(1).integers(0, ENTRIES, (BATCH, TIME))
STATE = np.random.default_rng(2).standard_normal((2, BATCH, 3))
LENGTHS = np.array([3, 5, 1, 5, 4, 2])

CALLS = {
    "lstm": lambda x, p, s: ops.lstm(x, *p, s),
    "lstm in reverse, with ends": lambda x, p, s: ops.lstm(x, *p, s, reverse=True, ends=True),
    "lstm of lengths": lambda x, p, s: ops.lstm(x, *p, s, LENGTHS, ends=True),
    "gru": lambda x, p, s: ops.gru(x, *p, s[0]),
}


def parameters(name):
    """Return a layer's parameters, and the table, whose second gradient of two is added."""
    kind = nn.GRU if name == "gru" else nn.LSTM
    layer = kind(FEATURES, 3).initialize(3, "float64")
    table = nn.Embedding(ENTRIES, FEATURES).initialize(4, "float64")
    return [*layer.parameters(), *table.parameters()]


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(name):
    results = []
    for picked in (False, True):
        *weights, table = parameters(name)
        state = [Tensor(here(item.copy()), requires_grad=True) for item in STATE]
        for _ in range(2):
            x = TokenRows.of(table, here(TOKENS))
            y = CALLS[name](ops.embedding(table, here(TOKENS)) if picked else x, weights, state)
            (y * y * y).sum().backward()
        grads = [item.grad for item in (*weights, table, *state) if item.grad is not None]
        assert len(grads) == len(weights) + 1 + (1 if name == "gru" else 2)
        results.append([y.numpy(), *(Tensor(grad).numpy() for grad in grads)])
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "layers, tokens, are_fused",
    [
        ([nn.Embedding(4, 7), nn.LSTM(7, 3)], TOKENS, True),
        ([nn.Embedding(4, 7), nn.Dropout(0.0), nn.GRU(7, 3)], TOKENS, True),
        (
            [nn.Embedding(4, 7), nn.Dropout(0.1), nn.LSTM(7, 3)],
            TOKENS,
            False,
        ),  # a mask for each row
        ([nn.Embedding(4, 7), nn.LSTM(7, 3)], TOKENS[:3], False),  # 15 rows
        ([nn.Embedding(8, 7), nn.LSTM(7, 3)], np.tile(TOKENS, 2), False),
    ],
)
def test_shapes_decide(layers, tokens, are_fused, monkeypatch):
    """And bfloat16 does: it rounds each row."""
    model, picked = nn.Sequential(*layers).initialize(seed=0), []
    kind, forward = type(layers[-1]), type(layers[-1]).forward
    monkeypatch.setattr(kind, "forward", lambda self, x: picked.append(x) or forward(self, x))
    if isinstance(here(tokens), np.ndarray):
        model(here(tokens))
        assert isinstance(picked.pop(), TokenRows) == are_fused
    for context in (nn.observed(lambda *_: None), use_precision("bf16")):
        with context:
            model(here(tokens))
        assert not isinstance(picked.pop(), TokenRows)


def test_only_small_tables_tie_layers_together():
    last = nn.LSTM(7, 3)
    small, large, dense = nn.Embedding(7, 7), nn.Embedding(8, 7), nn.Linear(7, 7)
    for layers, count in (
        ([small, nn.Dropout(0.5), last, last], 3),
        ([small, last, last], 2),
        ([large, last], 1),
        ([small, dense, last], 1),
        ([small], 1),
    ):
        assert [*map(len, runs(layers))] == [count] + [1] * (len(layers) - count)
