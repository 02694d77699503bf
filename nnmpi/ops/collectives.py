"""Differentiable collectives: the backward of each is the transposed linear map.

Four are public, for any program: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`. Their
inputs and results are local (L): each rank has its own. The parallel strategies use the others, in
adjoint pairs.

Over all ranks together an exchange is a linear map, and its backward is the transposed map. A
replicated activation (R) counts as one vector, of which every rank has a copy, and so does its
gradient. A sharded activation (S) is one vector in shards:

                              forward                     backward
    copy                      x      ->  x x x            sum of the ranks' gradients     R -> L
    sum_over_ranks            x y z  ->  x+y+z            the same gradient               L -> R
    scatter                   abc    ->  a b c            abc on every rank               R -> S
    gather                    a b c  ->  abc              a b c                           S -> R
    gather_summing_grads      a b c  ->  abc abc abc      sums of a, of b, of c           S -> L
    take_part                 abc    ->  a b c            a.. .b. ..c                     L -> S

`gather_summing_grads` is `copy` after `gather`, in one message. The public `all_gather` is the same
map; its adjoint is `reduce_scatter`. `all_reduce` is `copy` after `sum_over_ranks`. So for the
public collectives the loss is the sum of the ranks' losses.

Every rank records the same operations in the same order, so the collectives of backward passes
match as those of forward passes do. On a group of one rank all of them are the identity. For arrays
on a device see `comm.buffers`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.recording import call, refuse
from nnmpi.base.errors import CommError, ShapeError, name_ranks
from nnmpi.base.shard import Region, split
from nnmpi.comm.agreement import refuse_different
from nnmpi.comm.group import Group
from nnmpi.tensor.function import Function, Grads, grad_enabled
from nnmpi.tensor.placement import LengthsPlacement, Placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import OF_RANKS, Traits
from nnmpi.tensor.turns import Turns, in_turn, turns_of

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

CATEGORY = "tensor"  # of these collectives' events in a timeline


def all_sum(group: Group, array: Array, out: Array | None = None) -> Array:
    """Return the sum of the ranks' arrays, of one shape, in `out` if given."""
    if out is None:
        out = namespace(array).empty(array.shape, array.dtype)
    out[...] = array
    return sum_in_place(group, out)


def sum_in_place(group: Group, array: Array) -> Array:
    """Replace an array by the sum of the ranks' arrays, all of one shape, and return it."""
    full = array if array.flags.c_contiguous else namespace(array).ascontiguousarray(array)
    with group.collective("all-reduce", None, CATEGORY, full.nbytes):
        group.all_reduce(full.reshape(-1), check=False)
    if full is not array:
        array[...] = full
    return array


