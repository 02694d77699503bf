"""GPT-2: its sizes, its first weights, sequences that it cannot take, and a pipeline of all its
layers.
"""

import numpy as np

from nnmpi import models, ops
from nnmpi.base.errors import ShapeError
from tests.harness.refusals import refuses, usage_error

TIME, TOKENS = 7, 23


def small(dropout=0.1):
    return models.gpt(TOKENS, TIME + 2, features=12, layers=3, heads=3, dropout=dropout)


def test_sizes_are_gpt2s():
    """124,439,808 parameters, the table of tokens once; weights of 0.02, less in the last layers of
    branches.
    """
    sizes = {name: parameter.size for name, parameter in models.gpt(50257, 1024).named_parameters()}
    assert sum(sizes.values()) == 124_439_808
    model = models.gpt(50, 40, features=48, layers=2, heads=4).initialize(0, "float64")
    state = model.state()
    assert np.isclose(state["2.mlp.0.weight"].std(), 0.02, rtol=0.05)
    assert np.isclose(state["2.mlp.2.weight"].std(), 0.01, rtol=0.05)
    assert not state["2.attention.qkv.bias"].any()
    assert model(np.zeros((3, 7), np.int64)).shape == (3, 7, 50)


def test_what_it_cannot_take():
    model = small().initialize(0)
    refuses(
        ShapeError,
        r"a context of 9 needs tokens \(batch, at most 9\), not \(2, 10\)",
        model,
        np.zeros((2, 10), np.int64),
    )
    usage_error(
        "10 features and 3 heads; give a multiple of the heads",
        models.gpt,
        5,
        5,
        features=10,
        layers=1,
        heads=3,
    )
    usage_error(
        r"gpt's layers is 1\.0; give a whole number",
        models.gpt,
        5,
        5,
        features=10,
        layers=1.0,
        heads=2,
    )


def test_the_tied_table_gets_both_gradients():
    """A change of the table moves the loss as its gradient says, which the two uses added up to."""
    model = small(0.0).initialize(0, "float64")
    draw = np.random.default_rng(1)
    x, y = (draw.integers(0, TOKENS, (3, TIME)) for _ in range(2))
    model.zero_grad()
    ops.cross_entropy(model(x), y).backward()
    table = dict(model.named_parameters())["0.tokens.weight"]
    assert table.grad is not None
    way = draw.standard_normal(table.shape)
    slope = float((table.grad * way).sum())
    losses = []
    for step in (1e-5, -2e-5):
        table.data += step * way
        losses.append(ops.cross_entropy(model(x), y).item())
    assert np.isclose((losses[0] - losses[1]) / 2e-5, slope, rtol=1e-7)
