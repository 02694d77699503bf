"""A layer rule's inputs: the layer's position (`LayerContext`) and its `ParameterSharder`.

A rule decides which placement of the activation its layer needs. If the activation comes in
another, the rule puts an exchange before the layer:

    on_replicated                the unchanged layer on full activations     gather
    gather_for_sharded_weights   full activations for sharded weights        gather; backward sums
    to_parts                     each rank's part                            scatter
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeAlias

from nnmpi.base.errors import LayoutError
from nnmpi.base.shard import Region
from nnmpi.comm.group import Group
from nnmpi.nn.module import Buffer, Module, NamedModules
from nnmpi.nn.sharding import Sharding, Units
from nnmpi.ops.collectives import TensorParallelGroup, redistribute, scatter
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.placement import REPLICATED, Placement, Shard, features, is_sharded
from nnmpi.tensor.sharded import ShardedTensor, gather_shards, mark
from nnmpi.tensor.tensor import Tensor


class ParameterSharder:
    """Shards a model's parameters and buffers for one rank, each once: ties stay ties.

    Attributes:
        group: the ranks that share each layer.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._cut: dict[Parameter, Parameter] = {}  # a full parameter's shard

    def cut(
        self, full: Parameter | Buffer | None, placement: Placement, axis: int
    ) -> Parameter | Buffer | None:
        """Return this rank's part of a parameter or buffer that is sharded like an activation.

        Args:
            full: the parameter, or None.
            placement: of the activation.
            axis: the axis of the parameter that corresponds to the activation's sharded axis.

        Raises:
            LayoutError: when the axis cannot be sharded so, or another layer shards the same
                parameter in another way.
        """
        if full is None:
            return None
        size = self.group.size
        regions = [placement.region(full.shape, axis, size, rank) for rank in range(size)]
        is_uneven = len({region.local_shape for region in regions}) > 1
        return self._part(full, regions[self.group.rank], "uneven" if is_uneven else "")

    def deal(self, module: Module, keep: bool) -> None:
        """Keep a module's parameters and buffers if they are this rank's, else drop their values.

        Raises:
            LayoutError: when another rank's module has one of them, too, or one has no axis.
        """
        for path, item in module.named_modules():
            for name, entry in [*item._members(Parameter), *item._members(Buffer)]:
                shape = entry.shape if entry.region is None else entry.region.shape
                if not shape:
                    raise LayoutError(
                        f"{path}.{name} in a branch is a single number; give it the shape (1,), so"
                        " that a rank of another branch can have none of it"
                    )
                region = Region(shape, 0, 0, shape[0] if keep else 0)
                if entry.region == region:
                    continue  # done already: two modules of the branch share it
                if isinstance(entry, Buffer) and entry.region is not None:
                    raise LayoutError(
                        f"{path}.{name} is in branches of two ranks; make a layer for each branch"
                    )
                item.set_child(name, self._part(entry, region, "uneven"))

    def _part(self, full: Parameter | Buffer, region: Region, room: str) -> Parameter | Buffer:
        if isinstance(full, Buffer):
            return Buffer(region.local_shape, full.value, region)
        if full not in self._cut and full.region is None:
            part = self._cut[full] = Parameter(region.local_shape, full.init, region, self.group)
            part.requires_grad, part.room = full.requires_grad, room
            if full.is_base:
                part.make_base(full.base_dtype)
        part = self._cut.get(full, full)
        if part.region != region:
            raise LayoutError(
                f"two layers share a parameter of shape {full.shape} and would cut it in different"
                " ways; let the table give them shardings that cut the same axis, or"
                " Sharding.REPLICATED"
            )
        return part

    def check(self, model: Module) -> None:
        """Refuse a model with a parameter that one use shards and another replicates.

        Raises:
            LayoutError: naming the parameter.
        """
        for name, parameter in model.named_weights():
            if parameter in self._cut:
                raise LayoutError(
                    f"parameter {name!r} is whole in one layer and cut in another; let the table"
                    " give both places shardings that cut the same axis, or Sharding.REPLICATED"
                )


Redistribution: TypeAlias = Callable[[Tensor], Tensor]
Placed: TypeAlias = tuple[Module, Placement]


def divided(length: int, units: Units | None) -> Placement:
    """Return the placement of a last axis that is sharded in units of several features.

    Args:
        length: of the full axis.
        units: with `count` and `repeats`; None for units of one feature each.

    Raises:
        LayoutError: when the length is no multiple of count times repeats.
    """
    if units is None:
        return features(length)
    unit, remainder = divmod(length, units.count * units.repeats)
    if remainder:
        raise LayoutError(
            f"{length} features are not {units.repeats} times {units.count} units of equal length"
        )
    return Placement(units.count, unit, units.repeats)


