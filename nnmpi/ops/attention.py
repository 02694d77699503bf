"""Multi-head scaled dot-product attention (Vaswani et al., 2017).

    P = softmax(Q K^T / sqrt(features))       Y = P V          all per sequence and head

All work is on views of the heads, (batch, heads, time, features) with any strides. The matrix
products read the packed projection in place, and write result and gradients in place; no head is
copied. See `attend` for NaN under a causal mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.attend import AttentionDropout, Heads, attend_next
from nnmpi.backend.gemm import gemm
from nnmpi.backend.kernels import cast, kernels_of, to_float32
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.backend.random import place_of
from nnmpi.backend.recording import call
from nnmpi.backend.rotary import Rotary, Rotation
from nnmpi.base.errors import ShapeError, UsageError, check_int
from nnmpi.base.words import answered
from nnmpi.ops.activation import softmax_rows
from nnmpi.ops.dropout import MaskKey
from nnmpi.tensor.dtypes import product_dtype
from nnmpi.tensor.function import Function, Grads, converted
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.placement import (
    Placement,
    Shard,
    first_shard,
    is_sharded,
    placement_if_uncut,
    same_placement,
)
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import WRITTEN, Channels, NotExported, Sample, Traits

__all__ = ["attention", "grouped_attention", "scaled_dot_product_attention"]


def over_ranks(function: Function, shard: Shard, kernels: Any) -> Any:
    """Return the attention over positions of several ranks, with its exchange.

    Raises:
        LayoutError: when the ranks' group has no attention over positions.
    """
    result = shard.group.attention(kernels, shard.placement)
    if result is None:
        raise shard.error(function, "looks at all positions")
    return result


class Attention(Function):
    """softmax(q k^T / sqrt(features)) v for (batch, heads, time, features).

    Args:
        causal: whether each query sees only the keys up to its own position.
        kernels: from `kernels_of` the inputs.
    """

    __slots__ = ("causal", "kernels")

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.LAST,
        # also with a causal mask, whose half is zeros
        products=lambda f, y, q, k, v: prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3]),
        samples=(
            Sample(
                "scaled_dot_product_attention",
                lambda q, k, v: scaled_dot_product_attention(q, k, v),
                ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 2)),
            ),
        ),
    )

    computes = "kernels"

    def __init__(self, causal: bool, kernels: Any) -> None:
        self.causal, self.kernels = causal, kernels

    def placed(self, *inputs: Any) -> Placement:
        """Return the result's placement: that of q, k and v, if each head is on one rank."""
        first = same_placement(self, inputs, "needs queries, keys and values of the same heads")
        if first.shard.axis == 2:
            self.kernels = over_ranks(self, first.shard, self.kernels)
            return first.shard.placement
        return placement_if_uncut(self, first, (3,), "needs whole heads")

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        xp = self.xp
        y = xp.empty((*q.shape[:3], v.shape[3]), q.dtype)
        # without heads if there are more ranks than heads
        residuals = (
            self.kernels.attend((q, k, v), y, self.causal, True in self.needs)
            if q.shape[1]
            else None
        )
        self.saved = (residuals, [item.shape for item in (q, k, v)])
        return y

    def backward(self, grad: Array) -> Grads:
        residuals, shapes = self.saved
        grads = tuple(self.xp.empty(shape, grad.dtype) for shape in shapes)
        if residuals is not None:
            self.kernels.attend_grad(grad, residuals, grads, self.causal)
        return grads


