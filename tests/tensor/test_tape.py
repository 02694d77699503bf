"""The tape: graphs of any shape, graphs that meet, graphs used up."""

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, models, nn, ops, optim
from nnmpi.base.errors import GraphError, ShapeError
from nnmpi.ops import cross_entropy
from nnmpi.tensor import Function
from nnmpi.tensor.backward import Deferred
from tests.harness.refusals import refuses
from tests.tensor.graphs import leaf


def test_pairwise_sums_join_tapes_in_a_tree():
    """Joined tapes find their end however deep the joins are."""
    layer = leaves = [leaf(float(i)) * 1.0 for i in range(2**12)]
    while len(layer) > 1:
        layer = [a + b for a, b in zip(layer[::2], layer[1::2], strict=True)]
    assert leaves[0].tape.find() is layer[0].tape.find()
    layer[0].backward()
    assert layer[0].item() == sum(range(2**12))


# ---------------------------------------------------------------- shapes of graphs
def test_a_diamond():
    """Two ways from x to y: the gradients add up."""
    x = leaf([2.0, 3.0])
    a = x * x
    y = (a * 3.0 + a.exp()).sum()
    y.backward()
    np.testing.assert_allclose(x.grad, (3 + np.exp(x.data**2)) * 2 * x.data)


def test_graphs_that_meet():
    """Two graphs grown apart, used together, and each used again after they met."""
    x, z = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    a, b = (x * 2.0) * x, z * 3.0
    c = a * b
    d = a + c + b
    d.sum().backward()
    np.testing.assert_allclose(x.grad, 4 * x.data * (1 + 3 * z.data))
    np.testing.assert_allclose(z.grad, 3 * (2 * x.data**2 + 1))


def test_a_part_of_a_graph():
    """Backward from the middle reaches what is below it and leaves the rest as it was."""
    x = leaf([1.0, 2.0])
    a = x * x
    b = a * 5.0
    other = x * 7.0
    a.sum().backward()
    np.testing.assert_array_equal(x.grad, 2 * x.data)
    other.sum().backward()
    np.testing.assert_array_equal(x.grad, 2 * x.data + 7)
    refuses(GraphError, "used up by an earlier backward pass", lambda: b.sum().backward())


def test_backward_of_a_leaf():
    """A leaf's own gradient is what it is given, added up."""
    x, seed = leaf([1.0, 2.0]), np.array([3.0, 4.0])
    x.backward(seed)
    x.backward(seed)
    np.testing.assert_array_equal(x.grad, [6, 8])
    np.testing.assert_array_equal(seed, [3, 4])


# ---------------------------------------------------------------- once, or more than once


def test_retain_graph_lets_backward_run_twice():
    """Gradients double; a third pass that does not retain ends it."""
    x = leaf([1.0, 2.0])
    h = x * x
    y = (h * h + h).sum()
    y.backward(retain_graph=True)
    once = x.grad.copy()
    y.backward(retain_graph=True)
    np.testing.assert_array_equal(x.grad, 2 * once)
    y.backward()
    np.testing.assert_array_equal(x.grad, 3 * once)
    for used in (y, (h * 2.0).sum()):  # and what is built on a part of it
        refuses(GraphError, "retain_graph=True", used.backward)


def test_an_exception_in_backward_leaves_no_gradients_behind():
    """The next pass over what is left starts clean."""

    class Fails(Function):
        def forward(self, x):
            return x * 1.0

        def backward(self, grad):
            raise ArithmeticError("on purpose")

    x = leaf([1.0, 2.0])
    a = x * 2.0
    b = Fails()(a)
    c = (a + b).sum()
    with pytest.raises(ArithmeticError):
        c.backward()
    x.grad = None
    a.sum().backward()
    np.testing.assert_array_equal(x.grad, [2, 2])


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: Tensor([1.0]).backward(), GraphError, "depends on nothing that needs a gradient"),
        (lambda: leaf([1.0, 2.0]).backward(), ShapeError, r"shape \(2,\) needs grad"),
        (
            lambda: leaf([1.0, 2.0]).backward(np.ones(3)),
            ShapeError,
            r"\(2,\) got a gradient of shape \(3,\)",
        ),
        (lambda: leaf(1.0).detach().backward(), GraphError, "detached"),
    ],
)
def test_backward_that_makes_no_sense(make, error, words):
    """Each says what is missing."""
    refuses(error, words, make)


# A backward pass in halves gives the whole pass's gradients, and the first half none of the
# parameters'.


def tied():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64)
    )
    model[3].weight = model[1].weight
    return model


MODELS = {
    "mlp": lambda: models.mlp((8, 8, 1), 10, dropout=0.3),
    "cnn": lambda: models.cnn((8, 8, 1), 10),
    "resnet": lambda: models.resnet((8, 8, 1), 10),
    "tied": tied,
}


def gradients(name, halves, microbatches=2):
    """Return the inputs' and the parameters' gradients; with halves, all first ones come before any
    second one.
    """
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
    result = {n: p.grad for n, p in model.named_parameters()}
    assert all(grad is not None for grad in result.values())
    return inputs, {n: np.array(grad) for n, grad in result.items()}


