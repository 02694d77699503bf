"""The way through a model that is being sharded, in the order of computation.

    Sequential    layer by layer, each from how the one before leaves the activation
    Residual,     both branches; where they end otherwise, both are made whole before they are added
    Stash, Pop
    a layer       its rule (see `rules`)
    another       a module whose forward nobody knows: whole in, whole out, and inside just what the table says

An exchange that a block needs before it is put after the layer before the block, so that a pipeline can still cut the
block open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nnmpi.errors import LayoutError
from nnmpi.nn.activation import Softmax
from nnmpi.nn.container import Residual, Sequential
from nnmpi.nn.dropout import Dropout
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm
from nnmpi.nn.sharding import Sharding, Table, find
from nnmpi.nn.skip import Pop, Stash
from nnmpi.parallel.sharded.exchange import gather
from nnmpi.parallel.sharded.parts import Parts
from nnmpi.parallel.sharded.placement import WHOLE, Placement
from nnmpi.parallel.sharded.rules import RULES, assumed_placement
from nnmpi.parallel.sharded.shapes import Shape, shape_after
from nnmpi.parallel.sharded.site import Placed, Site
from nnmpi.parallel.sharded.wrap import Exchange, Exchanged, ExchangedPop


@dataclass(frozen=True)
class Place:
    """How the activation lies before or after a module, and a whole sample's shape."""

    placement: Placement
    shape: Shape | None