class _Regions:
    """The ranks' regions of an activation, given the full shape or this rank's."""

    def __init__(
        self, group: Group, placement: Placement, shape: tuple[int, ...], is_full: bool
    ) -> None:
        self.group = group
        axis = placement.axis % len(shape)
        if not is_full:
            width, local = placement.width(group.size, group.rank), shape[axis]
            placement.check_known(group.size)
            repeats = local // width if placement.repeats is None else placement.repeats
            shape = (*shape[:axis], placement.once * repeats, *shape[axis + 1 :])
        elif placement.repeats is not None and shape[axis] != placement.once * placement.repeats:
            raise ShapeError(
                f"an activation of shape {shape} came, but the model was sharded for"
                f" {placement.once * placement.repeats} in dimension {axis}; shard it for the"
                " sample's shape"
            )
        self.shape = shape
        self.parts: list[Region] = [
            placement.region(shape, axis, group.size, rank) for rank in range(group.size)
        ]
        self.local = self.parts[group.rank]

    @property
    def counts(self) -> list[int]:
        """The number of elements of each rank's shard."""
        return [int(np.prod(region.local_shape)) for region in self.parts]

    def gather(self, part: Array) -> Array:
        """Return the full array, given this rank's shard."""
        if part.shape != self.local.local_shape:
            raise ShapeError(
                f"rank {self.group.rank} of {self.group.size} has {part.shape} of an activation"
                f" {self.shape}, but its part is {self.local.local_shape}; shard the layers for"
                " this size"
            )
        xp = namespace(part)
        full = xp.empty(self.shape, part.dtype)
        local = xp.ascontiguousarray(part).reshape(-1)
        if not getattr(local.flags, "writeable", True):  # broadcast; MPI needs a writable buffer
            local = local.copy()
        with self.group.collective("all-gather", None, CATEGORY, full.nbytes):
            parts = self.group.all_gather_v(local, self.counts, check=False)
        for region, values in zip(self.parts, parts, strict=True):
            region.put(full, values)
        return full

    def take(self, full: Array) -> Array:
        """Return this rank's shard, contiguous."""
        return namespace(full).ascontiguousarray(self.local.take(full))

    def put(self, part: Array) -> Array:
        """Return a full array of zeros except for this rank's shard."""
        full = namespace(part).zeros(self.shape, part.dtype)
        self.local.put(full, namespace(part).ascontiguousarray(part))
        return full

    def reduce_scatter(self, full: Array) -> Array:
        """Return this rank's shard of the sum over the ranks."""
        flat = namespace(full).concatenate([region.take(full).reshape(-1) for region in self.parts])
        with self.group.collective("reduce-scatter", None, CATEGORY, flat.nbytes):
            local = self.group.reduce_scatter_v(flat, self.counts, check=False)
        return local.reshape(self.local.local_shape)


class RankSum(Function):
    """The sum over the ranks: of the inputs, of the gradients, or of both.

    Args:
        group: the ranks.
        forward_sums: whether to sum the inputs; in place, unless `backward_sums` too.
        backward_sums: whether to sum the gradients.
    """

    __slots__ = ("backward_sums", "forward_sums", "group")

    traits = Traits(onnx=OF_RANKS, tested_in="tests/ops/test_collectives.py")

    is_call = True

    def __init__(self, group: Group, forward_sums: bool, backward_sums: bool) -> None:
        self.group, self.forward_sums, self.backward_sums = group, forward_sums, backward_sums

    def placed(self, *inputs: Any) -> Placement:
        """Return the placement over another group, unchanged."""
        return inputs[0].shard.placement

    def forward(self, x: Array) -> Array:
        if not self.forward_sums:
            return x
        return all_sum(self.group, x) if self.backward_sums else sum_in_place(self.group, x)

    def backward(self, grad: Array) -> Grads:
        return (all_sum(self.group, grad, self.into(0)) if self.backward_sums else grad,)


# The methods of `_Regions` for an activation and for its gradient.
ADJOINTS = {
    "scatter": ("take", "gather"),
    "gather": ("gather", "take"),
    "gather_summing_grads": ("gather", "reduce_scatter"),
    "reduce_scatter": ("reduce_scatter", "gather"),
    "take_part": ("take", "put"),
}


class Redistribute(Function):
    """See `redistribute`."""

    __slots__ = ("group", "placement", "way")

    traits = Traits(onnx=OF_RANKS, tested_in="tests/ops/test_collectives.py")

    is_call = True

    def __init__(self, way: str, group: Group, placement: Placement) -> None:
        self.way, self.group, self.placement = way, group, placement

    def placed(self, *inputs: Any) -> Placement:
        """Return the placement over another group, unchanged; refuse one of the same axis."""
        return placement_if_uncut(
            self, inputs[0], (self.placement.axis,), "exchanges parts of that axis"
        )

    def forward(self, x: Array) -> Array:
        method, _ = ADJOINTS[self.way]
        regions = _Regions(self.group, self.placement, x.shape, is_full=method != "gather")
        self.saved = (regions,)
        return getattr(regions, method)(x)

    def backward(self, grad: Array) -> Grads:
        return (getattr(self.saved[0], ADJOINTS[self.way][1])(grad),)


def copy(x: Tensor, group: Group) -> Tensor:
    """Return a replicated x for work that differs by rank: backward sums its gradients."""
    return x if group.size == 1 else RankSum(group, False, True)(x)