@pytest.mark.parametrize("name", MODELS)
def test_halves_make_a_whole(name):
    full, halves = gradients(name, halves=False), gradients(name, halves=True)
    assert all(np.array_equal(a, b) for a, b in zip(full[0], halves[0], strict=True))
    assert full[1].keys() == halves[1].keys()
    for parameter, grad in full[1].items():
        np.testing.assert_array_equal(halves[1][parameter], grad, err_msg=parameter)


def test_what_is_finished_is_used_up():
    model = MODELS["mlp"]().initialize()
    loss = model(Tensor(np.ones((2, 8, 8, 1), np.float32))).sum()
    deferred = Deferred()
    loss.backward(deferred=deferred)
    deferred.finish()
    once = [np.array(parameter.grad) for parameter in model.parameters()]
    deferred.finish()
    assert all(
        np.array_equal(p.grad, grad) for p, grad in zip(model.parameters(), once, strict=True)
    )
    refuses(GraphError, "used up", loss.backward)


def test_halves_serve_no_hooks_and_retain_nothing():
    model = MODELS["mlp"]().initialize()
    x = np.ones((2, 8, 8, 1), np.float32)
    refuses(
        GraphError,
        "in halves",
        lambda: model(x).sum().backward(retain_graph=True, deferred=Deferred()),
    )
    model.parameters()[0].hook = lambda parameter: None
    refuses(GraphError, "in halves", lambda: model(x).sum().backward(deferred=Deferred()))


def test_written_parameters():
    """A backward that needs weights as they were refuses those that were written since; others go
    on.
    """
    x, model = Tensor(np.ones((2, 3), "float32")), models.mlp((3,), 2, hidden=(4,)).initialize()
    optimizer, state = (
        optim.SGD(model.storage, lr=0.1),
        {name: x.copy() for name, x in model.state().items()},
    )
    weight = model.parameters()[0]
    uses = [
        lambda: model(x),
        lambda: Tensor(np.ones((2, 4), "float32")) @ weight.T.reshape(2, 2, 3).reshape(4, 3),
        lambda: weight * weight,
    ]
    for use in uses:
        for write in (optimizer.step, lambda: model.load_state(state)):
            result = use().sum()
            (weight * 1.0).sum().backward()
            write()
            refuses(GraphError, "changed before its backward", result.backward)
            use().sum().backward()
    product = ops.linear(x, weight).sum()
    optimizer.step()
    product.backward()  # which needs no weight, as x needs no gradient
    total, stashed = (
        (weight + 1.0).sum(),
        (Tensor(np.ones(weight.shape, "float32"), requires_grad=True) * weight).sum(),
    )
    # as PipeDream does before it updates
    model.storage.move(data=[item.copy() for item in model.storage.data])
    optimizer.step()
    total.backward()  # nor does this
    stashed.backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_views_add_to_a_part_of_the_gradient(compiled):
    """Before and after another use whose gradient is shared, of one element and of overlapping
    parts; a gradient of the whole size is made once, not for every view.
    """
    x = Tensor(np.arange(6.0).reshape(3, 2), requires_grad=True)

    def step():
        x.grad = None
        y = x * 2
        z = y[0].sum() + (y + y).sum() + 3 * y[0, 1] + y[..., 1:].sum() + y[None, -1].sum()
        z.backward()
        return z

    step = nnmpi.compile(step) if compiled else step
    for _ in range(3):
        step()
        np.testing.assert_array_equal(x.grad, [[6, 14], [4, 6], [6, 8]])


@pytest.mark.parametrize("compiled", [False, True])
def test_views_leave_a_shared_gradient_alone(compiled):
    """A sum passes one array to both operands; the view adds to a copy for one of them."""
    x = Tensor(np.arange(6.0).reshape(3, 2), requires_grad=True)
    weights = np.arange(1.0, 7).reshape(3, 2)

    def step():
        x.grad = None
        # of one tape, so that the view's backward comes before that of `other`
        both = x * 1
        y, other = both * 2, both * 3
        first = y[0]
        z = ((y + other) * weights).sum() + first.sum()
        z.backward()
        return z

    step = nnmpi.compile(step) if compiled else step
    for _ in range(3):
        step()
        np.testing.assert_array_equal(x.grad, 5 * weights + [[2], [0], [0]])


@pytest.mark.host_only("it counts the arrays that NumPy makes")
def test_a_loop_over_time_takes_linear_time():
    """The gradient of 500 steps of a sequence makes few arrays of the sequence's size."""
    x = Tensor(np.ones((500, 1000)), requires_grad=True)
    y = x * 2
    z = sum(y[t].sum() for t in range(len(y)))
    sizes = []
    make = np.zeros
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            np, "zeros", lambda shape, *args: (sizes.append(shape), make(shape, *args))[1]
        )
        z.backward()
    assert sizes.count((500, 1000)) == 1
    np.testing.assert_array_equal(x.grad, np.full((500, 1000), 2.0))
