"""Collectives as operations of the graph: each one's backward is the transposed map.

    all_reduce  all_gather  reduce_scatter  all_to_all      for any program: each rank's own -> each rank's own
    the others                                              what strategies take, in adjoint pairs

Seen from all ranks together an exchange is a linear map, and its backward the transposed one. A
replicated ("whole") activation counts as one vector that every rank has a copy of, and its gradient
is replicated, too:

    forward                       backward                      of

    x          -> x x x           sum of the ranks' gradients   copy             whole -> each rank's own
    x y z      -> x+y+z           the same gradient             sum_over_ranks           each rank's own -> whole
    abc        -> a b c           abc on every rank             scatter          whole -> parts
    a b c      -> abc             a b c                         gather           parts -> whole
    a b c      -> abc abc abc     sums of a, of b, of c         gather_summing_grads   parts -> each rank's own
    abc        -> a b c           a.. .b. ..c                   take_part        each rank's own -> parts

`gather_summing_grads` is `copy` after `gather`, in one message; it is `all_gather`, its adjoint
`reduce_scatter`, and `all_reduce` is `copy` after `sum_over_ranks`: the loss behind the public ones
is the sum of the ranks' losses.

Every rank records the same operations in the same order, so the collectives of a backward pass
match as those of the forward pass do. On a group of one rank all of them are the identity. Arrays
on a device travel as `comm.buffers` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.recording import perform, refuse
from nnmpi.comm.agreement import refuse_different
from nnmpi.comm.group import Group
from nnmpi.errors import CommError, ShapeError
from nnmpi.shard import Region, split
from nnmpi.tensor.function import Function
from nnmpi.tensor.placement import LengthsPlacement, Placement, uncut
from nnmpi.tensor.tensor import Tensor

CATEGORY = "tensor"  # of this package's events in a timeline


def all_sum(group: Group, array: Array, out: Array | None = None) -> Array:
    """Return the sum of the ranks' arrays, of one shape, in `out` if given."""
    if out is None:
        out = namespace(array).empty(array.shape, dtype=array.dtype)
    out[...] = array
    return sum_in_place(group, out)


def sum_in_place(group: Group, array: Array) -> Array:
    """Replace an array by the sum of the ranks' arrays, all of one shape, and return it."""
    full = array if array.flags.c_contiguous else namespace(array).ascontiguousarray(array)
    with group.meeting("all-reduce", None, CATEGORY, {"bytes": full.nbytes}):
        group.all_reduce(full.reshape(-1), check=False)
    if full is not array:
        array[...] = full
    return array


