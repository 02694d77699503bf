"""GPT-2 in Hugging Face's files: what is written is read again, by every layout; what does not fit
is said.
"""

import json
from math import prod

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import nnmpi
from nnmpi import Layout, arrange, models, simulate
from nnmpi.base.errors import UsageError
from nnmpi.models.pretrained import (
    GPTSize,
    load_pretrained,
    read_dropout,
    read_size,
    save_pretrained,
)
from nnmpi.train.build import build_model
from nnmpi.train.config import ModelConfig
from tests.harness.refusals import data_error, usage_error

SIZE = GPTSize(vocabulary=23, context=9, features=12, layers=3, heads=3)


def small(seed=1):
    return models.gpt(**vars(SIZE)).initialize(seed, "float64")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a small model's files."""
    save_pretrained(tmp_path / "model", small().state(), SIZE)
    return tmp_path / "model"


def change(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_another_size_is_refused(folder):
    """Also where it is the default's; the model's own size may be given again."""
    build_model(ModelConfig("gpt", layers=3, features=12, heads=3, pretrained=folder), (9,), 23)
    for name, value in (("layers", 2), ("features", 128), ("heads", 4)):
        with pytest.raises(
            UsageError,
            match=f"^--{name} {value} differs from the {getattr(SIZE, name)} of --pretrained ",
        ):
            build_model(ModelConfig("gpt", pretrained=folder, **{name: value}), (9,), 23)
    usage_error(
        "has 23 tokens and a context of 9, but the data have 23 and 10",
        lambda: build_model(ModelConfig("gpt", pretrained=folder), (10,), 23),
    )


def test_what_is_written_is_read(folder):
    """With all names under "transformer." or without, and with the masks that the published files
    hold.
    """
    assert read_size(folder) == SIZE
    arrays = load_file(folder / "model.safetensors")
    assert len(arrays) == 2 + 3 * 12 + 2
    assert arrays["transformer.h.2.mlp.c_fc.weight"].shape == (12, 48)
    for bare in (False, True):
        if bare:
            plain = {name.removeprefix("transformer."): array for name, array in arrays.items()}
            save_file(plain | {"h.0.attn.bias": np.ones((9, 9))}, folder / "model.safetensors")
        model = small(seed=2)
        load_pretrained(model, folder)
        np.testing.assert_equal(model.state(), small().state())


@pytest.mark.parametrize(
    "layout", [Layout(pp=2, dp=1), Layout(tp=2, dp=1), Layout(pp=2, tp=2, dp=1)]
)
def test_each_rank_reads_its_part(folder, layout):
    expected = small().state()

    def main(group):
        where = arrange(
            models.gpt(**vars(SIZE)), group, layout, np.zeros((2, 7), np.int64), "float64"
        )
        where.model.initialize(2, "float64")
        load_pretrained(where.model, folder)
        for name, parameter in where.model.named_parameters():
            full = expected[name]
            assert np.array_equal(
                parameter.data, full if parameter.region is None else parameter.region.take(full)
            )
        return len(where.model.parameters())

    assert min(simulate(main, prod(layout.shape))) > 0


@pytest.mark.parametrize(
    "values, words",
    [
        ({"model_type": "bert"}, "is of a model of type 'bert'; only gpt2, llama, "),
        (
            {"activation_function": "relu"},
            "activation_function is 'relu'; only 'gelu_new' can be read",
        ),
        ({"n_head": 0}, "n_head is 0; it must be a whole number, 1 or more"),
        ({"n_inner": 7}, "n_inner is 7; only 48 can be read"),
        # at once
        (
            {"n_layer": 10**12},
            r"does not fit a GPT-2 of 1000000000000 layers: missing transformer\.h\.3\.",
        ),
        ({"vocab_size": 10**30}, r"wte\.weight has shape \[23, 12\]; config\.json says \[1000"),
        (
            {"n_positions": 10**9},
            r"wpe\.weight has shape \[9, 12\]; config\.json says \[1000000000, 12\]",
        ),
        (
            {"n_layer": 2},
            r"does not fit a GPT-2 of 2 layers: missing nothing, unknown transformer\.h\.2\.",
        ),
    ],
)
def test_other_models_are_refused(folder, values, words):
    change(folder, **values)
    data_error(words, read_size, folder)


def cut(folder):
    """Write a folder's weights as two files and an index."""
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for part in (0, 1):
        name = f"model-0000{part + 1}-of-00002.safetensors"
        index |= dict.fromkeys(sorted(arrays)[part::2], name)
        save_file({key: arrays[key] for key in sorted(arrays)[part::2]}, folder / name)
    content = {"metadata": {"total_size": 0}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_several_files_are_read_as_one(folder):
    cut(folder)
    model = small(seed=2)
    load_pretrained(model, folder)
    np.testing.assert_equal(model.state(), small().state())
    assert nnmpi.load(folder).model.state().keys() == model.state().keys()
    index = folder / "model.safetensors.index.json"
    (folder / "model-00002-of-00002.safetensors").unlink()
    data_error("model-00002-of-00002.safetensors", load_pretrained, model, folder)
    wrong = [{"weight_map": {"a": "../model.safetensors"}}, {"weight_map": {}}, []]
    for content in wrong:
        index.write_text(json.dumps(content))
        data_error(r"index\.json", read_size, folder)


def test_bfloat16_is_read(folder):
    """Its upper half of float32, bit for bit."""
    file = folder / "model.safetensors"
    arrays = {name: array.astype(np.float32) for name, array in load_file(file).items()}
    halves = {name: (array.view("u4") >> 16).astype("u2") for name, array in arrays.items()}
    save_file(halves, file)
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].replace(b'"U16"', b'"BF16"')
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    model = small(seed=2)
    load_pretrained(model, folder)
    expected = (halves["transformer.wte.weight"].astype("u4") << 16).view("f4")
    np.testing.assert_array_equal(model.state()["0.tokens.weight"], expected)


def test_a_pickle_is_refused_with_the_command_that_converts_it(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for read in (read_size, nnmpi.load):
        data_error(r"pytorch_model\.bin is a pickle.*save_pretrained", read, folder)


@pytest.mark.parametrize("rate", [[], 0.2, "much"])
def test_dropouts_that_differ_are_refused(folder, rate):
    change(folder, attn_pdrop=0.1, embd_pdrop=rate, resid_pdrop=0.1)
    data_error("only one probability in .0, 1. for all three can be read", read_dropout, folder)


def test_an_output_that_is_not_the_embedding_is_refused(folder):
    """And nothing is changed; some write the tied one, too."""
    file, model = folder / "model.safetensors", small(seed=2)
    arrays = load_file(file)
    tokens = arrays["transformer.wte.weight"]
    for other in (tokens + 1e-6, tokens.astype(np.int64), tokens[:-1]):
        save_file(arrays | {"lm_head.weight": other}, file)
        data_error(
            r"lm_head\.weight is not transformer\.wte\.weight; only a model whose output",
            load_pretrained,
            model,
            folder,
        )
    save_file(arrays | {"lm_head.weight": tokens.astype(np.float16)}, file)
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].replace(b'"F16"', b'"BF16"')
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    data_error("only a model whose output", load_pretrained, model, folder)
    np.testing.assert_equal(model.state(), small(seed=2).state())
    save_file(arrays | {"lm_head.weight": tokens}, file)
    load_pretrained(model, folder)
    assert np.array_equal(model.state()["0.tokens.weight"], tokens)
