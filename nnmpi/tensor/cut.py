"""A rank's part of a tensor, which looks like the whole one.

`shape` is the whole one's, so that what a module computes from it is what a run on one rank
computes; `data` is this rank's part. Operations on it are those on the whole tensor, or are refused
(see `placement`). Python never sees its values: they differ from rank to rank.
"""

from dataclasses import replace
from typing import Any, NoReturn

from nnmpi.backend.array import Shape
from nnmpi.backend.recording import active
from nnmpi.errors import LayoutError
from nnmpi.tensor.function import Elementwise, Function, Variable
from nnmpi.tensor.placement import TensorCut, TensorGroup, beside, is_cut
from nnmpi.tensor.tensor import Tensor


class CutTensor(Tensor):
    """This rank's shard of a tensor; `cut` is its placement. Sharded layers make them (`mark`)."""

    __slots__ = ()

    cut: TensorCut

    @property
    def shape(self) -> Shape:
        """The lengths of the whole tensor's axes."""
        return self.cut.of(self.data.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"CutTensor(axis {self.cut.axis} of {self.shape}, left by layer {self.cut.layer!r})"

    def detach(self) -> Tensor:
        """Return a part of the same values that is no part of the graph."""
        return mark(Tensor(self.data), self.cut)

    def part(self) -> Tensor:
        """Return the local shard as a plain Tensor, for code that handles sharding itself.

        It may be cut itself, see `TensorCut.within`.
        """
        part = Tensor.blank() if self.cut.within is None else _cut_tensor(self.cut.within)
        _share(part, self)
        return part

    def apply(self, function: Function, inputs: tuple[Any, ...]) -> Tensor:
        """Apply an operation to inputs that include shards, if the operation supports them.

        Raises:
            LayoutError: if not.
        """
        cut = max((x.cut for x in inputs if is_cut(x)), key=lambda item: item.group.depth)
        group, seen = (
            cut.group,
            [_Whole(x) if is_cut(x) and x.cut.group != cut.group else x for x in inputs],
        )
        placement = function.placed(*seen)
        ndim = max(len(getattr(x, "shape", ())) for x in inputs)
        local = []
        for x, item in zip(inputs, seen, strict=True):
            place = None
            if is_cut(item):
                x = x.part()
            elif isinstance(function, Elementwise):
                place = beside(x, ndim, placement)
            if place is not None:
                x = group.scatter(x, place)
            elif not is_cut(item) and isinstance(x, Variable) and x.requires_grad:
                x = group.copy(x)
            local.append(x)
        return mark(function(*local), replace(cut, placement=placement))

    def _refuse_look(self, *_: Any) -> NoReturn:
        raise self.cut.refuse(
            "a look at values (numpy, item, argmax, comparison)", "needs all of them"
        )

    numpy = item = argmax = __lt__ = __le__ = __gt__ = __ge__ = _refuse_look  # type: ignore[assignment]

    def backward(self, *_: Any, **__: Any) -> None:
        """Refuse to begin a backward pass at a part.

        Raises:
            LayoutError: always.
        """
        raise self.cut.refuse("backward", "begins at a whole tensor")


class _Whole:
    """A tensor of which each rank of a group has all, though it is cut over another group: what
    `placed` sees of it.
    """

    cut = None

    def __init__(self, x: CutTensor) -> None:
        self.shape, self.ndim, self.size = x.shape, x.ndim, x.size


def mark(x: Tensor, cut: TensorCut) -> CutTensor:
    """Return this rank's part of a tensor as one that says so.

    Args:
        x: the part; may be cut itself.
        cut: which one it is.

    Raises:
        LayoutError: when it is not that long.
    """
    if x.shape[cut.axis] != cut.own():
        raise LayoutError(
            f"layer {cut.layer!r} leaves a part of shape {x.shape}, but {cut.own()} of {cut.whole}"
            f" in axis {cut.axis} are this rank's; the layers were sharded for other sizes"
        )
    if x.node is None and x.requires_grad:
        x = x.reshape(x.shape)  # a leaf stays behind its part, and gets its gradient
    part = _cut_tensor(replace(cut, within=x.cut))
    _share(part, x)
    return part


def whole(x: Any, group: TensorGroup | None = None) -> Any:
    """Gather a shard into the full tensor on every rank; return other values unchanged.

    The exchange is an all-gather forward; backward keeps this rank's part of the gradient. In a
    list, tuple or dictionary each part is made whole.

    Args:
        x: a tensor, or anything else.
        group: over whose ranks; what others have parts of stays a part. By default over all.
    """
    if is_cut(x):
        if group is None:
            return whole(x.cut.group.gather(x.part(), x.cut.placement))
        return x.cut.group.gather(x.part(), x.cut.placement) if x.cut.group == group else x
    if type(x) in (list, tuple):
        return type(x)(whole(item, group) for item in x)
    return {key: whole(value, group) for key, value in x.items()} if type(x) is dict else x


def _cut_tensor(cut: TensorCut) -> CutTensor:
    part = CutTensor.__new__(CutTensor)
    part.grad = part.buffer = part.hook = None
    part.cut = cut
    return part


def _share(new: Tensor, x: Tensor) -> None:
    new.data, new.requires_grad, new.node, new.tape = x.data, x.requires_grad, x.node, x.tape
    recorder = active()
    if recorder is not None:
        recorder.made.add(new)