class _Regions:
    """Where the ranks' parts lie in an activation, given one of its forms."""

    def __init__(
        self, group: Group, placement: Placement, shape: tuple[int, ...], is_whole: bool
    ) -> None:
        self.group = group
        axis = placement.axis % len(shape)
        if not is_whole:
            width, local = placement.width(group.size, group.rank), shape[axis]
            placement.check_known(group.size)
            repeats = local // width if placement.repeats is None else placement.repeats
            shape = (*shape[:axis], placement.once * repeats, *shape[axis + 1 :])
        elif placement.repeats is not None and shape[axis] != placement.once * placement.repeats:
            raise ShapeError(
                f"an activation of shape {shape} came where the model was sharded for one with"
                f" {placement.once * placement.repeats} in dimension {axis}; shard the model for"
                " the samples that it gets"
            )
        self.whole = shape
        self.parts: list[Region] = [
            placement.region(shape, axis, group.size, rank) for rank in range(group.size)
        ]
        self.own = self.parts[group.rank]

    @property
    def counts(self) -> list[int]:
        """How many elements each rank's part has."""
        return [int(np.prod(region.local_shape)) for region in self.parts]

    def gather(self, part: Array) -> Array:
        """Return the whole array, given this rank's part of it."""
        if part.shape != self.own.local_shape:
            raise ShapeError(
                f"rank {self.group.rank} of {self.group.size} has {part.shape} of an activation"
                f" {self.whole}, of which {self.own.local_shape} is its part; the layers were"
                " sharded for other sizes"
            )
        xp = namespace(part)
        full: Array = xp.empty(self.whole, dtype=part.dtype)
        local = xp.ascontiguousarray(part).reshape(-1)
        if not getattr(local.flags, "writeable", True):  # a gradient that was broadcast
            local = local.copy()
        with self.group.meeting("all-gather", None, CATEGORY, {"bytes": full.nbytes}):
            parts = self.group.all_gather_v(local, self.counts)
        for region, values in zip(self.parts, parts, strict=True):
            region.put(full, values)
        return full

    def take(self, whole: Array) -> Array:
        """Return this rank's part, contiguous."""
        return namespace(whole).ascontiguousarray(self.own.take(whole))

    def put(self, part: Array) -> Array:
        """Return a whole array of zeros but for this rank's part."""
        full: Array = namespace(part).zeros(self.whole, part.dtype)
        self.own.put(full, namespace(part).ascontiguousarray(part))
        return full

    def reduce_scatter(self, whole: Array) -> Array:
        """Return this rank's part of the sum over the ranks."""
        flat = namespace(whole).concatenate(
            [region.take(whole).reshape(-1) for region in self.parts]
        )
        with self.group.meeting("reduce-scatter", None, CATEGORY, {"bytes": flat.nbytes}):
            local = self.group.reduce_scatter_v(flat, self.counts)
        return local.reshape(self.own.local_shape)


class RankSum(Function):
    """The sum over the ranks, of what comes, of what comes back, or of both.

    Args:
        group: the ranks.
        forward_sums: whether what comes is summed: in its own array, unless its gradients are, too.
        backward_sums: whether its gradients are.
    """

    __slots__ = ("backward_sums", "forward_sums", "group")

    def __init__(self, group: Group, forward_sums: bool, backward_sums: bool) -> None:
        self.group, self.forward_sums, self.backward_sums = group, forward_sums, backward_sums

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on ranks of another group: as before."""
        return uncut(self, inputs[0], (), "")

    def forward(self, x: Array) -> Array:
        if not self.forward_sums:
            return x
        return all_sum(self.group, x) if self.backward_sums else sum_in_place(self.group, x)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (all_sum(self.group, grad, self.into(0)) if self.backward_sums else grad,)


# What becomes of an activation, and of its gradient: methods of `_Regions`.
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

    def __init__(self, way: str, group: Group, placement: Placement) -> None:
        self.way, self.group, self.placement = way, group, placement

    def placed(self, *inputs: Any) -> Placement:
        """Return the result's placement on another group, unchanged if that shares another axis."""
        return uncut(self, inputs[0], (self.placement.axis,), "exchanges parts of that axis")

    def forward(self, x: Array) -> Array:
        there, _ = ADJOINTS[self.way]
        regions = _Regions(self.group, self.placement, x.shape, is_whole=there != "gather")
        self.saved = (regions,)
        return getattr(regions, there)(x)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (getattr(self.saved[0], ADJOINTS[self.way][1])(grad),)


def copy(x: Tensor, group: Group) -> Tensor:
    """Return a replicated x for work that differs by rank: backward sums its gradients."""
    return x if group.size == 1 else RankSum(group, False, True)(x)


def sum_over_ranks(x: Tensor, group: Group, bias: Tensor | None = None) -> Tensor:
    """Return the sum over the ranks of x, all of one shape, plus a bias; replicated.

    Args:
        x: (..., features), this rank's summand, just computed: the sum overwrites its array, which
            nothing else uses.
        group: the ranks.
        bias: (features,), replicated; added once.
    """
    full = x if group.size == 1 else RankSum(group, True, False)(x)
    return full if bias is None else full + bias


