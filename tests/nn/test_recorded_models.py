"""The zoo's models and the package's: one recording for each shape, the same bits eagerly, recorded
and replayed, and programs that are the same.
"""

import numpy as np
import pytest

import nnmpi
from benchmarks.training import models as zoo
from benchmarks.training.zoo import MODELS, TEXT
from nnmpi import models, nn, ops, optim
from nnmpi.optim.clip import clip_by_global_norm
from nnmpi.tensor.tensor import Tensor
from tests.harness.slow import once_more

pytestmark = pytest.mark.host_only("a device's graphs cannot be compared")


def dropping():
    """Return a model with masks and running statistics."""
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 10)
    )


def experts():
    """Return a model that chooses experts by values."""
    return models.gpt(65, 9, 12, 1, 3, experts=3, dropout=0.2)


OWN = {"dropping": (dropping, (5, 8)), "experts": (experts, (2, 9))}
NAMES = [*MODELS, *OWN]


def run(name, compiled, number):
    """Return what some steps of a model leave."""
    make, shape = OWN[name] if name in OWN else MODELS[name]
    model = make() if name in OWN else make(zoo.our_library())
    model.initialize(seed=0)
    optimizer = optim.AdamW(model.storage, lr=1e-3)

    def step(x, y):
        model.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        clip_by_global_norm(model.parameters(), 1.0)
        optimizer.step()
        return loss

    taken = nnmpi.compile(step) if compiled else lambda x, y: step(Tensor(x), Tensor(y))
    rng, losses = np.random.default_rng(0), []
    for call in range(number):
        is_text = name in TEXT or name == "experts"
        if is_text:
            x, y = (rng.integers(0, 65, (2, min(shape[1], 9))) for _ in range(2))
        else:
            rows = 5 if name == "dropping" else 2
            x = rng.standard_normal((rows, *shape[1:])).astype("float32")
            y = rng.integers(0, 10, rows)
        with nn.training(seed=1, step=call):
            losses.append(taken(x, y).item())
    return losses, model.state(), taken


@pytest.mark.parametrize("name", [once_more(name, name == "vgg11") for name in NAMES])
def test_a_model_has_one_recording(name):
    right, state, _ = run(name, False, 9)
    losses, came, step = run(name, True, 9)
    assert losses == right
    np.testing.assert_equal(came, state)
    assert (step.recordings, step.refusal) == (1, "")
    _, _, other = run(name, True, 2)
    assert step.program.difference(other.program) == ""
