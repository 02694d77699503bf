"""GPT-2 against Hugging Face's: the same logits, loss and gradients in float64, and the same files
both ways.
"""

import numpy as np
import pytest

from nnmpi import models, ops
from nnmpi.data.tokenizer import CharacterTokenizer
from nnmpi.models.pretrained import GPTSize, load_pretrained, read_size, save_pretrained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # the arrays are small, and other tests want the cores

SIZES = {"vocab_size": 61, "n_positions": 20, "n_embd": 24, "n_layer": 3, "n_head": 4}


def theirs():
    """Return a model of theirs with drawn weights, scales and shifts too, in float64."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel(config).double()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def test_loss_and_gradients_are_theirs(tmp_path):
    """Read from what they write: loss and each gradient within 1e-12 of the largest element."""
    model = theirs()
    model.save_pretrained(tmp_path)
    size = read_size(tmp_path)
    ours = models.gpt(**vars(size)).initialize(0, "float64")
    load_pretrained(ours, tmp_path)
    tokens = np.random.default_rng(0).integers(0, 61, (3, 18))
    x, y = tokens[:, :-1], tokens[:, 1:]
    logits = model(torch.tensor(x)).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(y).flatten())
    expected.backward()
    ours.zero_grad()
    result = ours(x)
    loss = ops.cross_entropy(result, y)
    loss.backward()
    assert np.abs(result.data - logits.detach().numpy()).max() < 1e-12 * np.abs(result.data).max()
    assert np.isclose(loss.item(), expected.item(), rtol=1e-13)
    grads = {name: np.asarray(parameter.grad) for name, parameter in ours.named_parameters()}
    save_pretrained(tmp_path / "grads", grads, size)  # under their names
    matches = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "grads", dtype=torch.float64)
    for mine, twin in zip(matches.parameters(), model.parameters(), strict=True):
        assert (mine - twin.grad).abs().max() <= 1e-12 * twin.grad.abs().max()


def test_they_read_what_is_written(tmp_path):
    """And give the same logits."""
    ours = models.gpt(50, 12, 16, 2, 2).initialize(0, "float64")
    save_pretrained(tmp_path, ours.state(), GPTSize(50, 12, 16, 2, 2))
    model, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = np.random.default_rng(0).integers(0, 50, (2, 12))
    expected = model.eval()(torch.tensor(tokens)).logits.detach().numpy()
    assert np.abs(ours(tokens).data - expected).max() < 1e-13


def test_they_read_the_tokenizer_beside_it(tmp_path):
    """Characters become the same tokens, and the same one ends a text."""
    ours = CharacterTokenizer("to be or not to be\n")
    size = GPTSize(ours.vocabulary_size, 12, 16, 2, 2)
    save_pretrained(tmp_path, size.build().initialize(0).state(), size, ours.end)
    ours.save(tmp_path)
    result = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert result.encode("to\nbe", add_special_tokens=False) == ours.encode("to\nbe")
    assert result.decode(ours.encode("to\nbe")) == "to\nbe"
    config = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).config
    assert result.eos_token_id == config.eos_token_id == ours.end