@dataclass(frozen=True)
class LayerContext:
    """A layer's position in the model, and its input.

    Attributes:
        name: its full name in the model.
        placement: of its input activation.
        shape: of a full sample of that activation, without the batch; None if unknown.
        sharding: the table's entry for the layer, or None.
        sharder: shards parameters for this rank.
        units: the units of the layer's sharded features; None for single features.
    """

    name: str
    placement: Placement
    shape: tuple[int, ...] | None
    sharding: Sharding | None
    sharder: ParameterSharder
    units: Units | None = None

    @property
    def group(self) -> Group:
        """The ranks that share each layer."""
        return self.sharder.group

    def on_replicated(self, module: Module, features: int | None = None) -> Placed:
        """Return the layer unchanged, behind the exchange that gathers its activations.

        Args:
            features: the length of their last axis, if the layer defines it.
        """
        if self.placement.is_replicated:
            return module, REPLICATED
        return Redistributed(module, before=self.to_replicated(features)), REPLICATED

    def on_parts(self, module: Module) -> Placed:
        """Return a layer whose operations support shards themselves (see `tensor.placement`)."""
        if self.placement.is_replicated:
            return module, REPLICATED
        exchange = TensorParallelGroup(self.group)
        as_part = partial(_mark, placement=self.placement, exchange=exchange, name=self.name)
        return Redistributed(module, as_part, ShardedTensor.part), self.placement

    def to_replicated(self, features: int | None = None, way: str = "gather") -> Redistribution:
        """Return the gather before replicated work; its backward keeps this rank's slice."""
        placement = self.placement
        if features is not None and placement.repeats is None:
            placement = placement.resolve(features)
        placement.check_known(self.group.size)
        return partial(redistribute, way, group=self.group, placement=placement)

    def gather_for_sharded_weights(self, features: int) -> Redistribution:
        """Return the all-gather before sharded work; its backward is a reduce-scatter."""
        return self.to_replicated(features, "gather_summing_grads")

    def to_parts(self, placement: Placement) -> Redistribution:
        """Return the exchange that gives each rank its part of the activation."""
        if placement == self.placement:
            return lambda x: x
        cut = partial(scatter, group=self.group, placement=placement)
        if self.placement.is_replicated:
            return cut
        gather = self.to_replicated()
        return lambda x: cut(gather(x))

    def sample(self) -> tuple[int, int, int]:
        """Return the full shape of the layer's input images: (height, width, channels).

        Raises:
            LayoutError: when it is unknown, or not an image's.
        """
        if self.shape is None or len(self.shape) != 3:
            raise self.error(
                "works on the rows of images, whose height must be known: give shard() the shape of"
                " a sample, sample=(height, width, channels)"
            )
        height, width, channels = self.shape
        return height, width, channels

    def error(self, why: str) -> LayoutError:
        """Return an error with the layer's name and the reason why it cannot be sharded so."""
        return LayoutError(f"layer {self.name!r} {why}")


def part_of(layer: Module, kind: type[Module] | None = None, **attributes: Any) -> Module:
    """Return a layer's replacement, of its class or another, with some attributes changed."""
    made = object.__new__(kind or type(layer))
    vars(made).update(vars(layer), **attributes)
    vars(made).pop("_part", None)
    return made


class Redistributed(Module):
    """after(inner(before(x))).

    It is invisible in the model's tree: modules and parameters have the same names as without it.

    Args:
        inner: the module.
        before, after: exchanges of its input and its result; None for none.
    """

    def __init__(
        self,
        inner: Module,
        before: Callable[[Any], Any] | None = None,
        after: Callable[[Any], Any] | None = None,
    ) -> None:
        self.inner = inner
        self._before, self._after = before, after

    def named_modules(self, prefix: str = "", above: tuple[Module, ...] = ()) -> NamedModules:
        """Yield the inner module under this one's name, and all modules below it."""
        yield from self.inner.named_modules(prefix, above)

    def children(self) -> NamedModules:
        """Yield the inner module's children."""
        yield from self.inner.children()

    def set_child(self, name: str, part: Any) -> None:
        """Replace a child of the inner module."""
        self.inner.set_child(name, part)

    def forward(self, x: Any) -> Any:
        """Return the inner module's result, exchanged."""
        y = self.inner(x if self._before is None else self._before(x))
        return y if self._after is None else self._after(y)


def _cut(x: Tensor, placement: Placement, exchange: TensorParallelGroup, name: str) -> Shard:
    """Return the shard of x in this placement; if the repeats are unknown, x is that shard."""
    axis, width = placement.axis % x.ndim, placement.width(exchange.size, exchange.rank)
    if placement.repeats is None:
        placement = replace(placement, repeats=x.shape[axis] // width if width else 1)
    return Shard(replace(placement, axis=axis), exchange, name)


def _mark(x: Tensor, placement: Placement, exchange: TensorParallelGroup, name: str) -> Tensor:
    return x if placement.is_replicated else mark(x, _cut(x, placement, exchange, name))


class ShardedChild(Redistributed):
    """A sharded layer or container, as the forward of the custom module above it sees it.

    It may be called with full tensors or parts (see `tensor.sharded`): the input is brought to the
    layer's placement. The result carries its placement. The parameters, and the layers in a
    container, are not accessible: they are this rank's parts without a placement.

    Args:
        inner: the layer or container.
        name: its full name in the model.
        expects, gives: placements of input and result.
        group: the ranks.
    """

    def __init__(
        self, inner: Module, name: str, expects: Placement, gives: Placement, group: Group
    ) -> None:
        super().__init__(inner)
        self._name, self._expects, self._gives = name, expects, gives
        self._group = TensorParallelGroup(group)

    def forward(self, x: Any) -> Any:
        """Return the layer's result, marked as a part if it is sharded."""
        return _mark(self.inner(self._redistribute(x)), self._gives, self._group, self._name)

    def _redistribute(self, x: Any) -> Any:
        if self._expects.is_replicated:
            return gather_shards(x, self._group)
        expected = _cut(x, self._expects, self._group, self._name)
        if is_sharded(x) and x.shard.group == self._group and x.shard.is_like(expected):
            return x.part()
        return scatter(gather_shards(x, self._group), self._group.group, self._expects)

    def _refuse_access(self, *_: Any) -> NoReturn:
        raise LayoutError(
            f"layer {self._name!r} is sharded over {self._group.size} ranks, so its parameters and"
            " layers cannot be used directly; call the layer, or remove its entry from the table"
        )

    def __getattr__(self, name: str) -> Any:
        # reached only for attributes that this object does not have
        value = getattr(self.inner, name)
        return (
            self._refuse_access()
            if isinstance(value, Tensor | Module | Buffer | list | tuple)
            else value
        )

    __getitem__ = __len__ = __iter__ = _refuse_access
