"""Linear layers, embeddings and convolutions sharded by outputs, inputs or entries.

                 column                                   row
    x full -> [ W0 | W1 ] -> y0 | y1   -> relu ->  y0 | y1 -> [ V0 ] -> sum -> z full
                                                              [ V1 ]
    forward    nothing                              one all-reduce
    backward   one all-reduce, of x's gradient      nothing

So a pair costs one all-reduce in each direction (Shoeybi et al., "Megatron-LM", 2019), and layers
between the two compute the rank's features alone. In half precision the parts are summed before
they are rounded. A convolution's features are channels. With groups only its outputs can be
sharded, and only between groups: a rank then needs the inputs of its own groups alone, and a
depthwise convolution of sharded channels needs no exchange at all.

    vocabulary sharded   index 5   rank 0 has entries 0..3: zeros     \\
                                   rank 1 has entries 4..7: its row 1  >  sum -> the full row
    features sharded     every rank looks up its part of the row; no exchange

A layer sharded by outputs is the layer itself with a part of its weight, and an exchange before it
(`product_input`).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.precision import is_low
from nnmpi.comm.group import Group
from nnmpi.nn.conv import Conv2d
from nnmpi.nn.linear import Embedding, Linear, TiedLinear
from nnmpi.nn.lora import LoRA
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.collectives import copy, sum_over_ranks
from nnmpi.ops.conv.convolution import conv2d
from nnmpi.ops.embedding import TableRows, embedding
from nnmpi.ops.linear import linear_part
from nnmpi.parallel.sharded.context import LayerContext, Placed, Redistribution, divided, part_of
from nnmpi.tensor.dtypes import product_dtype
from nnmpi.tensor.placement import REPLICATED, Placement, features
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import OF_RANKS, Traits


class RowLinear(Linear):
    """Row-parallel linear layer: (..., own inputs) -> full (..., outputs), with a full bias."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        x = self.product_input(x)
        full = sum_over_ranks(linear_part(x, self.weight), self.group, self.bias)
        return full.astype(product_dtype("linear", x, self.weight))


class RowLoRA(LoRA):
    """A row-parallel linear layer with an adapter: (..., own inputs) -> full (..., outputs)."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b and the adapter's addition, in one sum over the ranks."""
        x = self.product_input(x)
        part = linear_part(x, self.weight) + self.addition(x, linear_part)
        full = sum_over_ranks(part, self.group, self.bias)
        return full.astype(product_dtype("linear", x, self.weight))


