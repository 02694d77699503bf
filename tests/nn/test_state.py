"""Initial values, which depend on seed and name alone, and states, which fit or are refused."""

import copy
import pickle

import numpy as np
import pytest

import nnmpi
from nnmpi import nn, optim
from nnmpi.base.errors import CheckpointError, GraphError
from nnmpi.nn import (
    BatchNorm,
    Constant,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    Linear,
    Module,
    Normal,
    ReLU,
    Sequential,
    Uniform,
    fan_in,
    kaiming,
    training,
)
from tests.device.here import zeros
from tests.harness.refusals import refuses, usage_error


def model():
    """Return a small model with parameters and buffers."""
    return Sequential(Linear(3, 4), BatchNorm(4), ReLU(), Linear(4, 2))


class Named(Module):
    """Layers by name, in the order given."""

    def __init__(self, **layers):
        for name, layer in layers.items():
            setattr(self, name, layer)


# ---------------------------------------------------------------- initial values
def test_the_same_seed_gives_the_same_values():
    """Bit by bit, again and again; another seed gives others; every parameter has its own."""
    first, two, other = (model().initialize(seed).state() for seed in (3, 3, 4))
    for name in first:
        assert first[name].tobytes() == two[name].tobytes()
    assert not np.array_equal(first["0.weight"], other["0.weight"])
    assert not np.array_equal(first["0.weight"].ravel()[:4], first["3.weight"].ravel()[:4])


def test_values_do_not_depend_on_the_rest_of_the_model():
    """Not on the order of its layers, nor on other layers that were replaced: only on seed and full
    name.
    """
    item = Named(a=Linear(3, 4), b=Conv2d(1, 2, 3), c=Embedding(5, 2)).initialize(seed=1).state()
    two = (
        Named(c=Embedding(7, 2), b=Conv2d(1, 2, 3), x=Linear(9, 9), a=Linear(3, 4))
        .initialize(seed=1)
        .state()
    )
    for name in ("a.weight", "a.bias", "b.weight", "b.bias"):
        np.testing.assert_array_equal(item[name], two[name])
    first = Sequential(Linear(3, 4), ReLU(), Linear(4, 2)).initialize(seed=1)
    before = first.state()
    first.replace("0", Sequential(Linear(3, 8), Linear(8, 4)))
    after = first.initialize(seed=1).state()
    np.testing.assert_array_equal(before["2.weight"], after["2.weight"])


def test_known_values_stay_the_same():
    """A run of today can be repeated tomorrow: these are the first numbers of seed 0."""
    state = Sequential(Linear(2, 2)).initialize(seed=0, dtype="float64").state()
    expected = [
        [0.09577951063329504, 0.31386454612264947],
        [0.591714823274075, 0.35212811135422895],
    ]
    np.testing.assert_allclose(state["0.weight"], expected, rtol=1e-15)


@pytest.mark.parametrize("dtype", ["float16", "nonsense", float])
def test_dtypes_that_are_not_supported(dtype):
    """One sentence that says which are."""
    usage_error(
        "is not supported; choose float32 or float64", lambda: model().initialize(dtype=dtype)
    )


def test_groups_and_allocator_reach_the_storage():
    """Optimizer groups by name; memory from wherever it is asked for, also on a backend's terms."""
    asked = []

    def allocate(elements, dtype):
        asked.append((elements, np.dtype(dtype)))
        return zeros(elements, dtype)

    made = model().initialize(
        group=lambda name, parameter: name.partition(".")[0], allocate=allocate
    )
    assert made.storage.groups == ["0", "1", "3"]
    assert asked == [(32, np.float32)] * 6


def test_initializers():
    """Their spread is what they say."""
    rng = np.random.default_rng(0)
    values = Uniform(0.5)(rng, (10_000,))
    assert abs(values).max() < 0.5
    assert abs(values.std() - 0.5 / np.sqrt(3)) < 0.01
    assert abs(Normal(0.3)(rng, (10_000,)).std() - 0.3) < 0.01
    assert (Constant(2.5)(rng, (3,)) == 2.5).all()
    assert fan_in(16) == Uniform(0.25)
    assert kaiming(8) == Normal(0.5)
    assert fan_in(0) == Uniform(1.0)