def sum_over_ranks(x: Tensor, group: Group, bias: Tensor | None = None) -> Tensor:
    """Return the sum over the ranks of x, all of one shape, plus a bias; replicated.

    Args:
        x: (..., features), this rank's summand, just computed. The sum overwrites its array, so
            nothing else may use it.
        group: the ranks.
        bias: (features,), replicated; added once.
    """
    full = x if group.size == 1 else RankSum(group, True, False)(x)
    return full if bias is None else full + bias


def redistribute(
    way: str, x: Any, group: Group, placement: Placement, turns: Turns | None = None
) -> Tensor:
    """Shard, gather or reduce an activation, by a row of `ADJOINTS`.

    Args:
        way: the name of the row.
        x: a tensor or array.
        group: the ranks.
        placement: of the shards. If it is replicated, each rank's shard is the full activation.
        turns: of the group, if the ranks may use the result differently (see `tensor.turns`).

    Raises:
        ShapeError: when the shape of x does not fit the placement.
    """
    x = x if isinstance(x, Tensor) else Tensor(x)
    if group.size == 1 or (placement.is_replicated and way != "gather_summing_grads"):
        return x
    if placement.is_replicated:
        return copy(x, group)
    return in_turn(turns, Redistribute(way, group, placement), x)


scatter, gather = partial(redistribute, "scatter"), partial(redistribute, "gather")


# ---- by their public names ----


class AllToAll(Function):
    """An all-to-all of rows.

    Args:
        group: the ranks.
        sends: the number of rows for each rank.
        receives: the number of rows from each rank.
        axis: of the rows.
    """

    __slots__ = ("axis", "group", "receives", "sends")

    traits = Traits(onnx=OF_RANKS, tested_in="tests/ops/test_collectives.py")

    is_call = True

    def __init__(
        self, group: Group, sends: Sequence[int], receives: Sequence[int], axis: int = 0
    ) -> None:
        self.group, self.sends, self.receives, self.axis = group, sends, receives, axis

    def forward(self, x: Array) -> Array:
        return self._exchange(x, self.sends, self.receives)

    def backward(self, grad: Array) -> Grads:
        return (self._exchange(grad, self.receives, self.sends),)

    def _exchange(self, x: Array, sends: Sequence[int], receives: Sequence[int]) -> Array:
        before, after = x.shape[: self.axis], x.shape[self.axis + 1 :]
        parts = namespace(x).split(x, np.cumsum(sends[:-1]).tolist(), self.axis)
        shapes = [(*before, count, *after) for count in receives]
        received = self.group.all_to_all_v(parts, shapes, category=CATEGORY, check=False)
        return namespace(x).concatenate(received, axis=self.axis)


