"""Adapters in a program: what is trained, kept, saved and refused."""

import copy

import numpy as np
import pytest

import nnmpi
from nnmpi import GradientExchange, Layout, arrange, data, models, nn, ops, optim, simulate
from nnmpi.base.errors import CheckpointError, UninitializedError
from nnmpi.compose.state import base_digest
from nnmpi.memory.layers import measure, of_chain
from nnmpi.nn.chain import open_chain
from nnmpi.nn.lora import LoRA
from nnmpi.tensor.tensor import Tensor
from tests.harness.refusals import refuses, usage_error
from tests.memory.test_recompute import store_here

TOKENS = np.random.default_rng(0).integers(0, 13, (4, 6))
LAYOUTS = [  # ranks, layout, how it gathers, and the base's dtype
    (2, Layout(zero=3, unit_bytes=1), "native", "bf16"),
    (3, Layout(zero=3), "ring", None),
    (3, Layout(zero=3), "auto", "bf16"),
    (4, Layout(dp=2, tp=2, zero=3, unit_bytes=1), "native", None),
    (4, Layout(dp=2, pp=2, split=(3, 5), zero=3, unit_bytes=1), "ring", "bf16"),
    (2, Layout(zero=3, unit_bytes=1, activation_memory="least"), "native", "bf16"),
    (2, Layout(zero=2), "auto", "bf16"),
]


def gpt():
    """Return a small model with values."""
    return models.gpt(13, 6, 8, layers=2, heads=2).initialize(seed=0)


def llama():
    """Return a small one, untied, with values."""
    return models.llama(13, 6, 16, layers=2, heads=4, kv_heads=2).initialize(seed=0)


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


def test_weights_that_stay_are_no_activations():
    """Nothing saves them for a backward pass, counts them there, or sends them out; and no layer
    keeps its input for a gradient of theirs.
    """

    def activations(layout, width):
        def program(group):
            model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.ReLU())
            model = nn.Sequential(nn.Linear(8, 8), *model, nn.Linear(8, 3))
            nn.adapt(model, 1, targets="0")
            where = arrange(model, group, layout, np.zeros((2, 8), "float32"))
            model = where.model.initialize(seed=0)
            worker = nnmpi.Worker(model, optim.SGD(model.storage, lr=0.1), group, arrangement=where)
            for _ in range(2):
                worker.step(np.ones((2, 8), "float32"), np.zeros(2, int))
            return nnmpi.memory.report().peaks["activations"]

        return simulate(program, 1)[0]

    for layout in (Layout(), Layout(activation_memory=10**9)):
        narrow, wide = (activations(layout, width) for width in (100, 1100))
        # of 2 rows: the mask of the ReLU, and what passes make of them
        assert (wide - narrow) / 1000 < 2 * 4 * 8, layout


