"""What is computed as one, and what is not."""

import numpy as np
import pytest

from nnmpi import nn
from nnmpi.nn.fuse import fuse
from nnmpi.tensor.tensor import Tensor


class Doubled(nn.Linear):
    """A layer that computes something else than its class."""

    def forward(self, x):
        return 2 * super().forward(x)


class Entered(nn.Linear):
    """One that changes its input alone."""

    def enter(self, x):
        return 3 * x


@pytest.mark.parametrize(
    ("layers", "calls"),
    [
        ([nn.Linear(2, 2), nn.ReLU()], 1),
        ([nn.Linear(2, 2), nn.GELU("tanh"), nn.Linear(2, 2)], 2),
        ([nn.Linear(2, 2), nn.Tanh()], 2),
        ([Entered(2, 2), nn.ReLU()], 1),
        ([Doubled(2, 2), nn.ReLU()], 2),
        ([nn.Conv2d(1, 1, 3), nn.ReLU(), nn.MaxPool2d(2)], 1),
        ([nn.Conv2d(1, 1, 3), nn.ReLU(), nn.MaxPool2d(2, 2)], 1),
        ([nn.Conv2d(1, 1, 3), nn.ReLU(), nn.MaxPool2d(2, 1)], 2),
        ([nn.Conv2d(1, 1, 3), nn.ReLU(), nn.MaxPool2d(2, 2, 1)], 2),
        ([nn.Conv2d(1, 1, 3), nn.ReLU(), nn.AvgPool2d(2)], 2),
        ([nn.Conv2d(1, 1, 3), nn.MaxPool2d(2)], 2),
    ],
)
def test_runs_of_layers(layers, calls):
    assert len(fuse(layers)) == calls


@pytest.mark.parametrize("kind", [nn.Linear, Doubled, Entered])
def test_a_subclass_computes_what_it_says(kind):
    """Fused or one by one, to the last bit."""
    model = nn.Sequential(kind(3, 4), nn.ReLU(), kind(4, 2), nn.GELU("tanh")).initialize(seed=2)
    x = Tensor(np.random.default_rng(0).standard_normal((5, 3)).astype("float32"))
    together = model(x).data
    with nn.unfused():
        np.testing.assert_array_equal(model(x).data, together)
