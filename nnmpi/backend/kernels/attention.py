"""Scaled dot-product attention of many heads, on views of them: nothing is copied.

Probabilities are kept transposed, a row per key, since sums and maxima over the rows are much faster than along them:

            queries                 A causal mask leaves out the keys after the query. Scores are computed
          + + + + + + + +           for 256 queries at a time, with the keys up to the last of them; products
          . + + + + + + +           with probabilities go by 64, which leaves out most of what is zero. What
    keys  : : + + + + + +           lies below (:) is not even written.
          : : . + + + + +
          : : : : + + + +

A score that is hidden (.) is replaced, whatever it is: NaN in a later query or key reaches no earlier result. But its
probability is 0, and 0 times NaN is NaN: among the same 64 positions NaN in a later value reaches the results before
it, and NaN in a later key or value the gradients of queries. On a device, whose products leave nothing out, these reach
all that is before. Keeping them out would cost passes in every call, for a run that has diverged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, nan, sqrt
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Residuals, namespace
from nnmpi.backend.constants import ones
from nnmpi.backend.kernels.blocks import ELEMENTS
from nnmpi.backend.random import random_bits

# Queries whose scores are computed at once, and those whose product with probabilities is one GEMM.
SCORES, PRODUCTS = 256, 64

Heads: TypeAlias = Array  # (batch, heads, time, features), a view
Block: TypeAlias = tuple[slice, slice]  # which sequences and heads
Band: TypeAlias = tuple[int, int, int]  # the first query, the end of queries, the end of the keys that they see


@dataclass(frozen=True)
class AttentionDropout:
    """Which probabilities are dropped: those of head h, query i and key j have column (h queries + i) keys + j.

    Attributes:
        rate: the probability with which one is, in [0, 1).
        key, first_row: as for `random_bits`; a row is a sequence.
    """

    rate: float
    key: tuple[int, int]
    first_row: int

    @property
    def factor(self) -> float:
        """What the others are multiplied by, so that the mean stays."""
        return 1 / (1 - self.rate)

    def from_head(self, first: int, queries: int, keys: int) -> AttentionDropout:
        """Return the same for some of the heads, from the first one on."""
        return replace(self, key=((self.key[0] + first * queries * keys) & 0xFFFFFFFF, self.key[1]))

    def mark(
        self, p: Array, block: tuple[slice, slice], first: int, queries: int, keys: int, first_key: int = 0
    ) -> None:
        """Turn the sign of the probabilities that are dropped.

        So one array is both: P is |p|, and what is left of it max(p, 0) times `factor`.

        Args:
            p: (sequences, heads, some keys, some queries), changed in place.
            block: which sequences and heads these are.
            first: the first query.
            queries, keys: how many there are in all.
            first_key: the first key.
        """
        xp, count = namespace(p), p.shape
        heads, rows, columns = (xp.arange(n, dtype=xp.uint32) for n in (count[1], count[3], count[2]))
        heads = heads + xp.uint32(block[1].start)
        rows, columns = rows + xp.uint32(first), columns + xp.uint32(first_key)
        places = (heads[:, None, None] * xp.uint32(queries) + rows) * xp.uint32(keys) + columns[:, None]
        bits = random_bits(xp, self.first_row + block[0].start, count[0], places.reshape(-1), self.key)
        dropped = (bits < xp.uint32(min(round(self.rate * 2**32), 2**32 - 1))).reshape(count)
        p[...] = xp.where(dropped, -p, p)


class AttentionKernels:
    """Attention by the array library's functions, a few heads at a time, whose scores lie in the cache."""

    __slots__ = ()

    def attend(
        self,
        xp: Any,
        q: Heads,
        k: Heads,
        v: Heads,
        y: Heads,
        causal: bool,
        keep: bool,
        drop: AttentionDropout | None = None,
    ) -> Residuals:
        """Write softmax(q k^T / sqrt(features)) v to y, and return what the gradient needs.

        Args:
            xp: the arrays' module, or a recorder's stand-in for it.
            q: (batch, heads, queries, features); all four arrays have any strides.
            k: (batch, heads, keys, features).
            v: (batch, heads, keys, values).
            y: (batch, heads, queries, values).
            causal: whether query i sees the keys up to i alone; there are as many of both, then.
            keep: whether `attend_grad` will be called.
            drop: which probabilities are dropped, if some are; then xp is the arrays' module itself.
        """
        batch, heads, queries, features = q.shape
        keys, scale = k.shape[2], 1 / sqrt(features)
        blocks = list(_blocks(q, keys))
        most = (blocks[0][0].stop, blocks[0][1].stop) if blocks else (0, 0)
        p_all = xp.empty((batch, heads, keys, queries) if keep else (*most, keys, queries), q.dtype)
        # time before heads, as in the packed projection: whole rows are scaled at once
        scaled_all = xp.swapaxes(xp.empty((most[0], queries, most[1], features), q.dtype), 1, 2)
        for block in blocks:
            qb, kb, vb, yb = q[block], k[block], v[block], y[block]
            place = block if keep else (slice(0, qb.shape[0]), slice(0, qb.shape[1]))
            p = p_all[place]
            scaled = scaled_all[: qb.shape[0], : qb.shape[1]]
            xp.multiply(qb, scale, out=scaled)
            for i, j, seen in _bands(queries, keys, SCORES, causal):
                columns = p[:, :, :seen, i:j]
                xp.matmul(kb[:, :, :seen], scaled[:, :, i:j].swapaxes(2, 3), out=columns)
                self.probabilities(xp, p_all, place, (i, j, seen), causal)
                if drop is not None:
                    drop.mark(columns, block, i, queries, keys)
            for i, j, seen in _bands(queries, keys, PRODUCTS if causal else queries, causal):
                left = _left(xp, p[:, :, :seen, i:j], drop)
                xp.matmul(left.swapaxes(2, 3), vb[:, :, :seen], out=yb[:, :, i:j])
        return (q, k, v, y, p_all) if keep else ()

    def attend_grad(
        self,
        xp: Any,
        grad: Heads,
        residuals: Residuals,
        to_q: Heads,
        to_k: Heads,
        to_v: Heads,
        causal: bool,
        drop: AttentionDropout | None = None,
    ) -> None:
        """Write the gradients of q, k and v.

        The softmax's derivative needs, per query, sum_k P dP; that is the product of the result and its gradient (Dao
        et al., "FlashAttention", 2022), which is shorter.

        Args:
            xp: as for `attend`.
            grad: like y, the gradient of the result.
            residuals: what `attend` returned.
            to_q, to_k, to_v: like q, k and v, with any strides.
            causal, drop: as they were given to `attend`.
        """
        q, k, v, y, p_all = residuals
        queries, features = q.shape[2:]
        keys, scale = k.shape[2], 1 / sqrt(features)
        blocks = list(_blocks(q, keys))
        most = (blocks[0][0].stop, blocks[0][1].stop) if blocks else (0, 0)
        d_all = xp.empty((*most, keys, queries), q.dtype)
        scaled_all = xp.swapaxes(xp.empty((most[0], queries, most[1], v.shape[3]), q.dtype), 1, 2)
        for block in blocks:
            qb, kb, vb, gb, p = q[block], k[block], v[block], grad[block], p_all[block]
            d, scaled = (each[: qb.shape[0], : qb.shape[1]] for each in (d_all, scaled_all))
            xp.multiply(gb, scale, out=scaled)
            inner = xp.einsum("bhtd,bhtd->bht", scaled, y[block], out=xp.empty(scaled.shape[:3], q.dtype))
            for i, j, seen in _bands(queries, keys, SCORES, causal):
                columns, own = d[:, :, :seen, i:j], p[:, :, :seen, i:j]
                xp.matmul(vb[:, :, :seen], scaled[:, :, i:j].swapaxes(2, 3), out=columns)
                if drop is None:
                    self.score_gradients(xp, d_all, p_all, inner, block, (i, j, seen))
                else:
                    xp.multiply(columns, xp.where(own > 0, q.dtype.type(drop.factor), q.dtype.type(0)), out=columns)
                    xp.subtract(columns, inner[:, :, None, i:j], out=columns)
                    xp.multiply(columns, xp.abs(own), out=columns)
            for i, j, seen in _bands(queries, keys, PRODUCTS if causal else queries, causal):
                xp.matmul(d[:, :, :seen, i:j].swapaxes(2, 3), kb[:, :, :seen], out=to_q[block][:, :, i:j])
            for i, j, first in _key_bands(keys, causal):
                xp.matmul(d[:, :, i:j, first:], qb[:, :, first:], out=to_k[block][:, :, i:j])
                xp.matmul(_left(xp, p[:, :, i:j, first:], drop), gb[:, :, first:], out=to_v[block][:, :, i:j])

    def probabilities(self, xp: Any, p: Array, block: Block, band: Band, causal: bool) -> None:
        """Turn scores into probabilities, in place; where a query does not see a key, that is 0.

        Args:
            xp: as for `attend`.
            p: (batch, heads, keys, queries), without gaps; of it the block and the band.
            block, band: sequences and heads; queries and keys.
            causal: as for `attend`.
        """
        i, j, seen = band
        scores = p[block][:, :, :seen, i:j]
        if causal:
            corner = scores[:, :, i:]
            xp.fmin(corner, _bound(namespace(p), j - i, p.dtype), out=corner)
        row = xp.empty((*scores.shape[:2], 1, j - i), p.dtype)
        xp.max(scores, axis=2, keepdims=True, out=row)
        xp.subtract(scores, row, out=scores)
        xp.exp(scores, out=scores)
        xp.matmul(ones(xp, seen, p.dtype)[None], scores, out=row)
        xp.divide(scores, row, out=scores)

    def score_gradients(self, xp: Any, d: Array, p: Array, inner: Array, block: Block, band: Band) -> None:
        """Turn the gradients of probabilities into those of scores, (d - inner) p, in place.

        Args:
            xp: as for `attend`.
            d: (sequences, heads, keys, queries), without gaps; of it as many sequences and heads as the block has.
            p: (batch, heads, keys, queries), without gaps, what `probabilities` left.
            inner: (sequences, heads, queries), without gaps.
            block, band: sequences and heads; queries and keys.
        """
        i, j, seen = band
        columns = d[: inner.shape[0], : inner.shape[1], :seen, i:j]
        xp.subtract(columns, inner[:, :, None, i:j], out=columns)
        xp.multiply(columns, p[block][:, :, :seen, i:j], out=columns)


