"""Scaled dot-product attention with several heads (Vaswani et al., "Attention is all you need", 2017).

    P = softmax(Q K^T / sqrt(features))       Y = P V          all per sequence and head

Everything runs on views of the heads, (batch, heads, time, features) with any strides: the matrix products read the
packed projection as it lies and write the result, and the gradients, where they belong; no head is ever copied.

Probabilities are kept transposed, a row per key, since sums and maxima over the rows are much faster than along them:

            queries                 A causal mask leaves out the keys after the query. Scores are computed
          + + + + + + + +           for 128 queries at a time, with the keys up to the last of them; products
          . + + + + + + +           with probabilities go by 64, which leaves out most of what is zero. What
    keys  : : + + + + + +           lies below (:) is not even written.
          : : . + + + + +
          : : : : + + + +

A score that is hidden (.) is replaced, whatever it is: NaN in a later query or key reaches no earlier result. But its
probability is 0, and 0 times NaN is NaN: NaN in a later value reaches the results before it among the same 64
positions, and NaN in a later key or value the gradients of queries among the same 128. On a device, whose products
leave nothing out, these reach all that is before. Keeping them out would cost passes in every call, for a run that has
diverged.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf, nan, sqrt
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.casting import FLOAT32, cast, device_kernels
from nnmpi.backend.gemm import gemm
from nnmpi.backend.precision import is_low
from nnmpi.errors import ShapeError, UsageError
from nnmpi.ops.blocks import ELEMENTS
from nnmpi.tensor.convert import converted, widely
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import read_as, real
from nnmpi.tensor.tensor import Tensor

# Queries whose scores are computed at once, and those whose product with probabilities is one GEMM.
SCORES, PRODUCTS = 128, 64

Heads: TypeAlias = Array  # (batch, heads, time, features), a view


class _Attention(Function):
    """What both forms share: the computation on views of heads, and the gradients' on views of gradients.

    Args:
        table: a device's kernels, for its arrays; None for NumPy's.
    """

    __slots__ = ("causal", "table")

    def __init__(self, causal: bool, table: Any = None) -> None:
        self.causal, self.table = causal, table

    def attend(self, q: Heads, k: Heads, v: Heads, y: Heads) -> None:
        """Write the result to y and save what the gradients need."""
        if self.table is not None:
            self._attend_there(q, k, v, y)
            return
        xp, keep = self.xp, True in self.needs
        batch, heads, queries, features = q.shape
        keys, scale = k.shape[2], 1 / sqrt(features)
        blocks = list(_blocks(q, keys))
        most = (blocks[0][0].stop, blocks[0][1].stop) if blocks else (0, 0)
        p_all = xp.empty((batch, heads, keys, queries) if keep else (*most, keys, queries), q.dtype)
        # time before heads, as in the packed projection: whole rows are scaled at once
        scaled_all = xp.swapaxes(xp.empty((most[0], queries, most[1], features), q.dtype), 1, 2)
        ones = xp.ones((1, keys), q.dtype)
        for block in blocks:
            qb, kb, vb, yb = q[block], k[block], v[block], y[block]
            p = p_all[block] if keep else p_all[: qb.shape[0], : qb.shape[1]]
            scaled = scaled_all[: qb.shape[0], : qb.shape[1]]
            xp.multiply(qb, scale, out=scaled)
            for i, j, seen in _bands(queries, keys, SCORES, self.causal):
                columns = p[:, :, :seen, i:j]
                xp.matmul(kb[:, :, :seen], scaled[:, :, i:j].swapaxes(2, 3), out=columns)
                if self.causal:
                    corner = columns[:, :, i:]
                    xp.fmin(corner, _bound(namespace(q), j - i, q.dtype), out=corner)
                self._softmax(columns, ones[:, :seen])
            for i, j, seen in _bands(queries, keys, PRODUCTS if self.causal else queries, self.causal):
                xp.matmul(p[:, :, :seen, i:j].swapaxes(2, 3), vb[:, :, :seen], out=yb[:, :, i:j])
        if keep:
            self.saved = (q, k, v, y, p_all)

    def _softmax(self, scores: Array, ones: Array) -> None:
        """Turn scores (batch, heads, keys, queries) into probabilities in place."""
        xp = self.xp
        row = xp.empty((*scores.shape[:2], 1, scores.shape[3]), scores.dtype)
        xp.max(scores, axis=2, keepdims=True, out=row)
        xp.subtract(scores, row, out=scores)
        xp.exp(scores, out=scores)
        xp.matmul(ones, scores, out=row)
        xp.divide(scores, row, out=scores)

    def attend_back(self, grad: Heads, to_q: Heads, to_k: Heads, to_v: Heads) -> None:
        """Write the gradients, given the result's.

        The softmax's derivative needs, per query, sum_k P dP; that is the product of the result and its gradient (Dao
        et al., "FlashAttention", 2022), which is shorter.
        """
        if self.table is not None:
            self._attend_back_there(grad, to_q, to_k, to_v)
            return
        xp, (q, k, v, y, p_all) = self.xp, self.saved
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
            inner = xp.einsum("bhtd,bhtd->bht", scaled, y[block])[:, :, None]
            for i, j, seen in _bands(queries, keys, SCORES, self.causal):
                columns = d[:, :, :seen, i:j]
                xp.matmul(vb[:, :, :seen], scaled[:, :, i:j].swapaxes(2, 3), out=columns)
                xp.subtract(columns, inner[..., i:j], out=columns)
                xp.multiply(columns, p[:, :, :seen, i:j], out=columns)
            for i, j, seen in _bands(queries, keys, PRODUCTS if self.causal else queries, self.causal):
                xp.matmul(d[:, :, :seen, i:j].swapaxes(2, 3), kb[:, :, :seen], out=to_q[block][:, :, i:j])
            for i, j, first in _key_bands(keys, self.causal):
                xp.matmul(d[:, :, i:j, first:], qb[:, :, first:], out=to_k[block][:, :, i:j])
                xp.matmul(p[:, :, i:j, first:], gb[:, :, first:], out=to_v[block][:, :, i:j])

    def _attend_there(self, q: Heads, k: Heads, v: Heads, y: Heads) -> None:
        """Do so on a device: batched products of the heads as they lie, and a softmax kernel over all scores in place.

        scores (batch, heads, queries, keys) = Q K^T    --softmax-->  P, which is kept in the dtype of the heads
        dP = dY V^T  --softmax's gradient-->  dS      dQ = dS K      dK = dS^T Q      dV = P^T dY

        The scores of heads of half precision are float32: they may be too large for float16, and powers of them would
        show all that bfloat16 rounds away.
        """
        xp, shape = self.xp, (*q.shape[:3], k.shape[2])
        scores = xp.empty(shape, FLOAT32 if is_low(q.dtype) else q.dtype)
        gemm(xp, q, k.swapaxes(2, 3), out=scores)
        self.invoke(self.table.softmax, scores, 1 / sqrt(q.shape[3]), self.causal, scores)
        p = cast(xp, scores, q.dtype)
        gemm(xp, p, v, out=y)
        self.saved = (q, k, v, p)

    def _attend_back_there(self, grad: Heads, to_q: Heads, to_k: Heads, to_v: Heads) -> None:
        """Write the gradients on a device, given the result's."""
        xp, (q, k, v, p) = self.xp, self.saved
        d = xp.empty(p.shape, p.dtype)
        gemm(xp, grad, v.swapaxes(2, 3), out=d)
        gemm(xp, p.swapaxes(2, 3), grad, out=to_v)
        self.invoke(self.table.softmax_grad, d, p, 1 / sqrt(q.shape[3]), self.causal, d)
        gemm(xp, d, k, out=to_q)
        gemm(xp, d.swapaxes(2, 3), q, out=to_k)


