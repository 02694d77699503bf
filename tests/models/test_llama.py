"""Llama: its sizes and first weights, and its files without Hugging Face's library: what is written
is read again by every layout, and what does not fit is said.
"""

import json
import tracemalloc
from math import prod

import numpy as np
import pytest

from nnmpi import Layout, Worker, arrange, models, nn, optim, simulate
from nnmpi.backend.precision import bfloat16
from nnmpi.base.errors import DataError, NnmpiError, ShapeError
from nnmpi.compose.state import base_digest
from nnmpi.models import pretrained
from nnmpi.models.llama_files import LlamaSize
from nnmpi.models.pretrained import load_pretrained, read_ends, read_size, save_pretrained
from nnmpi.models.torch_weights import open_arrays
from nnmpi.nn.lora import BaseDigest
from nnmpi.nn.module import Normal
from tests.harness.refusals import data_error, refuses, usage_error

SIZE = LlamaSize(23, 9, 12, 2, 6, 3, 20, 4, 50.0)
SIZES = {
    "plain": SIZE,
    "tied and biased": LlamaSize(**{**vars(SIZE), "tied": True, "bias": True}),
    "all biased": LlamaSize(
        **{**vars(SIZE), "bias": True, "proj_bias": True, "mlp_bias": True, "eps": 1e-6}
    ),
    "normed": LlamaSize(**{**vars(SIZE), "qk_norm": True}),
    "linear": LlamaSize(**{**vars(SIZE), "scaling": nn.RotaryScaling(2.0)}),
    "llama 3": LlamaSize(**{**vars(SIZE), "scaling": nn.RotaryScaling(8.0, 16)}),
}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a small model's files."""
    save_pretrained(tmp_path / "model", SIZE.build().initialize(1).state(), SIZE, end=22)
    return tmp_path / "model"


def change(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_sizes_are_those_of_smollm2():
    """134,515,008 parameters; weights of 0.02, less in the last layers of branches."""
    model = models.llama(49152, 8192, kv_heads=3, hidden=1536, tied=True)
    assert sum(parameter.size for parameter in model.parameters()) == 134_515_008
    state = models.llama(50, 40, 48, 2, 4).initialize(0, "float64").state()
    assert state["1.mlp.gate.weight"].shape == (48, 128)
    assert np.isclose(state["1.mlp.up.weight"].std(), 0.02, rtol=0.05)
    assert np.isclose(state["1.mlp.down.weight"].std(), 0.01, rtol=0.05)


def test_what_it_cannot_take():
    model = SIZE.build().initialize(0)
    refuses(ShapeError, "a context of 9 needs tokens", model, np.zeros((2, 10), np.int64))
    usage_error("give a multiple of the heads", models.llama, 5, 5, 10, 1, 3)
    usage_error("llama has no dropout", SIZE.build, 0.1)


@pytest.mark.parametrize("name", ["theta", "scaling"])
def test_ranks_that_turn_differently_are_refused(name):
    def program(group):
        given = {"theta": 10.0 + group.rank, "scaling": nn.RotaryScaling(2.0 + group.rank)}
        model = LlamaSize(**{**vars(SIZE), name: given[name]}).build().initialize(0)
        worker = Worker(model, optim.SGD(model.storage, lr=0.1), group)
        worker.step(np.zeros((2, 4), np.int64), np.zeros((2, 4), np.int64))

    # by the witness of a step, or by what replicas on devices compare before
    words = "the ranks (differ in layers|have different models): .*Rotary"
    refuses(NnmpiError, words, simulate, program, 2)


@pytest.mark.parametrize("name", SIZES)
def test_what_is_written_is_read(name, tmp_path):
    """The sizes, and the weights, of which files have the linear ones transposed."""
    size = SIZES[name]
    state = size.build().initialize(1, "float64").state()
    save_pretrained(tmp_path / "model", state, size)
    assert read_size(tmp_path / "model") == size
    result = models.from_pretrained(tmp_path / "model", "float64").state()
    assert list(result) == list(state)
    assert all(np.array_equal(result[key], state[key]) for key in state)
    with open_arrays(tmp_path / "model" / "model.safetensors", OSError) as stored:
        up = stored.get_tensor("model.layers.1.mlp.up_proj.weight")
    assert np.array_equal(up, state["2.mlp.up.weight"].T)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=3, pp=2, split=(3, 4)), Layout(tp=4)])
def test_each_rank_reads_its_part(folder, layout):
    """Slices of the files, along either axis; of 4 ranks one has no head."""
    full = models.from_pretrained(folder).state()

    def main(group):
        where = arrange(SIZE.build(), group, layout, np.zeros((1, 4), np.int64))
        where.model.initialize(0)
        load_pretrained(where.model, folder)
        for name, parameter in where.model.named_parameters():
            expected = full[name] if parameter.region is None else parameter.region.take(full[name])
            assert np.array_equal(parameter.data, expected)

    simulate(main, prod(layout.shape))