def _left(xp: Any, p: Array, drop: AttentionDropout | None) -> Array:
    """Return what is left of probabilities."""
    left: Array = p if drop is None else xp.maximum(p, 0) * p.dtype.type(drop.factor)
    return left


@dataclass(frozen=True)
class KeyBlock:
    """Which queries attend to which keys of a sequence.

    Attributes:
        queries, keys: their positions; they are the same, or none is in both.
        length: of the sequence.
        causal: whether each query sees only the keys up to its own position: of others it sees all.
        drop: which probabilities are dropped, if some are.
    """

    queries: range
    keys: range
    length: int
    causal: bool
    drop: AttentionDropout | None = None

    def bands(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first query, end of queries, end of the keys that they see)."""
        return _bands(len(self.queries), len(self.keys), SCORES, self.is_diagonal)

    @property
    def is_diagonal(self) -> bool:
        """Whether some queries do not see all of the keys."""
        return self.causal and self.queries == self.keys

    def scores(self, k: Heads, scaled: Heads, first: int) -> Array:
        """Return (batch, heads, keys, queries), for some of the queries from the first on; -inf for what is hidden."""
        xp = namespace(k)
        scores: Array = xp.matmul(k, scaled.swapaxes(2, 3))
        if self.is_diagonal:
            corner = scores[:, :, first:]
            xp.fmin(corner, _bound(xp, scaled.shape[2], scores.dtype), out=corner)
        return scores

    def mark(self, p: Array, block: tuple[slice, slice], first: int) -> None:
        """Turn the sign of what is dropped, see `AttentionDropout.mark`."""
        if self.drop is not None:
            self.drop.mark(p, block, self.queries.start + first, self.length, self.length, self.keys.start)


def attend_more(inputs: tuple[Heads, Heads, Heads], sums: Array, top: Array, total: Array, which: KeyBlock) -> None:
    """Let queries attend to some more keys (Milakov and Gimelshein, "Online normalizer calculation", 2018).

        top'   = max(top, scores of the new keys)
        total' = total e^(top - top') + sum e^(score - top')         sums' likewise, with values

    The result is sums / total once all keys have been seen; nothing is kept of the scores.

    Args:
        inputs: q, k and v, as for `AttentionKernels.attend`, in the dtype of the sums.
        sums: (batch, heads, queries, values), 0 at first.
        top, total: (batch, heads, queries), -inf and 0 at first; the first keys must show each query one.
        which: queries and keys these are.
    """
    q, k, v = inputs
    xp, scale = namespace(q), 1 / sqrt(q.shape[3])
    for block in _blocks(q, k.shape[2]):
        scaled, kb, vb = q[block] * scale, k[block], v[block]
        for i, j, seen in which.bands():
            p = which.scores(kb[:, :, :seen], scaled[:, :, i:j], i)
            now = top[block][:, :, i:j]
            new = xp.maximum(now, p.max(axis=2))
            xp.exp(xp.subtract(p, new[:, :, None], out=p), out=p)
            shrink = xp.exp(now - new)
            now[...] = new
            total[block][:, :, i:j] *= shrink
            total[block][:, :, i:j] += p.sum(axis=2)
            which.mark(p, block, i)
            sums[block][:, :, i:j] *= shrink[..., None]
            sums[block][:, :, i:j] += xp.matmul(_left(xp, p, which.drop).swapaxes(2, 3), vb[:, :, :seen])


def attend_more_grad(
    grad: Heads,
    inner: Array,
    logs: Array,
    inputs: tuple[Heads, Heads, Heads],
    places: tuple[Array, Array, Array],
    which: KeyBlock,
) -> None:
    """Add the gradients of queries, and of some of the keys and values, computing the probabilities again.

    Args:
        grad: of the result, (batch, heads, queries, values).
        inner: (batch, heads, queries), the products of each result and its gradient.
        logs: (batch, heads, queries), top + log(total) when all keys had been seen.
        inputs: q, k and v.
        places: where their gradients are added up.
        which: queries and keys these are.
    """
    (q, k, v), (to_q, to_k, to_v), drop = inputs, places, which.drop
    xp, scale = namespace(q), 1 / sqrt(q.shape[3])
    for block in _blocks(q, k.shape[2]):
        scaled, kb, vb, gb = q[block] * scale, k[block], v[block], grad[block]
        for i, j, seen in which.bands():
            p = which.scores(kb[:, :, :seen], scaled[:, :, i:j], i)
            xp.exp(xp.subtract(p, logs[block][:, :, None, i:j], out=p), out=p)
            which.mark(p, block, i)
            to_v[block][:, :, :seen] += xp.matmul(_left(xp, p, drop), gb[:, :, i:j])
            d = xp.matmul(vb[:, :, :seen], gb[:, :, i:j].swapaxes(2, 3))
            if drop is not None:
                xp.multiply(d, xp.where(p > 0, p.dtype.type(drop.factor), p.dtype.type(0)), out=d)
                p = xp.abs(p)
            xp.subtract(d, inner[block][:, :, None, i:j], out=d)
            xp.multiply(d, p, out=d)
            to_k[block][:, :, :seen] += xp.matmul(d, scaled[:, :, i:j])
            to_q[block][:, :, i:j] += xp.matmul(d.swapaxes(2, 3), kb[:, :, :seen]) * scale


def _blocks(q: Heads, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yield the sequences and heads whose scores are computed together; the first block is the largest."""
    batch, heads, queries, _ = q.shape
    scores = max(1, keys * min(queries, SCORES))
    fit = 4 * ELEMENTS // scores if type(q) is np.ndarray else batch * heads
    many, few = max(1, fit // heads), max(1, min(fit, heads))
    for i in range(0, batch, many):
        for j in range(0, heads, few):
            yield slice(i, min(i + many, batch)), slice(j, min(j + few, heads))


def _bands(queries: int, keys: int, step: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (first query, end of queries, end of the keys that they see); no queries make no band."""
    for i in range(0, queries, max(step, 1)):
        j = min(i + step, queries)
        yield i, j, j if causal else keys


def _key_bands(keys: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (first key, end of keys, first query that sees them) for products that lead to keys."""
    step = PRODUCTS if causal else max(keys, 1)
    for i in range(0, keys, step):
        yield i, min(i + step, keys), i if causal else 0


@lru_cache(maxsize=8)
def _bound(xp: ModuleType, n: int, dtype: np.dtype[Any]) -> Array:
    """Return -inf where a key (of n) comes after the query (of n), else NaN.

    `fmin` of scores and this is -inf where the key is hidden, also for a score of NaN, and else the score.
    """
    bound: Array = xp.where(xp.arange(n)[:, None] > xp.arange(n), -inf, nan).astype(dtype)
    return bound
