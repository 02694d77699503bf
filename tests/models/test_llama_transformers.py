"""Llama and its kin against Hugging Face's: logits and gradients in float64, settings of
config.json, files both ways, and what is written token by token.
"""

import json
from functools import partial
from itertools import islice

import numpy as np
import pytest

from nnmpi import Layout, arrange, models, ops, simulate
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.errors import DataError
from nnmpi.compose.inference import TokenGenerator
from nnmpi.models.pretrained import load_pretrained, read_size, save_pretrained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # the arrays are small, and other tests want the cores

SIZES = {  # nothing divides anything
    "vocab_size": 61,
    "hidden_size": 42,
    "intermediate_size": 35,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "max_position_embeddings": 23,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

KINDS = {
    "llama": ("Llama", {}),
    "llama, biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 14}),
    "llama, one group": ("Llama", {"num_key_value_heads": 1}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 99.0, "factor": 3.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": 23}),
    "qwen 2": ("Qwen2", {"num_attention_heads": 3, "tie_word_embeddings": True}),
    "qwen 3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen 3, biased": ("Qwen3", {"attention_bias": True}),
}


def theirs(kind, seed=0, **changes):
    """Return a model of theirs with drawn weights, scales and biases too, in float64."""
    name, options = KINDS[kind]
    sizes = {key: value for key, value in (SIZES | options | changes).items() if value is not None}
    if name == "Qwen2":
        sizes |= {"hidden_size": 24}
        del sizes["head_dim"]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def normalized(norm, x):
    return norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def exact(model, frequencies):
    """Have their model compute angles and norms in float64 too: it takes float32 in every dtype.

    Its own frequencies are what ours are, within float32's rounding.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(normalized, module)
    rotary = model.model.rotary_emb
    np.testing.assert_allclose(rotary.inv_freq.float().numpy(), frequencies, rtol=2e-6)

    def forward(x, position_ids, *_, **__):
        angles = position_ids[..., None].double() * torch.tensor(frequencies, dtype=torch.float64)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    rotary.forward = forward


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_theirs(kind, tmp_path):
    """Read from what they write: within 1e-12 of the largest element of each."""
    model = theirs(kind)
    model.save_pretrained(tmp_path)
    size = read_size(tmp_path)
    ours = models.from_pretrained(tmp_path, "float64")
    exact(model, ours.layers[1].attention.rotary.frequencies)
    tokens = np.random.default_rng(0).integers(0, 61, (3, 20))
    x, y = tokens[:, :-1], tokens[:, 1:]
    logits = model(torch.tensor(x)).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(y).flatten())
    expected.backward()
    ours.zero_grad()
    result = ours(x)
    loss = ops.cross_entropy(result, y)
    loss.backward()
    assert np.abs(result.data - logits.detach().numpy()).max() < 1e-12 * np.abs(result.data).max()
    grads = {name: np.asarray(parameter.grad) for name, parameter in ours.named_parameters()}
    twins = dict(model.named_parameters())
    for name, other, transposed in size.names(size.layers):
        mine, twin = grads.pop(name), twins.pop(other).grad.numpy()
        twin = twin.T if transposed else twin
        assert np.abs(mine - twin).max() <= 1e-12 * np.abs(twin).max(), name
    assert not grads and not twins


@pytest.mark.parametrize("kind", KINDS)
def test_they_read_what_is_written(kind, tmp_path):
    """And give the same logits, also with the spelling of transformers 4."""
    model = theirs(kind)
    model.save_pretrained(tmp_path / "theirs")
    ours = models.from_pretrained(tmp_path / "theirs", "float64")
    size = read_size(tmp_path / "theirs")
    save_pretrained(tmp_path / "ours", ours.state(), size)
    assert read_size(tmp_path / "ours") == size
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.arange(20)[None] % 61
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


SETTINGS = [
    {"attention_bias": True},
    {"attention_dropout": 0.1},
    {"head_dim": 4},
    {"head_dim": None},
    {"hidden_act": "gelu"},
    {"hidden_act": "silu"},
    {"initializer_range": 0.7},
    {"max_position_embeddings": 64},
    {"mlp_bias": True},
    {"num_attention_heads": 3},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": None},
    {"partial_rotary_factor": 0.5},
    {"pretraining_tp": 2},
    {"rms_norm_eps": 0.1},
    {"rms_norm_eps": None},
    {"rope_interleaved": True},
    {"tie_word_embeddings": True},
    {"use_cache": False},
    {"rope_theta": 10.0},
    {"rope_scaling": None, "rope_theta": 7.0},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}, "rope_theta": 20.0},
    {"rope_parameters": LLAMA3},
    {"rope_parameters": {**LLAMA3, "factor": 3.0, "high_freq_factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 4.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5.0, "factor": 4.0}},
    {"rope_parameters": {"rope_type": "longrope", "rope_theta": 5.0, "factor": 4.0}},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "mistral", "sliding_window": 23},
    {"model_type": "mistral", "sliding_window": 5},
    {"model_type": "qwen2"},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5},
    {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 5},
    {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"] * 2},
    {"model_type": "gemma"},
    {"model_type": "smollm3"},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
    {"attention_sinks": 4},
    {"unheard_of": 1},
    {"vocab_size": 60},
    {"num_hidden_layers": 2},
    {"num_hidden_layers": 4},
    {"intermediate_size": 36},
    {"hidden_size": 22},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=json.dumps)
def test_a_setting_is_right_or_refused(settings, tmp_path):
    """Put into the config.json of a model: ours then has their logits, or says which setting it is.

    A model that they make of it with other weights is no judge: then it must be refused.
    """
    theirs("llama", head_dim=4, hidden_size=24).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    if "rope_theta" in settings or "rope_scaling" in settings:
        del values["rope_parameters"]
    values |= {key: value for key, value in settings.items() if value is not None}
    for key, value in settings.items():
        if value is None:
            values.pop(key, None)
    file.write_text(json.dumps(values))
    tokens = np.arange(20)[None] % 60
    try:
        ours = models.from_pretrained(tmp_path)(tokens).numpy()
    except DataError as error:
        names = {*settings, "of a model of type"} | {
            "does not fit",
            "has shape",
            "the model needs",
            "lm_head",
        }
        assert any(name in str(error) for name in names)
        assert settings.keys() & REFUSED or settings in REFUSED_WITH, settings
        return
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, logits, rtol=0, atol=2e-5 * np.abs(logits).max())


# Settings that are refused, whatever they are here; others only with these values.
REFUSED = {
    *("attention_bias", "attention_dropout", "partial_rotary_factor", "rope_interleaved"),
    *("mlp_bias", "num_attention_heads", "quantization_config", "attention_sinks", "unheard_of"),
    *("vocab_size", "num_hidden_layers", "intermediate_size", "hidden_size"),
    *("num_key_value_heads", "layer_types", "use_sliding_window"),
}
REFUSED_WITH = [
    {"hidden_act": "gelu"},
    *(item for item in SETTINGS if item.get("model_type") in ("gemma", "smollm3", "qwen2")),
    {"model_type": "mistral", "sliding_window": 5},
    {"tie_word_embeddings": True},
    *(
        item
        for item in SETTINGS
        for turns in [item.get("rope_scaling") or item.get("rope_parameters") or {}]
        if turns.get("rope_type") in ("dynamic", "yarn", "longrope")
        or "partial_rotary_factor" in turns
    ),
]


def test_files_of_several_parts_in_bfloat16(tmp_path):
    """Each rank reads its part of the same numbers."""
    model = theirs("qwen 3")
    model.bfloat16().save_pretrained(tmp_path, max_shard_size="6KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    full = models.from_pretrained(tmp_path).state()
    for name, other, transposed in read_size(tmp_path).names(3):
        expected = model.state_dict()[other].float().numpy()
        np.testing.assert_array_equal(full[name], expected.T if transposed else expected)

    def main(group):
        where = arrange(
            read_size(tmp_path).build(),
            group,
            Layout(tp=2, pp=2, split=(4, 5)),
            np.zeros((1, 4), int),
        )
        where.model.initialize(0)
        load_pretrained(where.model, tmp_path)
        for name, parameter in where.model.named_parameters():
            region = parameter.region
            expected = full[name] if region is None else region.take(full[name])
            np.testing.assert_array_equal(parameter.data, expected)

    simulate(main, 4)


@pytest.mark.parametrize("kind", ["llama 3", "qwen 3"])
def test_what_is_written_is_theirs(kind, tmp_path):
    """200 tokens, the likeliest each time, by the cache of both."""
    model = theirs(kind, max_position_embeddings=256)
    model.save_pretrained(tmp_path)
    ours = models.from_pretrained(tmp_path, "float64")
    exact(model, ours.layers[1].attention.rotary.frequencies)
    prompt = [3, 1, 4, 1, 5]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=200, do_sample=False, pad_token_id=0, eos_token_id=-1
    )[0, len(prompt) :].tolist()

    def main(group):
        where = arrange(
            read_size(tmp_path).build(), group, Layout(), np.zeros((1, 4), int), "float64"
        )
        where.model.initialize(0, "float64")
        load_pretrained(where.model, tmp_path)
        generator = TokenGenerator(where, numpy_backend())
        choose = lambda logits: int(logits.argmax())  # noqa: E731
        written = list(islice(generator.write(prompt, 256, choose), 200))
        generator.release()
        return written

    assert simulate(main, 1) == [expected]