@pytest.mark.parametrize(
    "values, words",
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; nnmpi reads it if it is 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is .*yarn.*linear or llama3"),
        ({"rope_scaling": 3}, "rope_scaling is 3; nnmpi reads it if it is an object"),
        ({"rope_parameters": {}, "rope_scaling": {}}, "null beside rope_parameters"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0; it must be a number a"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, "without mscale"),
        ({"model_type": "mistral", "sliding_window": 8}, "null, or at least max_position_emb.* 9"),
        ({"head_dim": 5}, "head_dim is 5; nnmpi reads it if it is an even number"),
        ({"head_dim": None}, "model needs"),
        ({"num_key_value_heads": 4}, "a divisor of num_attention_heads"),
        ({"num_key_value_heads": 1}, "k_proj.weight is F32 .*, but the model needs"),
        ({"num_hidden_layers": 10**12}, r"a Llama of 1000000000000 layers: missing model\.lay"),
        ({"vocab_size": 10**30}, r"has shape \[23, 12\]; config\.json says"),
        ({"tie_word_embeddings": True}, "only a model whose output is tied"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; .* true or false"),
        ({"mlp_bias": True}, r"missing model\.layers\.0\.mlp\.down_proj\.bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*; nnmpi reads it if"),
        ({"attention_sinks": 4}, "attention_sinks is 4, which nnmpi does not know; remove it if"),
    ],
)
def test_other_models_are_refused(folder, values, words):
    change(folder, **values)
    data_error(words, models.from_pretrained, folder)


def test_transformers_has_no_such_model():
    size = LlamaSize(**{**vars(SIZE), "proj_bias": True})
    usage_error("transformers has no model with these biases", size.config)


def test_ends_are_those_of_both_files(folder):
    assert read_ends(folder) == [22]
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert read_ends(folder) == [3, 4, 22]
    (folder / "generation_config.json").write_text('{"eos_token_id": ["a"]}')
    data_error("eos_token_id is .*; give numbers", read_ends, folder)


def test_an_adapter_is_read_onto_its_base(tmp_path):
    """Kept in bfloat16, too; onto other weights, or these in another dtype, it is refused."""
    for seed, name in enumerate(("base", "other")):
        model = LlamaSize(11, 8, 8, 2, 2, 1, 12, 4).build().initialize(seed=seed)
        save_pretrained(tmp_path / name, model.state(), LlamaSize(11, 8, 8, 2, 2, 1, 12, 4))
    folder, tokens = tmp_path / "adapter", np.zeros((1, 4), int)
    model = models.from_pretrained(tmp_path / "base")
    nn.adapt(model, 2, base_dtype="bf16").initialize(seed=1)
    for parameter in model.parameters():
        parameter.data[...] += 0.1
    models.save_adapter(folder, model, tmp_path / "base")
    again = models.from_pretrained(tmp_path / "base", adapter=folder, base_dtype="bf16")
    assert dict(again.named_base())["0.tokens.weight"].kept is not None
    assert np.array_equal(again(tokens).data, model(tokens).data)
    sentence = "was trained on other weights than this model's, or on these with another base_dtype"
    for name in ("base", "other"):
        refuses(DataError, sentence, models.from_pretrained, tmp_path / name, adapter=folder)
    usage_error(
        "base_dtype is for weights that an adapter",
        models.from_pretrained,
        tmp_path / "base",
        base_dtype="bf16",
    )


@pytest.mark.parametrize("base_dtype", [None, "bf16"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(zero=3, unit_bytes=1)])
def test_a_folder_is_read_a_few_rows_at_a_time(tmp_path, monkeypatch, layout, base_dtype):
    """Each rank has its part of the weights, and draws nothing that it reads."""
    written = SIZE.build().initialize(seed=3).state()
    save_pretrained(tmp_path, written, SIZE)
    monkeypatch.setattr(pretrained, "ELEMENTS", 30)
    monkeypatch.setattr(Normal, "__call__", lambda *_: pytest.fail("drawn, and read then"))

    def program(group):
        model = SIZE.build()
        pretrained.leave_undrawn(model, SIZE)
        if base_dtype:
            nn.adapt(model, 2, base_dtype=base_dtype)
        arranged = arrange(model, group, layout, np.zeros((1, 4), int))
        model = arranged.model.initialize(storage=arranged.storage)
        load_pretrained(model, tmp_path)
        weights, _ = Worker(
            model, optim.SGD(model.storage, 0.1), group, arrangement=arranged
        ).state()
        found = {}
        weights.gather(lambda name, array: found.update({name: array.copy()}))
        return base_digest(arranged), found

    def rounded(array):
        return array.astype(bfloat16()) if base_dtype and array.ndim > 1 else array

    digest = BaseDigest()
    for name, array in written.items():
        digest.add(name, rounded(array))
    ranks = 1 if layout == Layout() else 2
    for found, trained in simulate(program, ranks)[:1]:
        if base_dtype:
            assert found == str(digest)
        else:
            assert all(np.array_equal(trained[name], array) for name, array in written.items())


def test_reading_takes_little_memory(tmp_path, monkeypatch):
    size = LlamaSize(40_000, 8, 32, 1, 2, 2, 48, 16)
    save_pretrained(tmp_path, size.build().initialize(seed=3).state(), size)
    model = size.build().initialize()
    monkeypatch.setattr(pretrained, "ELEMENTS", 2**15)
    load_pretrained(model, tmp_path)  # imports what it needs
    tracemalloc.start()
    load_pretrained(model, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size.vocabulary * size.features  # a fourth of the table