class _LengthExchange:
    """A rank's call of a collective, and what it tells the others of it.

    Args:
        name: of the collective.
        x: this rank's tensor.
        group: the ranks.
        axis: of the lengths; None for a collective without one.

    Attributes:
        own: this rank's length along the axis, then those of the parts that it gives to each rank.
        known: the ranks' lengths at a recording, which its replays compare.
    """

    varies = ("known",)  # see `program.compare`: other ranks' may differ, where a replay says so

    def __init__(self, name: str, x: Tensor, group: Group, axis: int | None) -> None:
        self._name, self._group, self._shape, self._fault = name, group, x.shape, ""
        self._needs_grad = x.requires_grad if grad_enabled() else None
        self._what, self._others = [name, str(x.dtype)], list(x.shape)
        self.own, self.known = [0], list[list[int]]()
        if axis is not None:
            try:
                at = range(x.ndim)[axis]
                self._what[0], self.own = f"{name} along axis {at}", [self._others.pop(at)]
            except (IndexError, TypeError):
                self._misses(axis, None)

    def cut(self, axis: int | None, lengths: Sequence[int] | None) -> None:
        """Add the lengths of the parts that this rank gives to each rank; None for equal ones."""
        try:
            parts = split(self.own[0], self._group.size)
            self.own += map(len, parts) if lengths is None else map(index, lengths)
        except TypeError:
            self._misses(axis, lengths)

    def _misses(self, axis: int | None, lengths: Sequence[int] | None) -> None:
        """Note what is wrong with this rank's call, so that all ranks raise it."""
        self._fault = self._fault or (
            f"{self._name}: rank {self._group.rank} has {self._shape}, with no axis {axis!r}, or"
            f" lengths {lengths!r}; give one of its axes, and whole numbers"
        )

    def __call__(self) -> tuple[list[list[int]], bool]:
        """Return each rank's lengths, and whether one needs a gradient. Collective.

        Raises:
            CommError, ShapeError: see `_agreed`.
        """
        mine = [self._fault, [*self._what, *self._others], self.own, self.known, self._needs_grad]
        faults, calls, lengths, recorded, needs = zip(*self._group.gather(mine), strict=True)
        for rank_fault in filter(None, faults):
            raise ShapeError(rank_fault)
        problems = (
            "the ranks are in different operations",
            "the ranks' tensors differ beyond that axis",
        )
        remedy = "make the same call on all ranks"
        refuse_different([*calls], lambda number: problems[number > 0], remedy)
        if True in needs and None in needs:
            without, given = (
                name_ranks([rank for rank, need in enumerate(needs) if need is kind])
                for kind in (None, True)
            )
            raise CommError(
                f"{self._name} is under nnmpi.no_grad() on {without}, but {given} needs a gradient"
                f" from it; {remedy}"
            )
        now = [*lengths]
        for before in recorded:
            if before not in ([], now):
                raise CommError(
                    f"{self._name} inside a compiled step was recorded for lengths {before}, but"
                    f" the ranks have {now}; give each call the same, or do not compile this step"
                )
        self.known = now
        return now, True in needs


def _agreed(
    name: str,
    x: Any,
    group: Group,
    axis: int | None,
    lengths: Sequence[int] | None = None,
    cut: bool = False,
) -> tuple[Tensor, list[list[int]], Turns]:
    """Check that the ranks call the same collective; exchange their lengths along the axis.

    Returns the tensor; per rank its length along the axis, or the lengths of its parts if `cut`;
    and the group's turns. The tensor needs a gradient if any rank's does. Collective. A replay
    repeats the check, since a rank with new shapes records while the others replay.

    Raises:
        CommError: on all ranks, when operations, axes, dtypes or the lengths of other axes differ;
            when a replay has other lengths than its recording; when some ranks compute without
            gradients and another needs one.
        ShapeError: on all ranks, when a rank lacks the axis, or the lengths do not add up to the
            tensor's.
        UsageError: for lengths in a recorded step.
    """
    x = x if isinstance(x, Tensor) else Tensor(x)
    if lengths is not None:
        refuse(f"{name}'s list of lengths")
    exchange = _LengthExchange(name, x, group, axis)
    if cut:
        exchange.cut(axis, lengths)
    by_rank, is_needed = call(exchange)
    if is_needed and not x.requires_grad:  # its result needs one, for the other ranks' inputs
        x = Tensor(x._data, requires_grad=True)
    if not cut:
        return x, by_rank, turns_of(group)
    for rank, (full, *parts) in enumerate(by_rank):
        if len(parts) != group.size or sum(parts) != full or min(parts) < 0:
            raise ShapeError(
                f"lengths {parts} do not split rank {rank}'s {full} over {group.size} ranks; give"
                f" {group.size} lengths that add up to {full}"
            )
    return x, [parts for _, *parts in by_rank], turns_of(group)


def all_reduce(x: Any, group: Group) -> Tensor:
    """Return the ranks' sum on every rank; backward sums gradients, too. Collective.

    >>> import nnmpi
    >>> def program(group):
    ...     x = nnmpi.Tensor([1.0 + group.rank], requires_grad=True)
    ...     y = nnmpi.ops.all_reduce(x, group)
    ...     (y * y).sum().backward()
    ...     return y.item(), x.grad.item()
    >>> nnmpi.simulate(program, 3)
    [(6.0, 36.0), (6.0, 36.0), (6.0, 36.0)]

    Args:
        x: any shape, the same on all ranks.
        group: the ranks.

    Raises:
        CommError: on all ranks, when shapes or dtypes differ.
    """
    x, _, turns = _agreed("all_reduce", x, group, None)
    return x if group.size == 1 else in_turn(turns, RankSum(group, True, True), x)


