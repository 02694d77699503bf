"""Models that run by a plan: the bits of an ordinary pass, within the budget."""

import gc
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from nnmpi import Tensor, compile, models, nn, ops
from nnmpi.backend import onednn
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.device import cupy_backend
from nnmpi.base.errors import GraphError
from nnmpi.memory import RecomputedModel
from nnmpi.memory.optimal import OptimalPlans
from nnmpi.memory.store import Store
from tests.device.here import here, on_device
from tests.harness.refusals import refuses, usage_error
from tests.harness.slow import cases

DRAW = np.random.default_rng(0)
TOKENS = DRAW.integers(0, 20, (2, 2, 16))
CASES = {
    "gpt": (
        lambda: models.gpt(20, 16, features=16, layers=3, heads=2, dropout=0.1),
        TOKENS[0],
        TOKENS[1],
    ),
    "cnn": (
        lambda: models.cnn((8, 8, 1), 10, (32, 16), dropout=0.2),
        DRAW.normal(size=(4, 8, 8, 1)).astype("float32"),
        DRAW.integers(0, 10, 4),
    ),
    "resnet": (
        lambda: models.resnet((8, 8, 3), 10, width=4),
        DRAW.normal(size=(4, 8, 8, 3)).astype("float32"),
        DRAW.integers(0, 10, 4),
    ),
}


def case(name):
    """Return what makes a model, a batch, and its labels."""
    make, x, y = CASES[name]
    return make, here(x), here(y)


def one_pass(forward, x, y, model, again=1):
    """Return the loss, the gradients and the model's state after a pass."""
    for _ in range(again):
        with nn.training(seed=1, step=2):
            loss = forward(x, lambda logits: ops.cross_entropy(logits, y))
        loss.backward()
    return [loss.item(), *map(np.copy, map(as_numpy, model.storage.grads)), *model.state().values()]


def as_numpy(array):
    """Return an array on the host."""
    return Tensor(array).numpy()


def backend_here():
    """Return the backend of this run's arrays."""
    return cupy_backend(0) if on_device() else numpy_backend()


def store_here(folder):
    """Return where activations of this run's arrays go, and their backend."""
    return Store("host" if on_device() else folder, backend_here()), backend_here()


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_budget_gives_the_bits(name, away, tmp_path):
    """From the least to all: loss, gradients and running statistics, also where most layers leave
    memory.
    """
    make, x, y = case(name)
    model = make().initialize(seed=0)
    first = model.state()
    store, backend = store_here(tmp_path)
    forward = RecomputedModel(model, None, backend, store=store if away else None)
    one_pass(forward, x, y, model)  # constants are made once
    model.zero_grad()
    model.load_state(first)
    ordinary = one_pass(lambda x, head: head(model(Tensor(x))), x, y, model)
    forward.bandwidth, seen, moved = 1e12, set(), 0
    for budget in forward.plans.budgets(3 if away else 8):
        forward.plan = forward.find_plan(budget)
        if forward.plan in seen:
            continue
        seen.add(forward.plan)
        moved += forward.price.moved
        model.zero_grad()
        model.load_state(first)
        result = one_pass(forward, x, y, model)
        assert forward.price.peak <= budget
        for ours, theirs in zip(result, ordinary, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert len(seen) > 1 and bool(moved) == away
    assert not list(tmp_path.iterdir())  # the file has no name
    forward.release()


def test_gradients_are_added_up():
    """And measuring leaves them as they were."""
    make, x, y = case("cnn")
    model = make().initialize(seed=0)
    forward = RecomputedModel(model, "least")
    with nn.training():
        forward(x, lambda logits: ops.cross_entropy(logits, y))
    assert all(grad is None or not grad.any() for grad in (p.grad for p in model.parameters()))
    result = one_pass(forward, x, y, model, again=2)
    model.zero_grad()
    ordinary = one_pass(lambda x, head: head(model(Tensor(x))), x, y, model, again=2)
    np.testing.assert_array_equal(result[1], ordinary[1])


ROWS = DRAW.normal(size=(8, 64, 64)).astype("float32"), np.zeros((8, 64), int)
LONG = tuple(DRAW.integers(0, 64, (2, 8, 64)))


def images(size, channels):
    """Return images and their labels."""
    return DRAW.normal(size=(16, size, size, channels)).astype("float32"), DRAW.integers(0, 10, 16)


def recurrent(layer):
    """Return a model of two recurrent layers."""
    return nn.Sequential(nn.Embedding(64, 64), layer(64, 64), layer(64, 64), nn.Linear(64, 64))


def blocks(make):
    """Return a model of four blocks."""
    return nn.Sequential(*(make() for _ in range(4)), nn.Linear(64, 8))


MODELS = {
    "mlp": (
        lambda: models.mlp((256,), 10, [512] * 4),
        (DRAW.normal(size=(256, 256)).astype("float32"), DRAW.integers(0, 10, 256)),
    ),
    "wide": (
        lambda: blocks(
            lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU("tanh"), nn.Linear(256, 64))
        ),
        ROWS,
    ),
    "experts": (
        lambda: blocks(lambda: nn.MixtureOfExperts(64, experts=4, top_k=2, hidden=512)),
        ROWS,
    ),
    "cnn": (lambda: models.cnn((28, 28, 1), 10), images(28, 1)),
    "resnet": (lambda: models.resnet((16, 16, 3), 10, width=8), images(16, 3)),
    "gpt": (lambda: models.gpt(64, 64, features=64, layers=3, heads=4, dropout=0.1), LONG),
    "lstm": (lambda: recurrent(nn.LSTM), LONG),
    "gru": (lambda: recurrent(nn.GRU), LONG),
}


