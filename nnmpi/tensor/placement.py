"""How an activation is spread over the ranks of a tensor group.

    replicated   every rank has all of it, the same bits
    features     each rank has some of the last axis       (batch, h, w, c)  ->  (batch, h, w, part of c)
    rows         each rank has some rows of the images     (batch, h, w, c)  ->  (batch, part of h, w, c)

An axis is divided in `units`, as `shard.split` does it. When images are flattened, the cut shows in
another form: channels that were divided come again for every pixel (`repeats`), and a row of the
image has become w * c features, which stay together (`unit`):

    h w = 3 pixels, 4 channels over 2 ranks        units=4 repeats=3      0 0 1 1  0 0 1 1  0 0 1 1
    h = 4 rows of w c = 3 numbers over 2 ranks     units=4 unit=3         0 0 0  0 0 0  1 1 1  1 1 1
    q, k, v of 2 heads of 3 over 2 ranks           units=2 unit=3 repeats=3     0 0 0 1 1 1  0 0 0 1 1 1  0 0 0 1 1 1

Where the order of layers is known, `parallel.tensor` plans placements ahead. In a module whose
forward is unknown the tensors say it themselves: what comes out of a layer of which each rank has a
part is a `CutTensor` (see `cut`), whose `cut` says which part of which whole it is. Each operation
says in `Function.placed` what it makes of that:

    part | part    elementwise, or along another axis  ->  part | part
                   along the cut axis, beside a whole tensor as long, a Function that says nothing  ->  refused

So a result is the serial run's, or there is none. A whole tensor beside parts (a scale, a mask) is
the same on every rank, but its gradient is then the sum of what the ranks have: it is copied to
each (`TensorGroup.copy`). Where it is as long as they are together, each rank takes what lies
beside its part (`TensorGroup.scatter`).

A part may itself be cut along another axis, over other ranks (`TensorCut.within`): features over
the ranks that share the layers, of positions over the ranks that share the sequences. Each
operation is then asked twice, first about the outer cut, which sees the inner one's parts as whole.

    (batch, 6 positions, 4 features)    positions over s, features over t      s0 t0  s0 t1        an operation sees
                                                                               s1 t0  s1 t1        (batch, 6, 4)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any, Protocol

from nnmpi.backend.array import Shape
from nnmpi.errors import LayoutError
from nnmpi.shard import Region, part, zigzag

FEATURES, ROWS = -1, 1  # the axes that can be cut


@dataclass(frozen=True)
class Placement:
    """How an activation is spread over the ranks.

    Attributes:
        units: how many units are divided among the ranks along the axis; 0 for a replicated
            activation.
        unit: how many neighbouring elements a unit has.
        repeats: how many times all units come, one after another; None when only the next layer's
            size will tell.
        axis: the axis that is cut: the last one (-1), the images' rows (1), or of a `TensorCut`
            any, from 0.
    """

    units: int = 0
    unit: int = 1
    repeats: int | None = 1
    axis: int = FEATURES

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all of it."""
        return self.units == 0

    @property
    def has_rows(self) -> bool:
        """Whether the rows of images are cut."""
        return not self.is_replicated and self.axis == ROWS

    def region(self, shape: Sequence[int], axis: int, size: int, rank: int) -> Region:
        """Return a rank's region of an array that is sharded along with the activation.

        Args:
            shape: of the whole array.
            axis: the axis of the array that corresponds to the activation's cut axis.
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
        """Return the placement with its repeats known, given the length of the whole axis.

        Raises:
            LayoutError: when the axis cannot have that length.
        """
        once = self.units * self.unit
        repeats = self.repeats if self.repeats is not None else total // max(once, 1)
        if once * repeats != total:
            raise LayoutError(
                f"an activation whose {self.units} parts of {self.unit} lie on several ranks cannot"
                f" be {total} long; give the layer before it Sharding.REPLICATED, or check the"
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
                f"{self.units} channels of flattened images lie on {size} ranks, and those that"
                " have none cannot tell the images' size; give shard() the shape of a sample, or"
                " use fewer ranks"
            )

    def width(self, size: int, rank: int) -> int:
        """Return how many elements a rank has of each repeat."""
        return sum(map(len, self.ranges(size, rank)))

    def ranges(self, size: int, rank: int) -> tuple[range, ...]:
        """Return which elements of the axis a rank has, where they do not come again."""
        local = part(self.units, size, rank)
        return (range(local.start * self.unit, local.stop * self.unit),)

    @property
    def once(self) -> int:
        """How many elements each repeat has, on all ranks."""
        return self.units * self.unit

    def is_like(self, other: Placement, size: int) -> bool:
        """Return whether both give every rank the same elements of the same axis."""
        ours, theirs = (
            (item.axis, item.once, item.repeats, [item.ranges(size, r) for r in range(size)])
            for item in (self, other)
        )
        return ours == theirs

    def reshaped(self, old: Sequence[int], new: Sequence[int], size: int) -> Placement | None:
        """Return the placement after a reshape; None if no new axis is cut between whole units.

            old axes     before | repeats  units  unit | after
            new axes       left |        own           | right      left divides before * repeats, right unit * after

        Args:
            old, new: whole shapes, of the same number of elements.
            size: the number of ranks.
        """
        first = 0
        if not prod(old):
            # of no samples it is as of one; of anything else without elements there is no telling
            if not (old[0] == new[0] == 0 < prod(old[1:]) and self.axis):
                return None
            old, new, first = (1, *old[1:]), (1, *new[1:]), 1
        outer, inner = (
            prod(old[: self.axis]) * (self.repeats or 1),
            self.unit * prod(old[self.axis + 1 :]),
        )
        fitting = []
        for axis, length in list(enumerate(new))[first:]:
            left, right = prod(new[:axis]), prod(new[axis + 1 :])
            if outer % left:
                continue
            joined = right // gcd(right, inner)  # so many units go together
            if self.units % joined or not _whole_units(self.units, joined, size):
                continue
            result = Placement(self.units // joined, joined * inner // right, outer // left, axis)
            fitting.append((length, result))
        return min(fitting, key=lambda item: item[0])[1] if fitting else None

    def sliced(self, start: int, stop: int) -> Placement | None:
        """Return the placement of elements start..stop-1; None unless they are whole repeats."""
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
        """See `Placement.reshaped`: the axis is to stay as it is, between others."""
        before = prod(old[: self.axis])
        for axis, length in enumerate(new):
            if length == old[self.axis] and prod(new[:axis]) == before and prod(old) == prod(new):
                return replace(self, axis=axis)
        return None


@dataclass(frozen=True)
class LengthsPlacement(Placement):
    """The placement of an axis of which each rank has a run of any length.

    Attributes:
        lengths: of the ranks' runs.
    """

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int], axis: int) -> LengthsPlacement:
        """Return the one of these lengths."""
        return cls(sum(lengths), axis=axis, lengths=tuple(lengths))

    def ranges(self, size: int, rank: int) -> tuple[range, ...]:
        """See `Placement.ranges`."""
        stop = sum(self.lengths[: rank + 1])
        return (range(stop - self.lengths[rank], stop),)


def _whole_units(units: int, joined: int, size: int) -> bool:
    """Return whether every rank's units stay the same ones when so many of them are joined to
    one.
    """
    return all(
        part(units, size, r).start == part(units // joined, size, r).start * joined
        for r in range(size)
    )


REPLICATED = Placement()


def features(units: int, unit: int = 1) -> Placement:
    """Return the placement of an activation whose last axis is divided in `units` units."""
    return Placement(units, unit)


def rows(height: int) -> Placement:
    """Return the placement of images whose rows are divided."""
    return Placement(height, axis=ROWS)


class TensorGroup(Protocol):
    """The ranks that share a tensor, and what they exchange of it.

    `ops.collectives` has those that share layers, `parallel.sequence` those that share sequences.

    Attributes:
        depth: which cut is the outer one of a tensor that is cut twice: that of the larger depth.
    """

    depth: int

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def rank(self) -> int:
        """The number of this one."""

    def copy(self, x: Any) -> Any:
        """Return a full tensor for work that differs by rank: backward sums its gradients."""

    def gather(self, x: Any, placement: Placement) -> Any:
        """Return all ranks' parts together."""

    def scatter(self, x: Any, placement: Placement) -> Any:
        """Return this rank's part of a whole tensor or array."""

    def attention(self, kernels: Any, placement: Placement) -> Any:
        """Return the attention over positions of several ranks (`attend`, `attend_grad`), or None.

        Args:
            kernels: those for whole sequences.
            placement: of the positions.
        """


