"""One worker alone finds where its first value that is not finite comes from."""

import numpy as np
import pytest

from nnmpi import Layout, Tensor, models, nn, simulate
from nnmpi.base.errors import DivergenceError
from nnmpi.nn import Module
from nnmpi.ops import cross_entropy
from nnmpi.parallel.divergence import locate_nonfinite, nonfinite_message
from tests.worker_options import arranged, work

LABELS = np.array([0, 2, 1])


def place_of(model, x):
    with np.errstate(all="ignore"), nn.training(0, 0):
        return locate_nonfinite(
            model, x, lambda: cross_entropy(model(Tensor(x)), LABELS, reduction="sum")
        )


@pytest.mark.parametrize(
    "place", ["", "the input", "the weights '3.bias'", "the output of layer '3' (Linear)"]
)
def test_the_place_is_found(place):
    model = models.mlp((4,), 3, hidden=(5,)).initialize(0)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    if place == "the input":
        x[1, 2] = np.nan
    elif place.startswith("the weights"):
        model.load_state({**model.state(), "3.bias": np.array([0, np.inf, 0], np.float32)})
    elif place:
        model.load_state({name: np.abs(values) * 1e30 for name, values in model.state().items()})
    assert place_of(model, np.abs(x)) == (place or None)


def test_a_gradient_alone_that_is_not_finite_is_found():
    """Going forward, the root of 0 is 0."""

    class Steep(Module):
        def __init__(self):
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            hidden = self.first(x)
            return self.last((hidden * hidden) ** 0.5)

    model = Steep().initialize(0)
    for name, parameter in model.named_parameters():
        if name.startswith("first"):
            parameter.data[...] = 0  # the root has no derivative at 0
    assert place_of(model, np.ones((3, 4), np.float32)) == "the gradient of 'first.bias'"


@pytest.mark.simulated(max_size=2)
def test_the_search_moves_no_running_statistics(group):
    """A step that fails moves them once, under every layout."""
    model = nn.Sequential(nn.BatchNorm(2), nn.Linear(2, 2)).initialize(0)
    model.get("1").weight.data[...] = np.finfo(np.float32).max
    x = np.array([[1, 2], [3, 4], [5, 9]], np.float32)
    worker = work(model, group)
    with np.errstate(all="ignore"), pytest.raises(DivergenceError):
        worker.step(x, LABELS % 2)
    np.testing.assert_allclose(model.get("0").running_mean.data, 0.1 * x.mean(0), rtol=1e-6)


def test_the_sentence_names_worker_place_and_step():
    text = nonfinite_message(7, float("nan"), "the input", "worker 3")
    assert text.startswith(
        "step 7: the loss is nan; values that are not finite were first found in the input on"
        " worker 3"
    )
    assert "2.5, and it or its gradient is not finite on rank 1" in nonfinite_message(
        7, 2.5, None, "rank 1"
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"activation_memory": "least"},
        {"activation_memory": 20000},
        {"activation_memory": "least", "offload": "there"},
        {"activation_memory": "least", "zero": 3},
    ],
)
def test_a_planned_pass_that_diverges_is_explained(options, ranks, tmp_path):
    """Its layers' first buffers belong to the plan; the next good batch trains as before."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(10, 6)), draw.integers(0, 3, 10)
    bad = x.copy()
    bad[7, 2] = np.nan
    if "offload" in options:
        options = options | {"offload": str(tmp_path)}

    def program(group):
        net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        worker = arranged(net, group, Layout(**options), x[:1], "float64", lr=0.05)
        mine = np.array_split(np.arange(10), group.size)[group.rank]
        losses = []
        for rows in (x, bad, x):
            try:
                losses.append(worker.step(rows[mine], y[mine]).loss)
            except DivergenceError as error:
                assert rows is bad
                assert "values that are not finite were first found in" in str(error)
                for name, buffer in worker.model.named_buffers():  # the bad rows' statistics
                    buffer.data[...] = "variance" in name
        return losses

    for losses in simulate(program, ranks):
        assert len(losses) == 2
        assert losses[1] < losses[0]
