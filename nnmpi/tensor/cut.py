"""Sharded tensors: a rank's shard behind the interface of the full tensor.

`shape` is the full tensor's, so a module that computes sizes from it gets those of a serial run.
`data` is this rank's shard. An operation either means the same as on the full tensor or is refused
(see `placement`). Reading values from Python is refused: they differ from rank to rank.
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
        """The lengths of the full tensor's axes."""
        return self.cut.of(self.data.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"CutTensor(axis {self.cut.axis} of {self.shape}, left by layer {self.cut.layer!r})"

    def detach(self) -> Tensor:
        """Return a shard of the same values (not copied) without history in the graph."""
        return mark(Tensor(self.data), self.cut)

    def part(self) -> Tensor:
        """Return the local shard as a plain Tensor, for code that handles sharding itself.

        The result is a `CutTensor` again if the shard is sharded itself (`TensorCut.within`).
        """
        part = Tensor.blank() if self.cut.within is None else _cut_tensor(self.cut.within)
        _share(part, self)
        return part

    def apply(self, function: Function, inputs: tuple[Any, ...]) -> Tensor:
        """Apply an operation to inputs that include shards, if the operation supports them.

        Raises:
            LayoutError: if the operation does not support them.
        """
        cut = max((x.cut for x in inputs if is_cut(x)), key=lambda item: item.group.depth)
        group = cut.group
        # over this group alone: tensors sharded over other groups count as full
        seen = [_FullTensor(x) if is_cut(x) and x.cut.group != group else x for x in inputs]
        placement = function.placed(*seen)
        ndim = max(len(getattr(x, "shape", ())) for x in inputs)
        local = []
        for x, item in zip(inputs, seen, strict=True):
            scattered = None
            if is_cut(item):
                x = x.part()
            elif isinstance(function, Elementwise):
                scattered = beside(x, ndim, placement)
            if scattered is not None:
                x = group.scatter(x, scattered)
            elif not is_cut(item) and isinstance(x, Variable) and x.requires_grad:
                x = group.copy(x)  # backward sums its gradients over the ranks
            local.append(x)
        # calls `apply` again, for the next group, if a shard is sharded itself
        return mark(function(*local), replace(cut, placement=placement))

    def _refuse_look(self, *_: Any) -> NoReturn:
        raise self.cut.refuse(
            "a look at values (numpy, item, argmax, comparison)", "needs all of them"
        )

    numpy = item = argmax = __lt__ = __le__ = __gt__ = __ge__ = _refuse_look  # type: ignore[assignment]

    def backward(self, *_: Any, **__: Any) -> None:
        """Refuse to start a backward pass at a shard.

        Raises:
            LayoutError: always.
        """
        raise self.cut.refuse("backward", "begins at a whole tensor")


class _FullTensor:
    """A view of a tensor that is sharded over another group only, as `placed` of this group reads
    it.
    """

    cut = None

    def __init__(self, x: CutTensor) -> None:
        self.shape, self.ndim, self.size = x.shape, x.ndim, x.size


def mark(x: Tensor, cut: TensorCut) -> CutTensor:
    """Wrap a rank's shard as a `CutTensor`.

    Args:
        x: the shard; it may be sharded itself, over other ranks.
        cut: its position in the full tensor.

    Raises:
        LayoutError: when the shard's length does not match.
    """
    if x.shape[cut.axis] != cut.local_length():
        raise LayoutError(
            f"layer {cut.layer!r} leaves a part of shape {x.shape}, but {cut.local_length()} of"
            f" {cut.length} in axis {cut.axis} are this rank's; the layers were sharded for other"
            " sizes"
        )
    if x.node is None and x.requires_grad:
        x = x.reshape(x.shape)  # an operation in between, so that the leaf x gets the gradient
    part = _cut_tensor(replace(cut, within=x.cut))
    _share(part, x)
    return part


def whole(x: Any, group: TensorGroup | None = None) -> Any:
    """Gather a shard into the full tensor on every rank; return other values unchanged.

    Forward is an all-gather; backward slices this rank's shard out of the gradient. The shards in a
    list, tuple or dictionary are gathered one by one.

    Args:
        x: a tensor, or anything else.
        group: gather over this group alone; shards of other groups stay shards. Default: all.
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