@dataclass(frozen=True)
class TensorCut:
    """Which part of a larger tensor a rank has.

    Attributes:
        placement: how the whole is spread; its axis counts from 0, and its repeats are known.
        group: the ranks that share it.
        layer: the full name of the layer that left it so; empty for positions, which are cut before
            the first one.
        within: how the part is cut itself, along another axis over other ranks; None where it is
            not.
    """

    placement: Placement
    group: TensorGroup
    layer: str
    within: TensorCut | None = None

    @property
    def axis(self) -> int:
        """The axis that is cut, from 0."""
        return self.placement.axis

    @property
    def whole(self) -> int:
        """The length of the whole axis."""
        return self.placement.once * (self.placement.repeats or 1)

    def own(self, placement: Placement | None = None) -> int:
        """Return the length of this rank's part of the axis, in this or another placement."""
        placement = self.placement if placement is None else placement
        return placement.width(self.group.size, self.group.rank) * (placement.repeats or 1)

    def of(self, shape: Sequence[int]) -> Shape:
        """Return the shape of the whole tensor, given that of this rank's part."""
        shape = shape if self.within is None else self.within.of(shape)
        return (*shape[: self.axis], self.whole, *shape[self.axis + 1 :])

    def is_like(self, other: TensorCut) -> bool:
        """Return whether both tensors lie on the ranks in the same way."""
        return self.placement.is_like(other.placement, self.group.size)

    def refuse(self, operation: object, why: str) -> LayoutError:
        """Return the error that says which operation cannot do what with the part."""
        name = (
            operation
            if isinstance(operation, str)
            else type(operation).__name__.removesuffix("Function")
        )
        left, way = "", "leave sp at 1"
        if self.layer:
            left, way = (
                f", as layer {self.layer!r} leaves it",
                "give that layer Sharding.REPLICATED",
            )
        return LayoutError(
            f"{name} {why}, but each of {self.group.size} ranks has a part of the {self.whole}"
            f" elements of axis {self.axis}{left}; make it whole first, x = nnmpi.tensor.whole(x),"
            f" or {way}"
        )


