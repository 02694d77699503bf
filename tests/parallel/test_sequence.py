"""Sequences that ranks share: what a user's module may do with them, the bytes, and what is
refused.
"""

from functools import partial

import numpy as np
import pytest

from nnmpi import Layout, Tensor, models, nn, ops, simulate
from nnmpi.base.errors import LayoutError
from nnmpi.base.shard import split, zigzag
from nnmpi.base.timeline import Timeline, tracing
from nnmpi.nn.activation import mask_key
from nnmpi.nn.sharding import RING, ULYSSES
from nnmpi.parallel.sequence.group import SequenceGroup
from nnmpi.tensor import gather_shards
from tests.equivalence.reference import Setup, differences, run, serial_run
from tests.equivalence.rows import GPT, TEXT, TIME, TOKENS, tokens

ON_HOST = "the device's double takes long, and runs the same kernels in the trainings of both ways"
HEADS = 5


class Own(nn.Module):
    """A user's module."""

    def __init__(self, compute):
        self.wide, self.narrow, self.norm = nn.Linear(4, 30), nn.Linear(10, 4), nn.LayerNorm(4)
        self.places = nn.Embedding(TIME, 4)
        self.compute = compute

    def forward(self, x):
        """Return what `compute` makes of x: (batch, TIME, 4)."""
        return self.compute(self, x)


def own(compute):
    return lambda *_: nn.Sequential(nn.Embedding(TOKENS, 4), Own(compute), nn.Linear(4, TOKENS))


def setup(model):
    return Setup(model, data=tokens, **TEXT)


def attend(causal):
    """Return attention of the module's own, with queries, keys and values apart."""

    def compute(m, x):
        heads = m.wide(x).reshape(len(x), TIME, 3, HEADS, 2).transpose(2, 0, 3, 1, 4)
        y = ops.scaled_dot_product_attention(heads[0], heads[1], heads[2], causal=causal)
        return m.narrow(y.transpose(0, 2, 1, 3).reshape(len(x), TIME, 10))

    return compute


def attend_dropping(m, x):
    key = partial(mask_key, m.path)
    return m.narrow(ops.attention(m.wide(x), HEADS, True, dropout=0.5, mask_key=key))


EQUAL = {
    "causal": attend(True),
    "all to all": attend(False),
    "dropout": attend_dropping,
    "places": lambda m, x: m.norm(x + m.places.weight),
    "a mask": lambda m, x: x * np.linspace(0, 1, TIME)[:, None],
    "made whole": lambda m, x: (
        x * m.norm(gather_shards(x)).mean(1, keepdims=True) + gather_shards(x)[:, ::-1]
    ),
}


@pytest.mark.host_only(ON_HOST)
@pytest.mark.parametrize("way", [ULYSSES, RING])
@pytest.mark.parametrize("name", EQUAL)
def test_what_a_module_may_do(name, way):
    expected = setup(own(EQUAL[name]))
    (serial,) = simulate(lambda group: serial_run(expected, group), 1)
    result = simulate(lambda group: run(expected, group, Layout(sp=3, sp_attention=way)), 3)[0]
    assert not differences(result, serial, expected)


