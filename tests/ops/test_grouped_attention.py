"""Attention of grouped heads with rotary positions, beside formulas of complex numbers."""

import numpy as np
import pytest

from nnmpi import Tensor, jit, nn, no_grad, ops
from nnmpi.backend import attend as module
from nnmpi.backend.rotary import Rotary
from nnmpi.base.errors import DtypeError, ShapeError, UsageError
from tests.ops.test_attention import near, reference


def turned(x, frequencies, sign=1):
    """Return heads (batch, heads, time, features), each pair multiplied by e^(i angle)."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[2])[:, None] * np.array(frequencies)
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(sign * 1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def heads_of(x, features):
    batch, time, width = x.shape
    return x.astype("float64").reshape(batch, time, -1, features).transpose(0, 2, 1, 3)


def summed(grad, group):
    """Return the gradient of what the heads of a group share."""
    batch, heads, *rest = grad.shape
    return grad.reshape(batch, heads // group, group, *rest).sum(2)


def check(batch, time, heads, shared, features, dtype="float64", rotary=True, causal=True):
    rng, group = np.random.default_rng(time), heads // shared
    frequencies = 0.6 ** np.arange(features // 2)
    inputs = [
        rng.standard_normal((batch, time, count * features)).astype(dtype)
        for count in (heads, shared, shared)
    ]
    grad = rng.standard_normal(inputs[0].shape).astype(dtype)
    q, k, v = (heads_of(item, features) for item in inputs)
    if rotary:
        q, k = turned(q, frequencies), turned(k, frequencies)
    k, v = (np.repeat(item, group, axis=1) for item in (k, v))
    y, to_q, to_k, to_v = reference(q, k, v, heads_of(grad, features), causal)
    to_k, to_v = summed(to_k, group), summed(to_v, group)
    if rotary:
        to_q, to_k = turned(to_q, frequencies, -1), turned(to_k, frequencies, -1)
    given = [Tensor(item, requires_grad=True) for item in inputs]
    turns = Rotary(tuple(frequencies)) if rotary else None
    result = ops.grouped_attention(*given, heads, causal, turns)
    result.backward(grad)
    ours = [np.asarray(item.grad) for item in given]
    # `near` compares dtypes, too
    exact = [item.swapaxes(1, 2).reshape(batch, time, -1) for item in (y, to_q, to_k, to_v)]
    near([result.numpy()], exact[:1], dtype)
    near(ours, exact[1:], dtype)
    with no_grad():
        again = ops.grouped_attention(*given, heads, causal, turns)
    np.testing.assert_array_equal(again.numpy(), result.numpy())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize(
    "sizes", [(2, 1, 4, 2, 2), (2, 65, 6, 2, 4), (1, 130, 5, 1, 6), (3, 7, 3, 3, 2)]
)
def test_values_and_gradients(sizes, rotary, dtype):
    """Groups of one head and of several, one group; one position, and more than a band has."""
    check(*sizes, dtype, rotary)


def test_every_query_sees_all_keys():
    check(2, 70, 4, 2, 4, causal=False)


@pytest.mark.parametrize("elements", [1, 125, 250, 1000])
def test_any_block(elements, monkeypatch):
    """Blocks of some heads of one sequence, of several sequences, and smaller last ones."""
    monkeypatch.setattr(module, "ELEMENTS", elements)
    monkeypatch.setattr(module, "CAUSAL", 4)
    check(5, 30, 6, 3, 4)


def test_numba_computes_the_same():
    with jit():
        check(2, 65, 6, 2, 4, "float32")


@pytest.mark.parametrize(
    "scaling, expected",
    [
        (None, [1.0, 0.1, 0.01]),
        (nn.RotaryScaling(4.0), [0.25, 0.025, 0.0025]),
        # of 100 positions pairs turn 15.9, 1.59 and 0.159 times: kept, mixed, divided
        (
            nn.RotaryScaling(4.0, 100),
            [1.0, 0.1 * (0.25 + 0.75 * (10 / (2 * np.pi) - 1) / 3), 0.0025],
        ),
    ],
)
def test_frequencies(scaling, expected):
    layer = nn.RotaryAttention(6, 1, theta=1000.0, scaling=scaling)
    np.testing.assert_allclose(layer.rotary.frequencies, expected, rtol=1e-15)


def test_far_positions_keep_their_digits():
    """The product of turned vectors depends on their distance, to float32's last digits."""
    rotary, x = Rotary((1.0,)), np.array([[[[0.6, 0.8]]]], "float32")
    at = [rotary.at((range(place, place + 1),), x).of(x) for place in (0, 3, 10**6, 10**6 + 3)]
    near_by, far = (at[0] * at[1]).sum(), (at[2] * at[3]).sum()
    assert abs(near_by - far) < 2e-7


SHAPES = {
    "heads that 3 do not divide": ((2, 3, 12), (2, 3, 12), (2, 3, 12), 5),
    "keys of another width": ((2, 3, 12), (2, 3, 5), (2, 3, 5), 4),
    "2 key heads for 3": ((2, 3, 12), (2, 3, 8), (2, 3, 8), 3),
    "other positions": ((2, 3, 12), (2, 4, 6), (2, 4, 6), 4),
    "values unlike keys": ((2, 3, 12), (2, 3, 6), (2, 3, 12), 4),
    "two axes": ((3, 12), (3, 12), (3, 12), 4),
    "no keys": ((2, 3, 12), (2, 3, 0), (2, 3, 0), 4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_do_not_fit(name):
    *shapes, heads = SHAPES[name]
    with pytest.raises(ShapeError, match="key heads that divide"):
        ops.grouped_attention(*(Tensor(np.zeros(shape)) for shape in shapes), heads)


def test_what_is_refused():
    x = Tensor(np.zeros((1, 2, 8)))
    with pytest.raises(UsageError, match="turns heads of 6 features, not of 4"):
        ops.grouped_attention(x, x, x, 2, rotary=Rotary((1.0, 0.1, 0.01)))
    with pytest.raises(DtypeError):
        ops.grouped_attention(x, x.astype("float32"), x, 2)
    for options, words in (
        ({"heads": 4, "kv_heads": 3}, "give a divisor"),
        ({"heads": 3}, "give a multiple"),
        ({"heads": 8}, "no pairs"),
        ({"heads": 2, "theta": 0}, "theta is 0"),
    ):
        with pytest.raises(UsageError, match=words):
            nn.RotaryAttention(8, **options)
    with pytest.raises(UsageError, match="give a larger high"):
        nn.RotaryScaling(2.0, 10, low=4.0)
    with pytest.raises(ShapeError, match="one shape"):
        ops.swiglu(x, x[:, :1])
