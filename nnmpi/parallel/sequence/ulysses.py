"""Attention by an exchange of positions for heads (Jacobs et al., "DeepSpeed Ulysses", 2023).

    positions      0 1 2 3 | 4 5 6 7                     0 1 2 3 4 5 6 7
    head a         rank 0  | rank 1      all-to-all      rank 0             every rank attends, as on one rank,
    head b         rank 0  | rank 1      ----------->    rank 0             with some of the heads
    head c         rank 0  | rank 1      <-----------    rank 1

Forward, q, k and v go there and the result comes back; backward, its gradient goes there and those of q, k and v come
back. Elements that rank r sends in a layer, of S ranks of which r has t_r of T positions and the heads of f_r of F
features, for B samples:

    forward     B (3 t_r (F - f_r) + f_r (T - t_r))          over all ranks 4 B (T F - sum of t_r f_r)
    backward    B (t_r (F - f_r) + 3 f_r (T - t_r))          the same

Where all have as much, each sends 4 B T F (S - 1) / S^2 forward, and as much backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnmpi.backend.array import Array, Residuals, namespace
from nnmpi.backend.recording import perform
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import send_and_receive
from nnmpi.errors import LayoutError, counted
from nnmpi.ops.attend import AttentionDropout, Heads, Trio
from nnmpi.parallel.sharded.collectives import CATEGORY
from nnmpi.shard import part, split
from nnmpi.timeline import RECEIVE, span


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
            f"sp {size} with sp attention ulysses shares out heads, and there is nothing for each rank of {there}; "
            f"{f'sp up to {heads}' if heads > 1 else 'sp 1'} fits, or sp attention ring, which shares out none"
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
        self._positions = [own for (own,) in ranges]
        self._length = self._positions[-1].stop

    def attend(
        self, xp: Any, inputs: Trio, y: Heads, causal: bool, keep: bool, drop: AttentionDropout | None = None
    ) -> Residuals:
        """See `ops.attend.attend`, for this rank's positions."""
        check_heads(y.shape[1], self._group.size)
        kept: list[Residuals] = []  # filled anew whenever a compiled step comes here
        perform(self._forward, inputs, y, (causal, keep, *self._own(drop, y)), kept)
        return (kept,)

    def attend_grad(
        self, xp: Any, grad: Heads, kept: Residuals, places: Trio, causal: bool, drop: AttentionDropout | None = None
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

    def _backward(self, grad: Heads, kept: list[Residuals], places: Trio, how: tuple[Any, ...]) -> None:
        xp = namespace(grad)
        whole = self._to_heads(grad)
        gradients = xp.empty((*whole.shape[:3], sum(each.shape[3] for each in places)), grad.dtype)
        self._kernels.attend_grad(xp, whole, kept.pop(), _apart(gradients, places), *how)
        own = self._to_positions(gradients, grad.shape[1])
        for place, each in zip(places, _apart(own, places), strict=True):
            place[...] = each

    def _to_heads(self, x: Heads) -> Heads:
        """Return all positions of this rank's heads, given all heads of its positions."""
        heads = split(x.shape[1], self._group.size)
        whole: Heads = namespace(x).empty((x.shape[0], len(heads[self._group.rank]), self._length, x.shape[3]), x.dtype)
        parts = [x[:, each.start : each.stop] for each in heads]
        self._exchange(parts, [whole[:, :, own.start : own.stop] for own in self._positions])
        return whole

    def _to_positions(self, whole: Heads, count: int) -> Heads:
        """Return all heads of this rank's positions, given all positions of its heads."""
        own, heads = self._positions[self._group.rank], split(count, self._group.size)
        x: Heads = namespace(whole).empty((whole.shape[0], count, len(own), whole.shape[3]), whole.dtype)
        parts = [whole[:, :, each.start : each.stop] for each in self._positions]
        self._exchange(parts, [x[:, each.start : each.stop] for each in heads])
        return x

    def _exchange(self, parts: Sequence[Array], places: Sequence[Array]) -> None:
        """Send each rank its part, and write what comes from each to its place."""
        rank, xp = self._group.rank, namespace(parts[0])
        sends = [(r, xp.ascontiguousarray(part)) for r, part in enumerate(parts) if r != rank and part.size]
        room = {r: xp.empty(place.shape, place.dtype) for r, place in enumerate(places) if r != rank and place.size}
        with span("all-to-all", CATEGORY, RECEIVE, {"bytes": sum(part.nbytes for _, part in sends)}):
            send_and_receive(self._group, sends, list(room.items()))
        places[rank][...] = parts[rank]
        for r, came in room.items():
            places[r][...] = came


def _apart(together: Array, like: Trio) -> Trio:
    """Return views of the arrays that stand side by side in one, each as long in its last axis as another one."""
    first, second = like[0].shape[3], like[0].shape[3] + like[1].shape[3]
    return together[..., :first], together[..., first:second], together[..., second:]