def is_cut(x: Any) -> bool:
    """True for a rank's shard of a tensor; False for full tensors, arrays and numbers."""
    return getattr(x, "cut", None) is not None


def uncut(function: object, x: Any, axes: Iterable[int], why: str) -> Placement:
    """Return a part's placement, for an operation along other axes than the one that is cut.

    Args:
        function: the operation.
        x: the part.
        axes: along which it works; negative ones count from the end.
        why: what it does along them, if the cut axis is among them.

    Raises:
        LayoutError: when it is.
    """
    cut: TensorCut = x.cut
    if cut.axis in (axis % x.ndim for axis in axes):
        raise cut.refuse(function, why)
    return cut.placement


def alike(function: object, inputs: Sequence[Any], why: str) -> Any:
    """Return the first input, of which all must be parts that lie on the ranks in the same way.

    Raises:
        LayoutError: otherwise, saying what it needs or does.
    """
    first = next(x for x in inputs if is_cut(x))
    if not all(is_cut(x) and x.cut.is_like(first.cut) for x in inputs):
        raise first.cut.refuse(function, why)
    return first


def moved(x: Any, axis: int) -> Placement:
    """Return a part's placement, with its cut axis at another place."""
    placement: Placement = x.cut.placement
    return replace(placement, axis=axis)


def aligned(function: object, inputs: Sequence[Any], scatters: bool = False) -> Placement:
    """Return the placement of an elementwise result: its shards', which must be equal.

    What is whole beside them must have length 1 along the axis that is cut, or not have the axis.

    Args:
        function: the operation.
        inputs: its inputs.
        scatters: whether what is whole and as long as the parts together may be there, too, since
            each rank will take its part of it (see `beside`).

    Raises:
        LayoutError: otherwise.
    """
    first = next(x for x in inputs if is_cut(x))
    cut: TensorCut = first.cut
    behind = first.ndim - cut.axis  # where the axis is, counted from the end
    shapes = [tuple(getattr(x, "shape", ())) for x in inputs]
    for x, shape in zip(inputs, shapes, strict=True):
        if is_cut(x):
            placement = moved(first, x.cut.axis)
            if len(shape) - x.cut.axis != behind or not x.cut.placement.is_like(
                placement, cut.group.size
            ):
                raise cut.refuse(
                    function, f"meets a part that layer {x.cut.layer!r} left in another way"
                )
        elif len(shape) >= behind and shape[-behind] not in ((1, cut.whole) if scatters else (1,)):
            raise cut.refuse(function, "meets a whole tensor")
    return moved(first, max(map(len, shapes)) - behind)


def beside(x: Any, ndim: int, placement: Placement) -> Placement | None:
    """Return the placement of a full operand beside shards; None if all ranks need all of it.

    Args:
        x: a tensor or array.
        ndim: of the result.
        placement: of the result.
    """
    shape = getattr(x, "shape", ())
    axis = placement.axis - (ndim - len(shape))
    return replace(placement, axis=axis) if axis >= 0 and shape[axis] != 1 else None