REFUSED = {
    "a mean": (
        own(lambda m, x: x + x.mean(1, keepdims=True)),
        "needs all elements .* each of 2 ranks has",
    ),
    "a shift": (own(lambda m, x: x[:, ::-1]), r"x\[\.\.\.\] picks slice"),
    "the first": (own(lambda m, x: x + x[:, :1]), r"x\[\.\.\.\] picks slice"),
    "a product": (own(lambda m, x: (x @ x.transpose(0, 2, 1)) @ x), "needs every pair of parts"),
    "other positions": (
        own(lambda m, x: x.transpose(1, 0, 2)),
        "does not have the 7 positions of its input at axis 1",
    ),
    "made whole": (own(lambda m, x: gather_shards(x)), "does not have the 7 positions"),
    "lstm": (
        lambda *_: models.lstm(TOKENS, 10, 1),
        "works on whole tensors, but each of 2 ranks has a part",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_module_may_not_do(name):
    """One sentence says which operation, and what would work."""
    build, words = REFUSED[name]
    with pytest.raises(LayoutError, match=words) as caught:
        simulate(lambda group: run(setup(build), group, Layout(sp=2)), 2)
    assert "leave sp at 1" in str(caught.value)


@pytest.mark.parametrize(
    "layout, words",
    [
        (
            Layout(sp=6),
            ("ulysses shards heads, .* per rank: 5 heads; sp up to 5 fits, or sp attention r"),
        ),
        (Layout(sp=2, tp=3), "per rank: 1 head on a rank of tp 3; sp 1 fits"),
        (
            Layout(sp=4, dp=2),
            "6 ranks are not dp 2 x pp 1 x tp 1 x sp 4 = 8; these fit: dp 2 x pp 1 x tp 1 x sp 3, ",
        ),
    ],
)
def test_layouts_that_do_not_fit(layout, words):
    with pytest.raises(LayoutError, match=words):
        simulate(lambda group: run(GPT, group, layout), 6)


def sent(ranks, way, time, heads, backward):
    """Return the bytes that each rank said that it sent for a layer's attention, and those on all
    wires.
    """
    batch, features = 2, 3 * heads

    def main(group):
        sequence, timeline = SequenceGroup(group, way), Timeline()
        x = np.random.default_rng(0).standard_normal((batch, time, 3 * features))
        region = sequence.placement(time).region(x.shape, 1, group.size, group.rank)
        with tracing(timeline):
            x = sequence.as_sharded(Tensor(region.take(x), requires_grad=True), time)
            y = sequence.as_local(ops.attention(x, heads, causal=True), time)
            if backward:
                (y * y).sum().backward()
        return sum((event.args or {}).get("bytes", 0) for event in timeline.events)

    run = simulate(main, ranks)
    return run, run.bytes


@pytest.mark.parametrize("ranks, time, heads", [(2, 8, 4), (3, 7, 5), (4, 7, 6)])
def test_the_bytes_are_those_of_the_formulas(ranks, time, heads):
    """In elements of 8 bytes, by rank and altogether."""
    batch, features, others = 2, 3 * heads, range(ranks)
    t, f = (
        [len(item) for item in split(time, ranks)],
        [3 * len(item) for item in split(heads, ranks)],
    )
    # of one of q, k, v to heads, and of y to positions
    first = [8 * batch * t[r] * (features - f[r]) for r in others]
    other = [8 * batch * f[r] * (time - t[r]) for r in others]
    each_way, total = [3 * a + b for a, b in zip(first, other, strict=True)], 4 * sum(first)
    assert total == 8 * 4 * batch * (time * features - sum(np.multiply(t, f)))
    assert sent(ranks, ULYSSES, time, heads, False) == (each_way, total)
    assert sent(ranks, ULYSSES, time, heads, True) == (
        [4 * (a + b) for a, b in zip(first, other, strict=True)],
        2 * total,
    )
    t = [sum(map(len, zigzag(time, ranks, r))) for r in others]
    forward = [8 * 2 * batch * features * (time - t[(r + 1) % ranks]) for r in others]
    gradients = [8 * 2 * batch * features * (time - t[r]) for r in others]
    total = 8 * 2 * batch * features * time * (ranks - 1)
    assert sent(ranks, RING, time, heads, False) == (forward, total)
    both = [2 * element + other for element, other in zip(forward, gradients, strict=True)]
    assert sent(ranks, RING, time, heads, True) == (both, 3 * total)
    if ranks == 2:  # where all have as much: what the papers say
        assert each_way == [8 * 4 * batch * time * features * (ranks - 1) // ranks**2] * 2
        assert forward == [8 * 2 * batch * time * features * (ranks - 1) // ranks] * 2
