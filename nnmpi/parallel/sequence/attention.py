"""Attention over positions of several ranks, in two ways.

**Ring**: keys and values travel (Liu et al., "Ring attention with blockwise transformers", 2023).

Each rank keeps its queries, attends to the keys it has, and passes these on to the next rank.
Softmax is accumulated over blocks of keys (`attend_more`), so a rank only ever holds scores between
its own positions and one rank's.

    3 ranks, positions in chunks 0..5: rank 0 has 0 and 5, rank 1 has 1 and 4, rank 2 has 2 and 3

                 keys 0 1 2 3 4 5     chunks of queries - chunks of keys
        queries 0     c                        rank 0          rank 1          rank 2
                1     # c              hop 0   0-0 5-5 5-0     1-1 4-4 4-1     2-2 3-3 3-2
                2     # # c            hop 1   5-2 5-3         1-0 4-0         2-1 3-1
                3     # # # c          hop 2   5-1 5-4         4-2 4-3         2-0 3-0
                4     # # # # c
                5     # # # # # c      c: causal, half of the pairs      #: all pairs

Chunks from both ends (zigzag) give every rank the same work in every hop. With contiguous positions
the last rank would have the most work, and all others would wait for it.

The backward pass recomputes probabilities from each row's largest score and sum. Keys and values
travel again, and their gradients follow one hop behind until they reach their owner. Rank r of S
sends this many elements in a layer, with t_r of T positions, for B samples of F features:

    forward     2 B F (T - t_(r+1))                             over all ranks 2 B F T (S - 1)
    backward    2 B F (T - t_(r+1)) + 2 B F (T - t_r)           over all ranks 4 B F T (S - 1)

With equal shares each rank sends 2 B T F (S - 1) / S forward and twice that backward. Gradients of
keys and values in half precision travel as float32, in which they are accumulated. With fewer heads
of keys and values than of queries, F counts the features of theirs. Rotary positions turn a rank's
queries and keys before the keys travel, by the positions that the rank has.

**Ulysses**: an all-to-all of positions and heads (Jacobs et al., "DeepSpeed Ulysses", 2023).

    positions  0 1 2 3 | 4 5 6 7                0 1 2 3 4 5 6 7
    head a     rank 0  | rank 1   all-to-all    rank 0           every rank attends as a single
    head b     rank 0  | rank 1   ----------->  rank 0           rank does, with some of the heads
    head c     rank 0  | rank 1   <-----------  rank 1

Forward, q, k and v are exchanged and then the result; backward, its gradient and then the gradients
of q, k and v. Rank r of S sends this many elements in a layer, with t_r of T positions and heads of
f_r of F features, for B samples:

    forward     B (3 t_r (F - f_r) + f_r (T - t_r))        over all ranks 4 B (T F - sum of t_r f_r)
    backward    B (t_r (F - f_r) + 3 f_r (T - t_r))        the same

With equal shares each rank sends 4 B T F (S - 1) / S^2 forward, and as much backward. With fewer
heads of keys and values, the ranks divide these, each with the queries that read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Residuals, namespace
from nnmpi.backend.attend import (
    AttentionDropout,
    Heads,
    KeyBlock,
    Trio,
    attend_more,
    attend_more_grad,
)
from nnmpi.backend.kernels import cast, to_float32
from nnmpi.backend.precision import is_low
from nnmpi.backend.recording import Box, call
from nnmpi.base.errors import LayoutError, counted
from nnmpi.base.shard import part, split
from nnmpi.comm.execution import MessageRequest
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import start_exchange
from nnmpi.ops.collectives import CATEGORY

KeysAndValues = tuple[Array, Array]  # of keys and values, or of their gradients


class RingAttention:
    """Ring attention: kernels for attention over positions of several ranks.

    Args:
        group: the ranks.
        ranges: each rank's positions, in order; no two ranges of any ranks overlap.
    """

    def __init__(self, group: Group, ranges: Sequence[tuple[range, ...]]) -> None:
        self._group, self._ranges = group, ranges
        self._lengths = [sum(map(len, local)) for local in ranges]

    def attend(
        self,
        inputs: Trio,
        y: Heads,
        causal: bool,
        keep: bool,
        drop: AttentionDropout | None = None,
    ) -> Residuals:
        """See `backend.attend.attend`, for this rank's positions."""
        q = inputs[0]
        top, total = (
            np.empty(q.shape[:3], "float32" if is_low(q.dtype) else q.dtype, like=y)
            for _ in range(2)
        )
        call(self._forward, (*inputs, y, (top, total), causal, drop))
        return (*inputs, y, top, total) if keep else ()

    def attend_grad(
        self,
        grad: Heads,
        residuals: Residuals,
        grads: Trio,
        causal: bool,
        drop: AttentionDropout | None = None,
    ) -> None:
        """See `backend.attend.attend_grad`, for this rank's positions."""
        call(self._backward, (grad, residuals, grads, causal, drop))

    def _forward(
        self,
        q: Heads,
        k: Heads,
        v: Heads,
        y: Heads,
        statistics: KeysAndValues,
        causal: bool,
        drop: AttentionDropout | None,
    ) -> None:
        xp, wide = namespace(q), to_float32(q)
        sums, (top, total) = xp.zeros(y.shape, wide.dtype), statistics
        top.fill(-xp.inf)
        total.fill(0)
        for source, keys, values in self._round(k, v):
            for rows, columns, which in self.visible(source, causal, drop):
                inputs = wide[:, :, rows], keys[:, :, columns], values[:, :, columns]
                so_far = sums[:, :, rows], top[:, :, rows], total[:, :, rows]
                attend_more(inputs, *so_far, which)
        y[...] = cast(sums / total[..., None], y.dtype)

    def _backward(
        self,
        grad: Heads,
        residuals: Residuals,
        grads: Trio,
        causal: bool,
        drop: AttentionDropout | None,
    ) -> None:
        q, k, v, y, top, total = residuals
        xp = namespace(q)
        q, y, grad = (to_float32(item) for item in (q, y, grad))
        share = grad / total[..., None]
        inner = (share * y).sum(axis=3)
        to_q, own_grads = xp.zeros(q.shape, q.dtype), self._zeros(k, v, self._group.rank)
        # the other ranks' gradients of the keys that arrive next
        follow: KeysAndValues | None = None
        for hop, (source, keys, values) in enumerate(self._round(k, v)):
            target = self._zeros(k, v, source) if hop else own_grads
            for rows, columns, which in self.visible(source, causal, drop):
                inputs = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
                to = to_q[:, :, rows], target[0][:, :, columns], target[1][:, :, columns]
                statistics = share[:, :, rows], inner[:, :, rows], inputs, top[:, :, rows]
                attend_more_grad(*statistics, to, which)
            if hop:
                if follow is not None:
                    _add(target, follow)
                follow = self._zeros(k, v, (source - 1) % self._group.size)
                self._wait(self._start(target, follow), target)
        if follow is not None:
            _add(own_grads, follow)
        for grad_out, total in zip(grads, (to_q, *own_grads), strict=True):
            grad_out[...] = cast(total, grad_out.dtype)

    def _round(self, k: Heads, v: Heads) -> Iterator[tuple[int, Heads, Heads]]:
        """Yield each rank's keys and values, this rank's first, and pass them on meanwhile."""
        xp, size, rank = namespace(k), self._group.size, self._group.rank
        current = xp.ascontiguousarray(k), xp.ascontiguousarray(v)
        for hop in range(size):
            source, last = (rank - hop) % size, hop == size - 1
            if not last:
                length = self._lengths[(source - 1) % size]
                arriving = tuple(
                    xp.empty((*x.shape[:2], length, x.shape[3]), x.dtype) for x in (k, v)
                )
                request = self._start(current, arriving)
            yield source, to_float32(current[0]), to_float32(current[1])
            if not last:
                self._wait(request, current)
                current = arriving

    def _start(self, out: Sequence[Array], room: Sequence[Array]) -> MessageRequest:
        """Start to send arrays to the next rank, and to receive the last rank's."""
        size, rank = self._group.size, self._group.rank
        sends = [((rank + 1) % size, item) for item in out if item.size]
        return start_exchange(
            self._group, sends, [((rank - 1) % size, item) for item in room if item.size]
        )

    def _wait(self, request: MessageRequest, out: Sequence[Array]) -> None:
        with self._group.collective("ring", None, CATEGORY, sum(item.nbytes for item in out)):
            request.wait()

    def _zeros(self, k: Heads, v: Heads, source: int) -> KeysAndValues:
        """Return zeros for a rank's gradients of keys and values, in the dtype of their sums."""
        xp, length = namespace(k), self._lengths[source]

        def room(x: Heads) -> Array:
            return xp.zeros(
                (*x.shape[:2], length, x.shape[3]), "float32" if is_low(x.dtype) else x.dtype
            )

        return room(k), room(v)

    def visible(
        self, source: int, causal: bool, drop: AttentionDropout | None
    ) -> Iterator[tuple[slice, slice, KeyBlock]]:
        """Yield slices of this rank's queries, and of a rank's keys to which they may attend."""
        for queries, rows in _slices(self._ranges[self._group.rank]):
            for keys, columns in _slices(self._ranges[source]):
                if not causal or keys.start <= queries.start:
                    yield (
                        rows,
                        columns,
                        KeyBlock(queries, keys, sum(self._lengths), causal, drop),
                    )


