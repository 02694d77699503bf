"""Tensor parallelism: layers of one model shared out over the ranks of a group, as a table says.

    table {"1": COLUMN, "3": ROW}        Sequential(Flatten, Linear, ReLU, Linear)

        x whole -> Flatten -> ColumnLinear -> features shared out -> ReLU -> RowLinear -> whole

`shard` goes through the model in the order of computation and keeps track of how the activation lies on the ranks (see
`sharded.layout`). Each layer's rule says what takes its place and how its result lies; where a layer needs the
activation otherwise, an exchange comes before it. What a layer needs of the other ranks is in the module that stands in
its place, so the model can be cut into stages afterwards, anywhere. Parameters keep their names and the values that the
whole model would draw; a part knows its `region`. What stays whole has the same bits on every rank, and so has its
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from nnmpi.comm.group import Group
from nnmpi.errors import LayoutError, UsageError
from nnmpi.nn.activation import GELU, Flatten, LeakyReLU, ReLU, Sigmoid, SiLU, Softmax, Tanh
from nnmpi.nn.container import Residual, Sequential
from nnmpi.nn.conv import AvgPool2d, Conv2d, GlobalAvgPool2d, MaxPool2d
from nnmpi.nn.dropout import Dropout
from nnmpi.nn.linear import Embedding, Linear
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm, LayerNorm
from nnmpi.nn.sharding import Sharding, Table, find
from nnmpi.nn.skip import Pop, Stash
from nnmpi.parallel.sharded.batch_norm import place_batch_norm
from nnmpi.parallel.sharded.conv import place_conv
from nnmpi.parallel.sharded.dropout import place_dropout
from nnmpi.parallel.sharded.embedding import place_embedding
from nnmpi.parallel.sharded.exchange import gather
from nnmpi.parallel.sharded.layer_norm import place_layer_norm
from nnmpi.parallel.sharded.layout import WHOLE, Layout, features
from nnmpi.parallel.sharded.linear import place_linear
from nnmpi.parallel.sharded.parts import Parts
from nnmpi.parallel.sharded.plain import place_elementwise, place_flatten, place_softmax
from nnmpi.parallel.sharded.rows_pool import place_global_pool, place_pool
from nnmpi.parallel.sharded.shapes import Shape, shape_after
from nnmpi.parallel.sharded.site import Placed, Site
from nnmpi.parallel.sharded.wrap import Exchange, Exchanged

Rule: TypeAlias = Callable[[Any, Site], Placed]

RULES: Mapping[type[Module], Rule] = MappingProxyType(
    {
        **dict.fromkeys((ReLU, LeakyReLU, GELU, SiLU, Tanh, Sigmoid), place_elementwise),
        AvgPool2d: place_pool,
        BatchNorm: place_batch_norm,
        Conv2d: place_conv,
        Dropout: place_dropout,
        Embedding: place_embedding,
        Flatten: place_flatten,
        GlobalAvgPool2d: place_global_pool,
        LayerNorm: place_layer_norm,
        Linear: place_linear,
        MaxPool2d: place_pool,
        Softmax: place_softmax,
    }
)


def shard(model: Module, group: Group, table: Table | None = None, sample: Shape | None = None) -> Layout:
    """Replace a model's layers by this rank's parts of them, and return how the model's result lies on the ranks.

    The result is whole, unless the last layer has Sharding.VOCAB. Not collective; initialize the model afterwards. On a
    group of one rank the model stays as it is.

    Args:
        model: not initialized; any tree of modules. Layers in a `Sequential` or `Residual` get their input as they
            need it. In a module of another kind, whose forward nobody knows, each layer does just what the table says:
            COLUMN takes a whole input and gives its features, ROW takes features and gives a whole result.
        group: the ranks that share each layer.
        table: full names of modules, or patterns -> `Sharding`; by default the model's own.
        sample: the shape of one sample, without the batch; needed for Sharding.ROWS.

    Raises:
        UsageError: when the model is initialized already.
        LayoutError: for a table that names nothing in the model, and layers that cannot be sharded so.
    """
    if "storage" in vars(model):
        raise UsageError("the model has its values already; shard it first, then call model.initialize()")
    table = model.sharding if table is None else table
    _check_table(model, table)
    if group.size == 1:
        return WHOLE
    if not table:
        raise LayoutError(
            f"the model has no table that says how its layers are shared out over {group.size} ranks; give shard() "
            'one, such as {"0": Sharding.COLUMN}, or use a tensor group of 1'
        )
    parts = Parts(group)
    layout = _Walk(parts, table).model(model, sample)
    parts.check(model)
    return layout


def _check_table(model: Module, table: Table) -> None:
    """Refuse entries that fit no module: most likely a name is wrong; and a model with nothing to replace."""
    names = [name for name, _ in model.named_modules() if name]
    if table and not names:
        raise LayoutError("the model is a single layer; put it into a Sequential, in which it can be replaced")
    used = {found[0] for found in (find(table, name) for name in names) if found is not None}
    for pattern, sharding in table.items():
        if not isinstance(sharding, Sharding):
            raise LayoutError(f"the table says {sharding!r} of {pattern!r}; use a Sharding, such as Sharding.COLUMN")
        if pattern not in used and not any(find({pattern: sharding}, name) for name in names):
            raise LayoutError(f"the table's {pattern!r} names no module; there are {', '.join(map(repr, names))}")


@dataclass(frozen=True)
class _Place:
    """How the activation lies before or after a module, and a whole sample's shape."""

    layout: Layout
    shape: Shape | None