class Attention(_Attention):
    """softmax(q k^T / sqrt(features)) v for (batch, heads, time, features)."""

    replayable = True

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        y: Array = self.xp.empty((*q.shape[:3], v.shape[3]), q.dtype)
        self.attend(q, k, v, y)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        grads = [self.xp.empty(each.shape, each.dtype) for each in self.saved[:3]]
        self.attend_back(grad, *grads)
        return tuple(each if needed else None for each, needed in zip(grads, self.needs, strict=True))


class PackedAttention(_Attention):
    """The same for (batch, time, 3 features): queries, keys and values side by side, each the heads side by side."""

    __slots__ = ("heads",)

    replayable = True

    def __init__(self, heads: int, causal: bool, table: Any = None) -> None:
        super().__init__(causal, table)
        self.heads = heads

    def forward(self, qkv: Array) -> Array:
        batch, time, width = qkv.shape
        y: Array = self.xp.empty((batch, time, width // 3), qkv.dtype)
        self.attend(*self._split(qkv, 3), *self._split(y, 1))
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        batch, heads, time, features = self.saved[0].shape
        to_qkv: Array = self.xp.empty((batch, time, 3 * heads * features), grad.dtype)
        self.attend_back(*self._split(grad, 1), *self._split(to_qkv, 3))
        return (to_qkv,)

    def _split(self, packed: Array, parts: int) -> tuple[Heads, ...]:
        """Return the heads of each part of (batch, time, parts * heads * features)."""
        batch, time, width = packed.shape
        shape = (batch, time, parts, self.heads, width // (parts * self.heads))
        heads = self.xp.reshape(packed, shape).transpose(2, 0, 3, 1, 4)
        return tuple(heads[i] for i in range(parts))


def _blocks(q: Heads, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yield the sequences and heads whose scores are computed together; the first block is the largest."""
    batch, heads, queries, _ = q.shape
    scores = max(1, keys * min(queries, SCORES))
    fit = 2 * ELEMENTS // scores if type(q) is np.ndarray else batch * heads
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


def attention(qkv: Tensor, heads: int, causal: bool = False) -> Tensor:
    """Return multi-head attention of a packed projection, the heads side by side.

    Args:
        qkv: (batch, time, 3 * features): queries, keys, values; in each the heads one after the other.
        heads: their number; `features` is a multiple of it.
        causal: whether each position sees only itself and those before it; NaN in a later value may still be seen (see
            the module), in a later query or key not.

    Returns:
        (batch, time, features), in the dtype of qkv; in a mode of mixed precision in the lower one.

    Raises:
        ShapeError: when qkv is not of three axes, or the last is no multiple of 3 * heads.
        UsageError: when there are no heads.
        DtypeError: when qkv is not floating point.
    """
    if heads < 1:
        raise UsageError(f"attention needs at least 1 head, not {heads}")
    if qkv.ndim != 3 or qkv.shape[2] % (3 * heads) or not qkv.shape[2]:
        raise ShapeError(
            f"attention with {heads} heads needs (batch, time, 3 * features) with features a multiple of {heads}, "
            f"not {qkv.shape}"
        )
    packed = converted(real("attention", qkv), read_as("attention", qkv))
    table = device_kernels(qkv.data)
    if table is not None:
        return PackedAttention(heads, causal, table)(packed)
    return widely(PackedAttention(heads, causal), packed)


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Return softmax(q k^T / sqrt(features)) v, for each sequence and head.

    Args:
        q: (batch, heads, queries, features).
        k: (batch, heads, keys, features).
        v: (batch, heads, keys, values).
        causal: whether each query sees only the keys up to its own position; there are as many of both, then. NaN in a
            later value may still be seen (see the module), in a later query or key not.

    Returns:
        (batch, heads, queries, values), in the dtype of q; in a mode of mixed precision in the lower one.

    Raises:
        ShapeError: when the shapes do not fit together, or there are no keys or features.
        DtypeError: when they are not floating point, or differ in dtype.
    """
    shapes = f"queries {q.shape}, keys {k.shape} and values {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ShapeError(f"attention needs (batch, heads, time, features) of the same batch and heads, not {shapes}")
    if q.shape[3] != k.shape[3] or k.shape[2] != v.shape[2] or 0 in (k.shape[2], q.shape[3], q.shape[1]):
        raise ShapeError(f"attention needs keys, as many values, and features as long as the queries', not {shapes}")
    if causal and q.shape[2] != k.shape[2]:
        raise ShapeError(f"causal attention needs as many queries as keys, not {shapes}")
    reads = read_as("attention", real("attention", q), k, v)
    q, k, v = (converted(each, reads) for each in (q, k, v))
    table = device_kernels(q.data)
    if table is not None:
        return Attention(causal, table)(q, k, v)
    return widely(Attention(causal), q, k, v)
