"""A backward pass in halves gives the whole pass's gradients, and the first half none of the parameters'."""

from collections.abc import Callable

import numpy as np
import pytest

from nnmpi import models, nn
from nnmpi.backend.array import Array
from nnmpi.errors import GraphError
from nnmpi.nn.module import Module
from nnmpi.ops.loss import cross_entropy
from nnmpi.tensor.tape import Deferred
from nnmpi.tensor.tensor import Tensor

Build = Callable[[], Module]


def tied() -> Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64))
    model[3].weight = model[1].weight
    return model


MODELS: dict[str, Build] = {
    "mlp": lambda: models.mlp((8, 8, 1), 10, dropout=0.3),
    "cnn": lambda: models.cnn((8, 8, 1), 10),
    "resnet": lambda: models.resnet((8, 8, 1), 10),
    "tied": tied,
}


def gradients(name: str, halves: bool, microbatches: int = 2) -> tuple[list[Array], dict[str, Array]]:
    """Return the inputs' and the parameters' gradients; with halves, all first ones come before any second one."""
    model = MODELS[name]().initialize(seed=1, dtype="float64")
    rng = np.random.default_rng(3)
    inputs, waiting = [], []
    for _ in range(microbatches):
        x = Tensor(rng.standard_normal((5, 8, 8, 1)), requires_grad=True)
        with nn.training(seed=0):
            loss = cross_entropy(model(x), rng.integers(10, size=5), reduction="sum")
        deferred = Deferred() if halves else None
        loss.backward(deferred=deferred)
        assert x.grad is not None
        inputs.append(x.grad)
        if deferred is not None:
            assert all(parameter.grad is None for parameter in model.parameters())
            waiting.append(deferred)
    for deferred in waiting:
        deferred.finish()
    found = {n: p.grad for n, p in model.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return inputs, {n: np.array(grad) for n, grad in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_halves_make_a_whole(name: str) -> None:
    whole, halves = gradients(name, halves=False), gradients(name, halves=True)
    assert all(np.array_equal(a, b) for a, b in zip(whole[0], halves[0], strict=True))
    assert whole[1].keys() == halves[1].keys()
    for parameter, grad in whole[1].items():
        np.testing.assert_array_equal(halves[1][parameter], grad, err_msg=parameter)


def test_what_is_finished_is_used_up() -> None:
    model = MODELS["mlp"]().initialize()
    loss = model(Tensor(np.ones((2, 8, 8, 1), np.float32))).sum()
    deferred = Deferred()
    loss.backward(deferred=deferred)
    deferred.finish()
    once = [np.array(parameter.grad) for parameter in model.parameters()]
    deferred.finish()
    assert all(np.array_equal(p.grad, grad) for p, grad in zip(model.parameters(), once, strict=True))
    with pytest.raises(GraphError, match="used up"):
        loss.backward()


def test_halves_serve_no_hooks_and_retain_nothing() -> None:
    model = MODELS["mlp"]().initialize()
    x = np.ones((2, 8, 8, 1), np.float32)
    with pytest.raises(GraphError, match="in halves"):
        model(x).sum().backward(retain_graph=True, deferred=Deferred())
    model.parameters()[0].hook = lambda parameter: None
    with pytest.raises(GraphError, match="in halves"):
        model(x).sum().backward(deferred=Deferred())
