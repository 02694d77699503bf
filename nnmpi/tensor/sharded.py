"""Sharded tensors: a rank's shard behind the interface of the full tensor.

`shape` is the full tensor's, so a module that computes sizes from it gets those of a serial run.
`data` is this rank's shard. An operation either means the same as on the full tensor or is refused
(see `placement`). Reading values from Python is refused: they differ from rank to rank.
"""

from dataclasses import replace
from typing import Any, NoReturn

from nnmpi.backend.array import Shape
from nnmpi.backend.recording import active
from nnmpi.base.errors import LayoutError
from nnmpi.tensor.function import Function, Variable
from nnmpi.tensor.placement import Shard, TensorGroup, is_sharded, operand_placement
from nnmpi.tensor.tensor import Tensor


class ShardedTensor(Tensor):
    """This rank's shard of a tensor, at the position `shard`. Sharded layers make them (`mark`)."""

    __slots__ = ()

    shard: Shard

    @property
    def shape(self) -> Shape:
        """The lengths of the full tensor's axes."""
        return self.shard.of(self._data.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        shard = self.shard
        return f"ShardedTensor(axis {shard.axis} of {self.shape}, left by layer {shard.layer!r})"

    def detach(self) -> Tensor:
        """Return a shard of the same values (not copied) without history in the graph."""
        return mark(Tensor(self._data), self.shard)

    def part(self) -> Tensor:
        """Return the local shard as a plain Tensor, for code that handles sharding itself.

        The result is a `ShardedTensor` again if the shard is sharded itself (`Shard.within`).
        """
        part = Tensor.blank() if self.shard.within is None else _sharded_tensor(self.shard.within)
        _share(part, self)
        return part

    def apply(self, function: Function, inputs: tuple[Any, ...]) -> Tensor:
        """Apply an operation to inputs that include shards, if the operation supports them.

        Raises:
            LayoutError: if the operation does not support them.
        """
        shard = max((x.shard for x in inputs if is_sharded(x)), key=lambda item: item.group.depth)
        group = shard.group
        # over this group alone: tensors sharded over other groups count as full
        seen = [_FullTensor(x) if is_sharded(x) and x.shard.group != group else x for x in inputs]
        placement = function.placed(*seen)
        ndim = max(len(getattr(x, "shape", ())) for x in inputs)
        local = []
        for x, item in zip(inputs, seen, strict=True):
            scattered = None
            if is_sharded(item):
                x = x.part()
            elif function.broadcasts:
                scattered = operand_placement(x, ndim, placement)
            if scattered is not None:
                x = group.scatter(x, scattered)
            elif not is_sharded(item) and isinstance(x, Variable) and x.requires_grad:
                x = group.copy(x)  # backward sums its gradients over the ranks
            local.append(x)
        # calls `apply` again, for the next group, if a shard is sharded itself
        return mark(function(*local), replace(shard, placement=placement))

    def _refuse_look(self, *_: Any) -> NoReturn:
        raise self.shard.error(
            "reading values (numpy, item, argmax, comparison)", "needs all of them"
        )

    numpy = item = argmax = __lt__ = __le__ = __gt__ = __ge__ = _refuse_look  # type: ignore[assignment]

    def backward(self, *_: Any, **__: Any) -> None:
        """Refuse to start a backward pass at a shard.

        Raises:
            LayoutError: always.
        """
        raise self.shard.error("backward", "starts from a whole tensor")


class _FullTensor:
    """A view of a tensor that is sharded over another group only, as `placed` of this group reads
    it.
    """

    shard = None

    def __init__(self, x: ShardedTensor) -> None:
        self.shape, self.ndim, self.size = x.shape, x.ndim, x.size


def mark(x: Tensor, shard: Shard) -> ShardedTensor:
    """Wrap a rank's shard as a `ShardedTensor`.

    Args:
        x: the shard; it may be sharded itself, over other ranks.
        shard: its position in the full tensor.

    Raises:
        LayoutError: when the shard's length does not match.
    """
    if x.shape[shard.axis] != shard.local_length():
        raise LayoutError(
            f"layer {shard.layer!r} returned a part of shape {x.shape}, but this rank's part is"
            f" {shard.local_length()} of {shard.length} in axis {shard.axis}; shard the layers for"
            " this size"
        )
    if x.node is None and x.requires_grad:
        x = x.reshape(x.shape)  # an operation in between, so that the leaf x gets the gradient
    part = _sharded_tensor(replace(shard, within=x.shard))
    _share(part, x)
    return part


def gather_shards(x: Any, group: TensorGroup | None = None) -> Any:
    """Gather a shard into the full tensor on every rank; return other values unchanged.

    Forward is an all-gather; backward slices this rank's shard out of the gradient. The shards in a
    list, tuple or dictionary are gathered one by one.

    Args:
        x: a tensor, or anything else.
        group: gather over this group alone; shards of other groups stay shards. Default: all.
    """
    if is_sharded(x):
        if group is not None and x.shard.group != group:
            return x
        return gather_shards(x.shard.group.gather(x.part(), x.shard.placement), group)
    if type(x) in (list, tuple):
        return type(x)(gather_shards(item, group) for item in x)
    return {key: gather_shards(value, group) for key, value in x.items()} if type(x) is dict else x


def _sharded_tensor(shard: Shard) -> ShardedTensor:
    part = ShardedTensor.__new__(ShardedTensor)
    part._grad = part.buffer = part.hook = None
    part.shard = shard
    return part


def _share(new: Tensor, x: Tensor) -> None:
    new._data, new.requires_grad, new.node, new.tape = x._data, x.requires_grad, x.node, x.tape
    new.made_by = x.made_by
    recorder = active()
    if recorder is not None:
        recorder.made.add(new)
