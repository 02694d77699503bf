"""Attention: in bands and blocks of any size as in one, nothing seen that is masked or was never
written.
"""

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, no_grad, ops
from nnmpi.backend import attend as module
from nnmpi.backend.random import random_bits


def reference(q, k, v, grad, causal, left=1):
    """Return the result and the gradients, from the formulas, in float64; arrays are (batch, heads,
    time, features).

    `left` is what probabilities are multiplied by.
    """
    q, k, v, grad = (a.astype("float64") for a in (q, k, v, grad))
    factor = 1 / np.sqrt(q.shape[-1])
    scores = np.einsum("bhid,bhjd->bhij", q, k) * factor
    if causal:
        scores = np.where(np.tri(*scores.shape[2:], dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    to_p = np.einsum("bhid,bhjd->bhij", grad, v) * left
    to_scores = p * (to_p - (p * to_p).sum(-1, keepdims=True)) * factor
    to_q, to_k = (
        np.einsum("bhij,bhjd->bhid", to_scores, k),
        np.einsum("bhij,bhid->bhjd", to_scores, q),
    )
    return (
        np.einsum("bhij,bhjd->bhid", p * left, v),
        to_q,
        to_k,
        np.einsum("bhij,bhid->bhjd", p * left, grad),
    )


def split(packed, parts, heads):
    """Return (parts, batch, heads, time, features) of a packed array."""
    batch, time, width = packed.shape
    return packed.reshape(batch, time, parts, heads, width // parts // heads).transpose(
        2, 0, 3, 1, 4
    )


def near(ours, exact, dtype):
    """Compare arrays with the largest element of all as the measure."""
    largest = max(abs(item).max(initial=0) for item in exact)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.dtype == dtype
        np.testing.assert_allclose(
            mine, theirs, rtol=0, atol=(2e-6 if dtype == "float32" else 1e-13) * largest
        )


def check_packed(batch, time, heads, features, causal, dtype, scale=1.0):
    """Compare one application to packed arrays with the formulas, and the one that records
    nothing.
    """
    rng = np.random.default_rng(time)
    width = heads * features
    qkv = (rng.standard_normal((batch, time, 3 * width)) * scale).astype(dtype)
    grad = rng.standard_normal((batch, time, width)).astype(dtype)
    x = Tensor(qkv, requires_grad=True)
    y = ops.attention(x, heads, causal)
    y.backward(grad)
    exact = reference(*split(qkv, 3, heads), split(grad, 1, heads)[0], causal)
    near(split(y.data, 1, heads), exact[:1], dtype)
    near(split(x.grad, 3, heads), exact[1:], dtype)
    with no_grad():
        np.testing.assert_array_equal(ops.attention(x, heads, causal).data, y.data)


EACH_CAUSAL = pytest.mark.parametrize("causal", [True, False])
EACH_DTYPE = pytest.mark.parametrize("dtype", ["float32", "float64"])


@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 128, 129, 200, 257])
@EACH_CAUSAL
@EACH_DTYPE
def test_any_length(time, causal, dtype):
    """One position, and lengths around those of the bands."""
    check_packed(2, time, 3, 5, causal, dtype)


@pytest.mark.parametrize(
    "elements, blocks",
    [
        (1, {(1, 1)}),
        (125, {(1, 2), (1, 1)}),
        (250, {(1, 3)}),
        (500, {(2, 3), (1, 3)}),
        (1000, {(5, 3)}),
    ],
)
@EACH_CAUSAL
def test_any_block(elements, blocks, causal, monkeypatch):
    """Blocks of some heads of one sequence, of several sequences, and last ones that are
    smaller.
    """
    monkeypatch.setattr(module, "ELEMENTS", elements)
    monkeypatch.setattr(module, "CAUSAL", 4)
    monkeypatch.setattr(module, "ALL", 8)
    cut = module._blocks(np.empty((5, 3, 30, 4)), 30, ((0, 8, 30), (8, 10, 30)))
    assert {(i.stop - i.start, j.stop - j.start) for i, j in cut} == blocks
    check_packed(5, 30, 3, 4, causal, "float64")


@pytest.mark.host_only(
    "it is about NumPy's memory; the device's double gives NaN in all new memory"
)
@EACH_CAUSAL
def test_what_was_never_written_is_never_read(causal, monkeypatch):
    """New arrays full of NaN change nothing."""

    def full(shape, dtype=None, like=None):
        return np.full(shape, np.nan, dtype)

    monkeypatch.setattr(np, "empty", full)
    check_packed(2, 150, 2, 3, causal, "float64")