def redistribute(way: str, x: Any, group: Group, placement: Placement) -> Tensor:
    """Return parts of a whole activation or a whole of parts: what a row of `ADJOINTS` says.

    Args:
        way: the name of the row.
        x: a tensor or array.
        group: the ranks.
        placement: of the parts; of a replicated activation everything is a part.

    Raises:
        ShapeError: when x is not the part that the placement says.
    """
    x = x if isinstance(x, Tensor) else Tensor(x)
    if group.size == 1 or (placement.is_replicated and way != "gather_summing_grads"):
        return x
    return copy(x, group) if placement.is_replicated else Redistribute(way, group, placement)(x)


scatter, gather = partial(redistribute, "scatter"), partial(redistribute, "gather")
gather_summing_grads = partial(redistribute, "gather_summing_grads")


# ---- by their public names ----


class AllToAll(Function):
    """Rows to each rank, and rows of each.

    Args:
        group: the ranks.
        sends: how many rows go to each.
        receives: how many come from each.
        axis: of the rows.
    """

    __slots__ = ("axis", "group", "receives", "sends")

    def __init__(
        self, group: Group, sends: Sequence[int], receives: Sequence[int], axis: int = 0
    ) -> None:
        self.group, self.sends, self.receives, self.axis = group, sends, receives, axis

    def forward(self, x: Array) -> Array:
        return self._exchange(x, self.sends, self.receives)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self._exchange(grad, self.receives, self.sends),)

    def _exchange(self, x: Array, sends: Sequence[int], receives: Sequence[int]) -> Array:
        before, after = x.shape[: self.axis], x.shape[self.axis + 1 :]
        parts = namespace(x).split(x, np.cumsum(sends[:-1]).tolist(), self.axis)
        shapes = [(*before, count, *after) for count in receives]
        came = self.group.all_to_all_v(parts, shapes, category=CATEGORY)
        return namespace(x).concatenate(came, axis=self.axis)


def _agreed(
    name: str,
    x: Any,
    group: Group,
    axis: int | None,
    lengths: Sequence[int] | None = None,
    cut: bool = False,
) -> tuple[Tensor, list[list[int]]]:
    """Return a tensor, and of each rank its length along the axis or, where it is cut, those of its
    parts. Collective.

    A recorded step agrees again each time: a rank whose shapes are new records anew while the
    others replay.

    Raises:
        CommError: on all ranks, when operations, axes, dtypes or other lengths differ, or a replay
            has other lengths.
        ShapeError: on all ranks, when some have no such axis, or lengths do not make up the tensor.
        UsageError: for lengths in a recorded step.
    """
    x = x if isinstance(x, Tensor) else Tensor(x)
    if lengths is not None:
        refuse(f"{name}'s list of lengths")
    fault, what, local, rest = "", [name, str(x.dtype)], [0], list(x.shape)
    known: list[list[int]] = []  # by a recording
    try:
        if axis is not None:
            at = range(x.ndim)[axis]
            what[0], local = f"{name} along axis {at}", [rest.pop(at)]
        if cut:
            local += (
                map(len, split(local[0], group.size)) if lengths is None else map(index, lengths)
            )
    except (IndexError, TypeError):
        whose = f"rank {group.rank} has {x.shape}"
        fault = (
            f"{name}: {whose}, with no axis {axis!r}, or lengths {lengths!r}; give one of its axes,"
            " and whole numbers"
        )

    def meet() -> list[list[int]]:
        gathered = group.gather([fault, [*what, *rest], local, known])
        for rank_fault in filter(None, (item[0] for item in gathered)):
            raise ShapeError(rank_fault)
        problems = (
            "the ranks are in different operations",
            "the ranks' tensors differ beyond that axis",
        )
        refuse_different(
            [item[1] for item in gathered], lambda number: problems[number > 0], "give like ones"
        )
        now = [item[2] for item in gathered]
        for before in (item[3] for item in gathered):
            if before not in ([], now):
                raise CommError(
                    f"{name} inside a compiled step was recorded for lengths {before}, and the"
                    f" ranks have {now}; give each call the same, or do not compile this step"
                )
        known[:] = now
        return now

    everyones = perform(meet)
    for rank, (full, *parts) in enumerate(everyones if cut else ()):
        if len(parts) != group.size or sum(parts) != full or min(parts) < 0:
            raise ShapeError(
                f"lengths {parts} do not cut the {full} that rank {rank} has for {group.size}"
                f" ranks; give {group.size} lengths that add up to {full}"
            )
    return x, [everyone[cut:] for everyone in everyones]


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
    x, _ = _agreed("all_reduce", x, group, None)
    return x if group.size == 1 else RankSum(group, True, True)(x)


