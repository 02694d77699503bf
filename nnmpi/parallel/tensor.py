"""Tensor parallelism: the ranks of a group shard a model's layers, as a table defines.

    table {"1": COLUMN, "3": ROW}        Sequential(Flatten, Linear, ReLU, Linear)

        x replicated -> Flatten -> Linear, sharded -> features sharded -> ReLU -> RowLinear ->
        replicated

`shard` walks through the model in the order of computation and tracks the activation's placement
(see `tensor.placement`). A layer's class says what it needs of its input (`nn.Reach`), or its type
has a rule, a function of the layer and its `LayerContext`, in the module of its sharded layers. It
returns the layer's replacement and the result's placement. If a layer needs the activation in
another placement, an exchange comes before it:

    Sequential    layer by layer, each from the placement of the one before it
    Residual      both branches; if their placements differ, both are gathered before the addition
    Stash, Pop    the stashed value and its addend must have the same placement
    Branches      each rank computes some of the branches (see `sharded.branches`)
    a layer       its rule
    other         a custom module with an unknown forward: replicated input and result, inside as
                  the table says. There the tensors carry their placement (see `tensor.placement`),
                  and an operation without support for a sharded operand refuses it

All exchanges are in the modules that replace layers, so the model can be cut into pipeline stages
anywhere afterwards. The exchange of a transformer's block is put after the layer before it, so that
a pipeline can cut inside the block. Parameters keep their names, and the values that the full model
would draw; a shard has its `region`. Replicated parameters and their gradients have the same bits
on every rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from nnmpi.backend.array import Shape
from nnmpi.base.errors import LayoutError, UsageError
from nnmpi.comm.group import Group
from nnmpi.nn.activation import Dropout, Flatten
from nnmpi.nn.container import Branches, Pop, Residual, Sequential, Stash
from nnmpi.nn.conv import AvgPool2d, Conv2d, GlobalAvgPool2d, MaxPool2d
from nnmpi.nn.module import Module, own_reach
from nnmpi.nn.norm import BatchNorm, LayerNorm
from nnmpi.nn.recurrent import LSTM
from nnmpi.nn.sharding import Reach, Sharding, ShardingTable, Units, find
from nnmpi.ops.collectives import TensorParallelGroup
from nnmpi.parallel.sharded.branches import place_branches
from nnmpi.parallel.sharded.context import (
    LayerContext,
    ParameterSharder,
    Placed,
    Redistributed,
    ShardedChild,
    divided,
)
from nnmpi.parallel.sharded.conv import place_global_pool, place_pool, place_rows_conv
from nnmpi.parallel.sharded.elementwise import (
    place_batch_norm,
    place_dropout,
    place_elementwise,
    place_flatten,
    place_layer_norm,
    place_per_channel,
    place_whole,
)
from nnmpi.parallel.sharded.linear import PRODUCTS, place_product
from nnmpi.tensor.placement import REPLICATED, Placement, features
from nnmpi.tensor.sharded import gather_shards

LayerRule: TypeAlias = Callable[[Any, LayerContext], Placed]


def place_lstm(layer: LSTM, context: LayerContext) -> Placed:
    """Return the layer on full sequences: each step needs all of h."""
    if context.sharding not in (None, Sharding.REPLICATED):
        raise context.error(
            "is an LSTM, each step of which needs all of h; choose Sharding.REPLICATED"
        )
    return context.on_replicated(layer, layer.layers[0].weight.shape[0])


def place_conv(layer: Conv2d, context: LayerContext) -> Placed:
    """Return the convolution, sharded by rows or channels."""
    return (place_rows_conv if context.sharding is Sharding.ROWS else place_product)(layer, context)


# Types with a rule of their own. Other layers' classes say what they need of their input: `Reach`.
RULES: Mapping[type[Module], LayerRule] = {
    **dict.fromkeys(PRODUCTS, place_product),
    AvgPool2d: place_pool,
    BatchNorm: place_batch_norm,
    Branches: place_branches,
    Conv2d: place_conv,
    Dropout: place_dropout,
    Flatten: place_flatten,
    GlobalAvgPool2d: place_global_pool,
    LSTM: place_lstm,
    LayerNorm: place_layer_norm,
    MaxPool2d: place_pool,
}
RULES_BY_REACH: Mapping[Reach, LayerRule] = {
    Reach.ELEMENT: place_elementwise,
    Reach.CHANNEL: place_per_channel,
    Reach.ALL: place_whole,
}


def rule_of(layer: Module) -> LayerRule | None:
    """Return what places a layer; None for a custom module, whose forward is unknown."""
    rule, reach = RULES.get(type(layer)), own_reach(layer)
    return rule if rule is not None or reach is None else RULES_BY_REACH[reach]


def place(layer: Module, context: LayerContext) -> Placed:
    """Return the replacement of a layer with a rule, and its result's placement."""
    if context.sharding is Sharding.REPLICATED and own_reach(layer) is not None:
        return place_whole(layer, context)
    rule = rule_of(layer)
    assert rule is not None
    return rule(layer, context)