def test_a_plan_neither_counts_nor_moves_weights_that_stay(tmp_path):
    """A layer's backward pass reads them, and they are no part of what the layer saves for it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 700), nn.ReLU())
    model = nn.Sequential(*model, nn.Linear(700, 8), nn.ReLU(), nn.Linear(8, 8))
    nn.adapt(model, 1, targets="0").initialize(seed=0)
    store, backend = store_here(tmp_path)
    layers = of_chain(model, open_chain(model), "float32", backend)
    x = Tensor(backend.asarray(np.ones((64, 8), np.float32)), requires_grad=True)
    costs = {cost.name: cost for cost in measure(layers, x, backend, store)}
    assert costs["4"].saved < 8 * 700 * 4 and costs["4"].moves
    store.close()


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
    layers = r"'\*.attention.qkv', '\*.attention.proj', '\*.mlp.0', '\*.mlp.2'$"
    sentence = f"no linear layer is called 'w'; there are {layers}"
    usage_error(sentence, nn.adapt, model, 2, None, "w")
    usage_error("LoRA's rank", nn.adapt, model, 0)
    nn.adapt(gpt(), 2)
    usage_error("single layer", nn.adapt, nn.Linear(3, 2))
    usage_error("the layer is a Conv2d", LoRA, nn.Conv2d(1, 1, 1))
    nn.adapt(model, 2).initialize(seed=0)
    usage_error("has adapters already", nn.adapt, model, 2)
    model.get("2.norm1").weight.requires_grad = True
    loss = ops.cross_entropy(model(TOKENS), TOKENS)
    usage_error("2.norm1.weight is of the base that adapters change", loss.backward)
    usage_error("choose 'bf16'", nn.adapt, gpt(), 2, base_dtype="int8")


def test_what_an_adapter_would_drop_is_refused():
    """A forward, a hook, and what a layout or a strategy has made of a model."""
    model, inner = gpt(), gpt().get("2.mlp.0")
    model.get("2.mlp.0").forward = lambda x: 2 * inner(x)
    usage_error("2.mlp.0 has a forward or a hook of your own", nn.adapt, model, 2, None, "*.mlp.0")
    model = gpt()
    with model.get("3.attention.qkv").register_forward_hook(lambda *_: None):
        usage_error("qkv has a forward or a hook of your own", nn.adapt, model)

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(4, 6), Doubled(6, 3))
    usage_error("1 is a Doubled, whose forward", nn.adapt, model, 2, None, "all-linear")
    assert not any(parameter.is_base for _, parameter in model.named_parameters())
    nn.adapt(model, 2, None, "0")

    def parted(group):
        model = models.gpt(13, 6, 8, layers=2, heads=2)
        where = arrange(model, group, Layout(tp=2), TOKENS, "float32")
        usage_error("call nn.adapt before", nn.adapt, where.model)
        adapted = nn.adapt(models.gpt(13, 6, 8, layers=2, heads=2))
        for layout in (Layout(tp=2), Layout(pp=2, split=(4, 4))):
            where = arrange(adapted, group, layout, TOKENS, "float32")
            usage_error("only part of the model", nn.merge, where.model.initialize(0))
            adapted = nn.adapt(models.gpt(13, 6, 8, layers=2, heads=2))

    simulate(parted, 2)


def test_a_layer_in_two_places_has_one_adapter():
    """As it has one weight, before and after."""

    def build():
        layer = nn.Linear(6, 6)
        return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(6, 2)).initialize(seed=0)

    model = nn.adapt(build(), 2, targets="all-linear").initialize(seed=0)
    assert [name for name, _ in model.named_parameters()] == [
        "0.lora_a",
        "0.lora_b",
        "3.lora_a",
        "3.lora_b",
    ]
    assert model.get("0") is model.get("2")
    model.get("0").lora_b.data[...] = 0.1
    plain, x = build(), np.ones((1, 6), "float32")
    plain.load_state(nn.merge(model))
    np.testing.assert_allclose(plain(x).data, model(x).data, atol=1e-6)


def rounded(model):
    """Return a model whose weights are numbers of bfloat16."""
    values = {name: item.astype("float32") for name, item in model.state().items()}
    bits = {name: item.view("uint32") & np.uint32(0xFFFF0000) for name, item in values.items()}
    dtype = model.storage.dtype
    model.load_state({name: item.view("float32").astype(dtype) for name, item in bits.items()})
    return model


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("build", [gpt, llama])
def test_a_base_in_bfloat16_is_that_of_its_rounded_weights(build, dtype):
    """Bit for bit, in steps that are replayed, too; matrices take 2 bytes an element."""

    def program(group, low):
        model = rounded(build().initialize(seed=0, dtype=dtype))
        nn.adapt(model, 2, targets="all-linear", base_dtype=low).initialize(seed=1, dtype=dtype)
        twin = copy.deepcopy(model)
        worker = nnmpi.Worker(model, optim.Adam(model.storage, lr=0.1), group)
        losses = [worker.step(TOKENS, TOKENS).loss for _ in range(7)]
        worker.release()
        held = nnmpi.memory.report().held["parameters"]
        return losses, held, twin(TOKENS).data, model(TOKENS).data, nn.merge(model), model

    (losses, held, first, last, merged, model), other = (
        simulate(lambda group, low=low: program(group, low), 1)[0] for low in ("bf16", None)
    )
    assert losses == other[0]
    assert np.array_equal(first, other[2]) and np.array_equal(last, other[3])
    for name, array in other[4].items():
        assert np.array_equal(merged[name], array) and merged[name].dtype == dtype
    matrices = sum(item.size for _, item in model.named_base() if item.ndim > 1)
    assert other[1] - held == matrices * (np.dtype(dtype).itemsize - 2)
    weight = dict(model.named_base())["0.tokens.weight"]
    assert weight.dtype == dtype and weight.numpy().dtype == dtype
    if isinstance(weight.data, np.ndarray):  # a device's arrays are never so
        with pytest.raises(ValueError, match="read-only"):
            weight.data[...] = 0


@pytest.mark.parametrize("ranks, layout, way, low", LAYOUTS)
def test_zero_3_shards_the_base(ranks, layout, way, low):
    """It computes what the serial run does, and its bytes are as predicted."""
    tokens = np.concatenate([TOKENS, TOKENS + 1]) % 13

    def program(group, layout):
        model = models.gpt(13, 6, 8, layers=2, heads=2)
        nn.adapt(model, 2, targets="q,*.mlp.2", base_dtype=low)
        where = arrange(model, group, layout, tokens[:2], "float64")
        model = where.model.initialize(seed=0, storage=where.storage)
        before = base_digest(where)
        options = GradientExchange(allreduce=way)
        optimizer = optim.SGD(model.storage, lr=0.5, momentum=0.9)
        worker = nnmpi.Worker(model, optimizer, group, arrangement=where, exchange=options)
        dataset = data.Dataset("tokens", tokens, tokens, 13)
        loader = data.Loader(dataset, 8, where, shuffle=False, microbatches=2)
        losses = [worker.step(batch).loss for epoch in range(3) for batch in loader.epoch(epoch)]
        losses.append(worker.evaluate(loader.epoch(0)).loss)
        report, values = nnmpi.memory.report(), worker.state()[0].to_dict()
        assert base_digest(where) == before
        worker.release()
        return losses, {name: item.copy() for name, item in values.items()}, report, before

    losses, values, report, digest = simulate(lambda group: program(group, layout), ranks)[0]
    expected = simulate(lambda group: program(group, Layout()), 1)[0]
    np.testing.assert_allclose(losses, expected[0], rtol=1e-13)
    for name, array in expected[1].items():
        np.testing.assert_allclose(values[name], array, rtol=0, atol=1e-14, err_msg=name)
    assert digest == expected[3]
    parameters = report.held["parameters"]
    assert parameters == report.predicted["parameters"]
    assert (parameters < 0.7 * expected[2].held["parameters"]) == (layout.zero == 3)


@pytest.mark.parametrize("low", [None, "bf16"])
def test_a_gathered_model_has_its_base(low):
    """On every rank, and while it is sharded nobody reads another unit's values in its place."""

    def program(group):
        model = nn.adapt(rounded(gpt()), 2, base_dtype=low).initialize(seed=0)
        expected = model(TOKENS).data.copy()
        parallel = nnmpi.ShardedDataParallel(model, group, algorithm="ring", unit_bytes=1)
        np.testing.assert_allclose(model(TOKENS).data, expected, atol=1e-6)
        refuses(UninitializedError, "is not on this rank now: ZeRO 3", nn.merge, model)
        parallel.gather_model()
        assert np.array_equal(model(TOKENS).data, expected)
        usage_error("ZeRO .* does not have here", nnmpi.ShardedDataParallel, model, group, 3, "x")
        assert np.array_equal(model(TOKENS).data, expected)
        assert all(item.home is None for _, item in model.named_base())

    simulate(program, 2)


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


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"alpha": 6.0}, "an adapter of alpha 2, and the model's adapter has alpha 6; give it"),
        ({"rank": 3}, "lora_a .*shape"),
        ({"targets": "proj"}, "lora_a"),
        ({"targets": "q,proj"}, "proj.lora_a"),
        ({"base_dtype": "bf16"}, "adapters of another base"),
    ],
)
def test_a_checkpoint_is_of_its_adapters(tmp_path, settings, sentence):
    """Of another kind it is refused on all ranks of a pipeline, and changes nothing."""

    def program(group, kind, is_saved):
        model = models.gpt(13, 6, 8, layers=2, heads=2)
        nn.adapt(model, **{"rank": 2, "alpha": 2, "targets": "q", **kind})
        arranged = arrange(model, group, Layout(pp=2, split=(4, 4)))
        arranged.model.initialize(seed=0, storage=arranged.storage)
        adam = optim.Adam(arranged.model.storage)
        saved = arranged.model, adam, arranged
        if is_saved:
            nnmpi.save(tmp_path, saved)
            return
        before = arranged.model.storage.data.copy()
        refuses(CheckpointError, sentence, nnmpi.resume, tmp_path, saved)
        assert np.array_equal(arranged.model.storage.data, before)

    simulate(lambda group: program(group, {}, True), 2)
    simulate(lambda group: program(group, settings, False), 2)


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
