"""Forward hooks: when they are called, what they may replace, and what is refused."""

import copy

import numpy as np
import pytest

import nnmpi
from nnmpi import Layout, Tensor, data, nn, ops, optim
from nnmpi.base.errors import LayoutError, UsageError
from tests.device.here import here, on_device
from tests.harness.refusals import refuses

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(12, 6)).astype("f4"), RANDOM.integers(0, 3, 12)
SERIAL = Layout()
SAMPLES = data.Dataset("own", X, Y, 3)


def build():
    model = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
    )
    model.sharding = {"0": nn.Sharding.COLUMN, "2.0": nn.Sharding.ROW}
    return model


def train(group, layout=SERIAL, path="", first=0, last=0, steps=12):
    """Train some steps; return the losses, what a hook has seen and how many were replayed.

    Args:
        path: of the layer with the hook; "" for none.
        first, last: the steps in which it is there.
    """
    where, seen = nnmpi.arrange(build(), group, layout, sample=X[:1]), []
    where.model.initialize(seed=0)
    optimizer = optim.SGD(where.model.storage, lr=0.5)
    worker = nnmpi.Worker(where.model, optimizer, group, arrangement=where)
    losses = []
    batch = next(iter(data.Loader(SAMPLES, 12, where).epoch(0)))
    for step in range(steps):
        if step == first and path:
            handle = where.model.get(path).register_forward_hook(
                lambda layer, inputs, y: seen.append((layer.path, inputs[0].shape, y.shape))
            )
        if step == last and path:
            handle.remove()
        losses.append(worker.step(batch).loss)
    return losses, seen, worker.passes.replay.replays


@pytest.mark.parametrize(
    ("layout", "ranks", "rows"), [(SERIAL, 1, 12), (Layout(dp=2), 2, 6), (Layout(tp=2), 2, 12)]
)
def test_a_hook_is_called_in_each_step_also_while_steps_are_replayed(layout, ranks, rows):
    """Afterwards they are replayed again; losses are the same bits with and without."""
    plain = nnmpi.simulate(lambda group: train(group, layout), ranks=ranks)
    hooked = nnmpi.simulate(lambda group: train(group, layout, "2", 4, 6), ranks=ranks)
    for (losses, _, replays), (others, seen, fewer) in zip(plain, hooked, strict=True):
        assert [(path, y) for path, _, y in seen] == [("2", (rows, 8))] * 2
        assert replays > fewer > 0
        assert losses == others


def test_a_pipelines_hook_is_called_where_its_layer_is():
    """With each microbatch."""

    def main(group):
        return train(group, Layout(pp=2), "3" if group.rank else "0", 4, 6)[1]

    first, second = nnmpi.simulate(main, ranks=2)
    assert {path for path, *_ in first} == {"0"} and {path for path, *_ in second} == {"3"}
    assert sum(x[0] for _, x, _ in first) == sum(x[0] for _, x, _ in second) == 24


def test_a_compiled_step_is_done_by_python_while_it_has_a_hook():
    model, seen, x = build().initialize(seed=0), [], here(X)

    def step(x):
        return ops.softmax(model(x))

    compiled, said = nnmpi.compile(step), (5, 6) if on_device() else (4, 5)
    for i in range(9):
        if i == 4:
            handle = model[1].register_forward_hook(lambda *given: seen.append(given))
        if i == 6:
            handle.remove()
        np.testing.assert_array_equal(compiled(x).numpy(), step(x).numpy())
        # on a device the first call of a recording is its warm-up, without a verdict
        assert (compiled.refusal == "a forward hook of 1 is called") == (i in said)
    assert len(seen) == 4 and compiled.recordings


def test_a_hook_may_replace_the_result():
    """So a leaf in its place gets the gradient of a layer's features, as for Grad-CAM."""
    model, kept = build().initialize(seed=0), []

    def keep(layer, inputs, y):
        kept.append(Tensor(y.data.copy(), requires_grad=True))
        return kept[0]

    expected = model(X).numpy()
    with model[1].register_forward_hook(keep):
        logits = model(X)
    np.testing.assert_array_equal(logits.data, expected)
    logits[:, 0].sum().backward()
    right = Tensor(kept[0].data, requires_grad=True)
    model[3](model[2](right))[:, 0].sum().backward()
    np.testing.assert_allclose(kept[0].grad, right.grad, rtol=1e-6)
    assert model[0].weight.grad is None and not model[1]._forward_hooks


def test_layers_that_are_one_call_are_apart_while_one_has_a_hook():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    model.initialize(seed=0)
    x, seen = RANDOM.normal(size=(2, 8, 8, 1)).astype("f4"), []
    plain = model(x).numpy()
    with model[1].register_forward_hook(lambda layer, inputs, y: seen.append(y.shape)):
        np.testing.assert_allclose(model(x).numpy(), plain, rtol=1e-5, atol=1e-6)
    assert seen == [(2, 8, 8, 4)]


def test_a_copy_of_a_model_has_its_hooks():
    model, seen = build().initialize(seed=0), []
    handle = model.register_forward_hook(lambda layer, *_: seen.append(layer))
    other = copy.deepcopy(model)
    handle.remove()
    model(X)
    other(X)
    assert seen == [other]


def divided(path):
    def main(group):
        model = build()
        model.get(path).register_forward_hook(print)
        nnmpi.arrange(model, group, Layout(pp=2), sample=X[:1])

    return lambda: nnmpi.simulate(main, ranks=2)


def sharded(group):
    model = build()
    model[0].register_forward_hook(print)
    nnmpi.arrange(model, group, Layout(tp=2), sample=X[:1])


def test_what_is_refused():
    refuses(UsageError, "2 has a forward hook, but .* the layers of this Seq", divided("2"))
    refuses(UsageError, "the model has a forward hook, but a model that is", divided(""))
    refuses(LayoutError, "layer '0' has a forward hook", nnmpi.simulate, sharded, ranks=2)
    refuses(UsageError, "a forward hook is a function", build().register_forward_hook, 3)

    def later(group):
        model = build()
        first = model[0]
        nnmpi.arrange(model, group, Layout(tp=2), sample=X[:1])
        refuses(UsageError, "its part on this rank is", first.register_forward_hook, print)

    nnmpi.simulate(later, ranks=2)