class KeyValues:
    """The key-value cache of sequences that are generated token by token.

        | k0 k1 k2 | k3 |  room  |

    The capacity doubles when it is used up, so the copies cost O(1) per token on average.

    Attributes:
        count: the number of tokens.
        room: the keys and the values, (batch, heads, capacity, features); 0 from `count` on.
    """

    LEAST = 256  # the first capacity: whenever it is used up, a device captures a new graph

    def __init__(self) -> None:
        self.count = 0
        self.room: list[Array] = []

    def extend(self, k: Heads, v: Heads) -> tuple[Heads, Heads]:
        """Append the keys and values of new tokens, and return all.

        Args:
            k, v: (batch, heads, new tokens, features).

        Raises:
            UsageError: for several tokens after the first pass.
        """
        if self.count and k.shape[2] != 1:
            raise UsageError(
                f"{k.shape[2]} tokens follow {self.count} others; after the first pass, give one"
                " at a time"
            )
        self.make_room(k, v)
        start, self.count = self.count, self.count + k.shape[2]
        for room, new in zip(self.room, (k, v), strict=True):
            room[:, :, start : self.count] = new
        return self.room[0][:, :, : self.count], self.room[1][:, :, : self.count]

    def make_room(self, k: Heads, v: Heads) -> None:
        """Provide room for the keys and values of new tokens."""
        count = self.count + k.shape[2]
        if not self.has_room(k.shape[2]):
            old, length = self.room, max(2 * count, self.LEAST)
            self.room = [
                np.zeros((*item.shape[:2], length, item.shape[3]), item.dtype, like=k)
                for item in (k, v)
            ]
            for room, before in zip(self.room, old, strict=False):
                room[:, :, : self.count] = before[:, :, : self.count]

    def has_room(self, tokens: int = 1) -> bool:
        """Whether so many tokens can be appended without a copy."""
        return bool(self.room) and self.count + tokens <= self.room[0].shape[2]

    def append(self) -> tuple[int]:
        """Count one more token; return its number."""
        self.count += 1
        return (self.count - 1,)