def assert_takes(forward, x, y, adds=False):
    """Fail unless a pass takes as many bytes as its price says, by Python's own count.

    Or a second one: Python's table of interned strings grows in one of thousands, by 2 MB.
    """
    planned = pytest.approx(forward.price.peak, rel=0.03, abs=1e5)  # Python's objects: 80 kB
    for _ in range(2):
        if not adds:
            forward.model.zero_grad()
        gc.collect()
        tracemalloc.start()
        one_pass_of(forward, x, y)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if most == planned:
            return
    assert most == planned


def one_pass_of(forward, x, y):
    """Do a forward and a backward pass."""
    with nn.training(seed=1):
        loss = forward(x, lambda logits: ops.cross_entropy(logits, y))
    loss.backward()


@pytest.mark.host_only("the host's allocations")
@pytest.mark.parametrize(
    "name, away",
    cases(
        [(name, away) for name in MODELS for away in (False, True)],
        lambda name, away: name in (("mlp", "experts", "lstm") if away else ("cnn", "gpt")),
    ),
)
def test_a_pass_takes_what_is_planned(name, away, tmp_path):
    """Temporary arrays of operations included; and what they take is not promised to others."""
    make, (x, y) = MODELS[name]
    forward = RecomputedModel(
        make().initialize(seed=0), None, store=Store(tmp_path) if away else None
    )
    one_pass_of(forward, x, y)
    forward.bandwidth, plans = 1e12, forward.plans
    for budget in (plans.least, (plans.least + plans.all) // 2, plans.all):
        forward.plan = forward.find_plan(budget)
        assert forward.price.peak <= budget
        assert_takes(forward, x, y)
    silent = {"forward_work": 0, "keep_work": 0, "backward_work": 0}
    before = OptimalPlans([replace(cost, **silent) for cost in plans.costs]).least
    # of "wide" by NumPy alone: oneDNN's activations have no temporary arrays
    needs_more = name != "mlp" and (name != "wide" or onednn.find().library is None)
    assert not needs_more or max(cost.forward_work for cost in plans.costs) > 2**16
    assert before < plans.least
    usage_error(
        "give at least",
        lambda: RecomputedModel(forward.model, (before + plans.least) // 2)(
            x, lambda out: out.sum()
        ),
    )
    forward.release()


@pytest.mark.host_only("the host's allocations")
def test_a_pass_that_adds_to_gradients_is_measured_anew(monkeypatch):
    """Some products are computed apart and added: they take as much as the weights. (oneDNN adds
    in place.)
    """
    monkeypatch.setattr(onednn, "for_float32", lambda: None)
    make, (x, y) = MODELS["mlp"]
    forward = RecomputedModel(make().initialize(seed=0), None)
    one_pass_of(forward, x, y)
    first = sum(cost.backward_work for cost in forward.plans.costs)
    one_pass_of(forward, x, y)
    assert sum(cost.backward_work for cost in forward.plans.costs) > first + 4 * 512 * 512
    assert_takes(forward, x, y, adds=True)


def test_what_a_layer_keeps_is_what_its_operations_save():
    """Counted by hand: a linear layer keeps its input, tanh its result, and nothing is counted
    twice.
    """
    model = nn.Sequential(nn.Linear(4, 8), nn.Flatten(), nn.Linear(8, 16), nn.Tanh()).initialize(
        seed=0
    )
    forward = RecomputedModel(model, None)
    forward(np.ones((32, 4), "float32")).sum().backward()
    first, *_, last, _ = forward.plans.costs
    assert (first.value, first.gradient, first.saved, first.saves_input) == (
        32 * 8 * 4,
        0,
        0,
        False,
    )
    assert (last.value, last.gradient, last.saves_input, last.saves_result) == (
        32 * 16 * 4,
        32 * 16 * 4,
        False,
        True,
    )


def test_a_larger_input_is_measured_anew_and_a_smaller_one_is_not():
    """The plan is that of the largest input so far; a thousand passes leave nothing behind."""
    inside = nn.Sequential(nn.Stash("a"), nn.Tanh(), nn.Pop("a"), nn.Tanh())
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), inside, nn.Flatten()).initialize(seed=0)
    forward = RecomputedModel(model, None)
    sizes = []
    for rows in (3, 2, 5):
        forward(np.ones((rows, 4), "float32")).sum().backward()
        model.zero_grad()
        sizes.append(forward.plans.least)
    assert sizes[0] == sizes[1] < sizes[2]
    names = ["0 Linear", "1 ReLU", "2.0", "2.3 Tanh", "result"]
    assert [cost.name for cost in forward.plans.costs] == names
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        forward(np.ones((5, 4), "float32")).sum().backward()
    gc.collect()
    assert len(gc.get_objects()) <= before + 50


def test_what_cannot_be_is_refused():
    """A budget below the least, with the least; a second backward; a compiled step; a model of
    several results.
    """
    make, x, y = case("gpt")
    model = make().initialize(seed=0)

    def loss(logits):
        return ops.cross_entropy(logits, y)

    usage_error(
        "1000 bytes are too few .* give at least", lambda: RecomputedModel(model, 1000)(x, loss)
    )
    forward = RecomputedModel(model, None)
    result = forward(x, loss)
    result.backward(retain_graph=True)
    refuses(GraphError, "used up", result.backward)
    usage_error(
        "recomputation cannot be part of a compiled step",
        lambda: compile(lambda: forward(x, loss))(),
    )

    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    usage_error(
        "returns one tensor, not a tuple",
        lambda: RecomputedModel(Pair(), None)(np.ones((2, 2), "float32")),
    )
