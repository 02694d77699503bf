"""Chains: every way to cut a model gives the model's result, gradients and names; skips pair up or
are refused.
"""

import copy
from itertools import combinations

import numpy as np
import pytest

from nnmpi import Tensor, models, optim
from nnmpi.nn import BatchNorm, Linear, Pop, ReLU, Residual, Sequential, Stash, Tanh
from nnmpi.nn.chain import ModelPart, open_chain, run_layers, stashed_at
from nnmpi.optim import SGD
from tests.harness.refusals import usage_error


def skips():
    """Return a model whose skips overlap, with one inside an inner sequence that has the same name
    as an outer one.
    """
    inner = Sequential(Stash("a"), Linear(5, 5), Pop("a", Linear(5, 5)))
    return Sequential(
        Linear(4, 5),
        Stash("a"),
        Tanh(),
        Stash("b"),
        inner,
        Pop("a"),
        Residual(Sequential(Linear(5, 5), ReLU())),
        Pop("b"),
    )


def cuts(n, stages):
    """Return all ways to cut n layers into stages."""
    return [
        tuple(range(a, b) for a, b in zip((0, *inner), (*inner, n), strict=True))
        for inner in combinations(range(1, n), stages - 1)
    ]


def whole(model, x):
    """Return the result and the gradient of the input."""
    leaf = Tensor(x, requires_grad=True)
    result = model(leaf)
    result.sum().backward()
    assert leaf.grad is not None
    return result.data, leaf.grad


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_cut_gives_the_whole_model(stages):
    x = np.random.default_rng(0).standard_normal((3, 4))
    model = skips().initialize(seed=1, dtype="float64")
    expected = whole(model, x)
    layers = open_chain(model)
    for cut in cuts(len(layers), stages):
        value = Tensor(x, requires_grad=True)
        first, saved = value, {}
        for number in cut:
            stage = layers[number.start : number.stop]
            assert tuple(sorted(saved)) == stashed_at(layers, number.start)
            value = run_layers(stage, value, saved)
        value.sum().backward()
        assert first.grad is not None
        assert np.array_equal(value.data, expected[0])
        assert np.allclose(first.grad, expected[1])


@pytest.mark.parametrize(
    "model, shape, names",
    [
        (models.lstm(5, 8, 2), (4, 6), "0 3 4 5 6"),
        (models.cnn((8, 8, 1), 3), (4, 8, 8, 1), "0 3 6 7 8 9 10 11"),
    ],
)
def test_no_cut_changes_the_bits(model, shape, names):
    """What is one call is one layer: an embedding and what multiplies its table, for example."""
    model.initialize(seed=1)
    given = np.random.default_rng(0).integers(0, 5, shape)
    given = Tensor(given.astype("float32")) if len(shape) > 2 else given
    layers, results = open_chain(model), []
    assert [layer.name for layer in layers] == names.split()
    for cut in range(len(layers)):
        model.zero_grad()
        value = given
        for stage in (layers[:cut], layers[cut:]):
            value = run_layers(stage, value, {})
        value.sum().backward()
        results.append(np.concatenate([p.grad.ravel() for p in model.parameters()]))
    assert all(np.array_equal(results[0], other) for other in results)


@pytest.mark.parametrize("model", [models.mlp, models.cnn, models.resnet])
def test_parts_have_the_names_and_values_of_the_whole(model):
    expected = model((8, 8, 1), 10).initialize(seed=3).state()
    built = model((8, 8, 1), 10)
    layers = open_chain(built)
    result = {}
    for stage in (layers[:2], layers[2:5], layers[5:]):
        entries = ModelPart(built, stage).initialize(seed=3).entries()
        result |= {name: entry.data for name, entry in entries.items()}
    np.testing.assert_equal(result, expected)


def test_a_part_is_copied_and_is_not_taken_for_the_whole():
    layers = open_chain(model := models.mlp((8,), 10))
    stage = ModelPart(model, layers[:2]).initialize(seed=3)
    twin = copy.deepcopy(stage)
    for ours, theirs in zip(stage.named_parameters(), twin.named_parameters(), strict=True):
        assert ours[0] == theirs[0] and ours[1] is not theirs[1]
        assert np.array_equal(ours[1].data, theirs[1].data)
    for call in (stage.state, lambda: stage.load_state({})):
        usage_error("only part of this model's parameters", call)
    usage_error(
        "takes the norm over the pipeline",
        lambda: optim.clip_by_global_norm(twin.parameters(), 1.0),
    )


def test_a_shared_parameter_has_its_first_name_in_every_part():
    model = Sequential(Linear(3, 3), ReLU(), Linear(3, 3))
    model[2].weight = model[0].weight
    layers = open_chain(model)
    names = [
        [name for name, _ in ModelPart(model, stage).named_parameters()]
        for stage in (layers[:2], layers[2:])
    ]
    assert names == [["0.weight", "0.bias"], ["0.weight", "2.bias"]]


@pytest.mark.parametrize(
    "layers, sentence",
    [
        ([Stash("a"), ReLU()], "never popped"),
        ([ReLU(), Pop("a")], "without a Stash"),
        ([Stash("a"), Stash("a"), Pop("a")], "comes twice"),
        ([Stash("a"), Sequential(Pop("a"))], "without a Stash"),
    ],
)
def test_skips_that_do_not_pair_up_are_refused(layers, sentence):
    model = Sequential(*layers).initialize()
    usage_error(sentence, lambda: model(Tensor(np.ones((2, 2)))))
    usage_error(sentence, open_chain, model)


def test_a_shared_layers_running_statistics_have_all_its_names():
    norm = BatchNorm(3)
    model = Sequential(Linear(3, 3), norm, Linear(3, 3), norm)
    part = ModelPart(model, open_chain(model))
    assert [name for name, _ in part.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert len(part.parameters()) == len(model.parameters())


def test_a_part_without_an_optimizer_group_of_the_model_knows_it():
    model = Sequential(Linear(3, 3), Tanh(), Linear(3, 2))
    layers = open_chain(model)
    first, last = ModelPart(model, layers[:2]), ModelPart(model, layers[2:])
    for part, local in ((first, "body"), (last, "head")):
        part.initialize(group=lambda name, _: "head" if name.startswith("2") else "body")
        assert part.storage.groups == [local]
        SGD(part.storage, lr=0.1, weight_decay={"head": 0.1, "body": 0.2})
        usage_error(
            "'tail', which does not exist; choose from: body, head",
            SGD,
            part.storage,
            lr=0.1,
            weight_decay={"tail": 0.1},
        )
