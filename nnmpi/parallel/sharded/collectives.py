"""Collectives as operations of the graph, in adjoint pairs: each one's backward is the other's forward.

Seen from all ranks together an exchange is a linear map, and its backward the transposed one. A replicated ("whole")
activation counts as one vector that every rank has a copy of, and its gradient is replicated, too:

    forward                       backward                      of

    x          -> x x x           sum of the ranks' gradients   copy             whole -> each rank's own
    x y z      -> x+y+z           the same gradient             sum_over_ranks           each rank's own -> whole
    abc        -> a b c           abc on every rank             scatter          whole -> parts
    a b c      -> abc             a b c                         gather           parts -> whole
    a b c      -> abc abc abc     sums of a, of b, of c         gather_summing_grads   parts -> each rank's own
    abc        -> a b c           a.. .b. ..c                   take_part        each rank's own -> parts

`gather_summing_grads` is `copy` after `gather`, in one message. Every rank records the same operations in the same
order, so the collectives of a backward pass match as those of the forward pass do. On a group of one rank all of them
are the identity. Arrays on a device travel as `comm.buffers` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import send_and_receive
from nnmpi.errors import ShapeError
from nnmpi.shard import Region
from nnmpi.tensor.function import Function
from nnmpi.tensor.placement import Placement, uncut
from nnmpi.tensor.tensor import Tensor
from nnmpi.timeline import RECEIVE, REDUCE, span

CATEGORY = "tensor"  # of this package's events in a timeline


def all_sum(group: Group, array: Array, out: Array | None = None) -> Array:
    """Return the sum of the ranks' arrays, all of one shape; in `out` where that is given. `array` stays as it is."""
    if out is None:
        out = namespace(array).empty(array.shape, dtype=array.dtype)
    out[...] = array
    return sum_in_place(group, out)


def sum_in_place(group: Group, array: Array) -> Array:
    """Replace an array by the sum of the ranks' arrays, all of one shape, and return it."""
    whole = array if array.flags.c_contiguous else namespace(array).ascontiguousarray(array)
    with span("all-reduce", CATEGORY, REDUCE, {"bytes": whole.nbytes}):
        group.all_reduce(whole.reshape(-1), check=False)
    if whole is not array:
        array[...] = whole
    return array


def exchange_parts(group: Group, parts: Sequence[Array], shapes: Sequence[tuple[int, ...]], name: str) -> list[Array]:
    """Send each rank its part; return what comes from each, of the shapes given. All are of one dtype.

    Args:
        group: the ranks.
        parts: what goes to each rank; this rank's own is returned as it is.
        shapes: of what comes from each.
        name: of the exchange in a timeline.
    """
    rank, xp = group.rank, namespace(parts[0])
    sends = [(r, xp.ascontiguousarray(each)) for r, each in enumerate(parts) if r != rank and each.size]
    came = [parts[r] if r == rank else xp.empty(shape, parts[0].dtype) for r, shape in enumerate(shapes)]
    with span(name, CATEGORY, RECEIVE, {"bytes": sum(each.nbytes for _, each in sends)}):
        send_and_receive(group, sends, [(r, each) for r, each in enumerate(came) if r != rank and each.size])
    return came


