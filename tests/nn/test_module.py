"""The module tree: names, shared parts, edits from outside, and what is said about mistakes."""

import copy
import pickle

import numpy as np
import pytest

from nnmpi import Tensor
from nnmpi.base.errors import DtypeError, GraphError, ShapeError
from nnmpi.base.shard import Region
from nnmpi.nn import (
    BatchNorm,
    Buffer,
    Embedding,
    Linear,
    Module,
    Parameter,
    ReLU,
    Residual,
    Sequential,
    TiedLinear,
    observed,
)
from nnmpi.ops import linear
from nnmpi.optim import SGD
from tests.harness.refusals import refuses, usage_error


def zeros(generator, shape):
    """Initialize with zeros."""
    return np.zeros(shape)


class Twice(Module):
    """The example at the head of module.py."""

    def __init__(self, features):
        self.first = Linear(features, features)
        self.rest = [ReLU(), Linear(features, features)]

    def forward(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return x


class Everything(Module):
    """Parameters, buffers and modules as attributes and in lists, among what is none of them."""

    def __init__(self):
        self.size = 3
        self.scale = Parameter((), zeros)
        self.nothing = None
        self.body = Twice(2)
        self.parts = (Linear(2, 1), "text", BatchNorm(2))
        self.steps = [Parameter((1,), zeros), 7, Parameter((2,), zeros)]
        self.seen = Buffer((2,), 5.0)
        self.offset = Parameter((2,), zeros)


class Shares(Module):
    """One layer under two names, and one parameter in two layers."""

    def __init__(self):
        self.a = Linear(2, 2)
        self.b = Linear(2, 2, bias=False)
        self.b.weight = self.a.weight
        self.again = self.a

    def forward(self, x):
        return self.again(self.b(self.a(x)))


def test_full_names():
    """Paths of attributes and numbers; a module's own parameters first, then its modules' in order
    of definition.
    """
    model = Everything()
    assert [name for name, _ in model.named_modules()] == [
        "",
        "body",
        "body.first",
        "body.rest.0",
        "body.rest.1",
        "parts.0",
        "parts.2",
    ]
    assert [name for name, _ in model.named_parameters()] == [
        "scale",
        "steps.0",
        "steps.2",
        "offset",
        "body.first.weight",
        "body.first.bias",
        "body.rest.1.weight",
        "body.rest.1.bias",
        "parts.0.weight",
        "parts.0.bias",
        "parts.2.weight",
        "parts.2.bias",
    ]
    assert [name for name, _ in model.named_buffers()] == [
        "seen",
        "parts.2.running_mean",
        "parts.2.running_variance",
    ]
    assert model.parameters() == [parameter for _, parameter in model.named_parameters()]


def test_a_sequence_names_by_number():
    """And is a list: length, items, slices of the same objects."""
    model = Sequential(Linear(2, 3), ReLU(), Sequential(Linear(3, 1, bias=False)))
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.0.weight"]
    assert len(model) == 3
    assert isinstance(model[1], ReLU)
    part = model.slice(1, 3)
    assert [part[0], part[1]] == [model[1], model[2]]
    assert len(model.slice(2, 2)) == 0
    for start, stop in ((-1, 2), (2, 1), (0, 4)):
        usage_error(rf"slice {start}\.\.{stop} .* 3 modules", model.slice, start, stop)


def test_shared_parts_stand_once():
    """By their first name, with the sum of their gradients, in the storage once."""
    model = Shares().initialize(dtype="float64")
    assert [name for name, _ in model.named_parameters()] == ["a.weight", "a.bias"]
    assert [name for name, _ in model.named_modules()] == ["", "a", "b", "again"]
    assert model.storage.size == 6
    x = Tensor(np.array([[1.0, 2.0]]))
    model(x).sum().backward()
    weight, bias = (Tensor(p.data.copy(), requires_grad=True) for p in model.parameters())
    h = (x @ weight + bias) @ weight
    (h @ weight + bias).sum().backward()
    np.testing.assert_allclose(model.a.weight.grad, weight.grad)
    np.testing.assert_allclose(model.a.bias.grad, bias.grad)
    assert model.a.weight.grad is model.a.weight.buffer


def test_replace():
    """Anywhere in the tree: attributes, items of lists, items of sequences; only that place."""
    model = Sequential(Residual(Twice(2), Linear(2, 2)), Shares())
    for path in ("0.body.first", "0.body.rest.1", "0.shortcut", "1.again", "1", "0.body"):
        before = dict(model.named_modules())
        new = Twice(2)
        model.replace(path, new)
        after = dict(model.named_modules())
        assert model.get(path) is after[path] is new
        elsewhere = [name for name in before if name != path and not name.startswith(path + ".")]
        assert all(after[name] is before[name] for name in elsewhere)


@pytest.mark.parametrize(
    "use, words",
    [
        (
            lambda m: m.get("body.second"),
            "no module 'body.second'; there are '', 'body', 'body.first'",
        ),
        (
            lambda m: m.set_child("size", ReLU()),
            "Everything has no module 'size' that can be replaced",
        ),
        (lambda m: Sequential(ReLU()).set_child("1", ReLU()), r"no module 'layers\.1'"),
    ],
)
def test_modules_that_are_not_there(use, words):
    """The message names what there is."""
    usage_error(words, lambda: use(Everything()))


@pytest.mark.parametrize("within", [lambda x: {"a": x}, lambda x: [[x]]])
@pytest.mark.parametrize(
    "make", [lambda: Linear(2, 2).initialize(), lambda: Linear(2, 2), lambda: Parameter((2,))]
)
def test_a_part_that_is_not_found_is_refused(within, make):
    """One with values of its own would compute, and not be trained; one that is found elsewhere,
    too, is.
    """
    hidden, model = make(), Residual(Linear(2, 2))
    model.body.others = within(hidden)
    usage_error(
        f"body.others holds a {type(hidden).__name__} that is not registered", model.initialize
    )
    model.mine = hidden
    assert "mine" in " ".join(name for name, _ in model.initialize().named_parameters())


def test_before_initialize():
    """Forward, storage and state say what to call."""
    model = Twice(2)
    for use in (lambda: model(np.ones((1, 2), np.float32)), lambda: model.storage, model.state):
        refuses(GraphError, r"call model.initialize\(seed=0\) first", use)


def test_observers_see_every_module():
    """In the order in which they end, inside the block only."""
    model = Sequential(Linear(2, 2), Residual(Linear(2, 2))).initialize()
    seen = []
    with observed(lambda module, result: seen.append((module.path, result.shape))):
        model(np.ones((3, 2), np.float32))
    model(np.ones((3, 2), np.float32))
    assert seen == [("0", (3, 2)), ("1.body", (3, 2)), ("1", (3, 2)), ("", (3, 2))]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copied_model_has_a_storage_of_its_own(duplicate):
    """With a shared, a frozen and a given parameter, statistics and groups; and it is trained
    alone.
    """
    model = Sequential(Linear(3, 3), BatchNorm(3), Linear(3, 3))
    model[2].weight, model[2].bias = model[0].weight, Parameter(np.full(3, 7, "float32"))
    model.initialize(seed=3, group=lambda _, p: "weight" if p.ndim > 1 else "bias")
    model[0].bias.requires_grad = False
    fresh = duplicate(Sequential(Linear(3, 3)))
    # copied without values
    assert np.array_equal(fresh.initialize(3)[0].weight.data, model[0].weight.data)
    before = model.state()
    result = duplicate(model)
    assert result[2].weight is result[0].weight and result.storage.groups == model.storage.groups
    optimizer = SGD(result.storage, lr=1.0, weight_decay={"weight": 0.5})
    result(np.ones((2, 3), "float32")).sum().backward()
    optimizer.step()
    moved = {
        name for name, value in result.state().items() if not np.array_equal(value, before[name])
    }
    assert moved == {"0.weight", "1.weight", "1.bias", "2.bias"}
    np.testing.assert_equal(model.state(), before)
    assert not model.storage.has_gradients


@pytest.mark.parametrize("numbers", [[[1.0, 2.0]], ((1, 2), (3, 4))])
def test_lists_of_numbers_are_refused(numbers):
    """Their dtype would have to be guessed."""
    refuses(
        DtypeError,
        r"lists of numbers; convert with numpy\.asarray",
        lambda: Linear(2, 2).initialize()(numbers),
    )


def test_a_forgotten_return_is_named():
    refuses(
        GraphError,
        "Linear got None; the forward that made it must return",
        lambda: Linear(2, 2).initialize()(None),
    )


def test_a_module_that_contains_itself_is_refused():
    """Directly, or through another one; the sentence has its name."""

    class Chain(Module):
        def __init__(self, *parts):
            self.parts = [*parts]

    outer, inner = Chain(Linear(2, 2)), Chain()
    outer.parts.append(inner)
    for parts, name in ((inner.parts, "parts.1.parts.0"), (outer.parts, "parts.2")):
        parts.append(outer)
        for use in (Module.initialize, repr, Module.parameters):
            usage_error(f"module '{name}' contains itself; remove that", use, outer)
        parts.pop()
    assert len(outer.initialize().parameters()) == 2


def test_residual():
    """relu(body(x) + shortcut(x)); without a shortcut, x itself; shapes must fit."""
    body, shortcut = Linear(2, 2), Linear(2, 2)
    x = np.array([[1.0, -2.0]], np.float32)
    for block in (Residual(body, shortcut), Residual(body)):
        block.initialize(seed=3)
        around = x if block.shortcut is None else shortcut(x).data
        np.testing.assert_allclose(block(x).data, np.maximum(body(x).data + around, 0), rtol=1e-6)
    refuses(ShapeError, "add of shapes", lambda: Residual(Linear(2, 3)).initialize()(x))


class _Tied(Module):
    """An output that is tied to an embedding by assignment, in one direction or the other."""

    def __init__(self, vocabulary, width, reverse):
        self.table, self.head = Embedding(vocabulary, width), Linear(width, vocabulary, bias=False)
        if reverse:
            self.table.weight = self.head.weight
        else:
            self.head.weight = self.table.weight


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("vocabulary", [4, 5])
def test_a_table_is_no_linear_layers_weight(vocabulary, reverse):
    """With as many words as features it was, transposed, and nothing was said."""
    usage_error(
        r"head.weight is table.weight, but .*nn.TiedLinear\(",
        lambda: _Tied(vocabulary, 4, reverse).initialize(),
    )
    model = Sequential(Embedding(vocabulary, 4), Linear(4, 4)).initialize()
    layers = dict(model.children())
    layers["1"].weight = layers["0"].weight  # after it got its values
    usage_error("1.weight is 0.weight", model.check_stored)
    usage_error(
        r"table \(rows, features\); call nnmpi.nn.TiedLinear",
        lambda: linear(Tensor(np.ones((1, 4), "float32")), layers["0"].weight),
    )


def test_layers_alike_may_share_a_weight():
    model = Sequential(Linear(3, 3), Linear(3, 3), Embedding(5, 3))
    layers = dict(model.children())
    layers["1"].weight = layers["0"].weight
    layers["2"].weight = Parameter(np.ones((5, 3), "float32"))  # rows of one's own
    assert len(model.initialize().parameters()) == 4
    assert TiedLinear(layers["2"])(np.ones((1, 3), "float32")).shape == (1, 5)


# First values are drawn one parameter at a time: a rank with a part of a model never holds the
# whole of it.


WIDTH, LAYERS, RANKS = 128, 12, 8


def _share():
    """Return a model of which only an eighth of each weight is here."""
    model = Sequential(*(Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for _, module in model.named_modules():
        if isinstance(module, Linear):
            region = Region((WIDTH, WIDTH), 1, 0, WIDTH // RANKS)
            module.weight = Parameter(region.local_shape, module.weight.init, region)
    return model


def test_each_is_the_region_of_what_the_whole_would_draw():
    part = _share().initialize(seed=3, dtype="float64")
    full = Sequential(*(Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).initialize(
        seed=3, dtype="float64"
    )
    for (name, mine), (_, other) in zip(
        part.named_parameters(), full.named_parameters(), strict=True
    ):
        assert np.array_equal(mine.data, other.data[:, : WIDTH // RANKS]), name
