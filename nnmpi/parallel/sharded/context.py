"""A layer rule's inputs: the layer's place (`LayerContext`) and its sharder (`ParameterSharder`).

A rule decides how its layer needs the activation. If it comes otherwise, the rule puts an exchange
before the layer:

    on_replicated    the layer as it is, on activations that are made whole      gather
    to_each          whole, for a computation that differs from rank to rank     gather, gradients are summed
    to_parts         each rank's part of it                                      scatter
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeAlias

from nnmpi.comm.group import Group
from nnmpi.errors import LayoutError
from nnmpi.nn.module import Buffer, Module
from nnmpi.nn.sharding import Sharding, Units
from nnmpi.ops.collectives import PartExchange, redistribute, scatter
from nnmpi.shard import Region
from nnmpi.tensor.cut import CutTensor, mark, whole
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.placement import REPLICATED, Placement, TensorCut, features, is_cut
from nnmpi.tensor.tensor import Tensor


class ParameterSharder:
    """Shards a model's parameters and buffers for one rank, each once: ties stay ties.

    Attributes:
        group: the ranks that share each layer.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._cut: dict[Parameter, Parameter] = {}  # of each whole one the part

    def cut(
        self, whole: Parameter | Buffer | None, placement: Placement, axis: int
    ) -> Parameter | Buffer | None:
        """Return this rank's part of a parameter or buffer that is cut along with an activation.

        Args:
            whole: the parameter; there may be none.
            placement: of the activation.
            axis: the axis of the parameter that corresponds to the activation's cut axis.

        Raises:
            LayoutError: when the axis cannot be cut so, or another layer has the same parameter cut
                in another way.
        """
        if whole is None:
            return None
        region = placement.region(whole.shape, axis, self.group.size, self.group.rank)
        return self._part(whole, region)

    def deal(self, module: Module, mine: bool) -> None:
        """Keep a module's parameters and buffers if it is this rank's, else drop their values.

        Raises:
            LayoutError: when a module of another rank has one of them, too, or one has no axis.
        """
        for path, item in module.named_modules():
            for name, entry in [*item._members(Parameter), *item._members(Buffer)]:
                shape = entry.shape if entry.region is None else entry.region.shape
                if not shape:
                    raise LayoutError(
                        f"{path}.{name} in a branch is a single number; give it the shape (1,), so"
                        " that a rank that computes another branch can have none of it"
                    )
                region = Region(shape, 0, 0, shape[0] if mine else 0)
                if entry.region == region:
                    continue  # met already: two modules of the branch share it
                if isinstance(entry, Buffer) and entry.region is not None:
                    raise LayoutError(
                        f"{path}.{name} stands in branches of two ranks; make a layer for each"
                        " branch"
                    )
                item.set_child(name, self._part(entry, region))

    def _part(self, whole: Parameter | Buffer, region: Region) -> Parameter | Buffer:
        if isinstance(whole, Buffer):
            return Buffer(region.local_shape, whole.value, region)
        if whole not in self._cut and whole.region is None:
            part = self._cut[whole] = Parameter(region.local_shape, whole.init, region)
            part.requires_grad = whole.requires_grad
        part = self._cut.get(whole, whole)
        if part.region != region:
            raise LayoutError(
                f"two layers share a parameter of shape {whole.shape} and would cut it in two ways;"
                " let the table give them shardings that cut the same axis, or Sharding.REPLICATED"
            )
        return part

    def check(self, model: Module) -> None:
        """Refuse a model that uses a parameter whole in one place and cut in another.

        Raises:
            LayoutError: naming it.
        """
        for name, parameter in model.named_parameters():
            if parameter in self._cut:
                raise LayoutError(
                    f"parameter {name!r} is whole there and cut in another place of the model; let"
                    " the table give both places shardings that cut the same axis, or"
                    " Sharding.REPLICATED"
                )


Redistribute: TypeAlias = Callable[[Tensor], Tensor]
Placed: TypeAlias = tuple[Module, Placement]


def divided(length: int, units: Units | None) -> Placement:
    """Return the placement of a last axis that is divided in units of more than one feature.

    Args:
        length: of the whole axis.
        units: with their `count` and `repeats`; None for units of one feature each.

    Raises:
        LayoutError: when the length is no multiple of both.
    """
    if units is None:
        return features(length)
    unit, rest = divmod(length, units.count * units.repeats)
    if rest:
        raise LayoutError(
            f"{length} features are not {units.repeats} times {units.count} units of one length"
        )
    return Placement(units.count, unit, units.repeats)


