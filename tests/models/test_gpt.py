"""GPT-2: its sizes, its first weights, sequences that it cannot take, and a pipeline of all its layers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, models, nn, ops, optim
from nnmpi.compose.layout import Layout
from nnmpi.errors import ShapeError, UsageError
from tests.models.sequence_runs import TIME, TOKENS, differences


def small(dropout: float = 0.1) -> nn.Sequential:
    return models.gpt(TOKENS, TIME + 2, features=12, layers=3, heads=3, dropout=dropout)


def test_sizes_are_gpt2s() -> None:
    """124,439,808 parameters, the table of tokens once; weights of 0.02, less in the last layers of branches."""
    sizes = {name: parameter.size for name, parameter in models.gpt(50257, 1024).named_parameters()}
    assert sum(sizes.values()) == 124_439_808
    model = models.gpt(50, 40, features=48, layers=2, heads=4).initialize(0, "float64")
    state = model.state()
    assert np.isclose(state["2.mlp.0.weight"].std(), 0.02, rtol=0.05)
    assert np.isclose(state["2.mlp.2.weight"].std(), 0.01, rtol=0.05)
    assert not state["2.attention.qkv.bias"].any()
    assert model(np.zeros((3, 7), np.int64)).shape == (3, 7, 50)


def test_what_it_cannot_take() -> None:
    model = small().initialize(0)
    with pytest.raises(ShapeError, match=r"a context of 9 needs tokens \(batch, at most 9\), not \(2, 10\)"):
        model(np.zeros((2, 10), np.int64))
    with pytest.raises(UsageError, match="10 features and 3 heads does not work; take a multiple of the heads"):
        models.gpt(5, 5, features=10, layers=1, heads=3)
    with pytest.raises(UsageError, match=r"gpt's layers is 1\.0; give a whole number"):
        models.gpt(5, 5, features=10, layers=1.0, heads=2)  # type: ignore[arg-type]


@pytest.mark.host_only("on a device nobody waits for a look at the tokens, and a wrong one gives a row of NaN")
def test_a_token_outside_the_vocabulary() -> None:
    with pytest.raises(ShapeError, match=r"index 23 is outside 0\.\.22"):
        small().initialize(0)(np.full((2, 3), 23))


def test_a_token_sees_nothing_after_it() -> None:
    """So the logits of a beginning are those of the whole."""
    model = small().initialize(0, "float64")
    tokens = np.random.default_rng(0).integers(0, TOKENS, (2, 9))
    assert np.allclose(model(tokens).data[:, :4], model(tokens[:, :4]).data, rtol=0, atol=1e-15)


def test_the_tied_table_gets_both_gradients() -> None:
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


def test_a_stage_for_each_layer_is_the_serial_run() -> None:
    """With dropout, in float64, with batches and sizes that do not divide; other layouts are in tests/equivalence."""
    relative, absolute = differences(small, 7, Layout(pp=7, dp=1, split=(1,) * 7))
    assert relative < 1e-12
    assert absolute < 1e-11


@pytest.mark.parametrize("build", [small, lambda: models.lstm(TOKENS, 10, 2, 0.1)])
def test_a_compiled_step_is_the_same(build: Callable[[], nn.Sequential]) -> None:
    """To the last bit, though the tied table gets its gradient from two operations."""

    def run(compiled: bool) -> tuple[list[float], dict[str, Any]]:
        model = build().initialize(0)
        optimizer = optim.Adam(model.storage, lr=1e-2)

        def step(x: np.ndarray, y: np.ndarray) -> Tensor:
            model.zero_grad()
            loss = ops.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        call, losses = nnmpi.compile(step) if compiled else step, []
        for number in range(5):
            x, y = np.random.default_rng(number).integers(0, TOKENS, (2, 4, TIME))
            with nn.training(step=number):
                losses.append(call(x, y).item())
        return losses, model.state()

    (losses, state), (again, other) = run(False), run(True)
    assert losses == again
    assert all(np.array_equal(array, other[name]) for name, array in state.items())