@pytest.mark.parametrize(
    "layer, bounds",
    [
        (Linear(16, 200), {"weight": 1 / 4, "bias": 1 / 4}),
        (Conv2d(4, 300, (2, 2), groups=2), {"weight": 1 / np.sqrt(8), "bias": 1 / np.sqrt(8)}),
        (ConvTranspose2d(4, 400, 2, groups=4), {"weight": 1 / 20, "bias": 1 / 20}),
    ],
)
def test_layers_start_within_one_over_the_root_of_their_inputs(layer, bounds):
    """Close to the bound and not beyond it."""
    for name, bound in bounds.items():
        values = abs(layer.initialize(dtype="float64").state()[name])
        assert 0.95 * bound < values.max() <= bound


# ---------------------------------------------------------------- states
def test_there_and_back():
    """A state is a copy of everything, and puts everything back, buffers too."""
    made = model().initialize(seed=1)
    with training():
        made(np.random.default_rng(0).standard_normal((5, 3)).astype("float32"))
    state = made.state()
    assert list(state) == [
        "0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias",
        "1.running_mean", "1.running_variance",
    ]  # fmt: skip
    saved = {name: values.copy() for name, values in state.items()}
    for flat in made.storage.data:
        flat[...] = 7
    made[1].running_mean.data[...] = 7
    other = model().initialize(seed=2)
    other.load_state(saved)
    np.testing.assert_equal(state, saved)  # a copy: nothing above reached it
    np.testing.assert_equal(other.state(), state)
    assert np.shares_memory(other[0].weight.data, other.storage.data[0])
    assert not np.array_equal(saved["1.running_mean"], np.zeros(4))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"0.weight": None}, r"missing \['0.weight'\], unknown nothing"),
        ({"4.weight": np.zeros(1)}, r"missing nothing, unknown \['4.weight'\]"),
        (
            {"3.weight": np.zeros((2, 4), "float32")},
            r"3.weight is float32 \(2, 4\) in the state, but float32 \(4, 2\)",
        ),
        (
            {"3.weight": np.zeros((2, 4), "float32")},
            "to convert PyTorch's order of axes, see nnmpi.models.torch",
        ),
        (
            {"3.bias": np.zeros(2)},
            r"3.bias is float64 \(2,\) in the state, but float32 \(2,\) in the model",
        ),
        ({"3.bias": [0.0, 0.0]}, r"3.bias is a list in the state, but float32 \(2,\)"),
        ({"x": 1, 2: 3}, r"missing nothing, unknown \[2, 'x'\]"),
    ],
)
def test_states_that_do_not_fit(change, words):
    """Each mismatch is named, and nothing is changed."""
    made = model().initialize(seed=1)
    before = made.state()
    state = {**model().initialize(seed=2).state(), **change}
    refuses(
        CheckpointError,
        words,
        lambda: made.load_state(
            {name: values for name, values in state.items() if values is not None}
        ),
    )
    np.testing.assert_equal(made.state(), before)