@dataclass
class Walk:
    """One way through a model.

    Args:
        parts: cuts parameters for this rank.
        table: full names, or patterns -> `Sharding`.
    """

    parts: Parts
    table: Table
    said: dict[int, tuple[Module, Sharding]] = field(default_factory=dict)  # what the table says of a module
    seen: dict[tuple[int, Placement], Placed] = field(default_factory=dict)  # what took a layer's place, by its input

    def model(self, model: Module, sample: Shape | None, classes_apart: bool) -> Placement:
        """Shard the whole model; return how its result lies."""
        for name, module in model.named_modules():
            found = find(self.table, name)
            if found is not None:  # of a module that stands in several places, any of its names will do
                self.said.setdefault(id(module), (module, found[1]))
        start = Place(WHOLE, None if sample is None else tuple(sample))
        last = _last_layer(model)
        module, end = self.place(model, "", start)
        if not end.placement.is_whole and not (classes_apart and self._sharding(last) is Sharding.VOCAB):
            module = self._whole_after(module, end)
            end = Place(WHOLE, end.shape)
        if module is not model:
            raise LayoutError("the model itself would have to be replaced; put it into a Sequential")
        return end.placement

    def place(self, module: Module, name: str, place: Place) -> tuple[Module, Place]:
        """Return what stands in a module's place, and how its result lies."""
        if type(module) is Sequential:
            return module, self._sequence(module, name, place)
        if type(module) is Residual:
            return self._residual(module, name, place)
        if type(module) in RULES:
            placed, placement = self._layer(module, name, place)
            return placed, Place(placement, shape_after(module, place.shape))
        return self._foreign(module, name, place)

    def _layer(self, module: Module, name: str, place: Place) -> Placed:
        """Return what takes a layer's place; where one stands in several places, so does that."""
        site = Site(name, place.placement, place.shape, self._sharding(module), self.parts)
        placed = RULES[type(module)](module, site)
        if placed[0] is module:
            return placed
        elsewhere = [key for key in self.seen if key[0] == id(module) and key[1] != place.placement]
        if elsewhere and isinstance(module, BatchNorm | Dropout):
            raise site.refuse(
                "stands in several places of the model, where its input lies on the ranks in different ways; make a "
                "layer for each place"
            )
        return self.seen.setdefault((id(module), place.placement), placed)

    def _sequence(self, sequence: Sequential, name: str, place: Place) -> Place:
        kept: dict[str, Place] = {}
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
        self, sequence: Sequential, i: int, pop: Pop, name: str, place: Place, kept: dict[str, Place]
    ) -> Place:
        """Let both sides of a Pop lie alike: whole, if they do not anyway."""
        if pop.name not in kept:
            return place  # the sequence refuses it when it runs
        around = kept.pop(pop.name)
        pop.shortcut, other = self._branch(pop.shortcut, _join(name, "shortcut"), around)
        if other.placement != place.placement:
            if not other.placement.is_whole:
                pop.shortcut = self._whole_after(pop.shortcut, other)
            if not place.placement.is_whole:
                sequence.layers[i] = ExchangedPop(pop, self._gather(place))
            place = Place(WHOLE, place.shape)
        return place

    def _residual(self, block: Residual, name: str, place: Place) -> tuple[Module, Place]:
        if not self._passes(block, name, place):
            _, end = self._residual(block, name, Place(WHOLE, place.shape))
            return Exchanged(block, before=self._gather(place)), end
        block.body, body = self.place(block.body, _join(name, "body"), place)
        block.shortcut, around = self._branch(block.shortcut, _join(name, "shortcut"), place)
        if body.placement == around.placement:
            return block, body
        if not body.placement.is_whole:
            block.body = self._whole_after(block.body, body)
        if not around.placement.is_whole:
            block.shortcut = self._whole_after(block.shortcut, around)
        return block, Place(WHOLE, body.shape)

    def _branch(self, module: Module | None, name: str, place: Place) -> tuple[Module | None, Place]:
        return (None, place) if module is None else self.place(module, name, place)

    def _foreign(self, module: Module, name: str, place: Place) -> tuple[Module, Place]:
        """Shard what the table names in a module whose forward nobody knows; whole in, whole out."""
        _check_foreign(module, name, {child: self._sharding(child) for _, child in module.children()})
        for child_name, child in list(module.children()):
            inside = _join(name, child_name)
            if type(child) in RULES:
                sharding = self._sharding(child)
                if sharding is None:
                    continue
                placed, _ = self._layer(child, inside, Place(assumed_placement(child, sharding), None))
            else:
                placed, end = self.place(child, inside, Place(WHOLE, None))
                placed = placed if end.placement.is_whole else self._whole_after(placed, end)
            if placed is not child:
                module.set_child(child_name, placed)
        result = Place(WHOLE, None)
        return module if place.placement.is_whole else Exchanged(module, before=self._gather(place)), result

    def _passes(self, block: Residual, name: str, place: Place) -> bool:
        """Return whether a block's branches, from such an activation, end alike; from a whole one they are made to."""
        if place.placement.is_whole:
            return True
        shortcut = place
        try:
            body = self._foresee(block.body, _join(name, "body"), place)
            if block.shortcut is not None:
                shortcut = self._foresee(block.shortcut, _join(name, "shortcut"), place)
        except LayoutError:
            return False
        return body.placement == shortcut.placement

    def _foresee(self, module: Module, name: str, place: Place) -> Place:
        """Return how a module's result would lie, and change nothing."""
        if type(module) in RULES:
            site = Site(name, place.placement, place.shape, self._sharding(module), Parts(self.parts.group))
            return Place(RULES[type(module)](module, site)[1], shape_after(module, place.shape))
        if type(module) is Residual:
            end = self._foresee(module.body, _join(name, "body"), place)
            return end if self._passes(module, name, place) else Place(WHOLE, end.shape)
        if type(module) is not Sequential or any(isinstance(layer, Stash | Pop) for layer in module.layers):
            return Place(WHOLE, None)
        for number, layer in module.children():
            place = self._foresee(layer, _join(name, number), place)
        return place

    def _make_whole(self, sequence: Sequential, i: int, place: Place, kept: dict[str, Place]) -> Place:
        """Make whole what comes to layer i of a sequence, by an exchange after the layer before it."""
        whole = Place(WHOLE, place.shape)
        before = i - 1
        while before >= 0 and isinstance(sequence.layers[before], Stash):
            before -= 1
        if place.placement.is_whole or before < 0 or isinstance(sequence.layers[before], Pop):
            return place
        for stash in sequence.layers[before + 1 : i]:
            kept[stash.name] = whole  # all of these are stashes
        sequence.layers[before] = self._whole_after(sequence.layers[before], place)
        return whole

    def _whole_after(self, module: Module | None, place: Place) -> Module:
        """Return a module whose result, which lies as `place` says, is whole."""
        if module is None:
            return Exchange(self._gather(place))
        if type(module) is Sequential and module.layers and not isinstance(module.layers[-1], Stash | Pop):
            module.layers[-1] = self._whole_after(module.layers[-1], place)
            return module
        return Exchanged(module, after=self._gather(place))

    def _gather(self, place: Place) -> Callable[[Any], Any]:
        place.placement.check_known(self.parts.group.size)
        return partial(gather, group=self.parts.group, placement=place.placement)

    def _sharding(self, module: Module) -> Sharding | None:
        found = self.said.get(id(module))
        return None if found is None else found[1]


def _check_foreign(module: Module, name: str, said: Mapping[Module, Sharding | None]) -> None:
    """Refuse layers that may get parts in a module whose forward nobody knows, and would work on them as on wholes."""
    cuts = any(sharding in (Sharding.COLUMN, Sharding.ROW, Sharding.VOCAB) for sharding in said.values())
    for child_name, child in module.children():
        if cuts and isinstance(child, Dropout | Softmax) and said[child] is not Sharding.REPLICATED:
            raise LayoutError(
                f"layer {_join(name, child_name)!r} is a {type(child).__name__} beside layers that are cut, in a "
                "module whose forward nobody knows; say Sharding.REPLICATED of it if what comes to it is whole, or "
                "else put it into a Sequential with the layers before it"
            )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _last_layer(module: Module) -> Module:
    """Return what a sequence ends with, at last."""
    while type(module) is Sequential and module.layers:
        module = module.layers[-1]
    return module
