"""Optimizers on a model's storage, in a training loop written by hand."""

import numpy as np
import pytest

from nnmpi import GradientExchange, Layout, Worker, arrange, nn, optim, simulate
from nnmpi.data import Dataset, Loader
from tests.device.here import here

X = np.ones((2, 4), np.float32)


class Sometimes(nn.Module):
    """Two linear layers; the second one is not always used."""

    def __init__(self):
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, both):
        """Return the sum of both results, or the first alone."""
        return self.first(x) + self.second(x) if both else self.first(x)


def trained_once():
    """Return a model and its optimizer after a step in which all parameters had a gradient."""
    model = Sometimes().initialize()
    optimizer = optim.SGD(model.storage, lr=0.1)
    model(X, True).sum().backward()
    optimizer.step()
    model.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("moves", [{"first.weight", "first.bias"}, set()])
def test_a_parameter_without_a_gradient_stays(moves):
    """The gradient that it had in the step before counts no more, also without a backward pass."""
    model, optimizer = trained_once()
    before = model.state()
    if moves:
        model(X, False).sum().backward()
    optimizer.step()
    assert moves == {
        name for name, value in model.state().items() if not (value == before[name]).all()
    }


def test_gradients_set_by_hand_count():
    """As those of a loop that clips or adds noise to each."""
    model, optimizer = trained_once()
    before = model.state()
    model(X, True).sum().backward()
    for parameter in model.parameters():
        parameter.grad = here(np.ones(parameter.shape, np.float32))
    optimizer.step()
    for name, value in model.state().items():
        np.testing.assert_allclose(value, before[name] - 0.1, rtol=1e-6)


@pytest.mark.parametrize(
    "make", [lambda s: optim.AdamW(s, lr=0.1), lambda s: optim.SGD(s, lr=0.1, momentum=0.9)]
)
def test_a_frozen_parameter_stays(make):
    """Neither weight decay nor the momentum of earlier steps moves it, nor its state; thawed, it
    moves again.
    """
    model = Sometimes().initialize()
    optimizer = make(model.storage)
    local = next(
        slice(span.start, span.stop)
        for span in model.storage.spans
        if span.parameter.name == "first.weight"
    )
    for frozen in (False, True, False):
        model.first.weight.requires_grad = not frozen
        before, state = (
            model.state(),
            [arrays[0][local].copy() for arrays in optimizer.slots().values()],
        )
        model.zero_grad()
        model(X, True).sum().backward()
        optimizer.step()
        moved = {name for name, value in model.state().items() if not (value == before[name]).all()}
        assert ("first.weight" in moved) is not frozen
        assert "second.weight" in moved
        for arrays, values in zip(optimizer.slots().values(), state, strict=True):
            assert bool((arrays[0][local] == values).all()) is frozen


def train_thawing(group, layout, exchange):
    """Return weights and state of 6 steps; a layer is frozen in steps 1 to 3; the last has its own
    rate.
    """
    rng = np.random.default_rng(0)
    data = Dataset(
        "rows", rng.standard_normal((18, 5)).astype("float32"), rng.integers(0, 3, 18), 3
    )
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    where = arrange(model, group, layout, np.zeros((2, 5)), "float64")
    groups = {"group": lambda name, _: "head" if name.startswith("4") else "body"}
    where.model.initialize(seed=0, dtype="float64", storage=where.storage, **groups)
    adam = optim.AdamW(
        where.model.storage,
        lr={"body": 0.01, "head": 0.02},
        weight_decay={"body": 0.1, "head": 0.1},
    )
    worker = Worker(where.model, adam, group, arrangement=where, exchange=exchange)
    loader = Loader(data, 9, where, dtype="float64", workers=0)
    middle, step = list(where.model.parameters())[2:4], 0
    for epoch in range(3):
        for batch in loader.epoch(epoch):
            for parameter in middle:
                parameter.requires_grad = not 1 <= step < 4
            worker.step(batch)
            step += 1
    result = [item.to_dict() for item in worker.state()]
    worker.release()
    where.free()
    return result


@pytest.mark.parametrize(
    "layout, fused",
    [
        pytest.param(
            Layout(),
            True,
            marks=pytest.mark.host_only("the fused update, which is of arrays in the node"),
        ),
        (Layout(), False),
        (Layout(dp=2, zero=1), None),
        (Layout(dp=2, zero=3), None),
    ],
    ids=["fused", "buckets", "zero1", "zero3"],
)
def test_a_frozen_parameter_stays_on_all_ranks(layout, fused):
    right = simulate(lambda group: train_thawing(group, Layout(), GradientExchange()), 1)[0]
    result = simulate(
        lambda group: train_thawing(group, layout, GradientExchange(fused_update=fused)), 2
    )[0]
    for ours, theirs in zip(result, right, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            np.testing.assert_allclose(value, theirs[name], rtol=1e-9, atol=1e-15, err_msg=name)