def assumed_placement(layer: Module, sharding: Sharding, units: Units | None) -> Placement:
    """Return a layer's input placement in a custom module, as its sharding implies.

    With ROW the input of a product is sharded. With COLUMN the result is, and so is the input of a
    layer that computes each of its channels by itself.
    """
    if type(layer) in PRODUCTS and sharding is Sharding.ROW:
        inputs = layer.weight.shape[PRODUCTS[type(layer)].inputs]
        return divided(inputs * getattr(layer, "groups", 1), units)
    count = layer.input_features()
    follows = own_reach(layer) in (Reach.ELEMENT, Reach.CHANNEL)
    if sharding is Sharding.COLUMN and follows and count is not None:
        return features(count)
    return REPLICATED


CONTAINERS = (Sequential, Residual)  # modules with a known forward


def shard(
    model: Module,
    group: Group,
    table: ShardingTable | None = None,
    sample: Shape | None = None,
    keep_classes_sharded: bool = False,
) -> Placement:
    """Replace a model's layers by this rank's shards; return the placement of its output.

    Not collective; initialize the model afterwards. A group of one rank leaves the model as it is.

    Args:
        model: not initialized; any tree of modules. Layers in a `Sequential` or `Residual` get
            their input in the placement they need. In a custom module, whose forward is unknown,
            each layer does exactly what the table says: COLUMN takes a full input and returns this
            rank's features, ROW takes features and returns a full result.
        group: the ranks that shard each layer.
        table: full names of modules, or patterns -> `Sharding`; by default the model's own, or if
            it has none, those of its modules.
        sample: the shape of one sample, without the batch; needed for Sharding.ROWS.
        keep_classes_sharded: whether the result of a last layer with Sharding.VOCAB stays sharded,
            for a loss that supports it (see `sharded.cross_entropy`); otherwise it is replicated.

    Raises:
        UsageError: when the model, or a part of it, has values already.
        LayoutError: for a table entry that fits no module, and layers that cannot be sharded as the
            table says.

    Example:
        >>> def program(group):
        ...     model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        ...     table = {"0": nn.Sharding.COLUMN, "2": nn.Sharding.ROW}
        ...     nnmpi.parallel.shard(model, group, table)
        ...     model.initialize(seed=0)
        ...     return model.layers[0].weight.shape, model(np.ones((5, 4), "float32")).shape
        >>> nnmpi.simulate(program, 2)
        [((4, 3), (5, 2)), ((4, 3), (5, 2))]
    """
    refuse_values(model)
    table = _own_table(model) if table is None else table
    _check_table(model, table)
    if group.size == 1:
        return REPLICATED
    if not table:
        raise LayoutError(
            f"the model has no table of shardings for {group.size} ranks; give it one, such as"
            ' model.sharding = {"0": nn.Sharding.COLUMN}, or leave tp at 1'
        )
    sharder = ParameterSharder(group)
    placement = ModelWalk(sharder, table).model(model, sample, keep_classes_sharded)
    sharder.check(model)
    return placement


def refuse_values(model: Module) -> None:
    """Refuse a model whose values the parts of ranks would draw anew.

    Raises:
        UsageError: when any of its parameters has values.
    """
    if any(hasattr(parameter, "data") for _, parameter in model.named_weights()):
        raise UsageError(
            "the model has its values already; arrange or shard it first, then call"
            " model.initialize(), and give it kept values by"
            " worker.state()[0].scatter(values.__getitem__)"
        )


def _own_table(model: Module, name: str = "") -> ShardingTable:
    if model.sharding:
        return {_join(name, pattern): sharding for pattern, sharding in model.sharding.items()}
    tables = [_own_table(child, _join(name, child_name)) for child_name, child in model.children()]
    return {pattern: sharding for table in tables for pattern, sharding in table.items()}


def _check_table(model: Module, table: ShardingTable) -> None:
    """Refuse entries that fit no module, mostly misspelled names, and a model of a single layer."""
    names = [name for name, _ in model.named_modules() if name]
    if table and not names:
        raise LayoutError(
            "the model is a single layer; put it into a Sequential, in which it can be replaced"
        )
    for pattern, sharding in table.items():
        if not isinstance(sharding, Sharding):
            raise LayoutError(
                f"the table has {sharding!r} for {pattern!r}; use a Sharding, such as"
                " Sharding.COLUMN"
            )
        if not any(find({pattern: sharding}, name) for name in names):
            raise LayoutError(
                f"the table's {pattern!r} names no module; there are {', '.join(map(repr, names))}"
            )


