"""Adapters against PEFT's: the same logits, gradients and training; the same files both ways."""

import json

import numpy as np
import pytest

from nnmpi import models, nn, ops, optim
from nnmpi.base.errors import DataError
from nnmpi.models.pretrained import layer_names, read_size

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for PEFT

TOKENS = np.random.default_rng(0).integers(0, 61, (3, 18))
OURS_IN_GPT = ["q,v", "all-linear", "*.mlp.0", "3.*.proj,2.mlp.2"]
OURS_IN_LLAMA = ["q,v", "all-linear", "gate,down", "2.*.k"]


def base(folder, kind="gpt2", dtype=torch.float64):
    """Write a drawn GPT-2 or Qwen 2, and return it as transformers reads it."""
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None, "vocab_size": 61}
    if kind == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            **ends, **rates, n_positions=20, n_embd=24, n_layer=3, n_head=4
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
        config = transformers.Qwen2Config(**ends, **sizes, **heads, max_position_embeddings=20)
        model = transformers.Qwen2ForCausalLM(config)
    model = model.to(dtype)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def theirs(folder, targets, kind="gpt2", dtype=torch.float64):
    """Return it with an adapter of PEFT's, whose factors are both drawn."""
    config = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        target_modules=targets,
        task_type="CAUSAL_LM",
        fan_in_fan_out=kind == "gpt2",
    )
    model = peft.get_peft_model(base(folder, kind, dtype), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def assert_close(mine, twin, kind="gpt2"):
    """Relative to the largest element; their Qwen computes norms and angles in float32."""
    mine, twin = np.asarray(mine), twin.detach().numpy()
    limit = 1e-12 if kind == "gpt2" else 1e-5
    assert np.abs(mine - twin).max() <= limit * np.abs(twin).max()


@pytest.mark.parametrize(
    "kind, targets",
    [
        ("gpt2", ["c_attn"]),
        ("gpt2", ["c_attn", "mlp.c_proj"]),
        ("gpt2", r".*h\.1\..*c_fc"),
        ("qwen2", ["q_proj", "v_proj"]),
        ("qwen2", "all-linear"),
    ],
)
def test_an_adapter_of_theirs_gives_their_logits_and_gradients(tmp_path, kind, targets):
    twin = theirs(tmp_path / "base", targets, kind)
    twin.save_pretrained(tmp_path / "adapter")
    model = models.from_pretrained(tmp_path / "base", "float64", tmp_path / "adapter")
    names = layer_names(read_size(tmp_path / "base"))
    logits = twin(torch.tensor(TOKENS)).logits
    model.zero_grad()
    result = model(TOKENS)
    assert_close(result.data, logits, kind)
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(TOKENS).flatten()
    ).backward()
    ops.cross_entropy(result, TOKENS).backward()
    trained = {name: item.grad for name, item in twin.named_parameters() if item.requires_grad}
    for name, parameter in model.named_parameters():
        layer, _, factor = name.rpartition(".")
        factor = factor.replace("_a", "_A").replace("_b", "_B")
        assert_close(
            np.asarray(parameter.grad).T,
            trained.pop(f"base_model.model.{names[layer]}.{factor}.default.weight"),
            kind,
        )
    assert not trained


@pytest.mark.parametrize(
    "kind, targets",
    [("gpt2", targets) for targets in OURS_IN_GPT] + [("qwen2", item) for item in OURS_IN_LLAMA],
)
def test_they_read_an_adapter_of_ours(tmp_path, kind, targets):
    """And give the same logits, also merged; merged here it is the same model."""
    base(tmp_path / "base", kind)
    model = models.from_pretrained(tmp_path / "base", "float64")
    nn.adapt(model, rank=5, alpha=3, targets=targets).initialize(seed=1, dtype="float64")
    for parameter in model.parameters():
        parameter.data[...] += 0.1 * np.random.default_rng(1).standard_normal(parameter.shape)
    folder = tmp_path / "adapter"
    models.save_adapter(folder, model, tmp_path / "base")
    twin = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    expected = model(TOKENS).data
    assert_close(expected, twin(torch.tensor(TOKENS)).logits, kind)
    assert_close(expected, twin.merge_and_unload()(torch.tensor(TOKENS)).logits, kind)
    merged = read_size(tmp_path / "base").build()
    merged.load_state(nn.merge(model))
    assert np.abs(merged(TOKENS).data - expected).max() < 1e-12 * np.abs(expected).max()


def test_a_fine_tuning_has_their_curve(tmp_path):
    """200 steps of AdamW in float32: each loss within 1e-5 of the largest."""
    twin = theirs(tmp_path / "base", ["c_attn", "c_proj", "c_fc"], dtype=torch.float32)
    twin.save_pretrained(tmp_path / "adapter")
    model = models.from_pretrained(tmp_path / "base", adapter=tmp_path / "adapter")
    optimizer = optim.AdamW(model.storage, lr=3e-3, weight_decay=0.01)
    trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    their_optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.01)
    draw, losses = np.random.default_rng(2), []
    for _ in range(200):
        batch = draw.integers(0, 61, (4, 12)) // 3
        x, y = batch[:, :-1], batch[:, 1:]
        model.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        logits = twin(torch.tensor(x)).logits.flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(y).flatten())
        their_optimizer.zero_grad()
        expected.backward()
        their_optimizer.step()
        losses.append((loss.item(), expected.item()))
    assert losses[-1][1] < losses[0][1] - 0.5
    mine, other = np.array(losses).T
    assert np.abs(mine - other).max() < 1e-5 * other.max()


@pytest.mark.parametrize(
    "name, value",
    [
        ("peft_type", "LOHA"),
        ("use_rslora", True),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["wte"]),
        ("rank_pattern", {"h.0": 2}),
        ("init_lora_weights", "pissa"),
        ("of_tomorrow", 1),
    ],
)
def test_what_ours_do_not_compute_is_refused(tmp_path, name, value):
    theirs(tmp_path / "base", ["c_attn"]).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(DataError, match=name):
        models.from_pretrained(tmp_path / "base", adapter=tmp_path / "adapter")
