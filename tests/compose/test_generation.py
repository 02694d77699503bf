"""Writing token by token: with what layers keep, under any layout, it is what whole passes would
write.
"""

from itertools import islice

import numpy as np
import pytest

from nnmpi import Layout, Tensor, arrange, models, nn, simulate
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.compose.inference import TokenGenerator
from tests.device.here import on_device

TOKENS, CONTEXT, COUNT = 23, 9, 14
PROMPT = [3, 1, 4, 1]


def build(kind):
    if kind == "gpt":
        return models.gpt(TOKENS, CONTEXT, features=12, layers=2, heads=3)
    if kind == "llama":
        return models.llama(TOKENS, CONTEXT, features=12, layers=2, heads=6, kv_heads=3)
    return models.lstm(TOKENS, features=10, layers=2)


def likeliest(logits):
    return int(logits.argmax())


def by_whole_passes(kind):
    """Return what the model writes, by a pass over all that it sees for each token."""
    model, seen, written = build(kind).initialize(1, "float64"), list(PROMPT), []
    for _ in range(COUNT):
        written.append(int(model(np.array([seen])).data[0, -1].argmax()))
        seen.append(written[-1])
        if kind != "lstm" and len(seen) > CONTEXT:
            seen = seen[-(CONTEXT // 2) :]
    return written


def main(group, kind, layout):
    where = arrange(build(kind), group, layout, np.zeros((1, 4), np.int64), "float64")
    where.model.initialize(1, "float64")
    generator = TokenGenerator(where, numpy_backend())
    written = list(
        islice(generator.write(PROMPT, None if kind == "lstm" else CONTEXT, likeliest), COUNT)
    )
    generator.release()
    return written


@pytest.mark.parametrize("kind", ["gpt", "llama", "lstm"])
@pytest.mark.parametrize(
    "ranks, layout",
    [
        (1, Layout()),
        (2, Layout(pp=2, dp=1)),
        (3, Layout(tp=3, dp=1)),
        (4, Layout(pp=2, tp=2, dp=1)),
        (2, Layout(dp=2)),
    ],
)
def test_every_layout_writes_what_whole_passes_do(kind, ranks, layout):
    """On all ranks the same; past the context too, where the last half is read again."""
    assert (
        simulate(lambda group: main(group, kind, layout), ranks) == [by_whole_passes(kind)] * ranks
    )


def test_layers_run_once_for_single_tokens(monkeypatch):
    """Each later token replays what the first one behind the prompt did (on a device the second
    one, which is captured), and the layers' own code stands still, but where the two are compared:
    at the second, the fourth and the eighth token.
    """
    seen = []
    forward = nn.Embedding.forward

    def noted(module, indices):
        seen.append(indices.shape)
        return forward(module, indices)

    monkeypatch.setattr(nn.Embedding, "forward", noted)
    simulate(lambda group: main(group, "lstm", Layout()), 1)
    assert seen == [(1, len(PROMPT)), *[(1, 1)] * (2 if on_device() else 4)]


@pytest.mark.parametrize("kind", ["gpt", "llama", "lstm"])
def test_logits_are_those_of_whole_passes(kind):
    """For several sequences at once; outside of the block nothing is kept."""
    model = build(kind).initialize(1, "float64")
    tokens = np.random.default_rng(0).integers(0, TOKENS, (3, CONTEXT))
    full, memory = model(tokens).data, {}
    parts = [tokens[:, :4], *(tokens[:, i : i + 1] for i in range(4, CONTEXT))]
    with nn.continued(memory):
        result = np.concatenate([model(part).data for part in parts], axis=1)
    np.testing.assert_allclose(result, full, rtol=0, atol=1e-14)
    assert np.array_equal(model(tokens).data, full)


def test_what_cannot_be_written():
    model = build("gpt").initialize(1, "float64")
    with nn.continued({}):
        model(np.zeros((1, 4), np.int64))
        with pytest.raises(
            UsageError, match="2 tokens follow 4 others; after the first pass, give one at a time"
        ):
            model(np.zeros((1, 2), np.int64))
    with nn.continued({}):
        model(np.zeros((1, CONTEXT), np.int64))
        with pytest.raises(ShapeError, match=r"at most 9\), not \(1, 1\) after 9 others"):
            model(np.zeros((1, 1), np.int64))


def test_a_tensor_of_tokens_is_fine_too():
    model = build("gpt").initialize(1, "float64")
    tokens = np.array([PROMPT])
    assert np.array_equal(model(Tensor(tokens)).data, model(tokens).data)