def all_gather(x: Any, group: Group, axis: int = 0) -> Tensor:
    """Return the ranks' tensors joined, on every rank; backward reduce-scatters. Collective.

    Args:
        x: of any length along the axis, and otherwise like the others' tensors.
        group: the ranks.
        axis: along which they are joined.

    Raises:
        CommError, ShapeError: on all ranks, when tensors do not fit together.
    """
    x, lengths = _agreed("all_gather", x, group, axis)
    return redistribute(
        "gather_summing_grads",
        x,
        group,
        LengthsPlacement.of([n for (n,) in lengths], axis % x.ndim),
    )


def reduce_scatter(
    x: Any, group: Group, lengths: Sequence[int] | None = None, axis: int = 0
) -> Tensor:
    """Return this rank's part of the ranks' sum; backward all-gathers. Collective.

    Args:
        x: any shape, the same on all ranks.
        group: the ranks.
        lengths: of each rank's part, the same on all ranks; by default those of `shard.split`.
        axis: that is cut.

    Raises:
        CommError, ShapeError: on all ranks, when tensors or lengths do not fit together.
    """
    x, everyones = _agreed("reduce_scatter", x, group, axis, lengths, True)
    refuse_different(everyones, "the ranks' lengths differ", "give all ranks the same")
    return redistribute(
        "reduce_scatter", x, group, LengthsPlacement.of(everyones[0], axis % x.ndim)
    )


def all_to_all(x: Any, group: Group, lengths: Sequence[int] | None = None, axis: int = 0) -> Tensor:
    """Return what each rank sent to this one, in rank order; backward sends back. Collective.

    >>> import nnmpi, numpy as np
    >>> def program(group):
    ...     mine = 10 * group.rank + np.arange(3.0)
    ...     return nnmpi.ops.all_to_all(mine, group, [0, 1, 2]).data.tolist()
    >>> nnmpi.simulate(program, 3)
    [[], [0.0, 10.0, 20.0], [1.0, 2.0, 11.0, 12.0, 21.0, 22.0]]

    Args:
        x: of any length along the axis, and otherwise like the others' tensors.
        group: the ranks.
        lengths: how much of x goes to each rank, in order; by default as much as `shard.split`
            gives it.
        axis: along which x is cut, and what comes is joined.

    Raises:
        CommError, ShapeError: on all ranks, when tensors or lengths do not fit together.
    """
    x, everyones = _agreed("all_to_all", x, group, axis, lengths, True)
    if group.size == 1:
        return x
    return AllToAll(
        group,
        everyones[group.rank],
        [everyone[group.rank] for everyone in everyones],
        axis % x.ndim,
    )(x)


@dataclass(frozen=True)
class PartExchange:
    """The exchanges of a tensor group between shards; a `TensorGroup`."""

    group: Group
    depth = 1  # sequences are sharded before layers
    taking, giving = "scatter", "gather"

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.group.size

    @property
    def rank(self) -> int:
        """The number of this one."""
        return self.group.rank

    def copy(self, x: Tensor) -> Tensor:
        """Return x; its gradients are summed."""
        return copy(x, self.group)

    def gather(self, x: Tensor, placement: Placement) -> Tensor:
        """Return all ranks' parts together."""
        return redistribute(self.giving, x, self.group, placement)

    def scatter(self, x: Any, placement: Placement) -> Tensor:
        """Return this rank's part."""
        return redistribute(self.taking, x, self.group, placement)

    def attention(self, kernels: Any, placement: Placement) -> Any:
        """Return None: ranks that share layers have whole sequences."""
