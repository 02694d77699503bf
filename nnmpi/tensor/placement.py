"""How an activation is sharded over the ranks of a tensor group.

    replicated  every rank has the full activation, with the same bits
    features    each rank has a shard of the last axis      (batch, h, w, c) -> (batch, h, w, c/n)
    rows        each rank has a shard of the images' rows   (batch, h, w, c) -> (batch, h/n, w, c)

An axis consists of `units`, which are divided among the ranks as `shard.split` does. Flattening an
image changes the form of its placement. Sharded channels recur for every pixel (`repeats`). A
sharded row becomes w * c neighbouring features, which stay together (`unit`). Here 0 and 1 are the
ranks of the elements:

    units=4 repeats=3         4 channels of h w = 3 pixels    0 0 1 1  0 0 1 1  0 0 1 1
    units=4 unit=3            h = 4 rows of w c = 3 numbers   0 0 0  0 0 0  1 1 1  1 1 1
    units=2 unit=3 repeats=3  q, k, v of 2 heads of 3         0 0 0 1 1 1  0 0 0 1 1 1  0 0 0 1 1 1

For a known order of layers, `parallel.tensor` plans the placements ahead. In a custom module, whose
order is unknown, the tensors carry them: a sharded layer returns a `ShardedTensor` (see
`sharded`), whose `Shard` gives its position in the full tensor. Each operation derives the
placement of its result in `Function.placed`:

    elementwise, or along another axis                              a shard of the result
    along the sharded axis, or a Function without `placed`          refused

So a result equals the serial run's or the operation is refused. A full operand beside shards (a
scale, a mask) is the same on every rank, but its gradient is the sum over the ranks: it passes
through `TensorGroup.copy`. If it has the full length of the sharded axis, each rank uses its slice
(`TensorGroup.scatter`).

A shard may be sharded again, along another axis over other ranks (`Shard.within`): positions
over the ranks s of sequence parallelism, features over the ranks t of tensor parallelism. Then
`placed` is called once per group, the outer one first; it sees the inner shards as full.

    (batch, 6 positions, 4 features)     s0 t0  s0 t1     both calls of `placed`
                                         s1 t0  s1 t1     see the shape (batch, 6, 4)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any, Protocol

from nnmpi.backend.array import Shape
from nnmpi.base.errors import LayoutError
from nnmpi.base.shard import Region, part, zigzag

FEATURES, ROWS = -1, 1  # the axes that can be sharded


@dataclass(frozen=True)
class Placement:
    """How an activation is sharded over the ranks.

    Attributes:
        units: the number of units along the axis, divided among the ranks; 0 for a replicated
            activation.
        unit: the number of neighbouring elements in a unit.
        repeats: the number of times that the sequence of units recurs; None if only the next
            layer's size determines it.
        axis: the sharded axis: the last one (-1) or the images' rows (1); in a `Shard` any axis,
            counted from 0.
    """

    units: int = 0
    unit: int = 1
    repeats: int | None = 1
    axis: int = FEATURES

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has the full activation."""
        return self.units == 0

    @property
    def has_rows(self) -> bool:
        """Whether the rows of images are sharded."""
        return not self.is_replicated and self.axis == ROWS

    def region(self, shape: Sequence[int], axis: int, size: int, rank: int) -> Region:
        """Return a rank's region of an array that is sharded along with the activation.

        Args:
            shape: of the full array.
            axis: the axis of the array that corresponds to the activation's sharded axis.
            size: the number of ranks.
            rank: one of them.

        Raises:
            LayoutError: when that axis cannot have its length.
        """
        full = tuple(shape)
        repeats = self.resolve(full[axis]).repeats or 1
        local, *second = self.ranges(size, rank)
        return Region(full, axis % len(full), local.start, local.stop, repeats, *second)

    def resolve(self, total: int) -> Placement:
        """Return the placement with its repeats known, given the full length of the axis.

        Raises:
            LayoutError: when the axis cannot have that length.
        """
        repeats = self.repeats if self.repeats is not None else total // max(self.once, 1)
        if self.once * repeats != total:
            raise LayoutError(
                f"an activation of {self.units} parts of {self.unit} on several ranks cannot have"
                f" length {total}; give the layer before it Sharding.REPLICATED, or check the"
                " layers' sizes"
            )
        return replace(self, repeats=repeats)

    def check_known(self, size: int) -> None:
        """Refuse a placement of unknown repeats if some rank has no unit to count them by.

        Raises:
            LayoutError: for such a placement.
        """
        if self.repeats is None and self.units < size:
            raise LayoutError(
                f"{self.units} channels of flattened images are on {size} ranks, and a rank"
                " without any cannot infer the images' size; give shard() the shape of a sample,"
                " or use fewer ranks"
            )

    def width(self, size: int, rank: int) -> int:
        """Return the number of a rank's elements in each repeat."""
        return sum(map(len, self.ranges(size, rank)))

    def ranges(self, size: int, rank: int) -> tuple[range, ...]:
        """Return a rank's elements of the axis, within the first repeat."""
        local = part(self.units, size, rank)
        return (range(local.start * self.unit, local.stop * self.unit),)

    @property
    def once(self) -> int:
        """The number of elements in each repeat, over all ranks."""
        return self.units * self.unit

    def is_like(self, other: Placement, size: int) -> bool:
        """Return whether both give every rank the same elements of the same axis."""
        ours, theirs = (
            (item.axis, item.once, item.repeats, [item.ranges(size, r) for r in range(size)])
            for item in (self, other)
        )
        return ours == theirs

    def reshaped(self, old: Sequence[int], new: Sequence[int], size: int) -> Placement | None:
        """Return the placement after a reshape, or None if no new axis can carry the shards.

            old axes     before | repeats  units  unit | after
            new axes       left |   the sharded axis   | right

        A new axis fits if left divides before * repeats, right divides unit * after (or units that
        every rank can join), and each rank keeps its elements. Of several, take the shortest.

        Args:
            old, new: full shapes, of the same number of elements.
            size: the number of ranks.
        """
        first = 0
        if not prod(old):
            # an empty batch has the placement of a batch of 1; other empty shapes, such as a batch
            # and an axis that become one, are ambiguous
            if not (old[0] == new[0] == 0 < prod(old[1:]) == prod(new[1:]) and self.axis):
                return None
            old, new, first = (1, *old[1:]), (1, *new[1:]), 1
        outer = prod(old[: self.axis]) * (self.repeats or 1)
        inner = self.unit * prod(old[self.axis + 1 :])
        fitting = []
        for axis, length in list(enumerate(new))[first:]:
            left, right = prod(new[:axis]), prod(new[axis + 1 :])
            if outer % left:
                continue
            # The new unit must be a multiple of `right`, the elements behind the new axis: so it
            # joins this many units.
            joined = right // gcd(right, inner)
            if self.units % joined or not _whole_units(self.units, joined, size):
                continue
            result = Placement(self.units // joined, joined * inner // right, outer // left, axis)
            fitting.append((length, result))
        return min(fitting, key=lambda item: item[0])[1] if fitting else None

    def sliced(self, start: int, stop: int) -> Placement | None:
        """Return the placement of elements start..stop-1; None unless they are complete repeats."""
        if start >= stop or start % self.once or stop % self.once:
            return None
        return replace(self, repeats=(stop - start) // self.once)


@dataclass(frozen=True)
class PairPlacement(Placement):
    """A zigzag placement: each rank has two chunks of positions, one from each end."""

    def ranges(self, size: int, rank: int) -> tuple[range, ...]:
        """See `Placement.ranges`."""
        return zigzag(self.units, size, rank)

    def reshaped(self, old: Sequence[int], new: Sequence[int], size: int) -> Placement | None:
        """See `Placement.reshaped`. The axis and the product of those before it must not change."""
        before = prod(old[: self.axis])
        for axis, length in enumerate(new):
            if length == old[self.axis] and prod(new[:axis]) == before and prod(old) == prod(new):
                return replace(self, axis=axis)
        return None


@dataclass(frozen=True)
class LengthsPlacement(Placement):
    """A placement in contiguous ranges of arbitrary lengths, one per rank.

    Attributes:
        lengths: of the ranges.
    """

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int], axis: int) -> LengthsPlacement:
        """Return the placement with these lengths."""
        return cls(sum(lengths), axis=axis, lengths=tuple(lengths))

    def ranges(self, size: int, rank: int) -> tuple[range, ...]:
        """See `Placement.ranges`."""
        stop = sum(self.lengths[: rank + 1])
        return (range(stop - self.lengths[rank], stop),)