@dataclass(frozen=True)
class ActivationLayout:
    """An activation's placement between two modules, and the full shape of a sample."""

    placement: Placement
    shape: Shape | None


@dataclass
class ModelWalk:
    """Walks through a model in the order of computation, and replaces its layers.

    Args:
        sharder: shards parameters for this rank.
        table: full names, or patterns -> `Sharding`.
    """

    sharder: ParameterSharder
    table: ShardingTable
    # The table's sharding of a module, by its id. The modules are kept alive, so that no other
    # object gets one of their ids.
    shardings: dict[int, Sharding] = field(default_factory=dict)
    modules: list[Module] = field(default_factory=list)
    # A layer's replacement, by its id and the placement of its input.
    replacements: dict[tuple[int, Placement], Placed] = field(default_factory=dict)

    def model(self, model: Module, sample: Shape | None, keep_classes_sharded: bool) -> Placement:
        """Shard the model, and return the placement of its result.

        Args:
            model, sample, keep_classes_sharded: see `shard`.
        """
        for name, module in model.named_modules():
            self.modules.append(module)
            match = find(self.table, name)
            if match is not None:  # a module used several times may be found by any of its names
                self.shardings.setdefault(id(module), match[1])
        self._check_branches(model)
        last = model
        while type(last) is Sequential and last.layers:
            last = last.layers[-1]
        module, end = self.replace(
            model, "", ActivationLayout(REPLICATED, sample and tuple(sample))
        )
        if not (keep_classes_sharded and self._sharding(last) is Sharding.VOCAB):
            module, end = self._replicate(module, end)
        if module is not model:
            raise LayoutError(
                "the model itself would have to be replaced; put it into a Sequential"
            )
        return end.placement

    def replace(
        self, module: Module, name: str, layout: ActivationLayout
    ) -> tuple[Module, ActivationLayout]:
        """Return a module's replacement, and the layout of its result.

        Args:
            module: a layer, a container or a custom module.
            name: its full name in the model.
            layout: of its input.
        """
        if type(module) is Sequential:
            return module, self._sequence(module, name, layout)
        if type(module) is Residual:
            return self._residual(module, name, layout)
        if self._has_rule(module):
            placed, placement = self._layer(module, name, layout)
            shape = None if layout.shape is None else module.shape_after(layout.shape)
            return placed, ActivationLayout(placement, shape)
        is_open = self._shard_inside(module, name)
        before = None if layout.placement.is_replicated else self._gather(layout)
        # the result of a custom model as a whole stays as it is: the loss refuses a sharded one
        after = (
            partial(gather_shards, group=TensorParallelGroup(self.sharder.group))
            if is_open and name
            else None
        )
        links = _links(module)
        if links and before is None and after is not None:
            # a chain opens the module, so its gather goes to the ends of the module's own links
            for *_, names in links:
                module.set_child(names[-1], Redistributed(module.get(names[-1]), after=after))
            after = None
        result = module if before is after is None else Redistributed(module, before, after)
        return result, ActivationLayout(REPLICATED, None)

    def _layer(
        self, module: Module, name: str, layout: ActivationLayout, units: Units | None = None
    ) -> Placed:
        """Return a layer's replacement, the same one for all its uses with one input placement."""
        context = LayerContext(
            name, layout.placement, layout.shape, self._sharding(module), self.sharder, units
        )
        placed = place(module, context)
        if any(item is module for _, item in placed[0].named_modules()):
            return placed
        if module._forward_hooks:
            raise context.error(
                "has a forward hook, but each rank gets a part of the layer; register the hook at"
                f" arrangement.model.get({name!r}) once it is arranged"
            )
        vars(module)["_part"] = name  # which refuses to write to the module from now on
        elsewhere = [
            key for key in self.replacements if key[0] == id(module) and key[1] != layout.placement
        ]
        if elsewhere and isinstance(module, BatchNorm | Dropout):
            raise context.error(
                "is used in several places of the model, where its inputs are sharded in different"
                " ways; make a layer for each place"
            )
        return self.replacements.setdefault((id(module), layout.placement), placed)

    def _sequence(
        self, sequence: Sequential, name: str, layout: ActivationLayout
    ) -> ActivationLayout:
        stashed: dict[str, ActivationLayout] = {}
        for i, layer in enumerate(list(sequence.layers)):
            inside = _join(name, str(i))
            if isinstance(layer, Stash):
                stashed[layer.name] = layout
            elif isinstance(layer, Pop):
                layout = self._join_stashed(layer, inside, layout, stashed)
            else:
                before = sequence.layers[i - 1] if i and _links(layer) else Stash("")
                if not isinstance(before, Stash | Pop):
                    sequence.layers[i - 1], layout = self._replicate(before, layout)
                sequence.layers[i], layout = self.replace(layer, inside, layout)
        return layout

    def _join_stashed(
        self, pop: Pop, name: str, layout: ActivationLayout, stashed: dict[str, ActivationLayout]
    ) -> ActivationLayout:
        """Shard the shortcut of a Pop, and refuse inputs in different placements."""
        if pop.name not in stashed:
            return layout  # the sequence refuses it when it runs
        pop.shortcut, around = self._shortcut(pop, name, stashed.pop(pop.name))
        if around.placement != layout.placement:
            raise LayoutError(
                f"layer {name!r} adds the stashed {pop.name!r}, but the two are sharded in"
                " different ways; let the table replicate both, or use nn.Residual"
            )
        return layout

    def _residual(
        self, block: Residual, name: str, layout: ActivationLayout
    ) -> tuple[Module, ActivationLayout]:
        block.body, body = self.replace(block.body, _join(name, "body"), layout)
        block.shortcut, around = self._shortcut(block, name, layout)
        if body.placement != around.placement:
            block.body, body = self._replicate(block.body, body)
            block.shortcut, _ = self._replicate(block.shortcut, around)
        return block, body

    def _shortcut(
        self, block: Pop | Residual, name: str, layout: ActivationLayout
    ) -> tuple[Module, ActivationLayout]:
        shortcut = Sequential() if block.shortcut is None else block.shortcut
        return self.replace(shortcut, _join(name, "shortcut"), layout)

    def _shard_inside(self, module: Module, name: str) -> bool:
        """Shard a custom module's layers that the table names; return whether there are any.

        Their results carry their placement, and operations on them support it or refuse it.
        """
        is_sharded = False
        for child_name, child in list(module.children()):
            inside, sharding = _join(name, child_name), self._sharding(child)
            if self._has_rule(child) and sharding is not None:
                units = module.units.get(child_name)
                units = units if units is not None and units.sharding is sharding else None
                expects = assumed_placement(child, sharding, units)
                placed, gives = self._layer(child, inside, ActivationLayout(expects, None), units)
            elif type(child) in CONTAINERS and any(
                self._sharding(item) for _, item in child.named_modules()
            ):
                expects = gives = REPLICATED
                placed, _ = self._replicate(
                    *self.replace(child, inside, ActivationLayout(expects, None))
                )
            else:
                is_sharded = self._shard_inside(child, inside) or is_sharded
                continue
            module.set_child(
                child_name, ShardedChild(placed, inside, expects, gives, self.sharder.group)
            )
            is_sharded = True
        return is_sharded

    def _replicate(
        self, module: Module, layout: ActivationLayout
    ) -> tuple[Module, ActivationLayout]:
        """Return a module with an exchange that replicates its result, which has this layout."""
        if layout.placement.is_replicated:
            return module, layout
        if (
            type(module) is Sequential
            and module.layers
            and not isinstance(module.layers[-1], Stash | Pop)
        ):
            module.layers[-1], end = self._replicate(module.layers[-1], layout)
            return module, end
        return Redistributed(module, after=self._gather(layout)), ActivationLayout(
            REPLICATED, layout.shape
        )

    def _gather(self, layout: ActivationLayout) -> Callable[[Any], Any]:
        return LayerContext("", layout.placement, None, None, self.sharder).to_replicated()

    def _has_rule(self, module: Module) -> bool:
        """Return whether a rule replaces a module; branches have one if the table names them."""
        return rule_of(module) is not None and (
            type(module) is not Branches or self._sharding(module) is not None
        )

    def _check_branches(self, model: Module) -> None:
        """Refuse BRANCHES for other modules, and shardings of layers inside of a branch."""
        for name, module in model.named_modules():
            if self._sharding(module) is not Sharding.BRANCHES:
                continue
            if type(module) is not Branches:
                raise LayoutError(
                    f"layer {name!r} has no branches; Sharding.BRANCHES is for nn.Branches"
                )
            for inner_name, inner in module.named_modules(name):
                if inner is not module and self._sharding(inner) is not None:
                    raise LayoutError(
                        f"layer {inner_name!r} is in a branch, which is whole on one rank; give"
                        f" the table either Sharding.BRANCHES for {name!r}, or shardings of the"
                        " layers in it"
                    )

    def _sharding(self, module: Module) -> Sharding | None:
        return self.shardings.get(id(module))


def _links(module: Module) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return the links of a module that a chain opens."""
    return module.links if "links" in vars(type(module)) else ()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