def _slices(ranges: Sequence[range]) -> Iterator[tuple[range, slice]]:
    """Yield each nonempty range, and the slice of its positions among the rank's."""
    start = 0
    for item in ranges:
        if item:
            yield item, slice(start, start + len(item))
        start += len(item)


def _add(pair: KeysAndValues, other: KeysAndValues) -> None:
    for to, item in zip(pair, other, strict=True):
        to += item


def check_heads(heads: int, size: int, tp: int = 1) -> None:
    """Refuse fewer heads than ranks.

    Args:
        heads: of a rank; with tensor parallelism, of the rank with the fewest.
        size: the ranks that share sequences.
        tp: the ranks that share layers.

    Raises:
        LayoutError: naming a layout that works.
    """
    if heads < size:
        text = counted(heads, "head") + (f" on a rank of tp {tp}" if tp > 1 else "")
        raise LayoutError(
            f"sp {size} with sp attention ulysses shards heads, but there is less than one per"
            f" rank: {text}; {f'sp up to {heads}' if heads > 1 else 'sp 1'} fits, or sp attention"
            " ring, which shards none"
        )


class UlyssesAttention:
    """Ulysses: kernels for attention over positions of several ranks.

    Args:
        group: the ranks.
        ranges: each rank's positions: one range.
        kernels: for full sequences.
    """

    def __init__(self, group: Group, ranges: Sequence[tuple[range, ...]], kernels: Any) -> None:
        self._group, self._kernels = group, kernels
        self._positions = [local for (local,) in ranges]
        self._length = self._positions[-1].stop

    def attend(
        self,
        inputs: Trio,
        y: Heads,
        causal: bool,
        keep: bool,
        drop: AttentionDropout | None = None,
    ) -> Residuals:
        """See `backend.attend.attend`, for this rank's positions."""
        check_heads(inputs[1].shape[1], self._group.size)
        saved = Box()
        options = causal, keep, self._local_drop(drop, y, inputs[1])
        call(self._forward, (inputs, y, options, saved))
        return (saved,)

    def attend_grad(
        self,
        grad: Heads,
        residuals: Residuals,
        grads: Trio,
        causal: bool,
        drop: AttentionDropout | None = None,
    ) -> None:
        """See `backend.attend.attend_grad`, for this rank's positions."""
        options = causal, self._local_drop(drop, grad, grads[1])
        call(self._backward, (grad, residuals[0], grads, options))

    def _local_drop(
        self, drop: AttentionDropout | None, y: Heads, k: Heads
    ) -> AttentionDropout | None:
        """Return this rank's heads of the dropout; None without dropout."""
        first = part(k.shape[1], self._group.size, self._group.rank).start
        first *= y.shape[1] // k.shape[1]
        return None if drop is None else drop.from_head(first, self._length)

    def _forward(self, inputs: Trio, y: Heads, options: tuple[Any, ...], residuals: Box) -> None:
        xp, shared = namespace(y), inputs[1].shape[1]
        group = y.shape[1] // shared
        grouped = [_by_keys(item, shared) for item in inputs]
        full = self._to_heads(xp.concatenate(grouped, axis=3))
        q, k, v = _split_like(full, grouped)
        result = xp.empty((len(full), full.shape[1] * group, full.shape[2], y.shape[3]), y.dtype)
        trio = _by_heads(q, group), k, v
        residuals.content = self._kernels.attend(trio, result, *options)
        local = self._to_positions(_by_keys(result, k.shape[1]), shared)
        y[...] = _by_heads(local, group)

    def _backward(self, grad: Heads, residuals: Box, grads: Trio, options: tuple[Any, ...]) -> None:
        xp, shared = namespace(grad), grads[1].shape[1]
        group = grad.shape[1] // shared
        grouped = [_by_keys(item, shared) for item in grads]
        full = self._to_heads(_by_keys(grad, shared))
        gradients = xp.empty((*full.shape[:3], sum(item.shape[3] for item in grouped)), grad.dtype)
        to_q, to_k, to_v = _split_like(gradients, grouped)
        by_heads = _by_heads(to_q, group)  # a view of one head, or other memory
        kept, residuals.content = residuals.content, None
        trio = by_heads, to_k, to_v
        self._kernels.attend_grad(_by_heads(full, group), kept, trio, *options)
        if group > 1:
            to_q[...] = _by_keys(by_heads, to_q.shape[1])
        local = self._to_positions(gradients, shared)
        for target, entry, heads in zip(
            grads, _split_like(local, grouped), (group, 1, 1), strict=True
        ):
            target[...] = _by_heads(entry, heads)

    def _to_heads(self, x: Heads) -> Heads:
        return self._exchange(x, split(x.shape[1], self._group.size), self._positions)

    def _to_positions(self, full: Heads, count: int) -> Heads:
        heads = split(count, self._group.size)
        return self._exchange(full.swapaxes(1, 2), self._positions, heads).swapaxes(1, 2)

    def _exchange(self, x: Array, out: Sequence[range], into: Sequence[range]) -> Array:
        """Exchange a part of axis 1, complete along axis 2, for a part of axis 2, complete along
        axis 1.
        """
        local = len(out[self._group.rank])
        shapes = [(x.shape[0], local, len(item), x.shape[3]) for item in into]
        parts = [x[:, item.start : item.stop] for item in out]
        return namespace(x).concatenate(
            self._group.all_to_all_v(parts, shapes, category=CATEGORY, check=False), axis=2
        )


def _by_keys(x: Heads, heads: int) -> Array:
    """Return heads of queries as (batch, heads of keys, time, group * features)."""
    batch, count, time, width = x.shape
    if count == heads:
        return x
    rows = namespace(x).reshape(x.swapaxes(1, 2), (batch, time, heads, count // heads * width))
    return rows.swapaxes(1, 2)


def _by_heads(x: Array, group: int) -> Heads:
    """Return heads of queries, of which each head of keys has a group, as `_by_keys` takes them."""
    if group == 1:
        return x
    batch, heads, time, width = x.shape
    rows = namespace(x).reshape(x.swapaxes(1, 2), (batch, time, heads * group, width // group))
    return rows.swapaxes(1, 2)


def _split_like(concatenated: Array, like: Sequence[Array]) -> Trio:
    """Return views of the three arrays that are concatenated in one along the last axis."""
    first, second = like[0].shape[3], like[0].shape[3] + like[1].shape[3]
    return concatenated[..., :first], concatenated[..., first:second], concatenated[..., second:]
