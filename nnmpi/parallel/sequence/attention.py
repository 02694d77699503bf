"""Attention over positions of several ranks, in two ways.

**Ring**: keys and values go round (Liu et al., "Ring attention with blockwise transformers", 2023).

Each rank keeps its queries, lets them attend to the keys it has, and passes these on to the next
rank; softmax is put together key by key (`attend_more`), so no rank ever has scores of more than
two ranks' positions.

    3 ranks, positions in chunks 0..5: rank 0 has 0 and 5, rank 1 has 1 and 4, rank 2 has 2 and 3

                 keys 0 1 2 3 4 5          which chunks' queries meet which chunks' keys
        queries 0     c                            rank 0             rank 1             rank 2
                1     # c                  hop 0   0-0 5-5 5-0        1-1 4-4 4-1        2-2 3-3 3-2
                2     # # c                hop 1   5-2 5-3            1-0 4-0            2-1 3-1
                3     # # # c              hop 2   5-1 5-4            4-2 4-3            2-0 3-0
                4     # # # # c
                5     # # # # # c          c: causal, half of the pairs      #: all of them

Chunks from both ends (zigzag) give every rank the same work in every hop; with runs of positions
the last rank would have the most, and all would wait for it.

Backward, probabilities are computed again from the largest scores and the sums; keys and values go
round again, and their gradients follow them, one hop behind, until they are home. Elements that
rank r sends in a layer, of S ranks of which r has t_r of T positions, for B samples of F features:

    forward     2 B F (T - t_(r+1))                             over all ranks 2 B F T (S - 1)
    backward    2 B F (T - t_(r+1)) + 2 B F (T - t_r)           over all ranks 4 B F T (S - 1)

where all have as much, each sends 2 B T F (S - 1) / S forward and twice that backward. Gradients of
keys and values in half precision travel as float32, in which they are added up.

**Ulysses**: an exchange of positions for heads (Jacobs et al., "DeepSpeed Ulysses", 2023).

    positions  0 1 2 3 | 4 5 6 7                0 1 2 3 4 5 6 7
    head a     rank 0  | rank 1   all-to-all    rank 0           every rank attends, as on one rank,
    head b     rank 0  | rank 1   ----------->  rank 0           with some of the heads
    head c     rank 0  | rank 1   <-----------  rank 1

Forward, q, k and v go there and the result comes back; backward, its gradient goes there and those
of q, k and v come back. Elements that rank r sends in a layer, of S ranks of which r has t_r of T
positions and the heads of f_r of F features, for B samples:

    forward     B (3 t_r (F - f_r) + f_r (T - t_r))        over all ranks 4 B (T F - sum of t_r f_r)
    backward    B (t_r (F - f_r) + 3 f_r (T - t_r))        the same

Where all have as much, each sends 4 B T F (S - 1) / S^2 forward, and as much backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nnmpi.backend.array import Array, Residuals, namespace
from nnmpi.backend.precision import cast, is_low, to_float32
from nnmpi.backend.recording import perform
from nnmpi.comm.execution import MessageRequest
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import start_exchange
from nnmpi.errors import LayoutError, counted
from nnmpi.ops.attend import AttentionDropout, Heads, KeyBlock, Trio, attend_more, attend_more_grad
from nnmpi.ops.collectives import CATEGORY
from nnmpi.shard import part, split

Pair = tuple[Array, Array]  # of keys and values, or of their gradients


class RingAttention:
    """Kernels for attention over positions of several ranks.

    Args:
        group: the ranks.
        ranges: of each rank, its positions, in order: of all ranks' ranges no two overlap.
    """

    def __init__(self, group: Group, ranges: Sequence[tuple[range, ...]]) -> None:
        self._group, self._ranges = group, ranges
        self._lengths = [sum(map(len, local)) for local in ranges]

    def attend(
        self,
        xp: Any,
        inputs: Trio,
        y: Heads,
        causal: bool,
        keep: bool,
        drop: AttentionDropout | None = None,
    ) -> Residuals:
        """See `ops.attend.attend`, for this rank's positions."""
        q = inputs[0]
        top, total = (
            xp.empty(q.shape[:3], "float32" if is_low(q.dtype) else q.dtype) for _ in range(2)
        )
        perform(self._forward, *inputs, y, (top, total), causal, drop)
        return (*inputs, y, top, total) if keep else ()

    def attend_grad(
        self,
        xp: Any,
        grad: Heads,
        kept: Residuals,
        places: Trio,
        causal: bool,
        drop: AttentionDropout | None = None,
    ) -> None:
        """See `ops.attend.attend_grad`, for this rank's positions."""
        perform(self._backward, grad, kept, places, causal, drop)

    def _forward(
        self,
        q: Heads,
        k: Heads,
        v: Heads,
        y: Heads,
        found: Pair,
        causal: bool,
        drop: AttentionDropout | None,
    ) -> None:
        xp, wide = namespace(q), to_float32(namespace(q), q)
        sums, (top, total) = xp.zeros(y.shape, wide.dtype), found
        top.fill(-xp.inf)
        total.fill(0)
        for source, keys, values in self._round(k, v):
            for mine, theirs, which in self.visible(source, causal, drop):
                inputs = wide[:, :, mine], keys[:, :, theirs], values[:, :, theirs]
                so_far = sums[:, :, mine], top[:, :, mine], total[:, :, mine]
                attend_more(xp, inputs, *so_far, which)
        y[...] = cast(xp, sums / total[..., None], y.dtype)

    def _backward(
        self,
        grad: Heads,
        kept: Residuals,
        places: Trio,
        causal: bool,
        drop: AttentionDropout | None,
    ) -> None:
        q, k, v, y, top, total = kept
        xp = namespace(q)
        q, y, grad = (to_float32(xp, item) for item in (q, y, grad))
        share = grad / total[..., None]
        inner = (share * y).sum(axis=3)
        to_q, home = xp.zeros(q.shape, q.dtype), self._zeros(k, v, self._group.rank)
        # what other ranks have added to the gradients of the keys that come next
        follow: Pair | None = None
        for hop, (source, keys, values) in enumerate(self._round(k, v)):
            place = self._zeros(k, v, source) if hop else home
            for mine, theirs, which in self.visible(source, causal, drop):
                inputs = q[:, :, mine], keys[:, :, theirs], values[:, :, theirs]
                to = to_q[:, :, mine], place[0][:, :, theirs], place[1][:, :, theirs]
                local = share[:, :, mine], inner[:, :, mine], inputs, top[:, :, mine]
                attend_more_grad(xp, *local, to, which)
            if hop:
                if follow is not None:
                    _add(place, follow)
                follow = self._zeros(k, v, (source - 1) % self._group.size)
                self._wait(self._start(place, follow), place)
        if follow is not None:
            _add(home, follow)
        for to_each, total in zip(places, (to_q, *home), strict=True):
            to_each[...] = cast(xp, total, to_each.dtype)

    def _round(self, k: Heads, v: Heads) -> Iterator[tuple[int, Heads, Heads]]:
        """Yield each rank's keys and values as they come by, this rank's first; meanwhile they are
        passed on.
        """
        xp, size, rank = namespace(k), self._group.size, self._group.rank
        here = xp.ascontiguousarray(k), xp.ascontiguousarray(v)
        for hop in range(size):
            source, last = (rank - hop) % size, hop == size - 1
            if not last:
                length = self._lengths[(source - 1) % size]
                there = tuple(xp.empty((*x.shape[:2], length, x.shape[3]), x.dtype) for x in (k, v))
                request = self._start(here, there)
            yield source, to_float32(xp, here[0]), to_float32(xp, here[1])
            if not last:
                self._wait(request, here)
                here = there

    def _start(self, out: Sequence[Array], room: Sequence[Array]) -> MessageRequest:
        """Begin to pass arrays on to the next rank, and to receive the same of the rank before."""
        size, rank = self._group.size, self._group.rank
        sends = [((rank + 1) % size, item) for item in out if item.size]
        return start_exchange(
            self._group, sends, [((rank - 1) % size, item) for item in room if item.size]
        )

    def _wait(self, request: MessageRequest, out: Sequence[Array]) -> None:
        with self._group.meeting(
            "ring", None, CATEGORY, {"bytes": sum(item.nbytes for item in out)}
        ):
            request.wait()

    def _zeros(self, k: Heads, v: Heads, source: int) -> Pair:
        """Return room for the gradients of a rank's keys and values, in the dtype in which they are
        added up.
        """
        xp, length = namespace(k), self._lengths[source]

        def room(x: Heads) -> Array:
            return xp.zeros(
                (*x.shape[:2], length, x.shape[3]), "float32" if is_low(x.dtype) else x.dtype
            )

        return room(k), room(v)

    def visible(
        self, source: int, causal: bool, drop: AttentionDropout | None = None
    ) -> Iterator[tuple[slice, slice, KeyBlock]]:
        """Yield the slices of this rank's queries and another rank's keys that may attend."""
        for queries, mine in _places(self._ranges[self._group.rank]):
            for keys, theirs in _places(self._ranges[source]):
                if not causal or keys.start <= queries.start:
                    yield mine, theirs, KeyBlock(queries, keys, sum(self._lengths), causal, drop)