@dataclass
class _Walk:
    """One way through a model."""

    parts: Parts
    table: Table
    said: dict[int, tuple[Module, Sharding]] = field(default_factory=dict)  # what the table says of a module
    seen: dict[tuple[int, Layout], Placed] = field(default_factory=dict)  # what took a layer's place, by its input

    def model(self, model: Module, sample: Shape | None) -> Layout:
        """Shard the whole model; return how its result lies."""
        for name, module in model.named_modules():
            found = find(self.table, name)
            if found is not None:  # of a module that stands in several places, any of its names will do
                self.said.setdefault(id(module), (module, found[1]))
        start = _Place(WHOLE, None if sample is None else tuple(sample))
        last = _last_layer(model)
        module, end = self.place(model, "", start)
        if not end.layout.is_whole and self._sharding(last) is not Sharding.VOCAB:
            module = self._whole_after(module, end)
            end = _Place(WHOLE, end.shape)
        if module is not model:
            raise LayoutError("the model itself would have to be replaced; put it into a Sequential")
        return end.layout

    def place(self, module: Module, name: str, place: _Place) -> tuple[Module, _Place]:
        """Return what stands in a module's place, and how its result lies."""
        if type(module) is Sequential:
            return module, self._sequence(module, name, place)
        if type(module) is Residual:
            return self._residual(module, name, place)
        if type(module) in RULES:
            placed, layout = self._layer(module, name, place)
            return placed, _Place(layout, shape_after(module, place.shape))
        return self._foreign(module, name, place)

    def _layer(self, module: Module, name: str, place: _Place) -> Placed:
        """Return what takes a layer's place; where one stands in several places, so does that."""
        site = Site(name, place.layout, place.shape, self._sharding(module), self.parts)
        placed = RULES[type(module)](module, site)
        if placed[0] is module:
            return placed
        elsewhere = [key for key in self.seen if key[0] == id(module) and key[1] != place.layout]
        if elsewhere and isinstance(module, BatchNorm | Dropout):
            raise site.refuse(
                "stands in several places of the model, where its input lies on the ranks in different ways; make a "
                "layer for each place"
            )
        return self.seen.setdefault((id(module), place.layout), placed)

    def _sequence(self, sequence: Sequential, name: str, place: _Place) -> _Place:
        kept: dict[str, _Place] = {}
        for i, layer in enumerate(list(sequence.layers)):
            inside = _join(name, str(i))
            if isinstance(layer, Stash):
                kept[layer.name] = place
            elif isinstance(layer, Pop):
                place = self._join_kept(sequence, i, layer, inside, place, kept)
            else:
                if type(layer) is Residual and not self._passes(layer, inside, place):
                    place = self._make_whole(sequence, i, place, kept)
                placed, place = self.place(layer, inside, place)
                sequence.layers[i] = placed
        return place

    def _join_kept(
        self, sequence: Sequential, i: int, pop: Pop, name: str, place: _Place, kept: dict[str, _Place]
    ) -> _Place:
        """Let both sides of a Pop lie alike: whole, if they do not anyway."""
        if pop.name not in kept:
            return place  # the sequence refuses it when it runs
        around = kept.pop(pop.name)
        pop.shortcut, other = self._branch(pop.shortcut, _join(name, "shortcut"), around)
        if other.layout != place.layout:
            if not other.layout.is_whole:
                pop.shortcut = self._whole_after(pop.shortcut, other)
            place = self._make_whole(sequence, i, place, kept)
        return place

    def _residual(self, block: Residual, name: str, place: _Place) -> tuple[Module, _Place]:
        if not self._passes(block, name, place):
            _, end = self._residual(block, name, _Place(WHOLE, place.shape))
            return Exchanged(block, before=self._gather(place)), end
        block.body, body = self.place(block.body, _join(name, "body"), place)
        block.shortcut, around = self._branch(block.shortcut, _join(name, "shortcut"), place)
        if body.layout == around.layout:
            return block, body
        if not body.layout.is_whole:
            block.body = self._whole_after(block.body, body)
        if not around.layout.is_whole:
            block.shortcut = self._whole_after(block.shortcut, around)
        return block, _Place(WHOLE, body.shape)

    def _branch(self, module: Module | None, name: str, place: _Place) -> tuple[Module | None, _Place]:
        return (None, place) if module is None else self.place(module, name, place)

    def _foreign(self, module: Module, name: str, place: _Place) -> tuple[Module, _Place]:
        """Shard what the table names in a module whose forward nobody knows; whole in, whole out."""
        for child_name, child in list(module.children()):
            inside = _join(name, child_name)
            if type(child) in RULES:
                sharding = self._sharding(child)
                if sharding is None:
                    continue
                placed, _ = self._layer(child, inside, _Place(assumed_layout(child, inside, sharding), None))
            else:
                placed, end = self.place(child, inside, _Place(WHOLE, None))
                placed = placed if end.layout.is_whole else self._whole_after(placed, end)
            if placed is not child:
                module.set_child(child_name, placed)
        result = _Place(WHOLE, None)
        return module if place.layout.is_whole else Exchanged(module, before=self._gather(place)), result

    def _passes(self, block: Residual, name: str, place: _Place) -> bool:
        """Return whether a block's branches, from such an activation, end alike; from a whole one they are made to."""
        if place.layout.is_whole:
            return True
        shortcut = place
        try:
            body = self._foresee(block.body, _join(name, "body"), place)
            if block.shortcut is not None:
                shortcut = self._foresee(block.shortcut, _join(name, "shortcut"), place)
        except LayoutError:
            return False
        return body.layout == shortcut.layout

    def _foresee(self, module: Module, name: str, place: _Place) -> _Place:
        """Return how a module's result would lie, and change nothing."""
        if type(module) in RULES:
            site = Site(name, place.layout, place.shape, self._sharding(module), Parts(self.parts.group))
            return _Place(RULES[type(module)](module, site)[1], shape_after(module, place.shape))
        if type(module) is Residual:
            end = self._foresee(module.body, _join(name, "body"), place)
            return end if self._passes(module, name, place) else _Place(WHOLE, end.shape)
        if type(module) is not Sequential or any(isinstance(layer, Stash | Pop) for layer in module.layers):
            return _Place(WHOLE, None)
        for number, layer in module.children():
            place = self._foresee(layer, _join(name, number), place)
        return place

    def _make_whole(self, sequence: Sequential, i: int, place: _Place, kept: dict[str, _Place]) -> _Place:
        """Make whole what comes to layer i of a sequence, by an exchange after the layer before it."""
        whole = _Place(WHOLE, place.shape)
        before = i - 1
        while before >= 0 and isinstance(sequence.layers[before], Stash):
            before -= 1
        if place.layout.is_whole or before < 0 or isinstance(sequence.layers[before], Pop):
            return place
        for stash in sequence.layers[before + 1 : i]:
            kept[stash.name] = whole  # all of these are stashes
        sequence.layers[before] = self._whole_after(sequence.layers[before], place)
        return whole

    def _whole_after(self, module: Module | None, place: _Place) -> Module:
        """Return a module whose result, which lies as `place` says, is whole."""
        if module is None:
            return Exchange(self._gather(place))
        if type(module) is Sequential and module.layers and not isinstance(module.layers[-1], Stash | Pop):
            module.layers[-1] = self._whole_after(module.layers[-1], place)
            return module
        return Exchanged(module, after=self._gather(place))

    def _gather(self, place: _Place) -> Callable[[Any], Any]:
        return partial(gather, group=self.parts.group, layout=place.layout)

    def _sharding(self, module: Module) -> Sharding | None:
        found = self.said.get(id(module))
        return None if found is None else found[1]


def assumed_layout(layer: Module, name: str, sharding: Sharding) -> Layout:
    """Return how the input of a layer lies in a module whose forward nobody knows, by what the table says.

    Raises:
        LayoutError: where it cannot be told.
    """
    if sharding is Sharding.ROW and isinstance(layer, Linear):
        return features(layer.weight.shape[0])
    if sharding is Sharding.ROW and isinstance(layer, Conv2d):
        return features(layer.weight.shape[2] * layer.groups)
    if sharding is Sharding.COLUMN and isinstance(layer, BatchNorm | LayerNorm):
        return features(layer.weight.shape[-1])
    if sharding is Sharding.COLUMN and isinstance(layer, Dropout):
        raise LayoutError(
            f"layer {name!r} is a Dropout in a module whose forward nobody knows; put it into a Sequential with the "
            "layers around it"
        )
    return WHOLE


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _last_layer(module: Module) -> Module:
    """Return what a sequence ends with, at last."""
    while type(module) is Sequential and module.layers:
        module = module.layers[-1]
    return module