class RowConv2d(Conv2d):
    """A convolution sharded by input channels: (batch, h, w, own inputs) -> full images."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        images, weight, _, *settings = self.operands(x)
        y = conv2d(images, weight, None, *settings)
        full = y.astype("float32") if is_low(y.dtype) else y
        return sum_over_ranks(full, self.group, self.bias).astype(y.dtype)


class LookUp(TableRows):
    """table[indices - first], zeros for indices outside of this part of the table."""

    __slots__ = ("first", "hits")

    traits = Traits(
        onnx=OF_RANKS,
        tested_in="tests/parallel/sharded/test_layers.py",
    )
    varies = (*TableRows.varies, "hits")

    captured = False  # how many indices are of this part is known to the device alone

    def __init__(self, first: int) -> None:
        self.first = first

    def forward(self, table: Array, indices: Array) -> Array:
        xp = namespace(table)
        offsets = indices.reshape(-1).astype(xp.int64) - self.first
        self.hits = xp.flatnonzero((offsets >= 0) & (offsets < len(table)))
        rows = xp.zeros((indices.size, table.shape[1]), table.dtype)
        rows[self.hits] = super().forward(table, offsets[self.hits])
        return rows.reshape(*indices.shape, table.shape[1])

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return super().backward(grad.reshape(-1, grad.shape[-1])[self.hits])


class RowEmbedding(Embedding):
    """Some entries of an embedding: integers (...) on every rank -> full (..., features)."""

    group: Group

    def forward(self, indices: Any) -> Tensor:
        """Return the rows of the indices. Same errors as `ops.embedding`."""
        weight, region = self.weight, self.weight.region
        assert region is not None
        rows = embedding(weight, indices, self.num_embeddings, lambda: LookUp(region.start))
        return sum_over_ranks(rows, self.group).astype(product_dtype("embedding", self.weight))


class Product(NamedTuple):
    """The shardings of a kind of layer.

    Attributes:
        inputs, outputs: the axes of its weight.
        by_outputs, by_inputs: the shardings of these axes.
        row: the layer that sums over its sharded inputs.
        other: shardings of neither axis.
    """

    inputs: int
    outputs: int
    by_outputs: tuple[Sharding, ...]
    by_inputs: tuple[Sharding, ...] = ()
    row: type[Module] = Module
    other: tuple[Sharding, ...] = (Sharding.REPLICATED,)


COLUMN, ROW, ROWS, VOCAB = Sharding.COLUMN, Sharding.ROW, Sharding.ROWS, Sharding.VOCAB
PRODUCTS: Mapping[type[Module], Product] = {
    Linear: Product(0, 1, (COLUMN, VOCAB), (ROW,), RowLinear),
    LoRA: Product(0, 1, (COLUMN, VOCAB), (ROW,), RowLoRA),
    TiedLinear: Product(1, 0, (VOCAB,)),  # its table is sharded as the embedding's
    Embedding: Product(0, 1, (COLUMN,), (VOCAB,), RowEmbedding),
    Conv2d: Product(2, 3, (COLUMN,), (ROW,), RowConv2d, (ROWS, Sharding.REPLICATED)),
}


def place_product(layer: Any, context: LayerContext) -> Placed:
    """Return the layer in the table's sharding."""
    kind, groups, sharding = PRODUCTS[type(layer)], getattr(layer, "groups", 1), context.sharding
    inputs, outputs = layer.weight.shape[kind.inputs] * groups, layer.weight.shape[kind.outputs]
    if isinstance(layer, Embedding) and not context.placement.is_replicated:
        raise context.error(
            "is an Embedding, but its indices are sharded over ranks; put it before the layers"
            " that are cut"
        )
    if sharding in kind.by_outputs:
        placed = (
            divided(outputs, context.units) if groups == 1 else features(groups, outputs // groups)
        )
        parts: dict[str, Any] = {"weight": context.sharder.cut(layer.weight, placed, kind.outputs)}
        parts["bias"] = context.sharder.cut(getattr(layer, "bias", None), placed, 0)
        if isinstance(layer, LoRA):
            parts |= _adapter("lora_b", layer, context, placed, 1)
        if groups > 1:  # all outputs of a group belong to one rank
            parts["groups"] = placed.width(context.group.size, context.group.rank) // placed.unit
        return part_of(layer, product_input=_input_of(groups, context, inputs), **parts), placed
    if sharding in kind.by_inputs:
        if groups > 1:
            raise context.error(
                f"has {groups} groups, whose input channels cannot be summed over ranks; choose"
                " Sharding.COLUMN"
            )
        ready = not context.placement.is_replicated and not context.placement.has_rows
        cut = context.placement if ready else divided(inputs, context.units)
        parts = {"weight": context.sharder.cut(layer.weight, cut.resolve(inputs), kind.inputs)}
        if isinstance(layer, LoRA):
            parts |= _adapter("lora_a", layer, context, cut.resolve(inputs), 0)
            on_parts = replace(context, placement=cut.resolve(inputs)).on_parts
            parts["dropout"], _ = on_parts(layer.dropout)
        return (
            part_of(
                layer,
                kind.row,
                product_input=context.to_parts(cut),
                group=context.group,
                **parts,
            ),
            REPLICATED,
        )
    if sharding is None or sharding is Sharding.REPLICATED:
        return context.on_replicated(layer, inputs)
    *choices, last = [item.name for item in (*kind.by_outputs, *kind.by_inputs, *kind.other)]
    raise context.error(
        f"has type {type(layer).__name__}, which Sharding.{sharding.name} does not cut; choose"
        f" Sharding.{', '.join(choices)} or {last}"
    )


def _adapter(
    name: str, layer: LoRA, context: LayerContext, placement: Placement, axis: int
) -> dict[str, Any]:
    """Return the factor of that name, cut with its layer, and what sums the other's gradients."""
    part = context.sharder.cut(getattr(layer, name), placement, axis)
    return {name: part, "whole": partial(copy, group=context.group)}


def _input_of(groups: int, context: LayerContext, inputs: int) -> Redistribution:
    """Return the exchange that gives a rank the inputs of its outputs."""
    if groups == 1:
        return context.gather_for_sharded_weights(inputs)
    if groups < context.group.size:
        raise context.error(
            f"has {groups} groups, too few to give each of {context.group.size} ranks one; choose"
            " Sharding.ROWS or REPLICATED"
        )
    return context.to_parts(features(groups, inputs // groups))