class CachedAttention(Function):
    """Attention of which one token at a time may follow others.

    Attributes:
        before: the cache of earlier tokens, to which these are appended; or None.
        causal, kernels: as for `Attention`.
        rotary: turns queries and keys by their positions; None if they need it not.
    """

    __slots__ = ("before", "causal", "kernels", "rotary")

    computes = "kernels"

    before: KeyValues | None
    causal: bool
    kernels: Any
    rotary: Rotary | None

    def attend_cached(self, q: Heads, k: Heads, v: Heads, y: Heads) -> None:
        """Write the attention to the cached tokens and these."""
        assert self.before is not None
        if q.shape[2] > 1 or isinstance(q, np.ndarray):
            # recorded as one call, since the number of tokens grows with each replay
            call(self._continue, (self.before, q, k, v, y))
        else:
            self._attend_next(self.before, q, k, v, y)

    def _continue(self, before: KeyValues, q: Heads, k: Heads, v: Heads, y: Heads) -> None:
        start = before.count
        if self.rotary is not None:
            rotation = self.rotary.at((range(start, start + q.shape[2]),), q)
            q, k = _turned(rotation, q), _turned(rotation, k)
        keys, values = before.extend(k, v)
        if start and isinstance(q, np.ndarray):
            attend_next(q, keys, values, y)  # a single token sees all: no mask
        else:
            self.kernels.attend((q, keys, values), y, self.causal and not start, False)

    def _attend_next(self, before: KeyValues, q: Heads, k: Heads, v: Heads, y: Heads) -> None:
        """Attend to the cached tokens and one more, in a graph of a device.

        The calls and sizes are the same for every token: keys that are still to come are masked.
        """
        if not call(before.has_room, when="if"):
            call(before.make_room, (k, v), when="once")
        # in a tuple or an array of the library, so that the calls are the same for each token
        number = call(before.append, when="before")
        xp, kernels = namespace(y), self.kernels
        places = xp.arange(before.room[0].shape[2], dtype=np.uint32)
        (number,) = number if isinstance(number, tuple) else (number,)
        if self.rotary is not None:
            rotation = self.rotary.at((range(len(places)),), q)
            row = [np.take(table, number, axis=0)[None] for table in (rotation.cos, rotation.sin)]
            q, k = _turned(Rotation(*row), q), _turned(Rotation(*row), k)
        for cached, new in zip(before.room, (k, v), strict=True):
            np.copyto(cached, new, where=(places == number)[:, None])
        k, v = before.room
        # the queries of a group are rows that read the same keys
        batch, heads, _, features = q.shape
        rows = xp.reshape(q, (batch, k.shape[1], heads // k.shape[1], features))
        scores = xp.empty((*rows.shape[:3], len(places)), FLOAT32 if is_low(q.dtype) else q.dtype)
        gemm(rows, k.swapaxes(2, 3), out=scores)
        scores *= 1 / sqrt(features)
        scores = np.where(places <= number, scores, xp.full((), -np.inf, scores.dtype))
        p = kernels.cast(kernels.along(softmax_rows, 3, scores), q.dtype)
        gemm(p, v, out=xp.reshape(y, (*rows.shape[:3], v.shape[3])))


class PackedAttention(CachedAttention):
    """Attention of packed (batch, time, 3 features): queries, keys, values side by side.

    Args:
        heads: the number of heads.
        causal, kernels, before: as for `CachedAttention`.
        rate: the probability of setting a probability to 0; the others are scaled up to preserve
            the mean.
        mask_key: returns the key and the first row, called in every forward pass; None without
            dropout. The mask is a function of the key, the sequence's index in the global batch,
            and the head, query and key of attention: every layout drops the same ones.
    """

    __slots__ = ("first", "heads", "length", "mask_key", "rate")

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.LAST,
        products=lambda f, y, x: y.size * x.shape[1] * 2,
        samples=(
            Sample("attention", lambda qkv: attention(qkv, 2, causal=True), ((2, 4, 12),)),
            Sample("attention to all", lambda qkv: attention(qkv, 1, causal=False), ((2, 4, 6),)),
        ),
    )

    def __init__(
        self,
        heads: int,
        causal: bool,
        kernels: Any,
        before: KeyValues | None,
        rate: float,
        mask_key: Callable[[], MaskKey] | None,
    ) -> None:
        self.heads, self.causal, self.kernels, self.before = heads, causal, kernels, before
        self.rate, self.mask_key, self.rotary = rate, mask_key, None
        # this rank's first head; the full length of sequences sharded over ranks
        self.first, self.length = 0, 0

    def placed(self, *inputs: Any) -> Placement:
        """Return the result's placement: by positions, or by heads if q, k and v are.

        q0 q1 q2 k0 k1 k2 v0 v1 v2     of 3 heads, over 2 ranks:
        q0 q1 k0 k1 v0 v1              rank 0
        q2 k2 v2                       rank 1
        """
        (qkv,) = inputs
        shard, (batch, time, width) = qkv.shard, qkv.shape
        if self.mask_key is not None:
            placement_if_uncut(self, qkv, (0,), "needs whole sequences")
        if shard.axis == 1 and self.before is not None:
            raise shard.error(self, "continues whole sequences")
        if shard.axis == 1:
            self.kernels, self.length = over_ranks(self, shard, self.kernels), time
        if shard.axis < 2:
            return shard.placement
        apart = (batch, time, 3, self.heads, width // (3 * self.heads))
        by_heads: Placement | None = shard.placement.reshaped(qkv.shape, apart, shard.group.size)
        if by_heads is None or by_heads.axis != 3:
            raise shard.error(self, "needs queries, keys and values of whole heads on each rank")
        self.first = by_heads.region((self.heads,), 0, shard.group.size, shard.group.rank).start
        self.heads = shard.local_length(by_heads)
        return replace(by_heads, unit=width // (3 * by_heads.units), axis=2)

    def forward(self, qkv: Array) -> Array:
        batch, time, width = qkv.shape
        y = self.xp.empty((batch, time, width // 3), qkv.dtype)
        if not self.heads:  # more ranks than heads
            self.saved = (None, ())
            return y
        q, k, v = self._split(qkv, 3)
        (heads,) = self._split(y, 1)
        if self.before is not None:
            self.attend_cached(q, k, v, heads)
            return y
        drop: tuple[AttentionDropout, ...] = ()
        if self.mask_key is not None:
            key = call(self._mask_place, (time,), when="before")
            drop = (AttentionDropout(self.rate, key, 0),)
        self.saved = (
            self.kernels.attend((q, k, v), heads, self.causal, True in self.needs, *drop),
            drop,
        )
        return y

    def _mask_place(self, time: int) -> Any:
        """Return the key of this pass's mask, from this rank's first head and row on."""
        assert self.mask_key is not None
        drop = AttentionDropout(self.rate, *self.mask_key())
        drop = drop.from_head(self.first, self.length or time)
        return place_of(drop.key, drop.first_row)

    def backward(self, grad: Array) -> Grads:
        (residuals, drop), (batch, time, features) = self.saved, grad.shape
        to_qkv = self.xp.empty((batch, time, 3 * features), grad.dtype)
        if residuals is None:
            return (to_qkv,)
        (heads,), (to_q, to_k, to_v) = self._split(grad, 1), self._split(to_qkv, 3)
        self.kernels.attend_grad(heads, residuals, (to_q, to_k, to_v), self.causal, *drop)
        return (to_qkv,)

    def _split(self, packed: Array, parts: int) -> tuple[Heads, ...]:
        """Return the heads of each part of (batch, time, parts * heads * features)."""
        batch, time, width = packed.shape
        shape = (batch, time, parts, self.heads, width // (parts * self.heads))
        # (parts, batch, heads, time, features)
        heads = namespace(packed).reshape(packed, shape).transpose(2, 0, 3, 1, 4)
        return tuple(heads[i] for i in range(parts))


class GroupedAttention(CachedAttention):
    """Attention of queries, keys and values (batch, time, heads * features) of several lengths.

    Args:
        features: of each head.
        causal, kernels, before, rotary: as for `CachedAttention`.
    """

    __slots__ = ("features", "positions")

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.LAST,
        products=lambda f, y, q, k, v: (
            q.shape[0] * q.shape[1] * k.shape[1] * (q.shape[2] + y.shape[2])
        ),
        samples=(
            Sample(
                "grouped_attention",
                lambda q, k, v: grouped_attention(q, k, v, 4, causal=True),
                ((2, 5, 16), (2, 5, 8), (2, 5, 8)),
            ),
            Sample(
                "grouped_attention rotary",
                lambda q, k, v: grouped_attention(q, k, v, 6, True, Rotary((1.0, 0.1))),
                ((2, 5, 24), (2, 5, 8), (2, 5, 8)),
            ),
        ),
    )

    def __init__(
        self,
        features: int,
        causal: bool,
        kernels: Any,
        before: KeyValues | None,
        rotary: Rotary | None,
    ) -> None:
        self.features, self.causal, self.kernels = features, causal, kernels
        self.before, self.rotary = before, rotary
        self.positions: tuple[range, ...] | None = None  # this rank's of shared sequences

    def placed(self, *inputs: Any) -> Placement:
        """Return the result's placement: by positions, or by heads of keys with their queries.

        q0 q1 q2 q3    k0 k1    v0 v1     of 4 and 2 heads, over 2 ranks:
        q0 q1          k0       v0        rank 0
              q2 q3       k1       v1     rank 1
        """
        first = first_shard(inputs)
        shard = first.shard
        if shard.axis == 1 and self.before is not None:
            raise shard.error(self, "continues whole sequences")
        if shard.axis < 2:
            same_placement(self, inputs, "needs the same positions of queries, keys and values")
            if shard.axis == 1:
                self.kernels = over_ranks(self, shard, self.kernels)
                self.positions = shard.placement.ranges(shard.group.size, shard.group.rank)
            return shard.placement
        if not self._are_groups(inputs):
            raise shard.error(self, "needs the keys, values and queries of whole groups on a rank")
        return shard.placement

    def _are_groups(self, inputs: Sequence[Any]) -> bool:
        """Whether each rank has whole heads of keys, and the queries and values that are theirs."""
        if not all(is_sharded(item) and item.shard.axis == 2 for item in inputs):
            return False
        q, k, v = inputs
        group, size = q.shape[2] // k.shape[2], k.shard.group.size
        for rank in range(size):
            ours, keys, values = (item.shard.placement.ranges(size, rank) for item in inputs)
            ((start, stop),) = [(item.start, item.stop) for item in keys]
            whole = range(start * group, stop * group)
            if start % self.features or ours != (whole,) or values != keys:
                return False
        return q.shard.placement.repeats == k.shard.placement.repeats == 1

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        y = self.xp.empty((*q.shape[:2], q.shape[2] * v.shape[2] // max(k.shape[2], 1)), q.dtype)
        if not k.shape[2]:  # more ranks than heads of keys
            self.saved = (None, ())
            return y
        queries, keys, values, heads = self._split(q, k, v, y)
        if self.before is not None:
            self.attend_cached(queries, keys, values, heads)
            return y
        if self.rotary is not None:
            rotation = self._rotation(self.rotary, q)
            queries, keys = _turned(rotation, queries), _turned(rotation, keys)
        trio, needs = (queries, keys, values), True in self.needs
        residuals = self.kernels.attend(trio, heads, self.causal, needs)
        self.saved = (residuals, [item.shape for item in (q, k, v)])
        return y

    def backward(self, grad: Array) -> Grads:
        residuals, shapes = self.saved
        if residuals is None:
            return tuple(self.xp.empty((*grad.shape[:2], 0), grad.dtype) for _ in range(3))
        grads = tuple(self.xp.empty(shape, grad.dtype) for shape in shapes)
        (given,), targets = self._split(grad), self._split(*grads)
        self.kernels.attend_grad(given, residuals, targets, self.causal)
        if self.rotary is not None:
            rotation = self._rotation(self.rotary, grad)
            for target in targets[:2]:
                np.copyto(target, _turned(rotation, target, back=True))
        return grads

    def _rotation(self, rotary: Rotary, like: Array) -> Rotation:
        """Return the rotation at the positions of these (batch, time, features)."""
        return rotary.at(self.positions or (range(like.shape[1]),), like)

    def _split(self, *packed: Array) -> tuple[Heads, ...]:
        """Return the heads of each (batch, time, heads * features)."""
        xp, width = namespace(packed[0]), self.features
        return tuple(
            xp.reshape(item, (*item.shape[:2], item.shape[2] // width, width)).swapaxes(1, 2)
            for item in packed
        )


def _turned(rotation: Rotation, x: Heads, back: bool = False) -> Heads:
    """Return heads turned; half precision, on a device, is computed in float32."""
    return cast(rotation.of(to_float32(x), back), x.dtype)


class DroppedAttention(PackedAttention):
    """Packed attention with dropout."""

    __slots__ = ()

    traits = Traits(
        onnx=NotExported(),
        channels=Channels.LAST,
        samples=(
            Sample(
                "attention dropped",
                lambda qkv: attention(qkv, 2, True, None, 0.3, lambda: ((5, 7), 3)),
                ((2, 4, 12),),
            ),
        ),
    )

    is_call = True  # each pass needs a new mask

    @property
    def captured(self) -> bool:  # type: ignore[override]
        """Whether no other rank has a part in it; its key lies in the device's memory then."""
        return not self.length


def attention(
    qkv: Tensor,
    heads: int,
    causal: bool = False,
    before: KeyValues | None = None,
    dropout: float = 0.0,
    mask_key: Callable[[], MaskKey] | None = None,
) -> Tensor:
    """Return multi-head attention of a packed projection, the heads side by side.

    Args:
        qkv: (batch, time, 3 * features): queries, keys, values; each consists of its heads in
            order.
        heads: the number of heads; `features` is a multiple of it.
        causal: whether each position sees only itself and those before it. A NaN in a later value
            may still reach earlier results; one in a later query or key does not.
        before: a cache of earlier tokens' keys and values, to which these are appended; excludes a
            backward pass.
        dropout: the probability of dropping a probability; the others are divided by 1 - dropout.
        mask_key: returns the key of the mask and the first row, as for `ops.dropout`; needed for a
            dropout above 0.

    Returns:
        (batch, time, features), in the dtype of qkv; in mixed precision in the low one.

    Raises:
        ShapeError: when qkv does not have three axes, or the last is no multiple of 3 * heads.
        UsageError: for no heads; for a dropout outside [0, 1), without a mask_key, or with
            `before`.
        DtypeError: when qkv is not floating point.
    """
    check_int("attention's heads", heads)
    packed = converted(require_floating("attention", qkv), product_dtype("attention", qkv))
    if qkv.ndim != 3 or qkv.shape[2] % (3 * heads) or not qkv.shape[2]:
        raise ShapeError(
            f"attention with {heads} heads needs (batch, time, 3 * features) with features a"
            f" multiple of {heads}, not {qkv.shape}"
        )
    if not 0 <= dropout < 1 or (dropout and (mask_key is None or before is not None)):
        raise UsageError(
            "attention's dropout must be a probability in [0, 1), with a mask_key and without a"
            f" cache, not {dropout}"
        )
    kind = DroppedAttention if dropout else PackedAttention
    function = kind(
        heads, causal, kernels_of(packed._data), before, dropout, mask_key if dropout else None
    )
    return function(packed)


def grouped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    causal: bool = True,
    rotary: Rotary | None = None,
    before: KeyValues | None = None,
) -> Tensor:
    """Return attention in which several heads of queries share one of keys and values.

    Ainslie et al., "GQA", 2023. The heads are side by side; head i of the queries reads head
    i // (heads / key heads) of the keys and values, which are not copied for each of them.

    Args:
        q: (batch, time, heads * features).
        k, v: (batch, time, key heads * features), for a number of heads that divides `heads`.
        heads: of the queries.
        causal: as for `attention`.
        rotary: turns queries and keys by their positions, see `nn.RotaryAttention`; or None.
        before: a cache of earlier tokens' keys and values, to which these are appended; excludes a
            backward pass.

    Returns:
        (batch, time, heads * features), in the dtype of q; in mixed precision in the low one.

    Raises:
        ShapeError: when the shapes do not fit together.
        UsageError: for no heads, and for a rotary of another number of features.
        DtypeError: when the inputs are not floating point, or differ in dtype.
    """
    check_int("grouped_attention's heads", heads)
    reads = product_dtype("grouped_attention", require_floating("grouped_attention", q), k, v)
    features = q.shape[-1] // heads if q.ndim == 3 else 0
    if (
        not features
        or not q.ndim == k.ndim == v.ndim
        or k.shape != v.shape
        or k.shape[:2] != q.shape[:2]
        or q.shape[2] % heads
        or not k.shape[2]
        or k.shape[2] % features
        or heads % (k.shape[2] // features)
    ):
        raise ShapeError(
            f"grouped_attention with {heads} heads needs queries (batch, time, {heads} * features),"
            " and keys and values (batch, time, key heads * features) with key heads that divide"
            f" {heads}, not {q.shape}, {k.shape} and {v.shape}"
        )
    if rotary is not None and 2 * len(rotary.frequencies) != features:
        raise UsageError(
            f"a rotary of {len(rotary.frequencies)} pairs turns heads of"
            f" {2 * len(rotary.frequencies)} features, not of {features}"
        )
    q, k, v = (converted(item, reads) for item in (q, k, v))
    function = GroupedAttention(features, causal, kernels_of(q._data), before, rotary)
    return function(q, k, v)


@answered
def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
) -> Tensor:
    """Return softmax(q k^T / sqrt(features)) v, for each sequence and head.

    Vaswani et al., "Attention is all you need", 2017.

    Args:
        q: (batch, heads, queries, features).
        k: (batch, heads, keys, features).
        v: (batch, heads, keys, values).
        causal: whether each query sees only the keys up to its own position; there must then be as
            many keys as queries. A NaN in a later value may still reach earlier results; one in a
            later query or key does not.

    Returns:
        (batch, heads, queries, values), in the dtype of q; in mixed precision in the low one.

    Raises:
        ShapeError: when the shapes do not fit together, or there are no keys or features.
        DtypeError: when the inputs are not floating point, or differ in dtype.
    """
    reads = product_dtype("attention", require_floating("attention", q), k, v)
    shapes = f"queries {q.shape}, keys {k.shape} and values {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ShapeError(
            "attention needs (batch, heads, time, features) of the same batch and heads, not"
            f" {shapes}"
        )
    if (
        q.shape[3] != k.shape[3]
        or k.shape[2] != v.shape[2]
        or 0 in (k.shape[2], q.shape[3], q.shape[1])
    ):
        raise ShapeError(
            "attention needs keys, as many values, and queries with the keys' features, not"
            f" {shapes}"
        )
    if causal and q.shape[2] != k.shape[2]:
        raise ShapeError(f"causal attention needs as many queries as keys, not {shapes}")
    q, k, v = (converted(item, reads) for item in (q, k, v))
    return Attention(causal, kernels_of(q._data))(q, k, v)
