"""Adapters in a program: what is trained, kept, saved and refused."""

import copy

import numpy as np
import pytest

import nnmpi
from nnmpi import data, models, nn, ops, optim, simulate
from nnmpi.base.errors import CheckpointError
from nnmpi.nn.lora import LoRA
from tests.harness.refusals import refuses, usage_error

TOKENS = np.random.default_rng(0).integers(0, 13, (4, 6))


def gpt():
    """Return a small model with values."""
    return models.gpt(13, 6, 8, layers=2, heads=2).initialize(seed=0)


def step(model, optimizer):
    model.zero_grad()
    ops.cross_entropy(model(TOKENS), TOKENS).backward()
    optimizer.step()


def test_adapters_alone_are_trained():
    """In storage, optimizer state and gradients; the base keeps its values and the first result."""
    model = gpt()
    expected, before = model(TOKENS).data, model.state()
    nn.adapt(model, rank=3, alpha=6, targets="q,*.mlp.2").initialize(seed=1)
    assert np.array_equal(model(TOKENS).data, expected)
    sizes = 2 * (8 * 3 + 3 * 24 + 32 * 3 + 3 * 8)
    optimizer = optim.AdamW(model.storage, lr=0.1)
    assert model.storage.size == sum(item.size for item in model.parameters()) == sizes
    assert sum(array.size for array in model.storage.grads) < sizes + 8 * 16  # with gaps
    for _ in range(3):
        step(model, optimizer)
    base = dict(model.named_base())
    assert base.keys() == before.keys()
    for name, parameter in base.items():
        assert np.array_equal(parameter.data, before[name]) and parameter.grad is None, name
    assert not np.allclose(model(TOKENS).data, expected, atol=1e-2)
    plain = gpt()
    plain.load_state(nn.merge(model))
    np.testing.assert_allclose(plain(TOKENS).data, model(TOKENS).data, atol=1e-5)


def test_a_copy_trains_as_the_original_does():
    model = nn.adapt(gpt(), rank=2).initialize(seed=1)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        step(each, optim.SGD(each.storage, lr=0.5))
    assert np.array_equal(twin(TOKENS).data, model(TOKENS).data)
    assert {name for name, _ in twin.named_base()} == {name for name, _ in model.named_base()}


def test_a_base_without_values_draws_those_of_the_model_without_adapters():
    """By seed and name, which adapters leave as they are."""
    model = models.gpt(13, 6, 8, layers=2, heads=2)
    nn.adapt(model, rank=2).initialize(seed=0)
    assert np.array_equal(model(TOKENS).data, gpt()(TOKENS).data)


def test_what_could_not_be_trained_is_refused():
    model = gpt()
    usage_error(
        "no linear layer is called 'w'; there are '2.attention.qkv'", nn.adapt, model, 2, None, "w"
    )
    usage_error("LoRA's rank", nn.adapt, model, 0)
    nn.adapt(gpt(), 2)
    usage_error("single layer", nn.adapt, nn.Linear(3, 2))
    usage_error("adapts an nn.Linear, not a Conv2d", LoRA, nn.Conv2d(1, 1, 1))
    nn.adapt(model, 2).initialize(seed=0)
    usage_error("has adapters already", nn.adapt, model, 2)
    model.get("2.norm1").weight.requires_grad = True
    loss = ops.cross_entropy(model(TOKENS), TOKENS)
    usage_error("2.norm1.weight is of the base that adapters change", loss.backward)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_is_of_its_base(tmp_path, ranks):
    """Resumed on the same one it goes on; on another it is refused, and changes nothing."""

    def trained(group, seed, steps):
        model = models.gpt(13, 6, 8, layers=2, heads=2).initialize(seed=seed)
        nn.adapt(model, rank=2, dropout=0.2).initialize(seed=1)
        worker = nnmpi.Worker(model, optim.Adam(model.storage, lr=0.1), group, seed=3)
        folder = tmp_path / "saved"
        try:
            nnmpi.resume(folder, worker)
        except CheckpointError:
            worker.release()
            raise
        loader = data.Loader(data.Dataset("tokens", TOKENS, TOKENS, 13), 4, group, shuffle=False)
        for epoch in range(steps):
            for batch in loader.epoch(epoch):
                worker.step(batch)
        nnmpi.save(folder, worker)
        result = {name: item.copy() for name, item in model.state().items()}
        worker.release()
        return result

    saved = simulate(lambda group: trained(group, 0, 2), ranks)[0]
    assert {name.rpartition(".")[2] for name in saved} == {"lora_a", "lora_b"}
    again = simulate(lambda group: trained(group, 0, 0), 2)[0]
    assert all(np.array_equal(again[name], item) for name, item in saved.items())
    refuses(
        CheckpointError,
        "adapters of another base",
        simulate,
        lambda group: trained(group, 5, 0),
        ranks,
    )


def test_ranks_begin_with_one_base():
    """That of rank 0, as they begin with its weights."""

    def first(group):
        model = models.gpt(13, 6, 8, layers=2, heads=2).initialize(seed=group.rank)
        nn.adapt(model, rank=2).initialize(seed=0)
        parallel = nnmpi.DataParallel(model, group)
        result = model(TOKENS).data.copy()
        parallel.release()
        return result

    results = simulate(first, 3)
    assert all(np.array_equal(item, gpt()(TOKENS).data) for item in results)