def all_gather(x: Any, group: Group, axis: int = 0) -> Tensor:
    """Return the ranks' tensors joined, on every rank; backward reduce-scatters. Collective.

    Args:
        x: of any length along the axis; other lengths and the dtype are the same on all ranks.
        group: the ranks.
        axis: to join along.

    Raises:
        CommError, ShapeError: on all ranks, when tensors do not fit together.
    """
    x, lengths, turns = _agreed("all_gather", x, group, axis)
    placement = LengthsPlacement.of([n for (n,) in lengths], axis % x.ndim)
    return redistribute("gather_summing_grads", x, group, placement, turns)


def reduce_scatter(
    x: Any, group: Group, lengths: Sequence[int] | None = None, axis: int = 0
) -> Tensor:
    """Return this rank's shard of the ranks' sum; backward all-gathers. Collective.

    Args:
        x: any shape, the same on all ranks.
        group: the ranks.
        lengths: of each rank's shard, the same on all ranks; by default those of `shard.split`.
        axis: to shard along.

    Raises:
        CommError, ShapeError: on all ranks, when tensors or lengths do not fit together.
    """
    x, by_rank, turns = _agreed("reduce_scatter", x, group, axis, lengths, True)
    refuse_different(by_rank, "the ranks' lengths differ", "give all ranks the same")
    placement = LengthsPlacement.of(by_rank[0], axis % x.ndim)
    return redistribute("reduce_scatter", x, group, placement, turns)


def all_to_all(x: Any, group: Group, lengths: Sequence[int] | None = None, axis: int = 0) -> Tensor:
    """Return the parts that the ranks sent to this one; backward returns them. Collective.

    >>> import nnmpi, numpy as np
    >>> def program(group):
    ...     mine = 10 * group.rank + np.arange(3.0)
    ...     return nnmpi.ops.all_to_all(mine, group, [0, 1, 2]).data.tolist()
    >>> nnmpi.simulate(program, 3)
    [[], [0.0, 10.0, 20.0], [1.0, 2.0, 11.0, 12.0, 21.0, 22.0]]

    Args:
        x: of any length along the axis; other lengths and the dtype are the same on all ranks.
        group: the ranks.
        lengths: of the parts of x for each rank, in order; by default those of `shard.split`.
        axis: to split x along, and to join the received parts along, in rank order.

    Raises:
        CommError, ShapeError: on all ranks, when tensors or lengths do not fit together.
    """
    x, by_rank, turns = _agreed("all_to_all", x, group, axis, lengths, True)
    if group.size == 1:
        return x
    receives = [item[group.rank] for item in by_rank]
    return in_turn(turns, AllToAll(group, by_rank[group.rank], receives, axis % x.ndim), x)


@dataclass(frozen=True)
class TensorParallelGroup:
    """The `TensorGroup` of tensor parallelism; sequence parallelism subclasses it."""

    group: Group
    depth = 1  # the outer one: positions are sharded first
    taking, giving = "scatter", "gather"  # rows of `ADJOINTS`

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank

    def copy(self, x: Tensor) -> Tensor:
        """Return x; backward sums its gradients."""
        return copy(x, self.group)

    def gather(self, x: Tensor, placement: Placement) -> Tensor:
        """Return the full tensor."""
        return redistribute(self.giving, x, self.group, placement)

    def scatter(self, x: Any, placement: Placement) -> Tensor:
        """Return this rank's shard."""
        return redistribute(self.taking, x, self.group, placement)

    def attention(self, kernels: Any, placement: Placement) -> Any:
        """Return None: the ranks of tensor parallelism do not shard positions."""