def test_later_positions_are_not_seen():
    """Other values there, even infinite ones, change nothing before, bit for bit."""
    qkv = np.random.default_rng(0).standard_normal((1, 100, 12))
    before = ops.attention(Tensor(qkv), 2, causal=True).data
    qkv[:, 70:] = 1e200
    with np.errstate(all="ignore"):
        after = ops.attention(Tensor(qkv), 2, causal=True).data
    np.testing.assert_array_equal(after[:, :64], before[:, :64])
    np.testing.assert_allclose(after[:, 64:70], before[:, 64:70], rtol=1e-12)


def test_large_scores_do_not_overflow():
    """The one with the largest score takes all."""
    q = np.array([1e3, -1e3, 0], np.float32).reshape(1, 1, 3, 1)
    y = ops.scaled_dot_product_attention(Tensor(q), Tensor(q), Tensor(q)).data
    np.testing.assert_array_equal(y[0, 0, :2, 0], [1e3, -1e3])
    np.testing.assert_allclose(y[0, 0, 2, 0], 0, atol=1e-4)


@pytest.mark.parametrize("queries, keys", [(130, 7), (7, 130), (1, 1)])
def test_other_keys_than_queries(queries, keys):
    """Three separate arrays, of which one may need no gradient."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, n, d)) for n, d in ((queries, 4), (keys, 4), (keys, 5)))
    grad = rng.standard_normal((2, 3, queries, 5))
    exact = reference(q, k, v, grad, False)
    for without in (None, 0, 1, 2):
        leaves = [Tensor(a, requires_grad=i != without) for i, a in enumerate((q, k, v))]
        y = ops.scaled_dot_product_attention(*leaves)
        y.backward(grad)
        near([y.data], exact[:1], "float64")
        assert [leaf.grad is None for leaf in leaves] == [i == without for i in range(3)]
        grads = [exact[1 + i] if i == without else leaf.grad for i, leaf in enumerate(leaves)]
        near(grads, exact[1:], "float64")


@pytest.mark.parametrize("of", ["query", "key"])
@EACH_DTYPE
def test_nan_of_later_positions_is_not_seen(of, dtype):
    """NaN in a query is seen in its own result, and in a key from there on; before it nothing
    changes by a bit.
    """
    rng, at = np.random.default_rng(0), 140
    arrays = [rng.standard_normal((2, 2, 150, 4)).astype(dtype) for _ in range(3)]
    before = ops.scaled_dot_product_attention(*map(Tensor, arrays), causal=True).data
    arrays[("query", "key").index(of)][:, :, at] = np.nan
    leaves = [Tensor(a, requires_grad=True) for a in arrays]

    def step():
        for leaf in leaves:
            leaf.grad = None
        y = ops.scaled_dot_product_attention(*leaves, causal=True)
        y.sum().backward()
        return y

    eager = [step().data.copy(), *[leaf.grad.copy() for leaf in leaves]]
    np.testing.assert_array_equal(eager[0][:, :, :at], before[:, :, :at])
    seen = np.isnan(eager[0]).any(axis=(0, 1, 3))
    np.testing.assert_array_equal(
        seen, np.arange(150) == at if of == "query" else np.arange(150) >= at
    )
    if of == "query":
        np.testing.assert_array_equal(np.isnan(eager[1]).any(axis=(0, 1, 3)), np.arange(150) == at)
    compiled = nnmpi.compile(step)
    compiled()
    for first, other in zip([compiled().data, *[leaf.grad for leaf in leaves]], eager, strict=True):
        np.testing.assert_array_equal(first, other)


@EACH_DTYPE
@EACH_CAUSAL
def test_dropped_probabilities(dtype, causal, monkeypatch):
    """By the formulas, with the mask that its description gives, in blocks and bands of any
    size.
    """
    monkeypatch.setattr(module, "ELEMENTS", 500)
    monkeypatch.setattr(module, "CAUSAL", 4)
    monkeypatch.setattr(module, "ALL", 8)
    batch, time, heads, features, rate, key, row = 3, 21, 5, 4, 0.3, (7, 2**32 - 5), 11
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((batch, time, 3 * heads * features)).astype(dtype)
    grad = rng.standard_normal((batch, time, heads * features)).astype(dtype)
    x = Tensor(qkv, requires_grad=True)
    y = ops.attention(x, heads, causal, dropout=rate, mask_key=lambda: (key, row))
    y.backward(grad)
    bits = random_bits(np, row, batch, heads * time * time, key)
    left = (bits >= rate * 2**32).reshape(batch, heads, time, time) / (1 - rate)
    assert 0.6 < (left > 0).mean() < 0.8
    exact = reference(*split(qkv, 3, heads), split(grad, 1, heads)[0], causal, left)
    near(split(y.data, 1, heads), exact[:1], dtype)
    near(split(x.grad, 3, heads), exact[1:], dtype)