def _tree():
    """Return an initialized model whose values are all 0.25."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).initialize(seed=5)
    model.load_state({name: np.full_like(x, 0.25) for name, x in model.state().items()})
    return model


def test_a_part_is_never_drawn_again():
    model = _tree()
    part = model.layers[0]
    for use in (
        lambda: optim.SGD(part.parameters(), lr=0.1),
        lambda: optim.SGD(nn.Sequential(part, nn.Linear(3, 4)).parameters(), lr=0.1),
    ):
        usage_error("another model's storage", use)
    assert all((x == 0.25).all() for x in model.state().values())


def test_a_part_is_clipped_alone():
    model = _tree()
    (model(np.ones((4, 3), "float32")) ** 2.0).sum().backward()
    part, grads = model.layers[0], model.storage.grads
    other = model.layers[1].parameters()[0].grad.copy()
    norm = np.sqrt(sum((x.grad**2).sum() for x in part.parameters()))
    assert optim.clip_by_global_norm(part.parameters(), 0.1) == pytest.approx(norm, rel=1e-5)
    assert optim.global_norm([x.grad for x in part.parameters()]) == pytest.approx(0.1, rel=1e-5)
    assert (model.layers[1].parameters()[0].grad == other).all() and grads is model.storage.grads


@pytest.mark.parametrize("later", [lambda model: model.initialize(seed=7), lambda model: None])
def test_a_part_that_was_loaded_alone_keeps_its_values_in_a_model(later):
    backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm(4))
    backbone.load_state(
        {name: np.full_like(x, 2) for name, x in backbone.initialize().state().items()}
    )
    model = nn.Sequential(backbone, nn.Linear(4, 2))
    later(model)
    optim.SGD(model.parameters(), lr=0.1)
    assert all((x == 2).all() for name, x in model.state().items() if name.startswith("0."))
    assert (model.layers[1].weight.data != 0).any()
    usage_error("another model's storage", lambda: optim.SGD(backbone.parameters(), lr=0.1))
    model.initialize(seed=1)  # all of it is the model's by now
    assert not (model.layers[0].layers[0].weight.data == 2).all()


def test_a_loaded_part_stays_in_the_model():
    model = _tree()
    part = model.layers[0]
    loss = model(np.ones((4, 3), "float32")).sum()
    part.load_state({name: np.full_like(x, 0.5) for name, x in part.state().items()})
    with pytest.raises(GraphError):
        loss.backward()
    assert model.parameters().storage is model.storage
    assert (model.storage.spans[0].parameter.data == 0.5).all()


def _pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("take", [lambda model: model, copy.deepcopy, _pickled])
def test_a_layer_added_after_initialize_is_refused_by_optimizer_and_zero_grad(take):
    model = take(_tree())
    model.set_child("1", nn.Linear(3, 4).initialize(seed=1))
    for use in (
        lambda: optim.SGD(model.parameters(), lr=0.1),
        lambda: optim.SGD(model.storage, lr=0.1),
        model.zero_grad,
    ):
        usage_error("added later", use)


def test_a_write_to_the_storage_between_the_passes_is_noticed():
    model = _tree()
    loss = (model(np.ones((4, 3), "float32")) ** 2.0).sum()
    for span in model.storage.spans:
        model.storage.write(span, span.parameter.data * 0)
    with pytest.raises(GraphError):
        loss.backward()


class _Grown(nn.Module):
    def __init__(self):
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.blocks, self.more = [nn.Linear(4, 4)], []
        self.weights = [nn.Parameter((4, 4), nn.Normal(0.1))]

    def forward(self, x):
        x = self.body(x) @ self.weights[0]
        for block in (*self.blocks, *self.more):
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, other: setattr(model, "head", other.head),
        lambda model, other: setattr(model.head, "weight", other.head.weight),
        lambda model, other: model.replace("head", other.head),
        lambda model, other: setattr(model, "blocks", (other.blocks[0],)),
        lambda model, other: model.blocks.__setitem__(0, other.blocks[0]),
        lambda model, other: model.blocks.append(other.blocks[0]),
        lambda model, other: model.more.append(other.blocks[0]),
        lambda model, other: model.weights.__setitem__(0, other.weights[0]),
        lambda model, other: setattr(model, "named", {"head": other.head}),
    ],
)
@pytest.mark.parametrize("how", ["optimizer", "worker", "compiled"])
def test_a_part_of_another_model_is_refused_in_whatever_way_it_comes(change, how):
    """It was made before the last step, so its making does not tell."""
    model, other = _Grown().initialize(seed=0), _Grown().initialize(seed=1)
    optimizer, x = optim.SGD(model.parameters(), lr=0.1), np.ones((4, 3), "float32")

    def own(x):
        for parameter in model.parameters():
            parameter.grad = None
        loss = (model(x) ** 2).sum()
        loss.backward()
        optimizer.step()
        return loss

    def program(group):
        worker = nnmpi.Worker(model, optimizer, group) if how == "worker" else None
        step = nnmpi.compile(own) if how == "compiled" else own
        run = step if worker is None else lambda x: worker.step(x, np.zeros(4, int))
        for _ in range(2):
            run(x)
        model.blocks = [*model.blocks]  # the same parts
        run(x)
        change(model, other)
        usage_error("added later|not registered and would not be trained", run, x)

    nnmpi.simulate(program, 1)


@pytest.mark.parametrize("take", [lambda part: part, copy.deepcopy])
def test_a_part_of_another_model_keeps_its_values_beside_new_ones(take):
    """A trained encoder under a new head; a model without new parts is drawn anew."""
    encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm(4))
    first = nn.Sequential(encoder, nn.Linear(4, 2)).initialize(seed=0)
    encoder.layers[1].running_mean.data[...] = 7
    before = encoder.state()
    model = nn.Sequential(take(encoder), nn.Linear(4, 5)).initialize(seed=1)
    for name, values in before.items():
        np.testing.assert_array_equal(model.state()[f"0.{name}"], values)
    assert first.layers[1].weight.data.any() and model.layers[1].weight.data.any()
    model.initialize(seed=2)
    assert not np.array_equal(model.layers[0].layers[0].weight.data, before["0.weight"])
    assert (model.layers[0].layers[1].running_mean.data == 0).all()