def _whole_units(units: int, joined: int, size: int) -> bool:
    """True if every rank keeps its units when `joined` of them become one."""
    return all(
        part(units, size, r).start == part(units // joined, size, r).start * joined
        for r in range(size)
    )


REPLICATED = Placement()


def features(units: int, unit: int = 1) -> Placement:
    """Return the placement of an activation with a last axis of `units` units."""
    return Placement(units, unit)


def rows(height: int) -> Placement:
    """Return the placement of images with sharded rows."""
    return Placement(height, axis=ROWS)


class TensorGroup(Protocol):
    """The ranks that share a tensor, and their differentiable collectives.

    `ops.collectives` implements tensor parallelism, `parallel.sequence` sequence parallelism.

    Attributes:
        depth: the order in a tensor sharded twice: the group of larger depth is the outer one.
    """

    depth: int

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    def copy(self, x: Any) -> Any:
        """Return a full tensor for work that differs by rank: backward sums its gradients."""

    def gather(self, x: Any, placement: Placement) -> Any:
        """Return the full tensor, gathered from all ranks' shards."""

    def scatter(self, x: Any, placement: Placement) -> Any:
        """Return this rank's shard of a full tensor or array."""

    def attention(self, kernels: Any, placement: Placement) -> Any:
        """Return the attention over positions of several ranks (`attend`, `attend_grad`), or None.

        Args:
            kernels: the kernels for full sequences.
            placement: of the positions.
        """


@dataclass(frozen=True)
class Shard:
    """The position of a rank's shard in its full tensor.

    Attributes:
        placement: how the full tensor is sharded; its axis counts from 0, its repeats are known.
        group: the ranks that share the tensor.
        layer: the full name of the layer that made the shard; empty for positions, which are
            sharded before the first layer.
        within: if this shard is sharded again, along another axis over other ranks: that shard's
            position in this one; otherwise None.
    """

    placement: Placement
    group: TensorGroup
    layer: str
    within: Shard | None = None

    @property
    def axis(self) -> int:
        """The sharded axis, from 0."""
        return self.placement.axis

    @property
    def length(self) -> int:
        """The full length of the axis."""
        return self.placement.once * (self.placement.repeats or 1)

    def local_length(self, placement: Placement | None = None) -> int:
        """Return the length of this rank's shard of the axis, in this or another placement."""
        placement = placement or self.placement
        return placement.width(self.group.size, self.group.rank) * (placement.repeats or 1)

    def of(self, shape: Sequence[int]) -> Shape:
        """Return the shape of the full tensor, given that of this rank's shard."""
        shape = shape if self.within is None else self.within.of(shape)
        return (*shape[: self.axis], self.length, *shape[self.axis + 1 :])

    def is_like(self, other: Shard) -> bool:
        """Return whether both tensors have the same placement."""
        return self.placement.is_like(other.placement, self.group.size)

    def error(self, operation: object, why: str) -> LayoutError:
        """Return the error for an operation that does not support the shard.

        Args:
            operation: a `Function`, or a name.
            why: the rest of the clause after the name.
        """
        name = (
            operation
            if isinstance(operation, str)
            else type(operation).__name__.removesuffix("Function")
        )
        left, way = "", "leave sp at 1"
        if self.layer:
            left = f", as layer {self.layer!r} leaves it"
            way = "give that layer Sharding.REPLICATED"
        return LayoutError(
            f"{name} {why}, but each of {self.group.size} ranks has a part of the {self.length}"
            f" elements of axis {self.axis}{left}; make it whole first, x ="
            f" nnmpi.tensor.gather_shards(x), or {way}"
        )


def is_sharded(x: Any) -> bool:
    """True for a rank's shard of a tensor; False for full tensors, arrays and numbers."""
    return getattr(x, "shard", None) is not None


def first_shard(inputs: Iterable[Any]) -> Any:
    """Return the first shard among some inputs, of which at least one is a shard."""
    return next(filter(is_sharded, inputs))


def placement_if_uncut(function: object, x: Any, axes: Iterable[int], why: str) -> Placement:
    """Return a shard's placement, for an operation along other axes than the sharded one.

    Args:
        function: the operation.
        x: the shard.
        axes: the axes of the operation; negative ones count from the end.
        why: its work along them, for the error.

    Raises:
        LayoutError: when the sharded axis is among `axes`.
    """
    shard = x.shard
    if shard.axis in (axis % x.ndim for axis in axes):
        raise shard.error(function, why)
    return shard.placement


def same_placement(function: object, inputs: Sequence[Any], why: str) -> Any:
    """Return the first input; refuse inputs that are not all shards of one placement.

    Raises:
        LayoutError: with the reason `why`.
    """
    first = first_shard(inputs)
    if not all(is_sharded(x) and x.shard.is_like(first.shard) for x in inputs):
        raise first.shard.error(function, why)
    return first


def with_axis(x: Any, axis: int) -> Placement:
    """Return a shard's placement, with the sharded axis renumbered."""
    return replace(x.shard.placement, axis=axis)


def elementwise_placement(
    function: object, inputs: Sequence[Any], scatters: bool = False
) -> Placement:
    """Return the placement of an elementwise result; all sharded inputs must have one placement.

    A full input must have length 1 along the sharded axis, or not have that axis.

    Args:
        function: the operation.
        inputs: its inputs.
        scatters: whether a full input may also have the full length of the axis: each rank then
            uses its slice (see `operand_placement`).

    Raises:
        LayoutError: for other inputs.
    """
    first = first_shard(inputs)
    shard = first.shard
    behind = first.ndim - shard.axis  # the axis counted from the end, as broadcasting aligns axes
    shapes = [tuple(getattr(x, "shape", ())) for x in inputs]
    for x, shape in zip(inputs, shapes, strict=True):
        if is_sharded(x):
            placement = with_axis(first, x.shard.axis)
            if len(shape) - x.shard.axis != behind or not x.shard.placement.is_like(
                placement, shard.group.size
            ):
                raise shard.error(
                    function,
                    f"combines it with a part that layer {x.shard.layer!r} sharded differently",
                )
        elif len(shape) >= behind and shape[-behind] not in (
            (1, shard.length) if scatters else (1,)
        ):
            raise shard.error(function, "combines it with a whole tensor")
    return with_axis(first, max(map(len, shapes)) - behind)


def operand_placement(x: Any, ndim: int, placement: Placement) -> Placement | None:
    """Return the placement of a full operand beside shards; None if every rank needs it in full.

    Args:
        x: a tensor or array.
        ndim: of the result.
        placement: of the result.
    """
    shape = getattr(x, "shape", ())
    axis = placement.axis - (ndim - len(shape))
    return replace(placement, axis=axis) if axis >= 0 and shape[axis] != 1 else None
