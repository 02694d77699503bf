"""Optimizers on a model's storage, in a training loop written by hand."""

from typing import Any

import numpy as np
import pytest

from nnmpi import nn, optim
from nnmpi.tensor import Tensor
from tests.device.here import here

X = np.ones((2, 4), np.float32)


class Sometimes(nn.Module):
    """Two linear layers; the second one is not always used."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        """Return the sum of both results, or the first alone."""
        return self.first(x) + self.second(x) if both else self.first(x)


def trained_once() -> tuple[Sometimes, Any]:
    """Return a model and its optimizer after a step in which all parameters had a gradient."""
    model = Sometimes().initialize()
    optimizer = optim.SGD(model.storage, lr=0.1)
    model(X, True).sum().backward()
    optimizer.step()
    model.zero_grad()
    return model, optimizer


def test_a_parameter_without_a_gradient_stays() -> None:
    """The gradient that it had in the step before counts no more."""
    model, optimizer = trained_once()
    before = model.state()
    model(X, False).sum().backward()
    optimizer.step()
    moved = {name for name, value in model.state().items() if not (value == before[name]).all()}
    assert moved == {"first.weight", "first.bias"}


def test_a_step_without_a_backward_pass_changes_nothing() -> None:
    """After zero_grad there is nothing to descend along."""
    model, optimizer = trained_once()
    before = model.state()
    optimizer.step()
    assert all((value == before[name]).all() for name, value in model.state().items())


def test_gradients_set_by_hand_count() -> None:
    """As those of a loop that clips or adds noise to each."""
    model, optimizer = trained_once()
    before = model.state()
    model(X, True).sum().backward()
    for parameter in model.parameters():
        parameter.grad = here(np.ones(parameter.shape, np.float32))
    optimizer.step()
    for name, value in model.state().items():
        np.testing.assert_allclose(value, before[name] - 0.1, rtol=1e-6)


@pytest.mark.parametrize("make", [lambda s: optim.AdamW(s, lr=0.1), lambda s: optim.SGD(s, lr=0.1, momentum=0.9)])
def test_a_frozen_parameter_stays(make: Any) -> None:
    """Neither weight decay nor the momentum of earlier steps moves it; thawed, it moves again."""
    model = Sometimes().initialize()
    optimizer = make(model.storage)
    for frozen in (False, True, False):
        model.first.weight.requires_grad = not frozen
        before = model.state()
        model.zero_grad()
        model(X, True).sum().backward()
        optimizer.step()
        moved = {name for name, value in model.state().items() if not (value == before[name]).all()}
        assert ("first.weight" in moved) is not frozen
        assert "second.weight" in moved
