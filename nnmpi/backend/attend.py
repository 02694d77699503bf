"""Scaled dot-product attention of many heads, computed on views of the heads without copies.

Scores are stored transposed, a row per key, because NumPy computes sums and maxima over rows much
faster than along them. They are stored in bands of queries, each contiguous:

            queries            A band has 64 queries, and the keys up to the last of them.
          + + | + + | + +
          . + | + + | + +      +  the query sees the key
    keys  : : | + + | + +      .  hidden by the causal mask, replaced by -inf
          : : | . + | + +      :  hidden, and not computed: no band contains it
          : : | : : | + +

Softmax is computed in parts, so probabilities are never written. Each score becomes the power
e^(score - top), for top the query's largest score. The product of powers and values is divided by
the powers' sum (`total`) at the end. Forward saves the powers, or backward computes them again if
keys arrive in blocks (see `attend_more`). Backward divides the gradient of the result by the sum,
which has fewer elements than the powers.

Queries may have several times as many heads as keys and values: neighbouring heads of queries form
a group, which shares a head of keys and values (Ainslie et al., "GQA", 2023). They are computed one
head of each group after another, on the same view of the keys and values, which are not copied.

Hidden scores (.) are replaced whatever their value: NaN in a later query or key reaches no earlier
result. But a hidden power is 0, and 0 times NaN is NaN. So within a band NaN in a later value
reaches the results before it, and NaN in a later key or value reaches the gradients of queries. On
a device, which computes full products, it reaches all positions before. Excluding it would cost
further passes in every call, for a run that has diverged anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf, nan, prod, sqrt
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Dtype, Residuals, Shape, namespace, ones
from nnmpi.backend.gemm import gemm
from nnmpi.backend.random import least_kept, random_bits
from nnmpi.backend.sums import ELEMENTS, slices

# Queries per band, with a causal mask and without one.
CAUSAL, ALL = 64, 256

Heads: TypeAlias = Array  # (batch, heads, time, features), a view
Trio: TypeAlias = tuple[Heads, Heads, Heads]  # queries, keys and values, or their gradients
HeadRange: TypeAlias = tuple[slice, slice]  # some sequences and heads
# the first query, the end of the queries, the end of the keys that they see
Band: TypeAlias = tuple[int, int, int]
Piece: TypeAlias = tuple[Band, slice]  # a band, and the slice of its powers in the saved array


class Block(NamedTuple):
    """What is computed together: heads of queries, each with another head of keys.

    Attributes:
        queries, keys: their sequences and heads.
        is_first: whether these are the first that read their keys.
    """

    queries: HeadRange
    keys: HeadRange
    is_first: bool


Blocks: TypeAlias = list[tuple[Block, list[Piece]]]


@dataclass(frozen=True)
class AttentionDropout:
    """Attention dropout, keyed by head, query and key.

    Attributes:
        rate: the probability of dropping one of the attention's probabilities, in [0, 1).
        key, first_row: as for `random_bits`; a row is a sequence.
    """

    rate: float
    key: Any
    first_row: int

    @property
    def factor(self) -> float:
        """The factor of the remaining probabilities, which preserves the mean."""
        return 1 / (1 - self.rate)

    def from_head(self, first: int, length: int) -> AttentionDropout:
        """Return the dropout of the heads from `first` on, for sequences of this length."""
        return replace(self, key=((self.key[0] + first * length**2) & 0xFFFFFFFF, self.key[1]))


def attend(
    inputs: Trio,
    y: Heads,
    causal: bool,
    keep: bool,
    drop: AttentionDropout | None = None,
) -> Residuals:
    """Write softmax(q k^T / sqrt(features)) v to y, and return the residuals for `attend_grad`.

    Args:
        inputs: q (batch, heads, queries, features), k (batch, key heads, keys, features) and v
            (batch, key heads, keys, values), with any strides. Key heads divide the heads.
        y: (batch, heads, queries, values), with any strides.
        causal: whether query i sees the keys 0..i alone; there are then as many keys as queries.
        keep: whether `attend_grad` will be called.
        drop: the dropout, or None; with one, the arrays are plain ones.
    """
    xp = namespace(y)
    q, k, v = inputs
    which = KeyBlock(range(q.shape[2]), range(k.shape[2]), k.shape[2], causal, drop)
    count = sum((j - i) * seen for i, j, seen in which.bands())
    saved = xp.empty((q.shape[0] * q.shape[1] * count,), q.dtype) if keep else None
    top, total = xp.empty(q.shape[:3], q.dtype), _like_packed(q, (*q.shape[:3], 1))[..., 0]
    attend_more(inputs, y, top, total, which, saved, first=True)
    np.divide(y, total[..., None], out=y)
    return (q, k, v, y, total, saved) if keep else ()


def attend_grad(
    grad: Heads,
    residuals: Residuals,
    targets: Trio,
    causal: bool,
    drop: AttentionDropout | None = None,
) -> None:
    """Write the gradients of q, k and v.

    Args:
        grad: like y, the gradient of the result.
        residuals: from `attend`.
        targets: receive the gradients; of the shapes of q, k and v, with any strides.
        causal, drop: as for `attend`.
    """
    q, k, v, y, total, powers = residuals
    which = KeyBlock(range(q.shape[2]), range(k.shape[2]), k.shape[2], causal, drop)
    share = _like_packed(grad, grad.shape)
    np.divide(grad, total[..., None], out=share)
    inner = np.einsum("bhtd,bhtd->bht", share, y)  # CuPy's einsum has no `out`
    attend_more_grad(share, inner, (q, k, v), None, targets, which, powers, first=True)


def attend_next(q: Heads, k: Heads, v: Heads, y: Heads) -> None:
    """Write the attention of a single query of each head to y, which sees all keys.

    For text that is generated token by token, of which a block of `attend` has little to compute:
    its many calls take longer. The queries of a group are rows that read the same keys.

    Args:
        q: (batch, heads, 1, features).
        k, v: (batch, key heads, keys, features), as for `attend`.
        y: (batch, heads, 1, values).
    """
    batch, heads, _, features = q.shape
    shape = batch, k.shape[1], heads // k.shape[1]
    p = gemm(q.reshape(*shape, features) * q.dtype.type(1 / sqrt(features)), k.swapaxes(2, 3))
    np.exp(np.subtract(p, p.max(axis=3, keepdims=True), out=p), out=p)
    sums = gemm(p, v)
    sums /= p.sum(axis=3, keepdims=True)
    np.copyto(y, sums.reshape(y.shape))


def attend_more(
    inputs: Trio,
    sums: Heads,
    top: Array,
    total: Array,
    which: KeyBlock,
    saved: Array | None = None,
    first: bool = False,
) -> None:
    """Attend to more keys by an online softmax (Milakov and Gimelshein, 2018).

        top'   = max(top, scores of the new keys)
        total' = total e^(top - top') + sum e^(score - top')
        sums'  = sums e^(top - top') + sum e^(score - top') value

    The result is sums / total after all blocks of keys.

    Args:
        inputs: q, k and v, as for `attend`, in the dtype of the sums.
        sums: (batch, heads, queries, values), initially 0.
        top, total: (batch, heads, queries), initially -inf and 0. The first block must have a
            visible key for each query.
        which: the positions of these queries and keys.
        saved: receives the powers, (n,); None if backward computes them again.
        first: whether these are the first keys; sums, top and total are then only written.
    """
    xp = namespace(sums)
    q, k, v = inputs
    blocks, scale = which.pieces(q, k), 1 / sqrt(q.shape[3])
    most, size = _largest(q, blocks)
    room, scaled_all = xp.empty((size if saved is None else 0,), q.dtype), _like_packed(q, most)
    for block, pieces in blocks:
        qb, kb, vb = q[block.queries], k[block.keys], v[block.keys]
        scaled = scaled_all[: len(qb), : qb.shape[1]]
        np.multiply(qb, scale, out=scaled)
        for (i, j, seen), part in pieces:
            target = _piece(saved, room, part, (*qb.shape[:2], seen, j - i))
            p = which.scores(kb[:, :, :seen], scaled[:, :, i:j], i, target)
            local = [item[block.queries][:, :, i:j] for item in (top, total, sums)]
            new = local if first else [xp.empty(item.shape, item.dtype) for item in local]
            np.max(p, axis=2, out=new[0])
            if not first:
                np.maximum(new[0], local[0], out=new[0])
            np.exp(np.subtract(p, new[0][:, :, None], out=p), out=p)
            # the sum over keys as a product with ones: BLAS is faster than NumPy's add.reduce
            xp.matmul(ones(p, seen)[None], p, out=new[1][:, :, None])
            which.mark(p, block.queries, i)
            gemm(_left(p, which.drop).swapaxes(2, 3), vb[:, :, :seen], out=new[2])
            if not first:
                # rescale the old sums from the old top to the new one
                shrink = np.exp(local[0] - new[0])
                for before, more, factor in zip(
                    local[1:], new[1:], (shrink, shrink[..., None]), strict=True
                ):
                    np.add(np.multiply(before, factor, out=before), more, out=before)
                np.copyto(local[0], new[0])


def attend_more_grad(
    share: Heads,
    inner: Array,
    inputs: Trio,
    top: Array | None,
    targets: Trio,
    which: KeyBlock,
    saved: Array | None = None,
    first: bool = False,
) -> None:
    """Add the gradients of queries, and of a block of keys and values.

    The softmax's derivative needs sum_k P dP per query. That equals the inner product of the result
    and its gradient (Dao et al., "FlashAttention", 2022), which has fewer terms.

    Args:
        share: (batch, heads, queries, values), the gradient of the result, divided by the total.
        inner: (batch, heads, queries), the inner products of each result and its share.
        inputs: q, k and v.
        top: as after the last `attend_more`; None with saved powers.
        targets: accumulate the gradients of q, k and v.
        which: the positions of these queries and keys.
        saved: the powers that `attend_more` saved; None to compute them again.
        first: write the gradients instead of adding them; for the full sequence's queries and keys
            only.
    """
    xp = namespace(share)
    (q, k, v), (to_q, to_k, to_v) = inputs, targets
    scale, blocks = 1 / sqrt(q.shape[3]), which.pieces(q, k)
    most, size = _largest(q, blocks)
    room, d_all = (xp.empty((count,), q.dtype) for count in (size if saved is None else 0, size))
    scaled_all = _like_packed(q, (*most[:3], v.shape[3]))
    if first and not q.shape[2]:
        for target in (to_k, to_v):
            np.copyto(target, 0)
    for block, pieces in blocks:
        qb, kb, vb, gb = q[block.queries], k[block.keys], v[block.keys], share[block.queries]
        to_qb, to_kb, to_vb = to_q[block.queries], to_k[block.keys], to_v[block.keys]
        scaled = scaled_all[: len(qb), : qb.shape[1]]
        np.multiply(gb, scale, out=scaled)
        less = np.multiply(inner[block.queries], scale, out=xp.empty(gb.shape[:3], q.dtype))
        for (i, j, seen), part in reversed(pieces):
            # in reverse, since the last queries see all keys: they write, the others add
            shape = (*qb.shape[:2], seen, j - i)
            d, p = _piece(None, d_all, part, shape), _piece(saved, room, part, shape)
            if top is not None:
                which.scores(kb[:, :, :seen], qb[:, :, i:j] * scale, i, p)
                np.exp(np.subtract(p, top[block.queries][:, :, None, i:j], out=p), out=p)
                which.mark(p, block.queries, i)
            adds = not (first and block.is_first and j == qb.shape[2])
            gemm(_left(p, which.drop), gb[:, :, i:j], to_vb[:, :, :seen], add=adds)
            gemm(vb[:, :, :seen], scaled[:, :, i:j].swapaxes(2, 3), out=d)
            if which.drop is not None:
                np.multiply(d, (p > 0) * p.dtype.type(which.drop.factor), out=d)
                p = xp.abs(p)
            np.multiply(np.subtract(d, less[:, :, None, i:j], out=d), p, out=d)
            gemm(d, qb[:, :, i:j], to_kb[:, :, :seen], add=adds)
            gemm(d.swapaxes(2, 3), kb[:, :, :seen], to_qb[:, :, i:j], add=not first)


@dataclass(frozen=True)
class KeyBlock:
    """A block of queries attending to a block of keys of the same sequence.

    Attributes:
        queries, keys: their positions; the two ranges are equal or disjoint.
        length: of the sequence.
        causal: whether a query sees only the keys up to its own position. In disjoint ranges it
            sees all keys.
        drop: the dropout, or None.
    """

    queries: range
    keys: range
    length: int
    causal: bool
    drop: AttentionDropout | None = None

    def bands(self) -> Iterator[Band]:
        """Yield the bands, in the order of their queries."""
        step = CAUSAL if self.is_diagonal else ALL
        for i in range(0, len(self.queries), step):
            j = min(i + step, len(self.queries))
            yield i, j, j if self.is_diagonal else len(self.keys)

    @property
    def is_diagonal(self) -> bool:
        """Whether the causal mask hides some keys of this block from some queries."""
        return self.causal and self.queries == self.keys

    def scores(self, k: Heads, q: Heads, first: int, out: Array) -> Array:
        """Write scores (batch, heads, keys, queries) of some queries to `out`; return it.

        The score of a hidden key is -inf.
        """
        gemm(k, q.swapaxes(2, 3), out=out)
        if self.is_diagonal:
            corner = out[:, :, first:]
            np.fmin(corner, _bound(namespace(out), q.shape[2], out.dtype), out=corner)
        return out

    def mark(self, p: Array, part: HeadRange, first: int) -> None:
        """Negate the powers of dropped probabilities.

        The sign is the mask, so no second array is needed: the powers are |p|, and after dropout
        max(p, 0) times `AttentionDropout.factor`.

        Args:
            p: (sequences, heads, keys, some queries), changed in place.
            part: the sequences and heads.
            first: the first of the queries.
        """
        drop = self.drop
        if drop is None:
            return
        xp, count = namespace(p), p.shape
        heads = xp.arange(part[1].start, part[1].stop, part[1].step, dtype=xp.uint32)
        rows, columns = (
            xp.arange(n, dtype=xp.uint32) + xp.uint32(start)
            for n, start in (
                (count[3], self.queries.start + first),
                (count[2], self.keys.start),
            )
        )
        length = xp.uint32(self.length)
        numbers = (heads[:, None, None] * length + rows) * length + columns[:, None]
        bits = random_bits(
            xp, drop.first_row + part[0].start, count[0], numbers.reshape(-1), drop.key
        )
        dropped = (bits < xp.uint32(least_kept(drop.rate))).reshape(count)
        p[...] = xp.where(dropped, -p, p)

    def pieces(self, q: Heads, k: Heads) -> Blocks:
        """Return the blocks of sequences and heads computed together, the largest first.

        Blocks that share keys follow one another. Each comes with its bands, and the slices of
        their powers in the saved array. Without queries there are no blocks.
        """
        bands, start, pieces = tuple(self.bands()), 0, Blocks()
        for block in _grouped(_blocks(k, len(self.keys), bands), q.shape[1] // max(k.shape[1], 1)):
            heads, result = prod(item.stop - item.start for item in block.keys), list[Piece]()
            for i, j, seen in bands:
                result.append(((i, j, seen), slice(start, start + heads * seen * (j - i))))
                start = result[-1][1].stop
            pieces.append((block, result))
        return pieces


def _left(p: Array, drop: AttentionDropout | None) -> Array:
    return p if drop is None else np.maximum(p, 0) * p.dtype.type(drop.factor)


def _largest(q: Heads, blocks: Blocks) -> tuple[Shape, int]:
    if not blocks:
        return (0, 0, *q.shape[2:]), 0
    block, pieces = blocks[0]
    return q[block.queries].shape, max(part.stop - part.start for _, part in pieces)


def _piece(saved: Array | None, room: Array, part: slice, shape: Shape) -> Array:
    """Return a piece's slice of the saved array, or the beginning of the room that pieces reuse."""
    piece = room[: part.stop - part.start] if saved is None else saved[part]
    return piece.reshape(shape)


def _like_packed(like: Heads, shape: Shape) -> Heads:
    """Return an empty array (batch, heads, time, features), in memory (batch, time, heads, ...).

    That is the order of the packed projection.
    """
    batch, heads, time, features = shape
    return np.swapaxes(np.empty((batch, time, heads, features), like.dtype, like=like), 1, 2)


def _grouped(parts: Iterator[HeadRange], group: int) -> Iterator[Block]:
    """Yield the blocks of queries that share the keys of each part: every `group`th head."""
    for sequences, heads in parts:
        for place in range(group):
            queries = slice(heads.start * group + place, heads.stop * group, group)
            yield Block((sequences, queries), (sequences, heads), place == 0)


def _blocks(k: Heads, keys: int, bands: tuple[Band, ...]) -> Iterator[HeadRange]:
    """Yield the sequences and heads whose scores are computed together; the first is the largest.

    On the host their scores fit the cache; a device computes all at once.
    """
    batch, heads = k.shape[:2]
    scores = max([1, *(keys * (j - i) for i, j, _ in bands)])
    fit = 4 * ELEMENTS // scores if isinstance(k, np.ndarray) else batch * heads
    # all heads of some sequences if they fit, else some heads of one sequence
    many, few = max(1, fit // heads), max(1, min(fit, heads))
    if bands:
        yield from product(slices(batch, many), slices(heads, few))


@lru_cache(maxsize=8)
def _bound(xp: ModuleType, n: int, dtype: Dtype) -> Array:
    """Return (n keys, n queries): -inf for a key after the query, else NaN.

    `fmin` ignores NaN in one operand: with this mask it returns the score of a visible key, and
    -inf for a hidden one, also if that score is NaN.
    """
    return xp.where(xp.arange(n)[:, None] > xp.arange(n), -inf, nan).astype(dtype)