@dataclass(frozen=True)
class LayerContext:
    """Where a layer stands in the model, and what comes to it.

    Attributes:
        name: its full name in the model.
        placement: of the activation that comes to it.
        shape: of a whole sample of that activation, without the batch; None when it is not known.
        sharding: what the table has for the layer; None when it has nothing.
        sharder: cuts parameters for this rank.
        units: what the layer's features are made of that are sharded; None for single features.
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
            features: the length of their last axis, where the layer knows it.
        """
        if self.placement.is_replicated:
            return module, REPLICATED
        return Redistributed(module, before=self.to_replicated(features)), REPLICATED

    def on_parts(self, module: Module) -> Placed:
        """Return a layer whose operations support shards themselves (see `tensor.placement`)."""
        exchange = PartExchange(self.group)
        as_part = partial(_mark, placement=self.placement, exchange=exchange, name=self.name)
        return Redistributed(module, as_part, CutTensor.part), self.placement

    def to_replicated(self, features: int | None = None, way: str = "gather") -> Redistribute:
        """Return the gather before replicated work; its backward keeps this rank's slice."""
        placement = self.placement
        if features is not None and placement.repeats is None:
            placement = placement.resolve(features)
        placement.check_known(self.group.size)
        return partial(redistribute, way, group=self.group, placement=placement)

    def to_each(self, features: int | None = None) -> Redistribute:
        """Return the all-gather before sharded work; its backward is a reduce-scatter."""
        return self.to_replicated(features, "gather_summing_grads")

    def to_parts(self, placement: Placement) -> Redistribute:
        """Return what gives each rank its part of the activation in that placement."""
        if placement == self.placement:
            return lambda x: x
        cut = partial(scatter, group=self.group, placement=placement)
        if self.placement.is_replicated:
            return cut
        whole = self.to_replicated()
        return lambda x: cut(whole(x))

    def sample(self) -> tuple[int, int, int]:
        """Return the whole image (height, width, channels) that comes to the layer.

        Raises:
            LayoutError: when it is not known, or no image.
        """
        if self.shape is None or len(self.shape) != 3:
            raise self.refuse(
                "works on the rows of images, whose height must be known: give shard() the shape of"
                " a sample, sample=(height, width, channels)"
            )
        height, width, channels = self.shape
        return height, width, channels

    def refuse(self, why: str) -> LayoutError:
        """Return the error that says which layer cannot be sharded so, and why."""
        return LayoutError(f"layer {self.name!r} {why}")


def part_of(layer: Module, kind: type[Module] | None = None, **attributes: Any) -> Module:
    """Return a layer's replacement, of its class or another, with some attributes changed."""
    made = object.__new__(kind or type(layer))
    vars(made).update(vars(layer), **attributes)
    return made


class Redistributed(Module):
    """after(inner(before(x))).

    It does not show in the model's tree: modules and parameters have the same names as without it.

    Args:
        inner: the module.
        before, after: what happens to its input and its result; None for nothing.
    """

    def __init__(
        self,
        inner: Module,
        before: Callable[[Any], Any] | None = None,
        after: Callable[[Any], Any] | None = None,
    ) -> None:
        self.inner = inner
        self._before, self._after = before, after

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield the inner module under this one's name, and all below it."""
        yield from self.inner.named_modules(prefix)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield the inner module's children."""
        yield from self.inner.children()

    def set_child(self, name: str, part: Any) -> None:
        """Put a part in place of the inner module's one with that name."""
        self.inner.set_child(name, part)

    def forward(self, x: Any) -> Any:
        """Return the inner module's result, exchanged."""
        y = self.inner(x if self._before is None else self._before(x))
        return y if self._after is None else self._after(y)


def _cut(x: Tensor, placement: Placement, exchange: PartExchange, name: str) -> TensorCut:
    """Return which part of a tensor a rank has, as a tensor says it; where repeats are not known, x
    is the part.
    """
    axis, width = placement.axis % x.ndim, placement.width(exchange.size, exchange.rank)
    if placement.repeats is None:
        placement = replace(placement, repeats=x.shape[axis] // width if width else 1)
    return TensorCut(replace(placement, axis=axis), exchange, name)


def _mark(x: Tensor, placement: Placement, exchange: PartExchange, name: str) -> Tensor:
    return x if placement.is_replicated else mark(x, _cut(x, placement, exchange, name))


class ShardedChild(Redistributed):
    """What the forward of a custom module sees of a layer or container below it that is sharded.

    It may be called, with whole tensors or parts (see `tensor.cut`): what comes is brought to lie
    as the layer wants it. What it returns says which part it is. It cannot be taken apart:
    parameters, and layers in a container, are this rank's parts, and do not say so.

    Args:
        inner: what it stands for.
        name: its full name in the model.
        expects, gives: how input and result lie on the ranks.
        group: the ranks.
    """

    def __init__(
        self, inner: Module, name: str, expects: Placement, gives: Placement, group: Group
    ) -> None:
        super().__init__(inner)
        self._name, self._expects, self._gives = name, expects, gives
        self._group = PartExchange(group)

    def forward(self, x: Any) -> Any:
        """Return the layer's result, marked as a part where it is one."""
        return _mark(self.inner(self._arranged(x)), self._gives, self._group, self._name)

    def _arranged(self, x: Any) -> Any:
        if self._expects.is_replicated:
            return whole(x, self._group)
        expected = _cut(x, self._expects, self._group, self._name)
        if is_cut(x) and x.cut.group == self._group and x.cut.is_like(expected):
            return x.part()
        return scatter(whole(x, self._group), self._group.group, self._expects)

    def _closed(self, *_: Any) -> NoReturn:
        raise LayoutError(
            f"layer {self._name!r} is shared out over {self._group.size} ranks, and its parameters"
            " and layers cannot be used one by one then; call the layer, or give it no entry in"
            " the table"
        )

    def __getattr__(self, name: str) -> Any:
        # reached only for what is not there
        value = getattr(self.inner, name)
        return (
            self._closed() if isinstance(value, Tensor | Module | Buffer | list | tuple) else value
        )

    __getitem__ = __len__ = __iter__ = _closed