class _Regions:
    """Where the ranks' parts lie in an activation, given one of its forms."""

    def __init__(self, group: Group, placement: Placement, shape: tuple[int, ...], is_whole: bool) -> None:
        self.group = group
        axis = placement.axis % len(shape)
        if not is_whole:
            width, own = placement.width(group.size, group.rank), shape[axis]
            placement.check_known(group.size)
            repeats = own // width if placement.repeats is None else placement.repeats
            shape = (*shape[:axis], placement.once * repeats, *shape[axis + 1 :])
        elif placement.repeats is not None and shape[axis] != placement.once * placement.repeats:
            raise ShapeError(
                f"an activation of shape {shape} came where the model was sharded for one with "
                f"{placement.once * placement.repeats} in dimension {axis}; shard the model for the "
                "samples that it gets"
            )
        self.whole = shape
        self.parts: list[Region] = [placement.region(shape, axis, group.size, rank) for rank in range(group.size)]
        self.own = self.parts[group.rank]

    @property
    def counts(self) -> list[int]:
        """How many elements each rank's part has."""
        return [int(np.prod(region.local_shape)) for region in self.parts]

    def gather(self, part: Array) -> Array:
        """Return the whole array, given this rank's part of it."""
        if part.shape != self.own.local_shape:
            raise ShapeError(
                f"rank {self.group.rank} of {self.group.size} has {part.shape} of an activation {self.whole}, of which "
                f"{self.own.local_shape} is its part; the layers were sharded for other sizes"
            )
        xp = namespace(part)
        whole: Array = xp.empty(self.whole, dtype=part.dtype)
        own = xp.ascontiguousarray(part).reshape(-1)
        if not getattr(own.flags, "writeable", True):  # a gradient that was broadcast
            own = own.copy()
        with span("all-gather", CATEGORY, REDUCE, {"bytes": whole.nbytes}):
            parts = self.group.all_gather_v(own, self.counts)
        for region, values in zip(self.parts, parts, strict=True):
            region.put(whole, values)
        return whole

    def take(self, whole: Array) -> Array:
        """Return this rank's part, contiguous."""
        return namespace(whole).ascontiguousarray(self.own.take(whole))

    def put(self, part: Array) -> Array:
        """Return a whole array of zeros but for this rank's part."""
        whole: Array = namespace(part).zeros(self.whole, part.dtype)
        self.own.put(whole, namespace(part).ascontiguousarray(part))
        return whole

    def reduce_scatter(self, whole: Array) -> Array:
        """Return this rank's part of the sum over the ranks."""
        flat = namespace(whole).concatenate([region.take(whole).reshape(-1) for region in self.parts])
        with span("reduce-scatter", CATEGORY, REDUCE, {"bytes": flat.nbytes}):
            own = self.group.reduce_scatter_v(flat, self.counts)
        return own.reshape(self.own.local_shape)


class RankSum(Function):
    """The sum over the ranks, of what comes or of what comes back; the other one stays as it is.

    Args:
        group: the ranks.
        forward_sums: whether what comes is summed, in its own array; else its gradients are.
    """

    __slots__ = ("forward_sums", "group")

    def __init__(self, group: Group, forward_sums: bool) -> None:
        self.group, self.forward_sums = group, forward_sums

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on ranks of another group: as before."""
        return uncut(self, inputs[0], (), "")

    def forward(self, x: Array) -> Array:
        return sum_in_place(self.group, x) if self.forward_sums else x

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad if self.forward_sums else all_sum(self.group, grad, self.into(0)),)


# What becomes of an activation, and of its gradient: methods of `_Regions`.
ADJOINTS = {
    "scatter": ("take", "gather"),
    "gather": ("gather", "take"),
    "gather_summing_grads": ("gather", "reduce_scatter"),
    "take_part": ("take", "put"),
}


class Redistribute(Function):
    """See `redistribute`."""

    __slots__ = ("group", "placement", "way")

    def __init__(self, way: str, group: Group, placement: Placement) -> None:
        self.way, self.group, self.placement = way, group, placement

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on ranks of another group: as before, where they share another axis."""
        return uncut(self, inputs[0], (self.placement.axis,), "exchanges parts of that axis")

    def forward(self, x: Array) -> Array:
        there, _ = ADJOINTS[self.way]
        regions = _Regions(self.group, self.placement, x.shape, is_whole=there == "take")
        self.saved = (regions,)
        return getattr(regions, there)(x)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (getattr(self.saved[0], ADJOINTS[self.way][1])(grad),)


def copy(x: Tensor, group: Group) -> Tensor:
    """Return x, replicated, for a computation that differs from rank to rank: its gradients are summed."""
    return x if group.size == 1 else RankSum(group, False)(x)


def sum_over_ranks(x: Tensor, group: Group, bias: Tensor | None = None) -> Tensor:
    """Return the sum over the ranks of x, all of one shape, plus a bias; replicated.

    Args:
        x: (..., features), this rank's summand, just computed: the sum overwrites its array, which nothing else uses.
        group: the ranks.
        bias: (features,), replicated; added once.
    """
    whole = x if group.size == 1 else RankSum(group, True)(x)
    return whole if bias is None else whole + bias


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


@dataclass(frozen=True)
class PartExchange:
    """What the ranks of a tensor group exchange of tensors that say which parts they are; a `TensorGroup`."""

    group: Group
    depth = 1  # sequences are shared out before layers
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