def _places(ranges: Sequence[range]) -> Iterator[tuple[range, slice]]:
    """Yield each range that is not empty, and where its positions lie among the rank's."""
    start = 0
    for item in ranges:
        if item:
            yield item, slice(start, start + len(item))
        start += len(item)


def _add(pair: Pair, other: Pair) -> None:
    for to, item in zip(pair, other, strict=True):
        to += item


def check_heads(heads: int, size: int, tp: int = 1) -> None:
    """Refuse fewer heads than ranks.

    Args:
        heads: of a rank, or the fewest that one of a tensor group has.
        size: how many ranks share sequences.
        tp: how many share the layers.

    Raises:
        LayoutError: naming what would fit.
    """
    if heads < size:
        there = counted(heads, "head") + (f" on a rank of tp {tp}" if tp > 1 else "")
        raise LayoutError(
            f"sp {size} with sp attention ulysses shares out heads, and there is nothing for each"
            f" rank of {there}; {f'sp up to {heads}' if heads > 1 else 'sp 1'} fits, or sp"
            " attention ring, which shares out none"
        )


class UlyssesAttention:
    """Kernels for attention over positions of several ranks.

    Args:
        group: the ranks.
        ranges: of each rank, its positions: one range.
        kernels: for whole sequences.
    """

    def __init__(self, group: Group, ranges: Sequence[tuple[range, ...]], kernels: Any) -> None:
        self._group, self._kernels = group, kernels
        self._positions = [local for (local,) in ranges]
        self._length = self._positions[-1].stop

    def attend(
        self,
        xp: Any,
        inputs: Trio,
        y: Heads,
        causal: bool,
        keep: bool,
        drop: AttentionDropout | None = None,
    ) -> Residuals:
        """See `ops.attend.attend`, for this rank's positions."""
        check_heads(y.shape[1], self._group.size)
        saved: list[Residuals] = []  # filled anew whenever a compiled step comes here
        perform(self._forward, inputs, y, (causal, keep, *self._own(drop, y)), saved)
        return (saved,)

    def attend_grad(
        self,
        xp: Any,
        grad: Heads,
        kept: Residuals,
        places: Trio,
        causal: bool,
        drop: AttentionDropout | None = None,
    ) -> None:
        """See `ops.attend.attend_grad`, for this rank's positions."""
        perform(self._backward, grad, kept[0], places, (causal, *self._own(drop, grad)))

    def _own(self, drop: AttentionDropout | None, y: Heads) -> tuple[AttentionDropout, ...]:
        """Return which probabilities of this rank's heads are dropped, if some are."""
        first = part(y.shape[1], self._group.size, self._group.rank).start
        return () if drop is None else (drop.from_head(first, self._length),)

    def _forward(self, inputs: Trio, y: Heads, how: tuple[Any, ...], kept: list[Residuals]) -> None:
        xp = namespace(y)
        together = self._to_heads(xp.concatenate(inputs, axis=3))
        result = xp.empty((*together.shape[:3], y.shape[3]), y.dtype)
        kept[:] = [self._kernels.attend(xp, _apart(together, inputs), result, *how)]
        y[...] = self._to_positions(result, y.shape[1])

    def _backward(
        self, grad: Heads, kept: list[Residuals], places: Trio, how: tuple[Any, ...]
    ) -> None:
        xp = namespace(grad)
        full = self._to_heads(grad)
        gradients = xp.empty((*full.shape[:3], sum(item.shape[3] for item in places)), grad.dtype)
        self._kernels.attend_grad(xp, full, kept.pop(), _apart(gradients, places), *how)
        local = self._to_positions(gradients, grad.shape[1])
        for place, entry in zip(places, _apart(local, places), strict=True):
            place[...] = entry

    def _to_heads(self, x: Heads) -> Heads:
        return self._exchange(x, split(x.shape[1], self._group.size), self._positions)

    def _to_positions(self, whole: Heads, count: int) -> Heads:
        heads = split(count, self._group.size)
        return self._exchange(whole.swapaxes(1, 2), self._positions, heads).swapaxes(1, 2)

    def _exchange(self, x: Array, out: Sequence[range], into: Sequence[range]) -> Array:
        """Return this rank's part of axis 1, all of which came with its part of axis 2: of that, it
        gets all.
        """
        local = len(out[self._group.rank])
        shapes = [(x.shape[0], local, len(item), x.shape[3]) for item in into]
        parts = [x[:, item.start : item.stop] for item in out]
        return namespace(x).concatenate(
            self._group.all_to_all_v(parts, shapes, category=CATEGORY), axis=2
        )


def _apart(together: Array, like: Trio) -> Trio:
    """Return views of the arrays that stand side by side in one, each as long in its last axis as
    another one.
    """
    first, second = like[0].shape[3], like[0].shape[3] + like[1].shape[3]
    return together[..., :first], together[..., first:second], together[..., second:]
